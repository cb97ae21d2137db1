"""optimum-quanto: what `quanto_qmap.json` and the config of transformers say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantload.errors import FormatMismatch, UnsupportedVariant, listed
from quantload.quant.grid import E4M3, E5M2, INT8, Grid, uint_grid

TYPES: dict[str, Grid] = {
    "qint8": INT8,
    "qint4": uint_grid(4),
    "qint2": uint_grid(2),
    "qfloat8": E4M3,
    "qfloat8_e4m3fn": E4M3,
    "qfloat8_e5m2": E5M2,
}
SKIPPED = "modules_to_not_convert"
_OF_TRANSFORMERS = {"int8": "qint8", "int4": "qint4", "int2": "qint2", "float8": "qfloat8"}


@dataclass(frozen=True)
class Says:
    """What the map says of one module: types of its weight and of its input, "" for none."""

    weights: str
    activations: str


def parse_map(config: Mapping[str, Any], checkpoint_name: str) -> dict[str, Says]:
    """Read `quanto_qmap.json`, by module.

    Raises:
        FormatMismatch: It is not what optimum-quanto writes.
        UnsupportedVariant: A type that is not known.
    """
    found = {}
    for module, entry in config.items():
        if not isinstance(entry, Mapping):
            raise _unknown(module, entry, "an object", checkpoint_name)
        types = {}
        for key in ("weights", "activations"):
            name = entry.get(key, "none" if key == "activations" else None)
            if not isinstance(name, str):
                raise _unknown(f"{module}.{key}", name, "the name of a type", checkpoint_name)
            if name != "none" and name not in TYPES:
                raise UnsupportedVariant(
                    f"`{key}` of `{module}` are `{name}`, expected {listed(TYPES, limit=9)}, in "
                    f"`quanto_qmap.json` of `{checkpoint_name}`"
                )
            types[key] = "" if name == "none" else name
        found[module] = Says(**types)
    return found


def parse_type(config: Mapping[str, Any], checkpoint_name: str) -> str:
    """Return the type of weights that a config of transformers asks for.

    Raises:
        FormatMismatch: It names none.
    """
    name = config.get("weights")
    if not isinstance(name, str) or name not in _OF_TRANSFORMERS:
        raise FormatMismatch(
            f"`weights` of the quanto config is `{name!r}`, expected {listed(_OF_TRANSFORMERS)}, "
            f"in `{checkpoint_name}`"
        )
    return _OF_TRANSFORMERS[name]


def parse_skipped(config: Mapping[str, Any], checkpoint_name: str) -> tuple[str, ...]:
    """Return the modules that a config of transformers leaves in full precision.

    Raises:
        FormatMismatch: They are no list of regular expressions.
    """
    entries = config.get(SKIPPED)
    if entries is None:
        return ()
    if not isinstance(entries, list) or not all(_is_regex(entry) for entry in entries):
        raise FormatMismatch(
            f"`{SKIPPED}` of the quanto config is `{entries!r}`, expected a list of names or "
            f"regular expressions, in `{checkpoint_name}`"
        )
    return tuple(entries)


def _is_regex(entry: object) -> bool:
    try:
        return isinstance(entry, str) and bool(entry) and re.compile(entry) is not None
    except (re.error, OverflowError):
        return False


def _unknown(key: str, value: object, expected: str, checkpoint_name: str) -> FormatMismatch:
    return FormatMismatch(
        f"`{key}` is `{value!r}`, expected {expected}, in `quanto_qmap.json` of `{checkpoint_name}`"
    )
