"""The dtype that a model's config.json states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

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
