"""Check one quantized weight against what it was made from.

    step          the distance between neighbouring values that a code can stand for, in units of
                  the weight: the scale; for fp8 the scale times the spacing of the grid at the code
    noise         sum of squared errors, in units of what rounding makes: a twelfth of a squared
                  step for each element
    nearest       no element is further from the source than rounding to nearest leaves it

Letters: N output features, K input features.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantload.accuracy.measure import Measured, measure, spread
from quantload.quant.metrics import ErrorSums, error_sums
from quantload.quant.qtensor import QuantTensor
from quantload.quant.scheme import Scheme

# Lowest SQNR in dB that passes, by bits of the codes. Round-to-nearest reaches about 6 dB a bit
# less 4 on Gaussian weights (int4 in groups of 128: 19 to 21 dB), fp8 31 dB whatever the range. The
# margin is for rows and groups with large outliers; a damaged layer ends at 3 dB or less.
_FLOOR_DB = {2: 2.0, 3: 5.0, 4: 9.0, 5: 14.0, 6: 18.0, 7: 20.0, 8: 20.0}
_FP8_FLOOR_DB = 24.0
# Where every element is held to its step, the floor only has to catch weights that the scheme or
# the dtype cannot hold. An outlier of 20 times the spread in every group costs int4 12 dB.
_LESS_IF_NEAREST_DB = 6.0
# Noise that passes, in units of the noise of rounding. On real integer checkpoints round-to-nearest
# is below 1.4 and GPTQ below 3.7; zero points off by one give 13, a wrong sign in 1 % of int4 9.
_MOST_ROUNDINGS = 6.0
# The same for a single row: GPTQ reaches 6.6, zero points off by one 13.
_MOST_ROUNDINGS_OF_A_ROW = 10.0


def sqnr_floor_db(scheme: Scheme, *, nearest: bool = False) -> float:
    """Return the lowest SQNR in dB that passes for a weight of this scheme.

    Args:
        scheme: One with codes.
        nearest: Every element is held to its rounding step as well, or to what quantizing again
            gives.
    """
    assert scheme.weight is not None, "full precision has no floor: it must be equal"
    grid = scheme.weight.grid
    floor = _FP8_FLOOR_DB if grid.is_float8 else _FLOOR_DB[grid.bits]
    return floor - _LESS_IF_NEAREST_DB if nearest else floor


@dataclass(frozen=True, kw_only=True)
class WeightCheck:
    """What the check of one weight found.

    Args:
        sums: Error sums against the source.
        max_steps: Largest error in steps; NaN where the grid has none.
        problem: What is wrong; "" if nothing is.
    """

    sums: ErrorSums
    max_steps: float = math.nan
    problem: str = ""


class WeightChecker:
    """Compares a quantized weight with its source, some rows at a time.

    Args:
        candidate: [N, K].
        scheme: Decides the SQNR floor.
        nearest: Demand that every element was rounded to nearest.
        weight_dtype: See `measure`.
    """

    def __init__(
        self,
        candidate: QuantTensor,
        scheme: Scheme,
        *,
        nearest: bool,
        weight_dtype: torch.dtype | None = None,
    ) -> None:
        self._candidate = candidate
        self._scheme = scheme
        self._nearest = nearest
        self._sums = ErrorSums()
        self._parts: list[Measured] = []
        self._lost = self._changed = 0
        self._is_equal = True
        self._weight_dtype = weight_dtype
        self._is_repeated = False  # quantizing again says what every value has to be

    @property
    def row_step(self) -> int:
        """Rows at whose multiples the weight is cut for the comparison."""
        rows = self._candidate.block[0]
        return rows if rows < self._candidate.shape[0] else 1

    def add(self, start: int, reference: Tensor, *, expected: QuantTensor | None = None) -> None:
        """Compare some rows.

        Args:
            start: Row at which they begin, a multiple of the rows of a block.
            reference: [n, K], what they were made from.
            expected: What quantizing them again gives; None if that is not known.
        """
        self._is_repeated |= expected is not None
        part = self._candidate.rows(start, start + reference.shape[0])
        values = part.dequantize()
        if expected is not None and not _is_same(expected, part):
            self._changed += int((expected.dequantize(values.dtype) != values).sum())
        self._is_equal = self._is_equal and torch.equal(values.to(reference.dtype), reference)
        self._lost += _lost_to_zero_scales(part, reference)
        found = measure(
            part, values, reference, nearest=self._nearest, weight_dtype=self._weight_dtype
        )
        if found is not None:
            self._parts.append(found)
        if found is not None and found.is_of_reference:
            self._sums += found.sums
        else:
            self._sums += error_sums(values, reference)

    def result(self) -> WeightCheck:
        """Return the verdict on all rows together."""
        max_steps = max((part.max_steps for part in self._parts), default=math.nan)
        found = WeightCheck(sums=self._sums, max_steps=max_steps, problem=self._problem())
        if found.problem and self._is_equal and not self._sums.num_nonfinite:
            return replace(found, problem="")  # rounded by whoever made the source
        return found

    def _problem(self) -> str:
        problem = _not_finite(self._candidate, self._sums)
        if not problem and self._lost:
            problem = f"{self._lost} weights are lost to scales of zero"
        if not problem and self._parts:
            noise, rounding = (
                torch.cat([getattr(part, name) for part in self._parts])
                for name in ("noise", "rounding")
            )
            # a search may clip by more than a step: its noise is not that of rounding
            is_judged = self._nearest or not self._is_repeated
            problem = (_noise(noise, rounding) if is_judged else "") or self._rounding()
        if not problem and self._changed:
            problem = f"{self._changed} values are not those that quantizing again gives"
        floor = sqnr_floor_db(self._scheme, nearest=self._nearest or self._is_repeated)
        if not problem and self._sums.sqnr_db < floor:
            problem = (
                f"SQNR is {self._sums.sqnr_db:.2f} dB, expected at least {floor:.1f} dB for "
                f"{self._scheme}"
            )
        return problem

    def _rounding(self) -> str:
        beyond = torch.cat([part.beyond for part in self._parts])
        if not self._nearest or not bool(beyond.any()):
            return ""
        largest = max(part.max_steps for part in self._parts)
        return (
            f"{int(beyond.sum())} values are not rounded to nearest, the first in row "
            f"{int((beyond > 0).to(torch.int8).argmax())}; the largest error is {largest:.2f} steps"
        )


def _is_same(one: QuantTensor, other: QuantTensor) -> bool:
    """True if two weights are made of the same parts: a cheap proof of equal values."""
    parts, others = one.tensors(), other.tensors()
    return (
        (one.grid, one.block, one.evaluation) == (other.grid, other.block, other.evaluation)
        and parts.keys() == others.keys()
        and all(torch.equal(part, others[name]) for name, part in parts.items())
    )


def _not_finite(candidate: QuantTensor, sums: ErrorSums) -> str:
    bad_scales = int((~candidate.scale.to(torch.float32).isfinite()).sum())
    if bad_scales:
        return f"{bad_scales} scales are not finite"
    if candidate.input_scale is not None:
        of_input = candidate.input_scale.to(torch.float64)
        if not bool((of_input.isfinite() & (of_input > 0)).all()):
            return f"the scale of its input is {of_input.tolist()}, expected positive numbers"
    if sums.num_nonfinite:
        return f"{sums.num_nonfinite} values are not finite"
    if not math.isfinite(sums.noise):
        return "values of the source are not finite"
    return ""


def _lost_to_zero_scales(part: QuantTensor, reference: Tensor) -> int:
    is_zero = part.scale.to(torch.float32) == 0
    if not bool(is_zero.any()):
        return 0
    return int(((spread(part, is_zero, with_outer=False) != 0) & (reference != 0)).sum())


def _noise(noise: Tensor, rounding: Tensor) -> str:
    """Hold the noise of the weight, and of each row, to that of rounding to the stored scales."""
    excess = float(noise.sum() / rounding.sum().clamp(min=sys.float_info.min))
    if excess > _MOST_ROUNDINGS:
        return (
            f"noise is {excess:.1f} times that of rounding to the stored scales, expected at most "
            f"{_MOST_ROUNDINGS:g} times"
        )
    of_rows = noise / rounding.clamp(min=sys.float_info.min)
    bad = int((of_rows > _MOST_ROUNDINGS_OF_A_ROW).sum())
    if not bad:
        return ""
    worst = int(of_rows.argmax())
    return (
        f"noise of {bad} row{'s' if bad > 1 else ''} is more than {_MOST_ROUNDINGS_OF_A_ROW:g} "
        "times that of rounding to the stored scales: "
        f"{float(of_rows[worst]):.1f} times in row {worst}"
    )
