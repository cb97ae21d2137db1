"""GEMM of a quantized weight with inputs that are quantized too: y = x' @ W^T + bias.

    W8A8    both sides int8, or both e4m3: y[m, n] = sum over k of xc * Wc * x_scale[m] * w_scale[n]
    groups  e4m3, scales for blocks of W and groups of x: they meet the sums of their columns
            (128 x 128 blocks of DeepSeek-V3, MXFP8)

Neither code times scale is rounded on its way: sums are exact in int32, or float32, and the scales
follow. With zero points of x, sum over k of (xc - zero) * Wc = sum of xc * Wc - zero * sum of Wc.

Error: FP8 sums, relative to the sum over k of |x' * W|, 2^-12 where the tensor core adds 128 or 256
columns before float32 takes them, 2^-10 where it adds all (`EXACT` of `rounded_hopper`, and many
tokens); int8 sums are exact. Then two products in float32, and the rounding to the dtype of the
result. No order of summation depends on the run.

Letters: M tokens, N output features, K input features, G groups of columns, R blocks of rows.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from quantload.errors import ShapeError
from quantload.quant.grid import E4M3, INT8
from quantload.quant.scheme import InputScheme
from quantload.runtime.kernels import quantize
from quantload.runtime.kernels.quantize_rows import quantize_rows
from quantload.runtime.kernels.rounded_general import rounded_gemm_general
from quantload.runtime.kernels.rounded_scratch import scratch, token_step
from quantload.runtime.kernels.rounded_settings import (
    is_hopper,
    rule,
    settings_of,
    suits_library,
)
from quantload.runtime.kernels.rounded_weight import PackedRounded, pack, why_not
from quantload.runtime.kernels.scale_order import by_group
from quantload.runtime.launch_settings import Settings

__all__ = [
    "PackedRounded",
    "kernels_for",
    "multiply_rounded",
    "pack",
    "rounded_linear",
    "why_not",
]

_INTERPRETED = quantize.INTERPRETED.value


def rounded_linear(
    x: Tensor, packed: PackedRounded, input: InputScheme, bias: Tensor | None = None
) -> Tensor:
    """Return x' @ W^T + bias, x' the input as a dynamic scheme rounds it.

    Args:
        x: [..., K] bfloat16, float16 or float32.
        packed: W, on x's device.
        input: How x is quantized.
        bias: [N] float, or None.

    Returns:
        [..., N] in x's dtype.

    Raises:
        ShapeError: x is not K wide.
    """
    if x.shape[-1] != packed.codes.shape[1]:
        raise ShapeError(
            f"input has `{x.shape[-1]}` features, the weight expects `{packed.codes.shape[1]}`"
        )
    y: Tensor = _linear(
        x.reshape(-1, x.shape[-1]), packed.codes, packed.scale, packed.sums, bias, packed.group,
        packed.block_rows, packed.is_uniform, input.granularity == "tensor", input.scale == "e8m0",
    )  # fmt: skip
    return y.reshape(*x.shape[:-1], y.shape[-1])


@torch.library.custom_op("quantload::rounded_linear", mutates_args=())
def _linear(
    x: Tensor,
    w_codes: Tensor,
    w_scale: Tensor,
    w_sums: Tensor | None,
    bias: Tensor | None,
    group: int,
    block_rows: int,
    is_uniform: bool,
    per_tensor: bool,
    powers: bool,
) -> Tensor:
    out = x.new_empty(len(x), len(w_codes))
    if len(x):
        packed = PackedRounded(w_codes, w_scale, w_sums, group, block_rows, is_uniform)
        settings = settings_of(packed, len(x))
        with torch.cuda.device_of(x):
            if settings.get("fused") and w_sums is None and not per_tensor:
                from quantload.runtime.kernels.rounded_fused import launch_fused

                launch_fused(x, packed, bias, out, settings)
            else:
                input = InputScheme(
                    grid=INT8 if w_codes.dtype == torch.int8 else E4M3,
                    granularity="tensor" if per_tensor else "group" if group else "token",
                    group_size=group or None,
                    symmetric=w_sums is None,
                    scale="e8m0" if powers else "float",
                )
                codes, scales = quantize_rows(x, input, by_group=_is_ordered(packed, x, settings))
                launch(codes, scales, packed, bias, out, settings)
    return out


@_linear.register_fake
def _(
    x: Tensor,
    w_codes: Tensor,
    w_scale: Tensor,
    w_sums: Tensor | None,
    bias: Tensor | None,
    group: int,
    block_rows: int,
    is_uniform: bool,
    per_tensor: bool,
    powers: bool,
) -> Tensor:
    return x.new_empty(x.shape[0], w_codes.shape[0])


def multiply_rounded(
    codes: Tensor, scales: Tensor, packed: PackedRounded, bias: Tensor | None, *, dtype: torch.dtype
) -> Tensor:
    """Return the product [M, N] in `dtype`.

    Args:
        codes: [M, K] of the grid of W's codes, contiguous.
        scales: float32 [M, 1], [M, 2] with zero points, [1], or [M, G], as `quantize_rows` makes.
        packed: W.
        bias: [N] float, or None.
        dtype: bfloat16, float16 or float32.

    Raises:
        ShapeError: Codes and scales do not fit W.
    """
    k = packed.codes.shape[1]
    if codes.shape[1] != k or codes.dtype != packed.codes.dtype or not codes.is_contiguous():
        raise ShapeError(
            f"codes of an input are `{codes.dtype}` of shape `{tuple(codes.shape)}`, expected "
            f"contiguous `{packed.codes.dtype}` of shape [M, {k}]"
        )
    groups = -(-k // packed.group) if packed.group else 2 if packed.sums is not None else 1
    shared = () if packed.group else ((1,),) if packed.sums is None else ((1, 2),)
    if tuple(scales.shape) not in ((codes.shape[0], groups), *shared):
        raise ShapeError(
            f"scales of an input have shape `{tuple(scales.shape)}`, expected "
            f"`{(codes.shape[0], groups)}`"
        )
    y: Tensor = _gemm(
        codes, scales.contiguous(), packed.codes, packed.scale, packed.sums, bias,
        packed.group, packed.block_rows, packed.is_uniform, dtype,
    )  # fmt: skip
    return y


@torch.library.custom_op("quantload::rounded_gemm", mutates_args=())
def _gemm(
    codes: Tensor,
    scales: Tensor,
    w_codes: Tensor,
    w_scale: Tensor,
    w_sums: Tensor | None,
    bias: Tensor | None,
    group: int,
    block_rows: int,
    is_uniform: bool,
    dtype: torch.dtype,
) -> Tensor:
    out = torch.empty(len(codes), len(w_codes), dtype=dtype, device=codes.device)
    if len(codes):
        packed = PackedRounded(w_codes, w_scale, w_sums, group, block_rows, is_uniform)
        with torch.cuda.device_of(codes):
            launch(codes, scales, packed, bias, out, settings_of(packed, len(codes)))
    return out


@_gemm.register_fake
def _(
    codes: Tensor,
    scales: Tensor,
    w_codes: Tensor,
    w_scale: Tensor,
    w_sums: Tensor | None,
    bias: Tensor | None,
    group: int,
    block_rows: int,
    is_uniform: bool,
    dtype: torch.dtype,
) -> Tensor:
    return torch.empty(codes.shape[0], w_codes.shape[0], dtype=dtype, device=codes.device)


def launch(
    codes: Tensor, scales: Tensor, packed: PackedRounded, bias: Tensor | None, out: Tensor,
    settings: Settings,
) -> None:  # fmt: skip
    """Multiply with given settings into out [M, N]."""
    if not is_hopper(packed):
        target = out.float() if _INTERPRETED and out.dtype == torch.bfloat16 else out
        bias = bias.float() if _INTERPRETED and bias is not None else bias
        _launch_general(codes, scales, packed, bias, target, settings)
        if target is not out:  # NOTE: the interpreter cuts bits off where it rounds to bfloat16
            out.copy_(target)
    elif settings.get("library") and suits_library(packed, len(codes), out.dtype):
        _multiply_by_library(codes, scales, packed, bias, out)
    else:
        if settings.get("library") or settings.get("fused"):  # they do not serve this call
            settings = rule(packed, len(codes))
        _launch_own(codes, scales, packed, bias, out, settings)


def _launch_own(
    codes: Tensor, scales: Tensor, packed: PackedRounded, bias: Tensor | None, out: Tensor,
    settings: Settings,
) -> None:  # fmt: skip
    if settings.get("parts"):
        from quantload.runtime.kernels.rounded_parts import launch_parts as launch_it
    elif settings.get("wide"):
        from quantload.runtime.kernels.rounded_wide import launch_wide as launch_it
    else:
        from quantload.runtime.kernels.rounded_hopper import launch_hopper as launch_it
    launch_it(codes, scales, packed, bias, out, settings)


def _multiply_by_library(
    codes: Tensor, scales: Tensor, packed: PackedRounded, bias: Tensor | None, out: Tensor
) -> None:
    """Multiply with cuBLASLt, through torch."""
    if packed.group:
        _multiply_blocks_by_library(codes, scales, packed, bias, out)
        return
    x_scale, w_scale = scales.expand(len(codes), 1), packed.scale[None, :]
    if packed.is_uniform and scales.ndim == 1:
        x_scale, w_scale = scales, packed.scale[:1]
    torch._scaled_mm(
        codes, packed.codes.t(), scale_a=x_scale.contiguous(), scale_b=w_scale,
        bias=None if bias is None else bias.to(out.dtype), out_dtype=out.dtype,
        use_fast_accum=True, out=out,
    )  # fmt: skip


def _is_ordered(packed: PackedRounded, x: Tensor, settings: Settings) -> bool:
    """True if the product of x takes the scales of a group side by side."""
    by_library = bool(settings.get("library")) and suits_library(packed, len(x), x.dtype)
    return by_library and packed.group > 0 and len(x) % 4 == 0


def _multiply_blocks_by_library(
    codes: Tensor, scales: Tensor, packed: PackedRounded, bias: Tensor | None, out: Tensor
) -> None:
    """Multiply blocks with cuBLASLt, which takes tokens by fours: rows of any numbers are added."""
    m, k = codes.shape
    missing = -m % 4
    if missing:
        longer = codes.new_empty(m + missing, k)
        longer[:m].copy_(codes)
        codes = longer
    result = out if not missing else out.new_empty(m + missing, out.shape[1])
    if missing or scales.stride() != (1, m):
        scales = by_group(scales.contiguous(), m + missing)
    torch._scaled_mm(
        codes, packed.codes.t(), scale_a=scales,
        scale_b=packed.scale.t(), bias=None if bias is None else bias.to(out.dtype),
        out_dtype=out.dtype, out=result,
    )  # fmt: skip
    if missing:
        out.copy_(result[:m])


def _launch_general(
    codes: Tensor, scales: Tensor, packed: PackedRounded, bias: Tensor | None, out: Tensor,
    s: Settings,
) -> None:  # fmt: skip
    (m, k), n = codes.shape, out.shape[1]
    tiles = (triton.cdiv(n, s["bn"]), triton.cdiv(m, s["bm"]))
    integers, splits = codes.dtype == torch.int8, s["splits"]
    partial, locks = scratch(out.device, tiles[0] * tiles[1], s["bn"] * s["bm"], splits, integers)
    rounded_gemm_general[(*tiles, splits)](
        packed.codes.view(torch.int8), codes.view(torch.int8), packed.scale, scales, packed.sums,
        bias, out, partial, locks,
        m, n, k, splits, token_step(scales), scales.shape[-1], packed.block_rows,
        BN=s["bn"], BM=s["bm"], BK=s["bk"], GROUPS=packed.group > 0, ZEROS=packed.sums is not None,
        SPLIT=splits > 1, INTEGERS=integers, num_warps=s["warps"], num_stages=s["stages"],
    )  # fmt: skip


def kernels_for(
    packed: PackedRounded, input: InputScheme, m: int, dtype: torch.dtype
) -> tuple[str, ...]:
    """Names of the device functions that an input of m tokens in `dtype` and its product launch."""
    before = "quantize_groups" if packed.group else "quantize_tokens"
    before = before if input.dynamic else "quantize_fixed"
    if not is_hopper(packed):
        return (before, "rounded_gemm_general")
    settings = settings_of(packed, m)
    if settings.get("fused"):
        if packed.sums is None and input.granularity == "token" and input.dynamic:
            return ("rounded_gemm_fused",)
        settings = rule(packed, m)
    if settings.get("library"):
        if suits_library(packed, m, dtype):
            between = ("order_scales",) if packed.group and m % 4 else ()
            return (before, *between, "cuBLAS")
        settings = rule(packed, m)
    kind = "parts" if settings.get("parts") else "wide" if settings.get("wide") else "hopper"
    return (before, f"rounded_gemm_{kind}")
