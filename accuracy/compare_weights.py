"""Compare the weights of two checkpoints of one model; for the limits see `compare.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypedDict

import torch
from torch import Tensor

from quantload.accuracy.compare import (
    FEW_VALUES,
    FEW_VALUES_LIMIT,
    LayerComparison,
    ModelComparison,
)
from quantload.accuracy.one_model import apart_alike, check_one_model, lone_names, shared_plain
from quantload.accuracy.stored_rows import HeldRows, StoredRows, Value, dense
from quantload.accuracy.weight_rounding import RoundingSums, far_above, standing_out
from quantload.loader.checkpoint import files_kept_open
from quantload.loader.code_rows import row_step
from quantload.loader.row_reader import RowReader, region_of
from quantload.loader.source import Source, SourceWeight, as_parameter
from quantload.loader.workers import Resources, work_through
from quantload.progress import Progress
from quantload.quant import compiled
from quantload.quant.measure import Measured
from quantload.quant.metrics import ErrorSums, error_sums
from quantload.quant.qtensor import QuantTensor
from quantload.quant.row_errors import RowErrors, row_errors
from quantload.quant.step_errors import num_values

_CPU = torch.device("cpu")
_ELEMENTS = 1 << 21  # of a weight that are in work at a time
_BYTES_OF_CODES = 5  # an element that is decoded whole, with what decoding takes
_CHUNKS_BYTES = 1 << 26


@files_kept_open()
def compare_weights(
    reference: Source,
    candidate: Source,
    progress: Progress,
    *,
    resources: Resources | None = None,
) -> ModelComparison:
    """Compare every weight and every other float tensor, some rows of each side at a time.

    Args:
        reference: The checkpoint that is taken as right.
        candidate: The checkpoint that is judged.
        progress: Advances by layers.
        resources: Memory and threads.

    Raises:
        NotComparable: They are of different models: no weight is in both, or architectures or
            shapes differ.
    """
    reference, candidate = apart_alike(reference, candidate)
    shared = [module for module in reference.weights if module in candidate.weights]
    found = _compare_shared(reference, candidate, shared, progress, resources or Resources())
    damage = _damage(found)
    rows = [replace(found[module], damage=damage.get(module, "")) for module in shared]
    compared = (
        compare_plain(reference, candidate, name) for name in shared_plain(reference, candidate)
    )
    return ModelComparison(
        layers=(*rows, *(row for row in compared if row.differs)),
        **lone_names(reference, candidate),
    )


def _damage(found: Mapping[str, LayerComparison]) -> dict[str, str]:
    """Say in what damaged layers stand out among their like."""
    errors = {
        module: (f"{row.reference}, {row.candidate}", row.weight.relative, row.rounding)
        for module, row in found.items()
        if row.weight is not None and row.differs and math.isfinite(row.weight.relative)
    }
    rounding = {module: (row.candidate, row.rounding) for module, row in found.items()}
    return far_above(errors) | standing_out(rounding)


def _compare_shared(
    reference: Source,
    candidate: Source,
    modules: Sequence[str],
    progress: Progress,
    resources: Resources,
) -> dict[str, LayerComparison]:
    """Compare weights, the largest first, each by one thread."""
    pairs = [_Pair(reference, candidate, module) for module in modules]
    pairs.sort(key=lambda pair: pair.num_elements, reverse=True)
    compiled.expect(sum(pair.num_elements for pair in pairs))
    found: dict[str, LayerComparison] = {}

    @contextmanager
    def worker() -> Iterator[Callable[[_Pair], None]]:
        readers = RowReader(_CPU), RowReader(_CPU)

        def compare(pair: _Pair) -> None:
            found[pair.module] = pair.compare(readers)
            for reader in readers:
                reader.shrink()

        try:
            with files_kept_open():
                yield compare
        finally:
            for reader in readers:
                reader.close()

    progress.start("weights", total=len(pairs), unit="layers")
    work_through(
        pairs,
        worker,
        threads=resources.threads(),
        memory=resources.memory,
        finished=lambda pair: progress.advance(1, note=pair.module),
    )
    progress.finish()
    return found


@dataclass(frozen=True)
class _Pair:
    """One weight of both checkpoints."""

    reference: Source
    candidate: Source
    module: str

    @property
    def num_elements(self) -> int:
        return math.prod(self.reference.weights[self.module].parameter_shape)

    @property
    def working_bytes(self) -> int:
        """Memory that it needs, estimated from above."""
        whole = sum(
            region_of(source.weights[self.module], source) is None
            and row_step(source, self.module) is None
            for source in (self.reference, self.candidate)
        )
        return _CHUNKS_BYTES + whole * _BYTES_OF_CODES * self.num_elements

    @torch.no_grad()
    def compare(self, readers: tuple[RowReader, RowReader]) -> LayerComparison:
        """Compare it."""
        sides = (
            StoredRows(source, self.module, reader)
            for source, reader in zip((self.reference, self.candidate), readers, strict=True)
        )
        reference, candidate = sides
        return _compare_rows((reference.weight, reference), (candidate.weight, candidate))


@torch.no_grad()
def compare_values(
    reference: tuple[SourceWeight, QuantTensor | Tensor],
    candidate: tuple[SourceWeight, QuantTensor | Tensor],
) -> LayerComparison:
    """Compare one weight that was read from both checkpoints."""
    (described, original), (weight, held) = reference, candidate
    return _compare_rows((described, HeldRows(original)), (weight, HeldRows(held)))


_Rows = StoredRows | HeldRows


def _compare_rows(
    reference: tuple[SourceWeight, _Rows], candidate: tuple[SourceWeight, _Rows]
) -> LayerComparison:
    """Compare one weight, some rows at a time."""
    (described, wanted), (weight, held) = reference, candidate
    count = held.num_rows
    if described.is_transposed != weight.is_transposed:  # one side has input features first
        values, expected = (
            as_parameter(dense(rows.rows(0, rows.num_rows)), of)
            for of, rows in (candidate, reference)
        )
        return _row(described, weight, error_sums(values, expected))
    sums, rounding = ErrorSums(), RoundingSums()
    noise, signal = (torch.zeros(count, dtype=torch.float64) for _ in range(2))
    step = math.lcm(wanted.step, held.step)
    many = max(1, _ELEMENTS // max(1, weight.shape[1] * step)) * step
    for start in range(0, count, many):
        stop = min(start + many, count)
        errors = _errors_of(held.rows(start, stop), wanted.rows(start, stop), rounding)
        noise[start:stop], signal[start:stop] = errors.noise, errors.signal
        sums += errors.sums
    worst = RowErrors(noise=noise, signal=signal, sums=sums).worst()
    return replace(
        _row(described, weight, sums),
        rounding=rounding.result(),
        worst_row=worst[0] if sums.noise != 0 else None,
        worst_row_error=worst[1] if sums.noise != 0 else None,
    )


def _errors_of(part: Value, original: Value, rounding: RoundingSums) -> RowErrors:
    """Return the errors of some rows; of codes against floats they are also counted in steps."""
    values = dense(part)
    measured: Measured | None = None
    if isinstance(part, QuantTensor) and isinstance(original, Tensor):
        measured = rounding.add(part, values, original)
    if measured is None or not measured.is_of_reference:
        return row_errors(values, dense(original))
    return RowErrors(noise=measured.noise, signal=measured.signals, sums=measured.sums)


def _row(described: SourceWeight, weight: SourceWeight, sums: ErrorSums) -> LayerComparison:
    return LayerComparison(
        module=weight.module,
        reference=described.encoding,
        candidate=weight.encoding,
        weight=sums,
        **_limits(described, weight),
    )


class _Limits(TypedDict, total=False):
    """Limits of a row of a comparison; none if its schemes differ."""

    weight_limit: float
    output_limit: float


def _limits(reference: SourceWeight, candidate: SourceWeight) -> _Limits:
    """Return the limits of a row by field: see the top of the file."""
    if reference.scheme != candidate.scheme:
        weight = None if candidate.scheme is None else candidate.scheme.weight
        if weight is not None and num_values(weight.grid) <= FEW_VALUES:
            return _Limits(weight_limit=FEW_VALUES_LIMIT, output_limit=FEW_VALUES_LIMIT)
        return _Limits()
    return _Limits(
        weight_limit=cast_limit(reference.dtype, candidate.dtype),
        output_limit=sum_limit(reference.shape[1]),
    )


def cast_limit(one: torch.dtype, other: torch.dtype) -> float:
    """Return the relative error that a cast from one dtype to the other may make."""
    if one == other:
        return 0.0
    return 4 * max(torch.finfo(dtype).eps for dtype in (one, other))


def sum_limit(columns: int) -> float:
    """Return the relative error of an output [.., N] that another order of K sums may make.

    Args:
        columns: K.
    """
    rounding = 4 * torch.finfo(torch.bfloat16).eps
    return rounding + math.sqrt(columns) * torch.finfo(torch.float32).eps


def compare_plain(reference: Source, candidate: Source, name: str) -> LayerComparison:
    """Compare a float tensor that is no weight of a layer."""
    return LayerComparison(
        module=name,
        reference=_dtype_name(reference, name),
        candidate=_dtype_name(candidate, name),
        weight=error_sums(candidate.read_plain(name), reference.read_plain(name)),
        is_plain=True,
        weight_limit=cast_limit(reference.plain[name].dtype, candidate.plain[name].dtype),
    )


def _dtype_name(source: Source, name: str) -> str:
    return str(source.plain[name].dtype).removeprefix("torch.")


__all__ = [
    "cast_limit",
    "check_one_model",
    "compare_plain",
    "compare_values",
    "compare_weights",
    "shared_plain",
    "sum_limit",
]
