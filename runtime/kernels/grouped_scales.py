"""What meets the values of codes in the grouped kernel: scales and zero points.

A block of slices of C columns meets one group for all of them (GROUPS 4), one for each half (2), or
one for each quarter (1); in the first case a group may be many blocks long.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["four_scales", "four_zeros", "group_row", "plus_four", "plus_two", "raw_groups"]


@triton.jit
def _scale_values(raw, KIND: tl.constexpr):
    """Turn stored scales into float32.

    Args:
        raw: float, or uint8 of the kinds "e8m0" (a power of two) and "e4m3".
        KIND: "float", "e8m0" or "e4m3".
    """
    if KIND == "e8m0":
        exponent = raw.to(tl.int32)
        bits = tl.where(exponent == 0, 0x00400000, exponent << 23)
        bits = tl.where(exponent == 255, 0x7FC00000, bits)
        return bits.to(tl.float32, bitcast=True)
    elif KIND == "e4m3":
        # in the place of a float32's exponent, 120 too small; exact for subnormals too
        code = raw.to(tl.int32)
        bits = ((code & 0x7F) << 20) | ((code & 0x80) << 24)
        value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
        return tl.where((code & 0x7F) == 0x7F, float("nan"), value)
    else:
        return raw.to(tl.float32)


@triton.jit
def group_row(block, blocks_per_group, GROUPS: tl.constexpr):
    """Return the first group that a block of slices meets."""
    if GROUPS == 4:
        return block // blocks_per_group
    else:
        return block * (4 // GROUPS)


@triton.jit
def raw_groups(part, place, N, IS_THERE: tl.constexpr, GROUPS: tl.constexpr):
    """Load one part of the groups that a block meets, as it is stored.

    Args:
        part: [G, N] pointer: scales or zero points.
        place: [..., BN] where those of the first group are.
        N: Rows of the weight.
        IS_THERE: False loads nothing.
        GROUPS: See the top of this file.
    """
    if not IS_THERE:
        return (0,)
    elif GROUPS == 4:
        return (tl.load(part + place),)
    elif GROUPS == 2:
        return tl.load(part + place), tl.load(part + place + N)
    else:
        return (
            tl.load(part + place), tl.load(part + place + N),
            tl.load(part + place + 2 * N), tl.load(part + place + 3 * N),
        )  # fmt: skip


@triton.jit
def _column(raw, PARTS: tl.constexpr):
    """[BN] to [BN, 1], [PARTS, BN] to [PARTS, BN, 1]."""
    if PARTS == 1:
        return raw[:, None]
    else:
        return raw[:, :, None]


@triton.jit
def four_scales(raw, KIND: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr):
    """Turn loaded scales into one column of float32 for each quarter; 1 where there are none."""
    if KIND == "none":
        return 1.0, 1.0, 1.0, 1.0
    else:
        s0 = _column(_scale_values(raw[0], KIND), PARTS)
        if GROUPS == 4:
            return s0, s0, s0, s0
        elif GROUPS == 2:
            s1 = _column(_scale_values(raw[1], KIND), PARTS)
            return s0, s0, s1, s1
        else:
            return (
                s0, _column(_scale_values(raw[1], KIND), PARTS),
                _column(_scale_values(raw[2], KIND), PARTS),
                _column(_scale_values(raw[3], KIND), PARTS),
            )  # fmt: skip


@triton.jit
def four_zeros(raw, FORM: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr):
    """Return one column of loaded zero points for each quarter; nothing in other forms."""
    if FORM != "zero":
        return 0, 0, 0, 0
    else:
        z0 = _column(raw[0].to(tl.int32), PARTS)
        if GROUPS == 4:
            return z0, z0, z0, z0
        elif GROUPS == 2:
            z1 = _column(raw[1].to(tl.int32), PARTS)
            return z0, z0, z1, z1
        else:
            return (
                z0, _column(raw[1].to(tl.int32), PARTS),
                _column(raw[2].to(tl.int32), PARTS), _column(raw[3].to(tl.int32), PARTS),
            )  # fmt: skip


@triton.jit
def plus_four(acc, w, x, s, KIND: tl.constexpr, GROUPS: tl.constexpr, AFTER: tl.constexpr):
    """Add the products of four slices to sums [BN, BM] float32.

    Args:
        acc: The sums.
        w: Four tiles [BN, C] of values.
        x: Four tiles [C, BM] of inputs.
        s: Four tiles [BN, 1] of scales, float32.
        KIND: "none" if there are no scales.
        GROUPS: See the top of this file.
        AFTER: Scales meet sums; else values, rounded to their dtype.
    """
    w0, w1, w2, w3 = w
    x0, x1, x2, x3 = x
    s0, s1, s2, s3 = s
    if KIND == "none":
        acc = tl.dot(w0, x0, acc, input_precision="ieee")
        acc = tl.dot(w1, x1, acc, input_precision="ieee")
        acc = tl.dot(w2, x2, acc, input_precision="ieee")
        acc = tl.dot(w3, x3, acc, input_precision="ieee")
    elif not AFTER:
        dtype: tl.constexpr = w0.dtype
        acc = tl.dot(w0 * s0.to(dtype), x0, acc, input_precision="ieee")
        acc = tl.dot(w1 * s1.to(dtype), x1, acc, input_precision="ieee")
        acc = tl.dot(w2 * s2.to(dtype), x2, acc, input_precision="ieee")
        acc = tl.dot(w3 * s3.to(dtype), x3, acc, input_precision="ieee")
    elif GROUPS == 1:
        acc += tl.dot(w0, x0, input_precision="ieee") * s0
        acc += tl.dot(w1, x1, input_precision="ieee") * s1
        acc += tl.dot(w2, x2, input_precision="ieee") * s2
        acc += tl.dot(w3, x3, input_precision="ieee") * s3
    elif GROUPS == 2:
        g = tl.dot(w0, x0, input_precision="ieee")
        acc += tl.dot(w1, x1, g, input_precision="ieee") * s0
        h = tl.dot(w2, x2, input_precision="ieee")
        acc += tl.dot(w3, x3, h, input_precision="ieee") * s2
    else:
        g = tl.dot(w0, x0, input_precision="ieee")
        g = tl.dot(w1, x1, g, input_precision="ieee")
        g = tl.dot(w2, x2, g, input_precision="ieee")
        acc += tl.dot(w3, x3, g, input_precision="ieee") * s0
    return acc


@triton.jit
def plus_two(acc, w, x, s, KIND: tl.constexpr, GROUPS: tl.constexpr, AFTER: tl.constexpr):
    """Add the products of two slices, as `plus_four` those of four."""
    w0, w1 = w
    x0, x1 = x
    s0, _s1, s2, _s3 = s
    if KIND == "none":
        acc = tl.dot(w0, x0, acc, input_precision="ieee")
        acc = tl.dot(w1, x1, acc, input_precision="ieee")
    elif not AFTER:
        dtype: tl.constexpr = w0.dtype
        acc = tl.dot(w0 * s0.to(dtype), x0, acc, input_precision="ieee")
        acc = tl.dot(w1 * s2.to(dtype), x1, acc, input_precision="ieee")
    elif GROUPS == 4:
        part = tl.dot(w0, x0, input_precision="ieee")
        acc += tl.dot(w1, x1, part, input_precision="ieee") * s0
    else:
        acc += tl.dot(w0, x0, input_precision="ieee") * s0
        acc += tl.dot(w1, x1, input_precision="ieee") * s2
    return acc
