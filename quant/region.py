"""`Region`: the part of a weight that one rank of a parallel layer holds.

Regions are in logical coordinates, output features first, before anything is packed. A cut through
a block of scales is exact: `QuantTensor` repeats the scale on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, overload

import torch
from torch import Tensor

from quantload.errors import ShapeError
from quantload.quant.qtensor import QuantTensor
from quantload.quant.stacking import stack

Value = TypeVar("Value", QuantTensor, Tensor)


@dataclass(frozen=True, slots=True)
class Region:
    """Rows and columns of a weight [N, K]; of a bias or another vector [N] the rows alone.

    Args:
        rows: (start, stop) of each run of rows, in the order in which they are held; None is all.
            Several runs cut a weight that is fused on disk: those of q, of k and of v.
        columns: (start, stop) of the columns; None is all.

    Raises:
        ShapeError: A run is empty or starts before 0.
    """

    rows: tuple[tuple[int, int], ...] | None = None
    columns: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for start, stop in (*(self.rows or ()), *((self.columns,) if self.columns else ())):
            if not 0 <= start < stop:
                raise ShapeError(f"`{start}..{stop}` is no part of a weight: it holds nothing")

    @property
    def is_whole(self) -> bool:
        """True if nothing is cut."""
        return self.rows is None and self.columns is None

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the region of a tensor of this shape.

        Raises:
            ShapeError: The region reaches beyond the tensor.
        """
        self._check(shape)
        sizes = list(shape)
        if self.rows is not None:
            sizes[0] = sum(stop - start for start, stop in self.rows)
        if self.columns is not None and len(sizes) > 1:
            sizes[1] = self.columns[1] - self.columns[0]
        return tuple(sizes)

    @overload
    def of(self, value: QuantTensor) -> QuantTensor: ...
    @overload
    def of(self, value: Tensor) -> Tensor: ...
    def of(self, value: QuantTensor | Tensor) -> QuantTensor | Tensor:
        """Return the region of a weight or vector; floats as a view where one run allows it."""
        self._check(tuple(value.shape))
        if isinstance(value, Tensor):
            return self._of_tensor(value)
        if self.columns is not None:
            value = value.columns(*self.columns)
        if self.rows is None:
            return value
        parts = [value.rows(start, stop) for start, stop in self.rows]
        return parts[0] if len(parts) == 1 else stack(parts)

    def _of_tensor(self, value: Tensor) -> Tensor:
        if self.columns is not None and value.ndim > 1:
            value = value[:, self.columns[0] : self.columns[1]]
        if self.rows is None:
            return value
        parts = [value[start:stop] for start, stop in self.rows]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _check(self, shape: tuple[int, ...]) -> None:
        ends = [max(stop for _, stop in self.rows) if self.rows else 0]
        ends.append(self.columns[1] if self.columns else 0)
        if any(end > size for end, size in zip(ends, shape, strict=False)):
            raise ShapeError(f"`{self}` reaches beyond a tensor of shape `{shape}`")


WHOLE = Region()

__all__ = ["WHOLE", "Region"]
