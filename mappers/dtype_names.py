"""Names of dtypes in a config.json: "float16", and what some tools write, "torch.float16"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DTYPE_KEYS = ("dtype", "torch_dtype")
_PREFIX = "torch."


def plain_name(name: object) -> object:
    """Return the name of a dtype without `torch.`; whatever else stands there as it is."""
    return name.removeprefix(_PREFIX) if isinstance(name, str) else name


def without_prefixes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with plain names of dtypes, in its sections too."""
    return {
        key: plain_name(value)
        if key in DTYPE_KEYS
        else without_prefixes(value)
        if isinstance(value, Mapping)
        else value
        for key, value in config.items()
    }


def prefixed_names(config: Mapping[str, Any]) -> list[str]:
    """Return the names of dtypes in a config and its sections that begin with `torch.`."""
    found = []
    for key, value in config.items():
        if isinstance(value, Mapping):
            found += prefixed_names(value)
        elif key in DTYPE_KEYS and plain_name(value) != value:
            found.append(str(value))
    return found


__all__ = ["DTYPE_KEYS", "plain_name", "prefixed_names", "without_prefixes"]
