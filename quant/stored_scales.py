"""Round to nearest on scales as a format stores them: GPTQ, AWQ, fp8 and ModelOpt.

`rtn` computes in the dtype of the weight, as compressed-tensors does, and stores scales in it.
Other formats store scales in a dtype of their own. Here every operation is one of float32, and
codes are rounded against the stored scale:

    symmetric    scale = stored(max|w| / ((high - low) / 2))    code = round(w / scale)
    asymmetric   scale = stored((max - min) / (high - low))     code = round(w / scale + zero)
                 zero  = round(low - min / scale)
    e4m3         outer = max|w| / 2688 of all that share it     code = round(w / (scale * outer))
                 scale = e4m3(max|w| / (6 * outer))

    stored       float32, or float16: first rounded to bfloat16 if that is the dtype of the weight,
                 since engines cast scales to the dtype of the model; then rounded to nearest, but
                 up below 2^-14, where float16 has so few bits that a block would be clipped

so that `code * scale` lies within half a step of the weight, and within a step at a clipped end.
e4m3 scales are those of ModelOpt, not of compressed-tensors: `outer` multiplies.

Source: `NVFP4QTensor` of ModelOpt 0.47.0 for e4m3 scales.

Letters: R blocks of rows, G groups of columns, r and c rows and columns of one block.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from quantload.errors import ConfigError, NonFiniteWeight
from quantload.quant import compiled
from quantload.quant.chunks import row_chunks
from quantload.quant.qtensor import Evaluation, QuantTensor
from quantload.quant.rtn import as_blocks, scaled_blocks
from quantload.quant.scales import BlockScales, check_range, shared_range
from quantload.quant.scheme import WeightScheme

_E4M3_SMALLEST, _E4M3_LIMIT, _E2M1_LIMIT = 2.0**-9, 448.0, 6.0


def quantize_on_stored_scales(
    weight: Tensor,
    scheme: WeightScheme,
    *,
    scale_dtype: torch.dtype,
    evaluation: Evaluation,
    shared: Tensor | None = None,
) -> QuantTensor:
    """Quantize a weight to the nearest codes, seen from the scales as they are stored.

    Args:
        weight: [N, K] bfloat16, float16 or float32; or a slice of rows of one, a multiple of the
            rows of a block.
        scheme: Grid, granularity and symmetry; scales that are floats or e4m3.
        scale_dtype: dtype in which float scales are stored: float32 or float16.
        evaluation: How readers of the format evaluate the weight.
        shared: [2] smallest and largest value of everything that shares one scale for the tensor,
            see `shared_range`; used where `scheme.shares_range`. None takes those of `weight`.

    Raises:
        ConfigError: The group size does not divide K, or the weight leaves the stated range.
        NonFiniteWeight: The weight holds NaN or infinity, or its scale overflows the stored dtype.
    """
    weight = weight.detach()
    block = scheme.block_of(weight.shape[0], weight.shape[1])
    if scheme.granularity == "group" and weight.shape[1] % block[1]:
        raise ConfigError(
            f"group size does not divide the input width: {weight.shape[1]} columns, group "
            f"{block[1]}",
            hint="take the scheme from `Scheme.fitted`, which falls to a group size that divides",
        )
    outer = given = None
    if scheme.shares_range:
        own = shared_range(weight)
        _check_range(weight, own, shared)
        reach = (own if shared is None else shared).to(torch.float32)
        if scheme.scale == "e4m3":
            outer = _outer(reach)
        else:
            given = _tensor_scale(*reach.tolist(), scheme, scale_dtype, weight.dtype)
            given = given.to(weight.device, copy=True)
    found = compiled.quantize_on_stored_scales(
        weight, scheme, scale_dtype=scale_dtype, given=given, outer=outer
    )
    if found is None:
        found = _by_torch(weight, scheme, scale_dtype, given, outer)
    codes, scale, zero = found
    _refuse_overflow(weight, scale)
    return QuantTensor(
        grid=scheme.grid,
        codes=codes,
        scale=scale,
        zero=zero,
        outer=None if outer is None else outer.reshape(1, 1),
        block=block,
        evaluation=evaluation,
    )


def _by_torch(
    weight: Tensor,
    scheme: WeightScheme,
    scale_dtype: torch.dtype,
    given: Tensor | None,
    outer: Tensor | None,
) -> compiled.Quantized:
    """Return codes [N, K], scales [R, G] as they are stored, and zero points.

    Args:
        weight: [N, K].
        scheme: As in `quantize_on_stored_scales`.
        scale_dtype: As in `quantize_on_stored_scales`.
        given: [1, 1] the scale of the tensor as it is stored, for granularity "tensor".
        outer: [1] float32, multiplies e4m3 scales.
    """
    n_rows, n_columns = weight.shape
    block = scheme.block_of(n_rows, n_columns)
    codes = torch.empty(weight.shape, dtype=scheme.grid.storage, device=weight.device)
    found: list[BlockScales] = []
    multiple = 1 if given is not None else block[0]
    for start, stop in row_chunks((n_rows, n_columns), weight.device, multiple=multiple):
        rows = (stop - start, n_columns) if given is not None else block
        blocks = as_blocks(weight[start:stop].to(torch.float32), rows)
        if outer is not None:
            scales = _e4m3_scales(blocks, outer)
        elif given is not None:
            scales = BlockScales(given, given.to(torch.float32))
        else:
            low, high = blocks.amin(dim=(1, 3)), blocks.amax(dim=(1, 3))
            scales = _float_scales(low, high, scheme, scale_dtype, weight.dtype)
        scaled = scaled_blocks(blocks, scales.divisor, scales.zero, scheme.grid)
        rounded = scheme.grid.round(scaled)
        codes[start:stop] = rounded.flatten(2).flatten(0, 1)[: stop - start, :n_columns]
        found.append(scales)
    zeros = [scales.zero for scales in found if scales.zero is not None]
    scale = given if given is not None else torch.cat([scales.stored for scales in found])
    return codes, scale, torch.cat(zeros) if zeros else None


# -- scales ----------------------------------------------------------------------------------------


@lru_cache  # slices of a weight ask for the same one
def _tensor_scale(
    low: float,
    high: float,
    scheme: WeightScheme,
    scale_dtype: torch.dtype,
    model_dtype: torch.dtype,
) -> Tensor:
    """Return the scale [1, 1] of everything that reaches from low to high, on a CPU."""
    ends = torch.tensor([low, high], device="cpu").reshape(2, 1, 1)
    return _float_scales(ends[0], ends[1], scheme, scale_dtype, model_dtype).stored


def _float_scales(
    low: Tensor,
    high: Tensor,
    scheme: WeightScheme,
    scale_dtype: torch.dtype,
    model_dtype: torch.dtype,
) -> BlockScales:
    """Return the scales of blocks that reach from low to high, [R, G] float32 each."""
    assert scheme.scale == "float", f"{scheme.scale} scales have no dtype to choose"
    grid = scheme.grid
    steps = (grid.high - grid.low) / (2 if scheme.symmetric else 1)
    low, high = low.clamp(max=0), high.clamp(min=0)
    if scheme.symmetric:
        scale = _stored(_divided(torch.maximum(-low, high), steps), scale_dtype, model_dtype)
        return BlockScales(scale, scale.to(torch.float32))
    scale = _stored(_divided(high - low, steps), scale_dtype, model_dtype)
    divisor = scale.to(torch.float32)
    zero = (grid.low - low / divisor).round_().clamp_(grid.low, grid.high)
    return BlockScales(scale, divisor, zero.to(grid.storage))


def _divided(tensor: Tensor, number: float) -> Tensor:
    # NOTE: the divisor is a tensor on the same device. CUDA divides by a Python number through
    # its reciprocal, which rounds differently.
    return tensor / torch.full((), number, dtype=tensor.dtype, device=tensor.device)


def _stored(scale: Tensor, dtype: torch.dtype, model_dtype: torch.dtype) -> Tensor:
    """Round scales [R, G] float32 to what is stored; those of zeros become its eps, as in `rtn`."""
    if dtype == torch.float16 and model_dtype == torch.bfloat16:
        scale = scale.to(torch.bfloat16).to(torch.float32)
    rounded = scale.to(dtype)
    if dtype == torch.float16:
        is_short = (rounded.to(torch.float32) < scale) & (
            scale < torch.finfo(dtype).smallest_normal
        )
        rounded = (rounded.view(torch.int16) + is_short.to(torch.int16)).view(dtype)  # the next one
    return torch.where(scale == 0, torch.finfo(dtype).eps, rounded)


def _outer(reach: Tensor) -> Tensor:
    """[1] float32, a multiplier of e4m3 scales; 1 for zeros."""
    outer = _divided(torch.maximum(-reach[0], reach[1]), _E4M3_LIMIT * _E2M1_LIMIT)
    return torch.where(outer == 0, 1.0, outer).reshape(1)


def _e4m3_scales(blocks: Tensor, outer: Tensor) -> BlockScales:
    scale = blocks.abs().amax(dim=(1, 3)) / (_E2M1_LIMIT * outer)
    scale = torch.where(scale == 0, 1.0, scale).clamp_(_E4M3_SMALLEST, _E4M3_LIMIT)
    stored = scale.to(torch.float8_e4m3fn)
    return BlockScales(stored, stored.to(torch.float32) * outer)


# -- refusals --------------------------------------------------------------------------------------


def _check_range(weight: Tensor, own: Tensor, shared: Tensor | None) -> None:
    """Refuse a weight that is not finite, or leaves the range that it should share."""
    least, greatest = own.tolist()
    if not (math.isfinite(least) and math.isfinite(greatest)):
        raise _not_finite(weight)
    if shared is not None:
        check_range(own, shared)


def _refuse_overflow(weight: Tensor, scale: Tensor) -> None:
    """Refuse scales that are not finite: min and max carry NaN and infinity of a weight into them.

    e4m3 scales do not tell, see `_check_range`.
    """
    if scale.dtype.itemsize == 1 or math.isfinite(scale.sum(dtype=torch.float64).item()):
        return
    own = shared_range(weight)
    if not bool(own.isfinite().all()):
        raise _not_finite(weight)
    lost = int((~scale.isfinite()).sum())
    raise NonFiniteWeight(
        f"{lost} of {scale.numel()} scales of a weight that reaches from {float(own[0]):.4g} "
        f"to {float(own[1]):.4g} overflow `{scale.dtype}`, in which the format stores them",
        hint="keep the weight in full precision, or write a format with wider scales",
    )


def _not_finite(weight: Tensor) -> NonFiniteWeight:
    count = int((~weight.isfinite()).sum())
    return NonFiniteWeight(
        f"{count} of {weight.numel()} elements of a weight are NaN or infinite, expected finite "
        "values",
        hint="the checkpoint is damaged or was saved after a failed step; `keep` copies the tensor "
        "as it is",
    )


__all__ = ["quantize_on_stored_scales"]
