"""The product of rounded inputs on sm_90: TMA rings, asynchronous tensor-core products, PDL.

    y = (Wc @ xc^T)^T * w_scale[n] * x_scale[m]                    one scale a row and a token
    y = sum over groups g of (W_g @ x_g^T) * w_scale[n, g] * x_scale[m, g]  128 or 32 columns each

A program has a ring of STAGES tiles of W and of x. It asks for its first tiles of W before the
kernel ahead of it has ended (weights do not change), waits for that kernel, asks for x, and then
multiplies one stage while the others arrive. With few tokens W is the left operand (SWAP), since
the left side of a product is at least 64 rows. K is cut among programs where there are few tiles:
the last of a tile sums the parts in order.

The tensor core adds FP8 products with about 14 bits. EXACT takes two fresh accumulators in turn and
adds each, finished, to a float32 sum, while the other is multiplied; groups need that anyway.
int8 sums are exact.

Written in Gluon (Triton's language of explicit layouts): `tl.dot` would wait for each int8 product
and each one that is scaled, and would leave FP8 with fewer than 16 tokens to slower instructions.

Grid: (tiles, parts of K). Masked: rows past M and N; TMA fills with zeros past M, N and K. Codes
are contiguous, K a multiple of 16. Limit: memory up to about 128 tokens, tensor cores above.

Letters: M tokens, N output features, K input features, BM, BN, BK their tiles.
"""

from __future__ import annotations

import functools

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

from quantload.runtime.kernels.rounded_scratch import scratch, token_step
from quantload.runtime.kernels.rounded_weight import PackedRounded
from quantload.runtime.launch_settings import Settings

__all__ = ["launch_hopper", "layout_of_tile", "rounded_gemm_hopper", "sum_of_parts"]


@gluon.jit
def _ask(desc, row, step, place, ring, ready, wanted):
    """Ask for rows `row`.. of a step, to be found at `place` of the ring."""
    at = [row, step * desc.block_type.shape[1]]
    tma.async_copy_global_to_shared(desc, at, ready.index(place), ring.index(place), pred=wanted)


@gluon.jit
def _refill(w_desc, x_desc, w_ring, x_ring, ready, n, m, first, step, wanted):
    """Ask for a step in the place of the one that is done."""
    STAGES: gl.constexpr = w_ring.shape[0]
    place = step % STAGES
    size: gl.constexpr = w_desc.block_type.nbytes + x_desc.block_type.nbytes
    mbarrier.expect(ready.index(place), size, pred=wanted)
    _ask(w_desc, n, first + step, place, w_ring, ready, wanted)
    _ask(x_desc, m, first + step, place, x_ring, ready, wanted)


@gluon.jit
def _start(w_ring, x_ring, ready, step, acc, ADD: gl.constexpr, SWAP: gl.constexpr):
    """Start the product of a step, once its tiles are there."""
    STAGES: gl.constexpr = w_ring.shape[0]
    place = step % STAGES
    mbarrier.wait(ready.index(place), (step // STAGES) & 1)
    w, x = w_ring.index(place), x_ring.index(place)
    if SWAP:
        acc = warpgroup_mma(w, x.permute((1, 0)), acc, use_acc=ADD, is_async=True)
    else:
        acc = warpgroup_mma(x, w.permute((1, 0)), acc, use_acc=ADD, is_async=True)
    return acc


@gluon.jit
def _factor(
    w_scale, x_scale, n, m, M, group, groups, block_rows, GROUPS: gl.constexpr, SWAP: gl.constexpr
):
    """Load the scales of a group for a tile whose first row of W is n."""
    factor = 1.0
    if GROUPS:
        x_part = gl.load(x_scale + m * groups + group, mask=m < M, other=0.0)
        w_part = gl.load(w_scale + (n // block_rows) * groups + group)
        factor = gl.expand_dims(x_part * w_part, 0 if SWAP else 1)
    return factor


@gluon.jit
def _added(total, found, factor, GROUPS: gl.constexpr):
    if GROUPS:
        found *= factor
    return total + found


@gluon.jit
def _finished(
    total, w_scale, x_scale, w_sums, bias, n, m, M, N, x_step,
    GROUPS: gl.constexpr, ZEROS: gl.constexpr, SWAP: gl.constexpr,
):  # fmt: skip
    """Turn sums into results: zero points, scales, bias."""
    x_axis: gl.constexpr = 0 if SWAP else 1
    n_in, m_in = n < N, m < M
    if ZEROS:
        place = gl.load(x_scale + m * x_step + 1, mask=m_in, other=0.0).to(gl.int32)
        sums = gl.load(w_sums + n, mask=n_in, other=0)
        total -= gl.expand_dims(sums, 1 - x_axis) * gl.expand_dims(place, x_axis)
    y = total.to(gl.float32)
    if not GROUPS:
        scale = gl.load(x_scale + m * x_step, mask=m_in, other=0.0)
        scale += scale - scale  # what is not finite makes NaN, whatever its codes are
        y *= gl.expand_dims(gl.load(w_scale + n, mask=n_in, other=0.0), 1 - x_axis)
        y *= gl.expand_dims(scale, x_axis)
    if bias is not None:
        part = gl.load(bias + n, mask=n_in, other=0.0).to(gl.float32)
        y += gl.expand_dims(part, 1 - x_axis)
    return y


@gluon.jit
def _promoted_sums(
    w_desc, x_desc, w_ring, x_ring, ready, n_start, m_start, first, count, nothing,
    w_scale, x_scale, n, m, M, groups, block_rows,
    GROUPS: gl.constexpr, SWAP: gl.constexpr,
):  # fmt: skip
    """Sums of steps that are finished one by one; two are on their way at a time."""
    total = nothing
    for step in range(0, count - 1, 2):
        group, late = first + step, step + w_ring.shape[0]
        factor = _factor(w_scale, x_scale, n, m, M, group, groups, block_rows, GROUPS, SWAP)
        factor_odd = _factor(w_scale, x_scale, n, m, M, group + 1, groups, block_rows, GROUPS, SWAP)
        even = _start(w_ring, x_ring, ready, step, nothing, False, SWAP)
        odd = _start(w_ring, x_ring, ready, step + 1, nothing, False, SWAP)
        total = _added(total, warpgroup_mma_wait(1, deps=[even]), factor, GROUPS)
        _refill(w_desc, x_desc, w_ring, x_ring, ready, n_start, m_start, first, late, late < count)
        total = _added(total, warpgroup_mma_wait(0, deps=[odd]), factor_odd, GROUPS)
        late += 1
        _refill(w_desc, x_desc, w_ring, x_ring, ready, n_start, m_start, first, late, late < count)
    if count % 2 == 1:
        group = first + count - 1
        factor = _factor(w_scale, x_scale, n, m, M, group, groups, block_rows, GROUPS, SWAP)
        even = _start(w_ring, x_ring, ready, count - 1, nothing, False, SWAP)
        total = _added(total, warpgroup_mma_wait(0, deps=[even]), factor, GROUPS)
    return total


@gluon.jit
def power_of(bits):
    """Turn a byte of e8m0 into float32."""
    found = gl.where(bits == 0, 1 << 22, bits.to(gl.int32) << 23).to(gl.float32, bitcast=True)
    return gl.where(bits == 255, float("nan"), found)


@gluon.jit
def _fine_sums(
    w_desc, x_desc, w_ring, x_ring, ready, n_start, m_start, first, count, total,
    w_scale, x_scale, n, m, M, N, groups, block_rows,
):  # fmt: skip
    """Sums of groups of 32 columns: four of a step, each with scales of its own; W on the left."""
    STAGES: gl.constexpr = w_ring.shape[0]
    AT_ONCE: gl.constexpr = 4 if x_ring.shape[1] < 64 else 2  # registers
    nothing = total
    w_scales = w_scale + gl.minimum(n, N - 1) // block_rows * groups
    x_scales = x_scale + m * groups
    for step in range(count):
        place, late = step % STAGES, step + STAGES
        mbarrier.wait(ready.index(place), (step // STAGES) & 1)
        w, x = w_ring.index(place), x_ring.index(place)
        for start in gl.static_range(0, 4, AT_ONCE):
            found = ()
            for part in gl.static_range(start, start + AT_ONCE):
                left = w.slice(32 * part, 32, dim=1)
                right = x.slice(32 * part, 32, dim=1).permute((1, 0))
                one = warpgroup_mma(left, right, nothing, use_acc=False, is_async=True)
                found = found + (one,)  # type: ignore[assignment]  # noqa: RUF005
            factors = ()
            for part in gl.static_range(start, start + AT_ONCE):
                group = (first + step) * 4 + part
                of_w = gl.load(w_scales + gl.minimum(group, groups - 1))
                if w_scale.dtype.element_ty == gl.uint8:
                    of_w = power_of(of_w)
                of_x = gl.load(x_scales + group, mask=(m < M) & (group < groups), other=0.0)
                factors = factors + ((of_w, of_x),)  # type: ignore[assignment]  # noqa: RUF005
            found = warpgroup_mma_wait(0, deps=found)
            for part in gl.static_range(AT_ONCE):
                of_w, of_x = factors[part]
                total += found[part] * (gl.expand_dims(of_w, 1) * gl.expand_dims(of_x, 0))
        _refill(w_desc, x_desc, w_ring, x_ring, ready, n_start, m_start, first, late, late < count)
    return total


@gluon.jit
def _plain_sums(
    w_desc, x_desc, w_ring, x_ring, ready, n_start, m_start, first, count, total,
    SWAP: gl.constexpr,
):  # fmt: skip
    """Sums that stay in one accumulator."""
    for step in range(count):
        total = _start(w_ring, x_ring, ready, step, total, True, SWAP)
        total = warpgroup_mma_wait(1, deps=[total])
        late = step - 1 + w_ring.shape[0]
        wanted = (step > 0) & (late < count)
        _refill(w_desc, x_desc, w_ring, x_ring, ready, n_start, m_start, first, late, wanted)
    return warpgroup_mma_wait(0, deps=[total])


@gluon.jit
def sum_of_parts(total, nothing, place, size, lock, split, splits, mask):
    """Put a part of a sum beside the others; the last program gets all, added in their order.

    Args:
        total: The part.
        nothing: Zeros.
        place: Pointers to where the first part lies.
        size: Elements of a part.
        lock: Counter of the tile.
        split: Number of the part.
        splits: Parts.
        mask: What is there of a part.

    Returns:
        The sum, and whether this program is the last.
    """
    gl.store(place + split * size, total, mask=mask)
    gl.thread_barrier()
    is_last = gl.atomic_add(lock, 1, sem="acq_rel") == splits - 1
    if is_last:
        total = nothing
        for part in range(splits):
            total += gl.load(place + part * size, mask=mask, other=0, cache_modifier=".cg")
        gl.store(lock, 0)
    return total, is_last


# NOTE: what differs from call to call is no reason to compile again
@gluon.jit(do_not_specialize=["M", "steps", "splits", "x_step", "groups", "block_rows", "BAND"])
def rounded_gemm_hopper(
    w_desc, x_desc, w_scale, x_scale, w_sums, bias, out, partial, locks,
    M, N, steps, splits, x_step, groups, block_rows, BAND,
    STAGES: gl.constexpr, GROUPS: gl.constexpr, ZEROS: gl.constexpr,
    SPLIT: gl.constexpr, EXACT: gl.constexpr, SWAP: gl.constexpr, FINE: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Multiply; see the top of this file.

    Args:
        w_desc: [BN, BK] of W's codes [N, K].
        x_desc: [BM, BK] of x's codes [M, K].
        w_scale: [N]; with GROUPS [blocks of rows, groups], BN divides the rows of a block.
        x_scale: [M] or [M, 2] or [1] with steps of x_step; [M, groups] with GROUPS.
        w_sums: [N] int32 sums of the codes of a row, with ZEROS.
        bias: [N] or None.
        out: [M, N].
        partial: [tiles, splits, BN * BM] sums of a part of K, with SPLIT.
        locks: [tiles] int32, zeros, with SPLIT.
        M: Tokens.
        N: Output features.
        steps: ceil(K / BK).
        splits: Parts of K, at most `steps`.
        x_step: See x_scale.
        groups: Groups of columns, with GROUPS.
        block_rows: Rows that share a scale, with GROUPS.
        BAND: Tiles of W that are taken with all tokens before the next ones.
        STAGES: Places of the ring.
        GROUPS: A scale for each step (BK is then the size of a group).
        ZEROS: The input has zero points.
        SPLIT: splits > 1.
        EXACT: See above.
        SWAP: W is the left operand.
        FINE: Groups are 32 columns, four of a step; scales of W are float32, or bytes of e8m0.
        num_warps: Of a program.
    """
    BN: gl.constexpr = w_desc.block_type.shape[0]
    BM: gl.constexpr = x_desc.block_type.shape[0]
    SUM: gl.constexpr = gl.int32 if w_desc.dtype == gl.int8 else gl.float32
    LEFT: gl.constexpr = BN if SWAP else BM
    RIGHT: gl.constexpr = BM if SWAP else BN
    # NOTE: Triton knows no int8 product wider than 224
    WIDE: gl.constexpr = min(RIGHT, 128 if w_desc.dtype == gl.int8 else 256)
    TILE: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, WIDE, 32]
    )
    W_AXIS: gl.constexpr = gl.SliceLayout(1 if SWAP else 0, TILE)
    X_AXIS: gl.constexpr = gl.SliceLayout(0 if SWAP else 1, TILE)

    tile, split = gl.program_id(0), gl.program_id(1)
    tiles_m = gl.cdiv(M, BM)
    band = tile // (BAND * tiles_m)
    height = gl.minimum(gl.cdiv(N, BN) - band * BAND, BAND)
    inside = tile % (BAND * tiles_m)
    n_start = (band * BAND + inside % height) * BN
    m_start = inside // height * BM
    first = split * steps // splits
    count = (split + 1) * steps // splits - first

    w_ring = gl.allocate_shared_memory(
        w_desc.dtype, [STAGES, BN, w_desc.block_type.shape[1]], w_desc.layout
    )
    x_ring = gl.allocate_shared_memory(
        x_desc.dtype, [STAGES, BM, w_desc.block_type.shape[1]], x_desc.layout
    )
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
    gdc_launch_dependents()
    SIZE: gl.constexpr = w_desc.block_type.nbytes + x_desc.block_type.nbytes
    for slot in gl.static_range(STAGES):
        mbarrier.expect(ready.index(slot), SIZE, pred=slot < count)
        _ask(w_desc, n_start, first + slot, slot, w_ring, ready, slot < count)
    gdc_wait()
    for slot in gl.static_range(STAGES):
        _ask(x_desc, m_start, first + slot, slot, x_ring, ready, slot < count)

    n = n_start + gl.arange(0, BN, layout=W_AXIS)
    m = m_start + gl.arange(0, BM, layout=X_AXIS)
    nothing = gl.zeros([LEFT, RIGHT], SUM, layout=TILE)
    if FINE:
        total = _fine_sums(
            w_desc, x_desc, w_ring, x_ring, ready, n_start, m_start, first, count, nothing,
            w_scale, x_scale, n, m, M, N, groups, block_rows,
        )  # fmt: skip
    elif EXACT:
        total = _promoted_sums(
            w_desc, x_desc, w_ring, x_ring, ready, n_start, m_start, first, count, nothing,
            w_scale, x_scale, n_start, m, M, groups, block_rows, GROUPS, SWAP,
        )  # fmt: skip
    else:
        total = _plain_sums(
            w_desc, x_desc, w_ring, x_ring, ready, n_start, m_start, first, count, nothing, SWAP
        )

    w_axis: gl.constexpr = 1 if SWAP else 0
    is_last = True
    if SPLIT:
        place = partial + (tile * splits).to(gl.int64) * (BN * BM)
        place += gl.expand_dims(gl.arange(0, BN, layout=W_AXIS), w_axis) * BM
        place += gl.expand_dims(gl.arange(0, BM, layout=X_AXIS), 1 - w_axis)
        there = gl.expand_dims(m < M, 1 - w_axis)
        total, is_last = sum_of_parts(
            total, nothing, place, BN * BM, locks + tile, split, splits, there
        )
    if is_last:
        y = _finished(
            total, w_scale, x_scale, w_sums, bias, n, m, M, N, x_step, GROUPS, ZEROS, SWAP
        )
        y = y.to(out.dtype.element_ty)
        if SWAP and BM >= 64:  # to whole lines of the result
            LINES: gl.constexpr = gl.BlockedLayout(
                [1, 8], [256 // BN, BN // 8] if BN < 256 else [1, 32], [num_warps, 1], [1, 0]
            )
            y = gl.convert_layout(y.permute((1, 0)), LINES)
            nn = gl.expand_dims(n_start + gl.arange(0, BN, layout=gl.SliceLayout(0, LINES)), 0)
            mm = gl.expand_dims(m_start + gl.arange(0, BM, layout=gl.SliceLayout(1, LINES)), 1)
            gl.store(out + mm.to(gl.int64) * N + nn, y, mask=(mm < M) & (nn < N))
        else:
            nn = gl.expand_dims(n, w_axis)
            mm = gl.expand_dims(m, 1 - w_axis)
            gl.store(out + mm.to(gl.int64) * N + nn, y, mask=(mm < M) & (nn < N))


def launch_hopper(
    codes: Tensor, scales: Tensor, packed: PackedRounded, bias: Tensor | None, out: Tensor,
    s: Settings,
) -> None:  # fmt: skip
    """Multiply with the given settings into out [M, N]; see `PackedRounded` and `rounded`."""
    (m, k), n, bn, bm, bk = codes.shape, out.shape[1], s["bn"], s["bm"], s["bk"]
    integers, steps = codes.dtype == torch.int8, triton.cdiv(codes.shape[1], bk)
    splits, tiles = min(s["splits"], steps), triton.cdiv(n, bn) * triton.cdiv(m, bm)
    partial, locks = scratch(out.device, tiles, bn * bm, splits, integers)
    rounded_gemm_hopper[(tiles, splits)](
        TensorDescriptor(packed.codes, [n, k], [k, 1], [bn, bk], layout_of_tile(bn, bk, integers)),
        TensorDescriptor(codes, [m, k], [k, 1], [bm, bk], layout_of_tile(bm, bk, integers)),
        packed.scale, scales, packed.sums, bias, out, partial, locks,
        m, n, steps, splits, token_step(scales), scales.shape[-1], packed.block_rows, s["band"],
        STAGES=s["stages"], GROUPS=packed.group > 0, ZEROS=packed.sums is not None,
        SPLIT=splits > 1, EXACT=bool(s["exact"]), SWAP=bool(s["swap"]), FINE=packed.group == 32,
        num_warps=s["warps"], launch_pdl=True,
    )  # fmt: skip


@functools.cache
def layout_of_tile(rows: int, columns: int, integers: bool) -> gl.NVMMASharedLayout:
    """How a tile of codes lies in shared memory: swizzled, as tensor cores read it."""
    return gl.NVMMASharedLayout.get_default_for(
        [rows, columns], gl.int8 if integers else gl.float8e4nv
    )
