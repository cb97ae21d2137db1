"""What meets the values of codes in the nibble GEMM kernels: scales, zero points and offsets.

A block of four slices of C columns meets one group for each slice, one for each pair, or one for
all four; there a group may be many blocks long. What the slices of a block meet lies side by side
in one integer for each output feature, so a kernel loads it at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["ask_for", "four_scales", "four_zeros", "group_row", "plus_block", "raw_groups"]


@triton.jit
def group_row(block, blocks_per_group, GROUP_SLICES: tl.constexpr):
    """Return the row of scales that a block of four slices meets."""
    if GROUP_SLICES == 4:
        return block // blocks_per_group
    else:
        return block


@triton.jit
def raw_groups(part, row, n, N, IS_THERE: tl.constexpr):
    """Load what one block meets, one integer for each of the output features n, all below N."""
    if IS_THERE:
        return tl.load(part + row.to(tl.int64) * N + n)
    else:
        return 0


@triton.jit
def ask_for(part, row, n, N, IS_THERE: tl.constexpr):
    """Ask for the first line of what one block meets from output feature n on."""
    if IS_THERE:
        tl.inline_asm_elementwise(
            "prefetch.global.L1 [$1]; mov.u32 $0, 0;",
            "=r,l", args=[(part + row.to(tl.int64) * N + n).to(tl.int64)], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _up(bits, BY: tl.constexpr):
    return bits << BY if BY >= 0 else bits >> -BY


@triton.jit
def _scale(raw, SLOT: tl.constexpr, KIND: tl.constexpr):
    """Return scale SLOT of `raw` as float32."""
    if KIND == "e8m0":
        return (_up(raw, 23 - 8 * SLOT) & 0x7F800000).to(tl.float32, bitcast=True)
    elif KIND == "e4m3":
        # at the place of a float32's exponent, which is then 120 too small; exact for subnormals
        return (_up(raw, 20 - 8 * SLOT) & 0x07F00000).to(
            tl.float32, bitcast=True
        ) * 1.329227995784916e36
    elif KIND == "bf16":
        return (raw >> (16 * SLOT)).to(tl.int16).to(tl.bfloat16, bitcast=True).to(tl.float32)
    elif KIND == "fp16":
        return (raw >> (16 * SLOT)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        tl.static_assert(KIND == "fp32", "unknown kind of scales")
        return (raw >> (32 * SLOT)).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def four_scales(raw, KIND: tl.constexpr, GROUP_SLICES: tl.constexpr):
    """Turn loaded scales into one [BN, 1] float32 for each slice; 1 where there are none.

    Args:
        raw: [BN] integers of `raw_groups`: int32, int64 for more than 4 bytes.
        KIND: "bf16", "fp16", "fp32", "e8m0" (powers of two), "e4m3" (without sign) or "none".
        GROUP_SLICES: Slices that share a scale: 1, 2 or 4.
    """
    if KIND == "none":
        return 1.0, 1.0, 1.0, 1.0
    else:
        s0 = tl.expand_dims(_scale(raw, 0, KIND), -1)
        if GROUP_SLICES == 4:
            return s0, s0, s0, s0
        elif GROUP_SLICES == 2:
            s1 = tl.expand_dims(_scale(raw, 1, KIND), -1)
            return s0, s0, s1, s1
        else:
            return (
                s0, tl.expand_dims(_scale(raw, 1, KIND), -1),
                tl.expand_dims(_scale(raw, 2, KIND), -1), tl.expand_dims(_scale(raw, 3, KIND), -1),
            )  # fmt: skip


@triton.jit
def four_zeros(raw, FORM: tl.constexpr, GROUP_SLICES: tl.constexpr):
    """Return one [BN, 1] of zero points, bytes of loaded int32, for each slice.

    In forms without zero points the four mean nothing.
    """
    if FORM != "zero":
        return 0, 0, 0, 0
    else:
        z0 = tl.expand_dims((raw & 63), -1)
        if GROUP_SLICES == 4:
            return z0, z0, z0, z0
        z1 = tl.expand_dims(((raw >> 8) & 63), -1)
        if GROUP_SLICES == 2:
            return z0, z0, z1, z1
        else:
            return (
                z0,
                z1,
                tl.expand_dims(((raw >> 16) & 63), -1),
                tl.expand_dims(((raw >> 24) & 63), -1),
            )


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
    if KIND == "none" and AFTER:
        # NOTE: sums that begin as a constant and only ever meet products make ptxas wait after
        # every instruction of a product (its message C7515)
        g = tl.dot(w0, x0, input_precision="ieee")
        g = tl.dot(w1, x1, g, input_precision="ieee")
        g = tl.dot(w2, x2, g, input_precision="ieee")
        acc += tl.dot(w3, x3, g, input_precision="ieee")
    elif KIND == "none":
        acc = tl.dot(w0, x0, acc, input_precision="ieee")
        acc = tl.dot(w1, x1, acc, input_precision="ieee")
        acc = tl.dot(w2, x2, acc, input_precision="ieee")
        acc = tl.dot(w3, x3, acc, input_precision="ieee")
    elif not AFTER:
        dtype: tl.constexpr = w0.dtype
        v0, v1, v2, v3 = w0 * s0.to(dtype), w1 * s1.to(dtype), w2 * s2.to(dtype), w3 * s3.to(dtype)
        acc = tl.dot(v0, x0, acc, input_precision="ieee")
        acc = tl.dot(v1, x1, acc, input_precision="ieee")
        acc = tl.dot(v2, x2, acc, input_precision="ieee")
        acc = tl.dot(v3, x3, acc, input_precision="ieee")
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
