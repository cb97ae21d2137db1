"""Text in, text out: the tokenizer of a checkpoint, and generation through transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import TextStreamer

from quantload.errors import ModelError


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


class _CallbackStreamer(TextStreamer):
    """Hands finished pieces of text to a function instead of printing them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, emit: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._emit = emit

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._emit(text)


def generate_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    *,
    chat: bool = False,
    emit: Callable[[str], None] | None = None,
    **generation: Any,  # noqa: ANN401 - passed on to transformers
) -> str:
    """Continue a prompt.

    Args:
        model: Any transformers model that generates.
        tokenizer: Its tokenizer.
        prompt: Text to continue; with `chat`, the message of a user.
        chat: Put the prompt into the tokenizer's chat template.
        emit: Called with each finished piece of text.
        generation: Arguments of transformers' `generate`, for example `max_new_tokens=64`.

    Returns:
        The new text, without the prompt and without special tokens.

    Raises:
        ModelError: `chat` is asked for and the tokenizer has no chat template.
    """
    if chat and not tokenizer.chat_template:
        raise ModelError("the tokenizer has no chat template", hint="leave `--chat` away")
    if chat:
        messages = [{"role": "user", "content": prompt}]
        prompt = str(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        )
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=not chat).to(model.device)
    if tokenizer.pad_token_id is not None:
        generation.setdefault("pad_token_id", tokenizer.pad_token_id)
    streamer = _CallbackStreamer(tokenizer, emit) if emit is not None else None
    with torch.inference_mode():
        tokens = model.generate(**inputs, streamer=streamer, **generation)  # type: ignore[operator]
    new = tokens[0, inputs["input_ids"].shape[1] :]
    return str(tokenizer.decode(new, skip_special_tokens=True))
