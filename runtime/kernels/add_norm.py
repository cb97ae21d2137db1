"""Residual sum and RMS norm in one pass, for the few rows of a decode step.

    total = round(hidden + delta)               or, with a norm of its own behind a block (Gemma 2),
    total = round(hidden + norm(delta, post))
    y     = norm(total, weight)                 rounded as `rms_norm.py` says: late or early weight

The norm can be handed on as codes and scales (`quantize.py`) for a product of rounded inputs: those
of `quantize_rows` for it, bit for bit.

Every norm takes its mean of squares in float32, in another order than torch: its last bit may
differ.

Grid: one program for each row. Masked: columns past the width. Limit: latency.

Letters: M rows, H width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantload.quant.scheme import InputScheme
from quantload.runtime.kernels.dependent_launch import (
    SUM,
    launches_early,
    let_next_start,
    wait_for_previous,
)
from quantload.runtime.kernels.quantize import E4M3_GRID, INT8_GRID, group_codes, row_codes

__all__ = [
    "Codes",
    "NormWeight",
    "add_norm",
    "form_of",
    "grid_of",
    "room_for_codes",
    "store_codes",
    "writes_codes",
]

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


@dataclass(frozen=True)
class Codes:
    """Rows that are quantized already.

    Args:
        codes: [M, H] int8 or float8_e4m3fn.
        scales: [M, 1] or [M, groups] float32.
    """

    codes: Tensor
    scales: Tensor


def writes_codes(scheme: InputScheme | None, width: int) -> bool:
    """True if the kernels here can hand on rows of `width` quantized by a scheme."""
    if scheme is None or not (scheme.dynamic and scheme.symmetric):
        return False
    if scheme.grid.name not in ("int8", "e4m3") or scheme.scale != "float":
        return False
    size = scheme.group_size or 0
    in_groups = scheme.granularity == "group" and size in (32, 64, 128) and not width % size
    return scheme.granularity == "token" or (in_groups and scheme.grid.name == "e4m3")


def form_of(scheme: InputScheme | None) -> list[int]:
    """Return how codes are made, for kernels: whether they are e4m3, and the size of a group."""
    return [] if scheme is None else [scheme.grid.name == "e4m3", scheme.group_size or 0]


def room_for_codes(like: Tensor, rows: int, width: int, form: list[int]) -> tuple[Tensor, Tensor]:
    """Return empty codes [rows, width] and scales."""
    codes = like.new_empty((rows, width), dtype=torch.float8_e4m3fn if form[0] else torch.int8)
    groups = width // form[1] if form[1] else 1
    return codes, like.new_empty((rows, groups), dtype=torch.float32)


def grid_of(form: list[int]) -> int:
    """Return the grid of codes, for kernels."""
    return int((E4M3_GRID if form and form[0] else INT8_GRID).value)


def add_norm(
    hidden: Tensor,
    delta: Tensor | None,
    norm: NormWeight | None,
    *,
    post: NormWeight | None = None,
    codes: InputScheme | None = None,
) -> tuple[Tensor, Tensor | Codes]:
    """Return hidden + delta, and its norm.

    Args:
        hidden: [M, H] bfloat16, float16 or float32, contiguous rows.
        delta: [M, H] of the same dtype, what a block adds; None adds nothing.
        norm: Norm of the sum; None has none, and the second result is the sum itself.
        post: Norm of `delta` before it is added.
        codes: Hand the norm on quantized so; `writes_codes` is true for it.

    Returns:
        The sum and its norm, [M, H] each.
    """
    assert codes is None or norm is not None, "codes are those of a norm"
    assert hidden.dtype in _DTYPES, f"rows of {hidden.dtype}"
    if delta is None and norm is None:
        return hidden, hidden
    first, last = norm or _NONE, post or _NONE
    total, normed, scales = _add_norm(
        hidden, delta, first.weight, first.eps, first.late, first.offset,
        last.weight, last.eps, last.late, last.offset, form_of(codes),
    )  # fmt: skip
    total = hidden if delta is None else total
    if codes is not None:
        return total, Codes(normed, scales)
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
    form: list[int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    results = _empty_results(hidden, delta, weight, form)
    rows, width = hidden.shape
    if not rows:
        return results
    hidden = hidden if hidden.stride(1) == 1 else hidden.contiguous()
    delta = delta if delta is None or delta.stride(1) == 1 else delta.contiguous()
    block = triton.next_power_of_2(width)
    warps = min(max(block // 256, 1), 16)
    early = launches_early(hidden.device)
    with torch.cuda.device_of(hidden):
        _launch(
            hidden, delta, weight, post, results, early, block, warps,
            (eps, post_eps), (late, offset, post_late, post_offset), form,
        )  # fmt: skip
    return results


def _launch(
    hidden, delta, weight, post, results, early, block, warps,
    eps, kind, form,
) -> None:  # fmt: skip
    rows, width = hidden.shape
    _add_norm_kernel[(rows,)](
        hidden, hidden if delta is None else delta,
        hidden if weight is None else weight, hidden if post is None else post,
        *results,
        width, hidden.stride(0), 0 if delta is None else delta.stride(0), *eps,
        ADD=delta is not None, NORM=weight is not None, POST=post is not None,
        LATE=kind[0], OFFSET=kind[1], POST_LATE=kind[2], POST_OFFSET=kind[3],
        EARLY=early, BLOCK=block,
        CODES=bool(form), GRID=grid_of(form), GROUP=form[1] if form else 0,
        num_warps=warps, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip


def _empty_results(
    hidden: Tensor, delta: Tensor | None, weight: Tensor | None, form: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return room for sum, norm and scales; none for what is not asked for."""
    rows, width = hidden.shape
    total = hidden.new_empty((rows, width) if delta is not None else (0,))
    if form:
        return total, *room_for_codes(hidden, rows, width, form)
    normed = hidden.new_empty((rows, width) if weight is not None else (0,))
    return total, normed, hidden.new_empty(0, dtype=torch.float32)


@_add_norm.register_fake
def _(hidden, delta, weight, *rest):
    return _empty_results(hidden, delta, weight, rest[-1])


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
def store_codes(
    codes, scales, y, row, width,
    DTYPE: tl.constexpr, BLOCK: tl.constexpr, GRID: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Quantize a row [BLOCK], float32 with values of DTYPE and zeros past the width."""
    columns = tl.arange(0, BLOCK)
    if GROUP == 0:
        found, scale = row_codes(tl.reshape(y, (1, BLOCK)), GRID, DTYPE)
        tl.store(scales + row + tl.arange(0, 1), scale)
    else:
        groups = tl.arange(0, BLOCK // GROUP)
        tile = tl.reshape(y, (1, BLOCK // GROUP, GROUP))
        found, scale = group_codes(tile, GRID, DTYPE, False)
        scale = tl.reshape(scale, (BLOCK // GROUP,))
        count = width // GROUP
        tl.store(scales + row * count + groups, scale, mask=groups < count)
    found = tl.reshape(found, (BLOCK,)).to(codes.dtype.element_ty, bitcast=True)
    tl.store(codes + row * width + columns, found, mask=columns < width)


@triton.jit
def _add_norm_kernel(
    hidden, delta, weight, post, total, normed, scales,
    width, hidden_stride, delta_stride, eps, post_eps,
    ADD: tl.constexpr, NORM: tl.constexpr, POST: tl.constexpr,
    LATE: tl.constexpr, OFFSET: tl.constexpr, POST_LATE: tl.constexpr, POST_OFFSET: tl.constexpr,
    EARLY: tl.constexpr, BLOCK: tl.constexpr,
    CODES: tl.constexpr, GRID: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    let_next_start(EARLY)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
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
        if CODES:
            store_codes(normed, scales, y, row, width, stored.dtype, BLOCK, GRID, GROUP)
        else:
            tl.store(normed + row * width + columns, y.to(stored.dtype), mask=inside)
