"""A weight of nibbles as a dense one, for many tokens, where the product is bound by arithmetic.

A copy in float16 or bfloat16 and cuBLAS cost less than unpacking in the product from about a
thousand tokens. Values are computed in float32 and rounded once.

Act-order is left as it is packed: the inputs are brought into the same order.

Grid: (blocks of four slices, tiles of BN output features). Limit: memory, mostly of the writing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantload.runtime.kernels.nibble_folded import values4
from quantload.runtime.kernels.nibble_groups import (
    four_scales,
    four_zeros,
    group_row,
    raw_groups,
)
from quantload.runtime.kernels.nibble_layout import table_registers

__all__ = ["dense_kernel", "gather_kernel"]


@triton.jit
def dense_kernel(
    words, scale, zero, offset, outer, table, out,
    N, K, start, count, blocks_per_group,
    BN: tl.constexpr, C: tl.constexpr, FORM: tl.constexpr, KIND: tl.constexpr,
    GROUP_SLICES: tl.constexpr, HALF: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Write rows start .. start + count of the weight to out [count, K] of any float dtype.

    HALF says that inputs are float16, and values of codes with them; else bfloat16.
    """
    narrow: tl.constexpr = tl.float16 if HALF else tl.bfloat16
    dtype: tl.constexpr = tl.float32 if INTERPRETED else narrow
    block = tl.program_id(0)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    i = tl.arange(0, C)[None, :]
    rows = tl.minimum(start + n, N - 1)
    w = tl.load(words + block.to(tl.int64) * N * C + rows[:, None] * C + i)
    row = group_row(block, blocks_per_group, GROUP_SLICES)
    zeros = four_zeros(raw_groups(zero, row, rows, N, FORM == "zero"), FORM, GROUP_SLICES)
    registers = table_registers(table, FORM, INTERPRETED)
    w0, w1, w2, w3 = values4(
        w, zeros, registers, scale, block, rows, 0, N, FORM, dtype, INTERPRETED
    )
    scales = raw_groups(scale, row, rows, N, KIND != "none")
    s0, s1, s2, s3 = four_scales(scales, KIND, GROUP_SLICES)
    v0, v1 = w0.to(tl.float32) * s0, w1.to(tl.float32) * s1
    v2, v3 = w2.to(tl.float32) * s2, w3.to(tl.float32) * s3
    if offset is not None:
        offsets = four_scales(raw_groups(offset, row, rows, N, True), "fp32", GROUP_SLICES)
        o0, o1, o2, o3 = offsets
        v0, v1, v2, v3 = v0 + o0, v1 + o1, v2 + o2, v3 + o3
    if outer is not None:
        factor = tl.load(outer + rows)[:, None]
        v0, v1, v2, v3 = v0 * factor, v1 * factor, v2 * factor, v3 * factor
    place = out + n[:, None].to(tl.int64) * K
    inside = (n < count)[:, None]
    _store(place, v0, block * 4 * C + i, inside, K)
    _store(place, v1, block * 4 * C + C + i, inside, K)
    _store(place, v2, block * 4 * C + 2 * C + i, inside, K)
    _store(place, v3, block * 4 * C + 3 * C + i, inside, K)


@triton.jit
def _store(place, values, k, inside, K):
    tl.store(place + k, values.to(place.dtype.element_ty), mask=inside & (k < K))


@triton.jit
def gather_kernel(x, columns, out, K, stride_x, BLOCK: tl.constexpr):
    """Write columns of x [M, K] in packed order to out [M, K'], zero where a column is padding."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.load(columns + place, mask=place < K, other=-1)
    values = tl.load(x + row * stride_x + column, mask=column >= 0, other=0.0)
    tl.store(out + row * K + place, values, mask=place < K)
