"""Sums of squares of the rows of two matrices and of their difference, in one compiled pass."""

from __future__ import annotations

import numpy as np

from quantload.quant.compiled_errors import widen
from quantload.quant.compiled_jit import Kernel, in_any_order


@in_any_order
def _sum_row(values, target):
    noise = signal = largest = 0.0
    for k in range(values.size):
        wanted = np.float64(target[k])
        error = np.float64(values[k]) - wanted
        noise += error * error
        signal += wanted * wanted
        largest = max(largest, abs(error))
    return noise, signal, largest


def _sum_rows(values, target, sums):
    """Fill `sums` [n, 3] float64 with noise, signal and largest error of each row.

    Args:
        values: [n, K] float32, or uint16: the bits of bfloat16.
        target: [n, K] float32 or uint16, what they are compared with.
        sums: Noise is not finite where a value of either is not.
    """
    found = np.empty(values.shape[1], np.float32)
    wanted = np.empty(values.shape[1], np.float32)
    for n in range(values.shape[0]):
        widen(values[n], found)
        widen(target[n], wanted)
        sums[n] = _sum_row(found, wanted)


sum_rows = Kernel(_sum_rows)
