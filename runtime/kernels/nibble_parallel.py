"""Few tokens times a weight of nibbles, K shared out among the warps of a program.

A tile of 16 output features has too little work for several warps, and parts of K in several
programs must meet through memory. Here each warp has blocks of K of its own: the product is one of
S pairs of matrices, S blocks side by side, whose sums meet in shared memory at the end. So there
are many warps, all of them loading, and no counters.

    y[m, n] = outer[n] * sum over b of sum over groups of scale * sum over k of value * x

Grid: tiles of BN output features x tiles of BM tokens. Masked: tokens past M, columns past K;
output features past N repeat the last and are not stored. Limit: memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantload.runtime.kernels.dependent_launch import let_next_start, wait_for_previous
from quantload.runtime.kernels.nibble_decode import finished, four_inputs, prefetch
from quantload.runtime.kernels.nibble_folded import values4
from quantload.runtime.kernels.nibble_groups import (
    four_scales,
    four_zeros,
    group_row,
    plus_block,
    raw_groups,
)
from quantload.runtime.kernels.nibble_layout import table_registers

__all__ = ["parallel_kernel"]


@triton.jit
def _add(a, b):
    return a + b


@triton.jit(do_not_specialize=["M", "blocks"])
def parallel_kernel(
    x, words, scale, zero, outer, table, bias, out,
    M, N, K, blocks, stride_x, blocks_per_group,
    S: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, C: tl.constexpr,
    FORM: tl.constexpr, KIND: tl.constexpr, GROUP_SLICES: tl.constexpr, AFTER: tl.constexpr,
    EVEN_K: tl.constexpr, EARLY: tl.constexpr, PREFETCH: tl.constexpr, STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Write out [M, N]; EVEN_K says that S blocks at a time make K."""
    dtype: tl.constexpr = x.dtype.element_ty
    LATE: tl.constexpr = AFTER and KIND != "none"
    tiles_m = (M + BM - 1) // BM
    pn, pm = tl.program_id(0) // tiles_m, tl.program_id(0) % tiles_m
    n = pn * BN + tl.arange(0, BN)
    m = pm * BM + tl.arange(0, BM)
    b = tl.arange(0, S)
    i = tl.arange(0, C)
    rows = tl.minimum(n, N - 1)
    let_next_start(EARLY)
    if PREFETCH > 0:
        start = words + pn.to(tl.int64) * BN * C
        prefetch(start, BN * C * 2, blocks, tl.cast(N, tl.int64) * C * 2, PREFETCH)
    row = group_row(tl.minimum(b, blocks - 1), blocks_per_group, GROUP_SLICES)
    raw_scale = raw_groups(scale, row[:, None], rows[None, :], N, LATE)
    wait_for_previous(EARLY)
    inside = (m < M)[None, None, :]
    xp = x + m[None, None, :].to(tl.int64) * stride_x
    wp = words + rows[None, :, None] * C + i[None, None, :]
    registers = table_registers(table, FORM, INTERPRETED)
    acc = tl.full((S, BN, BM), 0.0, tl.float32)
    for first in tl.range(0, blocks, S, num_stages=STAGES):
        block = first + b
        there = tl.minimum(block, blocks - 1)
        w = tl.load(wp + there.to(tl.int64)[:, None, None] * N * C, eviction_policy="evict_first")
        k = block[:, None, None] * 4 * C + i[None, :, None]
        inputs = four_inputs(xp + k, inside, k, K, C, EVEN_K)
        row = group_row(there, blocks_per_group, GROUP_SLICES)
        ahead = group_row(tl.minimum(block + S, blocks - 1), blocks_per_group, GROUP_SLICES)
        next_scale = raw_groups(scale, ahead[:, None], rows[None, :], N, LATE)
        zeros = raw_groups(zero, row[:, None], rows[None, :], N, FORM == "zero")
        zeros = four_zeros(zeros, FORM, GROUP_SLICES)
        values = values4(w, zeros, registers, scale, there, rows, 0, N, FORM, dtype, INTERPRETED)
        here = raw_scale
        if not LATE:
            here = raw_groups(scale, row[:, None], rows[None, :], N, KIND != "none")
        scales = four_scales(here, KIND, GROUP_SLICES)
        acc = plus_block(acc, values, inputs, scales, KIND, GROUP_SLICES, AFTER)
        raw_scale = next_scale
    finished(tl.reduce(acc, 0, _add), n, m, N, M, outer, bias, out, N)
