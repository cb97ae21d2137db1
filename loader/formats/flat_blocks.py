"""Blocks of consecutive elements of a flattened weight, which may straddle its rows.

Some producers cut the weight [N, K], row after row, into blocks of `size` elements. Where `size`
divides K these are groups of columns, and where K divides `size` they are blocks of whole rows.
Else scales are repeated, so that each lies in one block: exact.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from quantload.quant.scheme import Granularity, WeightScheme


def block_of(shape: tuple[int, int], size: int) -> tuple[int, int]:
    """Return the largest block of (rows, columns) that lies in one flat block everywhere.

    Args:
        shape: (N, K).
        size: Elements of a flat block; the last one may be partial.
    """
    rows, columns = shape
    if size >= rows * columns:
        return rows, columns
    if size % columns == 0:
        return size // columns, columns
    return 1, math.gcd(columns, size)


def on_grid(flat: Tensor, shape: tuple[int, int], size: int) -> Tensor:
    """Lay out one value a flat block, [B], as the grid [R, G] of `block_of`."""
    rows, columns = shape
    height, width = block_of(shape, size)
    blocks, groups = -(-rows // height), columns // width
    if flat.numel() == blocks * groups:
        return flat.reshape(blocks, groups)
    first = torch.arange(blocks * groups, device=flat.device) * width  # element of each grid cell
    return flat.flatten()[first // size].reshape(blocks, groups)


def granularity_of(shape: tuple[int, int], size: int) -> Granularity:
    """Name what one scale covers; see `WeightScheme`."""
    height, width = block_of(shape, size)
    if (height, width) == shape and height > 1:
        return "tensor"
    if height > 1:
        return "block"
    return "channel" if width == shape[1] else "group"


def with_blocks(scheme: WeightScheme, shape: tuple[int, int], size: int) -> WeightScheme:
    """Return the scheme with the granularity that flat blocks of `size` give a weight [N, K]."""
    block, granularity = block_of(shape, size), granularity_of(shape, size)
    return replace(
        scheme,
        granularity=granularity,
        group_size=block[1] if granularity == "group" else None,
        block=block if granularity == "block" else None,
    )
