"""Hundreds of tokens times a weight of nibbles: warps that fetch, and two groups that multiply.

The product of `nibble_overlap`, divided among the warps of a program as in `rounded_wide`: one
fetches words and inputs into a ring; two groups of four unpack and multiply rows of W of their own
with the same inputs, wait for nobody but their own products, and tell the fetching warp when a
place is free. So one group unpacks while the tensor core has the products of the other, and beside
its own products.

Values meet their scales before the product, rounded to bfloat16. A code c stands in the bits of a
bfloat16 as c 2^-129, so one fused operation makes the value, rounded once:

    round((c - 8) s) 2^-32 = c 2^-129 * (s 2^97) + (-8 s 2^-32)

The power of two goes to the result; scales below 2^30 are served. With zero points c - z comes
first, exactly. FP4 is unpacked as in `nibble_overlap`.

Grid: processors, which take one tile after another; or (SHARED) share out the steps of all tiles
evenly. Of a tile with several programs each writes its sums, and the last one to come adds them up
in order: equal inputs give equal bits. sm_90 only. Limit: tensor cores.

Letters: M tokens, N output features, C columns of a slice, R rows of a group, BM tokens of a tile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quantload.runtime.kernels.nibble_overlap import (
    asked_for,
    described,
    layout_of_loads,
    unpacked_values,
)
from quantload.runtime.kernels.nibble_weight import NibbleWeight
from quantload.runtime.kernels.rounded_wide import steps_of, summed, tiles_of
from quantload.runtime.kernels.split_locks import split_locks

if TYPE_CHECKING:
    from quantload.runtime.kernels.nibble_plan import Plan

__all__ = ["launch_wide", "wide_kernel"]

_SHARED_TILES = 2048  # of more the last round is a small part
_WHOLE = gl.constexpr(2.0**32)  # what results of integer codes lack


@gluon.jit
def _place(tile, tiles_n, tiles_m, TILES):
    """Number of a tile in N and M; TILES tiles of rows run beside each other."""
    start = tile // (TILES * tiles_m) * TILES
    size = gl.minimum(tiles_n - start, TILES)
    inside = tile % (TILES * tiles_m)
    return start + inside % size, inside // size


@gluon.jit
def _fetch(
    xd, wd, x_ring, w_ring, ready, free, N, steps, tiles, tiles_n, tiles_m, TILES,
    C: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """Bring the words and inputs of all steps of all tiles."""
    STAGES: gl.constexpr = ready.shape[0]
    R: gl.constexpr = wd.block_type.shape[0]
    STEP: gl.constexpr = wd.block_type.shape[1]
    BM: gl.constexpr = xd.block_type.shape[0]
    SIZE: gl.constexpr = 2 * wd.block_type.nbytes + 4 * xd.block_type.nbytes
    parts: gl.constexpr = C // STEP
    done = 0
    lowest, highest, stride, begin, end = tiles_of(steps, tiles, SHARED)
    for tile in range(lowest, highest, stride):
        pn, pm = _place(tile, tiles_n, tiles_m, TILES)
        first, stop = steps_of(tile, begin, end, steps, SHARED)
        for step in range(first, stop):
            place = done % STAGES
            block = step // parts
            column = step % parts * STEP
            row = block * N + 2 * pn * R
            k = block * 4 * C + column
            bar = ready.index(place)
            mbarrier.wait(free.index(place), ((done // STAGES) & 1) ^ 1)
            mbarrier.expect(bar, SIZE)
            tma.async_copy_global_to_shared(wd, [row, column], bar, w_ring.index(2 * place))
            tma.async_copy_global_to_shared(wd, [row + R, column], bar, w_ring.index(2 * place + 1))
            for slot in gl.static_range(4):
                tma.async_copy_global_to_shared(
                    xd, [pm * BM, k + slot * C], bar, x_ring.index(4 * place + slot)
                )
            done += 1


# -- values --------------------------------------------------------------------------------------


@gluon.constexpr_function
def _text(form, slot):
    """Return PTX that makes two values of two words $1, with a factor $2 and a summand $4.

    Both are pairs already, and come once for each of the two: as $3 and $5 again.
    """
    moved = ("shl.b32 t, $1, 4;", "mov.b32 t, $1;", "shr.u32 t, $1, 4;", "shr.u32 t, $1, 8;")
    code = "{ .reg .b32 t, one; " + moved[slot] + " and.b32 t, t, 0x00f000f0; "
    if form == "zero":
        code += "mov.b32 one, 0x3f803f80; fma.rn.bf16x2 t, t, one, $4; mul.rn.bf16x2 $0, t, $2; }"
        return code
    return code + "fma.rn.bf16x2 $0, t, $2, $4; }"


@gluon.constexpr_function
def _of_scales(upper, what):
    """Return PTX that makes a pair of what values meet, of the bits of two scales or zero points.

    "factor" is s 2^97, "less" -8 s 2^-32, "zero" -z 2^-129 of a byte z up to 63.
    """
    if what == "zero":
        byte = "shr.u32 t, $1, 8; and.b32 t, t, 63;" if upper else "and.b32 t, $1, 63;"
        return (
            "{ .reg .b32 t, u, one, c; " + byte + " shl.b32 u, t, 16; or.b32 t, t, u;"
            " or.b32 t, t, 0x43004300; mov.b32 one, 0x3f803f80; mov.b32 c, 0xc300c300;"
            " fma.rn.bf16x2 t, t, one, c; mov.b32 c, 0x80108010; mul.rn.bf16x2 $0, t, c; }"
        )
    times = "0x70007000" if what == "factor" else "0xb100b100"
    half = "0x3232" if upper else "0x1010"
    return (
        "{ .reg .b32 t, c; prmt.b32 t, $1, $1, " + half + "; mov.b32 c, " + times + ";"
        " mul.rn.bf16x2 $0, t, c; }"
    )


@gluon.jit
def _pairs(bits, UPPER: gl.constexpr, WHAT: gl.constexpr):
    return gl.inline_asm_elementwise(
        _of_scales(UPPER, WHAT), "=r,r", args=[bits], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _unpacked(
    words, meets, SLOT: gl.constexpr, FORM: gl.constexpr, STEP: gl.constexpr, values: gl.constexpr
):  # fmt: skip
    """Unpack a slot of a tile of words into values times scales."""
    if FORM == "fp4_16":
        return unpacked_values(words, meets, SLOT, FORM, STEP, values)
    else:
        factor = _pairs(meets[0], SLOT >= 2, "factor")
        if FORM == "zero":
            less = _pairs(meets[1], SLOT >= 2, "zero")
        else:
            less = _pairs(meets[0], SLOT >= 2, "less")
        return gl.inline_asm_elementwise(
            _text(FORM, SLOT), "=r,r,r,r,r,r",
            args=[words, gl.expand_dims(factor, 1), gl.expand_dims(less, 1)],
            dtype=gl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip


# -- a group of warps ----------------------------------------------------------------------------


@gluon.jit
def _store(y, out, n_start, m_start, M, N, CHUNK: gl.constexpr):
    """Store results [R, tokens] in chunks of tokens: what changes places needs room to do so."""
    R: gl.constexpr = y.shape[0]
    if y.shape[1] > CHUNK:
        HALF: gl.constexpr = y.shape[1] // 2
        low, high = gl.split(gl.permute(gl.reshape(y, [R, 2, HALF]), [0, 2, 1]))
        _store(low, out, n_start, m_start, M, N, CHUNK)
        _store(high, out, n_start, m_start + HALF, M, N, CHUNK)
    else:
        stored: gl.constexpr = gl.BlockedLayout([8, 1], [R // 8, 256 // R], [1, 4], [0, 1])
        n = n_start + gl.arange(0, R, layout=gl.SliceLayout(1, stored))
        m = m_start + gl.arange(0, y.shape[1], layout=gl.SliceLayout(0, stored))
        place = out + gl.expand_dims(m, 0).to(gl.int64) * N + gl.expand_dims(n, 1)
        mask = (gl.expand_dims(n, 1) < N) & (gl.expand_dims(m, 0) < M)
        gl.store(place, gl.convert_layout(y, stored), mask=mask)


@gluon.jit
def _finish(acc, outer, bias, out, n_start, m_start, M, N, FORM: gl.constexpr):
    """End a tile: multiply by `outer`, add `bias`, store."""
    R: gl.constexpr = acc.shape[0]
    layout: gl.constexpr = acc.type.layout
    n = gl.minimum(n_start + gl.arange(0, R, layout=gl.SliceLayout(1, layout)), N - 1)
    if FORM != "fp4_16":
        acc = acc * _WHOLE
    if outer is not None:
        acc = acc * gl.expand_dims(gl.load(outer + n), 1)
    if bias is not None:
        acc = acc + gl.expand_dims(gl.load(bias + n).to(gl.float32), 1)
    _store(acc.to(gl.bfloat16), out, n_start, m_start, M, N, 32)


@gluon.jit
def _multiply(
    INDEX: gl.constexpr, scale, zero, outer, bias, out, partial, locks, x_ring, w_ring, ready, free,
    M, N, steps, tiles, tiles_n, tiles_m, TILES,
    C: gl.constexpr, SHARED: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """Multiply one half of the rows of each tile."""
    STAGES: gl.constexpr = ready.shape[0]
    R: gl.constexpr = w_ring.shape[1]
    STEP: gl.constexpr = w_ring.shape[2]
    BM: gl.constexpr = x_ring.shape[1]
    sums: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16]
    )
    values: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums, k_width=2)
    of_row: gl.constexpr = gl.SliceLayout(1, values)
    of_group: gl.constexpr = layout_of_loads(R, STEP // 16, 4)
    parts: gl.constexpr = C // STEP
    nothing = gl.full([R, BM], 0.0, gl.float32, layout=sums)
    done = 0
    lowest, highest, stride, begin, end = tiles_of(steps, tiles, SHARED)
    for tile in range(lowest, highest, stride):
        pn, pm = _place(tile, tiles_n, tiles_m, TILES)
        first, stop = steps_of(tile, begin, end, steps, SHARED)
        n_start = (2 * pn + INDEX) * R
        rows = gl.minimum(n_start + gl.arange(0, R, layout=of_row), N - 1)
        group_rows = gl.arange(0, R, layout=gl.SliceLayout(1, of_group))
        group_rows = gl.minimum(n_start + group_rows, N - 1)
        groups = gl.expand_dims(group_rows * 4, 1) + gl.expand_dims(
            gl.arange(0, STEP // 16, layout=gl.SliceLayout(0, of_group)), 0
        )
        acc = nothing
        m0, m1, m2, m3 = asked_for(scale, zero, first, rows, groups, N, parts, STEP, FORM)
        for step in range(first, stop):
            place = done % STAGES
            ahead = gl.minimum(step + 1, stop - 1)
            n0, n1, n2, n3 = asked_for(scale, zero, ahead, rows, groups, N, parts, STEP, FORM)
            meets = (m0, m1, m2, m3)
            mbarrier.wait(ready.index(place), (done // STAGES) & 1)
            words = w_ring.index(2 * place + INDEX).load(values)
            w0 = _unpacked(words, meets, 0, FORM, STEP, values)
            acc = warpgroup_mma(w0, x_ring.index(4 * place).permute([1, 0]), acc, is_async=True)
            w1 = _unpacked(words, meets, 1, FORM, STEP, values)
            acc = warpgroup_mma(w1, x_ring.index(4 * place + 1).permute([1, 0]), acc, is_async=True)
            acc, w0 = warpgroup_mma_wait(1, deps=[acc, w0])
            w2 = _unpacked(words, meets, 2, FORM, STEP, values)
            acc = warpgroup_mma(w2, x_ring.index(4 * place + 2).permute([1, 0]), acc, is_async=True)
            acc, w1 = warpgroup_mma_wait(1, deps=[acc, w1])
            w3 = _unpacked(words, meets, 3, FORM, STEP, values)
            acc = warpgroup_mma(w3, x_ring.index(4 * place + 3).permute([1, 0]), acc, is_async=True)
            # NOTE: products in flight from one step to the next keep their registers in all warps,
            # also in those that have few, and ptxas makes them wait for each other (C7512)
            acc, w2, w3 = warpgroup_mma_wait(0, deps=[acc, w2, w3])
            mbarrier.arrive(free.index(place), count=1)
            m0, m1, m2, m3 = n0, n1, n2, n3
            done += 1
        if SHARED:
            acc, is_last = summed(acc, partial, locks, tile, begin, steps, tiles, INDEX)
            if is_last:
                _finish(acc, outer, bias, out, n_start, pm * BM, M, N, FORM)
        else:
            _finish(acc, outer, bias, out, n_start, pm * BM, M, N, FORM)


@gluon.jit(do_not_specialize=["M", "steps", "tiles", "tiles_n", "tiles_m", "TILES"])
def wide_kernel(
    xd, wd, scale, zero, outer, bias, out, partial, locks,
    M, N, steps, tiles, tiles_n, tiles_m, TILES,
    C: gl.constexpr, STAGES: gl.constexpr, SHARED: gl.constexpr, FORM: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """Write out [M, N]; FORM is "int", "zero" or "fp4_16".

    Sums [4 * programs, R, BM] float32 and counters [2 * tiles] serve SHARED.
    """
    R: gl.constexpr = wd.block_type.shape[0]
    STEP: gl.constexpr = wd.block_type.shape[1]
    BM: gl.constexpr = xd.block_type.shape[0]
    w_ring = gl.allocate_shared_memory(gl.int16, [2 * STAGES, R, STEP], wd.layout)
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [4 * STAGES, BM, STEP], xd.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(free.index(slot), count=2)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    gl.warp_specialize(
        [
            (_multiply, (
                0, scale, zero, outer, bias, out, partial, locks, x_ring, w_ring, ready, free,
                M, N, steps, tiles, tiles_n, tiles_m, TILES, C, SHARED, FORM,
            )),
            (_multiply, (
                1, scale, zero, outer, bias, out, partial, locks, x_ring, w_ring, ready, free,
                M, N, steps, tiles, tiles_n, tiles_m, TILES, C, SHARED, FORM,
            )),
            (_fetch, (
                xd, wd, x_ring, w_ring, ready, free, N, steps, tiles, tiles_n, tiles_m, TILES,
                C, SHARED,
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


def launch_wide(
    x: Tensor, weight: NibbleWeight, bias: Tensor | None, out: Tensor, plan: Plan, early: bool
) -> None:
    """Multiply as a `Plan` says into out [M, N]."""
    m, n = out.shape
    blocks, _, columns = weight.words.shape
    step = min(plan.step, columns)
    tiles_n, tiles_m = triton.cdiv(n, plan.rows), triton.cdiv(m, plan.tokens)
    tiles, steps = tiles_n * tiles_m, blocks * (columns // step)
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    shares = bool(plan.shared) and tiles <= _SHARED_TILES
    programs = min(tiles * steps if shares else tiles, processors)
    partial, locks = None, None
    if shares:
        partial = x.new_empty(2 * programs * plan.rows * plan.tokens, dtype=torch.float32)
        locks = split_locks(x.device, 2 * tiles)
    wide_kernel[(programs,)](
        described(x, [plan.tokens, step]),
        described(weight.words.view(-1, columns), [plan.rows // 2, step]),
        weight.scale, weight.zero, weight.outer, bias, out, partial, locks,
        m, n, steps, tiles, tiles_n, tiles_m, plan.swizzle,
        C=columns, STAGES=plan.stages, SHARED=shares, FORM=weight.form, EARLY=early,
        num_warps=4, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
