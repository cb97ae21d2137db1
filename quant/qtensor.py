"""`QuantTensor`: the one canonical quantized weight between all formats and everything else.

    affine form   W[n, k] = (value(code[n, k]) - zero[n', k']) * scale[n', k']
    offset form   W[n, k] =  value(code[n, k]) * scale[n', k'] + offset[n', k']
                  n' = n // block_rows,  k' = k // block_columns  (or group_of[k])

and, where present, `outer[n]`: a factor or divisor per tensor or per row.

Codes are logical `[N, K]`, output features first, one code per element. `scale`, `zero`, `offset`
and `outer` keep the dtype they had on disk. The dtype and order of evaluation are part of the
tensor, since producers differ in them and the rounding shows: `dequantize` gives the producer's own
bits. Stacking and slicing only repeat or select scales: they are exact, and never refuse because
a cut runs through a block.

Letters: N output features, K input features, R blocks of rows, G groups of columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from quantload.errors import ShapeError
from quantload.quant.grid import Grid

OuterUse = Literal["scale*", "scale/", "value*", "value/"]


@dataclass(frozen=True)
class Evaluation:
    """In which dtype and order a producer turns codes into values.

    Args:
        dtype: Every operand is cast to this, and every operation rounds to it.
        outer: "scale*" and "scale/": the scale is multiplied or divided by `outer` before it meets
            the values. "value*" and "value/": the finished values are.
    """

    dtype: torch.dtype
    outer: OuterUse = "scale*"


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantTensor:
    """A quantized weight in canonical form; see the top of this file for the formula.

    Args:
        grid: What a code stands for.
        codes: [N, K] in `grid.storage`.
        scale: [R, G], float or e8m0 dtype, multiplier.
        zero: [R, G], in units of a code; affine form only.
        offset: [R, G], in units of a weight; offset form only.
        outer: [1, 1] or [N, 1], float.
        block: Rows and columns that share one scale; R = ceil(N / rows), G = ceil(K / columns).
            The last block may be partial.
        group_of: [K] int32, the group of each column (act-order); `block[1]` is then unused.
        evaluation: dtype and order of the arithmetic.

    Raises:
        ShapeError: The parts do not fit each other.
    """

    grid: Grid
    codes: Tensor
    scale: Tensor
    block: tuple[int, int]
    evaluation: Evaluation
    zero: Tensor | None = None
    offset: Tensor | None = None
    outer: Tensor | None = None
    group_of: Tensor | None = None

    def __post_init__(self) -> None:
        if self.codes.ndim != 2 or self.codes.dtype != self.grid.storage:
            raise ShapeError(
                f"codes of grid `{self.grid.name}` are `{self.codes.dtype}` of shape "
                f"`{tuple(self.codes.shape)}`, expected `{self.grid.storage}` of shape [N, K]"
            )
        if min(self.block) < 1:
            raise ShapeError(f"block `{self.block}`, expected positive sizes")
        expected = self._grid_shape()
        for name in ("scale", "zero", "offset"):
            part: Tensor | None = getattr(self, name)
            if part is not None and tuple(part.shape) != expected:
                raise ShapeError(
                    f"`{name}` has shape `{tuple(part.shape)}`, expected `{expected}` for codes of "
                    f"shape `{tuple(self.codes.shape)}` and blocks of `{self.block}`"
                )
        if self.zero is not None and self.offset is not None:
            raise ShapeError("a quantized tensor has a zero point or an offset, not both")
        n_rows = self.codes.shape[0]
        if self.outer is not None and tuple(self.outer.shape) not in ((1, 1), (n_rows, 1)):
            raise ShapeError(
                f"`outer` has shape `{tuple(self.outer.shape)}`, expected (1, 1) or ({n_rows}, 1)"
            )
        if self.group_of is not None and tuple(self.group_of.shape) != (self.codes.shape[1],):
            raise ShapeError(
                f"`group_of` has shape `{tuple(self.group_of.shape)}`, "
                f"expected ({self.codes.shape[1]},)"
            )

    def _grid_shape(self) -> tuple[int, int]:
        n_rows, n_columns = self.codes.shape
        groups = -(-n_columns // self.block[1])
        if self.group_of is not None and self.scale.ndim == 2:
            groups = self.scale.shape[1]
        return -(-n_rows // self.block[0]), groups

    # -- facts ---------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        return self.codes.device

    def tensors(self) -> dict[str, Tensor]:
        """Return the parts that are tensors, by field name."""
        parts = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: part for name, part in parts.items() if isinstance(part, Tensor)}

    def to(self, device: torch.device | str) -> QuantTensor:
        """Return the same tensor on `device`."""
        moved: dict[str, Any] = {name: part.to(device) for name, part in self.tensors().items()}
        return replace(self, **moved)

    def evaluated_in(self, dtype: torch.dtype) -> QuantTensor:
        """Return the tensor for a model that runs in `dtype`: evaluated in no narrower dtype.

        A model in float32 gets products of bfloat16 scales unrounded, as transformers, which casts
        scales to the model's dtype, and kernels, which multiply in float32, compute them.
        """
        wider = torch.promote_types(self.evaluation.dtype, dtype)
        return replace(self, evaluation=replace(self.evaluation, dtype=wider))

    # -- values --------------------------------------------------------------------------------

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the weight [N, K], evaluated as the producer does, then cast to `dtype`.

        Args:
            dtype: dtype of the result; None keeps `evaluation.dtype`.
        """
        working = self.evaluation.dtype
        values = self._grouped(self.grid.values(self.codes, working))
        if self.zero is not None:
            values -= self._fitting(self.zero.to(working))
        values *= self._fitting(self._scale_with_outer().to(working))
        if self.offset is not None:
            values += self._fitting(self.offset.to(working))
        values = values.reshape(self.shape)
        if self.outer is not None and self.evaluation.outer == "value*":
            values *= self.outer.to(working)
        elif self.outer is not None and self.evaluation.outer == "value/":
            values /= self.outer.to(working)
        return values if dtype is None else values.to(dtype)

    def _scale_with_outer(self) -> Tensor:
        """[R or N, G] scale, with `outer` applied where it belongs to the scale."""
        if self.outer is None or self.evaluation.outer.startswith("value"):
            return self.scale
        working = self.evaluation.dtype
        outer = self.outer.to(working)
        scale = self.scale.to(working)
        if outer.shape[0] != 1:
            scale = self._per_row(scale)
        return scale * outer if self.evaluation.outer == "scale*" else scale / outer

    def _per_row(self, part: Tensor) -> Tensor:
        """Repeat [R or N, G] along the rows to [N, G]; no copy where one row serves all."""
        n_rows = self.codes.shape[0]
        if part.shape[0] == n_rows:
            return part
        if part.shape[0] == 1:
            return part.expand(n_rows, -1)
        return part.repeat_interleave(self.block[0], dim=0)[:n_rows]

    def _has_whole_groups(self) -> bool:
        return self.group_of is None and self.shape[1] % self.block[1] == 0

    def _grouped(self, values: Tensor) -> Tensor:
        """View [N, K] as [N, G, columns of a group] where all groups are alike."""
        if not self._has_whole_groups():
            return values
        return torch.unflatten(values, 1, (-1, self.block[1]))

    def _fitting(self, part: Tensor) -> Tensor:
        """Make [R or N, G] broadcast to the result of `_grouped`."""
        part = self._per_row(part)
        if self._has_whole_groups():
            return part.unsqueeze(-1)
        if part.shape[1] == 1:
            return part
        if self.group_of is not None:
            return part[:, self.group_of.long()]
        return part.repeat_interleave(self.block[1], dim=1)[:, : self.shape[1]]

    # -- exact rearrangements ------------------------------------------------------------------

    def refined(self, block: tuple[int, int]) -> QuantTensor:
        """Repeat scales so that `block` rows and columns share one; the values stay equal.

        Raises:
            ShapeError: A block of the new size would lie in two of the present ones.
        """
        n_rows, n_columns = self.shape
        if self.group_of is not None:  # columns find their group by number
            block = block[0], self.block[1]
        for axis, (new, old, length) in enumerate(zip(block, self.block, self.shape, strict=True)):
            if new < 1 or (old % new and length > old):
                raise ShapeError(f"block size {old} of axis {axis} cannot be refined to {new}")
        if block == self.block:
            return self
        parts = self._regridded((0, n_rows, block[0]), (0, n_columns, block[1]))
        return replace(self, block=block, **parts)

    def rows(self, start: int, stop: int) -> QuantTensor:
        """Return rows start..stop (output features); a cut inside a block refines the scales."""
        self._check_range("rows", start, stop, self.shape[0])
        size = _size_after_cut(start, stop, self.block[0])
        outer = self.outer
        if outer is not None and outer.shape[0] != 1:
            outer = outer[start:stop]
        return replace(
            self,
            codes=self.codes[start:stop],
            block=(size, self.block[1]),
            outer=outer,
            **self._regridded((start, stop, size), (0, self.shape[1], self.block[1])),
        )

    def columns(self, start: int, stop: int) -> QuantTensor:
        """Return columns start..stop (input features); a cut inside a group refines the scales.

        With act-order the scales stay whole, and the group numbers global.
        """
        self._check_range("columns", start, stop, self.shape[1])
        codes = self.codes[:, start:stop]
        if self.group_of is not None:
            return replace(self, codes=codes, group_of=self.group_of[start:stop])
        size = _size_after_cut(start, stop, self.block[1])
        return replace(
            self,
            codes=codes,
            block=(self.block[0], size),
            **self._regridded((0, self.shape[0], self.block[0]), (start, stop, size)),
        )

    def _regridded(
        self, rows: tuple[int, int, int], columns: tuple[int, int, int]
    ) -> dict[str, Any]:
        """Return scale, zero and offset for a part of the tensor.

        Args:
            rows: (start, stop, block size) of the part; each new block lies in one present block.
            columns: The same for columns; unused where groups have numbers.
        """
        of_row = torch.arange(*rows, device=self.device) // self.block[0]
        of_column = torch.arange(*columns, device=self.device) // self.block[1]
        parts = {"scale": self.scale, "zero": self.zero, "offset": self.offset}
        return {
            name: part[of_row] if self.group_of is not None else part[of_row][:, of_column]
            for name, part in parts.items()
            if part is not None
        }

    @staticmethod
    def _check_range(what: str, start: int, stop: int, length: int) -> None:
        if not 0 <= start < stop <= length:
            raise ShapeError(f"{what} {start}..{stop} of a tensor with {length} {what}")


def _size_after_cut(start: int, stop: int, size: int) -> int:
    """Size of the blocks of rows or columns start..stop, cut out of blocks of `size`."""
    if start // size == (stop - 1) // size:
        return stop - start
    return math.gcd(start, size)


def why_not_stackable(members: Sequence[QuantTensor]) -> str | None:
    """Say why the members cannot become one tensor, or None if they can."""
    first = members[0]
    reasons = (_why_unlike(first, other) for other in members[1:])
    return next((reason for reason in reasons if reason is not None), None)


def _why_unlike(first: QuantTensor, other: QuantTensor) -> str | None:
    if other.shape[1] != first.shape[1]:
        return f"input widths differ: {first.shape[1]} and {other.shape[1]}"
    if other.grid != first.grid:
        return f"grids differ: {first.grid.name} and {other.grid.name}"
    if other.evaluation != first.evaluation or other.scale.dtype != first.scale.dtype:
        return "dtype or order of evaluation differ"
    for name in ("zero", "offset"):
        one, two = getattr(first, name), getattr(other, name)
        if (one is None) != (two is None) or (one is not None and one.dtype != two.dtype):
            return f"only some have a `{name}`, or their dtypes differ"
    outer_dtypes = {part.dtype for part in (first.outer, other.outer) if part is not None}
    if len(outer_dtypes) > 1:
        return "dtypes of `outer` differ"
    return _why_ordered_differently(first, other)


def _why_ordered_differently(first: QuantTensor, other: QuantTensor) -> str | None:
    if first.group_of is None and other.group_of is None:
        return None
    if first.group_of is None or other.group_of is None:
        return "only some are ordered by activation"
    same_groups = first.scale.shape[1] == other.scale.shape[1]
    if not same_groups or not torch.equal(first.group_of, other.group_of):
        return "their act-orders differ"
    return None


def stack(members: Sequence[QuantTensor]) -> QuantTensor:
    """Concatenate along the output features, exactly: scales are repeated where blocks differ.

    Args:
        members: Tensors [N_i, K] on one grid with one order of evaluation.

    Returns:
        [sum of N_i, K]; rows of member i follow those of member i - 1.

    Raises:
        ShapeError: The members are not of one kind; see `why_not_stackable`.
    """
    reason = why_not_stackable(members)
    if reason is not None:
        raise ShapeError(f"tensors cannot be stacked: {reason}")
    if len(members) == 1:
        return members[0]
    block = (_common_rows(members), _common_columns(members))
    refined = [member.refined(block) for member in members]
    parts: dict[str, Any] = {
        name: torch.cat([member.tensors()[name] for member in refined])
        for name in ("codes", "scale", "zero", "offset")
        if name in refined[0].tensors()
    }
    return replace(refined[0], outer=_stacked_outer(members), **parts)


def _common_rows(members: Sequence[QuantTensor]) -> int:
    """Largest block that ends where members end and lies in one block of each member."""
    heights = [member.shape[0] for member in members[:-1]]
    inner = [member.block[0] for member in members if member.shape[0] > member.block[0]]
    return math.gcd(*heights, *inner)


def _common_columns(members: Sequence[QuantTensor]) -> int:
    if members[0].group_of is not None:
        return members[0].block[1]
    columns = members[0].shape[1]
    inner = [member.block[1] for member in members if columns > member.block[1]]
    return math.gcd(*inner) if inner else columns


def _stacked_outer(members: Sequence[QuantTensor]) -> Tensor | None:
    outers = [member.outer for member in members]
    given = [outer for outer in outers if outer is not None]
    if not given:
        return None
    one = torch.ones(1, 1, dtype=given[0].dtype, device=given[0].device)  # times one is exact
    return torch.cat(
        [
            (one if outer is None else outer).expand(member.shape[0], 1)
            for outer, member in zip(outers, members, strict=True)
        ]
    )
