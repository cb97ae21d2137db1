"""How weights of one byte lie in memory for our GEMM kernels.

Two codes share an int16 word, and each comes from another slice of columns:

    word[b, n, i] = c(0) | c(1) << 8,   c(j) = byte[n, (2 b + j) C + i]

so a tile [BN, C] of words is loaded once, straight into the registers that a tensor core takes its
left operand from, and unpacks there (`byte_unpack`) into two tiles [BN, C] of values, one for each
slice of C columns of the input.

A NaN among FP8 codes makes all products of its row NaN, so `pack` makes the row's factor NaN, and
the kernel has no case for it. Integers are held as int8: uint8 codes and zero points less 128.

Letters: N output features, K input features, G groups of columns, R blocks of rows, C columns of a
slice (16 to 128, a power of two), B blocks of 2 C columns (B * 2 * C >= K).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantload.quant.grid import Grid
from quantload.quant.qtensor import QuantTensor

__all__ = [
    "PackedBytes",
    "group_scale",
    "pack",
    "pack_bytes",
    "row_factor",
    "slice_columns",
    "unpack_bytes",
    "why_not_packed",
]

_SLICE_COLUMNS = (128, 64, 32, 16)
_SCALE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_FORMS = {"e4m3": "e4m3", "e5m2": "e5m2"}


@dataclass(frozen=True, eq=False)
class PackedBytes:
    """A weight [N, K] as the kernels read it; all tensors are on one device.

    Args:
        codes: [B, N, C] int16 words.
        scale: [G, R] bfloat16, float16, float32, or uint8 that hold e8m0; None where one factor a
            row says all.
        zero: [G, R] int8, in units of a code, or None.
        outer: [N] float32, factor of a row, or None.
        form: "int", "e4m3" or "e5m2".
        in_features: K.
        block_rows: Rows that share one scale.
        slices_per_group: Slices that share one scale.
    """

    codes: Tensor
    scale: Tensor | None
    zero: Tensor | None
    outer: Tensor | None
    form: str
    in_features: int
    block_rows: int
    slices_per_group: int

    @property
    def out_features(self) -> int:
        """N."""
        return self.codes.shape[1]

    @property
    def slice_columns(self) -> int:
        """C."""
        return self.codes.shape[2]

    @property
    def layout(self) -> str:
        """How the codes lie, for people."""
        return f"int16 words of 2 slices of {self.slice_columns} columns"

    def tensors(self) -> dict[str, Tensor]:
        """Return the parts that are tensors, by field name."""
        return {name: part for name, part in vars(self).items() if isinstance(part, Tensor)}

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [N, K], computed in float32 without the kernels.

        A row of FP8 codes with a NaN is NaN from end to end, as its products are.
        """
        raw = unpack_bytes(self.codes, self.in_features)
        storage = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int": torch.int8}
        values = raw.view(storage[self.form]).float()
        width = self.slices_per_group * self.slice_columns
        group = torch.arange(self.in_features, device=values.device) // width
        row = torch.arange(self.out_features, device=values.device) // self.block_rows
        if self.zero is not None:
            values -= self.zero.float().t()[row][:, group]
        if self.scale is not None:
            scale = self.scale
            scale = scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale
            values *= scale.float().t()[row][:, group]
        if self.outer is not None:
            values *= self.outer[:, None]
        return values.to(dtype)


def why_not_packed(weight: QuantTensor) -> str | None:
    """Say why a weight has no place in this layout, or None."""
    grid = weight.grid
    if not (grid.is_float8 or (grid.is_integer and grid.bits > 4)):
        return f"codes are {grid.name}, expected FP8 or integers of 5 to 8 bits"
    if 0 in weight.shape:
        return f"the weight is empty: {weight.shape[0]} x {weight.shape[1]}"
    if weight.group_of is not None:
        return "columns find their group by number (act-order)"
    if weight.inner is not None or weight.offset is not None:
        return "has factors of columns" if weight.offset is None else "has offsets"
    if weight.zero is not None and not _is_byte_zero(grid, weight.zero.dtype):
        return f"zero points are {weight.zero.dtype} for {grid.name} codes"
    if weight.scale.shape[1] > 1 and weight.block[1] % _SLICE_COLUMNS[-1]:
        return f"groups of {weight.block[1]} columns, expected a multiple of {_SLICE_COLUMNS[-1]}"
    if grid.name == "e5m2" and not bool(weight.codes.float().isfinite().all()):
        return "e5m2 codes that are infinite or NaN"
    return None


def slice_columns(features: int, group: int) -> int:
    """Return C: wide slices cost fewer instructions, but a group that is one slice costs more.

    Args:
        features: K.
        group: Columns that share a scale, 0 for all.
    """
    if group == 0:
        return 128 if features % 256 == 0 else 64
    if group % 256 == 0:
        return 128
    return next(size for size in _SLICE_COLUMNS[1:] if group % size == 0)


def _is_byte_zero(grid: Grid, dtype: torch.dtype) -> bool:
    return grid.is_integer and dtype in (torch.int8, torch.uint8) and dtype == grid.storage


def pack(weight: QuantTensor, *, device: torch.device, columns: int | None = None) -> PackedBytes:
    """Lay a weight out; exact, but for products with `outer`, which are rounded to float32.

    Args:
        weight: One for which `why_not_packed` has nothing to say.
        device: Where the result lives.
        columns: C; None takes `slice_columns`.
    """
    weight = weight.to(device)
    group = weight.block[1] if weight.scale.shape[1] > 1 else 0
    width = columns or slice_columns(weight.shape[1], group)
    raw, zero, grid = weight.codes.view(torch.uint8), weight.zero, weight.grid
    if grid.storage == torch.uint8:
        raw = raw ^ 128
        if zero is None:
            zero = torch.zeros(weight.scale.shape, dtype=torch.uint8, device=raw.device)
    if zero is not None:
        zero = (zero.t().contiguous() ^ 128 if zero.dtype == torch.uint8 else zero.t()).contiguous()
        zero = zero.view(torch.int8)
    factor = row_factor(weight)
    if grid.name == "e4m3":
        broken = ((raw & 127) == 127).any(dim=1)
        factor = raw.new_ones(raw.shape[0], dtype=torch.float64) if factor is None else factor
        factor = factor.masked_fill(broken, torch.nan)
    return PackedBytes(
        codes=pack_bytes(raw, columns=width),
        scale=group_scale(weight) if group else None,
        zero=zero,
        outer=None if factor is None else factor.float().contiguous(),
        form=_FORMS.get(grid.name, "int"),
        in_features=weight.shape[1],
        block_rows=weight.block[0],
        slices_per_group=group // width if group else -(-weight.shape[1] // width),
    )


def row_factor(weight: QuantTensor) -> Tensor | None:
    """[N] float64: `outer`, and the scale where a row has only one; None for ones."""
    rows, factor = weight.shape[0], None
    if weight.outer is not None:
        factor = weight.outer.double().flatten()
        factor = (1 / factor if weight.evaluation.outer.endswith("/") else factor).expand(rows)
    if weight.scale.shape[1] == 1:
        scale = weight.multiplier.to(torch.float32).double().flatten()
        scale = scale.repeat_interleave(weight.block[0])[:rows]
        factor = scale if factor is None else scale * factor
    return factor


def group_scale(weight: QuantTensor) -> Tensor:
    """[G, R] in a dtype that the kernel loads."""
    scale = weight.multiplier.t().contiguous()
    if scale.dtype == torch.float8_e8m0fnu:
        return scale.view(torch.uint8)
    if scale.dtype in _SCALE_DTYPES:
        return scale.float() if scale.dtype == torch.float64 else scale
    return scale.to(torch.bfloat16)  # FP8 is exact there


def pack_bytes(raw: Tensor, *, columns: int) -> Tensor:
    """Lay bytes out in words of two slices.

    Args:
        raw: [..., N, K] uint8.
        columns: C.

    Returns:
        [..., B, N, C] int16, contiguous; columns past K are 0.
    """
    assert raw.dtype == torch.uint8, f"bytes of {raw.dtype}, expected uint8"
    missing = -raw.shape[-1] % (2 * columns)
    if missing:
        raw = torch.nn.functional.pad(raw, (0, missing))
    parts = raw.unflatten(-1, (-1, 2, columns)).movedim(-3, -4)  # [..., B, N, 2, C]
    words: Tensor = parts.transpose(-1, -2).contiguous().view(torch.int16).squeeze(-1)
    return words


def unpack_bytes(words: Tensor, features: int) -> Tensor:
    """Undo `pack_bytes`.

    Args:
        words: [..., B, N, C] int16.
        features: K.

    Returns:
        [..., N, K] uint8.
    """
    parts = words.unsqueeze(-1).view(torch.uint8).transpose(-1, -2)  # [..., B, N, 2, C]
    return parts.movedim(-4, -3).flatten(-3)[..., :features].contiguous()
