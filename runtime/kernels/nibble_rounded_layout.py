"""How weights of up to four bits lie in memory for products with int8 or e4m3 inputs.

A byte holds two codes of one row, from two slices of columns:

    byte[b, n, i] = c(0) | c(1) << 4,   c(j) = nibble[n, (2 b + j) C + i]

so a tile [BN, C] of bytes lies in registers as the tensor core takes the left operand of a product
of bytes, and unpacks there into two tiles [BN, C] of int8 or e4m3, one for each slice of C columns
of the input: three instructions for eight weights of int8, nine of e4m3.

    form    nibble                         byte that it becomes          which stands for
    int     v & 15                         nibble << 4                   16 v
    float   v, or 7 - v where v < 0        nibble + 121 * (nibble >> 3)  v / 512: e4m3 has no
                                                                         exponent below 8 / 512
    e2m1    sign, 2 bits of exponent, 1    moved to their places         v / 64

The factor of 1/16, 512 or 64 is part of `outer`. With int8 inputs the sums of a group are integers,
exact.

Letters: N output features, K input features, G groups of columns, R blocks of rows, C columns of a
slice (32 to 128), B blocks of 2 C columns (B * 2 * C >= K).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantload.quant.qtensor import QuantTensor
from quantload.runtime.kernels.byte_layout import group_scale, row_factor

__all__ = [
    "INTERPRETED",
    "PackedForBytes",
    "pack",
    "pack_pairs",
    "slice_columns",
    "unpack_pair",
    "unpack_pairs",
    "why_not_packed",
]

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
_SLICE_COLUMNS = (128, 64, 32)
_FACTORS = {"int": 1 / 16, "float": 512.0, "e2m1": 64.0}
_MOST_COLUMNS = 1 << 17  # of one int32 sum of products of up to 2^14


@dataclass(frozen=True, eq=False)
class PackedForBytes:
    """A weight [N, K] as the kernels read it; all tensors are on one device.

    Args:
        pairs: [B, N, C] uint8.
        scale: [G, R] bfloat16, float16, float32, or uint8 that hold e8m0; None where one factor a
            row says all.
        outer: [N] float32, factor of a row.
        form: "int", "float" or "e2m1".
        in_features: K.
        block_rows: Rows that share one scale.
        slices_per_group: Slices that share one scale.
    """

    pairs: Tensor
    scale: Tensor | None
    outer: Tensor
    form: str
    in_features: int
    block_rows: int
    slices_per_group: int

    @property
    def out_features(self) -> int:
        """N."""
        return self.pairs.shape[1]

    @property
    def layout(self) -> str:
        """How the codes lie, for people."""
        return f"bytes of 2 slices of {self.pairs.shape[2]} columns"

    def tensors(self) -> dict[str, Tensor]:
        """Return the parts that are tensors, by field name."""
        return {name: part for name, part in vars(self).items() if isinstance(part, Tensor)}

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [N, K], computed in float32 without the kernels."""
        nibbles = unpack_pairs(self.pairs, self.in_features).to(torch.int32)
        values = _values_of(self.form, nibbles.device)[nibbles]
        columns = self.slices_per_group * self.pairs.shape[2]
        group = torch.arange(self.in_features, device=values.device) // columns
        row = torch.arange(self.out_features, device=values.device) // self.block_rows
        if self.scale is not None:
            scale = self.scale
            scale = scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale
            values *= scale.float().t()[row][:, group]
        return (values * self.outer[:, None]).to(dtype)


def _values_of(form: str, device: torch.device) -> Tensor:
    """[16] float32, the value of each nibble as the product sees it."""
    if form == "int":
        values = [16.0 * (n - 16 if n > 7 else n) for n in range(16)]
    elif form == "float":
        values = [(7 - n if n > 7 else n) / 512 for n in range(16)]
    else:
        sizes = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
        values = [(-sizes[n - 8] if n > 7 else sizes[n]) / 64 for n in range(16)]
    return torch.tensor(values, device=device)


def why_not_packed(weight: QuantTensor, *, floats: bool) -> str | None:
    """Say why a weight has no place in this layout, or None.

    Args:
        weight: [N, K].
        floats: Inputs are e4m3, not int8.
    """
    grid, group = weight.grid, weight.block[1]
    is_int = grid.is_integer and grid.bits <= 4 and grid.storage == torch.int8
    if not (is_int or (floats and grid.name == "e2m1")):
        kinds = "integers of up to 4 bits" + (" and e2m1" if floats else "")
        return f"codes are {grid.name}, expected {kinds}"
    if 0 in weight.shape:
        return f"the weight is empty: {weight.shape[0]} x {weight.shape[1]}"
    for part in ("zero", "offset", "inner", "group_of"):
        if getattr(weight, part) is not None:
            return f"has `{part}`, for which the kernel has no place"
    if weight.scale.shape[1] > 1 and group % _SLICE_COLUMNS[-1]:
        return f"groups of {group} columns, expected a multiple of {_SLICE_COLUMNS[-1]}"
    if weight.scale.shape[1] == 1 and weight.shape[1] > _MOST_COLUMNS:
        return f"{weight.shape[1]} columns in one sum, at most {_MOST_COLUMNS}"
    return None


def slice_columns(features: int, group: int) -> int:
    """Return C, the widest that goes into K = `features` without padding, or into a group.

    Args:
        features: K.
        group: Columns that share a scale, 0 for all.
    """
    if group == 0:
        return 128 if features % 256 == 0 else 64
    return next(size for size in _SLICE_COLUMNS if group % size == 0)


def pack(
    weight: QuantTensor, *, floats: bool, device: torch.device, columns: int | None = None
) -> PackedForBytes:
    """Lay a weight out; exact, but for products with `outer`, which are rounded to float32.

    Args:
        weight: One for which `why_not_packed` has nothing to say.
        floats: Inputs are e4m3, not int8.
        device: Where the result lives.
        columns: C; None takes `slice_columns`.
    """
    weight = weight.to(device)
    group = weight.block[1] if weight.scale.shape[1] > 1 else 0
    width = columns or slice_columns(weight.shape[1], group)
    if weight.grid.table is not None:
        form, nibbles = "e2m1", weight.codes
    elif floats:
        form, nibbles = "float", torch.where(weight.codes < 0, 7 - weight.codes, weight.codes)
    else:
        form, nibbles = "int", weight.codes & 15
    factor = row_factor(weight)
    if factor is None:
        factor = torch.ones(weight.shape[0], dtype=torch.float64, device=weight.device)
    return PackedForBytes(
        pairs=pack_pairs(nibbles.view(torch.uint8), columns=width),
        scale=group_scale(weight) if group else None,
        outer=(factor * _FACTORS[form]).float().contiguous(),
        form=form,
        in_features=weight.shape[1],
        block_rows=weight.block[0],
        slices_per_group=group // width if group else -(-weight.shape[1] // width),
    )


def pack_pairs(nibbles: Tensor, *, columns: int) -> Tensor:
    """Lay nibbles out in bytes of two slices.

    Args:
        nibbles: [..., N, K] uint8, 0 to 15.
        columns: C.

    Returns:
        [..., B, N, C] uint8, contiguous; columns past K are 0.
    """
    missing = -nibbles.shape[-1] % (2 * columns)
    if missing:
        nibbles = torch.nn.functional.pad(nibbles, (0, missing))
    parts = nibbles.unflatten(-1, (-1, 2, columns)).movedim(-3, -4)  # [..., B, N, 2, C]
    pairs: Tensor = (parts[..., 0, :] | (parts[..., 1, :] << 4)).contiguous()
    return pairs


def unpack_pairs(pairs: Tensor, features: int) -> Tensor:
    """Undo `pack_pairs`: [..., B, N, C] uint8 to [..., N, K] uint8, K = `features`."""
    parts = torch.stack([pairs & 15, pairs >> 4], dim=-2)  # [..., B, N, 2, C]
    return parts.movedim(-4, -3).flatten(-3)[..., :features].contiguous()


# -- in kernels --------------------------------------------------------------------------------


@triton.jit
def unpack_pair(pairs, FORM: tl.constexpr, INTERPRETED: tl.constexpr):
    """Turn a tile of bytes into its two tiles of operands.

    Args:
        pairs: [BN, C] int8, any bits.
        FORM: "int", "float" or "e2m1".
        INTERPRETED: `INTERPRETED` of this file.

    Returns:
        Two tiles [BN, C], int8 or float8e4nv; in the interpreter int8 or float32.
    """
    if INTERPRETED:
        bits = pairs.to(tl.int32)
        return _plain_operand(bits & 15, FORM), _plain_operand((bits >> 4) & 15, FORM)
    elif FORM == "int":
        return tl.inline_asm_elementwise(
            """{
            shl.b32 $0, $2, 4;
            and.b32 $1, $2, 0xf0f0f0f0;
            and.b32 $0, $0, 0xf0f0f0f0;
            }""",
            "=&r,=&r,r",
            args=[pairs],
            dtype=(tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )
    elif FORM == "float":
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 s, t;
            shr.u32 s, $2, 3;
            shr.u32 t, $2, 4;
            and.b32 s, s, 0x01010101;
            and.b32 $0, $2, 0x0f0f0f0f;
            and.b32 t, t, 0x0f0f0f0f;
            mad.lo.u32 $0, s, 121, $0;
            shr.u32 s, $2, 7;
            and.b32 s, s, 0x01010101;
            mad.lo.u32 $1, s, 121, t;
            }""",
            "=&r,=&r,r",
            args=[pairs],
            dtype=(tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )
        return low.to(tl.float8e4nv, bitcast=True), high.to(tl.float8e4nv, bitcast=True)
    else:
        tl.static_assert(FORM == "e2m1", "unknown form of codes")
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 s, t;
            shl.b32 s, $2, 4;
            shl.b32 t, $2, 2;
            and.b32 s, s, 0x80808080;
            lop3.b32 $0, t, 0x1c1c1c1c, s, 0xea;
            shr.u32 t, $2, 2;
            and.b32 s, $2, 0x80808080;
            lop3.b32 $1, t, 0x1c1c1c1c, s, 0xea;
            }""",
            "=&r,=&r,r",
            args=[pairs],
            dtype=(tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )
        return low.to(tl.float8e4nv, bitcast=True), high.to(tl.float8e4nv, bitcast=True)


@triton.jit
def _plain_operand(nibble, FORM: tl.constexpr):
    if FORM == "int":
        return (nibble << 4).to(tl.int8)
    elif FORM == "float":
        return tl.where(nibble > 7, 7 - nibble, nibble).to(tl.float32) * 0.001953125
    else:
        size = nibble & 7
        half_steps = tl.where(
            size < 4, size, tl.where(size < 6, 2 * size - 4, 4 * size - 16)
        )  # 0 1 2 3 4 6 8 12
        values = half_steps.to(tl.float32) * 0.0078125
        return tl.where(nibble > 7, -values, values)
