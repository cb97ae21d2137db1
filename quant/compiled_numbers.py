"""Stored numbers inside compiled loops: their forms, one by one and in runs of neighbours.

dtypes say what is meant, so that numba makes one program for each case:

    weights, scales   uint16 bfloat16, int16 float16, float32 float32
    `grid`            int8 any integers (a code is their low byte), uint8 e4m3, uint16 e2m1,
                      uint32 e2m3

Everything here is an intrinsic of numba: a function of types, that returns a signature and what
writes LLVM instructions. What writes them takes vectors as well as single numbers: a run of
neighbours is one vector, whatever LLVM makes of the loop around it.

Conversions are integer arithmetic: LLVM's own of float16 call a function where the processor has no
instruction, and numba stops the process if it does not find it.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_I8, _I16, _I32, _FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()
_INTEGERS = 12582912.0  # 1.5 * 2^23: a float32 sum near it has the integer in its low bits
_HALF_STEPS = 0.5  # float32 near it lie 2^-24 apart, as float16 numbers below 2^-14 do
_HALF_BIAS = 127 - 15  # between the exponents of float32 and of float16
_NARROW = {types.uint8: (4, 3), types.uint16: (2, 1), types.uint32: (2, 3)}  # exponent, mantissa


# -- single numbers --------------------------------------------------------------------------------


@intrinsic
def widened(context, number):
    """A finite stored number as float32."""

    def build(_, builder, __, values):
        return _as_float(builder, number, values[0])

    return types.float32(number), build


@intrinsic
def widened_any(context, number):
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
def stored(context, value, like):
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
def next_above(context, number):
    """The next larger stored number, of a positive one."""

    def build(_, builder, __, values):
        bits = _bits_of(builder, number, values[0])
        return builder.bitcast(builder.add(bits, bits.type(1)), values[0].type)

    return number(number), build


@intrinsic
def magnitude(context, number):
    """A stored number without its sign, as an integer: ordered as the numbers are, NaN last."""

    def build(_, builder, __, values):
        return _without_sign(builder, _bits_of(builder, number, values[0]))

    return _integer_of(number)(number), build


@intrinsic
def order(context, number):
    """A stored number as a signed integer: ordered as the numbers are, NaN first or last."""

    def build(_, builder, __, values):
        return _turned(builder, _bits_of(builder, number, values[0]))

    return _integer_of(number)(number), build


@intrinsic
def from_order(context, order, like):
    """Undo `order`, and `magnitude`."""

    def build(_, builder, __, values):
        bits = _turned(builder, values[0])
        return builder.bitcast(bits, _FLOAT) if like == types.float32 else bits

    return like(order, like), build


@intrinsic
def code_of(context, value, grid):
    """The code nearest to a float32 in the grid's range, ties to even; that of -0.0 is 0.

    What is rounded to zero from below keeps its sign.
    """

    def build(_, builder, __, values):
        return _code(builder, values[0], grid)

    return types.uint8(types.float32, grid), build


@intrinsic
def e4m3_value(context, code):
    """The value of a positive e4m3 code as float32."""

    def build(_, builder, __, values):
        moved = builder.shl(builder.zext(values[0], _I32), _I32(23 - 3))
        one = _I32((127 - 6) << 23)  # the smallest normal number; subnormals count from it
        counted = _to_float(builder, builder.add(moved, one))
        small = builder.fsub(counted, _to_float(builder, one))
        normal = _to_float(builder, builder.add(moved, _I32((127 - 7) << 23)))
        is_small = builder.icmp_unsigned("<", moved, _I32(1 << 23))
        return builder.select(is_small, small, normal)

    return types.float32(code), build


# -- runs of neighbours ----------------------------------------------------------------------------
# Arrays are contiguous; `at` counts numbers from their start.


@intrinsic
def fetch(context, weight, at):
    """Fetch a number into the cache, with the line around it; it may lie beyond the array."""

    def build(context, builder, _, values):
        _prefetch(builder, _place(context, builder, weight, *values))
        return context.get_dummy_value()

    return types.void(weight, at), build


def _rounding(lanes: int):
    """The intrinsic that rounds a run of so many numbers."""

    @intrinsic
    def rounds(context, weight, codes, at, scale, zero, low, high, grid, form, ahead):
        """Write the codes of numbers / scale + zero; zero may be None.

        Each operation is rounded to `form`, in which its result is in range. The number that comes
        `ahead` later is fetched into the cache.
        """
        numbers, flags = (types.float32,) * 2, (grid, form)

        def build(context, builder, _, values):
            source = _place(context, builder, weight, values[0], values[2])
            target = _place(context, builder, codes, values[1], values[2])
            if lanes > 1:
                _prefetch(builder, builder.gep(source, [values[9]]))
            loaded = _load(builder, source, lanes)
            scales, lows, highs = (_spread(builder, values[i], lanes) for i in (3, 5, 6))
            quotient = builder.fdiv(_as_float(builder, weight.dtype, loaded), scales)
            value = _round_float(builder, form, quotient)
            if zero != types.none:
                moved = builder.fadd(value, _spread(builder, values[4], lanes))
                value = _round_float(builder, form, moved)
            value = builder.select(builder.fcmp_ordered("<", value, lows), lows, value)
            value = builder.select(builder.fcmp_ordered(">", value, highs), highs, value)
            _store(builder, _code(builder, value, grid), target)
            return context.get_dummy_value()

        return types.void(weight, codes, at, types.float32, zero, *numbers, *flags, ahead), build

    return rounds


def _reduction(lanes: int, name: str):
    """The intrinsic that finds the largest magnitude, or the least or greatest order, of a run."""

    @intrinsic
    def reduces(context, weight, at):
        number = weight.dtype

        def build(context, builder, _, values):
            loaded = _load(builder, _place(context, builder, weight, *values), lanes)
            bits = _bits_of(builder, number, loaded)
            turn = _without_sign if name == "magnitude" else _turned
            found = turn(builder, bits)
            kind = found.type.element
            suffix = f"{'smin' if name == 'least' else 'smax'}.v{lanes}i{kind.width}"
            called = ir.FunctionType(kind, [found.type])
            reduce = f"llvm.vector.reduce.{suffix}"
            return builder.call(_declared(builder, reduce, called), [found])

        return _integer_of(number)(weight, at), build

    return reduces


round_1, round_16, round_32 = (_rounding(lanes) for lanes in (1, 16, 32))
largest_16, largest_32, largest_128 = (_reduction(lanes, "magnitude") for lanes in (16, 32, 128))
least_16, least_128 = (_reduction(lanes, "least") for lanes in (16, 128))
greatest_16, greatest_128 = (_reduction(lanes, "greatest") for lanes in (16, 128))


# -- instructions ----------------------------------------------------------------------------------
# Values are single numbers or vectors of them.


def _place(context, builder, array_type, array, at):
    """Pointer to a number of an array."""
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [at])


def _load(builder, source, lanes: int):
    if lanes == 1:
        return builder.load(source)
    element = source.type.pointee
    run = builder.bitcast(source, ir.VectorType(element, lanes).as_pointer())
    return builder.load(run, align=4 if element == _FLOAT else element.width // 8)


def _store(builder, value, target):
    builder.store(value, builder.bitcast(target, value.type.as_pointer()), align=1)


def _prefetch(builder, place):
    pointer = _I8.as_pointer()
    called = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
    function = _declared(builder, "llvm.prefetch", called)
    read, keep, data = _I32(0), _I32(3), _I32(1)
    builder.call(function, [builder.bitcast(place, pointer), read, keep, data])


def _declared(builder, name: str, called):
    known = builder.module.globals.get(name)
    return known or ir.Function(builder.module, called, name)


def _spread(builder, value, lanes: int):
    """A vector of the same number everywhere."""
    if lanes == 1:
        return value
    kind = ir.VectorType(value.type, lanes)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, _I32(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(_I32, lanes), 0))


def _kind(kind, value):
    """A type, or the vectors of it that are as long as a value."""
    return ir.VectorType(kind, value.type.count) if _is_vector(value) else kind


def _is_vector(value) -> bool:
    return isinstance(value.type, ir.VectorType)


def _number(value, constant):
    """A constant of the type of a value."""
    return ir.Constant(value.type, constant)


def _integer_of(number):
    return types.int32 if number == types.float32 else types.int16


def _bits_of(builder, number, value):
    return builder.bitcast(value, _kind(_I32, value)) if number == types.float32 else value


def _all_but_sign(bits):
    element = bits.type.element if _is_vector(bits) else bits.type
    return _number(bits, (1 << (element.width - 1)) - 1)


def _sign_place(bits):
    element = bits.type.element if _is_vector(bits) else bits.type
    return _number(bits, element.width - 1)


def _without_sign(builder, bits):
    return builder.and_(bits, _all_but_sign(bits))


def _turned(builder, bits):
    sign = builder.ashr(bits, _sign_place(bits))
    return builder.xor(bits, builder.and_(sign, _all_but_sign(bits)))


def _to_bits(builder, value):
    return builder.bitcast(value, _kind(_I32, value))


def _to_float(builder, bits):
    return builder.bitcast(bits, _kind(_FLOAT, bits))


def _as_float(builder, number, value):
    """A finite stored number as float32."""
    if number == types.float32:
        return value
    bits = builder.zext(value, _kind(_I32, value))
    if number == types.uint16:
        return _to_float(builder, builder.shl(bits, _number(bits, 16)))
    sign = builder.shl(builder.and_(bits, _number(bits, 0x8000)), _number(bits, 16))
    moved = builder.shl(builder.and_(bits, _number(bits, 0x7FFF)), _number(bits, 13))
    normal = builder.add(moved, _number(bits, _HALF_BIAS << 23))
    one = _number(bits, (_HALF_BIAS + 1) << 23)  # the smallest normal; subnormals count from it
    counted = _to_float(builder, builder.add(moved, one))
    small = _to_bits(builder, builder.fsub(counted, _to_float(builder, one)))
    is_small = builder.icmp_unsigned("<", moved, _number(bits, 1 << 23))
    return _to_float(builder, builder.or_(builder.select(is_small, small, normal), sign))


def _round_float(builder, like, value):
    """A float32 rounded to the form of `like`, as float32; its magnitude is in range."""
    if like == types.float32:
        return value
    bits, dropped = _to_bits(builder, value), 16 if like == types.uint16 else 13
    rounded = _round_bits(builder, bits, dropped)
    kept = builder.and_(rounded, _number(bits, -1 << dropped))
    if like == types.uint16:
        return _to_float(builder, kept)
    sign = builder.and_(bits, _number(bits, -1 << 31))
    magnitude = _without_sign(builder, bits)
    steps = _number(value, _HALF_STEPS)
    counted = builder.fadd(_to_float(builder, magnitude), steps)
    small = _to_bits(builder, builder.fsub(counted, steps))
    is_small = builder.icmp_unsigned("<", magnitude, _number(bits, (_HALF_BIAS + 1) << 23))
    return _to_float(builder, builder.select(is_small, builder.or_(small, sign), kept))


def _round_bits(builder, bits, dropped: int):
    odd = builder.and_(builder.lshr(bits, _number(bits, dropped)), _number(bits, 1))
    return builder.add(builder.add(bits, _number(bits, (1 << (dropped - 1)) - 1)), odd)


def _half_bits(builder, bits):
    """Bits of a float16 from those of the float32 that equals it."""
    sign = builder.and_(builder.lshr(bits, _I32(16)), _I32(0x8000))
    magnitude = _without_sign(builder, bits)
    moved = builder.sub(builder.lshr(magnitude, _I32(13)), _I32(_HALF_BIAS << 10))
    finite = builder.icmp_unsigned("<", magnitude, _I32((_HALF_BIAS + 31) << 23))
    normal = builder.select(finite, moved, _I32(0x7C00))
    steps = builder.fadd(_to_float(builder, magnitude), _FLOAT(_HALF_STEPS))
    small = builder.and_(_to_bits(builder, steps), _I32(0x7FFFFF))
    is_small = builder.icmp_unsigned("<", magnitude, _I32((_HALF_BIAS + 1) << 23))
    return builder.trunc(builder.or_(sign, builder.select(is_small, small, normal)), _I16)


def _code(builder, value, grid):
    if grid == types.int8:
        moved = builder.fadd(value, _number(value, _INTEGERS))
        return builder.trunc(_to_bits(builder, moved), _kind(_I8, value))
    if grid != types.uint32:  # the original adds a zero point of 0, but not to e2m3
        value = builder.fadd(value, _number(value, 0.0))
    return _narrow_bits(builder, _to_bits(builder, value), *_NARROW[grid])


def _narrow_bits(builder, bits, exponent_bits: int, mantissa_bits: int):
    """Code of a float32 in the range of a float of few bits, from its bits."""
    smallest = 2 - (1 << (exponent_bits - 1))  # exponent below which numbers lie evenly
    magnitude, dropped = _without_sign(builder, bits), 23 - mantissa_bits
    nearest = builder.lshr(_round_bits(builder, magnitude, dropped), _number(bits, dropped))
    normal = builder.sub(nearest, _number(bits, (127 + smallest - 1) << mantissa_bits))
    even = 2.0 ** (23 + smallest - mantissa_bits)  # float32 near it lie as far apart
    wide = _to_float(builder, magnitude)
    steps = _to_bits(builder, builder.fadd(wide, _number(wide, even)))
    is_small = builder.icmp_unsigned("<", magnitude, _number(bits, (127 + smallest) << 23))
    small = builder.and_(steps, _number(bits, 0xFF))
    sign = builder.and_(bits, _number(bits, -1 << 31))
    sign = builder.lshr(sign, _number(bits, 31 - exponent_bits - mantissa_bits))
    code = builder.or_(builder.select(is_small, small, normal), sign)
    return builder.trunc(code, _kind(_I8, bits))
