"""Rounds an input to the grid of its scheme in one launch: codes times scales, in its own dtype.

It is `quant.activation.fake_quantize` bit for bit, but for the sign of zeros, for symmetric dynamic
schemes per token or in groups of features. Of a row or group with NaN or infinity all is NaN.

Grid: one program for each row; BM rows x BG groups of a scheme in groups. Masked: columns past K.
Limit: memory.

Letters: M rows, K features, G groups of features.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantload.quant.grid import E4M3
from quantload.quant.scheme import InputScheme
from quantload.runtime.kernels.dependent_launch import (
    launches_early,
    let_next_start,
    wait_for_previous,
)
from quantload.runtime.kernels.quantize import (
    DTYPES,
    E4M3_GRID,
    INT8_GRID,
    INTERPRETED,
    group_codes,
    rounded,
    row_codes,
)
from quantload.runtime.kernels.quantize import why_not as why_no_codes

__all__ = ["kernel_names", "round_rows", "why_not"]

_WIDEST = 1 << 14  # columns that a program holds at once
_GROUP_ELEMENTS = 4096  # of a tile of groups


def why_not(scheme: InputScheme, dtype: torch.dtype, features: int) -> str | None:
    """Say why the kernels do not round inputs of `dtype` so, or None."""
    if not scheme.dynamic or not scheme.symmetric or scheme.granularity == "tensor":
        return "inputs are rounded symmetrically and dynamically, per token or group"
    if scheme.granularity == "token" and features > _WIDEST:
        return f"rows of more than {_WIDEST} features"
    return why_no_codes(scheme, dtype)


@triton.jit
def _values(codes, GRID: tl.constexpr):
    """Codes, int8, to float32."""
    if GRID == E4M3_GRID:
        if not INTERPRETED:
            return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        bits = codes.to(tl.int32)
        found = (((bits & 0x7F) << 20) | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True)
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), found * 1.329227995784916e36)
    else:
        return codes.to(tl.float32)


@triton.jit
def round_tokens_kernel(
    x, out, K, stride_x,
    GRID: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Round one row, with one scale."""
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)[None, :]
    part = tl.load(x + row * stride_x + k, mask=k < K, other=0.0).to(tl.float32)
    codes, scale = row_codes(part, GRID, DTYPE)
    y = rounded(_values(codes, GRID) * scale[:, None], DTYPE)
    tl.store(out + row * K + k, y.to(out.dtype.element_ty), mask=k < K)


@triton.jit
def round_groups_kernel(
    x, out, M, K, stride_x,
    GRID: tl.constexpr, DTYPE: tl.constexpr, POWERS: tl.constexpr,
    SIZE: tl.constexpr, BM: tl.constexpr, BG: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Round BM rows x BG groups, each with its scale."""
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    m = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)[:, None, None]
    g = tl.program_id(1) * BG + tl.arange(0, BG)
    k = g[None, :, None] * SIZE + tl.arange(0, SIZE)[None, None, :]
    inside = (m < M) & (k < K)
    part = tl.load(x + m * stride_x + k, mask=inside, other=0.0).to(tl.float32)
    codes, scale = group_codes(part, GRID, DTYPE, POWERS)
    y = rounded(_values(codes, GRID) * scale[:, :, None], DTYPE)
    tl.store(out + m * K + k, y.to(out.dtype.element_ty), mask=inside)


@torch.library.custom_op("quantload::round_rows", mutates_args=())
def _round(x: Tensor, floats: bool, size: int, powers: bool) -> Tensor:
    dtype, grid = DTYPES[x.dtype], E4M3_GRID if floats else INT8_GRID
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    is_raw = INTERPRETED.value and x.dtype == torch.bfloat16  # the interpreter has no bfloat16
    rows, found = (x.float(), out.float()) if is_raw else (x, out)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    (m, k), early = rows.shape, launches_early(x.device)
    with torch.cuda.device_of(x):
        if size:
            groups = triton.cdiv(k, size)
            bg = min(triton.next_power_of_2(groups), max(1, 2048 // size))
            bm = min(triton.next_power_of_2(m), _GROUP_ELEMENTS // (size * bg))
            round_groups_kernel[(triton.cdiv(m, bm), triton.cdiv(groups, bg))](
                rows, found, m, k, rows.stride(0), GRID=grid, DTYPE=dtype, POWERS=powers,
                SIZE=size, BM=bm, BG=bg, EARLY=early, num_warps=4, launch_pdl=early,
            )  # fmt: skip
        else:
            block = max(128, triton.next_power_of_2(k))
            round_tokens_kernel[(m,)](
                rows, found, k, rows.stride(0), GRID=grid, DTYPE=dtype, BLOCK=block, EARLY=early,
                num_warps=min(16, max(2, block // 512)), launch_pdl=early,
            )  # fmt: skip
    return out.copy_(found) if is_raw else out


@_round.register_fake
def _(x: Tensor, floats: bool, size: int, powers: bool) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def round_rows(x: Tensor, scheme: InputScheme) -> Tensor:
    """Return what a dynamic scheme makes of an input.

    Args:
        x: [..., K] bfloat16, float16 or float32.
        scheme: What `why_not` does not refuse.

    Returns:
        [..., K] of the same dtype.
    """
    assert why_not(scheme, x.dtype, x.shape[-1]) is None, "`why_not` refuses it"
    size = scheme.group_size or 0 if scheme.granularity == "group" else 0
    rows = x.detach().reshape(-1, x.shape[-1])
    found: Tensor = _round(rows, scheme.grid == E4M3, size, scheme.scale == "e8m0")
    return found.reshape(x.shape)


def kernel_names(rounding: object) -> tuple[str, ...]:
    """Return the device functions of a rounding by `round_rows` of some scheme; () of another."""
    if not isinstance(rounding, functools.partial) or rounding.func is not round_rows:
        return ()
    is_grouped = rounding.keywords["scheme"].granularity == "group"
    return ("round_groups_kernel" if is_grouped else "round_tokens_kernel",)
