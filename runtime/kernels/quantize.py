"""How kernels quantize an input: the codes and scales of `quant.activation`, bit for bit.

Every operation rounds to the dtype of the input, as torch's own does there: the scale of a row is
bf16(max|x| / 448), and bf16(x / scale) is what becomes a code. Of a row or group with NaN or
infinity the scale is not finite and codes mean nothing, so that its products are not finite either.

Kernels that compute an input (a norm, a gated unit) can round it themselves: `row_codes`,
`group_codes` and `static_codes` take float32 tiles that hold values of that dtype, with zeros where
nothing is. Codes are int8, of e4m3 its bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quantload.quant.grid import E4M3
from quantload.quant.scheme import InputScheme

__all__ = [
    "DTYPES",
    "E4M3_GRID",
    "INT8_GRID",
    "INTERPRETED",
    "group_codes",
    "quotient",
    "rounded",
    "row_codes",
    "row_reach",
    "row_scale",
    "scaled_codes",
    "static_codes",
    "why_not",
    "without_zeros",
]

INT8_GRID, E4M3_GRID = tl.constexpr(0), tl.constexpr(1)  # GRID of the device functions
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def why_not(scheme: InputScheme, dtype: torch.dtype) -> str | None:
    """Say why the kernels cannot quantize inputs of `dtype` so, or None."""
    if scheme.grid.name not in ("int8", "e4m3"):
        return f"codes of inputs are int8 or e4m3, found `{scheme.grid.name}`"
    if dtype not in DTYPES:
        return f"inputs are {dtype}, the kernel takes bfloat16, float16 and float32"
    if scheme.scale == "e4m3":
        return "scales of inputs are floats or powers of two, found e4m3"
    if scheme.granularity == "group":
        if not scheme.symmetric or scheme.grid != E4M3:
            return "groups of an input are e4m3 without zero points"
        size = scheme.group_size or 0
        if size not in (16, 32, 64, 128, 256):
            return f"groups of an input are 16 to 256 features, a power of two, found {size}"
        return None
    if scheme.scale != "float":
        return f"a scale a {scheme.granularity} is a float, found {scheme.scale}"
    if not scheme.symmetric and scheme.grid == E4M3:
        return "e4m3 inputs come without zero points"
    return None


# -- device functions ------------------------------------------------------------------------------
# NOTE: nothing of `triton.language.standard`, see `weight_only`.


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """Round float32 to the values of DTYPE, ties to even."""
    if tl.float32 == DTYPE:
        return x
    if INTERPRETED and tl.bfloat16 == DTYPE:  # the interpreter cuts bits off
        bits = x.to(tl.int32, bitcast=True)
        near = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return tl.where(x != x, x, near.to(tl.float32, bitcast=True))
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def quotient(x, divisor):
    """Divide float32 numbers, correctly rounded."""
    if INTERPRETED:
        return x / divisor
    return tl.div_rn(x, divisor)


@triton.jit
def row_reach(x, AXIS: tl.constexpr):
    """The largest |x| along an axis; NaN, where there is one, is larger than infinity."""
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.reduce(bits, AXIS, larger).to(tl.float32, bitcast=True)


@triton.jit
def without_zeros(scale, DTYPE: tl.constexpr):
    """Replace scales of 0 by the eps of DTYPE."""
    eps: tl.constexpr = (
        2.0**-7 if tl.bfloat16 == DTYPE else (2.0**-10 if tl.float16 == DTYPE else 2.0**-23)
    )
    return tl.where(scale == 0.0, eps, scale)


@triton.jit
def row_scale(reach, GRID: tl.constexpr, DTYPE: tl.constexpr):
    """The symmetric scale of what reaches `reach`, in float32."""
    half: tl.constexpr = 127.5 if GRID == INT8_GRID else 448.0
    return without_zeros(rounded(quotient(reach, half), DTYPE), DTYPE)


@triton.jit
def e4m3_bits(x):
    """The bits of the nearest e4m3 numbers, ties to even; x is NaN or at most 448."""
    if not INTERPRETED:
        return x.to(tl.float8e4nv).to(tl.int8, bitcast=True)
    size = tl.abs(x)
    field = tl.maximum(size.to(tl.int32, bitcast=True) >> 23, 121)  # 2^-6 is the smallest normal
    step = ((field + 20) << 23).to(tl.float32, bitcast=True)
    size = (size + step) - step  # a sum with this has the mantissa's last bit as its own
    normal = (size.to(tl.int32, bitcast=True) >> 20) - (120 << 3)
    bits = tl.where(size < 0.015625, (size * 512.0).to(tl.int32), normal)
    bits = tl.where(x != x, 127, bits)
    return (bits | ((x.to(tl.int32, bitcast=True) >> 24) & 128)).to(tl.int8)


@triton.jit
def nearest_codes(scaled, GRID: tl.constexpr):
    """Clamp and round to the codes of a grid, as int8."""
    if GRID == E4M3_GRID:
        if INTERPRETED:
            scaled = tl.where(scaled > 448.0, 448.0, tl.where(scaled < -448.0, -448.0, scaled))
        return e4m3_bits(scaled)  # the instruction saturates
    scaled = tl.minimum(tl.maximum(scaled, -128.0), 127.0)
    # adding 1.5 * 2^23 leaves the integer, ties to even, in the low bits
    return ((scaled + 12582912.0).to(tl.int32, bitcast=True) & 255).to(tl.int8)


@triton.jit
def scaled_codes(x, scale, zero, GRID: tl.constexpr, DTYPE: tl.constexpr):
    """The codes of x for a scale that broadcasts with it: each operation rounds to DTYPE.

    Args:
        x: float32 with values of DTYPE.
        scale: float32 with values of DTYPE.
        zero: float32 zero points that broadcast with x, or None.
        GRID: As in `row_codes`.
        DTYPE: As in `row_codes`.
    """
    if INTERPRETED or tl.float32 == DTYPE:
        scaled = quotient(x, scale)
    else:
        # A quotient and one correction with its exact remainder: what a correctly rounded quotient
        # of numbers of 8 or 11 bits rounds to. Small scales are moved to where they have inverses.
        lift = tl.where(tl.abs(scale) < 2.0**-100, 2.0**64, 1.0)
        divisor = scale * lift
        inverse = tl.div_rn(1.0, divisor)
        near = x * lift * inverse
        scaled = tl.fma(tl.fma(-near, divisor, x * lift), inverse, near)
    scaled = rounded(scaled, DTYPE)
    if zero is not None:
        scaled = rounded(scaled + zero, DTYPE)
    return nearest_codes(scaled + 0.0, GRID)  # -0 becomes 0


@triton.jit
def row_codes(x, GRID: tl.constexpr, DTYPE: tl.constexpr):
    """Quantize the rows of a tile that holds whole rows, symmetrically.

    Args:
        x: [ROWS, COLUMNS] float32 with values of DTYPE, zeros where nothing is.
        GRID: INT8_GRID or E4M3_GRID.
        DTYPE: tl.bfloat16, tl.float16 or tl.float32, the dtype of the input.

    Returns:
        Codes [ROWS, COLUMNS] int8 and scales [ROWS] float32.
    """
    scale = row_scale(row_reach(x, 1), GRID, DTYPE)
    return scaled_codes(x, scale[:, None], None, GRID, DTYPE), scale


@triton.jit
def power_of_two_scale(reach, DTYPE: tl.constexpr):
    """The MX scale of e4m3 codes that reach `reach`, in float32; NaN if it is not finite."""
    bits = reach.to(tl.int32, bitcast=True)
    field = (bits + (1 << 21)) >> 23  # the next power of two from 1.75 on
    if tl.float16 == DTYPE:
        field = tl.where(reach < 0.75 * 2.0**-14, 0, tl.maximum(field, 127 - 14))
        overflows = (field >= 127 + 16) | (reach != reach)
        byte = tl.where(field == 0, 127, field - 8)
    else:
        overflows = (field >= 255) | (bits >= 0x7F800000)
        byte = tl.maximum(field - 8, 0)
    # 2^-127 is a subnormal
    scale = tl.where(byte == 0, 1 << 22, byte << 23).to(tl.float32, bitcast=True)
    return tl.where(overflows, float("nan"), scale)


@triton.jit
def group_codes(x, GRID: tl.constexpr, DTYPE: tl.constexpr, POWERS: tl.constexpr):
    """Quantize groups of a tile, symmetrically.

    Args:
        x: [ROWS, GROUPS, SIZE] float32 with values of DTYPE, zeros where nothing is.
        GRID: As in `row_codes`.
        DTYPE: As in `row_codes`.
        POWERS: Scales are powers of two, as in MX formats.

    Returns:
        Codes [ROWS, GROUPS, SIZE] int8 and scales [ROWS, GROUPS] float32.
    """
    reach = row_reach(x, 2)
    scale = power_of_two_scale(reach, DTYPE) if POWERS else row_scale(reach, GRID, DTYPE)
    return scaled_codes(x, scale[:, :, None], None, GRID, DTYPE), scale


@triton.jit
def static_codes(x, scale, zero, GRID: tl.constexpr, DTYPE: tl.constexpr):
    """Quantize with a fixed scale.

    Args:
        x: float32 with the values of the input.
        scale: float32, a scalar.
        zero: float32, a scalar, or None.
        GRID: As in `row_codes`.
        DTYPE: The wider of the dtypes of input and scale.

    Returns:
        Codes, int8, of the shape of x.
    """
    scaled = rounded(quotient(x, scale), DTYPE)
    if zero is not None:
        scaled = rounded(scaled + zero, DTYPE)
    return nearest_codes(scaled, GRID)
