"""Steps: how far apart the values are that codes can stand for.

A grid is evenly spaced (integers) or not (FP8, FP4, tables). The half step of a code is half the
wider gap beside its value: the largest distance from which round-to-nearest comes to it, but for
the ends of the grid, where anything beyond comes to it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from quantload.quant.grid import Grid
from quantload.quant.qtensor import QuantTensor


@dataclass(frozen=True, eq=False)
class CodeTable:
    """What is known of each code, by its byte.

    Args:
        values: [256] float64 in units of the grid; 0 where no number is.
        half_steps: [256] float64, half the wider gap beside the value.
        is_end: [256] bool, the smallest and the largest value.
    """

    values: Tensor
    half_steps: Tensor
    is_end: Tensor


@cache
def code_table(grid: Grid) -> CodeTable:
    """Return values and steps of a grid's codes."""
    codes = torch.arange(256, dtype=torch.uint8)
    if grid.table is not None:
        padded = (*grid.table, *(grid.table[0] for _ in range(256 - len(grid.table))))
        values = torch.tensor(padded, dtype=torch.float64)
    else:
        values = codes.view(grid.storage).to(torch.float64).nan_to_num(0.0, 0.0, 0.0)
        values = values.clamp(grid.low, grid.high)
    ordered = torch.tensor(sorted(set(values.tolist())), dtype=torch.float64)
    place = torch.searchsorted(ordered, values)
    gaps = ordered.diff()
    below = gaps[(place - 1).clamp(min=0)]
    above = gaps[place.clamp(max=len(gaps) - 1)]
    half_steps = torch.maximum(below, above) / 2
    return CodeTable(values, half_steps, (values == ordered[0]) | (values == ordered[-1]))


def half_ulp(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the largest error of rounding to `dtype`, for results of this size; float64."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(numbers.abs().to(torch.float64).clamp_(min=info.smallest_normal))
    return torch.ldexp(torch.full_like(numbers, info.eps / 4, dtype=torch.float64), exponent)


def scale_sizes(candidate: QuantTensor) -> Tensor | None:
    """Return the scales [R or N, G] without sign, with `outer`: float64.

    None if columns find their scale by number or have a factor of their own.
    """
    if candidate.group_of is not None or candidate.inner is not None:
        return None
    sizes = candidate.multiplier.to(torch.float64).abs()
    if candidate.outer is None:
        return sizes
    outer = candidate.outer.to(torch.float64).abs()
    if outer.shape[0] != 1 and sizes.shape[0] != outer.shape[0]:
        sizes = sizes.repeat_interleave(candidate.block[0], dim=0)[: outer.shape[0]]
    return sizes * outer if candidate.evaluation.outer.endswith("*") else sizes / outer


def scale_slack(candidate: QuantTensor, source: torch.dtype) -> Tensor:
    """Return by which part of itself each scale [R, G] may have been rounded down; float64.

    Args:
        candidate: Its scales are rounded to the dtype they are stored in; floats also to that of
            the arithmetic and of the weight.
        source: dtype of the weight.
    """
    stored = candidate.scale.to(torch.float32).to(torch.float64).abs()
    match candidate.scale.dtype:
        case torch.float8_e8m0fnu | torch.uint8:
            return torch.zeros_like(stored)  # a power of two that nothing reaches beyond
        case torch.float8_e4m3fn:
            dtypes = {torch.float8_e4m3fn}
        case floats:
            dtypes = {floats, candidate.evaluation.dtype, source}
    slack = sum((half_ulp(stored, dtype) for dtype in dtypes), torch.zeros_like(stored))
    return slack / stored
