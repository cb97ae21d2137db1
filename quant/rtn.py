"""Round to nearest with minmax scales, bit-equal to compressed-tensors 0.20.1.

    symmetric    scale = max|w| / ((high - low) / 2)            code = round(w / scale)
    asymmetric   scale = (max - min) / (high - low)             code = round(w / scale + zero)
                 zero  = round(low - min / scale)

where zero is always inside [min, max]. Every operation happens in the weight's own dtype, and
rounds to it: in bfloat16, `w / scale` is a bfloat16 number before it is rounded to a code.
All-zero groups, and groups whose scale underflows, get the dtype's eps as their scale.

Source: `calculate_qparams` and `quantize` of compressed-tensors 0.20.1, `memoryless_minmax` of
llm-compressor 0.14.

Letters: R blocks of rows, G groups of columns, r and c rows and columns of one block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantload.errors import ConfigError, NonFiniteWeight
from quantload.quant.chunks import row_chunks
from quantload.quant.grid import Grid
from quantload.quant.qtensor import Evaluation, QuantTensor
from quantload.quant.scheme import WeightScheme


def quantize_rtn(weight: Tensor, scheme: WeightScheme) -> QuantTensor:
    """Quantize a weight to the nearest codes.

    Args:
        weight: [N, K] float dtype. Scales get its dtype.
        scheme: Grid, granularity and symmetry. A partial last block is allowed only for
            granularity "block".

    Returns:
        The quantized weight; it evaluates in the weight's dtype.

    Raises:
        ConfigError: The group size does not divide K.
        NonFiniteWeight: The weight holds NaN or infinity, or max - min overflows its dtype.
    """
    quantized = round_to_nearest(weight, scheme)
    if not bool(quantized.scale.isfinite().all()):  # min and max carry NaN into the scale
        raise _not_finite(weight)
    return quantized


def round_to_nearest(tensor: Tensor, scheme: WeightScheme) -> QuantTensor:
    """Quantize without a look at the values: nothing waits for the device.

    Args:
        tensor: [N, K] float dtype. Where a block holds NaN or infinity, its scale is not finite
            and its codes mean nothing.
        scheme: As in `quantize_rtn`.

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
    codes = torch.empty(tensor.shape, dtype=scheme.grid.storage, device=tensor.device)
    scales, zeros = [], []
    for start, stop in row_chunks((n_rows, n_columns), tensor.device, multiple=block[0]):
        blocks = as_blocks(tensor[start:stop], block)
        scale, zero = minmax_scale(blocks, scheme.grid, symmetric=scheme.symmetric)
        rounded = scheme.grid.round(scaled_blocks(blocks, scale, zero))
        codes[start:stop] = rounded.flatten(2).flatten(0, 1)[: stop - start, :n_columns]
        scales.append(scale)
        zeros += [] if zero is None else [zero]
    return QuantTensor(
        grid=scheme.grid,
        codes=codes,
        scale=torch.cat(scales),
        zero=torch.cat(zeros) if zeros else None,
        block=block,
        evaluation=Evaluation(dtype=tensor.dtype),
    )


def as_blocks(tensor: Tensor, block: tuple[int, int]) -> Tensor:
    """View [N, K] as [R, r, G, c]; partial blocks are filled with zeros."""
    n_rows, n_columns = tensor.shape
    missing = (-n_rows % block[0], -n_columns % block[1])
    if any(missing):
        tensor = torch.nn.functional.pad(tensor, (0, missing[1], 0, missing[0]))
    return torch.unflatten(torch.unflatten(tensor, 1, (-1, block[1])), 0, (-1, block[0]))


def minmax_scale(blocks: Tensor, grid: Grid, *, symmetric: bool) -> tuple[Tensor, Tensor | None]:
    """Return scale and zero point of each block.

    Args:
        blocks: [R, r, G, c] float dtype.
        grid: Its range is spread over the values of a block.
        symmetric: True if there is no zero point.

    Returns:
        Scale [R, G] in the dtype of the blocks; zero [R, G] in the grid's storage dtype, or None.
    """
    low, high = blocks.amin(dim=(1, 3)), blocks.amax(dim=(1, 3))
    nothing = torch.zeros_like(low)
    low, high = torch.minimum(low, nothing), torch.maximum(high, nothing)
    # NOTE: the divisor is a tensor on the same device. CUDA divides by a Python number through
    # its reciprocal, which rounds differently.
    steps = torch.full((), grid.high - grid.low, dtype=low.dtype, device=low.device)
    if symmetric:
        return _without_zeros(torch.maximum(low.abs(), high.abs()) / (steps / 2)), None
    scale = (high - low) / steps
    zero = (grid.low - low / scale).clamp(grid.low, grid.high).nan_to_num(0.0)  # 0 / 0: all zero
    return _without_zeros(scale), zero.round().to(grid.storage)


def scaled_blocks(blocks: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """Return blocks / scale + zero as a new tensor [R, r, G, c], in units of a code."""
    scaled = blocks / scale[:, None, :, None]
    if zero is None:
        return scaled.add_(0.0)  # -0.0 becomes 0.0, as where the original adds a zero point of 0
    return scaled.add_(zero.to(blocks.dtype)[:, None, :, None])


def _without_zeros(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)


def _not_finite(weight: Tensor) -> NonFiniteWeight:
    count = int((~weight.isfinite()).sum())
    if count:
        return NonFiniteWeight(
            f"{count} of {weight.numel()} elements of a weight are NaN or infinite, "
            "expected finite values",
            hint="the checkpoint is damaged or was saved after a failed step; "
            "`keep` copies the tensor as it is",
        )
    return NonFiniteWeight(
        f"max - min of a block of a weight overflows `{weight.dtype}`, expected a finite scale",
        hint="convert the weight to float32 first, or take a symmetric scheme",
    )
