"""Tens to thousands of tokens times a weight of nibbles: tensor cores and unpacking overlap.

The same product as `nibble_mid`, in Gluon: there Triton waits for each product of a register
operand, here the next slice is unpacked while the tensor core works on the last one. Words and
inputs come by the copy engine, STAGES steps ahead. Values meet their scales before the product,
rounded to x's dtype; those of FP4 are exact, see `nibble_folded`.

Weights are int4 with or without zero points and a bfloat16 scale for each pair of slices (groups of
128 columns), or FP4 of `nibble_folded`; inputs are bfloat16. On an H200 an int4 layer of 28672x4096
takes 59 us with 128 tokens and 112 us with 256, where `nibble_mid` takes 66 and 123.

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

__all__ = ["asked_for", "described", "layout_of_loads", "overlap_kernel", "unpacked_values"]


def described(tensor: Tensor, tile: list[int]) -> TensorDescriptor:
    """Return how the copy engine reads tiles of a matrix of 16-bit elements."""
    layout = gl.NVMMASharedLayout(
        swizzle_byte_width=min(2 * tile[1], 128), element_bitwidth=16, rank=2
    )
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), tile, layout)


# -- values --------------------------------------------------------------------------------------


@gluon.constexpr_function
def _text(form, slot):
    """Return PTX that makes two values of a register of two words: SLOT of each word's codes."""
    if form == "fp4_16":  # as `nibble_folded` says, 2^-126 times the value
        moved = ("", "shl.b32 t, t, 3;", "shl.b32 t, t, 6;")
        if slot < 3:
            return "{ .reg .b32 t; mov.b32 t, $1; " + moved[slot] + " and.b32 $0, t, 0x81c081c0; }"
        return (
            "{ .reg .b32 a, b; shl.b32 a, $1, 1; and.b32 a, a, 0x80008000;"
            " shr.u32 b, $1, 5; lop3.b32 a, b, 0x01000100, a, 0xea;"
            " shr.u32 b, $1, 4; lop3.b32 $0, b, 0x00c000c0, a, 0xea; }"
        )
    magic = f"shr.u32 t, $1, {4 * slot}; lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea;"
    if form == "zero":  # 128 + code
        return "{ .reg .b32 t; " + magic + " mov.b32 $0, t; }"
    return (
        "{ .reg .b32 t, one, c; mov.b32 one, 0x3f803f80; mov.b32 c, 0xc308c308; "
        + magic
        + " fma.rn.bf16x2 $0, t, one, c; }"
    )


@gluon.constexpr_function
def _far_rows(rows, warps):
    """Return the steps between rows of a thread, and between those of warps: 16 rows a warp."""
    far = [16 * warps << bit for bit in range((rows // (16 * warps)).bit_length() - 1)]
    return far, [16 << bit for bit in range(warps.bit_length() - 1)]


@gluon.constexpr_function
def _layout_of_values(rows, groups, warps):
    """Layout of [rows, groups, 16] that, flattened, is that of a left operand in registers."""
    far, of_warps = _far_rows(rows, warps)
    held = [[0, 0, 1], [8, 0, 0], [0, 0, 8]]
    held += [[0, 1 << bit, 0] for bit in range(groups.bit_length() - 1)]
    held += [[row, 0, 0] for row in far]
    lanes = [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    shape = [rows, groups, 16]
    return gl.DistributedLinearLayout(held, lanes, [[row, 0, 0] for row in of_warps], [], shape)


@gluon.constexpr_function
def layout_of_loads(rows, groups, warps):
    """Layout of [rows, groups] in which each thread has what it needs, groups side by side."""
    far, of_warps = _far_rows(rows, warps)
    held = [[0, 1 << bit] for bit in range(groups.bit_length() - 1)] + [[8, 0]]
    held += [[row, 0] for row in far]
    lanes = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
    of_rows = [[row, 0] for row in of_warps]
    return gl.DistributedLinearLayout(held, lanes, of_rows, [], [rows, groups])


@gluon.jit
def asked_for(
    scale, zero, step, rows, groups, N, parts: gl.constexpr, STEP: gl.constexpr,
    FORM: gl.constexpr,
):  # fmt: skip
    """Load what the values of a step meet: bits of scales and zero points, or scales of slots."""
    block = step // parts
    if FORM == "fp4_16":
        place = scale + block.to(gl.int64) * (16 * N) + (step % parts * (STEP // 16) + groups)
        return (
            gl.load(place), gl.load(place + 4 * N), gl.load(place + 8 * N),
            gl.load(place + 12 * N),
        )  # fmt: skip
    else:
        place = block.to(gl.int64) * N + rows
        raw = gl.load(scale + place)
        zeros = raw
        if FORM == "zero":
            zeros = gl.load(zero + place)
        return raw, zeros, raw, raw


@gluon.jit
def unpacked_values(
    words, meets, SLOT: gl.constexpr, FORM: gl.constexpr, STEP: gl.constexpr, values: gl.constexpr
):  # fmt: skip
    """Unpack a slot of a tile of words into values times scales."""
    found = gl.inline_asm_elementwise(
        _text(FORM, SLOT), "=r,r", args=[words], dtype=gl.bfloat16, is_pure=True, pack=2
    )
    if FORM == "fp4_16":
        BN: gl.constexpr = words.shape[0]
        warps: gl.constexpr = gl.num_warps()
        of_group: gl.constexpr = gl.SliceLayout(2, _layout_of_values(BN, STEP // 16, warps))
        groups = gl.convert_layout(meets[SLOT], of_group)
        wide = gl.expand_dims(groups, 2).broadcast_to([BN, STEP // 16, 16])
        by_column = gl.convert_layout(gl.reshape(wide, [BN, STEP]), values)
        return found * by_column.to(gl.bfloat16, bitcast=True)
    else:
        raw = meets[0]
        bits = raw << 16 if SLOT < 2 else raw & -65536
        if FORM == "zero":
            zero = meets[1] >> (0 if SLOT < 2 else 8) & 63
            less = (zero.to(gl.int16) | -0x3D00).to(gl.bfloat16, bitcast=True)  # -128 - zero
            found = found + gl.expand_dims(less, 1)
        factor = bits.to(gl.float32, bitcast=True).to(gl.bfloat16)
        return found * gl.expand_dims(factor, 1)


# -- one program ---------------------------------------------------------------------------------


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
    xd, wd, scale, zero, outer, bias, out, partial, locks,
    M, N, blocks,
    BN: gl.constexpr, BM: gl.constexpr, C: gl.constexpr, STEP: gl.constexpr,
    STAGES: gl.constexpr, TILES: gl.constexpr, SHARED: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """Write out [M, N]; FORM is "int", "zero" or "fp4_16".

    Sums [2 * programs, BN, BM] float32 and counters of tiles serve SHARED.
    """
    warps: gl.constexpr = gl.num_warps()
    sums: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, BM, 16]
    )
    values: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums, k_width=2)
    of_row: gl.constexpr = gl.SliceLayout(1, values)
    of_group: gl.constexpr = layout_of_loads(BN, STEP // 16, warps)
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
        group_rows = gl.arange(0, BN, layout=gl.SliceLayout(1, of_group))
        group_rows = gl.minimum(pn * BN + group_rows, N - 1)
        groups = gl.expand_dims(group_rows * 4, 1) + gl.expand_dims(
            gl.arange(0, STEP // 16, layout=gl.SliceLayout(0, of_group)), 0
        )
        m0, m1, m2, m3 = asked_for(scale, zero, first, rows, groups, N, parts, STEP, FORM)
        w3 = gl.full([BN, STEP], 0.0, gl.bfloat16, layout=values)
        for step in range(first, stop):
            stage = (turn + step) % STAGES
            ahead = gl.minimum(step + 1, stop - 1)
            n0, n1, n2, n3 = asked_for(scale, zero, ahead, rows, groups, N, parts, STEP, FORM)
            meets = (m0, m1, m2, m3)
            mbarrier.wait(bars.index(stage), (turn + step) // STAGES & 1)
            words = w_tiles.index(stage).load(values)
            w0 = unpacked_values(words, meets, 0, FORM, STEP, values)
            acc, w3 = warpgroup_mma_wait(0, deps=[acc, w3])
            acc = warpgroup_mma(w0, x_tiles.index(stage * 4).permute([1, 0]), acc, is_async=True)
            _fetch(
                xd, wd, x_tiles, w_tiles, bars, turn, step + STAGES - 1, stop, pn, pm, N,
                BN, BM, C, STEP, STAGES,
            )  # fmt: skip
            w1 = unpacked_values(words, meets, 1, FORM, STEP, values)
            acc = warpgroup_mma(
                w1, x_tiles.index(stage * 4 + 1).permute([1, 0]), acc, is_async=True
            )
            w2 = unpacked_values(words, meets, 2, FORM, STEP, values)
            acc, w0 = warpgroup_mma_wait(1, deps=[acc, w0])
            acc = warpgroup_mma(
                w2, x_tiles.index(stage * 4 + 2).permute([1, 0]), acc, is_async=True
            )
            w3 = unpacked_values(words, meets, 3, FORM, STEP, values)
            acc, w1 = warpgroup_mma_wait(1, deps=[acc, w1])
            acc = warpgroup_mma(
                w3, x_tiles.index(stage * 4 + 3).permute([1, 0]), acc, is_async=True
            )
            acc, w2 = warpgroup_mma_wait(1, deps=[acc, w2])
            m0, m1, m2, m3 = n0, n1, n2, n3
        acc, w3 = warpgroup_mma_wait(0, deps=[acc, w3])
        base += stop - first
        if SHARED:
            acc, is_last = _summed(acc, partial, locks, index, begin, last, tile_steps, sums)
            if is_last:
                _finish(acc, outer, bias, out, pn, pm, M, N, sums, stored)
        else:
            _finish(acc, outer, bias, out, pn, pm, M, N, sums, stored)
