"""Scales of groups of an input in the order in which cuBLASLt reads them: token by token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["by_group"]

_TOKENS, _GROUPS = 64, 32  # of a program


@triton.jit
def order_scales(scales, out, M, G, stride, BM: tl.constexpr, BG: tl.constexpr):
    """Write the first M of out [G, stride] of scales [M, G]; grid: BM tokens x BG groups."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    g = tl.program_id(1) * BG + tl.arange(0, BG)
    inside = (m < M)[:, None] & (g < G)[None, :]
    tile = tl.load(scales + m[:, None] * G + g[None, :], mask=inside)
    tl.store(out + g[None, :] * stride + m[:, None], tile, mask=inside)


def by_group(scales: Tensor, rows: int) -> Tensor:
    """Return the same numbers with those of a group side by side: strides are (1, rows).

    Args:
        scales: [M, G] float32, contiguous.
        rows: Of the result, M at least; rows that are added hold any numbers.
    """
    tokens, groups = scales.shape
    out = torch.empty(groups, rows, dtype=scales.dtype, device=scales.device)
    grid = (triton.cdiv(tokens, _TOKENS), triton.cdiv(groups, _GROUPS))
    order_scales[grid](scales, out, tokens, groups, rows, BM=_TOKENS, BG=_GROUPS)
    return out.t()
