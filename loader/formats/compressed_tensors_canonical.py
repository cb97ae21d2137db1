"""Canonical weights of any source in the form that compressed-tensors can hold.

The steps of `compressed_tensors_lossless`; here they only have to be possible. Whether the values
stay equal is checked there.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quantload.errors import NotLossless
from quantload.loader.formats.compressed_tensors_shapes import scale_shape, weight_of
from quantload.loader.formats.int_fields import signed
from quantload.quant.grid import Grid, int_grid
from quantload.quant.qtensor import Evaluation, OuterUse, QuantTensor
from quantload.quant.scheme import Scheme, WeightScheme


def canonical(
    tensor: QuantTensor, scheme: Scheme, scale_dtype: torch.dtype | None = None
) -> QuantTensor:
    """Return a weight as compressed-tensors would read it back from a scheme.

    Args:
        tensor: Canonical weight [N, K] of any source.
        scheme: What it is written in.
        scale_dtype: dtype of float scales; None is that in which the source computes.

    Raises:
        NotLossless: The scheme cannot hold it.
        ShapeError: Its blocks cannot be made those of the scheme.
    """
    weight = weight_of(scheme)
    if tensor.inner is not None:
        raise NotLossless("its columns have factors that are not part of the codes")
    if not _is_grid_of(tensor.grid, weight.grid):
        raise NotLossless(f"codes are `{tensor.grid.name}`, expected `{weight.grid.name}`")
    if weight.scale == "e4m3":
        return _with_global_scale(tensor)
    blocked = _blocked(_as_scaled(tensor), weight)
    zero = _zero(blocked, weight)
    dtype = scale_dtype or tensor.evaluation.dtype
    if weight.scale == "e8m0":
        dtype = torch.bfloat16
    scale = _exponents(blocked.scale) if weight.scale == "e8m0" else blocked.scale.to(dtype)
    return QuantTensor(
        grid=weight.grid,
        codes=_codes(blocked, weight.grid),
        scale=scale,
        zero=zero,
        block=blocked.block,
        group_of=blocked.group_of,
        evaluation=Evaluation(dtype=dtype),
    )


def _is_grid_of(stored: Grid, written: Grid) -> bool:
    if stored.is_integer and written.is_integer:
        return int_grid(stored.bits) == written
    return stored == written


def _as_scaled(tensor: QuantTensor) -> QuantTensor:
    """Return a weight of codes, zero points and multipliers alone."""
    working = tensor.evaluation.dtype
    outer: OuterUse = "scale*" if tensor.evaluation.outer.endswith("*") else "scale/"
    evaluation = replace(tensor.evaluation, outer=outer, values="*")
    scale = tensor.scale.to(working)
    if tensor.evaluation.values == "/":
        scale = (1 / scale.to(torch.float64)).to(working)
    elif tensor.outer is not None:
        scale = tensor.scale  # it may meet `outer` in another dtype
    folded = replace(tensor, scale=scale, evaluation=evaluation).folded()
    if folded.offset is None:
        return folded
    if bool(folded.offset.any()):
        raise NotLossless("its groups have offsets in units of a weight, not zero points")
    return replace(folded, offset=None)


def _blocked(tensor: QuantTensor, weight: WeightScheme) -> QuantTensor:
    if weight.act_order != (tensor.group_of is not None):
        raise NotLossless("columns find their group by number in one of source and scheme only")
    blocked = tensor.refined(weight.block_of(*tensor.shape))
    if tensor.group_of is None and tuple(blocked.scale.shape) != scale_shape(weight, tensor.shape):
        raise NotLossless(f"scales have shape `{tuple(blocked.scale.shape)}`")
    return blocked


def _codes(tensor: QuantTensor, grid: Grid) -> Tensor:
    if tensor.grid.storage == grid.storage:
        return tensor.codes
    return signed(tensor.codes, grid.bits)


def _zero(tensor: QuantTensor, weight: WeightScheme) -> Tensor | None:
    """Return the zero points on the written grid; None if the scheme has none."""
    grid = weight.grid
    shift = 1 << (grid.bits - 1) if tensor.grid.is_integer and tensor.grid.low == 0 else 0
    if tensor.zero is None and shift == 0 and weight.symmetric:
        return None
    zero = torch.zeros(tensor.scale.shape, dtype=torch.float64, device=tensor.device)
    if tensor.zero is not None:
        zero = tensor.zero.to(torch.float32).to(torch.float64)
    zero = zero - shift
    if weight.symmetric:
        if bool((zero != 0).any()):
            raise NotLossless("it has zero points, but its scheme is symmetric")
        return None
    stored = zero.to(torch.float32).clamp(grid.low, grid.high).to(grid.storage)
    if not bool((stored.to(torch.float64) == zero).all()):
        worst = zero[stored.to(torch.float64) != zero][0].item() + shift
        raise NotLossless(
            f"it has a zero point of {worst:g}, expected numbers of the grid from "
            f"{grid.low + shift:g} to {grid.high + shift:g}"
        )
    return stored


def _exponents(scale: Tensor) -> Tensor:
    """Return scales that are powers of two as e8m0."""
    if scale.dtype == torch.float8_e8m0fnu:
        return scale
    wide = scale.to(torch.float64)
    mantissa, exponent = torch.frexp(wide)
    number = exponent + 126  # mantissa 0.5: 2^(exponent - 1)
    if not bool(((mantissa == 0.5) & (number >= 0) & (number < 255)).all()):
        raise NotLossless("some of its scales are no powers of two from 2^-127 to 2^127")
    return number.to(torch.uint8).view(torch.float8_e8m0fnu)


# -- NVFP4 -----------------------------------------------------------------------------------------


def _with_global_scale(tensor: QuantTensor) -> QuantTensor:
    if tensor.scale.dtype != torch.float8_e4m3fn or tensor.block != (1, 16):
        raise NotLossless(
            f"NVFP4 has e4m3 scales in groups of 16, found `{tensor.scale.dtype}` in blocks of "
            f"`{tensor.block}`"
        )
    outer = torch.ones(1, 1) if tensor.outer is None else tensor.outer
    if bool((outer != outer[:1]).any()):
        raise NotLossless("NVFP4 has one global scale, but its rows have several")
    outer = outer[:1].to(torch.float32)
    dtype = torch.float32
    if tensor.evaluation.outer == "scale/":
        # scales rounded to bfloat16 are what a global scale without dimensions gives
        dtype = tensor.evaluation.dtype
    elif tensor.outer is not None:
        outer = _divisor(tensor.scale, outer)
    if dtype not in (torch.float32, torch.bfloat16):
        raise NotLossless(f"its scales are computed in `{dtype}`")
    evaluation = Evaluation(dtype=dtype, outer="scale/", result=torch.bfloat16, scale=torch.float32)
    return replace(tensor, outer=outer, evaluation=evaluation, input_scale=None, input_zero=None)


def _divisor(scale: Tensor, factor: Tensor) -> Tensor:
    """Return the float32 that scales divided by are most often the same as multiplied by `factor`.

    Args:
        scale: e4m3.
        factor: [1, 1] float32.
    """
    present = torch.unique(scale.view(torch.uint8)).view(torch.float8_e4m3fn).to(torch.float32)
    nearest = 1 / factor
    infinity = torch.tensor(torch.inf)
    divisors = [nearest, *(torch.nextafter(nearest, end) for end in (infinity, -infinity))]
    missed = [int((present / divisor != present * factor).sum()) for divisor in divisors]
    return divisors[missed.index(min(missed))]
