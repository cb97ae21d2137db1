"""Weight-only GEMM: y[M, N] = x[M, K] @ W[N, K]^T + bias[N], W held as codes of any affine form.

    y[m, n] = outer[n] * sum over groups g of (
                  scale[g, r] * sum over k in g of (value(code[n, k]) - zero[g, r]) * x[m, k]
                + offset[g, r] * sum over k in g of x[m, k] )                  r = n // block_rows

`pack` lays the columns out in slices of C columns of one group (the tail of a group is padded where
C does not divide it), so that scales meet finished sums. The values of integer and FP8 grids are
exact in x's dtype, their products with x are exact, and sums are float32: W is never rounded.
Only a table with entries that x's dtype cannot hold (nf4) is rounded, to that dtype.

Error: at most (C + S + 4) * 2^-23 * sum over k of |x| * |terms of W|, then the rounding to x's
dtype. Each output is summed in a fixed order and nothing is atomic: equal inputs, equal bits.

Grid: (ceil(M / BM), ceil(N / BN), parts of K). A tile is BN rows of W by BM tokens: the transposed
product, since the wide side of a tensor-core product should be the weight. Masked: tokens past M,
columns past K or padded; rows past N repeat the last row and are not stored. No alignment needed.
Limit: memory up to about 64 tokens (W is read once), tensor cores and unpacking above.

Letters: M tokens, N output features, K input features, G groups of columns, R blocks of rows,
C columns of a slice (16 to 128), S slices (S * C >= K).
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantload.errors import ShapeError
from quantload.quant.grid import Grid
from quantload.quant.qtensor import QuantTensor
from quantload.runtime.kernels.weight_only_layout import PackedWeight, pack

__all__ = ["PackedWeight", "kernels_for", "pack", "weight_only_linear", "why_not"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_INTERPRETED = bool(triton.knobs.runtime.interpret)  # what `triton.jit` saw when this file was read


def why_not(weight: QuantTensor, *, device: torch.device, dtype: torch.dtype) -> str | None:
    """Say why the kernel cannot multiply inputs of `dtype` with `weight` on `device`, or None."""
    if dtype not in _DTYPES:
        return f"inputs are {dtype}, the kernel takes bfloat16, float16 and float32"
    if 0 in weight.shape:
        return f"the weight is empty: {weight.shape[0]} x {weight.shape[1]}"
    if weight.grid.table is not None and weight.grid.bits > 4:
        return f"grid {weight.grid.name} is a table of more than 16 values"
    if torch.finfo(weight.rounded_to).eps > torch.finfo(dtype).eps:
        return f"values are rounded to {weight.rounded_to}, which shows in {dtype}"
    if device.type == "cpu" and _INTERPRETED and triton.knobs.runtime.interpret:
        return None
    if device.type != "cuda":
        return f"the kernel needs a CUDA device, not {device.type}"
    return _why_not_on_card(weight.grid, torch.cuda.get_device_capability(device))


def _why_not_on_card(grid: Grid, capability: tuple[int, int]) -> str | None:
    needed = (8, 9) if grid.is_float8 else (8, 0)
    if capability >= needed:
        return None
    return (
        f"grid {grid.name} needs compute capability {needed[0]}.{needed[1]}, "
        f"the device has {capability[0]}.{capability[1]}"
    )


# -- kernels -----------------------------------------------------------------------------------
# NOTE: nothing of `triton.language.standard` (tl.sum, tl.zeros, tl.cdiv) is used: those are jitted
# when triton is imported, and the interpreter cannot run them if it was chosen after that.


@triton.jit
def _add(a, b):
    return a + b


@triton.jit
def _input_tile(x_rows, packed_columns, m_mask, K, columns):
    """Load the input [C, BM] of packed columns [C], zero where they are padding."""
    k = packed_columns
    k_mask = k < K
    if columns is not None:
        k = tl.load(columns + packed_columns)
        k_mask = k >= 0
    return tl.load(x_rows[None, :] + k[:, None], mask=k_mask[:, None] & m_mask, other=0.0)


@triton.jit
def _values(codes, group, zero, table, BIAS: tl.constexpr, dtype: tl.constexpr):
    """Turn codes [BN, C] into value(code) - zero in `dtype`; small integers are exact there."""
    if table is not None:
        values = tl.load(table + codes).to(dtype)
    else:
        values = codes.to(dtype)
        if BIAS != 0:
            values -= BIAS
        if zero is not None:
            values -= tl.load(zero + group).to(dtype)[:, None]
    return values


@triton.jit
def _finish(y, n, outer, bias):
    """Multiply sums y by `outer` and add `bias`; n are output features that broadcast with y."""
    if outer is not None:
        y *= tl.load(outer + n)
    if bias is not None:
        y += tl.load(bias + n).to(tl.float32)
    return y


@triton.jit
def _gemm_kernel(
    x, codes, scale, zero, offset, outer, columns, table, bias, out,
    M, N, K, G, R, stride_x, steps, steps_per_split, slices_per_group, block_rows,
    BN: tl.constexpr, BM: tl.constexpr, C: tl.constexpr, PER_BYTE: tl.constexpr,
    BIAS: tl.constexpr, PER_GROUP: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Write the product to out [M, N], or sums over parts of K to out [splits, M, N] float32."""
    split = tl.program_id(2)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    c = tl.arange(0, C)
    rows = tl.minimum(n, N - 1)
    r = rows // block_rows
    x_rows = x + m.to(tl.int64) * stride_x
    first = split * steps_per_split
    last = tl.minimum(first + steps_per_split, steps)
    tile = codes + (first.to(tl.int64) * N + rows[:, None]) * C + c[None, :]
    acc = tl.full((BN, BM), 0.0, tl.float32)
    x_sum = tl.full((BM,), 0.0, tl.float32)
    for step in range(first, last):
        packed = tl.load(tile)
        for part in tl.static_range(PER_BYTE):
            index = step * PER_BYTE + part
            x_tile = _input_tile(x_rows, index * C + c, (m < M)[None, :], K, columns)
            # A slice past the last group only makes the number of slices even; x is masked there.
            group = tl.minimum(index // slices_per_group, G - 1) * R + r
            slice_codes = packed
            if PER_BYTE == 2:
                # Signed bytes convert to floats faster than unsigned ones.
                slice_codes = ((packed >> (4 * part)) & 15).to(tl.int8)
            values = _values(slice_codes, group, zero, table, BIAS, x_tile.dtype)
            if PER_GROUP:
                product = tl.dot(values, x_tile, input_precision="ieee")
                acc += product * tl.load(scale + group).to(tl.float32)[:, None]
            else:
                acc = tl.dot(values, x_tile, acc, input_precision="ieee")
            if offset is not None:
                slice_sum = tl.reduce(x_tile.to(tl.float32), 0, _add)
                if PER_GROUP:
                    acc += tl.load(offset + group).to(tl.float32)[:, None] * slice_sum[None, :]
                else:
                    x_sum += slice_sum
        tile += N * C
    if not PER_GROUP:
        acc *= tl.load(scale + r).to(tl.float32)[:, None]
        if offset is not None:
            acc += tl.load(offset + r).to(tl.float32)[:, None] * x_sum[None, :]
    if not SPLIT:
        acc = _finish(acc, rows[:, None], outer, bias)
    target = out + (split.to(tl.int64) * M + m)[None, :] * N + n[:, None]
    mask = (n < N)[:, None] & (m < M)[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _sum_splits_kernel(partial, outer, bias, out, size, N, splits, BLOCK: tl.constexpr):
    """Sum partial [splits, M, N] float32 in order and finish; size = M * N."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    acc = tl.full((BLOCK,), 0.0, tl.float32)
    for _ in range(splits):
        acc += tl.load(partial + at, mask=mask, other=0.0)
        partial += size
    tl.store(out + at, _finish(acc, at % N, outer, bias).to(out.dtype.element_ty), mask=mask)


# -- launch ------------------------------------------------------------------------------------


@functools.cache
def _card(device: torch.device) -> tuple[int, int]:
    """Return the number of processors, and bytes of shared memory that a program may use."""
    if device.type != "cuda":
        return 8, 1 << 20  # the interpreter; few processors, so that small tests split K
    properties = torch.cuda.get_device_properties(device)
    shared: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return properties.multi_processor_count, shared


def _tile(m: int, dtype: torch.dtype, step_columns: int, shared: int) -> tuple[int, int, int, int]:
    """Return BN, BM, warps and stages for `m` tokens and `step_columns` columns read at once."""
    if dtype == torch.float32:  # no tensor cores: wider tiles only spill registers
        return 32, 16, 4, 2
    if m <= 32:
        return 64, 16 if m <= 16 else 32, 4, 3
    if m <= 64:
        return 64, 64, 4, 3 if step_columns <= 128 else 2
    if step_columns <= 128:
        return 64, 128, 4, 2
    return (128, 128, 8, 2) if shared >= 150_000 else (64, 64, 4, 2)


def _splits(programs: int, steps: int, processors: int) -> tuple[int, int]:
    """Return into how many parts K is cut, and steps per part: two programs for each processor."""
    wanted = min(2 * processors // programs, steps // 4)
    each = -(-steps // max(wanted, 1))
    return -(-steps // each), each


def kernels_for(packed: PackedWeight, tokens: int, dtype: torch.dtype) -> tuple[str, ...]:
    """Return the names of the device functions that a call launches, as a profiler shows them.

    Args:
        packed: W.
        tokens: M.
        dtype: dtype of x.
    """
    if tokens == 0:
        return ()
    splits = _plan(tokens, packed.codes, dtype, packed.nibbles)[-2]
    sums = (_sum_splits_kernel.__name__,) if splits > 1 else ()
    return (_gemm_kernel.__name__, *sums)


def _plan(
    m: int, codes: Tensor, dtype: torch.dtype, nibbles: bool
) -> tuple[tuple[int, int, int, int], tuple[int, int], int, int]:
    """Return the tile, the grid of tiles, into how many parts K is cut, and steps of a part."""
    steps, n, width = codes.shape
    processors, shared = _card(codes.device)
    tile = _tile(m, dtype, (2 if nibbles else 1) * width, shared)
    tiles = (-(-m // tile[1]), -(-n // tile[0]))
    return tile, tiles, *_splits(tiles[0] * tiles[1], steps, processors)


@torch.library.custom_op("quantload::weight_only_gemm", mutates_args=())
def _gemm(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    offset: Tensor | None,
    outer: Tensor | None,
    columns: Tensor | None,
    table: Tensor | None,
    bias: Tensor | None,
    block_rows: int,
    slices_per_group: int,
    code_bias: int,
    nibbles: bool,
) -> Tensor:
    """Multiply x [M, K] with the parts of a `PackedWeight`; returns [M, N] in x's dtype."""
    out = x.new_empty(x.shape[0], codes.shape[1])
    if x.shape[0] == 0:
        return out
    parts = (codes, scale, zero, offset, outer, columns, table, bias)
    numbers = (block_rows, slices_per_group, code_bias, nibbles)
    with torch.cuda.device_of(x):
        if _INTERPRETED and x.dtype == torch.bfloat16:
            # NOTE: the interpreter holds bfloat16 as raw integers, and would multiply those.
            in_float32 = out.float()
            _launch(x.float().contiguous(), in_float32, *parts, *numbers)
            out.copy_(in_float32)
        else:
            _launch(x if x.stride(1) == 1 else x.contiguous(), out, *parts, *numbers)
    return out


def _launch(
    x, out, codes, scale, zero, offset, outer, columns, table, bias,
    block_rows, slices_per_group, code_bias, nibbles,
) -> None:  # fmt: skip
    (m, k), (steps, n, width), (groups, blocks) = x.shape, codes.shape, scale.shape
    (bn, bm, warps, stages), tiles, splits, each = _plan(m, codes, x.dtype, nibbles)
    target = out if splits == 1 else out.new_empty((splits, m, n), dtype=torch.float32)
    _gemm_kernel[(*tiles, splits)](
        x, codes, scale, zero, offset, outer, columns, table, bias, target,
        m, n, k, groups, blocks, x.stride(0), steps, each, slices_per_group, block_rows,
        BN=bn, BM=bm, C=width, PER_BYTE=2 if nibbles else 1,
        BIAS=code_bias, PER_GROUP=groups > 1, SPLIT=splits > 1,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if splits > 1:
        _sum_splits_kernel[(-(-m * n // 1024),)](
            target, outer, bias, out, m * n, n, splits, BLOCK=1024
        )


@_gemm.register_fake
def _(x: Tensor, codes: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape[0], codes.shape[1])


def weight_only_linear(x: Tensor, packed: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Return x @ W^T + bias.

    Args:
        x: [..., K] bfloat16, float16 or float32.
        packed: W, on x's device.
        bias: [N] float, or None.

    Returns:
        [..., N] in x's dtype.

    Raises:
        ShapeError: x is not K wide.
    """
    if x.shape[-1] != packed.in_features:
        raise ShapeError(
            f"input has `{x.shape[-1]}` features, the weight expects `{packed.in_features}`"
        )
    assert x.dtype in _DTYPES, f"inputs of {x.dtype}, which `why_not` refuses"
    y: Tensor = _gemm(
        x.reshape(-1, packed.in_features),
        packed.codes,
        packed.scale,
        packed.zero,
        packed.offset,
        packed.outer,
        packed.columns,
        packed.table,
        bias,
        packed.block_rows,
        packed.slices_per_group,
        packed.code_bias,
        packed.nibbles,
    )
    return y.reshape(*x.shape[:-1], packed.out_features)
