"""Take of a stored tensor what a `Cut` says, and put tensors that share a parameter together.

Rows are output features of what the checkpoint means: those of a quantized weight are chosen with
their scales, exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quantload.errors import ShapeError, UnsupportedVariant
from quantload.mappers.targets import Cut, Join, Target
from quantload.quant.qtensor import QuantTensor
from quantload.quant.stacking import stack, take_rows

Shape = tuple[int, ...]


# -- from headers ---------------------------------------------------------------------------------


def resolved(cut: Cut | None, shape: Shape, goal: Shape) -> Cut | None:
    """Decide whether a tensor is transposed where that depends on its shape.

    Args:
        cut: What is taken of it.
        shape: Its shape.
        goal: Shape of the model's own parameter.
    """
    if cut is None or cut.transposed != "by shape":
        return cut
    cut = replace(cut, transposed="never" if shape == goal else "always")
    return None if cut == Cut() else cut


def shape_after(shape: Shape, cut: Cut | None, name: str) -> Shape:
    """Return the shape of what is taken.

    Raises:
        ShapeError: Rows beyond the tensor are asked for.
    """
    if cut is None:
        return shape
    if cut.rows is not None:
        needed = 1 + max(run[-1] for run in cut.rows)
        if cut.axis >= len(shape) or needed > shape[cut.axis]:
            raise ShapeError(
                f"tensor `{name}` has shape `{shape}`, expected at least {needed} along axis "
                f"{cut.axis}, of which {cut} are taken"
            )
        shape = (*shape[: cut.axis], cut.length or 0, *shape[cut.axis + 1 :])
    return (*shape[:-2], *shape[:-3:-1]) if cut.transposed == "always" else shape


def check_all_taken(targets: Sequence[Target], shape: Shape, name: str) -> None:
    """Prove that every row of a tensor goes to one place.

    Raises:
        ShapeError: Rows are left over, though the architecture does not say that they may be.
    """
    cuts = [target.cut for target in targets]
    if any(cut is None or cut.rows is None or cut.rest for cut in cuts):
        return
    axis = next(cut.axis for cut in cuts if cut is not None)
    count = sum(cut.length or 0 for cut in cuts if cut is not None)
    if axis < len(shape) and count != shape[axis]:
        raise ShapeError(
            f"tensor `{name}` has shape `{shape}`, expected {count} along axis {axis}: as many as "
            f"`{targets[0].place}` and the {len(targets) - 1} other places of its rows have"
        )


# -- values ---------------------------------------------------------------------------------------


def taken(value: QuantTensor | Tensor, cut: Cut | None, name: str) -> QuantTensor | Tensor:
    """Return what a cut takes of a weight or tensor.

    Raises:
        UnsupportedVariant: A quantized weight would be transposed, or cut along its experts' rows.
    """
    if cut is None:
        return value
    if isinstance(value, Tensor):
        return _of_tensor(value, cut)
    if cut.transposed == "always" or cut.axis:
        raise UnsupportedVariant(
            f"the quantized weight of `{name}` would have to be transposed or cut along axis "
            f"{cut.axis} ({cut}), which only tensors in full precision can be",
            hint="dequantize the checkpoint first: `quantload convert SRC OUT --scheme dense`",
        )
    if cut.rows is None:
        return value
    if all(run.step == 1 for run in cut.rows):
        return stack([value.rows(run.start, run.stop) for run in cut.rows])
    index = torch.cat([torch.arange(run.start, run.stop, run.step) for run in cut.rows])
    return take_rows(value, index)


def _of_tensor(value: Tensor, cut: Cut) -> Tensor:
    if cut.rows is not None:
        before = (slice(None),) * cut.axis
        runs = [value[(*before, slice(run.start, run.stop, run.step))] for run in cut.rows]
        value = runs[0] if len(runs) == 1 else torch.cat(runs, dim=cut.axis)
    return value.transpose(-1, -2) if cut.transposed == "always" else value


class Joining:
    """Collects the tensors that share a parameter, until all of them are there."""

    def __init__(self) -> None:
        self._parts: dict[Target, dict[int, QuantTensor | Tensor]] = {}

    def add(
        self, place: Target, join: Join, value: QuantTensor | Tensor
    ) -> QuantTensor | Tensor | None:
        """Take a part; the whole is returned with its last part.

        Raises:
            ShapeError: Quantized parts are not of one kind.
        """
        parts = self._parts.setdefault(place, {})
        parts[join.part] = value
        if len(parts) < join.parts:
            return None
        values = [parts[number] for number in sorted(parts)]
        del self._parts[place]
        quantized = [part for part in values if isinstance(part, QuantTensor)]
        if len(quantized) == len(values):
            return stack(quantized)
        dense = [part.dequantize() if isinstance(part, QuantTensor) else part for part in values]
        return torch.cat(dense, dim=join.axis)


__all__ = ["Joining", "check_all_taken", "resolved", "shape_after", "taken"]
