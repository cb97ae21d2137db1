"""What attention of one token a row does besides: heads before it, pieces of keys after it.

Letters: G query heads that share keys, D head size, R rotary columns.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from quantload.runtime.kernels.dependent_launch import LARGEST, SUM
from quantload.runtime.kernels.quantize import e4m3_bits

__all__ = ["add_up", "capped", "fetch_keys", "kept", "prepared", "store_piece"]


@triton.jit
def _norm_of(x, w, r, DTYPE: tl.constexpr, LATE: tl.constexpr, OFFSET: tl.constexpr):
    x = x * r
    if LATE:
        x = x.to(DTYPE).to(tl.float32)
    if OFFSET:
        w = 1.0 + w
    return (x * w).to(DTYPE).to(tl.float32)


@triton.jit
def prepared(
    base, row_starts, row_mask, cos, sin, weight, eps,
    D: tl.constexpr, R: tl.constexpr, COLUMNS: tl.constexpr, NORM: tl.constexpr,
    LATE: tl.constexpr, OFFSET: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Return heads [rows, COLUMNS] after norm and rotary, float32 with values of their dtype."""
    d = tl.arange(0, COLUMNS)
    mask = row_mask[:, None] & (d < D)[None, :]
    stored = tl.load(base + row_starts[:, None] + d[None, :], mask=mask, other=0.0)
    x = stored.to(tl.float32)
    if NORM:
        r = tl.rsqrt(tl.reduce(x * x, 1, SUM) / D + eps)[:, None]
        w = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
        x = _norm_of(x, w, r, stored.dtype, LATE, OFFSET)
    if R > 0:
        turned = d < R
        if INTERLEAVED:
            partner = tl.where(turned, d ^ 1, d)
            sign = tl.where(d % 2 == 0, -1.0, 1.0)
        else:
            partner = tl.where(turned, tl.where(d < R // 2, d + R // 2, d - R // 2), d)
            sign = tl.where(d < R // 2, -1.0, 1.0)
        y = tl.load(base + row_starts[:, None] + partner[None, :], mask=mask, other=0.0)
        y = y.to(tl.float32)
        if NORM:
            v = tl.load(weight + partner, mask=d < D, other=0.0).to(tl.float32)[None, :]
            y = _norm_of(y, v, r, stored.dtype, LATE, OFFSET)
        c = tl.load(cos + d, mask=turned, other=1.0).to(tl.float32)[None, :]
        s = tl.load(sin + d, mask=turned, other=0.0).to(tl.float32)[None, :]
        one = (x * c).to(stored.dtype).to(tl.float32)
        two = (y * sign[None, :] * s).to(stored.dtype).to(tl.float32)
        x = tl.where(turned[None, :], (one + two).to(stored.dtype).to(tl.float32), x)
    return x


@triton.jit
def kept(x, scale, DTYPE: tl.constexpr, CODES: tl.constexpr):
    """Return float32 numbers as the cache keeps them."""
    if CODES:
        x = x / scale
        x = tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))
        return e4m3_bits(x).to(tl.float8e4nv, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def fetch_keys(start, size, LINES: tl.constexpr):
    """Ask for the first LINES lines of 128 bytes of `size` bytes, for the L2 cache."""
    line = tl.minimum(tl.arange(0, LINES) * 128, tl.maximum(size - 1, 0))
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l", args=[start.to(tl.int64) + line.to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def capped(scores, softcap, CAPPED: tl.constexpr, INTERPRETED: tl.constexpr):
    """Bound scores, if there is a bound."""
    if CAPPED:
        if INTERPRETED:  # which has no device library
            power = tl.exp(-2.0 * tl.abs(scores / softcap))
            size = (1.0 - power) / (1.0 + power)
            scores = softcap * tl.where(scores < 0, -size, size)
        else:
            scores = softcap * libdevice.tanh(scores / softcap)
    return scores


@triton.jit
def add_up(
    part, stats, sinks, to, spot, active, v_scale,
    G: tl.constexpr, D: tl.constexpr, FILLED: tl.constexpr, COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr, SUMMED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Add the pieces of one head's keys up, in their order."""
    s, g, d = tl.arange(0, SPLITS), tl.arange(0, FILLED), tl.arange(0, COLUMNS)
    at = (spot + s)[:, None] * G + g[None, :]
    there = (s < active)[:, None] & (g < G)[None, :]
    m = tl.load(stats + at * 2, mask=there, other=float("-inf"))
    total = tl.load(stats + at * 2 + 1, mask=there, other=0.0)
    highest = tl.reduce(m, 0, LARGEST)
    if SINKS:
        sink = tl.load(sinks + g, mask=g < G, other=0.0).to(tl.float32)
        highest = tl.maximum(highest, sink)
    highest = tl.where(g < G, highest, 0.0)
    sums = tl.reduce(total * tl.exp(m - highest[None, :]), 0, SUM)
    if SINKS:
        sums += tl.exp(sink - highest)
    acc = tl.full((FILLED, COLUMNS), 0.0, tl.float32)
    for begin in tl.range(0, active, SUMMED):
        i = begin + tl.arange(0, SUMMED)
        rows = (spot + i)[:, None] * G + g[None, :]
        real = (i < active)[:, None] & (g < G)[None, :]
        weight = tl.load(stats + rows * 2, mask=real, other=float("-inf"))
        weight = tl.exp(weight - highest[None, :])
        near = real[:, :, None] & (d < D)[None, None, :]
        parts = tl.load(part + rows[:, :, None] * D + d[None, None, :], mask=near, other=0.0)
        acc += tl.reduce(parts * weight[:, :, None], 0, SUM)
    sums = tl.where(g < G, sums, 1.0)
    result = acc * v_scale / sums[:, None]
    inside = (g < G)[:, None] & (d < D)[None, :]
    tl.store(to + g[:, None] * D + d[None, :], result.to(to.dtype.element_ty), mask=inside)


@triton.jit
def store_piece(
    out, part, stats, locks, sinks, m, total, acc, busy, b, h, pair, split, active, kv_heads,
    v_scale,
    G: tl.constexpr, D: tl.constexpr, FILLED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, SPLITS: tl.constexpr, SUMMED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Store what a program made of its keys: the result, or a piece that the last one adds up."""
    g, d = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = d < D
    to = out + (b * kv_heads + h) * G * D
    if busy & (active == 1):
        if SINKS:
            sink = tl.load(sinks + h * G + g, mask=g < G, other=0.0).to(tl.float32)
            higher = tl.maximum(m, sink)
            shrink = tl.exp(m - higher)
            total = total * shrink + tl.exp(sink - higher)
            acc = acc * shrink[:, None]
        result = acc * v_scale / total[:, None]
        whole = (g < G)[:, None] & inside[None, :]
        tl.store(to + g[:, None] * D + d[None, :], result.to(out.dtype.element_ty), mask=whole)
    elif busy:
        spot = pair.to(tl.int64) * SPLITS
        base = (spot + split) * G
        whole = (g < G)[:, None] & inside[None, :]
        tl.store(part + (base + g)[:, None] * D + d[None, :], acc, mask=whole)
        tl.store(stats + (base + g) * 2, m, mask=g < G)
        tl.store(stats + (base + g) * 2 + 1, total, mask=g < G)
        tl.debug_barrier()
        arrived = tl.atomic_add(locks + pair, 1, sem="acq_rel")
        if arrived == active - 1:
            tl.debug_barrier()
            tl.store(locks + pair, 0)
            add_up(
                part, stats, sinks + h * G, to, spot, active, v_scale,
                G, D, FILLED, COLUMNS, SPLITS, SUMMED, SINKS,
            )  # fmt: skip
