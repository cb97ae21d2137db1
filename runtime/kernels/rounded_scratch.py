"""What both products of rounded inputs need besides their operands."""

from __future__ import annotations

import torch
from torch import Tensor

from quantload.runtime.kernels.split_locks import split_locks

__all__ = ["scratch", "token_step"]


def token_step(scales: Tensor) -> int:
    """How far the scales of two tokens lie apart."""
    return 0 if scales.ndim == 1 or scales.shape[0] == 1 else scales.shape[1]


def scratch(
    device: torch.device, tiles: int, size: int, splits: int, integers: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Room for the sums of parts of K, and counters, where K is split."""
    if splits == 1:
        return None, None
    sums = torch.int32 if integers else torch.float32
    room = torch.empty(tiles * splits * size, dtype=sums, device=device)
    return room, split_locks(device, tiles)
