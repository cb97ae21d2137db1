"""Tens to hundreds of tokens times a weight of nibbles, with tiles brought by the copy engine.

The same product as `nibble_decode` with TMA descriptors for words and inputs (sm_90). The weight is
the register operand of the tensor core; after each product Triton waits for it, so two programs of
four warps to a multiprocessor overlap better than one of eight. A step is half a slice or a whole
one, whatever the layout's C.

Grid: at most as many programs as there are tiles of BN output features x BM tokens, each for every
so many tiles; then parts of K. Limit: tensor cores.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantload.runtime.kernels.dependent_launch import let_next_start, wait_for_previous
from quantload.runtime.kernels.nibble_decode import finished, tile_of
from quantload.runtime.kernels.nibble_folded import values4
from quantload.runtime.kernels.nibble_groups import (
    four_scales,
    four_zeros,
    group_row,
    plus_block,
    raw_groups,
)
from quantload.runtime.kernels.nibble_layout import table_registers

__all__ = ["mid_kernel"]


@triton.jit(do_not_specialize=["M", "blocks", "splits"])
def mid_kernel(
    x, words, scale, zero, outer, table, bias, out, partial, locks,
    M, N, blocks, splits, blocks_per_group,
    BN: tl.constexpr, BM: tl.constexpr, C: tl.constexpr, STEP: tl.constexpr,
    FORM: tl.constexpr, KIND: tl.constexpr, GROUP_SLICES: tl.constexpr, AFTER: tl.constexpr,
    SPLIT: tl.constexpr, TILES: tl.constexpr, EARLY: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write out [M, N].

    x is a descriptor of [M, K] in tiles [BM, STEP], words of [B * N, C] in tiles [BN, STEP].
    """
    dtype: tl.constexpr = x.dtype
    parts: tl.constexpr = C // STEP
    tiles_n, tiles_m = (N + BN - 1) // BN, (M + BM - 1) // BM
    part = tl.program_id(1)
    first = part * blocks // splits * parts
    last = (part + 1) * blocks // splits * parts
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    registers = table_registers(table, FORM, False)
    # NOTE: without a loop around it, sums begin as constants, and ptxas makes every instruction of
    # a product wait for the one before (its message C7515)
    for tile in tl.range(tl.program_id(0), tiles_n * tiles_m, tl.num_programs(0)):
        pn, pm = tile_of(tile, tiles_n, tiles_m, TILES)
        n = pn * BN + tl.arange(0, BN)
        m = pm * BM + tl.arange(0, BM)
        rows = tl.minimum(n, N - 1)
        acc = tl.full((BN, BM), 0.0, tl.float32)
        for step in tl.range(first, last, num_stages=STAGES):
            block = step // parts
            column = step % parts * STEP
            k = block * 4 * C + column
            w = words.load([block * N + pn * BN, column])
            inputs = (
                x.load([pm * BM, k]).T,
                x.load([pm * BM, k + C]).T,
                x.load([pm * BM, k + 2 * C]).T,
                x.load([pm * BM, k + 3 * C]).T,
            )
            row = group_row(block, blocks_per_group, GROUP_SLICES)
            zeros = four_zeros(raw_groups(zero, row, rows, N, FORM == "zero"), FORM, GROUP_SLICES)
            values = values4(w, zeros, registers, scale, block, rows, column, N, FORM, dtype, False)
            scales = raw_groups(scale, row, rows, N, KIND != "none")
            scales = four_scales(scales, KIND, GROUP_SLICES)
            acc = plus_block(acc, values, inputs, scales, KIND, GROUP_SLICES, AFTER)
        if not SPLIT:
            finished(acc, n, m, N, M, outer, bias, out, N)
        else:
            place = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
            sums = partial + tile.to(tl.int64) * splits * (BN * BM) + place
            tl.store(sums + part * (BN * BM), acc)
            tl.debug_barrier()
            done = tl.atomic_add(locks + tile, 1, sem="acq_rel")
            if done == splits - 1:
                total = tl.full((BN, BM), 0.0, tl.float32)
                for other in range(splits):
                    total += tl.load(sums + other * (BN * BM), cache_modifier=".cg")
                finished(total, n, m, N, M, outer, bias, out, N)
                tl.atomic_xchg(locks + tile, 0)
