"""Tens to thousands of tokens times a weight of nibbles: tensor cores and unpacking overlap.

The same product as `nibble_mid`, in Gluon: there Triton waits for each product of a register
operand, here the words of the next step are unpacked while the tensor core works on this one. One
warp brings words and inputs by the copy engine, STAGES steps ahead. Values meet their scales before
the product, rounded to x's dtype.

Grid: at most as many programs as there are tiles of BN output features x BM tokens, each for every
so many tiles. sm_90 only. Limit: tensor cores.
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

from quantload.runtime.kernels.nibble_groups import four_scales, four_zeros, group_row, raw_groups
from quantload.runtime.kernels.nibble_values import unpack4

__all__ = ["described", "overlap_kernel"]


def described(tensor: Tensor, tile: list[int]) -> TensorDescriptor:
    """Return how the copy engine reads tiles of a matrix of 16-bit elements."""
    layout = gl.NVMMASharedLayout(
        swizzle_byte_width=min(2 * tile[1], 128), element_bitwidth=16, rank=2
    )
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), tile, layout)


@gluon.jit
def _tile_of(index, M, N, BN: gl.constexpr, BM: gl.constexpr, TILES: gl.constexpr):
    tiles_n = (N + BN - 1) // BN
    tiles_m = (M + BM - 1) // BM
    start = index // (TILES * tiles_m) * TILES
    size = gl.minimum(tiles_n - start, TILES)
    inside = index % (TILES * tiles_m)
    return start + inside % size, inside // size


@gluon.jit
def _produce(
    xd, wd, x_tiles, w_tiles, full, free, M, N, blocks,
    BN: gl.constexpr, BM: gl.constexpr, C: gl.constexpr, STEP: gl.constexpr,
    STAGES: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    """Bring words and inputs of every step of every tile, as stages become free."""
    parts: gl.constexpr = C // STEP
    tiles = ((N + BN - 1) // BN) * ((M + BM - 1) // BM)
    count = 0
    for index in range(gl.program_id(0), tiles, gl.num_programs(0)):
        pn, pm = _tile_of(index, M, N, BN, BM, TILES)
        for step in range(0, blocks * parts):
            stage = count % STAGES
            block = step // parts
            column = step % parts * STEP
            k = block * 4 * C + column
            mbarrier.wait(free.index(stage), count // STAGES & 1 ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, 2 * STEP * (BN + 4 * BM))
            tma.async_copy_global_to_shared(
                wd, [block * N + pn * BN, column], bar, w_tiles.index(stage)
            )
            for slot in gl.static_range(4):
                tma.async_copy_global_to_shared(
                    xd, [pm * BM, k + slot * C], bar, x_tiles.index(stage * 4 + slot)
                )
            count += 1


@gluon.jit
def _consume(
    x_tiles, w_tiles, full, free, scale, zero, outer, bias, out, M, N, blocks, blocks_per_group,
    BN: gl.constexpr, BM: gl.constexpr, C: gl.constexpr, STEP: gl.constexpr,
    STAGES: gl.constexpr, TILES: gl.constexpr,
    FORM: gl.constexpr, KIND: gl.constexpr, GROUP_SLICES: gl.constexpr,
):  # fmt: skip
    warps: gl.constexpr = gl.num_warps()
    dtype: gl.constexpr = x_tiles.dtype
    sums: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, BM, 16]
    )
    values: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums, k_width=2)
    of_row: gl.constexpr = gl.SliceLayout(1, values)
    stored: gl.constexpr = gl.BlockedLayout([8, 1], [16, 2], [1, warps], [0, 1])
    parts: gl.constexpr = C // STEP
    tiles = ((N + BN - 1) // BN) * ((M + BM - 1) // BM)
    last = blocks * parts
    count = 0
    # NOTE: without a loop around it, sums begin as constants, and ptxas makes every instruction of
    # a product wait for the one before (its message C7515)
    for index in range(gl.program_id(0), tiles, gl.num_programs(0)):
        pn, pm = _tile_of(index, M, N, BN, BM, TILES)
        rows = gl.minimum(pn * BN + gl.arange(0, BN, layout=of_row), N - 1)
        acc = gl.full([BN, BM], 0.0, gl.float32, layout=sums)
        row = group_row(0, blocks_per_group, GROUP_SLICES)
        raw = raw_groups(scale, row, rows, N, KIND != "none")
        raw_zero = raw_groups(zero, row, rows, N, FORM == "zero")
        w0 = gl.full([BN, STEP], 0.0, dtype, layout=values)
        w1, w2, w3 = w0, w0, w0
        for step in range(0, last):
            stage = count % STAGES
            ahead = gl.minimum(step + 1, last - 1) // parts
            ahead = group_row(ahead, blocks_per_group, GROUP_SLICES)
            next_raw = raw_groups(scale, ahead, rows, N, KIND != "none")
            next_zero = raw_groups(zero, ahead, rows, N, FORM == "zero")
            mbarrier.wait(full.index(stage), count // STAGES & 1)
            words = w_tiles.index(stage).load(values)
            zeros = four_zeros(raw_zero, FORM, GROUP_SLICES)
            n0, n1, n2, n3 = unpack4(words, zeros, 0, FORM, dtype, False)
            if KIND != "none":
                s0, s1, s2, s3 = four_scales(raw, KIND, GROUP_SLICES)
                n0, n1, n2, n3 = (
                    n0 * s0.to(dtype), n1 * s1.to(dtype), n2 * s2.to(dtype), n3 * s3.to(dtype)
                )  # fmt: skip
            acc, w0, w1, w2, w3 = warpgroup_mma_wait(0, deps=[acc, w0, w1, w2, w3])
            mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), count=1, pred=step > 0)
            acc = warpgroup_mma(n0, x_tiles.index(stage * 4).permute([1, 0]), acc, is_async=True)
            acc = warpgroup_mma(
                n1, x_tiles.index(stage * 4 + 1).permute([1, 0]), acc, is_async=True
            )
            acc = warpgroup_mma(
                n2, x_tiles.index(stage * 4 + 2).permute([1, 0]), acc, is_async=True
            )
            acc = warpgroup_mma(
                n3, x_tiles.index(stage * 4 + 3).permute([1, 0]), acc, is_async=True
            )
            acc, w0, w1, w2, w3 = warpgroup_mma_wait(4, deps=[acc, n0, n1, n2, n3])
            raw, raw_zero = next_raw, next_zero
            count += 1
        acc, w0, w1, w2, w3 = warpgroup_mma_wait(0, deps=[acc, w0, w1, w2, w3])
        mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), count=1)
        n = pn * BN + gl.arange(0, BN, layout=gl.SliceLayout(1, stored))
        m = pm * BM + gl.arange(0, BM, layout=gl.SliceLayout(0, stored))
        of_sum = gl.minimum(pn * BN + gl.arange(0, BN, layout=gl.SliceLayout(1, sums)), N - 1)
        y = acc
        if outer is not None:
            y = y * gl.expand_dims(gl.load(outer + of_sum), 1)
        if bias is not None:
            y = y + gl.expand_dims(gl.load(bias + of_sum).to(gl.float32), 1)
        y = gl.convert_layout(y.to(dtype), stored)
        place = out + gl.expand_dims(m, 0).to(gl.int64) * N + gl.expand_dims(n, 1)
        gl.store(place, y, mask=(gl.expand_dims(n, 1) < N) & (gl.expand_dims(m, 0) < M))


@gluon.jit(do_not_specialize=["M", "blocks"])
def overlap_kernel(
    xd, wd, scale, zero, outer, bias, out,
    M, N, blocks, blocks_per_group,
    BN: gl.constexpr, BM: gl.constexpr, C: gl.constexpr, STEP: gl.constexpr,
    STAGES: gl.constexpr, TILES: gl.constexpr,
    FORM: gl.constexpr, KIND: gl.constexpr, GROUP_SLICES: gl.constexpr,
):  # fmt: skip
    """Write out [M, N]."""
    w_tiles = gl.allocate_shared_memory(gl.int16, [STAGES, BN, STEP], wd.layout)
    x_tiles = gl.allocate_shared_memory(xd.dtype, [STAGES * 4, BM, STEP], xd.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(free.index(s), count=1)
    gl.warp_specialize(
        [
            (
                _consume,
                (x_tiles, w_tiles, full, free, scale, zero, outer, bias, out, M, N, blocks,
                 blocks_per_group, BN, BM, C, STEP, STAGES, TILES, FORM, KIND, GROUP_SLICES),
            ),
            (
                _produce,
                (xd, wd, x_tiles, w_tiles, full, free, M, N, blocks,
                 BN, BM, C, STEP, STAGES, TILES),
            ),
        ],
        [1],
        [24],
    )  # fmt: skip
