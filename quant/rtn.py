"""Round to nearest with minmax scales, bit-equal to compressed-tensors 0.20.1.

    symmetric    scale = max|w| / ((high - low) / 2)            code = round(w / scale)
    asymmetric   scale = (max - min) / (high - low)             code = round(w / scale + zero)
                 zero  = round(low - min / scale)
    e8m0         scale = 2^(floor(log2(max|w|)) - floor(log2(high))), one more where the largest
                 |w| is 1.75 times its power of two or above (1.9375 times for e2m3)
    e4m3         scale = e4m3(global * max|w| / high)           code = round(w / (scale / global))
                 global = 2688 / max|w| of all that share it; 2688 = 448 * 6, the largest e4m3
                 times the largest e2m1

where zero is always inside [min, max]. Every operation happens in the weight's own dtype, and
rounds to it: in bfloat16, `w / scale` is a bfloat16 number before it is rounded to a code. With
e4m3 scales it happens in float32 from `global * ...` on. Scales that are or become zero are
replaced: floats by their dtype's eps, e4m3 by 0.125, powers of two by 1. One thing differs: a
global scale that overflows float16, see `global_scale`.

One value for a whole tensor (granularity "tensor", the global scale of NVFP4) comes from the range
of everything that shares it, see `shared_range`. A weight may then be quantized in slices of rows
with the same result, and the members of a fused group get the same global scale.

Source: `calculate_qparams`, `generate_gparam`, `generate_mx_scales` and `quantize` of
compressed-tensors 0.20.1, `memoryless_minmax` and `get_global_scale` of llm-compressor 0.14.

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
from quantload.quant.grid import E2M3, Grid
from quantload.quant.qtensor import Evaluation, QuantTensor
from quantload.quant.scales import (
    BlockScales,
    block_scales,
    check_range,
    global_scale,
    minmax_scale,
    shared_range,
)
from quantload.quant.scheme import WeightScheme


def quantize_rtn(
    weight: Tensor, scheme: WeightScheme, *, shared: Tensor | None = None
) -> QuantTensor:
    """Quantize a weight to the nearest codes.

    Args:
        weight: [N, K] bfloat16, float16 or float32; or a slice of rows of one, a multiple of the
            rows of a block. Float scales get its dtype.
        scheme: Grid, granularity, symmetry and kind of scales. A partial last block is allowed only
            for granularity "block".
        shared: [2] smallest and largest value of everything that shares one scale for the tensor,
            see `shared_range`; used where `scheme.shares_range`. None takes those of `weight`.

    Returns:
        The quantized weight. It evaluates as the reader of compressed-tensors does: in the weight's
        dtype, with e8m0 scales in bfloat16, with e4m3 scales in float32, rounded to bfloat16.

    Raises:
        ConfigError: The group size does not divide K, or the weight leaves the stated range.
        NonFiniteWeight: The weight holds NaN or infinity, or its scale overflows the dtype.
    """
    if scheme.shares_range:
        own = shared_range(weight)
        if not all(map(math.isfinite, own.tolist())):  # e4m3 scales are clamped: they do not tell
            raise _not_finite(weight, scheme)
        if shared is not None:
            check_range(own, shared)
        shared = own if shared is None else shared
    quantized = _by_compiled_loops(weight, scheme, shared)
    if quantized is None:
        quantized = round_to_nearest(weight, scheme, shared=shared)
    # min and max carry NaN into the scale; of e4m3 scales the range has told
    if scheme.scale != "e4m3" and not _is_finite(quantized.scale):
        raise _not_finite(weight, scheme)
    return quantized


def round_to_nearest(
    tensor: Tensor, scheme: WeightScheme, *, shared: Tensor | None = None
) -> QuantTensor:
    """Quantize without a look at the values: nothing waits for the device.

    Args:
        tensor: [N, K] float dtype. Where a block holds NaN or infinity, its scale is not finite
            and its codes mean nothing; e4m3 scales need a finite range to tell.
        scheme: As in `quantize_rtn`.
        shared: As in `quantize_rtn`.

    Raises:
        ConfigError: The group size does not divide K.
    """
    tensor = tensor.detach()
    n_rows, n_columns = tensor.shape
    block = scheme.block_of(n_rows, n_columns)
    if scheme.granularity == "group" and n_columns % block[1]:
        raise ConfigError(
            f"group size does not divide the input width: {n_columns} columns, group {block[1]}",
            hint="take the scheme from `Scheme.fitted`, which falls to a group size that divides",
        )
    if scheme.shares_range and shared is None:
        shared = shared_range(tensor)
    outer = global_scale(shared) if shared is not None and scheme.scale == "e4m3" else None
    is_whole = scheme.granularity == "tensor"
    codes = torch.empty(tensor.shape, dtype=scheme.grid.storage, device=tensor.device)
    found: list[BlockScales] = []
    multiple = 1 if is_whole else block[0]
    for start, stop in row_chunks((n_rows, n_columns), tensor.device, multiple=multiple):
        rows = (stop - start, n_columns) if is_whole else block
        blocks = as_blocks(tensor[start:stop], rows)
        scales = block_scales(blocks, scheme, shared=shared if is_whole else None, outer=outer)
        scaled = scaled_blocks(blocks, scales.divisor, scales.zero, scheme.grid)
        rounded = scheme.grid.round(scaled)
        codes[start:stop] = rounded.flatten(2).flatten(0, 1)[: stop - start, :n_columns]
        found.append(scales)
    found = found[:1] if is_whole else found
    zeros = [scales.zero for scales in found if scales.zero is not None]
    scale, zero = (
        torch.cat([scales.stored for scales in found]),
        torch.cat(zeros) if zeros else None,
    )
    return _assembled(tensor, scheme, codes, scale, zero, outer=outer)


def _by_compiled_loops(
    weight: Tensor, scheme: WeightScheme, shared: Tensor | None
) -> QuantTensor | None:
    outer = given = None
    if shared is not None and weight.device.type == "cpu":
        if scheme.scale == "e4m3":
            outer = _global_scale(*shared.tolist(), shared.dtype).clone()
        elif scheme.granularity == "tensor":
            given = _tensor_scale(*shared.tolist(), shared.dtype, scheme.grid).clone()
    found = compiled.quantize(weight, scheme, given=given, outer=outer)
    return None if found is None else _assembled(weight, scheme, *found, outer=outer)


# Slices of a weight ask for the same ones, and each takes a dozen calls to PyTorch.


@lru_cache
def _global_scale(low: float, high: float, dtype: torch.dtype) -> Tensor:
    return global_scale(torch.tensor([low, high], dtype=dtype, device="cpu"))


@lru_cache
def _tensor_scale(low: float, high: float, dtype: torch.dtype, grid: Grid) -> Tensor:
    ends = torch.tensor([low, high], dtype=dtype, device="cpu").reshape(2, 1, 1)
    return minmax_scale(ends[0], ends[1], grid, symmetric=True)[0]


def _assembled(
    weight: Tensor,
    scheme: WeightScheme,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    *,
    outer: Tensor | None,
) -> QuantTensor:
    return QuantTensor(
        grid=scheme.grid,
        codes=codes,
        scale=scale,
        zero=zero,
        outer=None if outer is None else outer.reshape(1, 1),
        block=scheme.block_of(weight.shape[0], weight.shape[1]),
        evaluation=evaluation_of(scheme, weight.dtype),
    )


def evaluation_of(scheme: WeightScheme, dtype: torch.dtype) -> Evaluation:
    """Return how compressed-tensors evaluates a weight that was quantized in `dtype`."""
    if scheme.scale == "e8m0":
        return Evaluation(dtype=torch.bfloat16)
    if scheme.scale == "e4m3":
        floats = torch.float32
        return Evaluation(dtype=floats, outer="scale/", result=torch.bfloat16, scale=floats)
    return Evaluation(dtype=dtype)


def as_blocks(tensor: Tensor, block: tuple[int, int]) -> Tensor:
    """View [N, K] as [R, r, G, c]; partial blocks are filled with zeros."""
    n_rows, n_columns = tensor.shape
    missing = (-n_rows % block[0], -n_columns % block[1])
    if any(missing):
        tensor = torch.nn.functional.pad(tensor, (0, missing[1], 0, missing[0]))
    return torch.unflatten(torch.unflatten(tensor, 1, (-1, block[1])), 0, (-1, block[0]))


def scaled_blocks(blocks: Tensor, scale: Tensor, zero: Tensor | None, grid: Grid) -> Tensor:
    """Return blocks / scale + zero as a new tensor [R, r, G, c], in units of a code."""
    scaled = blocks / scale[:, None, :, None]
    if zero is not None:
        return scaled.add_(zero.to(blocks.dtype)[:, None, :, None])
    # -0.0 becomes 0.0, as where the original adds a zero point of 0; its e2m3 has none to add
    return scaled if grid == E2M3 else scaled.add_(0.0)


# -- refusals --------------------------------------------------------------------------------------


def _is_finite(tensor: Tensor) -> bool:
    if tensor.dtype == torch.float8_e8m0fnu:
        return int(tensor.view(torch.uint8).amax()) < 255  # NaN
    # no sum of these overflows float64, and NaN and infinity survive it
    return math.isfinite(tensor.sum(dtype=torch.float64).item())


def _not_finite(weight: Tensor, scheme: WeightScheme) -> NonFiniteWeight:
    count = int((~weight.isfinite()).sum())
    if count:
        return NonFiniteWeight(
            f"{count} of {weight.numel()} elements of a weight are NaN or infinite, "
            "expected finite values",
            hint="the checkpoint is damaged or was saved after a failed step; "
            "`keep` copies the tensor as it is",
        )
    if scheme.scale == "e8m0":
        largest = float(weight.abs().max())
        return NonFiniteWeight(
            f"a block of a weight reaches {largest:.4g}, whose power of two overflows "
            f"`{weight.dtype}`, expected a finite scale",
            hint="convert the weight to a wider dtype first, or take a scheme with float scales",
        )
    return NonFiniteWeight(
        f"max - min of a block of a weight overflows `{weight.dtype}`, expected a finite scale",
        hint="convert the weight to float32 first, or take a symmetric scheme",
    )
