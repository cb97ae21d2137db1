"""Signed errors of a quantized weight in steps, and its codes, counted in one compiled pass.

`quant/step_errors.py` says what is counted; bfloat16 comes as its bits, uint16.
"""

from __future__ import annotations

import numpy as np

from quantload.quant.compiled_errors import widen
from quantload.quant.compiled_jit import Kernel, in_any_order

_LANES = 4  # counters side by side: an increment need not wait for the one before


@in_any_order
def _places(values, target, size, per_step, middle, last, places):
    """Fill the bins of a part of a row whose steps are alike; return the sum of its errors."""
    total = 0.0
    for k in range(values.size):
        error = np.float64(values[k]) - np.float64(target[k])
        steps = error / size if error != 0 else 0.0
        total += steps
        places[k] = np.int32(min(max(steps * per_step + middle, 0.0), last))
    return total


@in_any_order
def _places_uneven(values, target, codes, halves, scale, per_step, middle, last, places):
    """The same where each code has a step of its own."""
    total = 0.0
    for k in range(values.size):
        error = np.float64(values[k]) - np.float64(target[k])
        steps = error / (2 * halves[codes[k]] * scale) if error != 0 else 0.0
        total += steps
        places[k] = np.int32(min(max(steps * per_step + middle, 0.0), last))
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
        bins: [B] int64, is added to.
        counts: [256] int64, is added to: how often each code occurs.
        sums: [n] float64, is filled: sum of the signed errors in steps.
    """
    height, width = block
    columns, last = values.shape[1], bins.size - 1
    middle = bins.size / 2
    found, wanted = np.empty(columns, np.float32), np.empty(columns, np.float32)
    places = np.empty(columns, np.int32)
    lanes = np.zeros((_LANES, bins.size), np.int64)
    codes_of = np.zeros((_LANES, 256), np.int64)
    is_even = halves.min() == halves.max()
    for n in range(values.shape[0]):
        widen(values[n], found)
        widen(target[n], wanted)
        total = 0.0
        for g in range(sizes.shape[1]):
            start, stop = g * width, min(g * width + width, columns)
            scale = sizes[n // height, g]
            if is_even:
                total += _places(
                    found[start:stop],
                    wanted[start:stop],
                    2 * halves[0] * scale,
                    per_step,
                    middle,
                    last,
                    places[start:stop],
                )
            else:
                total += _places_uneven(
                    found[start:stop],
                    wanted[start:stop],
                    codes[n, start:stop],
                    halves,
                    scale,
                    per_step,
                    middle,
                    last,
                    places[start:stop],
                )
        sums[n] = total
        whole = columns // _LANES * _LANES
        for k in range(0, whole, _LANES):
            for lane in range(_LANES):
                lanes[lane, places[k + lane]] += 1
                codes_of[lane, codes[n, k + lane]] += 1
        for k in range(whole, columns):
            lanes[0, places[k]] += 1
            codes_of[0, codes[n, k]] += 1
    for lane in range(_LANES):
        for b in range(bins.size):
            bins[b] += lanes[lane, b]
        for c in range(256):
            counts[c] += codes_of[lane, c]


count_steps = Kernel(_count_steps)
