"""Names of dtypes: what a model's config.json states, and what a user asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from quantload.errors import ConfigError

DTYPE_NAMES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def config_dtype(config: Mapping[str, Any]) -> torch.dtype | None:
    """Return the dtype that a config.json states, if it states one."""
    text = config.get("text_config")
    for key in ("dtype", "torch_dtype"):
        for holder in (config, text if isinstance(text, Mapping) else {}):
            name = str(holder.get(key) or "").removeprefix("torch.")
            if name in DTYPE_NAMES:
                return DTYPE_NAMES[name]
    return None


def parse_dtype(name: str | None) -> torch.dtype | None:
    """Return the dtype of a name such as "bfloat16"; None stays None.

    Raises:
        ConfigError: No such dtype.
    """
    if name is None:
        return None
    if name not in DTYPE_NAMES:
        raise ConfigError(f"unknown dtype: `{name}`, expected one of {', '.join(DTYPE_NAMES)}")
    return DTYPE_NAMES[name]
