"""Statistics of the inputs of layers, for `convert --stats`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from quantload.accuracy.statistics import (
    InputStatisticsReport,
    collect_statistics,
    write_statistics,
)
from quantload.accuracy.statistics_file import check_free
from quantload.api_load import load_model, parse_device
from quantload.api_plan import as_source
from quantload.arguments import (
    as_path,
    as_sequences,
    check_counts,
    check_flags,
    check_progress,
)
from quantload.errors import ConfigError
from quantload.loader.model_dtype import own_dtype, parse_dtype
from quantload.loader.source import Source
from quantload.progress import Progress

_GENERATED_LENGTH = 256  # tokens of a sequence that the model makes up itself


def stats(  # noqa: PLR0913 - a keyword for each choice of the user
    source: str | Path | Source,
    output: str | Path,
    *,
    sequences: Sequence[Sequence[int]] | None = None,
    max_tokens: int = 4096,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str = torch.float32,
    batch_tokens: int = 2048,
    overwrite: bool = False,
    progress: Progress | None = None,
    trust_remote_code: bool = False,
) -> InputStatisticsReport:
    """Run tokens through a model and write what enters its layers to a file for `convert --stats`.

    The model is in memory block by block, see `accuracy/streaming.py`; one that cannot be run so is
    loaded as a whole, and the report says why.

    Args:
        source: A folder, a GGUF file, a hub id, or what `inspect` returned; quantized or not.
        output: The file, see `accuracy/statistics.py`; it appears only when it is complete.
        sequences: Token ids, a sequence each; None lets the model make them up, for which it is
            loaded as a whole.
        max_tokens: Tokens of the sequences that are run, at most; or that are made up.
        device: Where the model runs; None takes CUDA where there is one.
        dtype: dtype in which it runs; "auto" takes the checkpoint's own.
        batch_tokens: Tokens that go through a block at a time, at most (or one sequence).
        overwrite: Replace a file that is there.
        progress: Draws progress; silent by default.
        trust_remote_code: Run modelling code that comes with the checkpoint.

    Raises:
        OutputError: The place is taken, or cannot be written.
        ConfigError: There are no tokens, or they are not of this model.
        QuantloadError: As `load`.
    """
    check_flags(overwrite=overwrite, trust_remote_code=trust_remote_code)
    check_counts(1, max_tokens=max_tokens, batch_tokens=batch_tokens)
    check_progress(progress)
    file = as_path("output", output, expected="a new file")
    check_free(file, overwrite=overwrite)
    if sequences is not None:
        sequences = as_sequences("sequences", sequences)
    place, kind = parse_device(device), parse_dtype(dtype)
    opened = as_source("source", source)
    kind = kind or own_dtype(opened)
    if sequences is None:
        sequences = generated_tokens(
            opened, max_tokens, device=place, dtype=kind, trust_remote_code=trust_remote_code
        )
    report = collect_statistics(
        opened,
        cut_tokens(sequences, max_tokens),
        device=place,
        dtype=kind,
        batch_tokens=batch_tokens,
        progress=progress,
        trust_remote_code=trust_remote_code,
    )
    return write_statistics(report, file, overwrite=overwrite)


def cut_tokens(sequences: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Return the first `max_tokens` tokens of some sequences."""
    kept = []
    for ids in sequences:
        if max_tokens > 0 and len(ids):
            kept.append(list(ids[:max_tokens]))
            max_tokens -= len(kept[-1])
    return kept


@torch.no_grad()
def generated_tokens(
    source: Source,
    count: int,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    trust_remote_code: bool = False,
) -> list[list[int]]:
    """Let a model make up tokens: sampled from all of its distribution, after its first token.

    Args:
        source: An open checkpoint of a causal language model.
        count: How many tokens, in sequences of 256.
        device: Where the model runs.
        dtype: dtype in which it runs.
        seed: Seed of the sampling; the generators of the caller stay as they are.
        trust_remote_code: Run modelling code that comes with the checkpoint.

    Raises:
        ConfigError: The model cannot generate, or names no first token.
    """
    model = load_model(source, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    config = model.config.get_text_config()
    known = (getattr(config, name, None) for name in ("bos_token_id", "eos_token_id"))
    first = next((token for token in known if isinstance(token, int)), None)
    if first is None or not model.can_generate() or model.config.is_encoder_decoder:
        raise ConfigError(
            f"`{type(model).__name__}` cannot make up tokens: it is no causal language model, or "
            "its config names no first token",
            hint="give tokens with `--data` or `--token-ids`",
        )
    longest = getattr(config, "max_position_embeddings", None) or _GENERATED_LENGTH
    length = max(2, min(_GENERATED_LENGTH, longest, count))
    start = torch.full((-(-count // length), 1), first, device=device)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        made = model.generate(  # type: ignore[operator]
            input_ids=start,
            attention_mask=torch.ones_like(start),
            max_new_tokens=length - 1,
            min_new_tokens=length - 1,
            **{"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0},
        )
    return [[int(i) for i in ids] for ids in made.tolist()]


__all__ = ["cut_tokens", "generated_tokens", "stats"]
