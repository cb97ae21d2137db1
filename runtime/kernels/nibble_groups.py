"""What meets the values of codes in the nibble GEMM kernels: scales, zero points and offsets.

A block of four slices of C columns meets one group for each slice, one for each pair, or one for
all four; there a group may be many blocks long.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["four_scales", "four_zeros", "group_row", "plus_block", "scale_values"]


@triton.jit
def scale_values(raw, KIND: tl.constexpr):
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
def group_row(block, blocks_per_group, GROUP_SLICES: tl.constexpr):
    """Return the first group that a block of four slices meets."""
    if GROUP_SLICES == 4:
        return block // blocks_per_group
    else:
        return block * (4 // GROUP_SLICES)


@triton.jit
def four_scales(scale, row, n, N, KIND: tl.constexpr, GROUP_SLICES: tl.constexpr):
    """Load the scales [BN, 1] float32 that the four slices of a block meet.

    Args:
        scale: [G, N] pointer.
        row: First group of the block.
        n: [BN] output features, below N.
        N: Output features of the weight.
        KIND: As in `scale_values`; "none" loads nothing.
        GROUP_SLICES: Slices of a group in a block: 1, 2 or 4.
    """
    if KIND == "none":
        return 1.0, 1.0, 1.0, 1.0
    place = scale + row.to(tl.int64) * N + n
    s0 = scale_values(tl.load(place), KIND)[:, None]
    if GROUP_SLICES == 4:
        return s0, s0, s0, s0
    elif GROUP_SLICES == 2:
        s1 = scale_values(tl.load(place + N), KIND)[:, None]
        return s0, s0, s1, s1
    else:
        s1 = scale_values(tl.load(place + N), KIND)[:, None]
        s2 = scale_values(tl.load(place + 2 * N), KIND)[:, None]
        s3 = scale_values(tl.load(place + 3 * N), KIND)[:, None]
        return s0, s1, s2, s3


@triton.jit
def four_zeros(zero, row, n, N, FORM: tl.constexpr, GROUP_SLICES: tl.constexpr):
    """Load the zero points [BN, 1] of the four slices of a block; nothing in forms without."""
    if FORM != "zero":
        return 0, 0, 0, 0
    else:
        place = zero + row.to(tl.int64) * N + n
        z0 = tl.load(place)[:, None]
        if GROUP_SLICES == 4:
            return z0, z0, z0, z0
        elif GROUP_SLICES == 2:
            z1 = tl.load(place + N)[:, None]
            return z0, z0, z1, z1
        else:
            return (
                z0, tl.load(place + N)[:, None],
                tl.load(place + 2 * N)[:, None], tl.load(place + 3 * N)[:, None],
            )  # fmt: skip


@triton.jit
def plus_block(acc, w, x, s, KIND: tl.constexpr, GROUP_SLICES: tl.constexpr, AFTER: tl.constexpr):
    """Add the products of four slices to sums [BN, BM] float32.

    Args:
        acc: The sums.
        w: Four tiles [BN, C] of values.
        x: Four tiles [C, BM] of inputs.
        s: Four tiles [BN, 1] of scales, float32.
        KIND: "none" if there are no scales.
        GROUP_SLICES: Slices that share a scale.
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
    elif GROUP_SLICES == 1:
        acc += tl.dot(w0, x0, input_precision="ieee") * s0
        acc += tl.dot(w1, x1, input_precision="ieee") * s1
        acc += tl.dot(w2, x2, input_precision="ieee") * s2
        acc += tl.dot(w3, x3, input_precision="ieee") * s3
    elif GROUP_SLICES == 2:
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
