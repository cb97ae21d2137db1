"""GEMM of rounded inputs with weights of up to four bits: W4A8 with int8 or e4m3 inputs.

    y[m, n] = x_scale[m] * outer[n] * sum over groups g of
                  scale[g, r] * sum over k in g of operand(nibble[n, k]) * code(x[m, k])  + bias[n]

The layout is that of `nibble_rounded_layout`: nibbles become int8 or e4m3 in registers and meet the
codes of x in tensor-core products of bytes. With int8 the sum of a group is exact. The tensor core
adds e4m3 products with about 14 bits, so each block of 2 C columns is added to a float32 sum of its
own. Each output is summed in a fixed order.

Grid: (tiles of M and N, parts of K). A tile is BN rows of W by BM tokens: the transposed product,
whose wide side is the weight. Where K is cut, parts go to scratch and the last program of a tile
sums them in order. Masked: tokens past M, columns past K; rows past N repeat the last row and are
not stored. Nothing must be aligned. Limit: memory up to about 64 tokens, tensor cores above; with
many tokens the caller dequantizes instead.

On sm_90 `pairs_hopper` does the same.

Letters: M tokens, N output features, K input features, G groups of columns, R blocks of rows (r is
that of n), C columns of a slice.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantload.errors import ShapeError
from quantload.runtime.kernels.byte_linear import store_tile, sum_of_splits
from quantload.runtime.kernels.byte_settings import card
from quantload.runtime.kernels.byte_unpack import scale_values
from quantload.runtime.kernels.nibble_rounded_layout import (
    INTERPRETED,
    PackedForBytes,
    unpack_pair,
)
from quantload.runtime.kernels.nibble_rounded_settings import Settings, settings_for
from quantload.runtime.kernels.split_locks import split_locks

__all__ = ["launch", "nibble_rounded_linear"]


@triton.jit
def _product(w, x, acc, INT: tl.constexpr):
    if INT:
        return tl.dot(w, x, acc, out_dtype=tl.int32)
    else:
        return tl.dot(w, x, acc, input_precision="ieee")


@triton.jit
def _first_product(w, x, INT: tl.constexpr):
    if INT:
        return tl.dot(w, x, out_dtype=tl.int32)
    else:
        return tl.dot(w, x, input_precision="ieee")


@triton.jit(do_not_specialize=("M", "G", "R", "blocks", "splits", "block_rows"))
def nibble_rounded_kernel(
    x, x_scale, pairs, scale, outer, bias, out, partial, locks,
    M, N, K, G, R, x_step, blocks, splits, block_rows,
    BN: tl.constexpr, BM: tl.constexpr, C: tl.constexpr, FORM: tl.constexpr, INT: tl.constexpr,
    SLICES: tl.constexpr, PAIRED: tl.constexpr, WHOLE_K: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr, GROUP_M: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Write one tile; SLICES are of one group, with PAIRED both slices of a block are."""
    tile, split = tl.program_id(0), tl.program_id(1)
    tiles_m, tiles_n = (M + BM - 1) // BM, (N + BN - 1) // BN
    band = tile // (GROUP_M * tiles_m)  # GROUP_M tiles of rows share tiles of x in the L2
    band_rows = tl.minimum(tiles_n - band * GROUP_M, GROUP_M)
    in_band = tile % (GROUP_M * tiles_m)
    n0 = (band * GROUP_M + in_band % band_rows) * BN
    n = n0 + tl.arange(0, BN)
    m = (in_band // band_rows) * BM + tl.arange(0, BM)
    c = tl.arange(0, C)
    rows = tl.minimum(n, N - 1)
    r = rows // block_rows
    first = (split * blocks) // splits
    last = ((split + 1) * blocks) // splits
    at = pairs + first.to(tl.int64) * N * C + rows[:, None] * C + c[None, :]
    x_at = x + m[None, :].to(tl.int64) * K + c[:, None]
    of_token = m[None, :] < M
    acc = tl.full((BN, BM), 0, tl.int32 if INT and scale is None else tl.float32)
    s0, s1 = 0.0, 0.0
    if scale is not None:
        s0 = tl.load(scale + tl.minimum((2 * first) // SLICES, G - 1) * R + r)
        s1 = tl.load(scale + tl.minimum((2 * first + 1) // SLICES, G - 1) * R + r)
    for block in tl.range(first, last, num_stages=STAGES):
        both = tl.load(at, eviction_policy="evict_first")
        at += N * C
        k = block * (2 * C)
        if WHOLE_K:
            x0 = tl.load(x_at + k, mask=of_token, other=0.0)
            x1 = tl.load(x_at + k + C, mask=of_token, other=0.0)
        else:
            x0 = tl.load(x_at + k, mask=of_token & (k + c < K)[:, None], other=0.0)
            x1 = tl.load(x_at + k + C, mask=of_token & (k + C + c < K)[:, None], other=0.0)
        w0, w1 = unpack_pair(both, FORM, INTERPRETED)
        if scale is None:
            if INT:
                acc = _product(w1, x1, _product(w0, x0, acc, INT), INT)
            else:
                acc += _product(w1, x1, _first_product(w0, x0, INT), INT)
        else:
            s0_now = s0
            s1_now = s1
            # scales of the next block, which nothing else would load ahead
            s0 = tl.load(scale + tl.minimum((2 * block + 2) // SLICES, G - 1) * R + r)
            part = _first_product(w0, x0, INT)
            if PAIRED:
                part = _product(w1, x1, part, INT)
                acc += part.to(tl.float32) * scale_values(s0_now)[:, None]
            else:
                s1 = tl.load(scale + tl.minimum((2 * block + 3) // SLICES, G - 1) * R + r)
                acc += part.to(tl.float32) * scale_values(s0_now)[:, None]
                part = _first_product(w1, x1, INT)
                acc += part.to(tl.float32) * scale_values(s1_now)[:, None]
    total = acc.to(tl.float32)
    is_last = True
    if SPLIT:
        parts = partial + (tile * splits).to(tl.int64) * (BN * BM)
        total, is_last = sum_of_splits(total, parts, locks + tile, split, splits, BN, BM)
    if is_last:
        of_x = tl.load(x_scale + m * x_step, mask=m < M, other=0.0)
        of_x += of_x - of_x  # what is not finite makes NaN, whatever its codes are
        total *= of_x[None, :]
        store_tile(total, rows, n, m, outer, bias, out, M, N, BM)


@triton.jit
def nibble_rounded_dequantize_kernel(
    pairs, scale, outer, out, N, K, G, R, slices_per_group, block_rows,
    BN: tl.constexpr, C: tl.constexpr, FORM: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Write BN rows of one block of 2 C columns of W [N, K], rounded once, from float32."""
    block = tl.program_id(0)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    c = tl.arange(0, C)
    rows = tl.minimum(n, N - 1)
    both = tl.load(pairs + block.to(tl.int64) * N * C + rows[:, None] * C + c[None, :])
    w0, w1 = unpack_pair(both, FORM, INTERPRETED)
    for slot in tl.static_range(2):
        values = (w0 if slot == 0 else w1).to(tl.float32)
        if scale is not None:
            group = tl.minimum((2 * block + slot) // slices_per_group, G - 1)
            found = tl.load(scale + group * R + rows // block_rows)
            values *= scale_values(found)[:, None]
        values *= tl.load(outer + rows)[:, None]
        k = block * (2 * C) + slot * C + c
        at = out + rows.to(tl.int64)[:, None] * K + k[None, :]
        tl.store(at, values.to(out.dtype.element_ty), mask=(n < N)[:, None] & (k < K)[None, :])


# -- launch ------------------------------------------------------------------------------------


@torch.library.custom_op("quantload::nibble_rounded_gemm", mutates_args=())
def _gemm(
    codes: Tensor,
    x_scale: Tensor,
    pairs: Tensor,
    scale: Tensor | None,
    outer: Tensor,
    bias: Tensor | None,
    form: str,
    block_rows: int,
    slices_per_group: int,
    dtype: torch.dtype,
) -> Tensor:
    """Multiply codes [M, K] with the parts of a `PackedForBytes`; returns [M, N] in `dtype`."""
    m, k, n = codes.shape[0], codes.shape[1], pairs.shape[1]
    out = torch.empty((m, n), dtype=dtype, device=codes.device)
    if m == 0:
        return out
    slices = 0 if scale is None else slices_per_group
    settings = settings_for(form, slices, codes.device, m, n, k, pairs.shape[2])
    parts = (pairs, scale, outer)
    with torch.cuda.device_of(codes):
        if settings.get("dequantize"):
            weight = _dequantized(parts, form, block_rows, slices_per_group, k, dtype)
            x = codes.to(dtype).mul_(x_scale.reshape(-1, 1))  # codes are exact in `dtype`
            bias = bias if bias is None else bias.to(dtype)
            return torch.nn.functional.linear(x, weight, bias)
        if card(codes.device)[2]:
            from quantload.runtime.kernels.pairs_hopper import launch_hopper

            launch_hopper(
                codes, pairs, out, scale=scale, zero=None, x_scale=x_scale, outer=outer, bias=bias,
                form=form, block_rows=block_rows, slices_per_group=slices_per_group,
                settings=settings,
            )  # fmt: skip
            return out
        # NOTE: the interpreter holds bfloat16 as raw integers
        found = out.float() if INTERPRETED.value else out
        launch(
            codes.contiguous(), x_scale, found, parts, bias, form, block_rows, slices_per_group,
            settings,
        )  # fmt: skip
    return found.to(dtype)


def launch(
    codes: Tensor,
    x_scale: Tensor,
    out: Tensor,
    parts: tuple[Tensor, Tensor | None, Tensor],
    bias: Tensor | None,
    form: str,
    block_rows: int,
    slices_per_group: int,
    settings: Settings,
) -> None:
    """Run the kernel with given settings; `parts` are pairs, scale and outer."""
    pairs, scale, outer = parts
    (m, k), (blocks, n, columns) = codes.shape, pairs.shape
    groups, row_blocks = (1, 1) if scale is None else scale.shape
    rows, tokens = settings["rows"], settings["tokens"]
    tiles = -(-m // tokens) * -(-n // rows)
    splits = min(settings["splits"], blocks)
    partial = locks = None
    if splits > 1:
        size = tiles * splits * rows * tokens
        partial = torch.empty(size, dtype=torch.float32, device=codes.device)
        locks = split_locks(codes.device, tiles)
    interpreted_floats = INTERPRETED.value and form != "int"
    nibble_rounded_kernel[(tiles, splits)](
        codes.float() if interpreted_floats else codes,
        x_scale, pairs.view(torch.int8), scale, outer, bias, out, partial, locks,
        m, n, k, groups, row_blocks, 0 if x_scale.numel() == 1 else 1, blocks, splits, block_rows,
        BN=rows, BM=tokens, C=columns, FORM=form, INT=form == "int",
        SLICES=1 if scale is None else slices_per_group,
        PAIRED=scale is None or slices_per_group % 2 == 0, WHOLE_K=k == 2 * columns * blocks,
        SPLIT=splits > 1, STAGES=settings["stages"], GROUP_M=8,
        INTERPRETED=INTERPRETED, num_warps=settings["warps"],
    )  # fmt: skip


def _dequantized(
    parts: tuple[Tensor, Tensor | None, Tensor],
    form: str,
    block_rows: int,
    slices_per_group: int,
    features: int,
    dtype: torch.dtype,
) -> Tensor:
    """The weight [N, K] in `dtype`."""
    pairs, scale, outer = parts
    blocks, n, columns = pairs.shape
    groups, row_blocks = (1, 1) if scale is None else scale.shape
    kept = torch.float32 if INTERPRETED.value else dtype
    out = torch.empty((n, features), dtype=kept, device=pairs.device)
    nibble_rounded_dequantize_kernel[(blocks, -(-n // 64))](
        pairs.view(torch.int8), scale, outer, out, n, features, groups, row_blocks,
        slices_per_group, block_rows,
        BN=64, C=columns, FORM=form, INTERPRETED=INTERPRETED, num_warps=4,
    )  # fmt: skip
    return out.to(dtype)


@_gemm.register_fake
def _(
    codes: Tensor,
    x_scale: Tensor,
    pairs: Tensor,
    scale: Tensor | None,
    outer: Tensor,
    bias: Tensor | None,
    form: str,
    block_rows: int,
    slices_per_group: int,
    dtype: torch.dtype,
) -> Tensor:
    return codes.new_empty((codes.shape[0], pairs.shape[1]), dtype=dtype)


def nibble_rounded_linear(
    codes: Tensor,
    scales: Tensor,
    packed: PackedForBytes,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """Return x @ W^T + bias for x = codes * scales.

    Args:
        codes: [M, K] int8 or float8_e4m3fn, as `packed` was made for.
        scales: [M, 1] or [1] float32.
        packed: W, on the device of `codes`.
        bias: [N] float, or None.
        dtype: Of the result, bfloat16 or float16.

    Returns:
        [M, N] in `dtype`.

    Raises:
        ShapeError: `codes` are not K wide.
    """
    if codes.shape[-1] != packed.in_features:
        raise ShapeError(
            f"input has `{codes.shape[-1]}` features, the weight expects `{packed.in_features}`"
        )
    y: Tensor = _gemm(
        codes,
        scales,
        packed.pairs,
        packed.scale,
        packed.outer,
        bias,
        packed.form,
        packed.block_rows,
        packed.slices_per_group,
        dtype,
    )
    return y
