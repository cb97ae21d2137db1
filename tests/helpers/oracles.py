"""Slow references in NumPy, written from the formulas and the standards, importing nothing of ours.

Numbers in float16 and bfloat16 are held in float32 arrays. A result "in a dtype" is the float32
result rounded to it, which for one addition, product or quotient of two such numbers is the
correctly rounded one.
"""

import numpy as np
import torch

# -- number formats ----------------------------------------------------------------------------


def minifloat_values(exponent_bits, mantissa_bits, *, bias):
    """Values of all non-negative codes as if every code were finite, in float64."""
    codes = range(1 << (exponent_bits + mantissa_bits))
    values = []
    for code in codes:
        exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        hidden = 0 if exponent == 0 else 1 << mantissa_bits
        values.append((hidden + mantissa) * 2.0 ** (max(exponent, 1) - bias - mantissa_bits))
    return np.array(values)


def _signed(magnitudes):
    return np.concatenate([magnitudes, -magnitudes])


def e4m3_values():
    """All 256 codes of OCP E4M3: no infinity, the last code of each sign is NaN."""
    magnitudes = minifloat_values(4, 3, bias=7)
    magnitudes[0x7F] = np.nan
    return _signed(magnitudes)


def e5m2_values():
    """All 256 codes of OCP E5M2: exponent 31 is infinity and three NaN."""
    magnitudes = minifloat_values(5, 2, bias=15)
    magnitudes[0x7C] = np.inf
    magnitudes[0x7D:] = np.nan
    return _signed(magnitudes)


def e2m1_values():
    """All 16 codes of OCP E2M1."""
    return _signed(minifloat_values(2, 1, bias=1))


def e8m0_values():
    """All 256 codes of OCP E8M0: powers of two, the last code is NaN."""
    return np.append(2.0 ** (np.arange(255) - 127.0), np.nan)


def nearest_codes(numbers, values):
    """Codes of the values nearest to finite numbers, ties to the even code, too large to largest.

    Args:
        numbers: [...] any float dtype.
        values: All codes of a sign-magnitude format, as returned above.
    """
    half = len(values) // 2
    magnitudes = values[:half][np.isfinite(values[:half])]
    sizes = np.minimum(np.abs(numbers.astype(np.float64)), magnitudes[-1])
    above = np.searchsorted(magnitudes, sizes)
    below = np.maximum(above - 1, 0)
    to_above, to_below = magnitudes[above] - sizes, sizes - magnitudes[below]
    even = np.where(above % 2 == 0, above, below)
    codes = np.where(to_above == to_below, even, np.where(to_above < to_below, above, below))
    return codes + half * np.signbit(numbers)


def rounded(numbers, dtype):
    """Round float32 to "float32", "float16" or "bfloat16"; the result is float32 again."""
    numbers = np.asarray(numbers, dtype=np.float32)
    if dtype == "float32":
        return numbers
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return numbers.astype(np.float16).astype(np.float32)
    bits = numbers.view(np.uint32)
    kept = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(numbers), np.float32(np.nan), kept.view(np.float32))


def as_numpy(tensor):
    """The numbers of a tensor of at most 32 bits an element, decoded from its bits, in float32."""
    tensor = tensor.contiguous()
    tables = {
        torch.float8_e4m3fn: e4m3_values,
        torch.float8_e5m2: e5m2_values,
        torch.float8_e8m0fnu: e8m0_values,
    }
    if tensor.dtype in tables:
        return tables[tensor.dtype]()[tensor.view(torch.uint8).numpy()].astype(np.float32)
    if tensor.dtype == torch.bfloat16:
        bits = tensor.view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
        return (bits << 16).view(np.float32)
    return tensor.numpy().astype(np.float32)


def same_bits(one, other):
    """True if two tensors have one dtype and shape and the same bits; any NaN equals any NaN."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.element_size() == 1:
        return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
    if one.dtype.is_floating_point:
        whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
        quiet = torch.full((), torch.nan, dtype=one.dtype)
        one, other = (torch.where(x.isnan(), quiet, x).view(whole) for x in (one, other))
    return torch.equal(one, other)


# -- quantized tensors -------------------------------------------------------------------------


def dequantized(
    values, scale, block, dtype, *, zero=None, offset=None, outer=None, use="scale*", group_of=None
):
    """W[n, k] of the canonical formula, every operation rounded to `dtype`.

    Args:
        values: [N, K] float32, the value of each code.
        scale, zero, offset: [R, G] float32.
        block: Rows and columns that share a scale.
        dtype: "float32", "float16" or "bfloat16".
        outer: [1, 1] or [N, 1] float32.
        use: "scale*", "scale/", "value*" or "value/".
        group_of: [K], the group of each column.
    """
    n_rows, n_columns = values.shape
    row_of = [n // block[0] for n in range(n_rows)]
    column_of = [k // block[1] for k in range(n_columns)] if group_of is None else list(group_of)

    def spread(part):
        return rounded(part, dtype)[row_of][:, column_of]

    with np.errstate(all="ignore"):
        factor = None if outer is None else rounded(outer, dtype)
        result, step = rounded(values, dtype), spread(scale)
        if factor is not None and use == "scale*":
            step = rounded(step * factor, dtype)
        if factor is not None and use == "scale/":
            step = rounded(step / factor, dtype)
        if zero is not None:
            result = rounded(result - spread(zero), dtype)
        result = rounded(result * step, dtype)
        if offset is not None:
            result = rounded(result + spread(offset), dtype)
        if factor is not None and use == "value*":
            result = rounded(result * factor, dtype)
        if factor is not None and use == "value/":
            result = rounded(result / factor, dtype)
    return result


def fake_quantized(row, dtype, *, low, high, values=None):
    """One row that shares a scale, quantized to integers or to `values`, and back.

    Args:
        row: [K] float32 numbers of `dtype`, finite.
        dtype: "float32", "float16" or "bfloat16".
        low: Smallest number of the grid.
        high: Largest number of the grid.
        values: All codes of a sign-magnitude grid; None for integers.
    """
    half_range = rounded(rounded(high - low, dtype) / 2, dtype)
    scale = rounded(np.abs(row).max() / half_range, dtype)
    if scale == 0:
        scale = np.float32({"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype])
    scaled = rounded(row / scale, dtype) + np.float32(0)  # the zero point of 0: no -0.0 left
    scaled = np.clip(scaled, np.float32(low), np.float32(high))
    if values is None:
        nearest = np.rint(scaled)
    else:
        nearest = values[nearest_codes(scaled, values)].astype(np.float32)
    return rounded(nearest * scale, dtype)


def packed_bits(fields, bits, *, per_word):
    """Pack one row of fields into 32-bit words, bit by bit.

    Args:
        fields: Non-negative integers below 2^bits.
        bits: Width of a field.
        per_word: Fields that start in one word; None to let them run across words.
    """
    places = [
        i * bits if per_word is None else i // per_word * 32 + i % per_word * bits
        for i in range(len(fields))
    ]
    words = [0] * -(-(places[-1] + bits) // 32)
    for field, place in zip(fields, places, strict=True):
        for bit in range(bits):
            words[(place + bit) // 32] |= (int(field) >> bit & 1) << ((place + bit) % 32)
    return np.array(words, dtype=np.uint32).view(np.int32)
