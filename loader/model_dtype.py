"""Names of dtypes: what a model's config.json states, and what a user asks for."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch

from quantload.arguments import check_type
from quantload.errors import ConfigError
from quantload.mappers.dtype_names import DTYPE_KEYS, near_name, plain_name

if TYPE_CHECKING:
    from quantload.loader.source import Source

DTYPE_NAMES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
AUTO = "auto"  # as in transformers: what the checkpoint says
_BY_NAME = {**DTYPE_NAMES, "float64": torch.float64}
_FLOATS = tuple(_BY_NAME.values())


def own_dtype(source: Source) -> torch.dtype:
    """Return the dtype that a checkpoint's model runs in, if nobody asks for another.

    It is that of its config, else the one in which most floats are stored, else float32.
    """
    stated = _stated(source.checkpoint.config, _BY_NAME)
    return stated or source.stored_dtype or torch.float32


def config_dtype(config: Mapping[str, Any]) -> torch.dtype | None:
    """Return the dtype that a config.json states, if it states one that scales have, too."""
    return _stated(config, DTYPE_NAMES)


def _stated(config: Mapping[str, Any], names: Mapping[str, torch.dtype]) -> torch.dtype | None:
    text = config.get("text_config")
    for key in DTYPE_KEYS:
        for holder in (config, text if isinstance(text, Mapping) else {}):
            name = str(plain_name(holder.get(key)))
            if name in names:
                return names[name]
    return None


def check_dtype(name: str, dtype: object) -> None:
    """Refuse what is no float dtype of torch; None is one's own.

    Raises:
        WrongType: It is the name of a dtype, or something else.
        ConfigError: Nothing in full precision is of this dtype.
    """
    hint = "for example `torch.bfloat16`; names are for `load` and the command line"
    expected = "a dtype of torch, or None for that of the checkpoint"
    check_type(name, dtype, (torch.dtype, NoneType), expected=expected, hint=hint)
    assert isinstance(dtype, torch.dtype | None), "checked above"
    parse_dtype(dtype, name=name)


def parse_dtype(dtype: str | torch.dtype | None, *, name: str = "dtype") -> torch.dtype | None:
    """Return the dtype that a user asks for; None and "auto" are None: the checkpoint's own.

    Args:
        dtype: A name such as "bfloat16" or "torch.bfloat16", or a float dtype of torch.
        name: What the argument is called, for messages.

    Raises:
        ConfigError: No such dtype, or none that models run in.
        WrongType: It is neither a name nor a dtype.
    """
    check_type(
        name,
        dtype,
        (str, torch.dtype, NoneType),
        expected="the name of a dtype or a dtype of torch",
        hint='for example `"bfloat16"` or `torch.bfloat16`',
    )
    if dtype is None or dtype == AUTO:
        return None
    found = _BY_NAME.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if found not in _FLOATS:
        near = near_name(dtype)
        raise ConfigError(
            f"unknown dtype: `{dtype}`, expected one of {', '.join(DTYPE_NAMES)}, or {AUTO}",
            hint=f"did you mean `{near}`?"
            if near
            else "weights are quantized by a scheme, and "
            "`dtype` is that of everything in full precision",
        )
    return found
