"""Casts of what stays in full precision, which may not lose values in silence."""

from __future__ import annotations

import torch
from torch import Tensor

from quantload.errors import NonFiniteWeight, NotLossless


def cast(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Return a tensor in a dtype, rounded to nearest.

    Args:
        tensor: Any dtype.
        dtype: What it becomes.
        name: For messages.

    Raises:
        NonFiniteWeight: A finite value does not fit.
    """
    if tensor.dtype == dtype:
        return tensor
    result = tensor.to(dtype)
    if not _may_overflow(tensor.dtype, dtype):
        return result
    is_lost = tensor.isfinite() & ~result.isfinite()
    lost = int(is_lost.sum())
    if lost:
        largest = float(tensor[is_lost].abs().max())
        raise NonFiniteWeight(
            f"{lost} values of `{name}` do not fit into `{dtype}`, the source has "
            f"`{tensor.dtype}`, largest `{largest:.4g}`",
            hint="use bfloat16 or float32" if dtype == torch.float16 else "use float32",
        )
    return result


def refuse_rounding(tensor: Tensor, rounded: Tensor, name: str) -> None:
    """Refuse a cast that changes values; headers cannot tell, since a wide dtype may hold few bits.

    Raises:
        NotLossless: It does.
    """
    back = rounded.to(tensor.dtype)
    changed = int(((back != tensor) & ~(back.isnan() & tensor.isnan())).sum())
    if changed:
        raise NotLossless(
            f"{changed} of {tensor.numel()} values of `{name}` would change: `{tensor.dtype}` does "
            f"not fit into `{rounded.dtype}`",
            hint=f"use `--dtype {str(tensor.dtype).removeprefix('torch.')}`, or leave out "
            "`--lossless`",
        )


def _may_overflow(source: torch.dtype, target: torch.dtype) -> bool:
    """True if `source` has finite values that round to infinity in `target`."""
    if not (source.is_floating_point and target.is_floating_point):
        return False
    return torch.finfo(source).max > torch.finfo(target).max
