"""How a weight lies in memory for the weight-only GEMM.

Columns are laid out in slices of C columns (16 to 128, a power of two) that belong to one group, so
that a kernel meets one scale per row and slice. Where C does not divide a group, the tail of the
group is padded; act-order is undone by sorting the columns by group. `columns` remembers which
input feature a packed column is, and is left out where that is the identity. Slices come first in
memory: what a kernel reads in one step, BN rows of one slice, is one piece.

Letters: N output features, K input features, G groups of columns, R blocks of rows, C columns of a
slice, S slices (S * C >= K; S is even for grids of up to 4 bits).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from quantload.quant.grid import Grid
from quantload.quant.qtensor import QuantTensor

_SLICE_WIDTHS = (128, 64, 32, 16)  # a tensor-core product takes at least 16 columns
_SIGNED_NIBBLE_BIAS = 8  # int2 .. int4 are held as code + 8
_CODE_SPAN = 256  # integers up to this size are exact in bfloat16
_SCALE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight as the kernel reads it; all tensors are on one device.

    Args:
        codes: [S, N, C] int8, uint8 or FP8; grids of up to 4 bits [S / 2, N, C] uint8, where byte j
            holds column j of slice 2i in its low nibble and of slice 2i + 1 in its high nibble.
        scale: [G, R] float, multiplier; [S, R] where the groups have no common number of slices.
        zero: As `scale`, int8 or uint8, in units of a code, or None.
        offset: As `scale`, float, in units of a weight before `outer`, or None.
        outer: [N] float32, multiplier of a row, or None.
        columns: [S * C] int32, the input feature of a packed column, -1 for padding; None if
            packed column k is input feature k.
        table: [16] float32, the value of a code, or None.
        in_features: K.
        block_rows: Rows that share one scale.
        slices_per_group: Slices that share one scale.
        code_bias: What was added to a code to make it a nibble.
        nibbles: True if a byte of `codes` holds two codes.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    offset: Tensor | None
    outer: Tensor | None
    columns: Tensor | None
    table: Tensor | None
    in_features: int
    block_rows: int
    slices_per_group: int
    code_bias: int
    nibbles: bool

    @property
    def out_features(self) -> int:
        """N."""
        return self.codes.shape[1]

    def tensors(self) -> dict[str, Tensor]:
        """Return the parts that are tensors, by field name."""
        return {name: part for name, part in vars(self).items() if isinstance(part, Tensor)}


def pack(weight: QuantTensor, *, device: torch.device) -> PackedWeight:
    """Lay a weight out; exact, but for products with `outer` or a float zero, which are float32.

    Args:
        weight: A grid of integers or FP8, or a table of at most 16 values.
        device: Where the result lives.
    """
    n_columns, table = weight.shape[1], weight.grid.table
    nibbles = weight.grid.bits <= 4
    slices = _choose_slices(weight)
    in_order = torch.equal(slices.columns[:n_columns], torch.arange(n_columns))
    columns = slices.columns.to(device)
    weight = weight.to(device)
    parts = _scale_parts(weight)
    return PackedWeight(
        codes=_packed_codes(weight, columns, slices.width),
        scale=_by_slice(parts.scale, slices),
        zero=None if parts.zero is None else _by_slice(parts.zero, slices),
        offset=None if parts.offset is None else _by_slice(parts.offset, slices),
        outer=parts.outer,
        columns=None if in_order else columns.to(torch.int32),
        table=None if table is None else _padded_table(table, device),
        in_features=n_columns,
        block_rows=parts.block_rows,
        slices_per_group=slices.per_group,
        code_bias=_SIGNED_NIBBLE_BIAS if nibbles and weight.grid.storage == torch.int8 else 0,
        nibbles=nibbles,
    )


@dataclass(frozen=True)
class _Slices:
    """How columns are laid out, on the CPU.

    Args:
        width: C.
        columns: As in `PackedWeight`, int64.
        per_group: Slices that share one scale.
        group: [S] int64, the group of each slice where groups have no common number of slices.
    """

    width: int
    columns: Tensor
    per_group: int
    group: Tensor | None


def _choose_slices(weight: QuantTensor) -> _Slices:
    """Take the widest slices that pad K by no more than an eighth, else those that pad it least."""
    n_groups, even = weight.scale.shape[1], weight.grid.bits <= 4
    if weight.group_of is None:
        return _of_blocks(weight.shape[1], weight.block[1], n_groups, even)
    return _narrowest(weight.group_of.cpu().long(), n_groups, even=even)


@lru_cache(maxsize=64)  # a model has few shapes and hundreds of weights, packed while others load
def _of_blocks(n_columns: int, block: int, n_groups: int, even: bool) -> _Slices:
    return _narrowest(torch.arange(n_columns) // block, n_groups, even=even)


def _narrowest(group_of: Tensor, n_groups: int, *, even: bool) -> _Slices:
    candidates = []
    for width in _SLICE_WIDTHS:
        candidates.append(_slices(group_of, n_groups, width, even=even))
        if candidates[-1].columns.shape[0] <= group_of.shape[0] * 9 / 8:
            return candidates[-1]
    return min(candidates, key=lambda candidate: candidate.columns.shape[0])


def _slices(group_of: Tensor, n_groups: int, width: int, *, even: bool) -> _Slices:
    counts = torch.bincount(group_of, minlength=n_groups)
    per_group = -(-counts // width)
    first = per_group.cumsum(0) - per_group  # first slice of each group
    order = group_of.argsort(stable=True)
    rank = torch.arange(group_of.shape[0]) - (counts.cumsum(0) - counts)[group_of[order]]
    n_slices = int(per_group.sum())
    padded = n_slices + n_slices % 2 if even else n_slices
    columns = torch.full((padded * width,), -1)
    columns[first[group_of[order]] * width + rank] = order
    if bool((per_group[:-1] == per_group[0]).all() & (per_group[-1] <= per_group[0])):
        return _Slices(width, columns, int(per_group[0]), None)
    group = torch.arange(n_groups).repeat_interleave(per_group)
    group = torch.nn.functional.pad(group, (0, padded - n_slices))
    return _Slices(width, columns, 1, group)


def _packed_codes(weight: QuantTensor, columns: Tensor, width: int) -> Tensor:
    codes = weight.codes
    raw = codes.view(torch.uint8).index_select(1, columns.clamp(min=0))
    raw.masked_fill_(columns < 0, 0)  # a padded NaN code would not vanish against an input of zero
    raw = raw.reshape(codes.shape[0], -1, width)
    if weight.grid.bits > 4:
        return raw.transpose(0, 1).contiguous().view(codes.dtype)
    if weight.grid.storage == torch.int8:
        raw += _SIGNED_NIBBLE_BIAS  # wraps around: two's complement becomes code + 8
        raw &= 15
    return (raw[:, 0::2] | (raw[:, 1::2] << 4)).transpose(0, 1).contiguous()


def _by_slice(part: Tensor, slices: _Slices) -> Tensor:
    """[R, G] to [G, R], or [S, R] where groups have no common number of slices."""
    if slices.group is not None:
        part = part[:, slices.group.to(part.device)]
    return part.t().contiguous()


@dataclass(frozen=True)
class _ScaleParts:
    """`scale`, `zero` and `offset` [R, G], `outer` [N]; see `PackedWeight`."""

    scale: Tensor
    zero: Tensor | None
    offset: Tensor | None
    outer: Tensor | None
    block_rows: int


def _scale_parts(weight: QuantTensor) -> _ScaleParts:
    scale, zero, block_rows = _loadable(weight.multiplier), weight.zero, weight.block[0]
    offset = None if weight.offset is None else _loadable(weight.offset)
    if zero is not None and not _is_subtracted(weight.grid, zero.dtype):
        offset = -(zero.double() * scale.double()).float()
        zero = None
    if weight.outer is None:
        return _ScaleParts(scale, zero, offset, None, block_rows)
    n_rows, factor = weight.shape[0], weight.outer.double()
    if weight.evaluation.outer.endswith("/"):
        factor = 1 / factor
    if weight.offset is not None and weight.evaluation.outer.startswith("scale"):
        # The offset is not multiplied by `outer`, so the scale takes it, row by row.
        assert offset is not None, "the offset form has an offset"
        scale = scale.repeat_interleave(block_rows, dim=0)[:n_rows]
        offset = offset.repeat_interleave(block_rows, dim=0)[:n_rows]
        return _ScaleParts((scale.double() * factor).float(), None, offset, None, 1)
    outer = factor.float().expand(n_rows, 1).contiguous().flatten()
    return _ScaleParts(scale, zero, offset, outer, block_rows)


def _is_subtracted(grid: Grid, dtype: torch.dtype) -> bool:
    """True if code - zero is a small integer whatever the zero; other zeros become offsets."""
    if not grid.is_integer or dtype not in (torch.int8, torch.uint8):
        return False
    zeros = torch.iinfo(dtype)
    return max(grid.high - zeros.min, zeros.max - grid.low) <= _CODE_SPAN


def _loadable(part: Tensor) -> Tensor:
    """Cast to a dtype that the kernel loads; FP8 and e8m0 are exact in bfloat16."""
    if part.dtype in _SCALE_DTYPES:
        return part
    return part.float() if part.dtype == torch.float64 else part.to(torch.bfloat16)


def _padded_table(table: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(table + (0.0,) * (16 - len(table)), dtype=torch.float32, device=device)
