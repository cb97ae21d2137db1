"""Weights of one byte as bfloat16 or float16, for products of many tokens through cuBLAS.

    out[n, k] = outer[n] * scale[g, r] * (value(code[n, k]) - zero[g, r])   r = n // block_rows

Computed in float32 and rounded once. Grid: (B, ceil(N / BN)), a program unpacks BN rows of one
block of 2 C columns. Masked: rows past N, columns past K. Limit: memory, 3 bytes a weight.

Letters: N output features, K input features, G groups of columns, R blocks of rows, C columns of a
slice, B blocks of columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantload.runtime.kernels.byte_unpack import INTERPRETED, scale_values, unpack2

__all__ = ["dequantize"]

_ROWS = 64


@triton.jit
def byte_dequantize_kernel(
    codes, scale, zero, outer, out, N, K, G, R, slices_per_group, block_rows,
    BN: tl.constexpr, C: tl.constexpr, FORM: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = out.dtype.element_ty
    block = tl.program_id(0)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    c = tl.arange(0, C)
    rows = tl.minimum(n, N - 1)
    words = tl.load(codes + block.to(tl.int64) * N * C + rows[:, None] * C + c[None, :])
    for slot in tl.static_range(2):
        group = tl.minimum((2 * block + slot) // slices_per_group, G - 1) * R + rows // block_rows
        z = None
        if zero is not None:
            z = tl.load(zero + group)
        w0, w1 = unpack2(words, z, FORM, dtype, INTERPRETED)
        values = (w0 if slot == 0 else w1).to(tl.float32)
        if scale is not None:
            values *= scale_values(tl.load(scale + group))[:, None]
        if outer is not None:
            values *= tl.load(outer + rows)[:, None]
        k = block * (2 * C) + slot * C + c
        at = out + rows.to(tl.int64)[:, None] * K + k[None, :]
        tl.store(at, values.to(dtype), mask=(n < N)[:, None] & (k < K)[None, :])


def dequantize(
    parts: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
    form: str,
    block_rows: int,
    slices_per_group: int,
    *,
    features: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return the weight [N, K] in `dtype`.

    Args:
        parts: codes, scale, zero and outer of a `PackedBytes`.
        form: As there.
        block_rows: As there.
        slices_per_group: As there.
        features: K.
        dtype: bfloat16 or float16.
    """
    codes, scale, zero, outer = parts
    blocks, n, columns = codes.shape
    grid_of = scale if scale is not None else zero
    groups, row_blocks = (1, 1) if grid_of is None else grid_of.shape
    # NOTE: the interpreter holds bfloat16 as raw integers
    wide = INTERPRETED.value and dtype == torch.bfloat16
    out = torch.empty((n, features), dtype=torch.float32 if wide else dtype, device=codes.device)
    byte_dequantize_kernel[(blocks, -(-n // _ROWS))](
        codes, scale, zero, outer, out, n, features, groups, row_blocks,
        slices_per_group, block_rows,
        BN=_ROWS, C=columns, FORM=form, INTERPRETED=INTERPRETED, num_warps=4,
    )  # fmt: skip
    return out.to(dtype)
