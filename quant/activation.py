"""Quantization of a layer's input while it runs, symmetric and dynamic.

    scale = max|x| / ((high - low) / 2)          x' = round(x / scale) * scale

per token, or per group of features of a token, in the input's own dtype. Source:
`compute_dynamic_scales_and_zp` and `fake_quantize` of compressed-tensors 0.20.1 (which needs a
batch axis and whole groups; here any number of leading axes and a partial last group are fine).
"""

from __future__ import annotations

from torch import Tensor

from quantload.errors import ConfigError
from quantload.quant.rtn import quantize_rtn
from quantload.quant.scheme import InputScheme, WeightScheme


def fake_quantize(x: Tensor, scheme: InputScheme) -> Tensor:
    """Quantize and dequantize an input.

    Args:
        x: [..., K] float dtype.
        scheme: A dynamic scheme per token or per group of features.

    Returns:
        [..., K] of the same dtype, each value on the scheme's grid.

    Raises:
        ConfigError: The scheme is static or asymmetric.
    """
    if not scheme.symmetric:
        raise ConfigError("asymmetric input quantization is not supported yet")
    if not scheme.dynamic:
        raise ConfigError("static input scales are not supported yet, found `dynamic = false`")
    tokens = x.reshape(-1, x.shape[-1])
    if tokens.numel() == 0:
        return x
    codes = quantize_rtn(tokens, _as_weight_scheme(scheme))
    return codes.dequantize().reshape(x.shape)


def _as_weight_scheme(scheme: InputScheme) -> WeightScheme:
    """Tokens are rows: a token scale is a channel scale, a feature group a block of one row."""
    if scheme.granularity == "group":
        assert scheme.group_size is not None, "a group scheme has a group size"
        return WeightScheme(grid=scheme.grid, granularity="block", block=(1, scheme.group_size))
    granularity = "channel" if scheme.granularity == "token" else "tensor"
    return WeightScheme(grid=scheme.grid, granularity=granularity)


def token_codes(x: Tensor, scheme: InputScheme) -> tuple[Tensor, Tensor]:
    """Quantize [M, K] per token; return codes [M, K] and scales [M, 1] in x's dtype."""
    assert scheme.granularity == "token", f"per-token codes of a {scheme.granularity} scheme"
    quantized = quantize_rtn(x, _as_weight_scheme(scheme))
    return quantized.codes, quantized.scale


__all__ = ["fake_quantize", "token_codes"]
