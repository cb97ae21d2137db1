"""Scales of blocks of a weight or an input, from their smallest and largest values.

Formulas and source: see `rtn`.

Letters: R blocks of rows, G groups of columns, r and c rows and columns of one block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from quantload.errors import ConfigError, NonFiniteWeight
from quantload.quant import compiled
from quantload.quant.chunks import row_chunks
from quantload.quant.grid import E2M3, Grid
from quantload.quant.scheme import WeightScheme

_E4M3_LIMIT, _E4M3_STAND_IN = 448.0, 0.125
_GLOBAL = 448.0 * 6.0
# Mantissa bits, exponent bias, and the integer dtype of the same width.
_FLOATS = {
    torch.bfloat16: (7, 127, torch.int16),
    torch.float16: (10, 15, torch.int16),
    torch.float32: (23, 127, torch.int32),
}


@dataclass(frozen=True)
class BlockScales:
    """The scales of some blocks.

    Args:
        stored: [R, G] as a checkpoint holds them: a float dtype, e8m0 or e4m3.
        divisor: [R, G] what the weight is divided by.
        zero: [R, G] in the grid's storage dtype, or None.
    """

    stored: Tensor
    divisor: Tensor
    zero: Tensor | None = None


# -- the range of what shares a scale --------------------------------------------------------------


def shared_range(weight: Tensor) -> Tensor:
    """Return the smallest and largest value of a weight [N, K]: [2], in its dtype.

    Of slices of a weight, or of several weights of one dtype, see `merged_range`.
    """
    weight = weight.detach()
    found = compiled.find_range(weight)
    if found is not None:
        return found
    chunks = row_chunks((weight.shape[0], weight.shape[1]), weight.device)
    return merged_range(torch.stack(weight[a:b].aminmax()) for a, b in chunks)


def merged_range(ranges: Iterable[Tensor]) -> Tensor:
    """Return the range [2] of everything that has one of these: least minimum, greatest maximum.

    NaN stays NaN.
    """
    stacked = torch.stack(list(ranges))
    return torch.stack([stacked[:, 0].amin(), stacked[:, 1].amax()])


def check_range(own: Tensor, shared: Tensor) -> None:
    """Refuse a range that is not finite, or that the weight leaves: codes would be clipped.

    Args:
        own: [2] smallest and largest value of a weight, or of some of its rows.
        shared: [2] the same of everything that shares a scale with it.

    Raises:
        NonFiniteWeight: The shared range is not finite.
        ConfigError: It does not cover the own one.
    """
    low, high, least, greatest = *shared.tolist(), *own.tolist()
    if not math.isfinite(low) or not math.isfinite(high):
        raise NonFiniteWeight(
            f"what shares a scale with a weight reaches from {low} to {high}, expected finite "
            "values",
            hint="another part of the weight, or another member of its fused group, holds NaN or "
            "infinity; `keep` copies tensors as they are",
        )
    if least < low or greatest > high:
        raise ConfigError(
            f"a weight reaches from {least:.4g} to {greatest:.4g}, but the stated range of what "
            f"shares its scale is {low:.4g} to {high:.4g}",
            hint="take `shared_range` of every part, and `merged_range` of these",
        )


def global_scale(shared: Tensor) -> Tensor:
    """Return the global scale of NVFP4, a divisor of e4m3 scales: [1] float32.

    It is computed in the dtype of the range, as compressed-tensors does. There it overflows float16
    where the largest magnitude is below 0.041, and compressed-tensors takes 1, which makes zeros of
    all weights: here it is then computed in float32. It is 1 for zeros, and where it overflows
    float32.

    Args:
        shared: [2] smallest and largest value of what shares it.
    """
    scale = _global_scale_in(shared)
    if shared.dtype == torch.float16:
        is_destroyed = scale.isinf() & (shared != 0).any()
        scale = torch.where(is_destroyed, _global_scale_in(shared.to(torch.float32)), scale)
    return torch.nan_to_num(scale, nan=1.0, posinf=1.0, neginf=1.0).reshape(1)


def _global_scale_in(shared: Tensor) -> Tensor:
    largest = torch.maximum(shared[1], -shared[0]).clamp(min=torch.finfo(shared.dtype).tiny)
    # NOTE: a product with the rounded reciprocal, as torch divides a number by a tensor.
    return (largest.reciprocal() * _GLOBAL).to(torch.float32)


# -- scales of blocks ------------------------------------------------------------------------------


def block_scales(
    blocks: Tensor, scheme: WeightScheme, *, shared: Tensor | None, outer: Tensor | None
) -> BlockScales:
    """Return the scales of blocks.

    Args:
        blocks: [R, r, G, c] float dtype.
        scheme: Its kind of scales is taken.
        shared: [2] range that all blocks share, None takes that of each block.
        outer: [1] float32, the global scale of e4m3 scales.
    """
    if shared is not None:
        low, high = shared[0].reshape(1, 1), shared[1].reshape(1, 1)
    else:
        low, high = blocks.amin(dim=(1, 3)), blocks.amax(dim=(1, 3))
    if scheme.scale == "float":
        scale, zero = minmax_scale(low, high, scheme.grid, symmetric=scheme.symmetric)
        return BlockScales(scale, scale, zero)
    assert scheme.symmetric, f"{scheme.scale} scales come without zero points"
    if scheme.scale == "e8m0":
        stored, scale = power_of_two_scale(torch.maximum(low.abs(), high.abs()), scheme.grid)
        return BlockScales(stored, scale)
    assert outer is not None, "e4m3 scales have a global scale"
    stored = e4m3_scale(torch.maximum(low.abs(), high.abs()), scheme.grid, outer)
    return BlockScales(stored, stored.to(torch.float32) / outer)


def minmax_scale(
    low: Tensor, high: Tensor, grid: Grid, *, symmetric: bool
) -> tuple[Tensor, Tensor | None]:
    """Return scale and zero point of each block.

    Args:
        low: [R, G] smallest values, float dtype.
        high: [R, G] largest values.
        grid: Its range is spread over the values of a block.
        symmetric: True if there is no zero point.

    Returns:
        Scale [R, G] in the dtype of the values; zero [R, G] in the grid's storage dtype, or None.
    """
    nothing = torch.zeros_like(low)
    low, high = torch.minimum(low, nothing), torch.maximum(high, nothing)
    steps = _steps(grid, low)
    if symmetric:
        return _without_zeros(torch.maximum(low.abs(), high.abs()) / (steps / 2)), None
    scale = (high - low) / steps
    zero = (grid.low - low / scale).clamp(grid.low, grid.high).nan_to_num(0.0)  # 0 / 0: all zero
    return _without_zeros(scale), zero.round().to(grid.storage)


def power_of_two_scale(largest: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Return the MX scale of each block.

    Args:
        largest: [R, G] largest magnitudes: bfloat16, float16 or float32.
        grid: e2m1, e2m3 or e4m3.

    Returns:
        Scale [R, G] as e8m0, NaN where a magnitude is not finite or rounds up to infinity; and in
        the dtype of the magnitudes.
    """
    mantissa_bits, bias, whole = _FLOATS[largest.dtype]
    bits = largest.view(whole).to(torch.int32)
    bits = bits + (1 << (mantissa_bits - (3 if grid == E2M3 else 1) - 1))
    field = bits >> mantissa_bits  # of subnormals 0: they have no power of two
    overflows = ~largest.isfinite() | (field >= 2 * bias + 1)
    byte = (field - bias + 127 - int(math.log2(grid.high))).clamp_(min=0)
    byte = torch.where(field == 0, 0, byte)
    scale = torch.ldexp(torch.ones_like(byte, dtype=torch.float32), byte - 127).to(largest.dtype)
    vanishes = scale == 0
    byte = torch.where(overflows, 255, torch.where(vanishes, 127, byte))
    scale = torch.where(vanishes, 1.0, torch.where(overflows, torch.nan, scale))
    return byte.to(torch.uint8).view(torch.float8_e8m0fnu), scale.to(largest.dtype)


def e4m3_scale(largest: Tensor, grid: Grid, outer: Tensor) -> Tensor:
    """Return the NVFP4 scale [R, G] of each block, e4m3.

    Args:
        largest: [R, G] largest magnitudes, float dtype.
        grid: e2m1.
        outer: [1] float32, see `global_scale`.
    """
    scale = outer * (largest / (_steps(grid, largest) / 2))
    stored = scale.clamp(-_E4M3_LIMIT, _E4M3_LIMIT).to(torch.float8_e4m3fn)
    floats = stored.to(torch.float32)
    return torch.where(floats == 0, _E4M3_STAND_IN, floats).to(torch.float8_e4m3fn)


def _steps(grid: Grid, like: Tensor) -> Tensor:
    # NOTE: the divisor is a tensor on the same device. CUDA divides by a Python number through
    # its reciprocal, which rounds differently.
    return torch.full((), grid.high - grid.low, dtype=like.dtype, device=like.device)


def _without_zeros(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)
