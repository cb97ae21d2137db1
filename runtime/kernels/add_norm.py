"""Residual sum and RMS norm in one pass, for the few rows of a decode step.

    total = round(hidden + delta)               or, with a norm of its own behind a block (Gemma 2),
    total = round(hidden + norm(delta, post))
    y     = norm(total, weight)                 rounded as `rms_norm.py` says: late or early weight

Every norm takes its mean of squares in float32, in another order than torch: its last bit may
differ.

Grid: one program for each row, and some that fetch the weights of the next product
(`dependent_launch.py`). Masked: columns past the width. Limit: latency.

Letters: M rows, H width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantload.runtime.kernels.dependent_launch import (
    SUM,
    Ahead,
    ahead_of,
    fetch_ahead,
    launches_early,
    let_next_start,
    wait_for_previous,
)

__all__ = ["NormWeight", "add_norm"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class NormWeight:
    """An RMS norm.

    Args:
        weight: [H].
        eps: Added to the mean of squares.
        late: Round to x's dtype before weighing.
        offset: Weigh by 1 + weight.
    """

    weight: Tensor
    eps: float
    late: bool
    offset: bool


def add_norm(
    hidden: Tensor,
    delta: Tensor | None,
    norm: NormWeight | None,
    *,
    post: NormWeight | None = None,
    ahead: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return hidden + delta, and its norm.

    Args:
        hidden: [M, H] bfloat16, float16 or float32, contiguous rows.
        delta: [M, H] of the same dtype, what a block adds; None adds nothing.
        norm: Norm of the sum; None has none, and the second result is the sum itself.
        post: Norm of `delta` before it is added.
        ahead: Weight of the next product, fetched into the cache meanwhile.

    Returns:
        The sum and its norm, [M, H] each.
    """
    assert hidden.dtype in _DTYPES, f"rows of {hidden.dtype}"
    if delta is None and norm is None:
        return hidden, hidden
    first, last = norm or _NONE, post or _NONE
    total, normed = _add_norm(
        hidden, delta, first.weight, first.eps, first.late, first.offset,
        last.weight, last.eps, last.late, last.offset, ahead,
    )  # fmt: skip
    total = hidden if delta is None else total
    return total, total if norm is None else normed


@dataclass(frozen=True)
class _NoNorm:
    weight = None
    eps = 0.0
    late = False
    offset = False


_NONE = _NoNorm()


@torch.library.custom_op("quantload::add_norm", mutates_args=())
def _add_norm(
    hidden: Tensor, delta: Tensor | None,
    weight: Tensor | None, eps: float, late: bool, offset: bool,
    post: Tensor | None, post_eps: float, post_late: bool, post_offset: bool,
    ahead: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    total, normed = _empty_results(hidden, delta, weight)
    rows, width = hidden.shape
    if not rows:
        return total, normed
    hidden = hidden if hidden.stride(1) == 1 else hidden.contiguous()
    delta = delta if delta is None or delta.stride(1) == 1 else delta.contiguous()
    block = triton.next_power_of_2(width)
    warps = min(max(block // 512, 1), 16)
    early, next_up = launches_early(hidden.device), ahead_of(ahead, hidden.device, warps)
    with torch.cuda.device_of(hidden):
        _launch(
            hidden, delta, weight, post, total, normed, next_up, early, width, block, warps,
            (eps, post_eps), (late, offset, post_late, post_offset),
        )  # fmt: skip
    return total, normed


def _launch(
    hidden, delta, weight, post, total, normed, next_up: Ahead | None, early, width, block, warps,
    eps, kind,
) -> None:  # fmt: skip
    rows = hidden.shape[0]
    programs = next_up.programs if next_up else 0
    _add_norm_kernel[(rows + programs,)](
        hidden, hidden if delta is None else delta,
        hidden if weight is None else weight, hidden if post is None else post,
        total, normed, next_up.start if next_up else hidden, next_up.pieces if next_up else 0,
        rows, width, hidden.stride(0), 0 if delta is None else delta.stride(0), *eps,
        ADD=delta is not None, NORM=weight is not None, POST=post is not None,
        LATE=kind[0], OFFSET=kind[1], POST_LATE=kind[2], POST_OFFSET=kind[3],
        AHEAD=next_up is not None, EARLY=early, BLOCK=block, WARPS=warps,
        num_warps=warps, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip


def _empty_results(
    hidden: Tensor, delta: Tensor | None, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return room for both results, none for one that is not asked for."""
    sizes = (
        hidden.shape if delta is not None else (0,),
        hidden.shape if weight is not None else (0,),
    )
    total, normed = (torch.empty(s, dtype=hidden.dtype, device=hidden.device) for s in sizes)
    return total, normed


@_add_norm.register_fake
def _(hidden, delta, weight, *_):
    return _empty_results(hidden, delta, weight)


@triton.jit
def normed_row(
    values, w, eps, width, DTYPE: tl.constexpr, LATE: tl.constexpr, OFFSET: tl.constexpr
):
    """Return the norm of a row [H] float32, its values rounded to DTYPE, as float32."""
    values = values * tl.rsqrt(tl.reduce(values * values, 0, SUM) / width + eps)
    if LATE:
        values = values.to(DTYPE).to(tl.float32)
    if OFFSET:
        w = 1.0 + w
    return (values * w).to(DTYPE).to(tl.float32)


@triton.jit
def _add_norm_kernel(
    hidden, delta, weight, post, total, normed, ahead, pieces,
    rows, width, hidden_stride, delta_stride, eps, post_eps,
    ADD: tl.constexpr, NORM: tl.constexpr, POST: tl.constexpr,
    LATE: tl.constexpr, OFFSET: tl.constexpr, POST_LATE: tl.constexpr, POST_OFFSET: tl.constexpr,
    AHEAD: tl.constexpr, EARLY: tl.constexpr, BLOCK: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    let_next_start(EARLY)
    if AHEAD:  # noqa: SIM102 - AHEAD is known when this is compiled
        if row >= rows:
            fetch_ahead(ahead, pieces, (row - rows).to(tl.int32), WARPS)
    columns = tl.arange(0, BLOCK)
    inside = (columns < width) & (row < rows)
    w = tl.full((BLOCK,), 0.0, tl.float32)
    late_w = tl.full((BLOCK,), 0.0, tl.float32)
    if NORM:  # weights are nobody's result: read before the wait
        w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if POST:
        late_w = tl.load(post + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(EARLY)
    stored = tl.load(hidden + row * hidden_stride + columns, mask=inside, other=0.0)
    values = stored.to(tl.float32)
    if ADD:
        more = tl.load(delta + row * delta_stride + columns, mask=inside, other=0.0).to(tl.float32)
        if POST:
            more = normed_row(more, late_w, post_eps, width, stored.dtype, POST_LATE, POST_OFFSET)
        sums = (values + more).to(stored.dtype)
        tl.store(total + row * width + columns, sums, mask=inside)
        values = sums.to(tl.float32)
    if NORM:
        y = normed_row(values, w, eps, width, stored.dtype, LATE, OFFSET)
        tl.store(normed + row * width + columns, y.to(stored.dtype), mask=inside)
