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

from quantload.quant.grid import INT8, Grid
from quantload.quant.metrics import ErrorSums, error_sums
from quantload.quant.qtensor import Evaluation, QuantTensor
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

_CHUNK = 1 << 17  # elements that are measured at a time: temporaries of 1 MiB stay in the cache


def sqnr_floor_db(scheme: Scheme, *, nearest: bool = False) -> float:
    """Return the lowest SQNR in dB that passes for a weight of this scheme.

    Args:
        scheme: One with codes.
        nearest: Every element is held to its rounding step as well.
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


def check_quantized(
    candidate: QuantTensor, reference: Tensor, scheme: Scheme, *, nearest: bool
) -> WeightCheck:
    """Compare a quantized weight with its source.

    Args:
        candidate: [N, K].
        reference: [N, K] float dtype, what it was made from.
        scheme: Decides the SQNR floor.
        nearest: Demand that every element was rounded to nearest, in the dtype of the candidate.
    """
    values = candidate.dequantize()
    sums = error_sums(values, reference)
    problem = _not_finite(candidate, sums) or _lost_to_zero_scales(candidate, reference)
    if problem:
        return WeightCheck(sums=sums, problem=problem)
    found = _measure(candidate, values, reference, nearest=nearest)
    floor = sqnr_floor_db(scheme, nearest=nearest)
    problem = _noise(found) or _rounding(found, nearest=nearest)
    if not problem and sums.sqnr_db < floor:
        problem = f"SQNR is {sums.sqnr_db:.2f} dB, expected at least {floor:.1f} dB for {scheme}"
    return WeightCheck(sums=sums, max_steps=found.max_steps, problem=problem)


def _not_finite(candidate: QuantTensor, sums: ErrorSums) -> str:
    bad_scales = int((~candidate.scale.to(torch.float32).isfinite()).sum())
    if bad_scales:
        return f"{bad_scales} scales are not finite"
    if sums.num_nonfinite:
        return f"{sums.num_nonfinite} values are not finite"
    if not math.isfinite(sums.noise):
        return "values of the source are not finite"
    return ""


def _lost_to_zero_scales(candidate: QuantTensor, reference: Tensor) -> str:
    is_zero = candidate.scale.to(torch.float32) == 0
    if not bool(is_zero.any()):
        return ""
    lost = int(((_spread(candidate, is_zero) != 0) & (reference != 0)).sum())
    return f"{lost} weights are lost to scales of zero" if lost else ""


# -- errors in units of steps ----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """Errors of a weight in units of its steps.

    Args:
        noise: [N] float64, sum of squared errors of each row.
        rounding: [N] float64, sum of squared steps / 12.
        max_steps: Largest error in steps.
        beyond: Elements further off than rounding to nearest explains; 0 if nobody asked.
        first_beyond: Row of the first of them.
    """

    noise: Tensor
    rounding: Tensor
    max_steps: float
    beyond: int = 0
    first_beyond: int = -1


def _measure(
    candidate: QuantTensor, values: Tensor, reference: Tensor, *, nearest: bool
) -> _Measured:
    """Measure row by row, in float64; `values` are those of the candidate, [N, K]."""
    if not _has_steps(candidate.grid) or not values.numel():
        nothing = torch.zeros(candidate.shape[0], dtype=torch.float64)
        return _Measured(noise=nothing, rounding=nothing, max_steps=math.nan)
    parts = []
    rows, columns = candidate.shape
    many = max(1, _CHUNK // columns)
    for start, stop in zip(range(0, rows, many), [*range(many, rows, many), rows], strict=True):
        target = reference[start:stop]
        if nearest:  # what was rounded is the source in the dtype of the arithmetic
            target = target.to(candidate.evaluation.dtype)
        part = candidate.rows(start, stop)
        parts.append(_measure_rows(part, values[start:stop], target, nearest=nearest))
        if parts[-1].beyond:
            parts[-1] = replace(parts[-1], first_beyond=parts[-1].first_beyond + start)
    return _Measured(
        noise=torch.cat([part.noise for part in parts]),
        rounding=torch.cat([part.rounding for part in parts]),
        max_steps=max(part.max_steps for part in parts),
        beyond=sum(part.beyond for part in parts),
        first_beyond=next((part.first_beyond for part in parts if part.beyond), -1),
    )


def _measure_rows(part: QuantTensor, values: Tensor, target: Tensor, *, nearest: bool) -> _Measured:
    step = _spread(part, part.multiplier.to(torch.float32).abs()).to(torch.float64)
    if part.grid.is_float8:
        step *= _spacing(part)
    error = (values.to(torch.float64) - target.to(torch.float64)).abs_()
    measured = _Measured(
        noise=error.square().sum(dim=1), rounding=step.square().sum(dim=1) / 12, max_steps=0.0
    )
    error /= step
    error.nan_to_num_(nan=0.0, posinf=math.inf)  # 0 / 0: a scale of zero, and nothing is lost
    measured = replace(measured, max_steps=float(error.max()))
    above = error > 0.5
    if not nearest or not bool(above.any()):
        return measured
    far = above.clone()
    far[above] = error[above] > _most_steps(part, values, above)
    rows = far.any(dim=1)
    return replace(measured, beyond=int(far.sum()), first_beyond=int(rows.to(torch.int8).argmax()))


def _has_steps(grid: Grid) -> bool:
    return grid.is_integer or grid.is_float8


def _spread(candidate: QuantTensor, part: Tensor) -> Tensor:
    """Spread a tensor with one element a scale over the weights: [R, G] to [N, K] float32."""
    return replace(
        candidate,
        grid=INT8,
        codes=torch.ones(candidate.shape, dtype=torch.int8, device=candidate.device),
        scale=part.to(torch.float32),
        zero=None,
        offset=None,
        evaluation=Evaluation(torch.float32, candidate.evaluation.outer),
    ).dequantize()


def _spacing(candidate: QuantTensor) -> Tensor:
    """Distance of the grid's values at each fp8 code: [N, K] float64, an ulp of the value."""
    codes = torch.arange(256, dtype=torch.uint8, device=candidate.device)
    magnitudes = codes.view(candidate.grid.storage).to(torch.float64).nan_to_num(0.0)
    table = 2 * _half_ulp(magnitudes, candidate.grid.storage)
    index = candidate.codes.view(torch.uint8).reshape(-1).to(torch.int32)
    return table.index_select(0, index).reshape(candidate.shape)


def _half_ulp(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the largest error of rounding to `dtype`, for results of this size; float64."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(numbers.abs().to(torch.float64).clamp_(min=info.smallest_normal))
    return torch.ldexp(torch.full_like(numbers, info.eps / 4, dtype=torch.float64), exponent)


def _most_steps(candidate: QuantTensor, values: Tensor, at: Tensor) -> Tensor:
    """Return the largest error in steps that rounding to nearest leaves at the elements `at`.

    With weight w, scale s, zero point z (or 0), code c, half a step h (0.5 for integers, half the
    spacing of the grid at c for fp8) and u(x), half an ulp of x in the working dtype, in which
    every result is rounded (see `quant/rtn.py`):

        c = round(w / s + z)     h, and u(w / s) and u(w / s + z) of the quotient and the sum,
                                 where |w / s + z| <= |c| + h and |w / s| <= |c - z| + 2 h
        v = (c - z) s            u(v) of the product; the difference is exact
        s = range / steps        clips: at the ends of the grid w / s + z lies outside by as much as
                                 the scale is rounded down

    Symmetric integer grids clip more: steps / 2 is 7.5 for int4, the highest code 7. With zero
    points the range is the rounded max - min, and z is rounded too, off by a half and two ulps.

    Args:
        candidate: [N, K].
        values: [N, K], what it decodes to.
        at: [N, K] bool, with M elements set.

    Returns:
        [M] float64.
    """
    working, grid = candidate.evaluation.dtype, candidate.grid
    code = candidate.codes[at].to(torch.float64)
    scale = _spread(candidate, candidate.multiplier.to(torch.float32).abs())[at].to(torch.float64)
    half = _spacing(candidate)[at] / 2 if grid.is_float8 else torch.full_like(code, 0.5)
    zero = torch.zeros_like(code)
    if candidate.zero is not None:
        zero = _spread(candidate, candidate.zero)[at].to(torch.float64)
    of_quotient = _half_ulp((code - zero).abs() + 2 * half, working)
    of_scale = _half_ulp(scale, working) / scale
    steps = torch.full_like(code, (grid.high - grid.low) / 2)
    clipped = steps * of_scale
    if candidate.zero is not None:
        of_quotient += _half_ulp(code.abs() + half, working)
        clipped = 2 * steps * (of_scale + torch.finfo(working).eps / 2)
        clipped += 2 * _half_ulp(2 * steps, working)
    is_end = (code == grid.low) | (code == grid.high)
    most = half + torch.where(is_end, torch.maximum(of_quotient, clipped), of_quotient)
    most += _half_ulp(values[at].to(torch.float64), working) / scale
    return most / (2 * half) * (1 + 1e-12)  # float64 rounds too


# -- what is wrong ---------------------------------------------------------------------------------


def _noise(found: _Measured) -> str:
    """Hold the noise of the weight, and of each row, to that of rounding to the stored scales."""
    excess = float(found.noise.sum() / found.rounding.sum().clamp(min=sys.float_info.min))
    if excess > _MOST_ROUNDINGS:
        return (
            f"noise is {excess:.1f} times that of rounding to the stored scales, expected at most "
            f"{_MOST_ROUNDINGS:g} times"
        )
    of_rows = found.noise / found.rounding.clamp(min=sys.float_info.min)
    bad = int((of_rows > _MOST_ROUNDINGS_OF_A_ROW).sum())
    if not bad:
        return ""
    worst = int(of_rows.argmax())
    return (
        f"noise of {bad} row{'s' if bad > 1 else ''} is more than {_MOST_ROUNDINGS_OF_A_ROW:g} "
        "times that of rounding to the stored scales: "
        f"{float(of_rows[worst]):.1f} times in row {worst}"
    )


def _rounding(found: _Measured, *, nearest: bool) -> str:
    if not nearest or not found.beyond:
        return ""
    return (
        f"{found.beyond} values are not rounded to nearest, the first in row "
        f"{found.first_beyond}; the largest error is {found.max_steps:.2f} steps"
    )
