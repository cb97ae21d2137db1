"""Errors of a quantized weight in units of its steps, measured in one compiled pass.

`quant/measure.py` says what is measured and why; this is the same arithmetic, in float64,
without temporaries of the weight. bfloat16 comes as its bits, uint16.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import overload

from quantload.quant.compiled_jit import Kernel, in_any_order, inlined

_EXPONENT = 0x7FF0000000000000  # of a float64: what is left is its power of two


def _widen(source, target):
    """Copy a row of float32 numbers, or of the bits of bfloat16 ones, to float32."""


@overload(_widen, inline="never")
def _widen_typed(source, target):
    if source.dtype == types.uint16:

        def widen(source, target):
            bits = target.view(np.uint32)
            for k in range(source.size):
                bits[k] = np.uint32(source[k]) << np.uint32(16)
    else:

        def widen(source, target):
            target[:] = source

    return widen


@inlined
def _half_ulp(number, eps, smallest):
    """Largest error of rounding to a float dtype, for results of this size."""
    bits = np.float64(max(abs(number), smallest)).view(np.int64)
    return np.int64(bits & _EXPONENT).view(np.float64) * (eps / 2)


@inlined
def _most_steps(code, zero, half, is_end, value, wanted, scale, slack, limits):
    """Largest error in steps that rounding to nearest leaves at one element."""
    eps, smallest, value_eps, value_smallest, steps, has_zeros, cast_eps = limits
    of_quotient = _half_ulp(abs(code - zero) + 2 * half, eps, smallest)
    clipped = steps * slack
    if has_zeros != 0:
        of_quotient += _half_ulp(abs(code) + half, eps, smallest)
        clipped = 2 * steps * (slack + eps / 2) + 2 * _half_ulp(2 * steps, eps, smallest)
    most = half + (max(of_quotient, clipped) if is_end else of_quotient)
    most += _half_ulp(value, value_eps, value_smallest) / scale
    if cast_eps != 0:
        most += _half_ulp(wanted, cast_eps, smallest) / scale
    return most / (2 * half) * (1 + 1e-12)


@in_any_order
def _sum_part(values, target, errors):
    """Fill the errors of a part of a row; return noise, signal and the largest error."""
    noise = signal = largest = 0.0
    for k in range(values.size):
        wanted = np.float64(target[k])
        error = abs(np.float64(values[k]) - wanted)
        errors[k] = error
        noise += error * error
        signal += wanted * wanted
        largest = error if error > largest else largest
    return noise, signal, largest


@in_any_order
def _in_steps(errors, codes, half_steps, scale):
    """Sum of squared steps, and the largest error in steps, on a grid that is not even."""
    squares = worst = 0.0
    for k in range(errors.size):
        size = 2 * half_steps[codes[k]] * scale
        squares += size * size
        steps = errors[k] / size
        worst = steps if steps > worst else worst
    return squares, worst


def _measure_rows(values, target, codes, scales, block, tables, limits, nearest, sums, counts):
    """Fill `sums` with the errors of each row.

    Args:
        values: [n, K] float32 or uint16, what the codes stand for.
        target: [n, K] float32 or uint16, what was quantized.
        codes: [n, K] uint8, the bytes of the codes.
        scales: Three of [R, G] float64: scales without sign, zero points, and by which part of
            itself each scale may have been rounded down.
        block: Rows and columns of a scale.
        tables: [3, 256] float64 by the byte of a code: its value, half its step, 1 at an end.
        limits: eps and smallest normal number of the arithmetic, and of the values; half the grid's
            steps; 1 if there are zero points; eps of the dtype to which the weight was cast, or 0.
        nearest: True counts elements that are further off than rounding explains.
        sums: [n, 6] float64, is filled: noise, rounding, signal, largest error, the same in steps,
            and the largest noise of a block in units of its rounding.
        counts: [n] int64, is filled.
    """
    height, width = block
    sizes, zeros, slacks = scales
    columns = values.shape[1]
    found, wanted = np.empty(columns, np.float32), np.empty(columns, np.float32)
    errors = np.empty(columns, np.float64)
    is_even = tables[1].min() == tables[1].max()
    for n in range(values.shape[0]):
        r = n // height
        _widen(values[n], found)
        _widen(target[n], wanted)
        noise = rounding = signal = largest = worst = excess = 0.0
        beyond = 0
        for g in range(sizes.shape[1]):
            scale = sizes[r, g]
            start, stop = g * width, min(g * width + width, columns)
            of_part = _sum_part(found[start:stop], wanted[start:stop], errors[start:stop])
            noise += of_part[0]
            signal += of_part[1]
            largest = max(largest, of_part[2])
            size = 2 * tables[1, 0] * scale
            squares, inside = size * size * (stop - start), of_part[2] / size
            if not is_even:
                squares, inside = _in_steps(
                    errors[start:stop], codes[n, start:stop], tables[1], scale
                )
            rounding += squares
            worst = max(worst, inside)
            if of_part[0] > 0:
                excess = max(excess, 12 * of_part[0] / squares)
            if not nearest or not inside > 0.5:
                continue
            for k in range(start, stop):
                if is_even and errors[k] <= size / 2:
                    continue
                code = codes[n, k]
                if errors[k] > tables[1, code] * scale:
                    most = _most_steps(
                        tables[0, code],
                        zeros[r, g],
                        tables[1, code],
                        tables[2, code] != 0,
                        np.float64(found[k]),
                        np.float64(wanted[k]),
                        scale,
                        slacks[r, g],
                        limits,
                    )
                    beyond += errors[k] / (2 * tables[1, code] * scale) > most
        sums[n, 0], sums[n, 1], sums[n, 2] = noise, rounding / 12, signal
        sums[n, 3], sums[n, 4], sums[n, 5] = largest, worst, excess
        counts[n] = beyond


measure_rows = Kernel(_measure_rows)
