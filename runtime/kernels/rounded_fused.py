"""The product of a few tokens that a program rounds itself, on sm_90: no kernel ahead of it.

What `rounded_hopper` does, for up to 8 tokens with a scale a token. While its first tiles of W are
on their way, a program reads the tokens (from the L2 cache, as all do), finds the largest |x| of
each, and rounds those columns that it multiplies into shared memory. The codes are those of
`quantize`, to which the arithmetic here is equal.

Grid: (tiles of N, parts of K). Masked: rows past M and N, columns past K. K is a multiple of 16.
Limit: memory.

Letters: M tokens, N output features, K input features, BN, BK tiles of W.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quantload.runtime.kernels.rounded_hopper import layout_of_tile, sum_of_parts
from quantload.runtime.kernels.rounded_scratch import scratch
from quantload.runtime.kernels.rounded_weight import PackedRounded
from quantload.runtime.launch_settings import Settings

__all__ = ["TOKENS", "launch_fused", "rounded_gemm_fused"]

TOKENS = 8  # the fewest that the tensor core multiplies, and the most that a launch takes


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b)


@gluon.jit
def _reach(x, stride, M, K, ROWS: gl.constexpr, WIDTH: gl.constexpr, num_warps: gl.constexpr):
    """The largest |x| of each of ROWS tokens, as the bits of a float32."""
    PARTS: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, num_warps], [1, 0])
    m = gl.arange(0, ROWS, layout=gl.SliceLayout(1, PARTS))
    k = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, PARTS))
    place = x + gl.expand_dims(m * stride, 1) + gl.expand_dims(k, 0)
    largest = gl.zeros([ROWS, WIDTH], gl.int32, layout=PARTS)
    for start in range(0, K, WIDTH):
        inside = gl.expand_dims(m < M, 1) & gl.expand_dims(k < K - start, 0)
        part = gl.load(place + start, mask=inside, other=0.0).to(gl.float32)
        largest = gl.maximum(largest, part.to(gl.int32, bitcast=True) & 0x7FFFFFFF)
    return gl.reduce(largest, 1, _larger)


@gluon.jit
def _scale(reach, dtype: gl.constexpr, INTEGERS: gl.constexpr):
    """`quantize.row_scale`, of bits."""
    half: gl.constexpr = 127.5 if INTEGERS else 448.0
    eps: gl.constexpr = (
        2.0**-7 if dtype == gl.bfloat16 else (2.0**-10 if dtype == gl.float16 else 2.0**-23)
    )
    scale = gl.div_rn(reach.to(gl.float32, bitcast=True), half)
    scale = scale.to(dtype).to(gl.float32)
    return gl.where(scale == 0.0, eps, scale)


@gluon.jit
def _codes(x, scale, dtype: gl.constexpr, INTEGERS: gl.constexpr):
    """`quantize.scaled_codes`, of values and scales in float32 that broadcast."""
    if dtype == gl.float32:
        scaled = gl.div_rn(x, scale + gl.zeros_like(x))
    else:
        lift = gl.where(scale < 2.0**-100, 2.0**64, 1.0)
        divisor = scale * lift
        inverse = gl.div_rn(1.0, divisor)
        lifted = x * lift
        near = lifted * inverse
        rest = gl.fma(-near, divisor + gl.zeros_like(x), lifted)
        scaled = gl.fma(rest, inverse + gl.zeros_like(x), near).to(dtype).to(gl.float32)
    scaled += 0.0
    if INTEGERS:
        scaled = gl.minimum(gl.maximum(scaled, -128.0), 127.0)
        codes = ((scaled + 12582912.0).to(gl.int32, bitcast=True) & 255).to(gl.int8)
    else:
        codes = scaled.to(gl.float8e4nv)
    return codes


@gluon.jit
def _round_part(
    x, stride, M, K, scale, start, stop, x_part, ROWS: gl.constexpr, INTEGERS: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Write the codes of columns start..stop to x_part [8, WIDTH], rows again and again."""
    WIDTH: gl.constexpr = x_part.shape[1]
    WIDE: gl.constexpr = gl.BlockedLayout([1, 16], [1, 32], [1, num_warps], [1, 0])
    m = gl.arange(0, ROWS, layout=gl.SliceLayout(1, WIDE))
    k = start + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, WIDE))
    inside = gl.expand_dims(m < M, 1) & gl.expand_dims((k < K) & (k < stop), 0)
    part = gl.load(x + gl.expand_dims(m * stride, 1) + gl.expand_dims(k, 0), mask=inside, other=0.0)
    scale = gl.expand_dims(gl.convert_layout(scale, gl.SliceLayout(1, WIDE)), 1)
    codes = _codes(part.to(gl.float32), scale, x.dtype.element_ty, INTEGERS)
    HEIGHT: gl.constexpr = x_part.shape[0]
    if ROWS < HEIGHT:
        wide = gl.zeros([HEIGHT, WIDTH], gl.int8, layout=WIDE)
        codes = (codes.to(gl.int8, bitcast=True) | wide).to(x_part.dtype, bitcast=True)
    x_part.store(codes)


@gluon.jit
def _product(w_ring, x_all, ready, step, acc, ADD: gl.constexpr):
    STAGES: gl.constexpr = w_ring.shape[0]
    place = step % STAGES
    mbarrier.wait(ready.index(place), (step // STAGES) & 1)
    return warpgroup_mma(
        w_ring.index(place), x_all.index(step).permute((1, 0)), acc, use_acc=ADD, is_async=True
    )


@gluon.jit
def _fetch(w_desc, w_ring, ready, n, first, step, count):
    STAGES: gl.constexpr = w_ring.shape[0]
    place = step % STAGES
    mbarrier.expect(ready.index(place), w_desc.block_type.nbytes, pred=step < count)
    at = [n, (first + step) * w_desc.block_type.shape[1]]
    tma.async_copy_global_to_shared(
        w_desc, at, ready.index(place), w_ring.index(place), pred=step < count
    )


@gluon.jit
def _promoted_sums(w_desc, w_ring, x_all, ready, n_start, first, count, nothing):
    """Sums of steps that are finished one by one; two are on their way at a time."""
    total = nothing
    for step in range(0, count - 1, 2):
        late = step + w_ring.shape[0]
        even = _product(w_ring, x_all, ready, step, nothing, False)
        odd = _product(w_ring, x_all, ready, step + 1, nothing, False)
        total += warpgroup_mma_wait(1, deps=[even])
        _fetch(w_desc, w_ring, ready, n_start, first, late, count)
        total += warpgroup_mma_wait(0, deps=[odd])
        _fetch(w_desc, w_ring, ready, n_start, first, late + 1, count)
    if count % 2 == 1:
        even = _product(w_ring, x_all, ready, count - 1, nothing, False)
        total += warpgroup_mma_wait(0, deps=[even])
    return total


@gluon.jit
def _plain_sums(w_desc, w_ring, x_all, ready, n_start, first, count, total):
    """Sums that stay in one accumulator."""
    for step in range(count):
        total = _product(w_ring, x_all, ready, step, total, True)
        total = warpgroup_mma_wait(0, deps=[total])
        _fetch(w_desc, w_ring, ready, n_start, first, step + w_ring.shape[0], count)
    return total


@gluon.jit(do_not_specialize=["M", "steps", "splits"])
def rounded_gemm_fused(
    w_desc, x, w_scale, bias, out, partial, locks, M, N, K, stride, steps, splits,
    STAGES: gl.constexpr, WIDTH: gl.constexpr, READ: gl.constexpr, ROWS: gl.constexpr,
    SPLIT: gl.constexpr, EXACT: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Round and multiply; see `rounded_hopper` for what is not described here.

    Args:
        w_desc: [BN, BK] of W's codes.
        x: [M, K] with rows `stride` elements apart.
        w_scale: [N].
        bias: [N] or None.
        out: [M, N].
        partial: Sums of parts of K, with SPLIT.
        locks: Counters, with SPLIT.
        M: Tokens, at most ROWS.
        N: Output features.
        K: Input features.
        stride: See x.
        steps: ceil(K / BK).
        splits: Parts of K.
        STAGES: Places of the ring.
        WIDTH: Columns that a program multiplies, at most; a power of two.
        READ: Elements of the tokens whose largest |x| is taken at once.
        ROWS: 1 or 8 tokens.
        SPLIT: splits > 1.
        EXACT: As in `rounded_hopper`.
        num_warps: Of a program.
    """
    BN: gl.constexpr = w_desc.block_type.shape[0]
    BK: gl.constexpr = w_desc.block_type.shape[1]
    BM: gl.constexpr = 8
    INTEGERS: gl.constexpr = w_desc.dtype == gl.int8
    SUM: gl.constexpr = gl.int32 if INTEGERS else gl.float32
    TILE: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, BM, 32]
    )
    tile, split = gl.program_id(0), gl.program_id(1)
    first = split * steps // splits
    count = (split + 1) * steps // splits - first
    n_start = tile * BN
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BN, BK], w_desc.layout)
    x_part = gl.allocate_shared_memory(w_desc.dtype, [BM, WIDTH], w_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
    gdc_launch_dependents()
    for slot in gl.static_range(STAGES):
        _fetch(w_desc, w_ring, ready, n_start, first, slot, count)
    gdc_wait()
    reach = _reach(x, stride, M, K, ROWS, READ // ROWS, num_warps)
    scale = _scale(reach, x.dtype.element_ty, INTEGERS)
    start = first * BK
    _round_part(
        x, stride, M, K, scale, start, start + count * BK, x_part, ROWS, INTEGERS, num_warps
    )
    fence_async_shared()
    x_all = x_part._reinterpret(w_desc.dtype, [WIDTH // BK, BM, BK], w_desc.layout)
    nothing = gl.zeros([BN, BM], SUM, layout=TILE)
    if EXACT:
        total = _promoted_sums(w_desc, w_ring, x_all, ready, n_start, first, count, nothing)
    else:
        total = _plain_sums(w_desc, w_ring, x_all, ready, n_start, first, count, nothing)
    x_part._keep_alive()

    ns = gl.arange(0, BN, layout=gl.SliceLayout(1, TILE))
    m = gl.arange(0, BM, layout=gl.SliceLayout(0, TILE))
    is_last = True
    if SPLIT:
        parts = partial + (tile * splits).to(gl.int64) * (BN * BM)
        parts += gl.expand_dims(ns, 1) * BM + gl.expand_dims(m, 0)
        total, is_last = sum_of_parts(
            total, nothing, parts, BN * BM, locks + tile, split, splits, gl.expand_dims(m < M, 0)
        )
    if is_last:
        n = n_start + ns
        y = total.to(gl.float32) * gl.expand_dims(gl.load(w_scale + n, mask=n < N, other=0.0), 1)
        if ROWS == 1:
            factor = gl.convert_layout(
                scale + (scale - scale),
                gl.SliceLayout(1, gl.BlockedLayout([1, 1], [1, 32], [1, num_warps], [1, 0])),
            )
            y *= gl.sum(factor, 0)
        else:
            factor = gl.convert_layout(scale + (scale - scale), gl.SliceLayout(0, TILE))
            y *= gl.expand_dims(factor, 0)
        if bias is not None:
            part = gl.load(bias + n, mask=n < N, other=0.0).to(gl.float32)
            y += gl.expand_dims(part, 1)
        mask = gl.expand_dims(n < N, 1) & gl.expand_dims(m < M, 0)
        place = out + gl.expand_dims(m * N, 0) + gl.expand_dims(n, 1)
        gl.store(place, y.to(out.dtype.element_ty), mask=mask)


def launch_fused(
    x: Tensor, packed: PackedRounded, bias: Tensor | None, out: Tensor, s: Settings
) -> None:
    """Round x [M, K] and multiply, with the given settings, into out [M, N].

    Args:
        x: At most `TOKENS` rows.
        packed: A scale a row.
        bias: [N] or None.
        out: [M, N].
        s: `bn`, `bk`, `stages`, `warps` and `splits`.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    (m, k), n, bn, bk = x.shape, out.shape[1], s["bn"], s["bk"]
    integers, steps = packed.codes.dtype == torch.int8, triton.cdiv(k, bk)
    splits, tiles = min(s["splits"], steps), triton.cdiv(n, bn)
    partial, locks = scratch(out.device, tiles, bn * TOKENS, splits, integers)
    rounded_gemm_fused[(tiles, splits)](
        TensorDescriptor(packed.codes, [n, k], [k, 1], [bn, bk], layout_of_tile(bn, bk, integers)),
        x, packed.scale, bias, out, partial, locks, m, n, k, x.stride(0), steps, splits,
        STAGES=s["stages"], WIDTH=max(512, triton.next_power_of_2(triton.cdiv(steps, splits) * bk)),
        READ=4096 if k <= 4096 else 16384, ROWS=1 if m == 1 else TOKENS, SPLIT=splits > 1,
        EXACT=not integers, num_warps=s["warps"],
        launch_pdl=True,
    )  # fmt: skip
