"""Single values of quantization configs, checked: a wrong type is an error that names the value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantload.errors import FormatMismatch, UnsupportedVariant

WHERE = "in the quantization config of"


def read_int(
    values: Mapping[str, Any], key: str, allowed: tuple[int, ...], checkpoint_name: str
) -> int:
    """Return an integer of a config that must be one of a few.

    Raises:
        FormatMismatch: It is missing or no integer.
        UnsupportedVariant: It is another one.
    """
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_value(key, value, "an integer", checkpoint_name)
    if value not in allowed:
        raise UnsupportedVariant(
            f"`{key}` is `{value}`, expected one of {', '.join(map(str, allowed))}, {WHERE} "
            f"`{checkpoint_name}`"
        )
    return value


def read_group_size(values: Mapping[str, Any], key: str, checkpoint_name: str) -> int:
    """Return a group size: -1 for whole rows, or a positive number.

    Raises:
        FormatMismatch: It is missing or something else.
    """
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not (value == -1 or value > 0):
        raise wrong_value(key, value, "-1 or a positive integer", checkpoint_name)
    return value


def read_bool(values: Mapping[str, Any], key: str, default: bool, checkpoint_name: str) -> bool:
    """Return a flag of a config; `default` if it is missing or null.

    Raises:
        FormatMismatch: It is neither true nor false.
    """
    value = values.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise wrong_value(key, value, "true or false", checkpoint_name)
    return value


def wrong_value(key: str, value: object, expected: str, checkpoint_name: str) -> FormatMismatch:
    """Return the error for a value of a config that makes no sense, or is missing."""
    found = "is missing" if value is None else f"is `{value!r}`"
    return FormatMismatch(f"`{key}` {found}, expected {expected}, {WHERE} `{checkpoint_name}`")
