"""Quantizes an input on the device: codes and scales of `quant.activation`, bit for bit.

Grid: (M, shares of a row) of a scheme per token or tensor; BM rows x BG groups of a scheme in
groups. Masked: columns past K. Limit: memory; a row is read once up to 32768 columns, twice above.

Letters: M tokens, K features, G groups of features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantload.errors import ConfigError
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
    larger,
    quotient,
    rounded,
    row_reach,
    row_scale,
    scaled_codes,
    static_codes,
    why_not,
    without_zeros,
)

__all__ = ["quantize_rows", "quantize_static", "rows_reach", "why_not"]

_WIDEST = 1 << 15  # columns that a program holds at once
_PROGRAMS = 264  # two for each processor of an H200
_SHARE = 1024  # columns of a row that a program rounds at once, where several share the row
_GROUP_ELEMENTS = 4096  # of a tile of groups

# -- kernels ---------------------------------------------------------------------------------------


@triton.jit
def _ordered(x):
    """Integers in the order of the numbers; NaN is the last, or with its sign the first."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b)


@triton.jit
def _row_ends(x):
    """Smallest and largest of 0 and a row [COLUMNS], in float32."""
    places = _ordered(x)
    low, high = tl.reduce(places, 0, _smaller), tl.reduce(places, 0, larger)
    low = low ^ ((low >> 31) & 0x7FFFFFFF)
    high = high ^ ((high >> 31) & 0x7FFFFFFF)
    low, high = low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)
    return tl.where(low > 0.0, 0.0, low), tl.where(high < 0.0, 0.0, high)


@triton.jit
def _ends(x, part, K, BLOCK: tl.constexpr):
    """Ends of a row of which `part` is the first block."""
    low, high = _row_ends(part)
    columns = tl.arange(0, BLOCK)
    for start in range(BLOCK, K, BLOCK):
        more = tl.load(x + start + columns, mask=start + columns < K, other=0.0)
        low_here, high_here = _row_ends(more.to(tl.float32))
        low = tl.where((low_here < low) | (low_here != low_here), low_here, low)
        high = tl.where((high_here > high) | (high_here != high_here), high_here, high)
    return low, high


@triton.jit
def _reach(x, part, K, BLOCK: tl.constexpr):
    """[1] the largest |x| of a row of which `part` is the first block."""
    reach = row_reach(part[None, :], 1)
    columns = tl.arange(0, BLOCK)
    for start in range(BLOCK, K, BLOCK):
        more = tl.load(x + start + columns, mask=start + columns < K, other=0.0)
        here = row_reach(more.to(tl.float32)[None, :], 1)
        reach = tl.where((here > reach) | (here != here), here, reach)
    return reach


@triton.jit
def _scale_and_zero(low, high, DTYPE: tl.constexpr):
    """Scale and zero point of int8 codes of what reaches from `low` to `high`."""
    scale = rounded(quotient(rounded(high - low, DTYPE), 255.0), DTYPE)
    divisor = tl.where(scale == 0.0, 1.0, scale)
    place = rounded(-128.0 - rounded(quotient(low, divisor), DTYPE), DTYPE)
    place = tl.minimum(tl.maximum(place, -128.0), 127.0)
    place = (place + 12582912.0) - 12582912.0  # to an integer, ties to even
    place = tl.where(scale == 0.0, tl.where(low < 0.0, 127.0, 0.0), place)  # -128 - low / 0
    place = tl.where(scale != scale, 0.0, place)
    return without_zeros(scale, DTYPE), place


@triton.jit
def reach_of_rows(x, reach, K, stride_x, BLOCK: tl.constexpr):
    """Write the largest |x| of each row to reach [M]."""
    row = tl.program_id(0)
    found = tl.full((1,), 0.0, tl.float32)
    for start in range(0, K, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        part = tl.load(x + row.to(tl.int64) * stride_x + columns, mask=columns < K, other=0.0)
        here = row_reach(part.to(tl.float32)[None, :], 1)
        found = tl.where((here > found) | (here != here), here, found)
    tl.store(reach + row + tl.arange(0, 1), found)


@triton.jit(do_not_specialize=["given_step"])
def quantize_tokens(
    x, given, codes, scales, K, stride_x, given_step,
    GRID: tl.constexpr, DTYPE: tl.constexpr, ZEROS: tl.constexpr, PER_TENSOR: tl.constexpr,
    BLOCK: tl.constexpr, WRITE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Quantize one row, or WRITE columns of it again and again; `given` [M] or [1] is its reach.

    Where there are few rows, several programs share one: each looks at all of it.
    """
    row, share = tl.program_id(0), tl.program_id(1)
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    x += row.to(tl.int64) * stride_x
    codes += row.to(tl.int64) * K
    columns = tl.arange(0, BLOCK)
    part = tl.load(x + columns, mask=columns < K, other=0.0).to(tl.float32)
    if given is not None:
        reach = tl.load(given + row * given_step + tl.arange(0, 1))
        scale, zero = row_scale(reach, GRID, DTYPE), None
    elif ZEROS:
        low, high = _ends(x, part, K, BLOCK)
        scale, zero = _scale_and_zero(low, high, DTYPE)
    else:
        scale, zero = row_scale(_reach(x, part, K, BLOCK), GRID, DTYPE), None
    if share == 0:
        if ZEROS:
            tl.store(scales + 2 * row, scale)
            tl.store(scales + 2 * row + 1, zero)
        elif not PER_TENSOR:
            tl.store(scales + row + tl.arange(0, 1), scale)
        elif row == 0:
            tl.store(scales + tl.arange(0, 1), scale)
    if WRITE == 0:
        tl.store(codes + columns, scaled_codes(part, scale, zero, GRID, DTYPE), mask=columns < K)
    else:
        places = tl.arange(0, WRITE)
        for start in range(share * WRITE, K, tl.num_programs(1) * WRITE):
            inside = start + places < K
            again = tl.load(x + start + places, mask=inside, other=0.0).to(tl.float32)
            found = scaled_codes(again, scale, zero, GRID, DTYPE)
            tl.store(codes + start + places, found, mask=inside)


@triton.jit(do_not_specialize=["M", "G", "step_m", "step_g"])
def quantize_groups(
    x, codes, scales, M, K, G, stride_x, step_m, step_g,
    GRID: tl.constexpr, DTYPE: tl.constexpr, POWERS: tl.constexpr,
    SIZE: tl.constexpr, BM: tl.constexpr, BG: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Quantize BM rows x BG groups; scales of rows are step_m apart, of groups step_g."""
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    g = tl.program_id(1) * BG + tl.arange(0, BG)
    k = g[None, :, None] * SIZE + tl.arange(0, SIZE)[None, None, :]
    inside = (m < M)[:, None, None] & (k < K)
    part = tl.load(x + m.to(tl.int64)[:, None, None] * stride_x + k, mask=inside, other=0.0)
    found, scale = group_codes(part.to(tl.float32), GRID, DTYPE, POWERS)
    tl.store(codes + m.to(tl.int64)[:, None, None] * K + k, found, mask=inside)
    inside = (m < M)[:, None] & (g < G)[None, :]
    place = scales + m.to(tl.int64)[:, None] * step_m + g.to(tl.int64)[None, :] * step_g
    tl.store(place, scale, mask=inside)


@triton.jit(do_not_specialize=["M"])
def quantize_fixed(
    x, scale, zero, codes, M, K, stride_x,
    GRID: tl.constexpr, DTYPE: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Quantize a tile with the fixed scale [1]."""
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    inside = (m < M)[:, None] & (k < K)[None, :]
    part = tl.load(x + m.to(tl.int64)[:, None] * stride_x + k[None, :], mask=inside, other=0.0)
    place = None if zero is None else tl.load(zero).to(tl.float32)
    found = static_codes(part.to(tl.float32), tl.load(scale).to(tl.float32), place, GRID, DTYPE)
    tl.store(codes + m.to(tl.int64)[:, None] * K + k[None, :], found, mask=inside)


# -- launch ----------------------------------------------------------------------------------------


def quantize_rows(
    x: Tensor, scheme: InputScheme, *, reach: Tensor | None = None, by_group: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantize an input dynamically.

    Args:
        x: [M, K] bfloat16, float16 or float32.
        scheme: What `why_not` does not refuse, dynamic.
        reach: [M] or [1] float32, the largest |x| of what shares a scale, where x is only a part of
            it; symmetric schemes per token or tensor only.
        by_group: Scales of a group lie side by side, as cuBLASLt reads them.

    Returns:
        Codes [M, K], contiguous, and float32 scales: [M, 1] per token, [1] per tensor,
        [M, ceil(K / size)] in groups. With zero points [M, 2]: the scale, and the zero point in
        units of a code.

    Raises:
        ConfigError: The scheme is static, or `why_not` refuses it.
    """
    refusal = why_not(scheme, x.dtype)
    if refusal is not None or not scheme.dynamic:
        raise ConfigError(refusal or "a static input scheme takes its scale from the checkpoint")
    size = scheme.group_size or 0 if scheme.granularity == "group" else 0
    if scheme.granularity == "tensor":
        reach = rows_reach(x).amax(dim=0, keepdim=True) if reach is None else reach
    codes: Tensor
    scales: Tensor
    codes, scales = _quantize(
        x, reach, scheme.grid == E4M3, size, scheme.scale == "e8m0", not scheme.symmetric,
        scheme.granularity == "tensor", by_group,
    )  # fmt: skip
    return codes, scales


def rows_reach(x: Tensor) -> Tensor:
    """Return the largest |x| of each row of x [M, K]: [M] float32, NaN where the row has NaN."""
    reach: Tensor = _rows_reach(x)
    return reach


def quantize_static(x: Tensor, scheme: InputScheme, scale: Tensor, zero: Tensor | None) -> Tensor:
    """Return the codes [M, K] of x for the scale [1] and zero point [1] of a checkpoint.

    Args:
        x: [M, K] bfloat16, float16 or float32.
        scheme: Says the grid of the codes.
        scale: [1] float, a multiplier.
        zero: [1], in units of a code, or None.
    """
    codes: Tensor = _static(x, scale, zero, scheme.grid == E4M3)
    return codes


def _rows(x: Tensor) -> Tensor:
    """Rows whose columns lie side by side; in the interpreter float32, which has bfloat16."""
    x = x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    return x.float() if INTERPRETED.value and x.dtype == torch.bfloat16 else x


def _warps(block: int) -> int:
    return 4 if block <= 2048 else 8 if block <= 8192 else 16


@torch.library.custom_op("quantload::rows_reach", mutates_args=())
def _rows_reach(x: Tensor) -> Tensor:
    out = x.new_zeros(x.shape[0], dtype=torch.float32)
    if out.numel() and x.shape[1]:
        block = min(triton.next_power_of_2(x.shape[1]), 8192)
        with torch.cuda.device_of(x):
            rows = _rows(x)
            reach_of_rows[(len(rows),)](
                rows, out, x.shape[1], rows.stride(0), BLOCK=block, num_warps=_warps(block)
            )
    return out


@_rows_reach.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], dtype=torch.float32)


@torch.library.custom_op("quantload::quantize_rows", mutates_args=())
def _quantize(
    x: Tensor,
    reach: Tensor | None,
    floats: bool,
    group_size: int,
    powers: bool,
    zeros: bool,
    per_tensor: bool,
    by_group: bool,
) -> tuple[Tensor, Tensor]:
    codes, scales = _outputs(x, floats, group_size, zeros, per_tensor, by_group)
    if codes.numel():
        with torch.cuda.device_of(x):
            bits, rows, dtype = codes.view(torch.int8), _rows(x), DTYPES[x.dtype]
            grid = E4M3_GRID if floats else INT8_GRID
            if group_size:
                _launch_groups(rows, bits, scales, dtype, grid, group_size, powers)
            else:
                _launch_tokens(rows, reach, bits, scales, dtype, grid, zeros, per_tensor)
    return codes, scales


def _launch_groups(
    rows: Tensor, bits: Tensor, scales: Tensor, dtype: object, grid: object, size: int, powers: bool
) -> None:
    (m, k), groups, early = rows.shape, scales.shape[1], launches_early(rows.device)
    bg = min(triton.next_power_of_2(groups), 2048 // size)
    bm = min(triton.next_power_of_2(m), _GROUP_ELEMENTS // (size * bg))
    quantize_groups[(triton.cdiv(m, bm), triton.cdiv(groups, bg))](
        rows, bits, scales, m, k, groups, rows.stride(0), *scales.stride(), GRID=grid,
        DTYPE=dtype, POWERS=powers, SIZE=size, BM=bm, BG=bg, EARLY=early, num_warps=4,
        launch_pdl=early,
    )  # fmt: skip


def _launch_tokens(
    rows: Tensor, reach: Tensor | None, bits: Tensor, scales: Tensor, dtype: object, grid: object,
    zeros: bool, per_tensor: bool,
) -> None:  # fmt: skip
    (m, k), early = rows.shape, launches_early(rows.device)
    block = min(triton.next_power_of_2(k), _WIDEST)
    step = 0 if reach is None or reach.numel() == 1 else 1
    shares = max(1, min(_PROGRAMS // m, k // _SHARE)) if block >= k else 1
    write = block if block < k else _SHARE if shares > 1 else 0
    quantize_tokens[(m, shares)](
        rows, reach, bits, scales, k, rows.stride(0), step, GRID=grid, DTYPE=dtype, ZEROS=zeros,
        PER_TENSOR=per_tensor, BLOCK=block, EARLY=early,
        WRITE=write, num_warps=_warps(block),
        launch_pdl=early,
    )  # fmt: skip


def _outputs(
    x: Tensor, floats: bool, group_size: int, zeros: bool, per_tensor: bool, by_group: bool
) -> tuple[Tensor, Tensor]:
    codes = torch.empty(x.shape, dtype=E4M3.storage if floats else torch.int8, device=x.device)
    if group_size and by_group:
        groups = -(-x.shape[1] // group_size)
        return codes, x.new_empty([groups, x.shape[0]], dtype=torch.float32).t()
    shape = [x.shape[0], 2 if zeros else -(-x.shape[1] // group_size) if group_size else 1]
    return codes, x.new_empty([1] if per_tensor else shape, dtype=torch.float32)


@_quantize.register_fake
def _(
    x: Tensor,
    reach: Tensor | None,
    floats: bool,
    group_size: int,
    powers: bool,
    zeros: bool,
    per_tensor: bool,
    by_group: bool,
) -> tuple[Tensor, Tensor]:
    return _outputs(x, floats, group_size, zeros, per_tensor, by_group)


@torch.library.custom_op("quantload::quantize_static", mutates_args=())
def _static(x: Tensor, scale: Tensor, zero: Tensor | None, floats: bool) -> Tensor:
    codes = torch.empty(x.shape, dtype=E4M3.storage if floats else torch.int8, device=x.device)
    if codes.numel():
        (m, k), early = x.shape, launches_early(x.device)
        dtype = DTYPES[torch.promote_types(x.dtype, scale.dtype)]
        bk = min(triton.next_power_of_2(k), 1024)
        with torch.cuda.device_of(x):
            rows = _rows(x)
            quantize_fixed[(m, triton.cdiv(k, bk))](
                rows, scale.float(), zero, codes.view(torch.int8), m, k, rows.stride(0),
                GRID=E4M3_GRID if floats else INT8_GRID, DTYPE=dtype, BM=1, BK=bk, EARLY=early,
                num_warps=4, launch_pdl=early,
            )  # fmt: skip
    return codes


@_static.register_fake
def _(x: Tensor, scale: Tensor, zero: Tensor | None, floats: bool) -> Tensor:
    return torch.empty(x.shape, dtype=E4M3.storage if floats else torch.int8, device=x.device)
