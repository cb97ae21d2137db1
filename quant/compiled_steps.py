"""Signed errors of a quantized weight in steps, and its codes, counted in one compiled pass.

`quant/step_errors.py` says what is counted; bfloat16 comes as its bits, uint16.
"""

from __future__ import annotations

import numpy as np

from quantload.quant.compiled_errors import widen
from quantload.quant.compiled_jit import Kernel, in_any_order

_ROOM = 64  # for the bins beside each other of one code; there are 42


@in_any_order
def _fill_places(values, target, codes, sizes, per_step, middle, last, places):
    """Fill the counter of each element of a row; return the sum of its errors in steps."""
    total = 0.0
    for k in range(values.size):
        error = np.float64(values[k]) - np.float64(target[k])
        steps = error / sizes[k] if error != 0 else 0.0
        total += steps
        place = steps * per_step + middle
        place = place if place > 0 else 0.0  # NaN too; `max` would take one element at a time
        place = place if place < last else last
        places[k] = np.int32(place) + _ROOM * np.int32(codes[k])
    return total


def _count_steps(values, target, codes, sizes, block, halves, per_step, bins, counts, sums):
    """Add to the counts of rows.

    Args:
        values: [n, K] float32 or uint16, what the codes stand for; finite.
        target: [n, K] float32 or uint16, what was quantized; finite.
        codes: [n, K] uint8, the bytes of the codes.
        sizes: [R, G] float64, scales without sign.
        block: Rows and columns of a scale.
        halves: [256] float64 by the byte of a code, half its step.
        per_step: Bins of a step; the middle ones meet at 0, the first and the last are open.
        bins: [B] int64, is added to; B up to 64.
        counts: [256] int64, is added to: how often each code occurs.
        sums: [n] float64, is filled: sum of the signed errors in steps.
    """
    height, width = block
    columns, last = values.shape[1], np.float64(bins.size - 1)
    middle = bins.size / 2
    found, wanted = np.empty(columns, np.float32), np.empty(columns, np.float32)
    places, of_elements = np.empty(columns, np.int32), np.empty(columns, np.float64)
    # one counter for each code and bin: the next element seldom needs the one just written
    both = np.zeros(256 * _ROOM, np.int64)
    is_even = halves.min() == halves.max()
    for n in range(values.shape[0]):
        widen(values[n], found)
        widen(target[n], wanted)
        for g in range(sizes.shape[1]):
            start, stop = g * width, min(g * width + width, columns)
            scale = 2 * sizes[n // height, g]
            if is_even:
                of_elements[start:stop] = scale * halves[0]
            else:
                for k in range(start, stop):
                    of_elements[k] = scale * halves[codes[n, k]]
        sums[n] = _fill_places(found, wanted, codes[n], of_elements, per_step, middle, last, places)
        for k in range(columns):
            both[places[k]] += 1
    for code in range(256):
        for b in range(bins.size):
            bins[b] += both[code * _ROOM + b]
            counts[code] += both[code * _ROOM + b]


count_steps = Kernel(_count_steps)
