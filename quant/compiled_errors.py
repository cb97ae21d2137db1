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
_AT_ONCE = 128  # elements among which the few are counted that need a closer look


def widen(source, target):
    """Copy a row of float32 numbers, or of the bits of bfloat16 ones, to float32."""


@overload(widen, inline="never")
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


# The largest of floats without sign is that of their bits as integers: only that is found for
# several elements at a time.


@in_any_order
def sum_part(values, target, errors):
    """Fill the errors of a part of a row; return noise, signal and the largest error."""
    noise = signal = 0.0
    largest = np.int64(0)
    for k in range(values.size):
        wanted = np.float64(target[k])
        error = abs(np.float64(values[k]) - wanted)
        errors[k] = error
        noise += error * error
        signal += wanted * wanted
        largest = max(largest, np.float64(error).view(np.int64))
    return noise, signal, np.int64(largest).view(np.float64)


@in_any_order
def _in_steps(errors, codes, half_steps, scale):
    """Sum of squared steps, and the largest error in steps, on a grid that is not even."""
    squares = 0.0
    worst = np.int64(0)
    for k in range(errors.size):
        size = 2 * half_steps[codes[k]] * scale
        squares += size * size
        steps = errors[k] / size if errors[k] != 0 else 0.0
        worst = max(worst, np.float64(steps).view(np.int64))
    return squares, np.int64(worst).view(np.float64)


@in_any_order
def _count_above(errors, values, codes, allowed, scale, eps, smallest):
    """Number of errors above what is allowed to their code and to the rounding of their value."""
    count = 0
    least = np.int64(np.float64(smallest).view(np.int64) & _EXPONENT)
    for k in range(errors.size):
        exponent = max(np.float64(values[k]).view(np.int64) & _EXPONENT, least)
        of_value = np.int64(exponent).view(np.float64) * (eps / 2)
        count += errors[k] > allowed[codes[k]] * scale + of_value
    return count


@inlined
def _always_allowed(tables, limits):
    """By code, an error in units of the scale that rounding may leave whatever else is known."""
    eps, smallest, has_zeros = limits[0], limits[1], limits[5]
    allowed = tables[1].copy()
    for code in range(allowed.size):
        of_quotient = (
            0.0 if has_zeros else _half_ulp(abs(tables[0, code]) + 2 * allowed[code], eps, smallest)
        )
        allowed[code] += of_quotient
    return allowed


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
    allowed = _always_allowed(tables, limits)
    for n in range(values.shape[0]):
        r = n // height
        widen(values[n], found)
        widen(target[n], wanted)
        noise = rounding = signal = largest = worst = excess = 0.0
        beyond = 0
        for g in range(sizes.shape[1]):
            scale = sizes[r, g]
            start, stop = g * width, min(g * width + width, columns)
            of_part = sum_part(found[start:stop], wanted[start:stop], errors[start:stop])
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
            for first in range(start, stop, _AT_ONCE):
                last = min(first + _AT_ONCE, stop)
                count = _count_above(
                    errors[first:last],
                    found[first:last],
                    codes[n, first:last],
                    allowed,
                    scale,
                    limits[2],
                    limits[3],
                )
                for k in range(first, last if count else first):
                    code = codes[n, k]
                    if not errors[k] > allowed[code] * scale:
                        continue
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
