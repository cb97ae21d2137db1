"""Stack quantized weights that read the same input (q/k/v, gate/up) into one, exactly.

Scales are repeated where blocks differ, and differing global scales become rows of `outer`: nothing
is quantized again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quantload.errors import ShapeError
from quantload.quant.qtensor import QuantTensor


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
    if not _equal(first.inner, other.inner):
        return "factors of their columns differ"
    if not _equal(first.input_scale, other.input_scale) or not _equal(
        first.input_zero, other.input_zero
    ):
        return "scales of their inputs differ"
    return _why_ordered_differently(first, other)


def _equal(one: Tensor | None, two: Tensor | None) -> bool:
    if one is None or two is None:
        return one is two
    return one.dtype == two.dtype and torch.equal(one, two)


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


def take_rows(tensor: QuantTensor, rows: Tensor) -> QuantTensor:
    """Return rows of a weight in another order, or some of them, exactly.

    Args:
        tensor: [N, K]; scales that several rows share are repeated.
        rows: [M] int64, the row that each row of the result is.

    Returns:
        [M, K], one scale for each row and group.
    """
    refined = tensor.refined((1, tensor.block[1]))
    rows = rows.to(tensor.device)
    parts: dict[str, Any] = {
        name: part[rows]
        for name, part in refined.tensors().items()
        if name in ("codes", "scale", "zero", "offset")
        or (name == "outer" and part.shape[0] == tensor.shape[0])
    }
    return replace(refined, **parts)


def joined_rows(parts: Sequence[Tensor]) -> Tensor:
    """Return float weights [N_i, ...] as one [sum of N_i, ...], each after the one before it.

    Parts that lie so in memory already, as loading puts the members of a layer, are not copied: the
    result shares their memory.
    """
    first, end = parts[0], parts[0].storage_offset()
    memory = first.untyped_storage().data_ptr()
    for part in parts:
        is_next = (
            part.dtype == first.dtype
            and part.shape[1:] == first.shape[1:]
            and part.is_contiguous()
            and part.untyped_storage().data_ptr() == memory
            and part.storage_offset() == end
        )
        if not is_next or part.device.type == "meta":
            return torch.cat(list(parts))
        end += part.numel()
    rows = sum(part.shape[0] for part in parts)
    return first.as_strided((rows, *first.shape[1:]), first.stride())
