"""Round to nearest with minmax scales, bit-equal to compressed-tensors 0.20.1.

    symmetric    scale = max|w| / ((high - low) / 2)            code = round(w / scale)
    asymmetric   scale = (max - min) / (high - low)             code = round(w / scale + zero)
                 zero  = round(low - min / scale)

where zero is always inside [min, max]. Every operation happens in the weight's own dtype, and
rounds to it: in bfloat16, `w / scale` is a bfloat16 number before it is rounded to a code.
All-zero groups get the smallest normal step (the dtype's eps) as their scale.

Source: `calculate_qparams` and `quantize` of compressed-tensors 0.20.1, `memoryless_minmax` of
llm-compressor 0.14.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantload.errors import ConfigError
from quantload.quant.grid import Grid
from quantload.quant.qtensor import Evaluation, QuantTensor
from quantload.quant.scheme import WeightScheme


def quantize_rtn(weight: Tensor, scheme: WeightScheme) -> QuantTensor:
    """Quantize a weight to the nearest codes.

    Args:
        weight: [N, K] float dtype, finite. Scales get its dtype.
        scheme: Grid, granularity and symmetry. A partial last block is allowed only for
            granularity "block".

    Returns:
        The quantized weight; it evaluates in the weight's dtype.

    Raises:
        ConfigError: The group size does not divide K.
    """
    n_rows, n_columns = weight.shape
    block = scheme.block_of(n_rows, n_columns)
    if scheme.granularity == "group" and n_columns % block[1]:
        raise ConfigError(
            f"group size does not divide the input width: {n_columns} columns, group {block[1]}",
            hint="take the scheme from `Scheme.fitted`, which falls to a group size that divides",
        )
    blocks = _blocks(weight, block)  # [R, block rows, G, block columns]
    low, high = _range(blocks)
    scale, zero = _scale_and_zero(low, high, scheme.grid, symmetric=scheme.symmetric)
    scaled = blocks / scale[:, None, :, None]
    if zero is not None:
        scaled += zero.to(weight.dtype)[:, None, :, None]
    else:
        scaled += 0.0  # turns -0.0 into 0.0, as adding the zero point of 0 does in the original
    codes = scheme.grid.round(scaled).reshape(blocks.shape[0] * block[0], -1)
    return QuantTensor(
        grid=scheme.grid,
        codes=codes[:n_rows, :n_columns].contiguous(),
        scale=scale,
        zero=zero,
        block=block,
        evaluation=Evaluation(dtype=weight.dtype),
    )


def _blocks(weight: Tensor, block: tuple[int, int]) -> Tensor:
    """View [N, K] as [R, block rows, G, block columns]; partial blocks are filled with zeros."""
    n_rows, n_columns = weight.shape
    missing = (-n_rows % block[0], -n_columns % block[1])
    if any(missing):
        weight = torch.nn.functional.pad(weight, (0, missing[1], 0, missing[0]))
    return weight.reshape(-1, block[0], weight.shape[1] // block[1], block[1])


def _range(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """[R, G] smallest and largest value of each block; zero is always inside."""
    low, high = blocks.amin(dim=(1, 3)), blocks.amax(dim=(1, 3))
    zero = torch.zeros_like(low)
    return torch.minimum(low, zero), torch.maximum(high, zero)


def _scale_and_zero(
    low: Tensor, high: Tensor, grid: Grid, *, symmetric: bool
) -> tuple[Tensor, Tensor | None]:
    # NOTE: the divisor is a tensor on the same device. CUDA divides by a Python number through
    # its reciprocal, which rounds differently.
    steps = torch.tensor(grid.high - grid.low, dtype=low.dtype, device=low.device)
    if symmetric:
        scale = torch.maximum(low.abs(), high.abs()) / (steps / 2)
        return _without_zeros(scale), None
    scale = (high - low) / steps
    zero = (grid.low - low / scale).clamp(grid.low, grid.high).nan_to_num(0.0)  # 0 / 0: all zero
    return _without_zeros(scale), zero.round().to(grid.storage)


def _without_zeros(scale: Tensor) -> Tensor:
    eps = torch.tensor(torch.finfo(scale.dtype).eps, dtype=scale.dtype, device=scale.device)
    return torch.where(scale == 0, eps, scale)
