"""Names of dtypes in a config.json: "float16", and what some tools write, "torch.float16"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantload.arguments import shown
from quantload.errors import ModelError, listed

DTYPE_KEYS = ("dtype", "torch_dtype")
NAMES = ("float32", "float16", "bfloat16", "float64")  # that models run in
_SHORT = {
    **dict.fromkeys(("bf16", "bfloat"), "bfloat16"),
    **dict.fromkeys(("fp16", "f16", "half"), "float16"),
    **dict.fromkeys(("fp32", "f32", "float", "single"), "float32"),
    **dict.fromkeys(("fp64", "f64", "double"), "float64"),
}
_OF_CODES = ("quantization_config", "compression_config")
_PREFIX = "torch."
_TORCH = {"half": "float16", "float": "float32", "double": "float64"}  # what torch calls them, too


def plain_name(name: object) -> object:
    """Return the name of a dtype without `torch.`; whatever else stands there as it is."""
    if not isinstance(name, str):
        return name
    short = name.removeprefix(_PREFIX)
    return _TORCH.get(short, short)


def near_name(name: object) -> str:
    """Return the name of the dtype that another spelling means, "" if it means none."""
    spelled = str(name).strip().removeprefix(_PREFIX).lower()
    return spelled if spelled in NAMES else _SHORT.get(spelled, "")


def unknown_dtypes(config: Mapping[str, Any], *, section: str = "") -> list[tuple[str, object]]:
    """Return (dotted key, value) of dtypes in a config and its sections that are no `NAMES`.

    Sections are what a key ending in `_config` holds, but for those about quantization, which name
    dtypes of codes.
    """
    found: list[tuple[str, object]] = []
    for key, value in config.items():
        if key in DTYPE_KEYS and value is not None and plain_name(value) not in NAMES:
            found.append((f"{section}{key}", value))
        is_section = key.endswith("_config") and key not in _OF_CODES
        if is_section and isinstance(value, Mapping):
            found += unknown_dtypes(value, section=f"{section}{key}.")
    return found


def check_dtypes(config: Mapping[str, Any]) -> None:
    """Refuse a config with a dtype that is none.

    Raises:
        ModelError: It is the name of no dtype that models run in, or no name.
    """
    for key, value in unknown_dtypes(config):
        found, expected, hint = what_is_wrong(key, value)
        raise ModelError(f"{found}, expected {expected}", hint=hint)


def what_is_wrong(key: str, value: object) -> tuple[str, str, str]:
    """Return of one of `unknown_dtypes` what was found, what was expected, and a hint."""
    near = near_name(value) if isinstance(value, str) else ""
    expected = f"one of {listed(NAMES, limit=len(NAMES))}"
    hint = f"did you mean `{near}`? change it there"
    nothing = "take the key out: the dtype of the stored weights counts then"
    return f"`{key}` in config.json is {shown(value)}", expected, hint if near else nothing


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
        elif key in DTYPE_KEYS and isinstance(value, str) and value.startswith(_PREFIX):
            found.append(str(value))
    return found


__all__ = [
    "DTYPE_KEYS",
    "check_dtypes",
    "near_name",
    "plain_name",
    "prefixed_names",
    "unknown_dtypes",
    "what_is_wrong",
    "without_prefixes",
]
