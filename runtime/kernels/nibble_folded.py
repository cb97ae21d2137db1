"""FP4 weights whose group scales meet the values while these are unpacked.

A value of FP4 has two significant bits and a scale of a group at most four, so their product is
exact in bfloat16; a product of matrices then needs no sums of groups, and a slice may hold several.
Codes and scales lie so that nothing but bit operations and one multiplication is left:

    word = c(0)' | c(1)' | c(2)' | c(3)'            four codes of a word, each spread over its bits

A code's sign and its three other bits are as far from each other as in a bfloat16, so one mask
takes both. With exponent and mantissa at the low end of a bfloat16's, a code counts 2^-126 times
its value (0.5 as a subnormal number), and the bfloat16 that a scale is held as makes up for that.
What is left, a power of two, goes to the factor of the row.

Letters: N output features, K input features, B blocks of four slices of C columns, S blocks side by
side, BN output features of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantload.runtime.kernels.nibble_layout import SLICE_COLUMNS, unpack4

__all__ = [
    "GROUPS",
    "form_of",
    "held_scales",
    "pack_codes",
    "unpack_codes",
    "values4",
    "values_of",
]

GROUPS = {"fp4_16": 16, "fp4_32": 32}
"""Form -> columns of a group."""

_LARGEST = 126  # power of two of the largest scale of a row, as it is held; of codes the inverse
_SMALLEST = 6  # so that its product with the smallest code is a normal bfloat16
_OF_E4M3 = 118  # power of two of a held scale of 1


def form_of(scale: torch.dtype, group: int) -> str | None:
    """Return the form of FP4 weights with such scales, one for `group` columns, or None."""
    kinds = {(torch.float8_e4m3fn, 16): "fp4_16", (torch.float8_e8m0fnu, 32): "fp4_32"}
    return kinds.get((scale, group))


# -- packing -------------------------------------------------------------------------------------


def pack_codes(codes: Tensor) -> Tensor:
    """Lay FP4 codes out in words of four slices.

    Args:
        codes: [N, K] uint8, sign in bit 3.

    Returns:
        [B, N, C] int16; columns that are added are zero.
    """
    missing = -codes.shape[-1] % (4 * SLICE_COLUMNS)
    codes = torch.nn.functional.pad(codes, (0, missing)).unflatten(-1, (-1, 4, SLICE_COLUMNS))
    c0, c1, c2, c3 = codes.to(torch.int16).movedim(0, 1).unbind(2)
    words: Tensor = (
        (c0 & 8) << 12 | (c0 & 7) << 6 | (c1 & 8) << 9 | (c1 & 7) << 3 | (c2 & 8) << 6 | (c2 & 7)
        | (c3 & 8) << 11 | (c3 & 4) << 11 | (c3 & 3) << 10
    )  # fmt: skip
    return words.contiguous()


def unpack_codes(words: Tensor, features: int) -> Tensor:
    """Undo `pack_codes`: [B, N, C] int16 to [N, K] uint8."""
    w = words.to(torch.int32)
    codes = (
        (w >> 12 & 8) | (w >> 6 & 7), (w >> 9 & 8) | (w >> 3 & 7), (w >> 6 & 8) | (w & 7),
        (w >> 11 & 8) | (w >> 11 & 4) | (w >> 10 & 3),
    )  # fmt: skip
    apart = torch.stack(codes, dim=1).to(torch.uint8).permute(2, 0, 1, 3)  # [N, B, 4, C]
    return apart.flatten(1)[:, :features].contiguous()


def held_scales(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the scales of groups as a kernel reads them, and the factor of each row.

    Args:
        codes: [N, K] uint8.
        scale: [N, G] float8_e8m0fnu, groups of 32 columns, or float8_e4m3fn, of 16.

    Returns:
        [B, 4, N, groups of a slice] int16, bits of bfloat16, and [N] float64; None if scales are no
        plain numbers, or those of a row too far apart.
    """
    rows, features = codes.shape
    raw = scale.view(torch.uint8)
    if scale.dtype == torch.float8_e4m3fn:
        if bool((raw >= 127).any()):
            return None
        held = (scale.float() * 2.0**_OF_E4M3).to(torch.bfloat16).view(torch.int16)
        factor = torch.full((rows,), 2.0 ** (_LARGEST - _OF_E4M3), dtype=torch.float64)
        return _by_slices(held, features, 16), factor.to(scale.device)
    power = raw.to(torch.int32) - 127
    padded = torch.nn.functional.pad(codes, (0, scale.shape[1] * 32 - features))
    is_used = ((padded.unflatten(1, (-1, 32)) & 7) != 0).any(2)  # zeros are zero with any scale
    most = power.masked_fill(~is_used, -127).amax(1, keepdim=True)
    power = (power - most + _LARGEST).masked_fill(~is_used, _LARGEST)
    if bool((raw == 255).any()) or bool((power < _SMALLEST).any()):
        return None
    return _by_slices((power + 127) << 7, features, 32), 2.0 ** most[:, 0].double()


def values_of(words: Tensor, scale: Tensor, features: int) -> Tensor:
    """Return values times scales without the factors of rows, [N, K] float32; exact."""
    codes = unpack_codes(words, features).int()
    size = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=words.device)
    factor = scale.view(torch.bfloat16).float() * 2.0**-_LARGEST  # [B, 4, N, groups of a slice]
    factor = factor.movedim(2, 0).flatten(1).repeat_interleave(SLICE_COLUMNS // scale.shape[-1], 1)
    return torch.cat([size, -size])[codes] * factor[:, :features]


def _by_slices(scale: Tensor, features: int, group: int) -> Tensor:
    """[N, G] to [B, 4, N, groups of a slice] int16."""
    blocks = -(-features // (4 * SLICE_COLUMNS))
    each = SLICE_COLUMNS // group
    scale = torch.nn.functional.pad(scale.to(torch.int16), (0, blocks * 4 * each - scale.shape[1]))
    held: Tensor = scale.unflatten(1, (blocks, 4, each)).movedim(0, 2)
    return held.contiguous()


# -- in a kernel -----------------------------------------------------------------------------------

_SPREAD = tl.constexpr(
    """{
    .reg .b32 a, b;
    and.b32 $0, $4, 0x81c081c0;
    shl.b32 a, $4, 3;
    and.b32 $1, a, 0x81c081c0;
    shl.b32 a, $4, 6;
    and.b32 $2, a, 0x81c081c0;
    shl.b32 a, $4, 1;
    and.b32 a, a, 0x80008000;
    shr.u32 b, $4, 5;
    lop3.b32 a, b, 0x01000100, a, 0xea;
    shr.u32 b, $4, 4;
    lop3.b32 $3, b, 0x00c000c0, a, 0xea;
    }"""
)


@triton.jit
def values4(
    words, zeros, registers, scale, block, rows, column, N,
    FORM: tl.constexpr, dtype: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Turn a tile of words into its four tiles of values, as `_folded4` or `unpack4` does.

    Args:
        words: [BN, C] or [S, BN, C] int16, of which C may be a part of a slice.
        zeros: As `unpack4` takes them.
        registers: Of `table_registers`.
        scale: [B, 4, N, groups of a slice] int16 pointer, or [B, 4, N] int32, of two groups; not
            read in forms of `unpack4`.
        block: The block, or [S] blocks.
        rows: [BN] output features.
        column: The first column of the slices that is in `words`.
        N: Output features.
        FORM: "fp4_16", "fp4_32" or one of `unpack4`.
        dtype: float16 or bfloat16; float32 in the interpreter.
        INTERPRETED: True in the interpreter.
    """
    if FORM == "fp4_16" or FORM == "fp4_32":
        return _folded4(words, scale, block, rows, column, N, FORM, INTERPRETED)
    else:
        return unpack4(words, zeros, registers, FORM, dtype, INTERPRETED)


@triton.jit
def _folded4(
    words, scale, block, rows, column, N, FORM: tl.constexpr, INTERPRETED: tl.constexpr
):  # fmt: skip
    """Return four tiles of values times scales, bfloat16 or, in the interpreter, float32."""
    s0 = _scales(scale, block * 4 + 0, rows, column, N, FORM, words.shape)
    s1 = _scales(scale, block * 4 + 1, rows, column, N, FORM, words.shape)
    s2 = _scales(scale, block * 4 + 2, rows, column, N, FORM, words.shape)
    s3 = _scales(scale, block * 4 + 3, rows, column, N, FORM, words.shape)
    if INTERPRETED:
        w = words.to(tl.int32)
        three = ((w << 1) & 0x8000) | ((w >> 5) & 0x100) | ((w >> 4) & 0xC0)
        return (
            _float(w & 0x81C0) * _float(s0), _float((w << 3) & 0x81C0) * _float(s1),
            _float((w << 6) & 0x81C0) * _float(s2), _float(three) * _float(s3),
        )  # fmt: skip
    else:
        # NOTE: multiplied outside of the asm; as its operands, scales would be given the layout of
        # another tile, and values would go through shared memory.
        v0, v1, v2, v3 = tl.inline_asm_elementwise(
            _SPREAD, "=&r,=&r,=&r,=&r,r", args=[words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
        return (
            v0 * s0.to(tl.bfloat16, bitcast=True), v1 * s1.to(tl.bfloat16, bitcast=True),
            v2 * s2.to(tl.bfloat16, bitcast=True), v3 * s3.to(tl.bfloat16, bitcast=True),
        )  # fmt: skip


@triton.jit
def _float(bits):
    """The float32 of a bfloat16's bits."""
    return ((bits.to(tl.int32) & 0xFFFF) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _scales(scale, at, rows, column, N, FORM: tl.constexpr, SHAPE: tl.constexpr):
    """Return bfloat16 bits of the scales of slices `at` by column, in SHAPE, as int16."""
    GROUP: tl.constexpr = 16 if FORM == "fp4_16" else 32
    HELD: tl.constexpr = 64 // GROUP
    HERE: tl.constexpr = SHAPE[-1] // GROUP
    row = at * N + rows if len(SHAPE) == 2 else (at * N)[:, None] + rows[None, :]
    if scale.dtype.element_ty == tl.int32:  # loads of 4 bytes and more are pipelined
        tl.static_assert(HELD == 2 and HERE == 2, "two scales are an integer")
        both = tl.load(scale + row)
        held = tl.join(both.to(tl.int16), (both >> 16).to(tl.int16))
    else:
        g = column // GROUP + tl.arange(0, HERE)
        held = tl.load(scale + (tl.expand_dims(row, -1) * HELD + g))
    held = tl.expand_dims(held, -1)
    wide: tl.constexpr = SHAPE[:-1] + (HERE, GROUP)  # noqa: RUF005 - Triton knows no stars
    return tl.reshape(tl.broadcast_to(held, wide), SHAPE)
