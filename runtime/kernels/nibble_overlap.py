"""Tens to thousands of tokens times a weight of nibbles: tensor cores and unpacking overlap.

The same product as `nibble_mid`, in Gluon: there Triton waits for each product of a register
operand, here the next slice is unpacked while the tensor core works on the last one. Words and
inputs come by the copy engine, STAGES steps ahead. Values meet their scales before the product,
rounded to x's dtype.

Weights are int4 with a bfloat16 scale for each pair of slices (groups of 128 columns), inputs
bfloat16. On an H200 a layer of 28672x4096 takes 59 us with 128 tokens and 112 us with 256, where
`nibble_mid` takes 66 and 123.

Grid: a program for each tile of BN output features x BM tokens; or (SHARED) as many as the card
holds, which share out the steps of all tiles evenly, in their order: then no processor waits for a
last round of tiles. Of a tile with several programs each writes its sums, and the last one to come
adds them up in order. Equal inputs give equal bits. sm_90 only. Limit: tensor cores.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = ["described", "overlap_kernel"]


def described(tensor: Tensor, tile: list[int]) -> TensorDescriptor:
    """Return how the copy engine reads tiles of a matrix of 16-bit elements."""
    layout = gl.NVMMASharedLayout(
        swizzle_byte_width=min(2 * tile[1], 128), element_bitwidth=16, rank=2
    )
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), tile, layout)


@gluon.jit
def _values0(words):
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t, one, c; mov.b32 one, 0x3f803f80; mov.b32 c, 0xc308c308;"
        " lop3.b32 t, $1, 0x000f000f, 0x43004300, 0xea;"
        " fma.rn.bf16x2 $0, t, one, c; }",
        "=r,r", args=[words], dtype=gl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _values1(words):
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t, one, c; mov.b32 one, 0x3f803f80; mov.b32 c, 0xc308c308;"
        " shr.u32 t, $1, 4; lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea;"
        " fma.rn.bf16x2 $0, t, one, c; }",
        "=r,r", args=[words], dtype=gl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _values2(words):
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t, one, c; mov.b32 one, 0x3f803f80; mov.b32 c, 0xc308c308;"
        " shr.u32 t, $1, 8; lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea;"
        " fma.rn.bf16x2 $0, t, one, c; }",
        "=r,r", args=[words], dtype=gl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _values3(words):
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t, one, c; mov.b32 one, 0x3f803f80; mov.b32 c, 0xc308c308;"
        " shr.u32 t, $1, 12; lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea;"
        " fma.rn.bf16x2 $0, t, one, c; }",
        "=r,r", args=[words], dtype=gl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _fetch(
    xd, wd, x_tiles, w_tiles, bars, base, step, last, pn, pm, N,
    BN: gl.constexpr, BM: gl.constexpr, C: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Ask for the words and inputs of a step, if there is one."""
    stage = (base + step) % STAGES
    parts: gl.constexpr = C // STEP
    block = step // parts
    column = step % parts * STEP
    k = block * 4 * C + column
    there = step < last
    bar = bars.index(stage)
    mbarrier.expect(bar, 2 * STEP * (BN + 4 * BM), pred=there)
    tma.async_copy_global_to_shared(
        wd, [block * N + pn * BN, column], bar, w_tiles.index(stage), pred=there
    )
    for slot in gl.static_range(4):
        tma.async_copy_global_to_shared(
            xd, [pm * BM, k + slot * C], bar, x_tiles.index(stage * 4 + slot), pred=there
        )


@gluon.jit
def _range_of(program, last, tile_steps, SHARED: gl.constexpr):
    """Return the first step of a program, and the one behind its last, over all tiles."""
    if SHARED:
        programs = gl.num_programs(0)
        return program * tile_steps // programs, (program + 1) * tile_steps // programs
    else:
        return program * last, (program + 1) * last


@gluon.jit
def _summed(acc, partial, locks, index, begin, last, tile_steps, sums: gl.constexpr):
    """Add the sums of a tile's programs up; return them, and if this program is to end the tile.

    A program has one tile that it begins in, and at most one more that it does not end: two places
    in `partial`.
    """
    size: gl.constexpr = acc.shape[0] * acc.shape[1]
    programs = gl.num_programs(0)
    opening = index * last
    first = ((opening + 1) * programs - 1) // tile_steps
    final = ((opening + last) * programs - 1) // tile_steps
    is_last = first == final
    if first != final:
        n = gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, sums))
        m = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, sums))
        place = partial + gl.expand_dims(n, 1) * acc.shape[1] + gl.expand_dims(m, 0)
        own = 2 * gl.program_id(0) + (begin < opening).to(gl.int32)
        gl.store(place + own.to(gl.int64) * size, acc)
        gl.thread_barrier()
        done = gl.atomic_add(locks + index, 1, sem="acq_rel")
        is_last = done == final - first
        if is_last:
            acc = gl.full(acc.shape, 0.0, gl.float32, layout=sums)
            for program in range(first, final + 1):
                begun = program * tile_steps // programs
                of_it = 2 * program + (begun < opening).to(gl.int32)
                acc += gl.load(place + of_it.to(gl.int64) * size, cache_modifier=".cg")
            gl.atomic_xchg(locks + index, 0)
    return acc, is_last


@gluon.jit
def _finish(
    acc, outer, bias, out, pn, pm, M, N, sums: gl.constexpr, stored: gl.constexpr
):  # fmt: skip
    """End a tile: multiply by `outer`, add `bias`, store."""
    BN: gl.constexpr = acc.shape[0]
    BM: gl.constexpr = acc.shape[1]
    n = pn * BN + gl.arange(0, BN, layout=gl.SliceLayout(1, stored))
    m = pm * BM + gl.arange(0, BM, layout=gl.SliceLayout(0, stored))
    of_sum = gl.minimum(pn * BN + gl.arange(0, BN, layout=gl.SliceLayout(1, sums)), N - 1)
    if outer is not None:
        acc = acc * gl.expand_dims(gl.load(outer + of_sum), 1)
    if bias is not None:
        acc = acc + gl.expand_dims(gl.load(bias + of_sum).to(gl.float32), 1)
    y = gl.convert_layout(acc.to(gl.bfloat16), stored)
    place = out + gl.expand_dims(m, 0).to(gl.int64) * N + gl.expand_dims(n, 1)
    gl.store(place, y, mask=(gl.expand_dims(n, 1) < N) & (gl.expand_dims(m, 0) < M))


@gluon.jit(do_not_specialize=["M", "blocks"])
def overlap_kernel(
    xd, wd, scale, outer, bias, out, partial, locks,
    M, N, blocks,
    BN: gl.constexpr, BM: gl.constexpr, C: gl.constexpr, STEP: gl.constexpr,
    STAGES: gl.constexpr, TILES: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """Write out [M, N].

    Sums [2 * programs, BN, BM] float32 and counters of tiles serve SHARED.
    """
    warps: gl.constexpr = gl.num_warps()
    sums: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, BM, 16]
    )
    values: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums, k_width=2)
    of_row: gl.constexpr = gl.SliceLayout(1, values)
    parts: gl.constexpr = C // STEP
    stored: gl.constexpr = gl.BlockedLayout([8, 1], [16, 2], [1, warps], [0, 1])
    tiles_n = (N + BN - 1) // BN
    tiles_m = (M + BM - 1) // BM
    last = blocks * parts
    w_tiles = gl.allocate_shared_memory(gl.int16, [STAGES, BN, STEP], wd.layout)
    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 4, BM, STEP], xd.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(bars.index(s), count=1)
    tile_steps = tiles_n * tiles_m * last
    begin, end = _range_of(gl.program_id(0), last, tile_steps, SHARED)
    base = 2 * STAGES * last  # steps done before, in the phase of none
    # NOTE: without a loop around it, sums begin as constants, and ptxas makes every instruction of
    # a product wait for the one before (its message C7515)
    for index in range(begin // last, (end + last - 1) // last):
        first = gl.maximum(begin - index * last, 0)
        stop = gl.minimum(end - index * last, last)
        start = index // (TILES * tiles_m) * TILES
        size = gl.minimum(tiles_n - start, TILES)
        inside = index % (TILES * tiles_m)
        pn = start + inside % size
        pm = inside // size
        turn = base - first
        for s in gl.static_range(STAGES - 1):
            _fetch(
                xd, wd, x_tiles, w_tiles, bars, turn, first + s, stop, pn, pm, N,
                BN, BM, C, STEP, STAGES,
            )  # fmt: skip
        rows = gl.minimum(pn * BN + gl.arange(0, BN, layout=of_row), N - 1)
        acc = gl.full([BN, BM], 0.0, gl.float32, layout=sums)
        raw = gl.load(scale + (first // parts).to(gl.int64) * N + rows)
        w3 = gl.full([BN, STEP], 0.0, gl.bfloat16, layout=values)
        for step in range(first, stop):
            stage = (turn + step) % STAGES
            ahead = gl.minimum(step + 1, stop - 1) // parts
            next_raw = gl.load(scale + ahead.to(gl.int64) * N + rows)
            s0 = (raw << 16).to(gl.float32, bitcast=True).to(gl.bfloat16)
            s1 = (raw & -65536).to(gl.float32, bitcast=True).to(gl.bfloat16)
            mbarrier.wait(bars.index(stage), (turn + step) // STAGES & 1)
            words = w_tiles.index(stage).load(values)
            w0 = _values0(words) * gl.expand_dims(s0, 1)
            acc, w3 = warpgroup_mma_wait(0, deps=[acc, w3])
            acc = warpgroup_mma(w0, x_tiles.index(stage * 4).permute([1, 0]), acc, is_async=True)
            _fetch(
                xd, wd, x_tiles, w_tiles, bars, turn, step + STAGES - 1, stop, pn, pm, N,
                BN, BM, C, STEP, STAGES,
            )  # fmt: skip
            w1 = _values1(words) * gl.expand_dims(s0, 1)
            acc = warpgroup_mma(
                w1, x_tiles.index(stage * 4 + 1).permute([1, 0]), acc, is_async=True
            )
            w2 = _values2(words) * gl.expand_dims(s1, 1)
            acc, w0 = warpgroup_mma_wait(1, deps=[acc, w0])
            acc = warpgroup_mma(
                w2, x_tiles.index(stage * 4 + 2).permute([1, 0]), acc, is_async=True
            )
            w3 = _values3(words) * gl.expand_dims(s1, 1)
            acc, w1 = warpgroup_mma_wait(1, deps=[acc, w1])
            acc = warpgroup_mma(
                w3, x_tiles.index(stage * 4 + 3).permute([1, 0]), acc, is_async=True
            )
            acc, w2 = warpgroup_mma_wait(1, deps=[acc, w2])
            raw = next_raw
        acc, w3 = warpgroup_mma_wait(0, deps=[acc, w3])
        base += stop - first
        if SHARED:
            acc, is_last = _summed(acc, partial, locks, index, begin, last, tile_steps, sums)
            if is_last:
                _finish(acc, outer, bias, out, pn, pm, M, N, sums, stored)
        else:
            _finish(acc, outer, bias, out, pn, pm, M, N, sums, stored)
