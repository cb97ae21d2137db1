"""Read weights of an output and of its source side by side, some rows at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor

from quantload.accuracy.weight_check import WeightCheck, WeightChecker
from quantload.errors import NonFiniteWeight
from quantload.loader.casting import cast
from quantload.loader.code_rows import CodeRows
from quantload.loader.plan import Plan, PlanRow
from quantload.loader.row_reader import RowReader, pieces, region_of
from quantload.loader.source import FLOAT_DTYPES, Source
from quantload.loader.tasks import sharing
from quantload.loader.weight_rows import WeightRows
from quantload.quant.metrics import ErrorSums, error_sums
from quantload.quant.qtensor import QuantTensor

_CPU = torch.device("cpu")
CHUNK_BYTES = 1 << 21  # of a weight that is in work at a time: a conversion has one side only


class WeightComparer:
    """Compares weights; used by one thread, as a context manager.

    Args:
        plan: What was carried out, if that is known.
    """

    def __init__(self, plan: Plan | None) -> None:
        self._readers = (
            RowReader(_CPU, chunk_bytes=CHUNK_BYTES),
            RowReader(_CPU, chunk_bytes=CHUNK_BYTES),
        )
        self._again = (
            None if plan is None else WeightRows(plan, RowReader(_CPU, chunk_bytes=CHUNK_BYTES))
        )
        self._rows: dict[str, PlanRow] = {}
        self._sharing: dict[str, tuple[PlanRow, ...]] = {}
        if plan is not None:
            self._rows = {row.module: row for row in plan.rows}
            self._sharing = {row.module: rows for rows in sharing(plan) for row in rows}

    def __enter__(self) -> WeightComparer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for reader in self._readers:
            reader.close()
        if self._again is not None:
            self._again.reader.close()

    def code_rows(self, output: Source, module: str) -> CodeRows:
        """Return what decodes rows of a weight of the output.

        Raises:
            QuantloadError: It cannot be decoded.
        """
        return CodeRows(output, module, self._readers[1])

    def compare(
        self, checker: WeightChecker, written: CodeRows, module: str, source: Source, origin: str
    ) -> WeightCheck:
        """Compare a quantized weight with its source; quantize it once more if a plan says how."""
        row = self._rows.get(module)
        if row is None or self._again is None or not self.repeats(module):
            for start, rows in self._source_rows(source, origin, written.step):
                checker.add(_codes(written, start, rows), rows)
            return checker.result()
        try:
            shared = self._again.shared_range(self._sharing[module])
            for start, rows in self._source_rows(source, origin, self._again.step_of(row)):
                weight = cast(rows, row.dtype, module)
                again = self._again.quantize(weight, row, shared)
                checker.add(_codes(written, start, rows), rows, expected=again)
        except NonFiniteWeight as error:  # the source has changed since
            return WeightCheck(sums=ErrorSums(noise=math.inf), problem=error.message)
        return checker.result()

    def weight_dtype(self, module: str) -> torch.dtype | None:
        """Return the dtype in which a weight was quantized; None if no plan says it."""
        row = self._rows.get(module)
        return None if row is None else row.dtype

    def repeats(self, module: str) -> bool:
        """True if a weight is quantized once more, to be compared with what was written."""
        row = self._rows.get(module)
        return row is not None and row.scheme is not None and not row.keeps_values

    def compare_dense(
        self, output: Source, module: str, source: Source, origin: str
    ) -> WeightCheck:
        """Compare a weight in full precision: it must be equal in its dtype."""
        region = region_of(output.weights[module], output)
        whole = output.read_parameter(module) if region is None else torch.empty(0)
        sums, found = ErrorSums(), Difference()
        for start, rows in self._source_rows(source, origin, 1):
            stop = start + rows.shape[0]
            written = whole[start:stop]
            if region is not None:
                entry = output.checkpoint.tensors[region.tensor]
                written = self._readers[1].read_rows(entry, region, start, stop)
            found += difference(written, rows)
            is_same = written.dtype == rows.dtype and torch.equal(written, rows)
            sums += ErrorSums(count=rows.numel()) if is_same else error_sums(written, rows)
        return WeightCheck(sums=sums, problem=str(found))

    def _source_rows(
        self, source: Source, origin: str, step: int | None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield (first row, rows) of a weight of the source, as it is stored or decoded."""
        region = region_of(source.weights[origin], source)
        if region is None:
            return pieces(source.read_parameter(origin), step=step)
        entry = source.checkpoint.tensors[region.tensor]
        return self._readers[0].rows(entry, region, step=step)


def _codes(written: CodeRows, start: int, rows: Tensor) -> QuantTensor:
    part = written.rows(start, start + rows.shape[0])
    assert isinstance(part, QuantTensor), "all rows are codes, or none"
    return part


@dataclass(frozen=True)
class Difference:
    """How a full-precision tensor differs from the source in its dtype; add two to merge them.

    Args:
        kind: Another shape or dtype; "" if they fit.
        nonfinite: Values that are NaN or infinite.
        changed: Values that are not those of the source.
        dtype: What the values of the source were cast to.
    """

    kind: str = ""
    nonfinite: int = 0
    changed: int = 0
    dtype: torch.dtype | None = None

    def __add__(self, other: Difference) -> Difference:
        return Difference(
            self.kind or other.kind,
            self.nonfinite + other.nonfinite,
            self.changed + other.changed,
            self.dtype or other.dtype,
        )

    def __str__(self) -> str:
        if self.kind or not (self.nonfinite or self.changed):
            return self.kind
        if self.nonfinite:
            return f"{self.nonfinite} values are not finite"
        return f"{self.changed} values differ from the source cast to `{self.dtype}`"


def difference(candidate: Tensor, reference: Tensor) -> Difference:
    """Say how a full-precision tensor differs from the source in its dtype.

    A float tensor stays one of full precision, and holds no NaN and no infinity: those pass for
    equal where the source is damaged too.
    """
    if candidate.shape != reference.shape:
        return Difference(
            f"shape is `{tuple(candidate.shape)}`, the source has `{tuple(reference.shape)}`"
        )
    is_float = reference.dtype.is_floating_point
    if is_float and candidate.dtype not in (*FLOAT_DTYPES, reference.dtype):
        return Difference(f"dtype is `{candidate.dtype}`, the source has `{reference.dtype}`")
    nonfinite = 0
    if candidate.dtype.is_floating_point:
        nonfinite = int((~_comparable(candidate).isfinite()).sum())
    changed = int((candidate != reference.to(candidate.dtype)).sum())
    return Difference("", nonfinite, changed, candidate.dtype)


def _comparable(tensor: Tensor) -> Tensor:
    """Floats of one byte have no `isfinite` of their own."""
    return tensor.to(torch.float32) if tensor.dtype.itemsize == 1 else tensor
