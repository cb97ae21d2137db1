"""Sums of squares of the rows of two matrices and of their difference, in one compiled pass."""

from __future__ import annotations

import numpy as np

from quantload.quant.compiled_errors import widen
from quantload.quant.compiled_jit import Kernel, in_any_order


@in_any_order
def _sum_row(values, target):
    noise = signal = 0.0
    largest = np.int64(0)  # of floats without sign, as integers: several are compared at a time
    for k in range(values.size):
        wanted = np.float64(target[k])
        error = abs(np.float64(values[k]) - wanted)
        noise += error * error
        signal += wanted * wanted
        largest = max(largest, np.float64(error).view(np.int64))
    return noise, signal, np.int64(largest).view(np.float64)


def _sum_rows(values, target, sums):
    """Fill `sums` [n, 3] float64 with noise, signal and largest error of each row.

    Args:
        values: [n, K] float32, or uint16: the bits of bfloat16.
        target: [n, K] float32 or uint16, what they are compared with.
        sums: Noise is not finite where a value of either is not.
    """
    columns = values.shape[1]
    found, wanted = np.empty(columns, np.float32), np.empty(columns, np.float32)
    for n in range(values.shape[0]):
        widen(values[n], found)
        widen(target[n], wanted)
        sums[n, 0], sums[n, 1], sums[n, 2] = _sum_row(found, wanted)


sum_rows = Kernel(_sum_rows)
