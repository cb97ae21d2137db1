"""Quantization of a layer's input while it runs, in the input's own dtype.

    symmetric     x' = round(x / scale) * scale
    asymmetric    x' = (round(x / scale + zero) - zero) * scale

with scale and zero as in `rtn`, per tensor, per token, or per group of features of a token; or
fixed, as a checkpoint holds them. In MX formats the scale of a group is the power of two

    scale = 2^(floor(log2(max|x|)) - floor(log2(high)))

one more where the largest |x| is 1.75 times its power of two or above.

Source: `compute_dynamic_scales_and_zp`, `fake_quantize` and `generate_mx_scales` of
compressed-tensors 0.20.1, which want a batch axis and whole groups; here any leading axes and a
partial last group are fine.

NaN and infinity are not looked for, since that would wait for the device: they make their whole
token or group NaN.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quantload.errors import ConfigError
from quantload.quant.grid import Grid
from quantload.quant.rtn import as_blocks, minmax_scale, round_to_nearest, scaled_blocks
from quantload.quant.scheme import InputScheme, WeightScheme


def fake_quantize(x: Tensor, scheme: InputScheme) -> Tensor:
    """Quantize and dequantize an input.

    Args:
        x: [..., K] float dtype.
        scheme: A dynamic scheme per tensor, token or group of features.

    Returns:
        [..., K] of the same dtype, each value on the scheme's grid. What is rounded to zero from
        below is -0.0, as in the original, which never turns a code into an integer.

    Raises:
        ConfigError: The scheme is static.
    """
    if not scheme.dynamic:
        raise ConfigError(
            "a static input scheme takes its scale from the checkpoint, found `dynamic = false`"
        )
    if x.numel() == 0:
        return x
    tokens = x.detach().reshape(-1, x.shape[-1])
    n_tokens, n_features = tokens.shape
    blocks = as_blocks(tokens, _as_weight_scheme(scheme).block_of(n_tokens, n_features))
    if scheme.scale == "e8m0":
        scale, zero = _power_of_two(blocks, scheme.grid), None
    else:
        scale, zero = minmax_scale(blocks, scheme.grid, symmetric=scheme.symmetric)
    values = scheme.grid.nearest(scaled_blocks(blocks, scale, zero))
    if zero is not None:
        values -= zero.to(x.dtype)[:, None, :, None]
    values *= scale[:, None, :, None]
    return values.flatten(2).flatten(0, 1)[:, :n_features].reshape(x.shape)


def _power_of_two(blocks: Tensor, grid: Grid) -> Tensor:
    """Return the MX scale [R, G] of each block [R, r, G, c], in the dtype of the blocks."""
    mantissa, exponent = torch.frexp(blocks.abs().amax(dim=(1, 3)).to(torch.float32))
    exponent += (mantissa >= 0.875).to(exponent.dtype) - 1  # mantissas of `frexp` begin at a half
    exponent = (exponent - int(math.log2(grid.high))).clamp(-127, 127)
    scale = torch.ldexp(torch.ones_like(mantissa), exponent).to(blocks.dtype)
    scale = torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)
    return torch.where(mantissa.isfinite(), scale, torch.nan)


def fake_quantize_static(x: Tensor, grid: Grid, scale: Tensor, zero: Tensor | None) -> Tensor:
    """Quantize and dequantize an input with a fixed scale.

    Args:
        x: [..., K] float dtype.
        grid: Number grid of the codes.
        scale: [1], a multiplier; x / scale is computed in the wider of both dtypes.
        zero: [1], in units of a code, or None.

    Returns:
        [..., K] in the dtype of x.
    """
    scaled = x.detach() / scale
    if zero is not None:
        scaled = scaled + zero.to(scaled.dtype)
    values = grid.nearest(scaled)
    if zero is not None:
        values -= zero.to(values.dtype)
    return (values * scale).to(x.dtype)


def token_codes(x: Tensor, scheme: InputScheme) -> tuple[Tensor, Tensor]:
    """Quantize [M, K] per token; return codes [M, K] and scales [M, 1] in x's dtype."""
    assert scheme.granularity == "token", f"per-token codes of a {scheme.granularity} scheme"
    assert scheme.symmetric, "per-token codes come without zero points"
    quantized = round_to_nearest(x, _as_weight_scheme(scheme))
    return quantized.codes, quantized.scale


def _as_weight_scheme(scheme: InputScheme) -> WeightScheme:
    """Tokens are rows: a token scale is a channel scale, a feature group a block of one row."""
    if scheme.granularity == "group":
        assert scheme.group_size is not None, "a group scheme has a group size"
        return WeightScheme(grid=scheme.grid, granularity="block", block=(1, scheme.group_size))
    if scheme.granularity == "token":
        return WeightScheme(grid=scheme.grid, granularity="channel")
    return WeightScheme(grid=scheme.grid, granularity="tensor")


__all__ = ["fake_quantize", "fake_quantize_static", "token_codes"]
