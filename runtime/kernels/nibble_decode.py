"""Few tokens times a weight of nibbles: y^T = W x^T, bound by the bytes of W.

    y[m, n] = outer[n] * sum over groups g of scale[g, n] * sum over k in g of value[n, k] * x[m, k]

Values are exact in x's dtype, as are their products; sums are float32, and scales meet finished
sums of a group (AFTER) or, rounded to x's dtype, the values (not AFTER). K may be cut into parts:
each program writes its sums, and the last one of a tile adds them up in order and ends the tile.
Equal inputs give equal bits.

Grid: (tiles of BN output features x tiles of BM tokens, parts of K). Masked: tokens past M, columns
past K; output features past N repeat the last and are not stored. Limit: memory up to about 32
tokens, unpacking above.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantload.runtime.kernels.dependent_launch import let_next_start, wait_for_previous
from quantload.runtime.kernels.nibble_folded import values4
from quantload.runtime.kernels.nibble_groups import (
    ask_for,
    four_scales,
    four_zeros,
    group_row,
    plus_block,
    raw_groups,
)
from quantload.runtime.kernels.nibble_layout import table_registers

__all__ = ["decode_kernel", "finished", "four_inputs", "prefetch", "tile_of"]


@triton.jit
def tile_of(index, tiles_n, tiles_m, TILES: tl.constexpr):
    """Number the tiles so that TILES tiles of W stay in the L2 cache for all tiles of x."""
    if TILES == 1:
        return index // tiles_m, index % tiles_m
    else:
        first = index // (TILES * tiles_m) * TILES
        size = tl.minimum(tiles_n - first, TILES)
        inside = index % (TILES * tiles_m)
        return first + inside % size, inside // size


@triton.jit
def prefetch(address, BYTES: tl.constexpr, blocks, stride, BLOCKS: tl.constexpr):
    """Ask for BYTES, a power of two, at `address`, `address + stride`, ... of BLOCKS blocks."""
    SIZE: tl.constexpr = 1024 if BYTES >= 1024 else BYTES
    EACH: tl.constexpr = BYTES // SIZE
    piece = tl.arange(0, BLOCKS * EACH)
    block = tl.minimum(piece // EACH, blocks - 1)
    place = address.to(tl.int64) + block.to(tl.int64) * stride + piece % EACH * SIZE
    size = tl.full((BLOCKS * EACH,), SIZE, tl.int32)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r", args=[place, size], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def four_inputs(place, inside, k, K, C: tl.constexpr, EVEN_K: tl.constexpr):
    """Load the inputs [C, BM] of four slices of C columns, of which those from K on are zero."""
    if EVEN_K:
        return (
            tl.load(place, mask=inside, other=0.0),
            tl.load(place + C, mask=inside, other=0.0),
            tl.load(place + 2 * C, mask=inside, other=0.0),
            tl.load(place + 3 * C, mask=inside, other=0.0),
        )
    else:
        return (
            tl.load(place, mask=inside & (k < K), other=0.0),
            tl.load(place + C, mask=inside & (k < K - C), other=0.0),
            tl.load(place + 2 * C, mask=inside & (k < K - 2 * C), other=0.0),
            tl.load(place + 3 * C, mask=inside & (k < K - 3 * C), other=0.0),
        )


@triton.jit
def finished(acc, n, m, N, M, outer, bias, out, stride_out):
    """End a tile of sums [BN, BM]: multiply by `outer`, add `bias`, store to out [M, N]."""
    rows = tl.minimum(n, N - 1)
    if outer is not None:
        acc *= tl.load(outer + rows)[:, None]
    if bias is not None:
        acc += tl.load(bias + rows).to(tl.float32)[:, None]
    place = out + m[None, :].to(tl.int64) * stride_out + n[:, None]
    tl.store(place, acc.to(out.dtype.element_ty), mask=(n[:, None] < N) & (m[None, :] < M))


@triton.jit(do_not_specialize=["M", "blocks", "splits"])
def decode_kernel(
    x, words, scale, zero, offset, outer, table, bias, out, partial, locks,
    M, N, K, blocks, stride_x, splits, blocks_per_group,
    BN: tl.constexpr, BM: tl.constexpr, C: tl.constexpr,
    FORM: tl.constexpr, KIND: tl.constexpr, GROUP_SLICES: tl.constexpr, AFTER: tl.constexpr,
    SPLIT: tl.constexpr, TMA: tl.constexpr, EVEN_K: tl.constexpr, TILES: tl.constexpr,
    EARLY: tl.constexpr, PREFETCH: tl.constexpr, STAGES: tl.constexpr,
    UNROLL: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Write out [M, N].

    UNROLL divides the number of blocks. Sums [tiles, splits, BN, BM] float32 and counters [tiles]
    serve SPLIT.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    LATE: tl.constexpr = AFTER and KIND != "none"
    ASKS: tl.constexpr = not INTERPRETED and KIND != "none" and (not LATE or C < 64)
    tile, part = tl.program_id(0), tl.program_id(1)
    pn, pm = tile_of(tile, (N + BN - 1) // BN, (M + BM - 1) // BM, TILES)
    n = pn * BN + tl.arange(0, BN)
    m = pm * BM + tl.arange(0, BM)
    i = tl.arange(0, C)
    rows = tl.minimum(n, N - 1)
    first = part * (blocks // UNROLL) // splits * UNROLL
    last = (part + 1) * (blocks // UNROLL) // splits * UNROLL
    let_next_start(EARLY)
    if PREFETCH > 0 and not TMA:
        start = words + (first.to(tl.int64) * N + pn * BN) * C
        prefetch(start, BN * C * 2, last - first, tl.cast(N, tl.int64) * C * 2, PREFETCH)
    wait_for_previous(EARLY)
    if not TMA:
        wp = words + first.to(tl.int64) * N * C + rows[:, None] * C + i[None, :]
    xp = x + m[None, :].to(tl.int64) * stride_x + (first * 4 * C + i[:, None])
    inside = (m < M)[None, :]
    registers = table_registers(table, FORM, INTERPRETED)
    one = tl.full((BN, C), 1.0, dtype)
    ones = (one, one, one, one)
    acc = tl.full((BN, BM), 0.0, tl.float32)
    row = group_row(first, blocks_per_group, GROUP_SLICES)
    raw_scale = raw_groups(scale, row, rows, N, LATE)
    for step in tl.range(first, last, UNROLL, num_stages=STAGES):
        for u in tl.static_range(UNROLL):
            block = step + u
            if TMA:
                w = words.load([block * N + pn * BN, 0])
            else:
                w = tl.load(wp, eviction_policy="evict_first")
                wp += N * C
            inputs = four_inputs(xp, inside, block * 4 * C + i[:, None], K, C, EVEN_K)
            xp += 4 * C
            # NOTE: what meets values must be loaded in the same round, or their layout is lost:
            # its line is asked for before. What meets sums is loaded a round ahead.
            row = group_row(block, blocks_per_group, GROUP_SLICES)
            ahead = group_row(tl.minimum(block + 1, last - 1), blocks_per_group, GROUP_SLICES)
            next_scale = raw_groups(scale, ahead, rows, N, LATE)
            zeros = four_zeros(raw_groups(zero, row, rows, N, FORM == "zero"), FORM, GROUP_SLICES)
            values = values4(
                w, zeros, registers, scale, block, rows, 0, N, FORM, dtype, INTERPRETED
            )
            here = raw_scale if LATE else raw_groups(scale, row, rows, N, KIND != "none")
            scales = four_scales(here, KIND, GROUP_SLICES)
            far = tl.minimum(block + 2 * UNROLL, last - 1)
            far = group_row(far, blocks_per_group, GROUP_SLICES)
            ask_for(zero, far, pn * BN, N, FORM == "zero" and not INTERPRETED)
            ask_for(scale, far, pn * BN, N, ASKS)
            acc = plus_block(acc, values, inputs, scales, KIND, GROUP_SLICES, AFTER)
            if offset is not None:
                offsets = four_scales(raw_groups(offset, row, rows, N, True), "fp32", GROUP_SLICES)
                acc = plus_block(acc, ones, inputs, offsets, "fp32", GROUP_SLICES, True)
            raw_scale = next_scale
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
