"""The last product of few tokens: a token's experts are multiplied and summed by one program.

    y[t, n] = sum over j of weight[t, j] * (x[t k + j] @ W[expert of t, j]^T + bias)[n]

Each warp of a program takes another expert of the token, as the first axis of a product of three
axes; their sums meet in shared memory, in one fixed order. No result of a pair is ever stored, and
no other kernel sums them up. Experts that tokens share are read once for each of them, from the L2
cache if they are many.

Grid: (tiles of N, T). Masked: choices past k and of experts that are not here, columns past K; rows
past N repeat the last row and are not stored. Limit: memory.

Letters: T tokens, k choices of a token, E experts here, N rows and K columns of an expert's weight,
C columns of a slice, B blocks of slices, G rows of scales.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantload.runtime.kernels.byte_unpack import unpack2
from quantload.runtime.kernels.dependent_launch import let_next_start, wait_for_previous
from quantload.runtime.kernels.grouped import input_slices, prefetch
from quantload.runtime.kernels.grouped_scales import (
    four_scales,
    four_zeros,
    group_row,
    plus_four,
    plus_two,
    raw_groups,
)
from quantload.runtime.kernels.nibble_folded import values4
from quantload.runtime.kernels.nibble_layout import table_registers

__all__ = ["grouped_token_kernel"]


@triton.jit
def _add(a, b):
    return a + b


# counts that change from call to call, or from layer to layer, share a compiled kernel
@triton.jit(do_not_specialize=("choices", "first", "E", "B", "G", "blocks_per_group"))
def grouped_token_kernel(
    x, words, scale, zero, outer, bias, table, index, weights, out,
    choices, first, E, N, K, B, G, stride_x, blocks_per_group,
    BN: tl.constexpr, C: tl.constexpr, FORM: tl.constexpr, SLOTS: tl.constexpr, KIND: tl.constexpr,
    GROUPS: tl.constexpr, EVEN: tl.constexpr, EARLY: tl.constexpr, PARTS: tl.constexpr,
    UNITS: tl.constexpr,
    STAGES: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Write out [T, N]; `grouped_kernel` says what the names are.

    PARTS are UNITS blocks of slices in a step, of each of PARTS / UNITS >= choices experts.
    """
    BM: tl.constexpr = 8  # of which one column is the token's
    dtype: tl.constexpr = x.dtype.element_ty
    let_next_start(EARLY)
    t = tl.program_id(1).to(tl.int64)
    part = tl.arange(0, PARTS)
    j = part // UNITS
    pair = t * choices + j
    # the routing is older than the kernel before
    e = tl.load(index + pair, mask=j < choices, other=first - 1).to(tl.int32) - first
    is_here = (e >= 0) & (e < E)
    held = tl.where(is_here, e, 0).to(tl.int64)
    tile = tl.program_id(0) * BN
    n = tile + tl.arange(0, BN)
    c = tl.arange(0, C)
    m = tl.arange(0, BM)
    rows = tl.minimum(n, N - 1)
    expert = held * B * N * C
    if EARLY and tile + BN <= N:
        soon = tl.minimum(part % UNITS, B - 1).to(tl.int64)
        prefetch(words + expert + tile * C + soon * (N * C), BN * C * 2)
    wait_for_previous(EARLY)
    token_weight = tl.load(weights + pair, mask=is_here, other=0.0).to(tl.float32)
    words_at = words + expert[:, None, None] + rows[None, :, None] * C + c[None, None, :]
    x_at = x + (pair * stride_x)[:, None, None] + c[None, :, None] + 0 * m[None, None, :]
    used = is_here[:, None, None]
    mask = used & (m == 0)[None, None, :]
    groups = (held * G * N)[:, None] + rows[None, :]
    registers = table_registers(table, FORM, INTERPRETED)
    acc = tl.full((PARTS, BN, BM), 0.0, tl.float32)
    for step in tl.range(0, (B + UNITS - 1) // UNITS, num_stages=STAGES):
        b = step * UNITS + part % UNITS
        block_at = words_at + (b * N)[:, None, None] * C
        there = used & (b < B)[:, None, None]
        packed = tl.load(block_at, mask=there, other=0, eviction_policy="evict_first")
        k = (b * (SLOTS * C))[:, None, None] + c[None, :, None]
        inputs = input_slices(x_at + (b * (SLOTS * C))[:, None, None], mask, k, K, C, SLOTS, EVEN)
        row = group_row(tl.minimum(b, B - 1), blocks_per_group, GROUPS)
        place = groups + (row * N)[:, None]
        scales = four_scales(raw_groups(scale, place, KIND != "none"), KIND, GROUPS, PARTS)
        if SLOTS == 4:
            zeros = four_zeros(raw_groups(zero, place, FORM == "zero"), FORM, GROUPS, PARTS)
            block = held * B + tl.minimum(b, B - 1)
            values = values4(
                packed, zeros, registers, scale, block, rows, 0, N, FORM, dtype, INTERPRETED
            )
            acc = plus_four(acc, values, inputs, scales, KIND, GROUPS, True)
        else:
            values = unpack2(packed, None, FORM, dtype, INTERPRETED)
            acc = plus_two(acc, values, inputs, scales, KIND, GROUPS, True)
    if outer is not None:
        acc *= tl.load(outer + (held * N)[:, None] + rows[None, :])[:, :, None]
    if bias is not None:
        once = (part % UNITS == 0)[:, None]
        added = tl.load(bias + (held * N)[:, None] + rows[None, :], mask=once, other=0.0)
        acc += added[:, :, None]
    acc = tl.where(used, acc * token_weight[:, None, None], 0.0)
    y = tl.reduce(acc, 0, _add)
    target = out + t * N + n[:, None] + 0 * m[None, :]
    is_there = (n < N)[:, None] & (m == 0)[None, :]
    tl.store(target, y.to(out.dtype.element_ty), mask=is_there)
