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

from dataclasses import dataclass

import torch
from torch import Tensor

from quantload.quant.grid import Grid
from quantload.quant.qtensor import QuantTensor
from quantload.runtime.kernels.nibble_layout import SLICE_COLUMNS, lookup_table, pack_nibbles

__all__ = ["NibbleWeight", "pack", "why_not_form"]

_BIAS = 8  # int2 .. int4 are held as code + 8
_LARGEST_ZERO = 63  # what `unpack4` subtracts exactly
_SCALE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, eq=False)
class NibbleWeight:
    """A packed weight; all tensors are on one device.

    Args:
        words: [B, N, C] int16, see `nibble_layout`.
        scale: [G, N] float, or bytes: uint8 exponents of two (e8m0), float8_e4m3fn. G also counts
            groups of padded columns. None where a row has one scale, which is then in `outer`.
        zero: [G, N] uint8, 0 to 63, in units of a nibble, or None.
        offset: [G, N] float, or None.
        outer: [N] float32, or None.
        columns: [B * 4 * C] int32, the input feature of a packed column, -1 for padding; None if
            packed column k is input feature k.
        table: [24] int32 of `lookup_table`, or None.
        form: "int", "uint", "zero", "e2m1" or "table", as `unpack4` takes it.
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
    features: int
    group: int
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        """N."""
        return self.words.shape[1]

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
    if slice_columns(_group_columns(weight), weight.shape[1]) is None:
        return f"groups of {weight.block[1]} columns are no slices of 16, 32 or 64"
    return None


def _why_not_order(weight: QuantTensor) -> str | None:
    assert weight.group_of is not None, "asked for act-order only"
    groups, features = weight.scale.shape[1], weight.shape[1]
    sizes = torch.bincount(weight.group_of.long().cpu(), minlength=groups)
    if features % groups or bool((sizes != features // groups).any()):
        return "groups of act-order differ in size"
    if slice_columns(features // groups, features) is None:
        return f"groups of {features // groups} columns are no slices of 16, 32 or 64"
    return None


def _group_columns(weight: QuantTensor) -> int:
    if weight.group_of is not None:
        return weight.shape[1] // weight.scale.shape[1]
    return min(weight.block[1], weight.shape[1])


def slice_columns(group: int, features: int) -> int | None:
    """Return C for groups of `group` columns, or None."""
    if group >= features:
        return SLICE_COLUMNS
    for columns in (SLICE_COLUMNS, 32, 16):
        if group in (columns, 2 * columns) or group % (4 * columns) == 0:
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
    columns = slice_columns(group, features)
    assert columns is not None, "refused by `why_not_form`"
    parts = _scale_parts(weight)
    if group >= features:
        parts = _per_row(parts, n_rows)
    codes, bias = _nibbles(weight)
    order = None
    if weight.group_of is not None:
        order = weight.group_of.long().argsort(stable=True)
        codes = codes.index_select(1, order)
    table = weight.grid.table if weight.grid.name != "e2m1" else None
    words = pack_nibbles(codes, columns=columns, fill=bias)
    n_groups = -(-words.shape[0] * 4 * columns // min(group, features))
    return NibbleWeight(
        words=words,
        scale=_by_group(parts.scale, n_rows, n_groups),
        zero=_by_group(parts.zero, n_rows, n_groups),
        offset=_by_group(parts.offset, n_rows, n_groups),
        outer=parts.outer,
        columns=None if order is None else _padded(order, words.shape[0] * 4 * columns),
        table=None if table is None else lookup_table(_sixteen(table, device), dtype),
        form=_form(weight.grid, parts.zero),
        features=features,
        group=min(group, features),
        dtype=dtype,
    )


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


def _by_group(part: Tensor | None, n_rows: int, n_groups: int) -> Tensor | None:
    """[R, G] to [G, N], with rows for the groups of padded columns, which meet only zeros."""
    if part is None:
        return None
    of_group = part.expand(n_rows, -1).t()
    missing = max(n_groups - of_group.shape[0], 0)
    in_bytes = of_group.view(torch.uint8) if of_group.element_size() == 1 else of_group
    return torch.nn.functional.pad(in_bytes, (0, 0, 0, missing)).contiguous().view(part.dtype)


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
    if weight.outer is None:
        return _ScaleParts(scale, zero, offset, None)
    n_rows, factor = weight.shape[0], weight.outer.double()
    if weight.evaluation.outer.endswith("/"):
        factor = 1 / factor
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
    zero = weight.zero.double() + bias
    if bool(((zero < 0) | (zero > _LARGEST_ZERO) | (zero != zero.round())).any()):
        return None
    return zero.to(torch.uint8)


def _loadable(scale: Tensor) -> Tensor:
    """The scales in a dtype that kernels load."""
    if scale.dtype == torch.float8_e8m0fnu:
        return scale.view(torch.uint8)
    if scale.dtype in (*_SCALE_DTYPES, torch.float8_e4m3fn):
        return scale
    return scale.float()


def _per_row(parts: _ScaleParts, n_rows: int) -> _ScaleParts:
    """Move the one scale of a row into `outer`; a product with a given `outer` is float32."""
    assert parts.scale is not None, "a weight has scales"
    if parts.offset is not None:
        return parts  # as one long group
    scale = parts.scale
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    factor = scale.double().expand(n_rows, 1).flatten()
    if parts.outer is not None:
        factor = factor * parts.outer.double()
    return _ScaleParts(None, parts.zero, None, factor.float().contiguous())
