"""Loops that quantize on a CPU, compiled by numba; `compiled` is the way in.

Arithmetic is done in float32 and rounded to the form `arithmetic` after every operation: for a
quotient, sum or difference of two such numbers the correctly rounded result, as PyTorch has it.
How dtypes tell forms of numbers and grids, see `compiled_numbers`. Arrays are contiguous.

Letters: N rows, K columns, R blocks of rows, G groups of columns.
"""

from __future__ import annotations

import numpy as np

from quantload.quant.compiled_jit import Kernel, inlined
from quantload.quant.compiled_numbers import (
    code_of,
    e4m3_value,
    fetch,
    from_order,
    greatest_16,
    greatest_128,
    largest_16,
    largest_32,
    largest_128,
    least_16,
    least_128,
    magnitude,
    next_above,
    order,
    round_1,
    round_16,
    round_32,
    stored,
    widened,
    widened_any,
)

# -- part of a row, under one scale ----------------------------------------------------------------


@inlined
def _largest_magnitude(weight, n, start, stop, largest):
    at = n * weight.shape[1]
    k = start
    while k + 128 <= stop:
        largest = max(largest_128(weight, at + k), largest)
        k += 128
    while k + 32 <= stop:
        largest = max(largest_32(weight, at + k), largest)
        k += 32
    while k + 16 <= stop:
        largest = max(largest_16(weight, at + k), largest)
        k += 16
    while k < stop:
        largest = max(magnitude(weight[n, k]), largest)
        k += 1
    return largest


@inlined
def _lowest_and_highest(weight, n, start, stop, lowest, highest):
    at = n * weight.shape[1]
    k = start
    while k + 128 <= stop:
        lowest = min(least_128(weight, at + k), lowest)
        highest = max(greatest_128(weight, at + k), highest)
        k += 128
    while k + 16 <= stop:
        lowest = min(least_16(weight, at + k), lowest)
        highest = max(greatest_16(weight, at + k), highest)
        k += 16
    while k < stop:
        lowest = min(order(weight[n, k]), lowest)
        highest = max(order(weight[n, k]), highest)
        k += 1
    return lowest, highest


@inlined
def _round_part(weight, codes, n, start, stop, scale, zero, limits, tags):
    low, high = limits[0], limits[1]
    grid, arithmetic = tags[0], tags[1]
    ahead = weight.shape[1]
    at, end = n * ahead + start, n * ahead + stop
    while at + 32 <= end:
        round_32(weight, codes, at, scale, zero, low, high, grid, arithmetic, ahead)
        at += 32
    while at + 16 <= end:
        round_16(weight, codes, at, scale, zero, low, high, grid, arithmetic, ahead)
        at += 16
    while at < end:
        round_1(weight, codes, at, scale, zero, low, high, grid, arithmetic, ahead)
        at += 1


# -- rows of blocks --------------------------------------------------------------------------------


@inlined
def _find_largest(weight, start, stop, width, largest):
    largest[:] = 0
    for n in range(start, stop):
        at = n * weight.shape[1]
        if width == 16 and largest.size * 16 == weight.shape[1]:
            for g in range(largest.size):
                largest[g] = max(largest_16(weight, at + 16 * g), largest[g])
            continue
        if width == 32 and largest.size * 32 == weight.shape[1]:
            for g in range(largest.size):
                largest[g] = max(largest_32(weight, at + 32 * g), largest[g])
            continue
        for g in range(largest.size):
            until = min(g * width + width, weight.shape[1])
            largest[g] = _largest_magnitude(weight, n, g * width, until, largest[g])


@inlined
def _round_rows(weight, codes, start, stop, width, scales, limits, tags):
    low, high = limits[0], limits[1]
    grid, arithmetic, ahead = tags[0], tags[1], weight.shape[1]
    for n in range(start, stop):
        at = n * ahead
        if width == 16 and scales.size * 16 == ahead:
            for g in range(scales.size):
                scale, k = widened(scales[g]), at + 16 * g
                round_16(weight, codes, k, scale, None, low, high, grid, arithmetic, ahead)
            continue
        if width == 32 and scales.size * 32 == ahead:
            for g in range(scales.size):
                scale, k = widened(scales[g]), at + 32 * g
                round_32(weight, codes, k, scale, None, low, high, grid, arithmetic, ahead)
            continue
        for g in range(scales.size):
            until = min(g * width + width, ahead)
            scale = widened(scales[g])
            _round_part(weight, codes, n, g * width, until, scale, None, limits, tags)


# -- scales ----------------------------------------------------------------------------------------


@inlined
def _scale_of(top, limits, through, like):
    """A scale in the form of `like`: see `stored_scales`, and `rtn`, where nothing is rounded up.

    Args:
        top: float32, the largest magnitude or the spread of a block.
        limits: Their last three: steps of the grid, what stands for zero, below which scales are
            rounded up.
        through: The form that scales are rounded to before.
        like: Their own.
    """
    steps, eps, normal = limits[2], limits[3], limits[4]
    exact = widened_any(stored(top / steps, through))
    if exact == 0:
        return stored(eps, like)
    scale = stored(exact, like)
    if exact < normal and widened(scale) < exact:
        return next_above(scale)
    return scale if magnitude(scale) != 0 else stored(eps, like)


@inlined
def _zero_of(lowest, scale, limits, like):
    low, high = limits[0], limits[1]
    steps = lowest / scale
    if steps != steps:  # 0 / 0
        return np.float32(0.0)
    zero = widened_any(stored(low - widened_any(stored(steps, like)), like))
    zero = low if zero < low else zero
    return np.rint(high if zero > high else zero)


@inlined
def _power_of_two(top, form, like):
    """e8m0 byte and scale; see `power_of_two_scale` of `scales`."""
    mantissa_bits, bias, guard_bits, top_exponent = form
    field = (np.int64(top) + (1 << (mantissa_bits - guard_bits - 1))) >> mantissa_bits
    one = stored(np.float32(1.0), like)
    if np.int64(top) >> mantissa_bits > 2 * bias or field > 2 * bias:
        return np.uint8(255), one
    byte = max(field - bias + 127 - top_exponent, 0) if field > 0 else 0
    bits = byte << 23 if byte > 0 else 1 << 22
    scale = stored(from_order(np.int32(bits), np.float32(0.0)), like)
    return (np.uint8(byte), scale) if magnitude(scale) != 0 else (np.uint8(127), one)


# -- weights ---------------------------------------------------------------------------------------


def _symmetric(weight, codes, scales, largest, block, limits, tags):
    height, width = block
    through = tags[2]
    for r in range(scales.shape[0]):
        start, stop = r * height, min(r * height + height, weight.shape[0])
        _find_largest(weight, start, stop, width, largest)
        for g in range(scales.shape[1]):
            top = widened_any(from_order(largest[g], weight[0, 0]))
            scales[r, g] = _scale_of(top, limits, through, scales[0, 0])
        _round_rows(weight, codes, start, stop, width, scales[r], limits, tags)


def _asymmetric(weight, codes, scales, zeros, extremes, block, limits, tags, is_guarded):
    height, width = block
    arithmetic, through = tags[1], tags[2]
    like = weight[0, 0]
    columns = weight.shape[1]
    for r in range(scales.shape[0]):
        start, stop = r * height, min(r * height + height, weight.shape[0])
        extremes[:] = 0
        for n in range(start, stop):
            for g in range(scales.shape[1]):
                until = min(g * width + width, columns)
                extremes[0, g], extremes[1, g] = _lowest_and_highest(
                    weight, n, g * width, until, extremes[0, g], extremes[1, g]
                )
        for g in range(scales.shape[1]):
            lowest = widened_any(from_order(extremes[0, g], like))
            highest = widened_any(from_order(extremes[1, g], like))
            spread = widened_any(stored(highest - lowest, arithmetic))
            scales[r, g] = _scale_of(spread, limits, through, scales[0, 0])
            divisor = widened_any(stored(spread / limits[2], arithmetic))
            if is_guarded:
                divisor = widened_any(scales[r, g])
            zeros[r, g] = _zero_of(lowest, divisor, limits, arithmetic)
        for n in range(start, stop):
            for g in range(scales.shape[1]):
                until = min(g * width + width, columns)
                scale = widened(scales[r, g])
                zero = zeros[r, g]
                _round_part(weight, codes, n, g * width, until, scale, zero, limits, tags)


def _given_scale(weight, codes, scale, limits, tags):
    for n in range(weight.shape[0]):
        _round_part(weight, codes, n, 0, weight.shape[1], scale, None, limits, tags)


def _powers_of_two(weight, codes, scales, largest, divisors, width, limits, form, tags):
    for n in range(weight.shape[0]):
        _find_largest(weight, n, n + 1, width, largest)
        for g in range(largest.size):
            scales[n, g], divisors[g] = _power_of_two(largest[g], form, weight[0, 0])
        _round_rows(weight, codes, n, n + 1, width, divisors, limits, tags)


def _e4m3_scales(weight, codes, scales, largest, divisors, width, limits, tags):
    steps, outer, most = limits[2], limits[3], limits[4]
    for n in range(weight.shape[0]):
        _find_largest(weight, n, n + 1, width, largest)
        for g in range(largest.size):
            top = widened_any(from_order(largest[g], weight[0, 0]))
            scale = outer * widened_any(stored(top / steps, weight[0, 0]))
            code = code_of(most if scale > most else scale, np.uint8(0))
            code = code if code != 0 else np.uint8(0x20)  # 0.125
            scales[n, g], divisors[g] = code, e4m3_value(code) / outer
        _round_rows(weight, codes, n, n + 1, width, divisors, limits, tags)


def _e4m3_multipliers(weight, codes, scales, largest, divisors, width, limits, tags):
    """As `_e4m3_scales`, but `outer` multiplies; see `stored_scales`."""
    steps, outer, most, least = limits[2], limits[3], limits[4], limits[5]
    for n in range(weight.shape[0]):
        _find_largest(weight, n, n + 1, width, largest)
        for g in range(largest.size):
            scale = widened_any(from_order(largest[g], weight[0, 0])) / (steps * outer)
            scale = np.float32(1.0) if scale == 0 else scale
            scale = least if scale < least else scale
            code = code_of(most if scale > most else scale, np.uint8(0))
            scales[n, g], divisors[g] = code, e4m3_value(code) * outer
        _round_rows(weight, codes, n, n + 1, width, divisors, limits, tags)


# -- ranges ----------------------------------------------------------------------------------------


def _range(weight, found):
    """Write the smallest and the largest number; two NaN if there is one."""
    lowest = highest = order(weight[0, 0])
    columns = weight.shape[1]
    for n in range(weight.shape[0]):
        for k in range(0, columns, 64 // weight.itemsize):  # the next row, by lines of the cache
            fetch(weight, (n + 1) * columns + k)
        lowest, highest = _lowest_and_highest(weight, n, 0, weight.shape[1], lowest, highest)
    low, high = from_order(lowest, weight[0, 0]), from_order(highest, weight[0, 0])
    has_low, has_high = widened_any(low) == widened_any(low), widened_any(high) == widened_any(high)
    found[0], found[1] = (low if has_high else high), (high if has_low else low)


quantize_symmetric = Kernel(_symmetric)
quantize_asymmetric = Kernel(_asymmetric)
quantize_given = Kernel(_given_scale)
quantize_powers_of_two = Kernel(_powers_of_two)
quantize_e4m3_scales = Kernel(_e4m3_scales)
quantize_e4m3_multipliers = Kernel(_e4m3_multipliers)
find_range = Kernel(_range)
