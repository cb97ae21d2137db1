"""The tokenizer of a checkpoint, and generation through transformers where it is not ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from quantload.errors import ConfigError, ModelError


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder.

    Raises:
        ModelError: There is none, or transformers cannot read it.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever transformers stumbles over
        raise ModelError(
            f"no tokenizer that transformers can read in `{folder}`: "
            f"{type(error).__name__}: {error}",
            hint="copy tokenizer.json and tokenizer_config.json beside the weights",
        ) from error
    assert isinstance(tokenizer, PreTrainedTokenizerBase), "AutoTokenizer gives a tokenizer"
    return tokenizer


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str, *, chat: bool = False) -> list[int]:
    """Return the tokens of a prompt.

    Args:
        tokenizer: Of the model.
        prompt: Text to continue; with `chat`, the message of a user.
        chat: Put the prompt into the tokenizer's chat template.

    Raises:
        ConfigError: The prompt is no text, as bytes of a command line that are no UTF-8.
        ModelError: `chat` is asked for and the tokenizer has no chat template.
    """
    half = next((letter for letter in prompt if "\ud800" <= letter <= "\udfff"), None)
    if half is not None:  # tokenizers fail with a message about types
        raise ConfigError(f"a prompt is no text: it has the half character `U+{ord(half):04X}`")
    if chat and not tokenizer.chat_template:
        raise ModelError("the tokenizer has no chat template", hint="leave `--chat` away")
    if chat:
        messages = [{"role": "user", "content": prompt}]
        prompt = str(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        )
    found: list[int] = tokenizer(prompt, add_special_tokens=not chat)["input_ids"]
    return found


def ids_by_transformers(
    model: PreTrainedModel,
    prompt: Sequence[int],
    *,
    seed: int | None = None,
    **settings: Any,  # noqa: ANN401 - passed on to transformers
) -> list[int]:
    """Return the new tokens that transformers' own `generate` makes, for models of other kinds.

    Args:
        model: Any transformers model that generates.
        prompt: Token ids.
        seed: Of draws; of all random numbers of torch.
        settings: Arguments of `generate`, for example `max_new_tokens=64`.
    """
    if seed is not None:
        torch.manual_seed(seed)
    ids = torch.tensor([list(prompt)], device=model.device)
    with torch.inference_mode():
        made = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)  # type: ignore[operator]
    start = 1 if model.config.is_encoder_decoder else ids.shape[1]  # after the decoder's first
    new: list[int] = made[0, start:].tolist()
    return new
