"""A loop that turns codes of 8 bits into values, compiled by numba; `compiled` is the way in."""

from __future__ import annotations

from quantload.quant.compiled_jit import Kernel


def _look_up(codes, table, values):
    """Fill `values` [M] with the entries of `table` [256], bits of any float, by code [M]."""
    for i in range(codes.size):
        values[i] = table[codes[i]]


look_up = Kernel(_look_up)
