"""A weight of codes of up to four bits as our nibble GEMM kernels read it, and how to make it.

    W[n, k] = outer[n] * (scale[g, n] * (value(code[n, k]) - zero[g, n]) + offset[g, n])

g is the group of column k. Groups are runs of columns: 1, 2 or 4 slices of a word long, or a whole
number of blocks of four slices. Act-order is undone by sorting the columns by group; `columns` says
which input feature a packed column is. Everything is exact: scales keep their dtype, exponents
(e8m0) and FP8 scales (e4m3) stay single bytes.

Letters: N output features, K input features, G groups of columns, C columns of a slice, B blocks of
four slices (B * 4 * C >= K).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantload.quant.grid import Grid
from quantload.quant.qtensor import QuantTensor
from quantload.runtime.kernels.nibble_folded import (
    GROUPS,
    form_of,
    held_scales,
    pack_codes,
)
from quantload.runtime.kernels.nibble_layout import SLICE_COLUMNS, lookup_table, pack_nibbles

__all__ = ["NibbleWeight", "pack", "why_not_form"]

_BIAS = 8  # int2 .. int4 are held as code + 8
_LARGE = 30  # power of two
_LARGEST_ZERO = 63  # what `unpack4` subtracts exactly
_SCALE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, eq=False)
class NibbleWeight:
    """A packed weight; all tensors are on one device.

    Args:
        words: [B, N, C] int16, see `nibble_layout`.
        scale: [R, N] int32 or int64, the bits of the scales that four slices meet, side by side;
            R is B, or with a group for whole blocks their number. None where a row has one scale,
            which is then in `outer`.
        kind: "bf16", "fp16", "fp32", "e8m0" or "e4m3": what a scale is; "none".
        zero: [R, N] int32, in its bytes zero points from 0 to 63 in units of a nibble, or None.
        offset: [R, N] int32 or int64, float32 bits as scales are, or None.
        outer: [N] float32, or None.
        columns: [B * 4 * C] int32, the input feature of a packed column, -1 for padding; None if
            packed column k is input feature k.
        table: [24] int32 of `lookup_table`, or None.
        form: "int", "uint", "zero", "e2m1" or "table", as `unpack4` takes it; "fp4_16",
            whose words and scale ([B, 4, N, groups of a slice] int16, then of kind "none")
            `nibble_folded` describes.
        features: K.
        group: Columns of a group; K where `scale` is None.
        dtype: Of the inputs, bfloat16 or float16.
    """

    words: Tensor
    scale: Tensor | None
    zero: Tensor | None
    offset: Tensor | None
    outer: Tensor | None
    columns: Tensor | None
    table: Tensor | None
    form: str
    kind: str
    features: int
    group: int
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        """N."""
        return self.words.shape[1]

    @property
    def is_folded(self) -> bool:
        """True if codes and scales lie as `nibble_folded` says."""
        return self.form in GROUPS

    def tensors(self) -> dict[str, Tensor]:
        """Return the parts that are tensors, by field name."""
        return {name: part for name, part in vars(self).items() if isinstance(part, Tensor)}


def why_not_form(weight: QuantTensor) -> str | None:
    """Say why a weight cannot be packed, or None."""
    grid = weight.grid
    if grid.bits > 4:
        return f"codes of grid {grid.name} have more than 4 bits"
    if 0 in weight.shape:
        return f"the weight is empty: {weight.shape[0]} x {weight.shape[1]}"
    if weight.inner is not None:
        return "columns have factors of their own"
    if weight.block[0] not in (1, weight.shape[0]):
        return f"{weight.block[0]} rows share a scale"
    if weight.group_of is not None:
        return _why_not_order(weight)
    return _why_not_group(weight, _group_columns(weight))


def _why_not_group(weight: QuantTensor, group: int) -> str | None:
    wide = _is_wide(weight)
    if slice_columns(group, weight.shape[1], wide=wide) is not None:
        return None
    return f"groups of {group} columns{' with float32 scales' if wide else ''} are no whole slices"


def _is_wide(weight: QuantTensor) -> bool:
    """True if scales or offsets take 4 bytes, of which a kernel loads two at once."""
    offset = weight.offset is not None or (weight.zero is not None and not _may_be_small(weight))
    narrow = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e8m0fnu)
    return offset or weight.multiplier.dtype not in narrow


def _why_not_order(weight: QuantTensor) -> str | None:
    assert weight.group_of is not None, "asked for act-order only"
    groups, features = weight.scale.shape[1], weight.shape[1]
    sizes = torch.bincount(weight.group_of.long().cpu(), minlength=groups)
    if features % groups or bool((sizes != features // groups).any()):
        return "groups of act-order differ in size"
    return _why_not_group(weight, features // groups)


def _group_columns(weight: QuantTensor) -> int:
    if weight.group_of is not None:
        return weight.shape[1] // weight.scale.shape[1]
    return min(weight.block[1], weight.shape[1])


def slice_columns(group: int, features: int, *, wide: bool = False) -> int | None:
    """Return C for groups of `group` columns, or None; with `wide` no group is a single slice."""
    if group >= features:
        return SLICE_COLUMNS
    for columns in (SLICE_COLUMNS, 32, 16):
        if group == 2 * columns or group % (4 * columns) == 0 or (group == columns and not wide):
            return columns
    return None


def pack(weight: QuantTensor, *, dtype: torch.dtype, device: torch.device) -> NibbleWeight:
    """Lay a weight out that `why_not_form` accepts.

    Args:
        weight: On any device.
        dtype: Of the inputs, bfloat16 or float16.
        device: Where the result lives, and is made.
    """
    weight = weight.to(device)
    n_rows, features = weight.shape
    group = _group_columns(weight)
    columns = slice_columns(group, features, wide=_is_wide(weight))
    assert columns is not None, "refused by `why_not_form`"
    parts = _scale_parts(weight)
    if group >= features:
        parts = _per_row(parts, n_rows)
    codes, bias = _nibbles(weight)
    folded = _folded(weight, codes, parts, dtype)
    if folded is not None:
        return folded
    parts = _below_large(parts, n_rows)
    order = None
    if weight.group_of is not None:
        order = weight.group_of.long().argsort(stable=True)
        codes = codes.index_select(1, order)
    table = weight.grid.table if weight.grid.name != "e2m1" else None
    words = pack_nibbles(codes, columns=columns, fill=bias)
    per_row = 1 if group >= features else max(4 * columns // group, 1)
    n_groups = -(-words.shape[0] * 4 * columns // group) if group < features else 1
    return NibbleWeight(
        words=words,
        scale=_side_by_side(parts.scale, n_rows, n_groups, per_row),
        kind=_kind(parts.scale),
        zero=_side_by_side(parts.zero, n_rows, n_groups, per_row),
        offset=_side_by_side(parts.offset, n_rows, n_groups, per_row),
        outer=parts.outer,
        columns=None if order is None else _padded(order, words.shape[0] * 4 * columns),
        table=None if table is None else lookup_table(_sixteen(table, device), dtype),
        form=_form(weight.grid, parts.zero),
        features=features,
        group=min(group, features),
        dtype=dtype,
    )


def _folded(
    weight: QuantTensor, codes: Tensor, parts: _ScaleParts, dtype: torch.dtype
) -> NibbleWeight | None:
    """Pack FP4 codes [N, K] as `nibble_folded` says; None if it serves no such weight."""
    if weight.grid.name != "e2m1" or weight.group_of is not None or dtype != torch.bfloat16:
        return None
    form = form_of(weight.multiplier.dtype, _group_columns(weight))
    if form is None or parts.zero is not None or parts.offset is not None:
        return None
    n_rows, features = weight.shape
    held = held_scales(codes, weight.multiplier.expand(n_rows, -1).contiguous())
    if held is None:
        return None
    scale, outer = held
    if scale.shape[-1] == 2:  # a tile of them is too small for asynchronous loads
        scale = scale.repeat_interleave(2, dim=-1)
    if parts.outer is not None:
        outer = outer * parts.outer.double()
    return NibbleWeight(
        words=pack_codes(codes), scale=scale, kind="none", zero=None, offset=None,
        outer=outer.float(), columns=None, table=None, form="fp4_16", features=features,
        group=16, dtype=dtype,
    )  # fmt: skip


def _nibbles(weight: QuantTensor) -> tuple[Tensor, int]:
    """Codes as uint8 from 0 to 15, and the nibble of value zero where there is one."""
    codes = weight.codes.view(torch.uint8)
    if weight.grid.storage == torch.int8:
        return (codes + _BIAS) & 15, _BIAS  # wraps around: two's complement becomes code + 8
    return codes, 0


def _form(grid: Grid, zero: Tensor | None) -> str:
    if grid.table is not None:
        return "e2m1" if grid.name == "e2m1" else "table"
    if zero is not None:
        return "zero"
    return "int" if grid.storage == torch.int8 else "uint"


def _sixteen(table: tuple[float, ...], device: torch.device) -> Tensor:
    padded = table + (0.0,) * (16 - len(table))
    return torch.tensor(padded, dtype=torch.float32, device=device)


def _padded(order: Tensor, size: int) -> Tensor:
    missing = size - order.shape[0]
    return torch.nn.functional.pad(order.to(torch.int32), (0, missing), value=-1)


_KINDS = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e8m0fnu: "e8m0",
    torch.float8_e4m3fn: "e4m3",
}


def _kind(scale: Tensor | None) -> str:
    return "none" if scale is None else _KINDS[scale.dtype]


def _side_by_side(part: Tensor | None, n_rows: int, n_groups: int, per_row: int) -> Tensor | None:
    """[1 or N, G] to integers [n_groups / per_row, N]; the groups of padded columns are zero."""
    if part is None:
        return None
    bits = part.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[part.element_size()])
    bits = bits.expand(n_rows, -1).t()
    bits = torch.nn.functional.pad(bits, (0, 0, 0, max(n_groups - bits.shape[0], 0)))
    rows: Tensor = bits[:n_groups].unflatten(0, (-1, per_row)).transpose(1, 2).contiguous()
    size = per_row * part.element_size()
    if size < 4:
        in_bytes = rows.view(torch.uint8).flatten(2)
        rows = torch.nn.functional.pad(in_bytes, (0, 4 - size)).contiguous()
    return rows.view(torch.int64 if size == 8 else torch.int32)[..., 0].contiguous()


@dataclass(frozen=True)
class _ScaleParts:
    """`scale`, `zero` and `offset` [R, G], `outer` [N]; see `NibbleWeight`."""

    scale: Tensor | None
    zero: Tensor | None
    offset: Tensor | None
    outer: Tensor | None


def _scale_parts(weight: QuantTensor) -> _ScaleParts:
    scale, zero = _loadable(weight.multiplier), _small_zero(weight)
    offset = None if weight.offset is None else weight.offset.float()
    if weight.zero is not None and zero is None:
        offset = -(weight.zero.double() * weight.multiplier.double()).float()
    n_rows, factor = weight.shape[0], None if weight.outer is None else weight.outer.double()
    if factor is not None and weight.evaluation.outer.endswith("/"):
        factor = 1 / factor
    if factor is None:
        return _ScaleParts(scale, zero, offset, None)
    if weight.offset is not None and weight.evaluation.outer.startswith("scale"):
        # the offset is not multiplied by `outer`, so the scale takes it
        scale = (weight.multiplier.expand(n_rows, -1).double() * factor).float()
        return _ScaleParts(scale, None, offset, None)
    outer = factor.float().expand(n_rows, 1).contiguous().flatten()
    return _ScaleParts(scale, zero, offset, outer)


def _small_zero(weight: QuantTensor) -> Tensor | None:
    """[R, G] uint8 if all zero points are whole numbers of a few bits, in units of a nibble."""
    if weight.zero is None or not weight.grid.is_integer:
        return None
    bias = _BIAS if weight.grid.storage == torch.int8 else 0
    zero = weight.zero.double() + bias  # exact for every dtype
    if bool(((zero < 0) | (zero > _LARGEST_ZERO) | (zero != zero.round())).any()):
        return None
    return zero.to(torch.uint8)


def _may_be_small(weight: QuantTensor) -> bool:
    return weight.zero is None or _small_zero(weight) is not None


def _loadable(scale: Tensor) -> Tensor:
    """The scales in a dtype that kernels load; bytes that are no plain positive numbers widened."""
    if scale.dtype == torch.float8_e8m0fnu:
        exponent = scale.view(torch.uint8)
        is_plain = not bool(((exponent == 0) | (exponent == 255)).any())
        return scale if is_plain else scale.to(torch.bfloat16)
    if scale.dtype == torch.float8_e4m3fn:
        is_plain = not bool((scale.view(torch.uint8) >= 127).any())
        return scale if is_plain else scale.to(torch.bfloat16)
    return scale if scale.dtype in _SCALE_DTYPES else scale.float()


def _per_row(parts: _ScaleParts, n_rows: int) -> _ScaleParts:
    """Move the one scale of a row into `outer`; a product with a given `outer` is float32."""
    assert parts.scale is not None, "a weight has scales"
    if parts.offset is not None:
        return parts  # as one long group
    scale = parts.scale
    factor = scale.double().expand(n_rows, 1).flatten()
    if parts.outer is not None:
        factor = factor * parts.outer.double()
    return _ScaleParts(None, parts.zero, None, factor.float().contiguous())


def _below_large(parts: _ScaleParts, n_rows: int) -> _ScaleParts:
    """Move a power of two from rows of bfloat16 scales of 2^30 and more into `outer`.

    `nibble_wide` holds scales times 2^97. Every value stays the same, but for scales that are 2^150
    times smaller than the largest of their row.
    """
    if parts.scale is None or parts.scale.dtype != torch.bfloat16 or parts.offset is not None:
        return parts
    scale = parts.scale.double()
    largest = scale.abs().nan_to_num(nan=0.0, posinf=0.0).amax(dim=1, keepdim=True)
    power = (torch.frexp(largest).exponent - _LARGE).clamp(min=0)  # largest < 2^exponent
    if not bool(power.any()):
        return parts
    factor = torch.exp2(power.double())
    outer = factor.expand(n_rows, 1).flatten()
    if parts.outer is not None:
        outer = outer * parts.outer.double()
    return replace(parts, scale=(scale / factor).to(torch.bfloat16), outer=outer.float())
