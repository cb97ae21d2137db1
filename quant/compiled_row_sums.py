"""Sums of squares of the rows of two matrices and of their difference, in one compiled pass."""

from __future__ import annotations

import numpy as np

from quantload.quant.compiled_errors import sum_part, widen
from quantload.quant.compiled_jit import Kernel


def _sum_rows(values, target, sums):
    """Fill `sums` [n, 3] float64 with noise, signal and largest error of each row.

    Args:
        values: [n, K] float32, or uint16: the bits of bfloat16.
        target: [n, K] float32 or uint16, what they are compared with.
        sums: Noise is not finite where a value of either is not.
    """
    columns = values.shape[1]
    found, wanted = np.empty(columns, np.float32), np.empty(columns, np.float32)
    errors = np.empty(columns, np.float64)  # of a row; nobody asks for them
    for n in range(values.shape[0]):
        widen(values[n], found)
        widen(target[n], wanted)
        sums[n, 0], sums[n, 1], sums[n, 2] = sum_part(found, wanted, errors)


sum_rows = Kernel(_sum_rows)
