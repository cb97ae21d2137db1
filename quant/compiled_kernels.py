"""Loops that quantize on a CPU, compiled by numba; `compiled` is the way in.

What they call stands in this same file: numba's cache on disk notices changes of the file of a
function, not of the files of those that it calls.

dtypes say what is meant, so that numba makes one program for each case:

    weights, scales   uint16 bfloat16, int16 float16, float32 float32
    `grid`, a zero    int8 any integers (a code is their low byte), uint8 e4m3, uint16 e2m1,
                      uint32 e2m3

Arithmetic is done in float32 and rounded to the form of the scales after every operation: for a
quotient, sum or difference of two such numbers the correctly rounded result, as PyTorch has it.

Conversions are integer arithmetic: LLVM's own of float16 call a function where the processor has no
instruction, and numba stops the process if it does not find it.

Letters: N rows, K columns, R blocks of rows, G groups of columns.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from quantload.quant.compiled_jit import Kernel, inlined

_I8, _I16, _I32, _FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()
_INTEGERS = 12582912.0  # 1.5 * 2^23: a float32 sum near it has the integer in its low bits
_HALF_STEPS = 0.5  # float32 near it lie 2^-24 apart, as float16 numbers below 2^-14 do
_HALF_BIAS = 127 - 15  # between the exponents of float32 and of float16
_NARROW = {types.uint8: (4, 3), types.uint16: (2, 1), types.uint32: (2, 3)}  # exponent, mantissa


# -- single numbers --------------------------------------------------------------------------------
# Intrinsics: functions of types, that return a signature and what writes LLVM instructions.


@intrinsic
def _widened(context, number):
    """A finite stored number as float32."""

    def build(_, builder, __, values):
        return _as_float(builder, number, values[0])

    return types.float32(number), build


@intrinsic
def _widened_any(context, number):
    """A stored number as float32; NaN and infinity stay what they are."""

    def build(_, builder, __, values):
        wide = _as_float(builder, number, values[0])
        if number != types.int16:
            return wide
        above = builder.and_(values[0], _I16(0x7C00))
        beyond = builder.add(builder.bitcast(wide, _I32), _I32(_HALF_BIAS << 23))
        special = builder.icmp_unsigned("==", above, _I16(0x7C00))
        return builder.select(special, builder.bitcast(beyond, _FLOAT), wide)

    return types.float32(number), build


@intrinsic
def _rounded(context, value, like):
    """A float32 rounded to the form of `like`, as float32; its magnitude is in range."""

    def build(_, builder, __, values):
        return _round_float(builder, like, values[0])

    return types.float32(types.float32, like), build


@intrinsic
def _stored(context, value, like):
    """A float32 in the form of `like`; too large a number becomes infinity, NaN not finite."""

    def build(_, builder, __, values):
        if like == types.float32:
            return values[0]
        bits = builder.bitcast(_round_float(builder, like, values[0]), _I32)
        if like == types.uint16:
            return builder.trunc(builder.lshr(bits, _I32(16)), _I16)
        return _half_bits(builder, bits)

    return like(types.float32, like), build


@intrinsic
def _magnitude(context, number):
    """A stored number without its sign, as an integer: ordered as the numbers are, NaN last."""

    def build(_, builder, __, values):
        bits = _bits_of(builder, number, values[0])
        return builder.and_(bits, bits.type(_largest(number)))

    return _integer_of(number)(number), build


@intrinsic
def _order(context, number):
    """A stored number as a signed integer: ordered as the numbers are, NaN first or last."""

    def build(_, builder, __, values):
        return _turned(builder, number, _bits_of(builder, number, values[0]))

    return _integer_of(number)(number), build


@intrinsic
def _from_order(context, order, like):
    """Undo `_order`, and `_magnitude`."""

    def build(_, builder, __, values):
        bits = _turned(builder, like, values[0])
        return builder.bitcast(bits, _FLOAT) if like == types.float32 else bits

    return like(order, like), build


@intrinsic
def _code(context, value, grid):
    """The code nearest to a float32 in the grid's range, ties to even; that of -0.0 is 0.

    What is rounded to zero from below keeps its sign.
    """

    def build(_, builder, __, values):
        if grid == types.int8:
            moved = builder.fadd(values[0], _FLOAT(_INTEGERS))
            return builder.trunc(builder.bitcast(moved, _I32), _I8)
        value = values[0]
        if grid != types.uint32:  # the original adds a zero point of 0, but not to e2m3
            value = builder.fadd(value, _FLOAT(0.0))
        return _narrow_bits(builder, builder.bitcast(value, _I32), *_NARROW[grid])

    return types.uint8(types.float32, grid), build


def _integer_of(number):
    return types.int32 if number == types.float32 else types.int16


def _largest(number) -> int:
    return 0x7FFFFFFF if number == types.float32 else 0x7FFF


def _bits_of(builder, number, value):
    return builder.bitcast(value, _I32) if number == types.float32 else value


def _turned(builder, number, bits):
    sign = builder.ashr(bits, bits.type(_largest(number).bit_length()))
    return builder.xor(bits, builder.and_(sign, bits.type(_largest(number))))


def _as_float(builder, number, value):
    if number == types.float32:
        return value
    if number == types.uint16:
        return builder.bitcast(builder.shl(builder.zext(value, _I32), _I32(16)), _FLOAT)
    bits = builder.zext(value, _I32)
    sign = builder.shl(builder.and_(bits, _I32(0x8000)), _I32(16))
    moved = builder.shl(builder.and_(bits, _I32(0x7FFF)), _I32(13))
    normal = builder.add(moved, _I32(_HALF_BIAS << 23))
    one = _I32((_HALF_BIAS + 1) << 23)  # the smallest normal float16; subnormals count from it
    counted = builder.bitcast(builder.add(moved, one), _FLOAT)
    small = builder.bitcast(builder.fsub(counted, builder.bitcast(one, _FLOAT)), _I32)
    is_small = builder.icmp_unsigned("<", moved, _I32(1 << 23))
    return builder.bitcast(builder.or_(builder.select(is_small, small, normal), sign), _FLOAT)


def _round_float(builder, like, value):
    if like == types.float32:
        return value
    bits, dropped = builder.bitcast(value, _I32), 16 if like == types.uint16 else 13
    kept = builder.and_(_round_bits(builder, bits, dropped), _I32(-1 << dropped))
    if like == types.uint16:
        return builder.bitcast(kept, _FLOAT)
    sign = builder.and_(bits, _I32(-1 << 31))
    magnitude = builder.and_(bits, _I32(0x7FFFFFFF))
    counted = builder.fadd(builder.bitcast(magnitude, _FLOAT), _FLOAT(_HALF_STEPS))
    small = builder.bitcast(builder.fsub(counted, _FLOAT(_HALF_STEPS)), _I32)
    is_small = builder.icmp_unsigned("<", magnitude, _I32((_HALF_BIAS + 1) << 23))
    return builder.bitcast(builder.select(is_small, builder.or_(small, sign), kept), _FLOAT)


def _round_bits(builder, bits, dropped: int):
    odd = builder.and_(builder.lshr(bits, _I32(dropped)), _I32(1))
    return builder.add(builder.add(bits, _I32((1 << (dropped - 1)) - 1)), odd)


def _half_bits(builder, bits):
    """Bits of a float16 from those of the float32 that equals it."""
    sign = builder.and_(builder.lshr(bits, _I32(16)), _I32(0x8000))
    magnitude = builder.and_(bits, _I32(0x7FFFFFFF))
    moved = builder.sub(builder.lshr(magnitude, _I32(13)), _I32(_HALF_BIAS << 10))
    finite = builder.icmp_unsigned("<", magnitude, _I32((_HALF_BIAS + 31) << 23))
    normal = builder.select(finite, moved, _I32(0x7C00))
    steps = builder.fadd(builder.bitcast(magnitude, _FLOAT), _FLOAT(_HALF_STEPS))
    small = builder.and_(builder.bitcast(steps, _I32), _I32(0x7FFFFF))
    is_small = builder.icmp_unsigned("<", magnitude, _I32((_HALF_BIAS + 1) << 23))
    return builder.trunc(builder.or_(sign, builder.select(is_small, small, normal)), _I16)


def _narrow_bits(builder, bits, exponent_bits: int, mantissa_bits: int):
    """Code of a float32 in the range of a float of few bits, from its bits."""
    smallest = 2 - (1 << (exponent_bits - 1))  # exponent below which numbers lie evenly
    magnitude, dropped = builder.and_(bits, _I32(0x7FFFFFFF)), 23 - mantissa_bits
    nearest = builder.lshr(_round_bits(builder, magnitude, dropped), _I32(dropped))
    normal = builder.sub(nearest, _I32((127 + smallest - 1) << mantissa_bits))
    even = _FLOAT(2.0 ** (23 + smallest - mantissa_bits))  # float32 near it lie as far apart
    steps = builder.bitcast(builder.fadd(builder.bitcast(magnitude, _FLOAT), even), _I32)
    is_small = builder.icmp_unsigned("<", magnitude, _I32((127 + smallest) << 23))
    code = builder.trunc(builder.select(is_small, steps, normal), _I8)
    sign = builder.lshr(
        builder.and_(bits, _I32(-1 << 31)), _I32(31 - exponent_bits - mantissa_bits)
    )
    return builder.or_(code, builder.trunc(sign, _I8))


# -- part of a row, under one scale ----------------------------------------------------------------


@inlined
def _largest_magnitude(part, largest):
    for i in range(part.size):
        magnitude = _magnitude(part[i])
        largest = magnitude if magnitude > largest else largest
    return largest


@inlined
def _lowest_and_highest(part, lowest, highest):
    for i in range(part.size):
        order = _order(part[i])
        lowest = order if order < lowest else lowest
        highest = order if order > highest else highest
    return lowest, highest


@inlined
def _round_part(part, codes, stored, low, high, grid):
    scale = _widened(stored)
    for i in range(part.size):
        value = _rounded(_widened(part[i]) / scale, stored)
        value = low if value < low else value
        codes[i] = _code(high if value > high else value, grid)


@inlined
def _round_part_to_zero(part, codes, stored, zero, low, high, grid):
    scale = _widened(stored)
    for i in range(part.size):
        value = _rounded(_rounded(_widened(part[i]) / scale, stored) + zero, stored)
        value = low if value < low else value
        codes[i] = _code(high if value > high else value, grid)


# -- rows of blocks --------------------------------------------------------------------------------


@inlined
def _part(array, n, g, width):
    return array[n, g * width : min(g * width + width, array.shape[1])]


@inlined
def _find_largest(weight, start, stop, width, largest):
    largest[:] = 0
    for n in range(start, stop):
        for g in range(largest.size):
            largest[g] = _largest_magnitude(_part(weight, n, g, width), largest[g])


@inlined
def _round_rows(weight, codes, start, stop, width, scales, low, high, grid):
    for n in range(start, stop):
        for g in range(scales.size):
            part, of_part = _part(weight, n, g, width), _part(codes, n, g, width)
            _round_part(part, of_part, scales[g], low, high, grid)


# -- scales ----------------------------------------------------------------------------------------


@inlined
def _scale_of(top, steps, eps, like):
    scale = _stored(top / steps, like)
    return scale if _magnitude(scale) != 0 else _stored(eps, like)


@inlined
def _zero_of(lowest, scale, low, high, like):
    steps = lowest / scale
    if steps != steps:  # 0 / 0
        return np.float32(0.0)
    zero = _widened_any(_stored(low - _widened_any(_stored(steps, like)), like))
    zero = low if zero < low else zero
    return np.rint(high if zero > high else zero)


@inlined
def _power_of_two(magnitude, form, like):
    """e8m0 byte and scale; see `power_of_two_scale` of `scales`."""
    mantissa_bits, bias, guard_bits, top_exponent = form
    field = (np.int64(magnitude) + (1 << (mantissa_bits - guard_bits - 1))) >> mantissa_bits
    one = _stored(np.float32(1.0), like)
    if np.int64(magnitude) >> mantissa_bits > 2 * bias or field > 2 * bias:
        return np.uint8(255), one
    byte = max(field - bias + 127 - top_exponent, 0) if field > 0 else 0
    bits = byte << 23 if byte > 0 else 1 << 22
    scale = _stored(_from_order(np.int32(bits), np.float32(0.0)), like)
    return (np.uint8(byte), scale) if _magnitude(scale) != 0 else (np.uint8(127), one)


@inlined
def _e4m3_value(code):
    exponent, mantissa = np.int64(code) >> 3 & 15, np.int64(code) & 7
    if exponent == 0:
        return np.float32(mantissa) * np.float32(2.0**-9)
    return _from_order(np.int32((exponent + 127 - 7) << 23 | mantissa << 20), np.float32(0.0))


# -- weights ---------------------------------------------------------------------------------------


def _symmetric(weight, codes, scales, largest, block, limits, grid):
    height, width = block
    low, high, steps, eps = limits
    for r in range(scales.shape[0]):
        start, stop = r * height, min(r * height + height, weight.shape[0])
        _find_largest(weight, start, stop, width, largest)
        for g in range(scales.shape[1]):
            top = _widened_any(_from_order(largest[g], weight[0, 0]))
            scales[r, g] = _scale_of(top, steps, eps, weight[0, 0])
        _round_rows(weight, codes, start, stop, width, scales[r], low, high, grid)


def _asymmetric(weight, codes, scales, zeros, extremes, block, limits, grid):
    height, width = block
    low, high, steps, eps = limits
    like = weight[0, 0]
    for r in range(scales.shape[0]):
        start, stop = r * height, min(r * height + height, weight.shape[0])
        extremes[:] = 0
        for n in range(start, stop):
            for g in range(scales.shape[1]):
                extremes[0, g], extremes[1, g] = _lowest_and_highest(
                    _part(weight, n, g, width), extremes[0, g], extremes[1, g]
                )
        for g in range(scales.shape[1]):
            lowest = _widened_any(_from_order(extremes[0, g], like))
            highest = _widened_any(_from_order(extremes[1, g], like))
            spread = _widened_any(_stored(highest - lowest, like))
            unguarded = _widened_any(_stored(spread / steps, like))
            zeros[r, g] = _zero_of(lowest, unguarded, low, high, like)
            scales[r, g] = _scale_of(spread, steps, eps, like)
        for n in range(start, stop):
            for g in range(scales.shape[1]):
                part, of_part = _part(weight, n, g, width), _part(codes, n, g, width)
                _round_part_to_zero(part, of_part, scales[r, g], zeros[r, g], low, high, grid)


def _given_scale(weight, codes, scale, limits, grid):
    low, high = limits
    for n in range(weight.shape[0]):
        _round_part(weight[n], codes[n], scale, low, high, grid)


def _powers_of_two(weight, codes, scales, largest, divisors, width, limits, form, grid):
    low, high = limits
    for n in range(weight.shape[0]):
        _find_largest(weight, n, n + 1, width, largest)
        for g in range(largest.size):
            scales[n, g], divisors[g] = _power_of_two(largest[g], form, weight[0, 0])
        _round_rows(weight, codes, n, n + 1, width, divisors, low, high, grid)


def _e4m3_scales(weight, codes, scales, largest, divisors, width, limits, grid):
    low, high, steps, outer, most = limits
    for n in range(weight.shape[0]):
        _find_largest(weight, n, n + 1, width, largest)
        for g in range(largest.size):
            top = _widened_any(_from_order(largest[g], weight[0, 0]))
            scale = outer * _widened_any(_stored(top / steps, weight[0, 0]))
            code = _code(most if scale > most else scale, np.uint8(0))
            scales[n, g] = code if code != 0 else np.uint8(0x20)  # 0.125
            divisors[g] = _e4m3_value(scales[n, g]) / outer
        _round_rows(weight, codes, n, n + 1, width, divisors, low, high, grid)


quantize_symmetric = Kernel(_symmetric)
quantize_asymmetric = Kernel(_asymmetric)
quantize_given = Kernel(_given_scale)
quantize_powers_of_two = Kernel(_powers_of_two)
quantize_e4m3_scales = Kernel(_e4m3_scales)
