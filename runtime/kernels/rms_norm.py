"""RMS norm of rows: y = w * x * rsqrt(mean(x^2) + eps), in the order of operations of a model.

    late weight       round(w * round(x * r))        the norm is rounded to x's dtype, then weighed
    early weight      round(w * (x * r))             all in float32, rounded once
    offset            1 + w in place of w, added in float32

r = rsqrt(mean(x^2) + eps) in float32. The sum of squares is summed here, in another order than
torch sums: r may then differ in its last bit. With `variance` given (mean(x^2) as torch computes
it) every operation is that of torch's own kernels, correctly rounded or the same instruction, and
so are the bits of the result.

Grid: one program for each row; a row is read once. Masked: columns past the width, at most 65536.
Limit: memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["rms_norm", "why_not"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_WIDEST = 1 << 16


def why_not(width: int, device: torch.device) -> str | None:
    """Say why the kernel does not serve rows of `width` on `device`, or None."""
    if width > _WIDEST:
        return f"rows of {width} are wider than {_WIDEST}"
    return None if device.type == "cuda" else f"it runs on CUDA, not {device.type}"


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    late: bool,
    offset: bool,
    variance: Tensor | None = None,
) -> Tensor:
    """Return the norm of the rows of x.

    Args:
        x: [..., H] bfloat16, float16 or float32.
        weight: [H].
        eps: Added to the mean of squares.
        late: Round to x's dtype before weighing.
        offset: Weigh by 1 + weight.
        variance: [..., 1] float32 means of squares; None computes them.

    Returns:
        [..., H]; where the weight comes late in the wider of both dtypes, else in x's.
    """
    assert x.dtype in _DTYPES, f"rows of {x.dtype}"
    rows = x if x.ndim > 1 else x[None]
    rows = rows.reshape(-1, *rows.shape[-2:])  # a copy only where heads are not evenly spaced
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    dtype = torch.promote_types(x.dtype, weight.dtype) if late else x.dtype
    out = torch.empty(rows.shape, dtype=dtype, device=x.device)
    count, width = rows.shape[0] * rows.shape[1], rows.shape[2]
    block = triton.next_power_of_2(width)
    with torch.cuda.device_of(x):
        if count:
            _rms_norm_kernel[(count,)](
                rows,
                weight.contiguous(),
                rows if variance is None else variance.contiguous(),
                out,
                rows.shape[1],
                width,
                rows.stride(0),
                rows.stride(1),
                eps,
                LATE=late,
                OFFSET=offset,
                GIVEN=variance is not None,
                BLOCK=block,
                num_warps=min(max(block // 512, 1), 16),
            )
    return out.view(x.shape)


@triton.jit
def _add(a, b):
    return a + b


@triton.jit
def _rms_norm_kernel(
    x, weight, variance, out,
    heads, width, outer_stride, inner_stride, eps,
    LATE: tl.constexpr, OFFSET: tl.constexpr, GIVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    start = (row // heads) * outer_stride + (row % heads) * inner_stride
    stored = tl.load(x + start + columns, mask=inside, other=0.0)
    values = stored.to(tl.float32)
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if GIVEN:
        mean = tl.load(variance + row).to(tl.float32)
    else:
        mean = tl.reduce(values * values, 0, _add) / width
    values = values * tl.rsqrt(mean + eps)
    if LATE:
        values = values.to(stored.dtype).to(tl.float32)
    if OFFSET:
        w = 1.0 + w
    tl.store(out + row * width + columns, (values * w).to(out.dtype.element_ty), mask=inside)
