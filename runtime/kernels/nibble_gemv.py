"""One token, or a few, times a small weight of nibbles, without tensor cores.

Where a weight is a few megabytes, the time is that of one trip to memory. A program reads words
straight into registers, all that it needs of them at once and before the kernel in front has ended,
multiplies in float32 and adds its sums up in a fixed tree: no parts of K, no counters.

    y[m, n] = outer[n] * sum over k of scale[g, n] * (value[n, k] * x[m, k])

Grid: (tiles of BN output features, M). A tile of words is KB blocks x BN x C. Masked: columns past
K; output features past N repeat the last and are not stored. Limit: latency, then instructions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantload.runtime.kernels.dependent_launch import let_next_start, wait_for_previous
from quantload.runtime.kernels.nibble_groups import four_scales, four_zeros, group_row, raw_groups
from quantload.runtime.kernels.nibble_layout import table_registers, unpack4

__all__ = ["gemv_kernel"]


@triton.jit
def _add(a, b):
    return a + b


@triton.jit
def _product(place, values, k, K, EVEN_K: tl.constexpr):
    """Multiply values [KB, BN, C] with the inputs of columns k [KB, C], in float32."""
    x = tl.load(place + k) if EVEN_K else tl.load(place + k, mask=k < K, other=0.0)
    return values.to(tl.float32) * x.to(tl.float32)[:, None, :]


@triton.jit(do_not_specialize=["blocks"])
def gemv_kernel(
    x, words, scale, zero, outer, table, bias, out,
    N, K, blocks, stride_x, blocks_per_group,
    BN: tl.constexpr, KB: tl.constexpr, C: tl.constexpr,
    FORM: tl.constexpr, KIND: tl.constexpr, GROUP_SLICES: tl.constexpr, EVEN_K: tl.constexpr,
    EARLY: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Write out [M, N]."""
    dtype: tl.constexpr = x.dtype.element_ty
    let_next_start(EARLY)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = tl.minimum(n, N - 1)
    i = tl.arange(0, C)
    b = tl.arange(0, KB)
    place = x + tl.program_id(1).to(tl.int64) * stride_x
    inner = rows[None, :, None] * C + i[None, None, :]
    block = tl.minimum(b, blocks - 1)
    w = tl.load(words + block.to(tl.int64)[:, None, None] * N * C + inner)
    row = group_row(block, blocks_per_group, GROUP_SLICES)
    s = raw_groups(scale, row[:, None], rows[None, :], N, KIND != "none")
    z = raw_groups(zero, row[:, None], rows[None, :], N, FORM == "zero")
    wait_for_previous(EARLY)
    registers = table_registers(table, FORM, INTERPRETED)
    acc = tl.full((KB, BN, C), 0.0, tl.float32)
    for first in range(0, blocks, KB):
        block = first + KB + b
        inside = block < blocks
        next_w = tl.load(
            words + block.to(tl.int64)[:, None, None] * N * C + inner, mask=inside[:, None, None]
        )
        row = group_row(tl.minimum(block, blocks - 1), blocks_per_group, GROUP_SLICES)
        next_s = raw_groups(scale, row[:, None], rows[None, :], N, KIND != "none")
        next_z = raw_groups(zero, row[:, None], rows[None, :], N, FORM == "zero")
        zeros = four_zeros(z, FORM, GROUP_SLICES)
        v0, v1, v2, v3 = unpack4(w, zeros, registers, FORM, dtype, INTERPRETED)
        s0, s1, s2, s3 = four_scales(s, KIND, GROUP_SLICES)
        k = (first + b)[:, None] * 4 * C + i[None, :]
        p0 = _product(place, v0, k, K, EVEN_K)
        p1 = _product(place, v1, k + C, K, EVEN_K)
        p2 = _product(place, v2, k + 2 * C, K, EVEN_K)
        p3 = _product(place, v3, k + 3 * C, K, EVEN_K)
        if KIND == "none":
            acc += (p0 + p1) + (p2 + p3)
        elif GROUP_SLICES == 4:
            acc += ((p0 + p1) + (p2 + p3)) * s0
        elif GROUP_SLICES == 2:
            acc += (p0 + p1) * s0
            acc += (p2 + p3) * s2
        else:
            acc += p0 * s0
            acc += p1 * s1
            acc += p2 * s2
            acc += p3 * s3
        w, s, z = next_w, next_s, next_z
    y = tl.reduce(tl.reduce(acc, 2, _add), 0, _add)
    if outer is not None:
        y *= tl.load(outer + rows)
    if bias is not None:
        y += tl.load(bias + rows).to(tl.float32)
    target = out + tl.program_id(1).to(tl.int64) * N + n
    tl.store(target, y.to(out.dtype.element_ty), mask=n < N)
