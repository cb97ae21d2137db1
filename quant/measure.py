"""Errors of some rows of a quantized weight, in units of its steps.

With weight w, scale s, zero point z (or 0), code c, half a step h and u(x), half an ulp of x in the
dtype in which it is rounded, round-to-nearest leaves

    c = round(w / s + z)     h, and u(w / s) and u(w / s + z) of the quotient and the sum, where
                             |w / s + z| <= |c| + h and |w / s| <= |c - z| + 2 h
    v = (c - z) s            u(v) of the product; the difference is exact
    s = range / steps        clips: at the ends of the grid w / s + z lies outside by as much as
                             the scale is rounded down

Symmetric integer grids clip more: steps / 2 is 7.5 for int4, the highest code 7. With zero points
the range is the rounded max - min, and z is rounded too, off by a half and two ulps. A weight that
was cast before it was quantized is off by u(w).

Letters: N output features, K input features, R and G blocks of rows and columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from quantload.quant import compiled
from quantload.quant.grid import INT8, Grid
from quantload.quant.metrics import ErrorSums
from quantload.quant.qtensor import Evaluation, QuantTensor
from quantload.quant.steps import code_table, half_ulp, scale_sizes, scale_slack

EXACT = (torch.bfloat16, torch.float16, torch.float32)  # what float32 holds


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Errors of some rows.

    Args:
        noise: [N] float64, sum of squared errors of each row.
        rounding: [N] float64, sum of squared steps / 12.
        block_excess: Largest noise of a row's part that shares a scale, in units of its rounding.
        count: Number of elements.
        signals: [N] float64, sum of squared weights of each row.
        max_abs: Largest error.
        max_steps: Largest error in steps.
        beyond: [N] int64, elements further off than rounding to nearest explains; zeros if nobody
            asked.
        is_of_reference: False if the weight was cast before it was compared.
    """

    noise: Tensor
    rounding: Tensor
    block_excess: float
    count: int
    signals: Tensor
    max_abs: float
    max_steps: float
    beyond: Tensor
    is_of_reference: bool

    @property
    def sums(self) -> ErrorSums:
        """The error sums of these rows."""
        return ErrorSums(
            noise=float(self.noise.sum()),
            signal=float(self.signals.sum()),
            max_abs=self.max_abs,
            count=self.count,
        )


def has_steps(grid: Grid) -> bool:
    """True if codes are the nearest of fixed values: all grids whose codes we make."""
    return grid.is_integer or grid.is_float8 or grid.name.startswith(("e2m1", "e2m3", "e3m2"))


def measure(
    part: QuantTensor,
    values: Tensor,
    reference: Tensor,
    *,
    nearest: bool,
    weight_dtype: torch.dtype | None = None,
) -> Measured | None:
    """Measure some rows; None if values are not finite, or codes have no steps.

    Args:
        part: [N, K].
        values: [N, K], what it decodes to; finite.
        reference: [N, K], what it was made from.
        nearest: Count what rounding to nearest does not explain.
        weight_dtype: dtype to which the weight was cast before it was quantized; None takes that of
            the arithmetic for wider weights, as a conversion casts them.
    """
    if not has_steps(part.grid):
        return None
    if weight_dtype is None and reference.dtype in (torch.float32, torch.float64):
        weight_dtype = part.evaluation.dtype
    target = reference
    if nearest and weight_dtype is not None:
        target = reference.to(weight_dtype)
    in_one_pass = _measure_compiled(part, values, target, reference.dtype, nearest=nearest)
    if in_one_pass is not None:
        return in_one_pass if bool(in_one_pass.noise.isfinite().all()) else None
    if not bool(values.isfinite().all()):
        return None
    return _measure_plainly(part, values, target, reference.dtype, nearest=nearest)


def _measure_plainly(
    part: QuantTensor, values: Tensor, target: Tensor, source: torch.dtype, *, nearest: bool
) -> Measured:
    table = code_table(part.grid)
    codes = part.codes.view(torch.uint8).to(torch.int32)
    size = spread(part, part.multiplier.to(torch.float32).abs()).to(torch.float64)
    size *= 2 * table.half_steps.to(codes.device)[codes]
    error = (values.to(torch.float64) - target.to(torch.float64)).abs_()
    steps = (error / size).nan_to_num_(nan=0.0, posinf=math.inf)  # 0 / 0: nothing is lost
    beyond = torch.zeros(part.shape[0], dtype=torch.int64)
    above = steps > 0.5
    if nearest and bool(above.any()):
        far = above.clone()
        far[above] = steps[above] > _most_steps(part, values, target, source, above)
        beyond = far.sum(dim=1)
    noise, rounding = error.square(), size.square() / 12
    return Measured(
        noise=noise.sum(dim=1),
        rounding=rounding.sum(dim=1),
        block_excess=_block_excess(part, noise, rounding),
        signals=target.to(torch.float64).square().sum(dim=1),
        max_abs=float(error.max()),
        max_steps=float(steps.max()),
        beyond=beyond,
        count=values.numel(),
        is_of_reference=target.dtype == source,
    )


def _block_excess(part: QuantTensor, noise: Tensor, rounding: Tensor) -> float:
    """Return the largest quotient of the sums over the columns of a row that share a scale."""
    columns, groups = part.shape[1], part.scale.shape[1]
    group_of = part.group_of
    if group_of is None:
        group_of = torch.arange(columns, device=noise.device) // part.block[1]
    sums = [
        torch.zeros(part.shape[0], groups, dtype=torch.float64, device=noise.device).index_add_(
            1, group_of.to(noise.device, torch.int64), of_elements
        )
        for of_elements in (noise, rounding)
    ]
    return float((sums[0] / sums[1]).nan_to_num_(nan=0.0, posinf=math.inf).max())


def _most_steps(
    part: QuantTensor, values: Tensor, target: Tensor, source: torch.dtype, at: Tensor
) -> Tensor:
    """Return the largest error in steps that rounding to nearest leaves at the elements `at`.

    Args:
        part: [N, K].
        values: [N, K], what it decodes to.
        target: [N, K], what was quantized.
        source: dtype of the weight before it was cast.
        at: [N, K] bool, with M elements set.

    Returns:
        [M] float64.
    """
    working, grid, table = part.evaluation.dtype, part.grid, code_table(part.grid)
    codes = part.codes.view(torch.uint8)[at].to(torch.int32)
    code, half = table.values[codes], table.half_steps[codes]
    scale = spread(part, part.multiplier.to(torch.float32).abs())[at].to(torch.float64)
    zero = torch.zeros_like(code)
    if part.zero is not None:
        zero = spread(part, part.zero, with_outer=False)[at].to(torch.float64)
    of_quotient = half_ulp((code - zero).abs() + 2 * half, working)
    slack = spread(part, scale_slack(part, target.dtype), with_outer=False)[at].to(torch.float64)
    steps = torch.full_like(code, (grid.high - grid.low) / 2)
    clipped = steps * slack
    if part.zero is not None:
        of_quotient += half_ulp(code.abs() + half, working)
        clipped = 2 * steps * (slack + torch.finfo(working).eps / 2)
        clipped += 2 * half_ulp(2 * steps, working)
    most = half + torch.where(table.is_end[codes], torch.maximum(of_quotient, clipped), of_quotient)
    most += half_ulp(values[at].to(torch.float64), part.rounded_to) / scale
    if (cast_to := _cast_to(part, target, source)) is not None:
        most += half_ulp(target[at].to(torch.float64), cast_to) / scale
    return most / (2 * half) * (1 + 1e-12)  # float64 rounds too


def _cast_to(part: QuantTensor, target: Tensor, source: torch.dtype) -> torch.dtype | None:
    """Return the coarsest dtype that a weight went through; None if it had one dtype throughout."""
    dtypes = {part.evaluation.dtype, target.dtype, source}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps) if len(dtypes) > 1 else None


def spread(candidate: QuantTensor, part: Tensor, *, with_outer: bool = True) -> Tensor:
    """Spread a tensor with one element a scale over the weights: [R, G] to [N, K] float32.

    Args:
        candidate: [N, K].
        part: [R, G].
        with_outer: Multiply or divide by `outer`, as the scale is.
    """
    return replace(
        candidate,
        grid=INT8,
        codes=torch.ones(candidate.shape, dtype=torch.int8, device=candidate.device),
        scale=part.to(torch.float32),
        zero=None,
        offset=None,
        outer=candidate.outer if with_outer else None,
        inner=candidate.inner if with_outer else None,
        evaluation=Evaluation(
            torch.float32, candidate.evaluation.outer, candidate.evaluation.inner
        ),
    ).dequantize()


# -- in one compiled pass --------------------------------------------------------------------------


def _measure_compiled(
    part: QuantTensor, values: Tensor, target: Tensor, source: torch.dtype, *, nearest: bool
) -> Measured | None:
    """Measure without temporaries; None where there is no loop for it."""
    sizes = scale_sizes(part)
    if sizes is None or not fits_loops(part, values, target):
        return None
    from quantload.quant.compiled_errors import measure_rows  # numba: a second

    block = (part.block[0] if sizes.shape[0] == part.scale.shape[0] else 1, part.block[1])
    zeros = torch.zeros_like(sizes)
    if part.zero is not None:
        zeros = part.zero.to(torch.float64).expand_as(sizes).contiguous()
    slack = scale_slack(part, target.dtype)
    if slack.shape != sizes.shape:
        slack = slack.repeat_interleave(part.block[0], dim=0)[: sizes.shape[0]]
    table, grid, cast_to = code_table(part.grid), part.grid, _cast_to(part, target, source)
    tables = torch.stack([table.values, table.half_steps, table.is_end.to(torch.float64)])
    floats = [torch.finfo(dtype) for dtype in (part.evaluation.dtype, part.rounded_to)]
    limits = (
        *(number for info in floats for number in (info.eps, info.smallest_normal)),
        (grid.high - grid.low) / 2,
        float(part.zero is not None),
        0.0 if cast_to is None else torch.finfo(cast_to).eps,
    )
    rows = part.shape[0]
    sums, beyond = np.zeros((rows, 6)), np.zeros(rows, np.int64)
    measure_rows(
        array_of_floats(values),
        array_of_floats(target),
        part.codes.contiguous().view(torch.uint8).numpy(),
        (sizes.numpy(), zeros.numpy(), slack.contiguous().numpy()),
        block,
        tables.numpy(),
        limits,
        nearest,
        sums,
        beyond,
    )
    found = torch.from_numpy(sums)
    return Measured(
        noise=found[:, 0],
        rounding=found[:, 1],
        block_excess=float(found[:, 5].max()),
        signals=found[:, 2],
        max_abs=float(found[:, 3].max()),
        max_steps=float(found[:, 4].max()),
        beyond=torch.from_numpy(beyond),
        count=values.numel(),
        is_of_reference=target.dtype == source,
    )


def fits_loops(part: QuantTensor, values: Tensor, target: Tensor) -> bool:
    """True if compiled loops read these, and are worth their start; scales are another matter."""
    is_plain = part.device.type == "cpu" and part.offset is None and part.codes.numel() > 0
    return (
        is_plain
        and {values.dtype, target.dtype} <= set(EXACT)
        and compiled.is_ready(values.numel())
    )


def array_of_floats(tensor: Tensor) -> np.ndarray:
    """Return float32 numbers, or the bits of bfloat16 ones."""
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.uint16).numpy()
    return tensor.to(torch.float32).contiguous().numpy()
