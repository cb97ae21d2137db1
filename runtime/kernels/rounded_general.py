"""The product of rounded inputs on every card, and in the interpreter, for any shape.

What `rounded_hopper` does, with plain loads and `tl.dot`: for cards without TMA, for K that is no
multiple of 16, and for groups of other sizes than 128. int8 sums are exact, FP8 sums are what the
tensor core makes of them within a step.

Grid: (tiles of N, tiles of M, parts of K). A tile is BN rows of W by BM tokens. Masked: rows past
M and N, columns past K. No alignment needed.

Letters: M tokens, N output features, K input features, BM, BN, BK their tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["rounded_gemm_general"]


@triton.jit
def _finished(
    total, w_scale, x_scale, w_sums, bias, n, m, M, N, x_step,
    GROUPS: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """Turn sums [BN, BM] into results: zero points, scales, bias."""
    n_in, m_in = n < N, m < M
    if ZEROS:
        place = tl.load(x_scale + m * x_step + 1, mask=m_in, other=0.0).to(tl.int32)
        total -= tl.load(w_sums + n, mask=n_in, other=0)[:, None] * place[None, :]
    y = total.to(tl.float32)
    if not GROUPS:
        scale = tl.load(x_scale + m * x_step, mask=m_in, other=0.0)
        scale += scale - scale  # what is not finite makes NaN, whatever its codes are
        y *= tl.load(w_scale + n, mask=n_in, other=0.0)[:, None] * scale[None, :]
    if bias is not None:
        y += tl.load(bias + n, mask=n_in, other=0.0).to(tl.float32)[:, None]
    return y


@triton.jit
def _as_floats(bits):
    return bits.to(tl.float8e4nv, bitcast=True)


@triton.jit(do_not_specialize=["M", "splits", "x_step", "groups", "block_rows"])
def rounded_gemm_general(
    w, x, w_scale, x_scale, w_sums, bias, out, partial, locks,
    M, N, K, splits, x_step, groups, block_rows,
    BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, GROUPS: tl.constexpr,
    ZEROS: tl.constexpr, SPLIT: tl.constexpr, INTEGERS: tl.constexpr,
):  # fmt: skip
    """Multiply; arguments as in `rounded_hopper`, W [N, K] and x [M, K] as int8."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    split = tl.program_id(2)
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    steps = (K + BK - 1) // BK
    first, last = split * steps // splits, (split + 1) * steps // splits
    dtype: tl.constexpr = tl.int32 if INTEGERS else tl.float32
    total = tl.full((BN, BM), 0, dtype)
    w_rows = w + n.to(tl.int64)[:, None] * K
    x_rows = x + m.to(tl.int64)[None, :] * K
    for step in range(first, last):
        k = step * BK + tl.arange(0, BK)
        w_tile = tl.load(w_rows + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :], other=0)
        x_tile = tl.load(x_rows + k[:, None], mask=(k < K)[:, None] & (m < M)[None, :], other=0)
        if not INTEGERS:  # bits, since the interpreter knows no zero of FP8
            w_tile, x_tile = _as_floats(w_tile), _as_floats(x_tile)
        if GROUPS:
            x_part = tl.load(x_scale + m * groups + step, mask=m < M, other=0.0)
            w_part = tl.load(w_scale + tl.minimum(n, N - 1) // block_rows * groups + step)
            if w_scale.dtype.element_ty == tl.uint8:  # of e8m0
                bits = tl.where(w_part == 0, 1 << 22, w_part.to(tl.int32) << 23)
                bits = tl.where(w_part == 255, 0x7FC00000, bits)
                w_part = bits.to(tl.float32, bitcast=True)
            total += tl.dot(w_tile, x_tile) * (w_part[:, None] * x_part[None, :])
        elif INTEGERS:
            total = tl.dot(w_tile, x_tile, total, out_dtype=tl.int32)
        else:
            total = tl.dot(w_tile, x_tile, total)
    is_last = True
    if SPLIT:
        base = partial + (tile * splits).to(tl.int64) * (BN * BM)
        base += tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        tl.store(base + split * (BN * BM), total)
        tl.debug_barrier()
        is_last = tl.atomic_add(locks + tile, 1, sem="acq_rel") == splits - 1
    if is_last:
        if SPLIT:
            total = tl.full((BN, BM), 0, dtype)
            for part in range(splits):
                total += tl.load(base + part * (BN * BM), cache_modifier=".cg")
            tl.store(locks + tile, 0)
        y = _finished(total, w_scale, x_scale, w_sums, bias, n, m, M, N, x_step, GROUPS, ZEROS)
        place = out + m.to(tl.int64)[None, :] * N + n[:, None]
        tl.store(place, y.to(out.dtype.element_ty), mask=(n < N)[:, None] & (m < M)[None, :])
