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
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantload.quant.measure import Measured, measure, spread
from quantload.quant.metrics import ErrorSums, error_sums
from quantload.quant.noise_limits import about_noise, sqnr_floor_db
from quantload.quant.qtensor import QuantTensor
from quantload.quant.scheme import Scheme


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
        scheme: Decides the SQNR floor.
        nearest: Demand that every element was rounded to nearest.
        weight_dtype: See `measure`.
    """

    def __init__(
        self,
        scheme: Scheme,
        *,
        nearest: bool,
        weight_dtype: torch.dtype | None = None,
    ) -> None:
        self._scheme = scheme
        self._nearest = nearest
        self._sums = ErrorSums()
        self._parts: list[Measured] = []
        self._lost = self._changed = 0
        self._is_equal = True
        self._weight_dtype = weight_dtype
        self._is_repeated = False  # quantizing again says what every value has to be
        self._bad_scales = 0
        self._bad_input = ""

    def add(
        self, part: QuantTensor, reference: Tensor, *, expected: QuantTensor | None = None
    ) -> None:
        """Compare some rows; those that come one after the other follow each other in the weight.

        Args:
            part: [n, K], whole blocks of rows.
            reference: [n, K], what they were made from.
            expected: What quantizing them again gives; None if that is not known.
        """
        self._is_repeated |= expected is not None
        self._check_scales(part)
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

    def _check_scales(self, part: QuantTensor) -> None:
        bad = int((~part.scale.to(torch.float32).isfinite()).sum())
        weight = self._scheme.weight
        is_of_all = weight is not None and weight.granularity == "tensor"
        self._bad_scales = max(self._bad_scales, bad) if is_of_all else self._bad_scales + bad
        if part.input_scale is not None:
            of_input = part.input_scale.to(torch.float64)
            if not bool((of_input.isfinite() & (of_input > 0)).all()):
                self._bad_input = (
                    f"the scale of its input is {of_input.tolist()}, expected positive numbers"
                )

    def result(self) -> WeightCheck:
        """Return the verdict on all rows together."""
        max_steps = max((part.max_steps for part in self._parts), default=math.nan)
        found = WeightCheck(sums=self._sums, max_steps=max_steps, problem=self._problem())
        if found.problem and self._is_equal and not self._sums.num_nonfinite:
            return replace(found, problem="")  # rounded by whoever made the source
        return found

    def _problem(self) -> str:
        problem = self._not_finite()
        if not problem and self._lost:
            problem = f"{self._lost} weights are lost to scales of zero"
        if not problem and self._parts:
            noise, rounding = (
                torch.cat([getattr(part, name) for part in self._parts])
                for name in ("noise", "rounding")
            )
            # a search may clip by more than a step: its noise is not that of rounding
            is_judged = self._nearest or not self._is_repeated
            problem = (about_noise(noise, rounding) if is_judged else "") or self._rounding()
        if not problem and self._changed:
            problem = f"{self._changed} values are not those that quantizing again gives"
        floor = sqnr_floor_db(self._scheme, nearest=self._nearest or self._is_repeated)
        if not problem and self._sums.sqnr_db < floor:
            problem = (
                f"SQNR is {self._sums.sqnr_db:.2f} dB, expected at least {floor:.1f} dB for "
                f"{self._scheme}"
            )
        return problem

    def _not_finite(self) -> str:
        if self._bad_scales:
            return f"{self._bad_scales} scales are not finite"
        if self._bad_input:
            return self._bad_input
        if self._sums.num_nonfinite:
            return f"{self._sums.num_nonfinite} values are not finite"
        return "" if math.isfinite(self._sums.noise) else "values of the source are not finite"

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
        and all(_has_same_bytes(part, others[name]) for name, part in parts.items())
    )


def _has_same_bytes(one: Tensor, other: Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    # numbers of 8 bits are compared one by one, eight times as slowly as words
    one, other = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other))
    words = one.numel() // 8 * 8
    return torch.equal(one[words:], other[words:]) and torch.equal(
        *(tensor[:words].view(torch.int64) for tensor in (one, other))
    )


def _lost_to_zero_scales(part: QuantTensor, reference: Tensor) -> int:
    is_zero = part.scale.to(torch.float32) == 0
    if not bool(is_zero.any()):
        return 0
    return int(((spread(part, is_zero, with_outer=False) != 0) & (reference != 0)).sum())
