"""Token ids that a baseline is asked to keep: what is none is refused, whoever gave it."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

from quantload.accuracy.baseline import Tokens
from quantload.accuracy.statistics import ids_digest
from quantload.errors import ConfigError


def tokens_of(sequences: Iterable[Iterable[int]]) -> Tokens | None:
    """Return what a baseline keeps of token sequences; empty ones are left out.

    Args:
        sequences: Lists of token ids; tensors and arrays of integers too.

    Returns:
        None if there are no sequences: then only weights are measured.

    Raises:
        ConfigError: They are not lists of token ids, or all of them are empty.
    """
    given = [_ids(number, row) for number, row in enumerate(_iterated(sequences))]
    kept = tuple(ids for ids in given if ids)
    if given and not kept:
        raise ConfigError("there are no tokens in what was given", hint="every sequence is empty")
    if not kept:
        return None
    return Tokens(sha256=ids_digest(kept), count=sum(map(len, kept)), ids=kept)


def _iterated(sequences: object) -> Sequence[object]:
    if isinstance(sequences, (str, bytes, dict)) or not isinstance(sequences, Iterable):
        raise ConfigError(f"tokens are `{_shown(sequences)}`, expected a list of lists of ids")
    return list(sequences)


def _ids(number: int, row: object) -> tuple[int, ...]:
    not_ids = f"sequence {number} is `{_shown(row)}`, expected a list of token ids"
    if isinstance(row, (str, bytes, dict)) or not isinstance(row, Iterable):
        raise ConfigError(not_ids)
    try:
        found = list(row)
    except TypeError as error:  # a tensor without dimensions
        raise ConfigError(not_ids) from error
    return tuple(_id(number, one) for one in found)


def _id(number: int, value: object) -> int:
    """Return an integer of whatever type; a float is none, even one without a fraction."""
    try:
        found = -1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        found = -1
    if found < 0:
        raise ConfigError(
            f"sequence {number} holds `{_shown(value)}`, expected token ids: integers of 0 or more"
        )
    return found


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


__all__ = ["tokens_of"]
