"""Decode every tensor of an output with the reader's own code and compare it with the source.

A quantized weight is held to its own rounding, see `weight_check.py`; a full-precision tensor must
be equal, bit for bit, to the source cast to its dtype. Missing, extra, non-finite tensors and zero
scales fail, and a config.json that describes another model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantload.accuracy.config_check import config_differences
from quantload.accuracy.weight_check import WeightCheck, check_quantized, sqnr_floor_db
from quantload.errors import QuantloadError, listed
from quantload.loader.checkpoint import files_kept_open
from quantload.loader.experts import apart_as_in
from quantload.loader.source import FLOAT_DTYPES, Source
from quantload.mappers.facts import facts_from_names
from quantload.progress import Progress
from quantload.quant.metrics import ErrorSums, error_sums
from quantload.quant.qtensor import QuantTensor


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
        max_steps: Largest error in units of the step between neighbouring codes; rounding to
            nearest leaves half a step and a little. NaN for full precision and table grids.
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
    max_steps: float = math.nan
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


@files_kept_open()
def verify_sources(
    output: Source, source: Source, progress: Progress, *, nearest: bool = False
) -> VerifyReport:
    """Compare every tensor of `output` with `source`.

    Args:
        output: What was written, opened like any checkpoint.
        source: What it was made from.
        progress: Advances by bytes of the output.
        nearest: The output was rounded to nearest, as a conversion does: hold every weight to its
            rounding step.
    """
    source = apart_as_in(source, output)
    tied = facts_from_names(source.weights, tied_head=True).tied  # of a head that was untied
    origin = {module: tied.get(module, module) for module in output.weights}
    layers = []
    progress.start("verify", total=_total_bytes(output), unit="B")
    for module, weight in output.weights.items():
        if origin[module] in source.weights:
            layers.append(_check_weight(output, module, source, origin[module], nearest=nearest))
        progress.advance(_weight_bytes(output, module), note=weight.module)
    problems = _missing_and_extra(output, source, origin)
    problems += [
        problem for name in output.plain if (problem := _check_plain(output, source, name))
    ]
    problems += config_differences(output.checkpoint.config, source.checkpoint.config)
    progress.finish()
    return VerifyReport(layers=tuple(layers), problems=tuple(problems))


def _weight_bytes(source: Source, module: str) -> int:
    names = source.weights[module].leaves.values()
    return sum(source.checkpoint.tensors[name].num_bytes for name in names)


def _total_bytes(source: Source) -> int:
    return sum(_weight_bytes(source, module) for module in source.weights)


def _missing_and_extra(output: Source, source: Source, origin: Mapping[str, str]) -> list[str]:
    problems = []
    parameters = {w.parameter_name: w for w in source.weights.values() if not w.is_matrix}
    missing = [
        module
        for module, weight in source.weights.items()
        if module not in output.weights and weight.parameter_name not in output.plain
    ]
    missing += [name for name in source.plain if name not in output.plain]
    if missing:
        problems.append(f"{len(missing)} tensors of the source are missing: {listed(missing)}")
    extra = [m for m in output.weights if origin[m] not in source.weights]
    extra += [n for n in output.plain if n not in source.plain and n not in parameters]
    if extra:
        problems.append(f"{len(extra)} tensors are not in the source: {listed(extra)}")
    return problems


@torch.no_grad()
def _check_weight(
    output: Source, module: str, source: Source, origin: str, *, nearest: bool
) -> LayerReport:
    weight = output.weights[module]
    found = _compare(output, module, source, origin, nearest=nearest)
    scheme = weight.scheme
    floor = math.inf if scheme is None else sqnr_floor_db(scheme, nearest=nearest)
    return LayerReport(
        module=module,
        source=source.weights[origin].encoding,
        scheme="dense" if scheme is None else str(scheme),
        bits_per_weight=8 * _weight_bytes(output, module) / max(1, math.prod(weight.shape)),
        relative=found.sums.relative,
        sqnr_db=found.sums.sqnr_db,
        max_abs=found.sums.max_abs,
        floor_db=floor,
        max_steps=found.max_steps,
        problem=found.problem,
    )


def _compare(
    output: Source, module: str, source: Source, origin: str, *, nearest: bool
) -> WeightCheck:
    shape, expected = output.weights[module].shape, source.weights[origin].parameter_shape
    unknown = ErrorSums(noise=math.inf)
    if shape != expected:
        problem = f"shape is `{shape}`, the source has `{expected}`"
        return WeightCheck(sums=unknown, problem=problem)
    try:
        candidate = output.read_weight(module)
    except QuantloadError as error:
        return WeightCheck(sums=unknown, problem=error.message)
    reference = source.read_parameter(origin)
    if not isinstance(candidate, QuantTensor):
        return WeightCheck(
            sums=error_sums(candidate, reference), problem=_difference(candidate, reference)
        )
    scheme = output.weights[module].scheme
    assert scheme is not None, "a quantized weight has a scheme"
    found = check_quantized(candidate, reference, scheme, nearest=nearest)
    if found.problem and _has_values(candidate, reference):
        return replace(found, problem="")  # rounded by whoever made the source
    return found


def _has_values(candidate: QuantTensor, reference: Tensor) -> bool:
    """True if a quantized weight stands for the very values of the source, as that rounds them."""
    values = candidate.dequantize().to(reference.dtype)
    return bool(reference.isfinite().all()) and torch.equal(values, reference)


def _difference(candidate: Tensor, reference: Tensor) -> str:
    """Say how a full-precision tensor differs from the source in its dtype; "" if it is equal.

    A float tensor stays one of full precision, and holds no NaN and no infinity: those pass for
    equal where the source is damaged too.
    """
    if candidate.shape != reference.shape:
        return f"shape is `{tuple(candidate.shape)}`, the source has `{tuple(reference.shape)}`"
    is_float = reference.dtype.is_floating_point
    if is_float and candidate.dtype not in (*FLOAT_DTYPES, reference.dtype):
        return f"dtype is `{candidate.dtype}`, the source has `{reference.dtype}`"
    if candidate.dtype.is_floating_point:
        bad = int((~candidate.to(torch.float64).isfinite()).sum())
        if bad:
            return f"{bad} values are not finite"
    changed = int((candidate != reference.to(candidate.dtype)).sum())
    return f"{changed} values differ from the source cast to `{candidate.dtype}`" if changed else ""


def _check_plain(output: Source, source: Source, name: str) -> str:
    modules = {w.parameter_name: m for m, w in source.weights.items() if not w.is_matrix}
    if name in source.plain:
        reference = source.read_plain(name)
    elif name in modules:
        reference = source.read_parameter(modules[name])
    else:
        return ""
    problem = _difference(output.read_plain(name), reference)
    return f"tensor `{name}`: {problem}" if problem else ""
