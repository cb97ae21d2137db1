"""Signed errors of a quantized weight in units of its steps, and how often each code occurs.

A step is that of `quant/measure.py`: twice half the wider gap beside a code's value, times its
scale. Rounding to nearest leaves errors spread evenly between -0.5 and 0.5 with a mean of 0; a mean
that is not 0 is a bias, which adds up over the columns of a product.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quantload.quant.grid import Grid
from quantload.quant.measure import array_of_floats, fits_loops, has_steps, spread
from quantload.quant.qtensor import QuantTensor
from quantload.quant.steps import code_table, scale_sizes

BINS_OF_A_STEP = 20
NUM_BINS = 2 * BINS_OF_A_STEP + 2  # from -1 to 1, and what lies beyond


@dataclass(frozen=True, kw_only=True, eq=False)
class StepErrors:
    """Counts of some rows of a weight; add two to merge them.

    Args:
        bins: [42] int64, elements by signed error in steps: below -1, 40 bins of 0.05 with their
            lower end, 1 and above.
        codes: [256] int64, elements by the byte of their code.
        total: Sum of the signed errors in steps; infinite or NaN if a step is 0.
        zeros: Smallest and largest zero point; 0 where there are none.
    """

    bins: Tensor
    codes: Tensor
    total: float
    zeros: tuple[float, float]

    def __add__(self, other: StepErrors) -> StepErrors:
        return StepErrors(
            bins=self.bins + other.bins,
            codes=self.codes + other.codes,
            total=self.total + other.total,
            zeros=(min(self.zeros[0], other.zeros[0]), max(self.zeros[1], other.zeros[1])),
        )

    @property
    def bias(self) -> float:
        """Mean signed error in steps."""
        return self.total / max(int(self.bins.sum()), 1)

    def rail_share(self, grid: Grid) -> float:
        """Share of elements at the ends of the grid, where values beyond are clipped.

        Around a fixed zero point both ends are equally far from it: -7 and 7 of int4, and -8.
        """
        values = code_table(grid).values
        low, high = grid.low, grid.high
        middle = self.zeros[0]
        if self.zeros[0] == self.zeros[1] and low < middle < high:
            reach = min(middle - low, high - middle)
            low, high = middle - reach, middle + reach
        at_end = (values <= low) | (values >= high)
        return int(self.codes[at_end].sum()) / max(int(self.codes.sum()), 1)

    def num_used(self, grid: Grid) -> int:
        """Number of values of the grid that occur."""
        return len(set(code_table(grid).values[self.codes > 0].tolist()))


def num_values(grid: Grid) -> int:
    """Return how many different values the codes of a grid stand for."""
    if grid.table is not None:
        return len(set(grid.table))
    if grid.is_integer:
        return round(grid.high - grid.low) + 1
    return len(set(code_table(grid).values.tolist()))


def step_errors(part: QuantTensor, values: Tensor, target: Tensor) -> StepErrors | None:
    """Count some rows; None if codes have no steps.

    Args:
        part: [N, K].
        values: [N, K], what it decodes to; finite.
        target: [N, K], what was quantized; finite.
    """
    if not has_steps(part.grid):
        return None
    zeros = (0.0, 0.0)
    if part.zero is not None:
        of_weight = part.zero.to(torch.float32)
        zeros = float(of_weight.min()), float(of_weight.max())
    found = _count_compiled(part, values, target)
    bins, codes, total = _count_plainly(part, values, target) if found is None else found
    return StepErrors(bins=bins, codes=codes, total=total, zeros=zeros)


_Counts = tuple[Tensor, Tensor, float]


def _count_plainly(part: QuantTensor, values: Tensor, target: Tensor) -> _Counts:
    codes = part.codes.view(torch.uint8).to(torch.int32)
    size = spread(part, part.multiplier.to(torch.float32).abs()).to(torch.float64)
    size *= 2 * code_table(part.grid).half_steps.to(codes.device)[codes]
    error = values.to(torch.float64) - target.to(torch.float64)
    steps = (error / size).nan_to_num_(nan=0.0, posinf=math.inf, neginf=-math.inf)
    places = (steps * BINS_OF_A_STEP + NUM_BINS / 2).clamp_(0, NUM_BINS - 1).to(torch.int64)
    return (
        torch.bincount(places.flatten(), minlength=NUM_BINS).cpu(),
        torch.bincount(codes.flatten(), minlength=256).cpu(),
        float(steps.sum()),
    )


def _count_compiled(part: QuantTensor, values: Tensor, target: Tensor) -> _Counts | None:
    """Count without temporaries; None where there is no loop for it."""
    sizes = scale_sizes(part)
    if sizes is None or not fits_loops(part, values, target):
        return None
    from quantload.quant.compiled_steps import count_steps  # numba: a second

    bins, codes = np.zeros(NUM_BINS, np.int64), np.zeros(256, np.int64)
    sums = np.zeros(part.shape[0])
    count_steps(
        array_of_floats(values),
        array_of_floats(target),
        part.codes.contiguous().view(torch.uint8).numpy(),
        sizes.contiguous().numpy(),
        (part.block[0] if sizes.shape[0] == part.scale.shape[0] else 1, part.block[1]),
        code_table(part.grid).half_steps.numpy(),
        float(BINS_OF_A_STEP),
        bins,
        codes,
        sums,
    )
    return torch.from_numpy(bins), torch.from_numpy(codes), float(sums.sum())


__all__ = ["BINS_OF_A_STEP", "NUM_BINS", "StepErrors", "num_values", "step_errors"]
