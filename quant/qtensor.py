"""`QuantTensor`: the one canonical quantized weight between all formats and everything else.

    affine form   W[n, k] = (value(code[n, k]) - zero[n', k']) * scale[n', k']
    offset form   W[n, k] =  value(code[n, k]) * scale[n', k'] + offset[n', k']
                  n' = n // block_rows,  k' = k // block_columns  (or group_of[k])

and, where present, `outer[n]`: a factor or divisor per tensor or per row; last, `inner[k]`: a
factor or divisor per column, which a layer may as well apply to its input.

Codes are logical `[N, K]`, output features first, one code per element. All other parts keep the
dtype they had on disk. The dtype and order of evaluation are part of the tensor, since producers
differ in them and the rounding shows: `dequantize` gives the producer's own bits. Stacking and
slicing only repeat or select scales: they are exact, and never refuse because a cut runs through a
block.

Letters: N output features, K input features, R blocks of rows, G groups of columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from types import NoneType
from typing import Any, Literal

import torch
from torch import Tensor

from quantload.arguments import as_pair, check_type
from quantload.errors import ShapeError
from quantload.quant.code_values import values_of
from quantload.quant.grid import Grid

OuterUse = Literal["scale*", "scale/", "value*", "value/"]
InnerUse = Literal["*", "/"]
_PARTS = ("zero", "offset", "outer", "inner", "input_scale", "input_zero", "group_of")


@dataclass(frozen=True)
class Evaluation:
    """In which dtype and order a producer turns codes into values.

    Args:
        dtype: Every operand is cast to this, and every operation rounds to it.
        outer: "scale*" and "scale/": the scale is multiplied or divided by `outer` before it meets
            the values. "value*" and "value/": the finished values are.
        inner: Whether columns are multiplied or divided by `inner`.
        input: Whether `input_scale` is a multiplier or a divisor of the codes of an input.
        result: The producer rounds finished values to this, whatever dtype its model runs in. None
            leaves them in `dtype`; a model of a wider dtype then gets wider values.
        scale: dtype in which the scale meets `outer`, before it is cast to `dtype`. None is
            `dtype`.
        values: Whether values are multiplied or divided by the scale.
    """

    dtype: torch.dtype
    outer: OuterUse = "scale*"
    inner: InnerUse = "*"
    input: InnerUse = "*"
    result: torch.dtype | None = None
    scale: torch.dtype | None = None
    values: InnerUse = "*"


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantTensor:
    """A quantized weight in canonical form; see the top of this file for the formula.

    Args:
        grid: What a code stands for.
        codes: [N, K] in `grid.storage`.
        scale: [R, G], float or e8m0 dtype, multiplier unless the evaluation says otherwise.
        zero: [R, G], in units of a code; affine form only.
        offset: [R, G], in units of a weight; offset form only.
        outer: [1, 1] or [N, 1], float.
        inner: [K], float: AWQ and SmoothQuant scales that were not folded into another layer.
        input_scale: [1], float: fixed scale of the inputs that the weight meets; no part of its
            values.
        input_zero: [1], fixed zero point of the inputs, in units of a code.
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
    inner: Tensor | None = None
    input_scale: Tensor | None = None
    input_zero: Tensor | None = None
    group_of: Tensor | None = None

    def __post_init__(self) -> None:
        self._check_types()
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
        for name in ("group_of", "inner"):
            of_column: Tensor | None = getattr(self, name)
            if of_column is not None and tuple(of_column.shape) != (self.codes.shape[1],):
                raise ShapeError(
                    f"`{name}` has shape `{tuple(of_column.shape)}`, "
                    f"expected ({self.codes.shape[1]},)"
                )

    def _check_types(self) -> None:
        check_type("grid", self.grid, Grid, expected="a `Grid`", hint="see `quant/grid.py`")
        check_type("evaluation", self.evaluation, Evaluation, expected="an `Evaluation`")
        for name in ("codes", "scale"):
            check_type(name, getattr(self, name), Tensor, expected="a tensor")
        for name in _PARTS:
            check_type(name, getattr(self, name), (Tensor, NoneType), expected="a tensor or None")
        block = as_pair("block", self.block, expected="(rows, columns)")
        object.__setattr__(self, "block", block)

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

    @property
    def multiplier(self) -> Tensor:
        """[R, G] the scale; where it is a divisor, its inverse in float32."""
        if self.evaluation.values == "*":
            return self.scale
        return (1 / self.scale.to(torch.float64)).to(torch.float32)

    def tensors(self) -> dict[str, Tensor]:
        """Return the parts that are tensors, by field name."""
        parts = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: part for name, part in parts.items() if isinstance(part, Tensor)}

    def to(self, device: torch.device | str) -> QuantTensor:
        """Return the same tensor on `device`."""
        moved: dict[str, Any] = {name: part.to(device) for name, part in self.tensors().items()}
        return replace(self, **moved)

    @property
    def rounded_to(self) -> torch.dtype:
        """The dtype that holds the producer's values."""
        return self.evaluation.result or self.evaluation.dtype

    def evaluated_in(self, dtype: torch.dtype) -> QuantTensor:
        """Return the tensor as a model in `dtype` evaluates it that casts its scales to `dtype`.

        Values of a wider model are then not those of the producer: products of bfloat16 scales stay
        unrounded in float32, as in transformers. Where the evaluation has a `result`, its values
        are the same in every model.
        """
        if self.evaluation.result is not None:
            return self
        wider = torch.promote_types(self.evaluation.dtype, dtype)
        return replace(self, evaluation=replace(self.evaluation, dtype=wider))

    # -- values --------------------------------------------------------------------------------

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the weight [N, K], evaluated as the producer does, then cast to `dtype`.

        Args:
            dtype: dtype of the result; None keeps that of the evaluation.
        """
        working = self.evaluation.dtype
        values = self._grouped(values_of(self.codes, self.grid, working))
        if self.zero is not None:
            values -= self._fitting(self.zero.to(working))
        scale = self._fitting(self._scale_with_outer().to(working))
        values = values.mul_(scale) if self.evaluation.values == "*" else values.div_(scale)
        if self.offset is not None:
            values += self._fitting(self.offset.to(working))
        values = values.reshape(self.shape)
        if self.outer is not None and self.evaluation.outer == "value*":
            values *= self.outer.to(working)
        elif self.outer is not None and self.evaluation.outer == "value/":
            values /= self.outer.to(working)
        if self.inner is not None and self.evaluation.inner == "*":
            values *= self.inner.to(working)
        elif self.inner is not None:
            values /= self.inner.to(working)
        if self.evaluation.result is not None:
            values = values.to(self.evaluation.result)
        return values if dtype is None else values.to(dtype)

    def _scale_with_outer(self) -> Tensor:
        """[R or N, G] scale, with `outer` applied where it belongs to the scale."""
        if self.outer is None or self.evaluation.outer.startswith("value"):
            return self.scale
        working = self.evaluation.scale or self.evaluation.dtype
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

    def folded(self) -> QuantTensor:
        """Return the tensor with an `outer` of its scale folded into the scale, in its dtype.

        The values stay equal. An `outer` of finished values stays.
        """
        if self.outer is None or self.evaluation.outer.startswith("value"):
            return self
        working, per_row = self.evaluation.dtype, self
        if self.outer.shape[0] != 1:
            per_row = self.refined((1, self.block[1]))
        return replace(
            per_row,
            scale=per_row._scale_with_outer().to(working),
            outer=None,
            evaluation=replace(self.evaluation, outer="scale*", scale=None),
        )

    def refined(self, block: tuple[int, int]) -> QuantTensor:
        """Repeat scales so that `block` rows and columns share one; the values stay equal.

        Raises:
            ShapeError: A block of the new size would lie in two of the present ones.
        """
        n_rows, n_columns = self.shape
        block = as_pair("block", block, expected="(rows, columns)")
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
        inner = None if self.inner is None else self.inner[start:stop]
        if self.group_of is not None:
            return replace(self, codes=codes, inner=inner, group_of=self.group_of[start:stop])
        size = _size_after_cut(start, stop, self.block[1])
        return replace(
            self,
            codes=codes,
            inner=inner,
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
