"""Routing of tokens to experts for grouped products: who multiplies with whom, in one launch.

A pair is a token and one of its experts: pair t * k + j is choice j of token t. Pairs of an expert
become blocks of BM. A program for each expert counts the pairs of lower experts and its own, and
writes its pairs and blocks where nobody else does: expert e with b pairs before it owns the blocks
from b // BM + e on, which leaves it enough, since rounding up costs an expert at most one block.
Blocks that nobody needs say so. No atomics, no sort, no host: the same numbers every time.

Grid: (E). Masked: pairs past S; pairs of no expert here are in no block. Limit: latency.

Letters: S pairs (tokens times choices), E experts held here, BM pairs of a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantload.runtime.kernels.dependent_launch import (
    launches_early,
    let_next_start,
    wait_for_previous,
)

__all__ = ["route", "weighted_sum"]

_MOST_AT_ONCE = 8192


@triton.jit
def _add(a, b):
    return a + b


@triton.jit
def _local(index, at, S, first):
    """Load the experts of some pairs, numbered from the first one here; -1 past the last pair."""
    return (tl.load(index + at, mask=at < S, other=first - 1) - first).to(tl.int32)


@triton.jit(do_not_specialize=("S", "first", "E", "capacity"))
def _route_kernel(
    index, order, blocks, S, first, E, capacity,
    CHUNK: tl.constexpr, BM: tl.constexpr, ONCE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write order [S] and blocks [3, capacity]: expert or -1, first place in order, place after.

    ONCE: all pairs are one chunk.
    """
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    e = tl.program_id(0)
    at = tl.arange(0, CHUNK)
    if ONCE:
        ids = _local(index, at, S, first)
        below = ((ids >= 0) & (ids < e)).to(tl.int32)
        own = (ids == e).to(tl.int32)
        rank = tl.associative_scan(own, 0, _add)
    else:
        below = tl.full((CHUNK,), 0, tl.int32)
        own = tl.full((CHUNK,), 0, tl.int32)
        for start in range(0, S, CHUNK):
            ids = _local(index, start + at, S, first)
            below += ((ids >= 0) & (ids < e)).to(tl.int32)
            own += (ids == e).to(tl.int32)
    base = tl.reduce(below, 0, _add)
    count = tl.reduce(own, 0, _add)
    slot = base // BM + e
    # blocks that pairs of no expert leave over are the last expert's
    after = tl.where(e == E - 1, capacity, (base + count) // BM + e + 1)
    for start in range(slot, after, CHUNK):
        block = start + at
        place = base + (block - slot) * BM
        is_used = place < base + count
        inside = block < after
        tl.store(blocks + block, tl.where(is_used, e, -1), mask=inside)
        tl.store(blocks + capacity + block, place, mask=inside)
        tl.store(blocks + 2 * capacity + block, tl.minimum(place + BM, base + count), mask=inside)
    if ONCE:
        tl.store(order + base + rank - 1, at, mask=own == 1)
    else:
        for start in range(0, S, CHUNK):
            own = (_local(index, start + at, S, first) == e).to(tl.int32)
            rank = tl.associative_scan(own, 0, _add)
            tl.store(order + base + rank - 1, start + at, mask=own == 1)
            base += tl.reduce(own, 0, _add)


@torch.library.custom_op("quantload::route", mutates_args=())
def _route(index: Tensor, first: int, experts: int, block: int) -> tuple[Tensor, Tensor]:
    pairs = index.numel()
    capacity = pairs // block + experts
    order = torch.empty(pairs, dtype=torch.int32, device=index.device)
    blocks = torch.empty((3, capacity), dtype=torch.int32, device=index.device)
    if not pairs:
        return order, blocks.fill_(-1)
    chunk = min(_MOST_AT_ONCE, max(128, triton.next_power_of_2(pairs)))
    early = launches_early(index.device)
    with torch.cuda.device_of(index):
        _route_kernel[(experts,)](
            index, order, blocks, pairs, first, experts, capacity,
            CHUNK=chunk, BM=block, ONCE=pairs <= chunk, EARLY=early,
            num_warps=min(16, max(4, chunk // 256)),
            **({"launch_pdl": True} if early else {}),
        )  # fmt: skip
    return order, blocks


@_route.register_fake
def _(index: Tensor, first: int, experts: int, block: int) -> tuple[Tensor, Tensor]:
    pairs = index.numel()
    return (
        index.new_empty(pairs, dtype=torch.int32),
        index.new_empty((3, pairs // block + experts), dtype=torch.int32),
    )


def route(index: Tensor, *, first: int, experts: int, block: int) -> tuple[Tensor, Tensor]:
    """Sort pairs by expert and cut them into blocks.

    Args:
        index: [S] integers, the expert of each pair, of all experts of the layer; what is no expert
            here is in no block.
        first: Number of the first expert here.
        experts: E.
        block: BM, a power of two.

    Returns:
        order [S] int32, pairs by expert, ascending; places past the last pair hold anything.
        blocks [3, S // BM + E] int32: expert of a block (from 0) or -1, where its pairs start in
        `order`, and where they end.
    """
    found: tuple[Tensor, Tensor] = _route(index, first, experts, block)
    return found


# -- the sum over the choices ----------------------------------------------------------------------


@triton.jit(do_not_specialize=("choices", "first", "E"))
def _weighted_sum_kernel(
    rows, weights, index, out, N, choices, first, E,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write out [T, N] = sum over j of weights[t, j] * rows[t * choices + j, N], in order."""
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.full((BLOCK,), 0.0, tl.float32)
    for j in range(choices):
        pair = t * choices + j
        e = tl.load(index + pair) - first
        is_here = (e >= 0) & (e < E)
        row = tl.load(rows + pair * N + n, mask=(n < N) & is_here, other=0.0).to(tl.float32)
        weight = tl.load(weights + pair).to(tl.float32)
        acc += tl.where(is_here, row * weight, 0.0)
    tl.store(out + t * N + n, acc.to(out.dtype.element_ty), mask=n < N)


@torch.library.custom_op("quantload::weighted_sum", mutates_args=())
def _weighted_sum(
    rows: Tensor, weights: Tensor, index: Tensor, first: int, experts: int, dtype: torch.dtype
) -> Tensor:
    (tokens, choices), width = weights.shape, rows.shape[1]
    out = rows.new_empty((tokens, width), dtype=dtype)
    if not out.numel():
        return out
    block = 256 if tokens <= 64 else 1024
    early = launches_early(rows.device)
    with torch.cuda.device_of(rows):
        _weighted_sum_kernel[(tokens, triton.cdiv(width, block))](
            rows, weights, index, out, width, choices, first, experts,
            BLOCK=block, EARLY=early, num_warps=4 if block > 256 else 2,
            **({"launch_pdl": True} if early else {}),
        )  # fmt: skip
    return out


@_weighted_sum.register_fake
def _(
    rows: Tensor, weights: Tensor, index: Tensor, first: int, experts: int, dtype: torch.dtype
) -> Tensor:
    return rows.new_empty((weights.shape[0], rows.shape[1]), dtype=dtype)


def weighted_sum(
    rows: Tensor,
    weights: Tensor,
    index: Tensor,
    *,
    first: int,
    experts: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return the weighted sum of the results of each token's experts, in the order of its choices.

    Args:
        rows: [S, N] float, the result of each pair; those of no expert here hold anything.
        weights: [T, k] float.
        index: [T, k] integers, the expert of each pair.
        first: Number of the first expert here.
        experts: E.
        dtype: dtype of the result.

    Returns:
        [T, N]; zeros for tokens without an expert here.
    """
    weights, index = weights.contiguous(), index.contiguous()
    found: Tensor = _weighted_sum(rows.contiguous(), weights, index, first, experts, dtype)
    return found
