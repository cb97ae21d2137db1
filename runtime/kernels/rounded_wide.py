"""The product of many rounded tokens on sm_90: warps that fetch, and two groups that multiply.

What `rounded_hopper` does, for many tokens. Of the warps of a program one fetches tiles of W and x
into a ring; two groups of four multiply 64 tokens each with the same tile of W, wait for nobody but
their own products, and tell the fetching warp when a place is free. So the tensor core has one
group's product to do while the other adds, scales or stores. Programs are as many as processors,
and take one tile after another; or (SHARED) they share out the steps of all tiles evenly, so that
none waits for a last round of tiles. Of a tile with several programs each writes its sums, and the
last one to come adds them up in order: equal inputs give equal bits.

Scales in groups meet each step's sums, as in DeepSeek's DeepGEMM (2025), whose division of labour
this is; without groups sums stay in the tensor core.

Grid: processors. Masked: rows past M and N. K is a multiple of 16. Limit: tensor cores.

Letters: M tokens, N output features, K input features, BN, BK tiles of W.
"""

from __future__ import annotations

import torch
import triton
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quantload.runtime.kernels.rounded_hopper import layout_of_tile
from quantload.runtime.kernels.rounded_scratch import token_step
from quantload.runtime.kernels.rounded_weight import PackedRounded
from quantload.runtime.kernels.split_locks import split_locks
from quantload.runtime.launch_settings import Settings

__all__ = ["launch_wide", "rounded_gemm_wide", "steps_of", "summed", "tiles_of"]

_HALF = 64  # tokens of a group of warps
_SHARED_TILES = 2048  # of more the last round is a small part


@gluon.jit
def _place(tile, M, N, BM: gl.constexpr, BN: gl.constexpr, BAND):
    """First row of W and of x of a tile; BAND tiles of tokens are taken for each of W."""
    tiles_n = gl.cdiv(N, BN)
    band = tile // (BAND * tiles_n)
    height = gl.minimum(gl.cdiv(M, BM) - band * BAND, BAND)
    inside = tile % (BAND * tiles_n)
    return inside // height * BN, (band * BAND + inside % height) * BM


@gluon.jit
def tiles_of(steps, tiles, SHARED: gl.constexpr):
    """Return the tiles of a program: the first, the one behind the last, from one to the next.

    And of SHARED its first step, and the one behind its last, over all tiles.
    """
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    if SHARED:
        begin = program * (steps * tiles) // programs
        end = (program + 1) * (steps * tiles) // programs
        return begin // steps, (end + steps - 1) // steps, 1, begin, end
    else:
        return program, tiles, programs, 0, 0


@gluon.jit
def steps_of(tile, begin, end, steps, SHARED: gl.constexpr):
    """Return the first step of a program in a tile, and the one behind its last."""
    if SHARED:
        return gl.maximum(begin - tile * steps, 0), gl.minimum(end - tile * steps, steps)
    else:
        return 0, steps


@gluon.jit
def summed(total, partial, locks, tile, begin, steps, tiles, INDEX: gl.constexpr):
    """Add the sums of a tile's programs up; return them, and if this program is to end the tile.

    A program has one tile that it begins in, and at most one more that it does not end: two places
    in `partial` for each half of the tokens.
    """
    layout: gl.constexpr = total.type.layout
    size: gl.constexpr = total.shape[0] * total.shape[1]
    programs = gl.num_programs(0)
    opening = tile * steps
    first = ((opening + 1) * programs - 1) // (steps * tiles)
    final = ((opening + steps) * programs - 1) // (steps * tiles)
    is_last = first == final
    if first != final:
        m = gl.arange(0, total.shape[0], layout=gl.SliceLayout(1, layout))
        n = gl.arange(0, total.shape[1], layout=gl.SliceLayout(0, layout))
        place = partial + gl.expand_dims(m, 1) * total.shape[1] + gl.expand_dims(n, 0)
        own = 2 * (2 * gl.program_id(0) + (begin < opening).to(gl.int32)) + INDEX
        gl.store(place + own.to(gl.int64) * size, total)
        gl.thread_barrier()
        done = gl.atomic_add(locks + 2 * tile + INDEX, 1, sem="acq_rel")
        is_last = done == final - first
        if is_last:
            total = gl.zeros(total.shape, total.dtype, layout=layout)
            for program in range(first, final + 1):
                begun = program * (steps * tiles) // programs
                of_it = 2 * (2 * program + (begun < opening).to(gl.int32)) + INDEX
                total += gl.load(place + of_it.to(gl.int64) * size, cache_modifier=".cg")
            gl.atomic_xchg(locks + 2 * tile + INDEX, 0)
    return total, is_last


@gluon.jit
def _fetch(
    w_desc, x_desc, w_ring, x_ring, ready, free, M, N, steps, tiles, BAND, SHARED: gl.constexpr
):  # fmt: skip
    """Bring the tiles of all steps of all tiles of the result."""
    STAGES: gl.constexpr = w_ring.shape[0]
    BN: gl.constexpr = w_desc.block_type.shape[0]
    BK: gl.constexpr = w_desc.block_type.shape[1]
    HALF: gl.constexpr = x_desc.block_type.shape[0]
    SIZE: gl.constexpr = w_desc.block_type.nbytes + 2 * x_desc.block_type.nbytes
    done = 0
    lowest, highest, stride, begin, end = tiles_of(steps, tiles, SHARED)
    for tile in range(lowest, highest, stride):
        n, m = _place(tile, M, N, 2 * HALF, BN, BAND)
        first, stop = steps_of(tile, begin, end, steps, SHARED)
        for step in range(first, stop):
            place = done % STAGES
            bar = ready.index(place)
            mbarrier.wait(free.index(place), ((done // STAGES) & 1) ^ 1)
            mbarrier.expect(bar, SIZE)
            tma.async_copy_global_to_shared(w_desc, [n, step * BK], bar, w_ring.index(place))
            tma.async_copy_global_to_shared(x_desc, [m, step * BK], bar, x_ring.index(2 * place))
            tma.async_copy_global_to_shared(
                x_desc, [m + HALF, step * BK], bar, x_ring.index(2 * place + 1)
            )
            done += 1


@gluon.jit
def _finish(
    total, w_scale, x_scale, w_sums, bias, out, m, n_start, M, N, x_step,
    GROUPS: gl.constexpr, ZEROS: gl.constexpr,
):  # fmt: skip
    """End a tile: scales, zero points and bias; store."""
    layout: gl.constexpr = total.type.layout
    n = n_start + gl.arange(0, total.shape[1], layout=gl.SliceLayout(0, layout))
    n_in, m_in = n < N, m < M
    if ZEROS:
        zero = gl.load(x_scale + m * x_step + 1, mask=m_in, other=0.0).to(gl.int32)
        sums = gl.load(w_sums + n, mask=n_in, other=0)
        total -= gl.expand_dims(sums, 0) * gl.expand_dims(zero, 1)
    y = total.to(gl.float32)
    if not GROUPS:
        scale = gl.load(x_scale + m * x_step, mask=m_in, other=0.0)
        scale += scale - scale  # what is not finite makes NaN, whatever its codes are
        y *= gl.expand_dims(gl.load(w_scale + n, mask=n_in, other=0.0), 0)
        y *= gl.expand_dims(scale, 1)
    if bias is not None:
        y += gl.expand_dims(gl.load(bias + n, mask=n_in, other=0.0).to(gl.float32), 0)
    place_out = out + gl.expand_dims(m.to(gl.int64) * N, 1) + gl.expand_dims(n, 0)
    mask = gl.expand_dims(m_in, 1) & gl.expand_dims(n_in, 0)
    gl.store(place_out, y.to(out.dtype.element_ty), mask=mask)


@gluon.jit
def _multiply(
    INDEX: gl.constexpr, w_scale, x_scale, w_sums, bias, out, partial, locks,
    w_ring, x_ring, ready, free, M, N, steps, tiles, x_step, groups, block_rows, BAND,
    GROUPS: gl.constexpr, ZEROS: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """Multiply the tokens of one half of each tile of the result."""
    STAGES: gl.constexpr = w_ring.shape[0]
    BN: gl.constexpr = w_ring.shape[1]
    HALF: gl.constexpr = x_ring.shape[1]
    SUM: gl.constexpr = gl.int32 if w_ring.dtype == gl.int8 else gl.float32
    WIDE: gl.constexpr = min(BN, 128 if w_ring.dtype == gl.int8 else 256)
    TILE: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDE, 32]
    )
    nothing = gl.zeros([HALF, BN], SUM, layout=TILE)
    done = 0
    lowest, highest, stride, begin, end = tiles_of(steps, tiles, SHARED)
    for tile in range(lowest, highest, stride):
        n_start, m_start = _place(tile, M, N, 2 * HALF, BN, BAND)
        first, stop = steps_of(tile, begin, end, steps, SHARED)
        m = m_start + INDEX * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, TILE))
        total = nothing
        for step in range(first, stop):
            place = done % STAGES
            if GROUPS:
                x_part = gl.load(x_scale + m * groups + step, mask=m < M, other=0.0)
                w_part = gl.load(w_scale + n_start // block_rows * groups + step)
            mbarrier.wait(ready.index(place), (done // STAGES) & 1)
            if GROUPS:
                found = warpgroup_mma(
                    x_ring.index(2 * place + INDEX), w_ring.index(place).permute((1, 0)), nothing,
                    use_acc=False, is_async=True,
                )  # fmt: skip
                found = warpgroup_mma_wait(0, deps=[found])
                mbarrier.arrive(free.index(place), count=1)
                total += found * gl.expand_dims(x_part * w_part, 1)
            else:
                total = warpgroup_mma(
                    x_ring.index(2 * place + INDEX), w_ring.index(place).permute((1, 0)), total,
                    is_async=True,
                )  # fmt: skip
                total = warpgroup_mma_wait(1, deps=[total])
                before = (done + STAGES - 1) % STAGES
                mbarrier.arrive(free.index(before), count=1, pred=step > first)
            done += 1
        if not GROUPS:
            total = warpgroup_mma_wait(0, deps=[total])
            mbarrier.arrive(free.index((done + STAGES - 1) % STAGES), count=1)
        if SHARED:
            total, is_last = summed(total, partial, locks, tile, begin, steps, tiles, INDEX)
            if is_last:
                _finish(
                    total, w_scale, x_scale, w_sums, bias, out, m, n_start, M, N, x_step,
                    GROUPS, ZEROS,
                )  # fmt: skip
        else:
            _finish(
                total, w_scale, x_scale, w_sums, bias, out, m, n_start, M, N, x_step, GROUPS, ZEROS
            )


@gluon.jit(do_not_specialize=["M", "steps", "tiles", "x_step", "groups", "block_rows", "BAND"])
def rounded_gemm_wide(
    w_desc, x_desc, w_scale, x_scale, w_sums, bias, out, partial, locks,
    M, N, steps, tiles, x_step, groups, block_rows, BAND,
    STAGES: gl.constexpr, GROUPS: gl.constexpr, ZEROS: gl.constexpr, SHARED: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Multiply; arguments as in `rounded_hopper`, where they are not described here.

    Args:
        w_desc: [BN, BK] of W's codes.
        x_desc: [64, BK] of x's codes.
        w_scale: [N], or [blocks of rows, groups]; BN divides the rows of a block.
        x_scale: Scales of tokens.
        w_sums: [N] or None.
        bias: [N] or None.
        out: [M, N].
        partial: [4 * programs, 64, BN] sums, for SHARED.
        locks: [2 * tiles] counters, for SHARED.
        M: Tokens.
        N: Output features.
        steps: ceil(K / BK).
        tiles: Tiles of the result.
        x_step: Between the scales of two tokens.
        groups: Groups of columns.
        block_rows: Rows that share a scale.
        BAND: Tiles of tokens that are taken for a tile of W before the next one.
        STAGES: Places of the ring.
        GROUPS: A scale for each step.
        ZEROS: The input has zero points.
        SHARED: Programs share out the steps of all tiles.
        REGISTERS: Of a thread that multiplies.
    """
    BN: gl.constexpr = w_desc.block_type.shape[0]
    BK: gl.constexpr = w_desc.block_type.shape[1]
    HALF: gl.constexpr = x_desc.block_type.shape[0]
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BN, BK], w_desc.layout)
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [2 * STAGES, HALF, BK], x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(free.index(slot), count=2)
    gdc_launch_dependents()
    gdc_wait()
    gl.warp_specialize(
        [
            (_multiply, (
                0, w_scale, x_scale, w_sums, bias, out, partial, locks,
                w_ring, x_ring, ready, free, M, N, steps, tiles, x_step, groups, block_rows, BAND,
                GROUPS, ZEROS, SHARED,
            )),
            (_multiply, (
                1, w_scale, x_scale, w_sums, bias, out, partial, locks,
                w_ring, x_ring, ready, free, M, N, steps, tiles, x_step, groups, block_rows, BAND,
                GROUPS, ZEROS, SHARED,
            )),
            (_fetch, (
                w_desc, x_desc, w_ring, x_ring, ready, free, M, N, steps, tiles, BAND, SHARED,
            )),
        ],
        [4, 1],
        [REGISTERS, 40],
    )  # fmt: skip


def launch_wide(
    codes: Tensor, scales: Tensor, packed: PackedRounded, bias: Tensor | None, out: Tensor,
    s: Settings,
) -> None:  # fmt: skip
    """Multiply with the given settings into out [M, N]; see `PackedRounded` and `rounded`."""
    (m, k), n, bn, bk = codes.shape, out.shape[1], s["bn"], packed.group or 128
    integers = codes.dtype == torch.int8
    tiles, steps = triton.cdiv(n, bn) * triton.cdiv(m, 2 * _HALF), triton.cdiv(k, bk)
    processors = torch.cuda.get_device_properties(codes.device).multi_processor_count
    shares = bool(s.get("shared")) and tiles <= _SHARED_TILES
    programs = min(tiles * steps if shares else tiles, processors)
    partial, locks = None, None
    if shares:
        sums = torch.int32 if integers else torch.float32
        partial = torch.empty(4 * programs * _HALF * bn, dtype=sums, device=out.device)
        locks = split_locks(out.device, 2 * tiles)
    rounded_gemm_wide[(programs,)](
        TensorDescriptor(packed.codes, [n, k], [k, 1], [bn, bk], layout_of_tile(bn, bk, integers)),
        TensorDescriptor(codes, [m, k], [k, 1], [_HALF, bk], layout_of_tile(_HALF, bk, integers)),
        packed.scale, scales, packed.sums, bias, out, partial, locks, m, n, steps, tiles,
        token_step(scales), scales.shape[-1], packed.block_rows, s["band"], STAGES=s["stages"],
        GROUPS=packed.group > 0, ZEROS=packed.sums is not None, SHARED=shares,
        REGISTERS=s["registers"], num_warps=4, launch_pdl=True,
    )  # fmt: skip
