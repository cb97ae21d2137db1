"""Decode every tensor of an output with the reader's own code and compare it with the source.

A quantized weight is held to its own rounding, see `weight_check.py`; a full-precision tensor must
be equal, bit for bit, to the source cast to its dtype. Missing, extra, non-finite tensors and zero
scales fail, and a config.json that describes another model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from quantload.accuracy.config_defaults import config_differences
from quantload.accuracy.tied_head import has_own_head
from quantload.accuracy.weight_check import WeightCheck, WeightChecker
from quantload.accuracy.weight_comparer import CHUNK_BYTES, WeightComparer, difference
from quantload.errors import QuantloadError, listed
from quantload.loader.checkpoint import files_kept_open
from quantload.loader.code_rows import row_step
from quantload.loader.experts import apart_as_in
from quantload.loader.joined_experts import as_stored
from quantload.loader.model_dtype import config_dtype
from quantload.loader.peak_memory import beside_tasks
from quantload.loader.plan import Plan
from quantload.loader.row_reader import region_of
from quantload.loader.source import Source
from quantload.loader.workers import Resources, work_through
from quantload.mappers.facts import facts_from_names
from quantload.progress import Progress
from quantload.quant.metrics import ErrorSums
from quantload.quant.noise_limits import sqnr_floor_db

_CHUNKS = 12  # of rows that are in work: both sides, their difference, and what is quantized again
_BYTES_OF_CODES = 4  # of an element: while fields become codes
_BYTES_OF_FLOATS = 12  # of an element: copies of a decoded weight in float32 that exist at a time
_LEFT = 1 << 26  # what allocators keep of the conversion before: up to 60 MB were measured


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
        notes: What the check took from elsewhere, for people.
    """

    layers: tuple[LayerReport, ...]
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """True if every weight passes and nothing else is wrong."""
        return not self.problems and all(layer.passed for layer in self.layers)

    def failures(self) -> list[str]:
        """Return one line for everything that is wrong."""
        failed = [f"`{layer.module}`: {layer.problem}" for layer in self.layers if layer.problem]
        return [*failed, *self.problems]


def verify_sources(
    output: Source,
    source: Source,
    progress: Progress,
    *,
    nearest: bool = False,
    plan: Plan | None = None,
    resources: Resources | None = None,
) -> VerifyReport:
    """Compare every tensor of `output` with `source`.

    Args:
        output: What was written, opened like any checkpoint.
        source: What it was made from.
        progress: Advances by bytes of the output.
        nearest: The output was rounded to nearest, as a conversion does: hold every weight to its
            rounding step.
        plan: What was carried out: its weights are quantized once more, and must come out the same.
        resources: Memory and threads.
    """
    resources = resources or Resources()
    output = as_stored(output)
    source = apart_as_in(source, output)
    tied = facts_from_names(source.weights, tied_head=True).tied  # of a head that was untied
    origin = {module: tied.get(module, module) for module in output.weights}
    checks = [
        _Check(output, module, source, origin[module], nearest)
        for module in output.weights
        if origin[module] in source.weights
    ]
    layers: dict[str, LayerReport] = {}

    @contextmanager
    def worker() -> Iterator[Callable[[_Check], None]]:
        with files_kept_open(), WeightComparer(plan) as comparer:
            yield lambda check: layers.update({check.module: check.run(comparer)})

    progress.start("verify", total=_total_bytes(output), unit="B")
    work_through(
        checks,
        worker,
        threads=resources.threads(),
        memory=resources.memory,
        finished=lambda check: progress.advance(_weight_bytes(output, check.module)),
    )
    problems = _missing_and_extra(output, source, origin)
    with files_kept_open():
        problems += [
            problem for name in output.plain if (problem := _check_plain(output, source, name))
        ]
    configs = output.checkpoint.config, source.checkpoint.config
    problems += _about_names(output)
    problems += config_differences(*configs, own_head=has_own_head(output))
    progress.finish()
    return VerifyReport(
        layers=tuple(layers[check.module] for check in checks), problems=tuple(problems)
    )


@dataclass(frozen=True)
class _Check:
    """One weight to check."""

    output: Source
    module: str
    source: Source
    origin: str
    nearest: bool

    @property
    def working_bytes(self) -> int:
        """Memory that it needs."""
        weight = self.source.weights[self.origin]
        written = self.output.weights[self.module]
        return _working_bytes(
            math.prod(weight.parameter_shape),
            stored=_weight_bytes(self.output, self.module),
            reads_source=region_of(weight, self.source) is not None,
            reads_output=region_of(written, self.output) is not None
            or row_step(self.output, self.module) is not None,
        )

    @torch.no_grad()
    def run(self, comparer: WeightComparer) -> LayerReport:
        """Compare it."""
        weight = self.output.weights[self.module]
        found = self._compare(comparer)
        scheme = weight.scheme
        is_held = self.nearest or comparer.repeats(self.module)
        floor = math.inf if scheme is None else sqnr_floor_db(scheme, nearest=is_held)
        bits = 8 * _weight_bytes(self.output, self.module) / max(1, math.prod(weight.shape))
        return LayerReport(
            module=self.module,
            source=self.source.weights[self.origin].encoding,
            scheme="dense" if scheme is None else str(scheme),
            bits_per_weight=bits,
            relative=found.sums.relative,
            sqnr_db=found.sums.sqnr_db,
            max_abs=found.sums.max_abs,
            floor_db=floor,
            max_steps=found.max_steps,
            problem=found.problem,
        )

    def _compare(self, comparer: WeightComparer) -> WeightCheck:
        weight = self.output.weights[self.module]
        expected = self.source.weights[self.origin].parameter_shape
        unknown = ErrorSums(noise=math.inf)
        if weight.shape != expected:
            problem = f"shape is `{weight.shape}`, the source has `{expected}`"
            return WeightCheck(sums=unknown, problem=problem)
        try:
            if weight.scheme is None:
                return comparer.compare_dense(self.output, self.module, self.source, self.origin)
            written = comparer.code_rows(self.output, self.module)
        except QuantloadError as error:
            return WeightCheck(sums=unknown, problem=error.message)
        if not written.is_quantized:  # decoded to floats by its format
            return comparer.compare_dense(self.output, self.module, self.source, self.origin)
        checker = WeightChecker(
            weight.scheme,
            nearest=self.nearest,
            weight_dtype=comparer.weight_dtype(self.module)
            or config_dtype(self.output.checkpoint.config),
        )
        return comparer.compare(checker, written, self.module, self.source, self.origin)


def _working_bytes(elements: int, *, stored: int, reads_source: bool, reads_output: bool) -> int:
    """Return the memory of a check, estimated from above.

    Args:
        elements: Of the weight.
        stored: Bytes of its tensors in the output.
        reads_source: The source is read in rows as it is stored, not decoded.
        reads_output: The same of the output, or it is decoded in rows.
    """
    output = 0 if reads_output else stored + _BYTES_OF_CODES * elements
    source = 0 if reads_source else _BYTES_OF_FLOATS * elements
    return _CHUNKS * CHUNK_BYTES + output + source


def verification_memory(plan: Plan, resources: Resources) -> int:
    """Return a bound of the memory that verifying a plan's output takes, after its conversion.

    Bytes above the interpreter's own, as `peak_memory` counts them.
    """
    needs = [
        _working_bytes(
            math.prod(row.shape),
            stored=row.output_bytes,
            reads_source=row.region is not None,
            reads_output=row.scheme is None or plan.target.has_rows_apart,
        )
        for row in plan.rows
    ]
    # not limited by the memory for tasks: allocators keep what the largest of each thread took
    return beside_tasks(plan) + _LEFT + sum(sorted(needs)[-resources.threads() :])


def _weight_bytes(source: Source, module: str) -> int:
    names = source.weights[module].leaves.values()
    return sum(source.checkpoint.tensors[name].num_bytes for name in names)


def _total_bytes(source: Source) -> int:
    return sum(_weight_bytes(source, module) for module in source.weights)


def _about_names(output: Source) -> list[str]:
    """Say that the names of an output are those of a wrapper, which no engine reads."""
    if not (taken_off := output.checkpoint.wrappers):
        return []
    return [f"its tensors have names with `{taken_off}`, which a wrapper of the model leaves there"]


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


def _check_plain(output: Source, source: Source, name: str) -> str:
    modules = {w.parameter_name: m for m, w in source.weights.items() if not w.is_matrix}
    if name in source.plain:
        reference = source.read_plain(name)
    elif name in modules:
        reference = source.read_parameter(modules[name])
    else:
        return ""
    problem = str(difference(output.read_plain(name), reference))
    return f"tensor `{name}`: {problem}" if problem else ""
