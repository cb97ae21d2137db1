"""Gated linear units in one pass: y = round(round(act(gate)) * up), as torch's two kernels round.

The activation is computed in float32, with the functions that torch's CUDA kernels call, and
rounded to the dtype of its input; the product of two such values is rounded once, from float32,
where it is exact for bfloat16 and float16. So the result has torch's bits if the activation has,
which `is_exact` proves by trying every input on the device. On an H200 (torch 2.11, Triton 3.6) all
have them but `gelu`, whose error function differs in the last bit of one input in 900.

Grid: (ceil(I / BLOCK), M). Masked: columns past I. Limit: memory.

Letters: M tokens, I width of gate and up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.language.extra import libdevice

from quantload.quant.scheme import InputScheme
from quantload.runtime.kernels.add_norm import (
    Codes,
    form_of,
    grid_of,
    room_for_codes,
    store_codes,
)
from quantload.runtime.kernels.dependent_launch import (
    launches_early,
    let_next_start,
    wait_for_previous,
)

__all__ = ["ACTIVATIONS", "WIDEST", "glu", "glu_codes", "is_exact"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}
WIDEST = 1 << 15  # columns that `glu_codes` takes
_BLOCK = 1024
_WARPS = 4
_TRIED_AT_ONCE = 1 << 22
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


def glu(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Return act(gate) * up.

    Args:
        gate: [..., I] bfloat16, float16 or float32; rows may be parts of wider ones.
        up: The same shape and dtype.
        activation: A name in `ACTIVATIONS`.

    Returns:
        [..., I], contiguous.
    """
    assert gate.dtype == up.dtype, f"gate of {gate.dtype}, up of {up.dtype}"
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    width = gate.shape[-1]
    gate, up = (x.reshape(-1, width) for x in (gate, up))  # slices of one product stay views
    gate, up = (x if x.stride(1) == 1 else x.contiguous() for x in (gate, up))
    tokens, early = gate.shape[0], launches_early(gate.device)
    blocks = triton.cdiv(width, _BLOCK)
    with torch.cuda.device_of(gate):
        if out.numel():
            # tokens along the axis of the grid that may be long
            _glu_kernel[(tokens, blocks)](
                gate, up, out, width, gate.stride(0), up.stride(0),
                ACT=activation, BLOCK=_BLOCK, INTERPRETED=_INTERPRETED, EARLY=early,
                num_warps=_WARPS,
                **({"launch_pdl": True} if early else {}),
            )  # fmt: skip
    return out


def glu_codes(
    gate: Tensor,
    up: Tensor,
    activation: str,
    scheme: InputScheme,
) -> Codes:
    """Return act(gate) * up, quantized: codes and scales as `quantize_rows` makes them.

    The activation may differ from torch's in its last bits before it is rounded.

    Args:
        gate: [M, I], as for `glu`; at most 32768 columns.
        up: The same shape and dtype.
        activation: A name in `ACTIVATIONS`.
        scheme: `writes_codes` is true for it.
    """
    gate, up = (x if x.stride(1) == 1 else x.contiguous() for x in (gate, up))
    return Codes(*_glu_codes(gate, up, activation, form_of(scheme)))


@torch.library.custom_op("quantload::glu_codes", mutates_args=())
def _glu_codes(gate: Tensor, up: Tensor, activation: str, form: list[int]) -> tuple[Tensor, Tensor]:
    tokens, width = gate.shape
    codes, scales = room_for_codes(gate, tokens, width, form)
    block, early = triton.next_power_of_2(width), launches_early(gate.device)
    assert block <= WIDEST, f"rows of {width}"
    warps = min(max(block // 512, 1), 32)
    with torch.cuda.device_of(gate):
        if codes.numel():
            _glu_codes_kernel[(tokens,)](
                gate, up, codes, scales, width, gate.stride(0), up.stride(0),
                ACT=activation, BLOCK=block, GRID=grid_of(form), GROUP=form[1],
                INTERPRETED=_INTERPRETED, EARLY=early,
                num_warps=warps, **({"launch_pdl": True} if early else {}),
            )  # fmt: skip
    return codes, scales


@_glu_codes.register_fake
def _(gate, up, activation, form):
    tokens, width = gate.shape
    return room_for_codes(gate, tokens, width, form)


@triton.jit
def _activated(x, ACT: tl.constexpr, INTERPRETED: tl.constexpr, EXACT: tl.constexpr):
    """The activation of float32 numbers; EXACT as torch's kernels compute it."""
    if ACT == "silu" and not EXACT:
        y = x / (1.0 + tl.exp(-x))
    elif ACT == "silu":
        # NOTE: the interpreter has no device library; there the bits are those of numpy
        power = tl.exp(-x) if INTERPRETED else libdevice.exp(-x)
        y = x / (1.0 + power) if INTERPRETED else tl.div_rn(x, 1.0 + power)
    elif ACT == "gelu":
        part = x * 0.70710678118654752440
        y = x * 0.5 * (1.0 + (tl.erf(part) if INTERPRETED else libdevice.erf(part)))
    elif ACT == "gelu_tanh":
        inner = 0.79788456080286535588 * (x + 0.044715 * (x * x * x))
        power = tl.exp(-2.0 * tl.abs(inner)) if INTERPRETED else 0.0
        size = (1.0 - power) / (1.0 + power) if INTERPRETED else 0.0
        sign = tl.where(inner < 0.0, -1.0, 1.0)
        y = 0.5 * x * (1.0 + (sign * size if INTERPRETED else libdevice.tanh(inner)))
    else:
        y = tl.where(x <= 0.0, 0.0, x)  # NaN stays NaN, -0 becomes 0
    return y


@triton.jit
def _glu_kernel(
    gate, up, out, width, gate_stride, up_stride,
    ACT: tl.constexpr, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    stored = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0)
    y = _activated(stored.to(tl.float32), ACT, INTERPRETED, True)
    y = y.to(stored.dtype).to(tl.float32)
    y = y * tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _glu_codes_kernel(
    gate, up, codes, scales, width, gate_stride, up_stride,
    ACT: tl.constexpr, BLOCK: tl.constexpr, GRID: tl.constexpr, GROUP: tl.constexpr,
    INTERPRETED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    stored = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0)
    other = tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    y = _activated(stored.to(tl.float32), ACT, INTERPRETED, False).to(stored.dtype).to(tl.float32)
    y = tl.where(inside, (y * other).to(stored.dtype).to(tl.float32), 0.0)
    store_codes(codes, scales, y, row, width, stored.dtype, BLOCK, GRID, GROUP)


@functools.cache
def is_exact(activation: str, dtype: torch.dtype, device: torch.device) -> bool:
    """True if the kernel gives the bits of torch's two operations on `device`, whatever the input.

    Every gate is tried: 2^16, or for float32 2^32 (some tenths of a second).

    Args:
        activation: A name in `ACTIVATIONS`.
        dtype: bfloat16, float16 or float32.
        device: A CUDA device.
    """
    bits = 8 * dtype.itemsize
    storage = torch.int16 if bits == 16 else torch.int32
    step = min(1 << bits, _TRIED_AT_ONCE)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for start in range(-(1 << bits - 1), 1 << bits - 1, step):
        values = torch.arange(start, start + step, device=device).to(storage)
        gate = values.view(dtype).view(64, -1)
        expected = ACTIVATIONS[activation](gate)
        found = glu(gate, torch.ones_like(gate), activation)
        nan = expected.isnan()
        wrong += ((expected.view(storage) != found.view(storage)) & ~nan).sum()
        wrong += (nan != found.isnan()).sum()
    return not int(wrong)
