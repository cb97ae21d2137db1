"""Decode every tensor of an output with the reader's own code and compare it with the source.

A quantized weight must reach the SQNR floor of its scheme, and an integer one must not be much
noisier than rounding to its own scales makes it; a full-precision tensor must be equal, bit for
bit, to the source cast to its dtype. Missing, extra, non-finite tensors and zero scales fail.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantload.errors import QuantloadError, listed
from quantload.loader.source import Source
from quantload.mappers.facts import facts_from_names
from quantload.progress import Progress
from quantload.quant.grid import INT8
from quantload.quant.metrics import ErrorSums, error_sums
from quantload.quant.qtensor import Evaluation, QuantTensor
from quantload.quant.scheme import Scheme

# Lowest SQNR in dB that passes, by bits of the codes. Round-to-nearest reaches about 6 dB a bit
# less 4 on Gaussian weights (int4 in groups of 128: 19 to 21 dB), fp8 31 dB whatever the range. The
# margin is for rows and groups with large outliers; a damaged layer ends at 3 dB or less.
_FLOOR_DB = {2: 2.0, 3: 5.0, 4: 9.0, 5: 14.0, 6: 18.0, 7: 20.0, 8: 20.0}
_FP8_FLOOR_DB = 24.0
# Noise that passes, in units of the noise of rounding. On real integer checkpoints round-to-nearest
# is below 1.4 and GPTQ below 3.7; zero points off by one give 13, a wrong sign in 1 % of int4 9.
_MOST_ROUNDINGS = 6.0


def sqnr_floor_db(scheme: Scheme) -> float:
    """Return the lowest SQNR in dB that passes for a weight of this scheme."""
    assert scheme.weight is not None, "full precision has no floor: it must be equal"
    grid = scheme.weight.grid
    return _FP8_FLOOR_DB if grid.is_float8 else _FLOOR_DB[grid.bits]


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """The check of one weight.

    Args:
        module: Checkpoint name.
        source: What the source holds.
        scheme: What the output holds; "dense" is full precision.
        bits_per_weight: Bits of the output's tensors for each weight, scales included.
        relative: Relative L2 error.
        sqnr_db: The same in dB.
        max_abs: Largest absolute error.
        floor_db: Lowest SQNR that passes; infinity where equality is demanded.
        problem: Why it fails; "" if it passes.
    """

    module: str
    source: str
    scheme: str
    bits_per_weight: float
    relative: float
    sqnr_db: float
    max_abs: float
    floor_db: float
    problem: str = ""

    @property
    def passed(self) -> bool:
        """True if nothing is wrong."""
        return not self.problem


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """The check of a whole checkpoint.

    Args:
        layers: One report a weight.
        problems: What is wrong beyond single weights: missing, extra, changed tensors.
    """

    layers: tuple[LayerReport, ...]
    problems: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """True if every weight passes and nothing else is wrong."""
        return not self.problems and all(layer.passed for layer in self.layers)

    def failures(self) -> list[str]:
        """Return one line for everything that is wrong."""
        failed = [f"`{layer.module}`: {layer.problem}" for layer in self.layers if layer.problem]
        return [*failed, *self.problems]


def verify_sources(output: Source, source: Source, progress: Progress) -> VerifyReport:
    """Compare every tensor of `output` with `source`.

    Args:
        output: What was written, opened like any checkpoint.
        source: What it was made from.
        progress: Advances by bytes of the output.
    """
    tied = facts_from_names(source.weights, tied_head=True).tied  # of a head that was untied
    origin = {module: tied.get(module, module) for module in output.weights}
    layers = []
    progress.start("verify", total=_total_bytes(output), unit="B")
    for module, weight in output.weights.items():
        if origin[module] in source.weights:
            layers.append(_check_weight(output, module, source, origin[module]))
        progress.advance(_weight_bytes(output, module), note=weight.module)
    problems = _missing_and_extra(output, source, origin)
    problems += [
        problem for name in output.plain if (problem := _check_plain(output, source, name))
    ]
    progress.finish()
    return VerifyReport(layers=tuple(layers), problems=tuple(problems))


def _weight_bytes(source: Source, module: str) -> int:
    names = source.weights[module].leaves.values()
    return sum(source.checkpoint.tensors[name].num_bytes for name in names)


def _total_bytes(source: Source) -> int:
    return sum(_weight_bytes(source, module) for module in source.weights)


def _missing_and_extra(output: Source, source: Source, origin: Mapping[str, str]) -> list[str]:
    problems = []
    missing = [m for m in source.weights if m not in output.weights]
    missing += [name for name in source.plain if name not in output.plain]
    if missing:
        problems.append(f"{len(missing)} tensors of the source are missing: {listed(missing)}")
    extra = [m for m in output.weights if origin[m] not in source.weights]
    extra += [name for name in output.plain if name not in source.plain]
    if extra:
        problems.append(f"{len(extra)} tensors are not in the source: {listed(extra)}")
    return problems


@torch.no_grad()
def _check_weight(output: Source, module: str, source: Source, origin: str) -> LayerReport:
    weight = output.weights[module]
    sums, problem = _compare(output, module, source, origin)
    floor = math.inf if weight.scheme is None else sqnr_floor_db(weight.scheme)
    return LayerReport(
        module=module,
        source=source.weights[origin].encoding,
        scheme="dense" if weight.scheme is None else str(weight.scheme),
        bits_per_weight=8 * _weight_bytes(output, module) / max(1, math.prod(weight.shape)),
        relative=sums.relative,
        sqnr_db=sums.sqnr_db,
        max_abs=sums.max_abs,
        floor_db=floor,
        problem=problem,
    )


def _compare(output: Source, module: str, source: Source, origin: str) -> tuple[ErrorSums, str]:
    """Return the error, and what is wrong; "" if nothing is."""
    shape, expected = output.weights[module].shape, source.weights[origin].shape
    unknown = ErrorSums(noise=math.inf)
    if shape != expected:
        return unknown, f"shape is `{shape}`, the source has `{expected}`"
    try:
        candidate = output.read_weight(module)
    except QuantloadError as error:
        return unknown, error.message
    reference = source.read_dense(origin)
    if not isinstance(candidate, QuantTensor):
        return error_sums(candidate, reference), _difference(candidate, reference)
    sums = error_sums(candidate.dequantize(), reference)
    return sums, _problem(candidate, reference, sums, output.weights[module].scheme)


def _problem(
    candidate: QuantTensor, reference: Tensor, sums: ErrorSums, scheme: Scheme | None
) -> str:
    assert scheme is not None, "a quantized weight has a scheme"
    bad_scales = int((~candidate.scale.to(torch.float32).isfinite()).sum())
    if bad_scales:
        return f"{bad_scales} scales are not finite"
    if sums.num_nonfinite:
        return f"{sums.num_nonfinite} values are not finite"
    lost = _lost_to_zero_scales(candidate, reference)
    if lost:
        return f"{lost} weights are lost to scales of zero"
    excess = _noise_over_rounding(candidate, sums)
    if excess > _MOST_ROUNDINGS:
        return (
            f"noise is {excess:.1f} times that of rounding to the stored scales, expected at most "
            f"{_MOST_ROUNDINGS:g} times"
        )
    floor = sqnr_floor_db(scheme)
    if sums.sqnr_db < floor:
        return f"SQNR is {sums.sqnr_db:.2f} dB, expected at least {floor:.1f} dB for {scheme}"
    return ""


def _lost_to_zero_scales(candidate: QuantTensor, reference: Tensor) -> int:
    is_zero = candidate.scale == 0
    if not bool(is_zero.any()):
        return 0
    return int(((_spread(candidate, is_zero) != 0) & (reference != 0)).sum())


def _noise_over_rounding(candidate: QuantTensor, sums: ErrorSums) -> float:
    """Return the noise in units of the expected noise of rounding, a twelfth of a squared step."""
    if not candidate.grid.is_integer or candidate.outer is not None or not sums.noise:
        return 0.0
    steps = _spread(candidate, candidate.scale.to(torch.float32).square())
    return sums.noise / max(float(steps.sum(dtype=torch.float64)) / 12, sys.float_info.min)


def _spread(candidate: QuantTensor, part: Tensor) -> Tensor:
    """Spread a tensor with one element a scale over the weights: [R, G] to [N, K] float32."""
    return replace(
        candidate,
        grid=INT8,
        codes=torch.ones(candidate.shape, dtype=torch.int8),
        scale=part.to(torch.float32),
        zero=None,
        offset=None,
        outer=None,
        evaluation=Evaluation(torch.float32),
    ).dequantize()


def _difference(candidate: Tensor, reference: Tensor) -> str:
    """Say how a full-precision tensor differs from the source in its dtype; "" if it is equal."""
    if candidate.shape != reference.shape:
        return f"shape is `{tuple(candidate.shape)}`, the source has `{tuple(reference.shape)}`"
    expected = reference.to(candidate.dtype)
    if candidate.dtype.is_floating_point:
        same = (candidate == expected) | (candidate.isnan() & expected.isnan())
    else:
        same = candidate == expected
    changed = int((~same).sum())
    return f"{changed} values differ from the source cast to `{candidate.dtype}`" if changed else ""


def _check_plain(output: Source, source: Source, name: str) -> str:
    if name not in source.plain:
        return ""
    problem = _difference(output.read_plain(name), source.read_plain(name))
    return f"tensor `{name}`: {problem}" if problem else ""
