"""What meets the values of codes in the grouped kernel: scales and zero points.

A block of slices of C columns meets one group for all of them (GROUPS 4), one for each half (2), or
one for each quarter (1); in the first case a group may be many blocks long.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "ask_for",
    "four_scales",
    "four_zeros",
    "group_row",
    "plus_four",
    "plus_two",
    "raw_groups",
]


@triton.jit
def group_row(block, blocks_per_group, GROUPS: tl.constexpr):
    """Return the row of scales that a block of slices meets."""
    if GROUPS == 4:
        return block // blocks_per_group
    else:
        return block


@triton.jit
def raw_groups(part, place, IS_THERE: tl.constexpr):
    """Load what a block meets, one integer for each row of the weight, at places [..., BN]."""
    if IS_THERE:
        return tl.load(part + place)
    else:
        return 0


@triton.jit
def ask_for(part, place, IS_THERE: tl.constexpr):
    """Ask for the lines at some places, so that `raw_groups` finds them in the L1 cache."""
    if IS_THERE:
        tl.inline_asm_elementwise(
            "prefetch.global.L1 [$1]; mov.u32 $0, 0;", "=r,l",
            args=[(part + place).to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _up(bits, BY: tl.constexpr):
    return bits << BY if BY >= 0 else bits >> -BY


@triton.jit
def _scale(raw, SLOT: tl.constexpr, KIND: tl.constexpr):
    """Return scale SLOT of `raw` as float32."""
    if KIND == "e8m0":
        return (_up(raw.to(tl.int32), 23 - 8 * SLOT) & 0x7F800000).to(tl.float32, bitcast=True)
    elif KIND == "e4m3":
        # at the place of a float32's exponent, 120 too small; exact for subnormals too
        bits = _up(raw.to(tl.int32), 20 - 8 * SLOT) & 0x07F00000
        return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    elif KIND == "bf16":
        half = (raw >> (16 * SLOT)).to(tl.int32)
        return (half << 16).to(tl.float32, bitcast=True)
    elif KIND == "fp16":
        half = (raw >> (16 * SLOT)).to(tl.int16)
        return half.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        tl.static_assert(KIND == "fp32", "unknown kind of scales")
        return (raw >> (32 * SLOT)).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _column(part, PARTS: tl.constexpr):
    """[BN] to [BN, 1], [PARTS, BN] to [PARTS, BN, 1]."""
    if PARTS == 1:
        return part[:, None]
    else:
        return part[:, :, None]


@triton.jit
def four_scales(raw, KIND: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr):
    """Turn loaded scales into one column of float32 for each quarter; 1 where there are none.

    Args:
        raw: [BN] or [PARTS, BN] integers of `raw_groups`.
        KIND: "bf16", "fp16", "fp32", "e8m0" (powers of two), "e4m3" or "none".
        GROUPS: See the top of this file.
        PARTS: Blocks of a step.
    """
    if KIND == "none":
        return 1.0, 1.0, 1.0, 1.0
    else:
        s0 = _column(_scale(raw, 0, KIND), PARTS)
        if GROUPS == 4:
            return s0, s0, s0, s0
        elif GROUPS == 2:
            s1 = _column(_scale(raw, 1, KIND), PARTS)
            return s0, s0, s1, s1
        else:
            return (
                s0, _column(_scale(raw, 1, KIND), PARTS),
                _column(_scale(raw, 2, KIND), PARTS), _column(_scale(raw, 3, KIND), PARTS),
            )  # fmt: skip


@triton.jit
def _zero(raw, SLOT: tl.constexpr, PARTS: tl.constexpr):
    return _column((raw.to(tl.int32) >> (8 * SLOT)) & 63, PARTS)


@triton.jit
def four_zeros(raw, FORM: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr):
    """Turn loaded bytes into one column of zero points for each quarter; nothing in other forms."""
    if FORM != "zero":
        return 0, 0, 0, 0
    else:
        z0 = _zero(raw, 0, PARTS)
        if GROUPS == 4:
            return z0, z0, z0, z0
        elif GROUPS == 2:
            z1 = _zero(raw, 1, PARTS)
            return z0, z0, z1, z1
        else:
            return z0, _zero(raw, 1, PARTS), _zero(raw, 2, PARTS), _zero(raw, 3, PARTS)


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
    if KIND == "none" and AFTER:
        # NOTE: sums that only ever meet products make ptxas wait, see `plus_block`
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
