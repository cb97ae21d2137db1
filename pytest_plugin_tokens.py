"""Tokens that a test gives a check of the pytest plugin: ids, a file of them, or a text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

Given: TypeAlias = str | Path | Sequence[Sequence[int]]
_TEXT_TOKENS = 2048


def is_text(tokens: Given) -> bool:
    """True for a file that takes a tokenizer to read."""
    return isinstance(tokens, (str, Path)) and Path(tokens).suffix != ".json"


def read_given(tokens: Given, ref: str | Path | None) -> Sequence[Sequence[int]]:
    """Return token ids as they were given, or read from a file; of `ref` the tokenizer is used."""
    if not isinstance(tokens, (str, Path)):
        return tokens
    from quantload.cli_tokens import read_sequences

    def tokenizer() -> Any:  # noqa: ANN401 - of transformers
        from quantload import api

        assert ref is not None, "text is read with a reference only"
        return api.load_tokenizer(ref)

    file = Path(tokens)
    if file.suffix == ".json":
        return read_sequences(tokenizer=tokenizer, max_tokens=1 << 60, token_ids=file)
    return read_sequences(tokenizer=tokenizer, max_tokens=_TEXT_TOKENS, data=file)


def check_given(file: Path, sequences: Sequence[Sequence[int]]) -> None:
    """Hold what a test gives to the tokens of a baseline.

    Raises:
        NotComparable: They are others.
        ConfigError: They are none.
    """
    from quantload.accuracy.baseline_file import read_baseline
    from quantload.accuracy.baseline_tokens import tokens_of
    from quantload.errors import NotComparable

    kept, given = read_baseline(file).tokens, tokens_of(sequences)
    if kept == given:
        return
    has = "no tokens" if kept is None else f"tokens of sha256 `{kept.sha256}`"
    gives = "none" if given is None else f"those of `{given.sha256}`"
    raise NotComparable(
        f"the baseline `{file}` has {has}, the test gives {gives}",
        hint="other tokens are a new baseline: write it again",
    )


__all__ = ["Given", "check_given", "is_text", "read_given"]
