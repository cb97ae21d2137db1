"""What codes stand for: by a compiled loop where there is one, else by PyTorch.

PyTorch casts float8 numbers on a CPU one by one, 7 to 10 ns each; to look them up takes half a one.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from quantload.quant import compiled
from quantload.quant.compiled_arguments import FORMS, array_of, bytes_of
from quantload.quant.grid import Grid

_WORTH = 8  # codes that PyTorch decodes while it quantizes one number


def values_of(codes: Tensor, grid: Grid, dtype: torch.dtype) -> Tensor:
    """Return the value of every code, in a new tensor of `dtype`: those of `Grid.values`.

    Args:
        codes: [...] in the grid's storage dtype.
        grid: Of the codes.
        dtype: Float dtype of the result.
    """
    on_cpu = codes.device.type == "cpu" and codes.numel() > 0
    if not on_cpu or grid.is_integer or dtype not in FORMS:
        return grid.values(codes, dtype)
    if not compiled.is_ready(codes.numel() // _WORTH):
        return grid.values(codes, dtype)
    from quantload.quant.compiled_decoding import look_up  # numba: a second

    values = torch.empty(codes.shape, dtype=dtype)
    look_up(
        bytes_of(codes.detach().contiguous()).reshape(-1),
        array_of(_table(grid, dtype)),
        array_of(values).reshape(-1),
    )
    return values


@cache
def _table(grid: Grid, dtype: torch.dtype) -> Tensor:
    """[256] the value of each byte; NaN for those that are no code."""
    codes = torch.arange(256, dtype=torch.uint8)
    if grid.table is None:
        return grid.values(codes.view(grid.storage), dtype)
    table = torch.full((256,), torch.nan, dtype=dtype)
    table[: len(grid.table)] = grid.values(codes[: len(grid.table)], dtype)
    return table


__all__ = ["values_of"]
