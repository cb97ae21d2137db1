"""GPTQ: which group each column of a weight belongs to (`g_idx`)."""

from __future__ import annotations

import torch
from torch import Tensor

from quantload.errors import FormatMismatch


def read_groups(
    groups: Tensor,
    group_size: int,
    name: str,
    checkpoint_name: str,
    *,
    count: int | None = None,
) -> Tensor | None:
    """Check the group of each column.

    Args:
        groups: [K] `g_idx` as stored.
        group_size: Columns that share a scale; -1 for all.
        name: Name of the tensor.
        checkpoint_name: For messages.
        count: How many groups there are; None is as many as these columns fill.

    Returns:
        [K] int32; None if columns are in the order of their groups.

    Raises:
        FormatMismatch: There are no such groups.
    """
    columns = groups.shape[0]
    group_size = columns if group_size == -1 else group_size
    filled = -(-columns // group_size)
    count = filled if count is None else count
    if bool(((groups < 0) | (groups >= count)).any()):
        raise FormatMismatch(
            f"tensor `{name}` has values from {int(groups.min())} to {int(groups.max())}, expected "
            f"numbers of {count} groups, in `{checkpoint_name}`"
        )
    groups = groups.to(torch.int32)
    in_order = torch.arange(columns, dtype=torch.int32, device=groups.device) // group_size
    return None if count == filled and torch.equal(groups, in_order) else groups


__all__ = ["read_groups"]
