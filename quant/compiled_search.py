"""Loops of the search for scales, compiled by numba; `search` says what they compute, bit for bit.

What they call stands in this same file, see `compiled_kernels`. dtypes say what is meant:

    the form of a number   uint16 bfloat16, int16 float16, float32 float32
    `grid`                 int8 any integers, uint8 e4m3, uint16 e2m1, uint32 e2m3

Letters: T tiles, L blocks of a tile, E elements of a block, C candidates of scales.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from quantload.quant.compiled_jit import Kernel, inlined

LANES = 32  # blocks of a tile; compiled into the loops

_I8, _I32, _FLOAT = ir.IntType(8), ir.IntType(32), ir.FloatType()
_SIGN, _MAGNITUDE, _EXPONENT = -1 << 31, 0x7FFFFFFF, 0x7F800000
_INTEGERS = 12582912.0  # 1.5 * 2^23: float32 sums near it are integers
_HALF_STEPS = 0.5  # float32 near it lie 2^-24 apart, as float16 numbers below 2^-14 do
_HALF_SMALLEST, _HALF_BEYOND = (127 - 14) << 23, 0x477FF000  # 2^-14, and 65520: it becomes infinity
_NARROW = {types.uint8: (4, 3), types.uint16: (2, 1), types.uint32: (2, 3)}  # exponent, mantissa


# -- single numbers --------------------------------------------------------------------------------


@intrinsic
def _rounded(context, value, like):
    """A float32 rounded to the form of `like`, as float32."""

    def build(_, builder, __, values):
        return _round_float(builder, like, values[0])

    return types.float32(types.float32, like), build


@intrinsic
def _nearest(context, value, grid):
    """The value of the grid that is nearest to a float32 in its range, ties to even."""

    def build(_, builder, __, values):
        value = values[0]
        if grid == types.int8:
            rounder = _FLOAT(_INTEGERS)
            return builder.fsub(builder.fadd(value, rounder), rounder)
        exponent_bits, mantissa_bits = _NARROW[grid]
        bits = builder.bitcast(value, _I32)
        field = builder.and_(bits, _I32(_EXPONENT))
        least = _I32((127 + 2 - (1 << (exponent_bits - 1))) << 23)
        field = builder.select(builder.icmp_signed("<", field, least), least, field)
        # a sum with this number, of the same sign, has the step of the grid as its own
        field = builder.add(field, _I32((23 - mantissa_bits) << 23))
        rounder = builder.or_(field, builder.and_(bits, _I32(_SIGN)))
        rounder = builder.bitcast(rounder, _FLOAT)
        return builder.fsub(builder.fadd(value, rounder), rounder)

    return types.float32(types.float32, grid), build


@intrinsic
def _code(context, value, nearest, grid):
    """The code of a value of the grid; a zero has the sign of what was rounded to it."""

    def build(_, builder, __, values):
        if grid == types.int8:
            return builder.trunc(builder.fptosi(values[1], _I32), _I8)
        return _narrow_code(builder, values[0], values[1], *_NARROW[grid])

    return types.uint8(types.float32, types.float32, grid), build


def _narrow_code(builder, value, nearest, exponent_bits: int, mantissa_bits: int):
    smallest = 2 - (1 << (exponent_bits - 1))  # exponent below which numbers lie evenly
    bits = builder.and_(builder.bitcast(nearest, _I32), _I32(_MAGNITUDE))
    normal = builder.sub(
        builder.lshr(bits, _I32(23 - mantissa_bits)), _I32((126 + smallest) << mantissa_bits)
    )
    steps = builder.fmul(builder.bitcast(bits, _FLOAT), _FLOAT(2.0 ** (mantissa_bits - smallest)))
    is_small = builder.icmp_signed("<", bits, _I32((127 + smallest) << 23))
    # the number of steps is only that of what is small: others might overflow it
    counted = builder.fptosi(builder.select(is_small, steps, _FLOAT(0.0)), _I32)
    sign = builder.lshr(
        builder.and_(builder.bitcast(value, _I32), _I32(_SIGN)),
        _I32(31 - exponent_bits - mantissa_bits),
    )
    return builder.trunc(builder.or_(builder.select(is_small, counted, normal), sign), _I8)


def _round_float(builder, like, value):
    if like == types.float32:
        return value
    bits, dropped = builder.bitcast(value, _I32), 16 if like == types.uint16 else 13
    odd = builder.and_(builder.lshr(bits, _I32(dropped)), _I32(1))
    kept = builder.add(builder.add(bits, _I32((1 << (dropped - 1)) - 1)), odd)
    kept = builder.and_(kept, _I32(-1 << dropped))
    if like == types.uint16:
        return builder.bitcast(kept, _FLOAT)
    sign = builder.and_(bits, _I32(_SIGN))
    magnitude = builder.and_(bits, _I32(_MAGNITUDE))
    counted = builder.fadd(builder.bitcast(magnitude, _FLOAT), _FLOAT(_HALF_STEPS))
    small = builder.bitcast(builder.fsub(counted, _FLOAT(_HALF_STEPS)), _I32)
    is_small = builder.icmp_unsigned("<", magnitude, _I32(_HALF_SMALLEST))
    found = builder.select(is_small, builder.or_(small, sign), kept)
    is_beyond = builder.icmp_unsigned(">=", magnitude, _I32(_HALF_BEYOND))
    infinity = builder.or_(sign, _I32(_EXPONENT))
    return builder.bitcast(builder.select(is_beyond, infinity, found), _FLOAT)


# -- blocks side by side ---------------------------------------------------------------------------
# A tile is [E, L], flat: the elements of L blocks. What belongs to a block is [L]; `tried` is
# [3, L], flat: 1 / scale, zero point and scale of each. There are no slices in loops and few arrays
# that might overlap, so that LLVM makes vectors of them.


@inlined
def _put(tried, scale, zero):
    for i in range(LANES):
        tried[i] = np.float32(1.0) / scale[i]
        tried[LANES + i] = zero[i]
        tried[2 * LANES + i] = scale[i]


@inlined
def _sums(terms, sums):
    """Add up each block by halves; the terms are overwritten."""
    count = terms.size // LANES
    while count > 1:
        half = (count + 1) >> 1
        for i in range((count - half) * LANES):
            terms[i] += terms[half * LANES + i]
        count = half
    for i in range(LANES):
        sums[i] = terms[i]


@inlined
def _weigh(terms, counts):
    for i in range(counts.size):
        terms[i] *= counts[i]


@inlined
def _squares_of_read(tile, read, terms):
    for i in range(tile.size):
        terms[i] = (read[i] - tile[i]) * (read[i] - tile[i])


@inlined
def _squares(tile, tried, low, high, grid, form, terms):
    for k in range(tile.size // LANES):
        for i in range(LANES):
            number = tile[k * LANES + i]
            scaled = number * tried[i] + tried[LANES + i]
            scaled = low if scaled < low else scaled
            scaled = high if scaled > high else scaled
            value = _nearest(scaled, grid) - tried[LANES + i]
            off = _rounded(value * tried[2 * LANES + i], form) - number
            terms[k * LANES + i] = off * off


@inlined
def _values(tile, tried, low, high, grid, terms):
    for k in range(tile.size // LANES):
        for i in range(LANES):
            scaled = tile[k * LANES + i] * tried[i] + tried[LANES + i]
            scaled = low if scaled < low else scaled
            scaled = high if scaled > high else scaled
            terms[k * LANES + i] = _nearest(scaled, grid) - tried[LANES + i]


@inlined
def _multiply(one, other, products):
    for i in range(one.size):
        products[i] = one[i] * other[i]


@inlined
def _codes(tile, tried, low, high, grid, codes):
    for k in range(tile.size // LANES):
        for i in range(LANES):
            scaled = tile[k * LANES + i] * tried[i] + tried[LANES + i]
            scaled = low if scaled < low else scaled
            scaled = high if scaled > high else scaled
            codes[k * LANES + i] = _code(scaled, _nearest(scaled, grid), grid)


@inlined
def _fit(tile, counts, tried, bounds, grid, forms, terms, fitted):
    """Find the scales that fit the codes, as they are stored."""
    _, scale_form, model_form = forms
    weighted, values, below = terms[0], terms[1], terms[2, :LANES]
    _values(tile, tried, bounds[0], bounds[1], grid, values)
    weighted[:] = values
    _weigh(weighted, counts)
    _multiply(weighted, values, values)
    _sums(values, below)
    _multiply(weighted, tile, weighted)
    _sums(weighted, fitted)
    for i in range(LANES):
        fitted[i] = _rounded(_rounded(fitted[i] / below[i], model_form), scale_form)


@inlined
def _take(error, best, tried, number, place, scale, zero):
    """Take a candidate in the blocks where it is better than the best so far."""
    for i in range(LANES):
        if error[i] < best[i] and abs(tried[i]) < np.float32(np.inf):
            best[i], place[i] = error[i], number
            zero[i], scale[i] = tried[LANES + i], tried[2 * LANES + i]


# -- tiles -----------------------------------------------------------------------------------------


def _search(
    tiles, reads, counts, scales, zeros, moves, codes, places, limits, forms, fits, terms, grid
):
    low, high, less, smallest = limits
    given = scales.shape[0] * moves.size
    error, best = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    zero, tried = np.empty(LANES, np.float32), np.empty(3 * LANES, np.float32)
    for t in range(tiles.shape[0]):
        tile, count, place = tiles[t], counts[t], places[t]
        scale, chosen = scales[0, t].copy(), zeros[t].copy()
        _squares_of_read(tile, reads[t], terms[0])
        _weigh(terms[0], count)
        _sums(terms[0], best)
        for i in range(LANES):
            best[i] = best[i] * less if best[i] >= smallest else np.float32(0.0)
            place[i] = -1
        for c in range(given + fits):
            if c < given:
                for i in range(LANES):
                    moved = zeros[t, i] + moves[c % moves.size]
                    moved = low if moved < low else moved
                    zero[i] = high if moved > high else moved
                _put(tried, scales[c // moves.size, t], zero)
            else:
                _put(tried, scale, chosen)
                _fit(tile, count, tried, (low, high), grid, forms, terms, error)
                _put(tried, error, chosen)
            _squares(tile, tried, low, high, grid, forms[0], terms[0])
            _weigh(terms[0], count)
            _sums(terms[0], error)
            _take(error, best, tried, c // moves.size, place, scale, chosen)
        _put(tried, scale, chosen)
        _codes(tile, tried, low, high, grid, codes[t])
        scales[0, t], zeros[t] = scale, chosen


search_tiles = Kernel(_search)
