"""The router of a block of experts in one launch: product, softmax and choice of the best.

    logits = round(x @ W^T + bias)                                    [M, E]
    weights = softmax(logits) of the k largest, in float32; divided by their sum if asked, which
              is the softmax over these k alone

Of equal experts the first is taken.

Grid: (M, parts of E). Each program makes the logits of its experts of one token; the last one of a
token to finish chooses. Masked: experts past E, columns past H. Limit: latency. For few tokens:
each reads the whole weight.

Letters: M tokens, H width, E experts, k experts of a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantload.runtime.kernels.dependent_launch import (
    LARGEST,
    SUM,
    launches_early,
    let_next_start,
    wait_for_previous,
)
from quantload.runtime.kernels.split_locks import prepare, split_locks

__all__ = ["MOST_EXPERTS", "MOST_TOKENS", "route_to_experts"]

MOST_EXPERTS = 1024
MOST_TOKENS = 64
_EXPERTS, _COLUMNS = 8, 512  # of a program: experts, columns at once


def route_to_experts(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    k: int,
    normalized: bool,
    in_float32: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits [M, E], weights [M, k] and experts [M, k] int64.

    Args:
        x: [M, H] bfloat16, float16 or float32.
        weight: [E, H] of the same dtype, at most `MOST_EXPERTS` rows.
        bias: [E] or None.
        k: Experts of a token.
        normalized: Divide the weights of a token by their sum.
        in_float32: Weights are float32, not rounded to x's dtype.
    """
    prepare(x.device)
    logits, weights, experts = _route(x, weight, bias, k, normalized, in_float32)
    return logits, weights, experts


@torch.library.custom_op("quantload::route_to_experts", mutates_args=())
def _route(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    k: int,
    normalized: bool,
    in_float32: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    logits, weights, experts = _empty_results(x, weight, k, in_float32)
    count, width = weight.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    early = launches_early(x.device)
    parts = triton.cdiv(count, _EXPERTS)
    with torch.cuda.device_of(x):
        if len(x):
            _router_kernel[(len(x), parts)](
                x, weight, weight if bias is None else bias, logits, weights, experts,
                split_locks(x.device, len(x)), count, width, x.stride(0), k, parts,
                EXPERTS=_EXPERTS, COLUMNS=_COLUMNS,
                ALL=triton.next_power_of_2(count), K=triton.next_power_of_2(k),
                BIAS=bias is not None, NORMALIZED=normalized, EARLY=early,
                num_warps=4, **({"launch_pdl": True} if early else {}),
            )  # fmt: skip
    return logits, weights, experts


def _empty_results(
    x: Tensor, weight: Tensor, k: int, in_float32: bool
) -> tuple[Tensor, Tensor, Tensor]:
    logits = x.new_empty(len(x), len(weight))
    weights = x.new_empty(len(x), k, dtype=torch.float32 if in_float32 else x.dtype)
    return logits, weights, x.new_empty(len(x), k, dtype=torch.int64)


@_route.register_fake
def _(x, weight, bias, k, normalized, in_float32):
    return _empty_results(x, weight, k, in_float32)


@triton.jit
def _router_kernel(
    x, weight, bias, logits, weights, experts, locks, count, width, stride, k, parts,
    EXPERTS: tl.constexpr, COLUMNS: tl.constexpr, ALL: tl.constexpr, K: tl.constexpr,
    BIAS: tl.constexpr, NORMALIZED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    e, c = part * EXPERTS + tl.arange(0, EXPERTS), tl.arange(0, COLUMNS)
    there = e < count
    base = weight + e.to(tl.int64)[:, None] * width + c[None, :]
    w = tl.load(base, mask=there[:, None] & (c < width)[None, :], other=0.0)
    wait_for_previous(EARLY)
    acc = tl.full((EXPERTS, COLUMNS), 0.0, tl.float32)
    for start in range(0, width, COLUMNS):
        inside = start + c < width
        more = there[:, None] & (start + COLUMNS + c < width)[None, :]
        next_w = tl.load(base + start + COLUMNS, mask=more, other=0.0)
        values = tl.load(x + row * stride + start + c, mask=inside, other=0.0).to(tl.float32)
        acc += w.to(tl.float32) * values[None, :]
        w = next_w
    sums = tl.reduce(acc, 1, SUM)
    if BIAS:
        sums += tl.load(bias + e, mask=there, other=0.0).to(tl.float32)
    tl.store(logits + row * count + e, sums.to(logits.dtype.element_ty), mask=there)
    tl.debug_barrier()
    done = tl.atomic_add(locks + row, 1, sem="acq_rel")
    if done == parts - 1:
        tl.debug_barrier()
        tl.store(locks + row, 0)
        i = tl.arange(0, ALL)
        scores = tl.load(
            logits + row * count + i, mask=i < count, other=float("-inf"), cache_modifier=".cg"
        ).to(tl.float32)
        _choose(scores, weights + row * k, experts + row * k, k, ALL, K, NORMALIZED)


@triton.jit
def _choose(
    scores, weights, experts, k, ALL: tl.constexpr, K: tl.constexpr, NORMALIZED: tl.constexpr
):
    """Write the k best of scores [ALL], the best first; K is k or more.

    A score and the place of its expert are one number, so that one maximum finds both: the score's
    bits in the order of the numbers above, and below them more for earlier experts.
    """
    i, j = tl.arange(0, ALL), tl.arange(0, K)
    bits = (scores + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (order.to(tl.int64) << 32) | (ALL - 1 - i).to(tl.int64)
    best = tl.full((K,), 0, tl.int64)
    for place in range(k):
        largest = tl.reduce(keys, 0, LARGEST)
        best = tl.where(j == place, largest, best)
        keys = tl.where(keys == largest, -0x7FFFFFFFFFFFFFFF, keys)
    order = (best >> 32).to(tl.int32)
    chosen = (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    highest = tl.reduce(scores, 0, LARGEST)
    powers = tl.where(j < k, tl.exp(chosen - highest), 0.0)
    whole = tl.reduce(powers if NORMALIZED else tl.exp(scores - highest), 0, SUM)
    tl.store(experts + j, ALL - 1 - (best & 0xFFFFFFFF), mask=j < k)
    tl.store(weights + j, (powers / whole).to(weights.dtype.element_ty), mask=j < k)
