"""GEMM with weights of one byte: y[M, N] = x[M, K] @ W[N, K]^T + bias[N], W int8 or FP8.

    y[m, n] = outer[n] * sum over groups g of
                  scale[g, r] * sum over k in g of (value(code[n, k]) - zero[g, r]) * x[m, k]

The layout is that of `byte_layout`: codes are unpacked in registers, exactly, and their products
with x and the sums are float32, so W is never rounded. Each output is summed in a fixed order.

Error: at most (K / (2 C) + K + 4) * 2^-24 * sum over k of |x| * |terms of W|, then the rounding to
x's dtype.

Grid: (tiles of M and N, parts of K). A tile is BN rows of W by BM tokens: the transposed product,
whose wide side is the weight. Where K is cut, parts go to scratch and the last program of a tile
sums them in order. Masked: tokens past M, columns past K; rows past N repeat the last row and are
not stored. Nothing must be aligned. Limit: memory up to about 64 tokens, tensor cores above; from
`MOST_FUSED` tokens on the caller dequantizes instead, which reads and writes 3 bytes a weight once.

On sm_90 `pairs_hopper` does the same.

Letters: M tokens, N output features, K input features, G groups of columns, R blocks of rows (r is
that of n), C columns of a slice, CS columns of a step of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantload.errors import ShapeError
from quantload.runtime.kernels.byte_dequantize import dequantize
from quantload.runtime.kernels.byte_layout import PackedBytes
from quantload.runtime.kernels.byte_settings import Settings, settings_for
from quantload.runtime.kernels.byte_unpack import INTERPRETED, scale_values, unpack2
from quantload.runtime.kernels.split_locks import split_locks

__all__ = ["DTYPES", "byte_linear", "launch", "store_tile", "sum_of_splits"]

DTYPES = (torch.bfloat16, torch.float16)


@triton.jit
def _group(index, slices_per_group, G):
    """The group of a slice; slices past K belong to the last."""
    return tl.minimum(index // slices_per_group, G - 1)


@triton.jit(do_not_specialize=("M", "G", "R", "blocks", "splits", "block_rows"))
def byte_gemm_kernel(  # noqa: C901 - what is not there is compiled out
    x, codes, scale, zero, outer, bias, out, partial, locks,
    M, N, K, G, R, stride_x, blocks, splits, block_rows,
    BN: tl.constexpr, BM: tl.constexpr, C: tl.constexpr, CS: tl.constexpr, FORM: tl.constexpr,
    SLICES: tl.constexpr, PAIRED: tl.constexpr, WHOLE_K: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr, GROUP_M: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Write one tile; SLICES are of one group, with PAIRED both slices of a block are."""
    STEPS: tl.constexpr = C // CS
    dtype: tl.constexpr = x.dtype.element_ty
    tile, split = tl.program_id(0), tl.program_id(1)
    tiles_m, tiles_n = (M + BM - 1) // BM, (N + BN - 1) // BN
    band = tile // (GROUP_M * tiles_m)  # GROUP_M tiles of rows share tiles of x in the L2
    band_rows = tl.minimum(tiles_n - band * GROUP_M, GROUP_M)
    in_band = tile % (GROUP_M * tiles_m)
    n0 = (band * GROUP_M + in_band % band_rows) * BN
    m0 = (in_band // band_rows) * BM
    n = n0 + tl.arange(0, BN)
    m = m0 + tl.arange(0, BM)
    c = tl.arange(0, CS)
    rows = tl.minimum(n, N - 1)
    r = rows // block_rows
    first = (split * blocks) // splits
    last = ((split + 1) * blocks) // splits
    of_rows = rows[:, None] * C + c[None, :]
    x_at = x + m[None, :].to(tl.int64) * stride_x + c[:, None]
    of_token = m[None, :] < M
    acc = tl.full((BN, BM), 0.0, tl.float32)
    s0, s1 = 0.0, 0.0
    z_row = None
    if scale is not None:
        s0 = tl.load(scale + _group(2 * first, SLICES, G) * R + r)
        s1 = tl.load(scale + _group(2 * first + 1, SLICES, G) * R + r)
    elif zero is not None:
        z_row = tl.load(zero + r)
    for step in tl.range(first * STEPS, last * STEPS, num_stages=STAGES):
        block = step // STEPS
        within = (step % STEPS) * CS
        words = tl.load(
            codes + block.to(tl.int64) * N * C + within + of_rows, eviction_policy="evict_first"
        )
        k = block * (2 * C) + within
        if WHOLE_K:
            x0 = tl.load(x_at + k, mask=of_token, other=0.0)
            x1 = tl.load(x_at + k + C, mask=of_token, other=0.0)
        else:
            x0 = tl.load(x_at + k, mask=of_token & (k + c < K)[:, None], other=0.0)
            x1 = tl.load(x_at + k + C, mask=of_token & (k + C + c < K)[:, None], other=0.0)
        s0_now = s0
        s1_now = s1
        z0 = z_row
        z1 = z_row
        if scale is not None:
            # scales of the next step, which nothing else would load ahead
            following = 2 * ((step + 1) // STEPS)
            s0 = tl.load(scale + _group(following, SLICES, G) * R + r)
            if not PAIRED:
                s1 = tl.load(scale + _group(following + 1, SLICES, G) * R + r)
        if scale is not None and zero is not None:
            z0 = tl.load(zero + _group(2 * block, SLICES, G) * R + r)
            if not PAIRED:
                z1 = tl.load(zero + _group(2 * block + 1, SLICES, G) * R + r)
        if PAIRED:
            w0, w1 = unpack2(words, z0, FORM, dtype, INTERPRETED)
            acc = _add_pair(acc, w0, w1, x0, x1, s0_now, scale is not None)
        else:
            w0, _ = unpack2(words, z0, FORM, dtype, INTERPRETED)
            _, w1 = unpack2(words, z1, FORM, dtype, INTERPRETED)
            acc += tl.dot(w0, x0, input_precision="ieee") * scale_values(s0_now)[:, None]
            acc += tl.dot(w1, x1, input_precision="ieee") * scale_values(s1_now)[:, None]
    last_one = True
    if SPLIT:
        parts = partial + (tile * splits).to(tl.int64) * (BN * BM)
        acc, last_one = sum_of_splits(acc, parts, locks + tile, split, splits, BN, BM)
    if last_one:
        store_tile(acc, rows, n, m, outer, bias, out, M, N, BM)


@triton.jit
def _add_pair(acc, w0, w1, x0, x1, s0, GROUPED: tl.constexpr):
    if GROUPED:
        part = tl.dot(w0, x0, input_precision="ieee")
        part = tl.dot(w1, x1, part, input_precision="ieee")
        acc += part * scale_values(s0)[:, None]
    else:
        acc = tl.dot(w0, x0, acc, input_precision="ieee")
        acc = tl.dot(w1, x1, acc, input_precision="ieee")
    return acc


@triton.jit
def sum_of_splits(acc, parts, lock, split, splits, BN: tl.constexpr, BM: tl.constexpr):
    """Leave acc in its part; the last program of the tile gets the sum of all, in order."""
    at = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
    tl.store(parts + split * (BN * BM) + at, acc)
    tl.debug_barrier()
    is_last = tl.atomic_add(lock, 1, sem="acq_rel") == splits - 1
    if is_last:
        acc = tl.full((BN, BM), 0.0, tl.float32)
        for i in range(splits):
            acc += tl.load(parts + i * (BN * BM) + at, cache_modifier=".cg")
        tl.atomic_xchg(lock, 0)
    return acc, is_last


@triton.jit
def store_tile(acc, rows, n, m, outer, bias, out, M, N, BM: tl.constexpr):
    """Finish sums [BN, BM] of features n and tokens m; `rows` are n, but below N."""
    if outer is not None:
        acc *= tl.load(outer + rows)[:, None]
    if bias is not None:
        acc += tl.load(bias + rows).to(tl.float32)[:, None]
    y = acc.to(out.dtype.element_ty)
    if BM >= 64:  # tiles wide enough to be turned, so that what threads store lies side by side
        at = out + m[:, None].to(tl.int64) * N + n[None, :]
        tl.store(at, y.T, mask=(m < M)[:, None] & (n < N)[None, :])
    else:
        at = out + m[None, :].to(tl.int64) * N + n[:, None]
        tl.store(at, y, mask=(m < M)[None, :] & (n < N)[:, None])


# -- launch ------------------------------------------------------------------------------------


@torch.library.custom_op("quantload::byte_gemm", mutates_args=())
def _gemm(
    x: Tensor,
    codes: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    outer: Tensor | None,
    bias: Tensor | None,
    form: str,
    block_rows: int,
    slices_per_group: int,
) -> Tensor:
    """Multiply x [M, K] with the parts of a `PackedBytes`; returns [M, N] in x's dtype."""
    out = x.new_empty(x.shape[0], codes.shape[1])
    if x.shape[0] == 0:
        return out
    m, k, n = x.shape[0], x.shape[1], codes.shape[1]
    slices = 0 if scale is None else slices_per_group
    settings = settings_for(form, slices, x.device, m, n, k, codes.shape[2])
    parts = (codes, scale, zero, outer, bias)
    with torch.cuda.device_of(x):
        if settings.get("dequantize"):
            weight = dequantize(
                parts[:4], form, block_rows, slices_per_group, features=k, dtype=x.dtype
            )
            bias = bias if bias is None else bias.to(x.dtype)
            out = torch.nn.functional.linear(x, weight, bias)
        elif INTERPRETED.value and x.dtype == torch.bfloat16:
            # NOTE: the interpreter holds bfloat16 as raw integers, and would multiply those.
            in_float32 = out.float()
            launch(
                x.float().contiguous(),
                in_float32,
                parts,
                form,
                block_rows,
                slices_per_group,
                settings,
            )
            out.copy_(in_float32)
        elif "step" not in settings:
            from quantload.runtime.kernels.pairs_hopper import launch_hopper

            launch_hopper(
                x, codes, out, scale=scale, zero=zero, x_scale=None, outer=outer, bias=bias,
                form=form, block_rows=block_rows, slices_per_group=slices_per_group,
                settings=settings,
            )  # fmt: skip
        else:
            x = x if x.stride(1) == 1 else x.contiguous()
            launch(x, out, parts, form, block_rows, slices_per_group, settings)
    return out


def launch(
    x: Tensor,
    out: Tensor,
    parts: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    form: str,
    block_rows: int,
    slices_per_group: int,
    settings: Settings,
) -> None:
    """Run the kernel with given settings; `parts` are codes, scale, zero, outer and bias."""
    codes, scale, zero, outer, bias = parts
    (m, k), (blocks, n, columns) = x.shape, codes.shape
    groups, row_blocks = (1, 1) if scale is None else scale.shape
    if scale is None and zero is not None:
        row_blocks = zero.shape[1]
    rows, tokens = settings["rows"], settings["tokens"]
    tiles = -(-m // tokens) * -(-n // rows)
    splits = min(settings["splits"], blocks)
    partial = locks = None
    if splits > 1:
        partial = x.new_empty(tiles * splits * rows * tokens, dtype=torch.float32)
        locks = split_locks(x.device, tiles)
    byte_gemm_kernel[(tiles, splits)](
        x, codes, scale, zero, outer, bias, out, partial, locks,
        m, n, k, groups, row_blocks, x.stride(0), blocks, splits, block_rows,
        BN=rows, BM=tokens, C=columns, CS=settings["step"], FORM=form,
        SLICES=1 if scale is None else slices_per_group,
        PAIRED=scale is None or slices_per_group % 2 == 0, WHOLE_K=k == 2 * columns * blocks,
        SPLIT=splits > 1, STAGES=settings["stages"], GROUP_M=8,
        INTERPRETED=INTERPRETED, num_warps=settings["warps"],
    )  # fmt: skip


@_gemm.register_fake
def _(x: Tensor, codes: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape[0], codes.shape[1])


def byte_linear(x: Tensor, packed: PackedBytes, bias: Tensor | None = None) -> Tensor:
    """Return x @ W^T + bias.

    Args:
        x: [..., K] bfloat16 or float16.
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
    assert x.dtype in DTYPES, f"inputs of {x.dtype}, which `why_not` refuses"
    y: Tensor = _gemm(
        x.reshape(-1, packed.in_features),
        packed.codes,
        packed.scale,
        packed.zero,
        packed.outer,
        bias,
        packed.form,
        packed.block_rows,
        packed.slices_per_group,
    )
    return y.reshape(*x.shape[:-1], packed.out_features)
