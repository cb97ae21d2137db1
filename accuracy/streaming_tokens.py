"""Token sequences: whether a model can run them, and how they are put together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quantload.errors import ConfigError
from quantload.layers.meta_model import TransformersModel


def check_sequences(model: TransformersModel, sequences: Sequence[Sequence[int]]) -> None:
    """Refuse what a model cannot run.

    Raises:
        ConfigError: There are no tokens, an id is none of the vocabulary, or a sequence is longer
            than the positions that the config names.
    """
    if not any(sequences):
        raise ConfigError("no tokens", hint="give a text or token ids")
    embedding = model.get_input_embeddings()
    size = getattr(embedding, "num_embeddings", None)
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for number, ids in enumerate(sequences):
        wrong = [i for i in ids if i < 0 or (isinstance(size, int) and i >= size)]
        if wrong:
            raise ConfigError(
                f"token id `{wrong[0]}` in sequence {number}, expected 0 to {size} (excluded), the "
                f"vocabulary of `{type(model).__name__}`",
                hint="take token ids of this model's tokenizer",
            )
        if isinstance(longest, int) and len(ids) > longest > 0:
            raise ConfigError(
                f"sequence {number} has {len(ids)} tokens, expected at most {longest}, the "
                f"`max_position_embeddings` of `{type(model).__name__}`"
            )


def batches_of(sequences: Sequence[Sequence[int]], batch_tokens: int) -> list[Tensor]:
    """Put sequences of one length together.

    Returns:
        [B, T] int64 each, on the CPU, of at most `batch_tokens` tokens or one sequence.
    """
    by_length: dict[int, list[Sequence[int]]] = {}
    for ids in sequences:
        if len(ids):
            by_length.setdefault(len(ids), []).append(ids)
    batches = []
    for length, alike in by_length.items():
        each = max(1, batch_tokens // length)
        batches += [torch.tensor(alike[i : i + each]) for i in range(0, len(alike), each)]
    return batches


__all__ = ["batches_of", "check_sequences"]
