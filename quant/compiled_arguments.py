"""What compiled loops take: tensors as arrays, and dtypes that tell forms of numbers and grids."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quantload.quant.grid import E2M1, E2M3, E4M3, Grid
from quantload.quant.scheme import WeightScheme

# what loops call the dtypes, see `compiled_numbers`, and their mantissa bits and exponent bias
FORMS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16, torch.float32: torch.float32}
LIKE: dict[torch.dtype, np.generic] = {
    torch.bfloat16: np.uint16(0),
    torch.float16: np.int16(0),
    torch.float32: np.float32(0),
}
FLOAT_GRIDS: dict[Grid, np.generic] = {E4M3: np.uint8(0), E2M1: np.uint16(0), E2M3: np.uint32(0)}
EXPONENTS = {torch.bfloat16: (7, 127), torch.float16: (10, 15), torch.float32: (23, 127)}


def blocks_of(weight: Tensor, scheme: WeightScheme) -> tuple[tuple[int, int], tuple[int, int]]:
    """Rows and columns of a block, and numbers of blocks."""
    rows, columns = weight.shape
    height, width = scheme.block_of(rows, columns)
    return (height, width), (-(-rows // height), -(-columns // width))


def order_of(weight: Tensor) -> type[np.integer]:
    """Integers of the width of a weight's numbers."""
    return np.int32 if weight.dtype == torch.float32 else np.int16


def tag_of(grid: Grid) -> np.generic:
    """A number whose dtype tells a grid."""
    return np.int8(0) if grid.is_integer else FLOAT_GRIDS[grid]


def floats(*numbers: float) -> tuple[np.float32, ...]:
    """Numbers as float32."""
    return tuple(np.float32(number) for number in numbers)


def array_of(tensor: Tensor) -> np.ndarray:
    """The numbers of a tensor, in an integer dtype where NumPy lacks theirs."""
    return tensor.view(FORMS[tensor.dtype]).numpy()


def bytes_of(codes: Tensor) -> np.ndarray:
    """The bytes of codes of 8 bits."""
    return codes.view(torch.uint8).numpy()
