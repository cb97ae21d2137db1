"""The weights of a plan in rows, in the dtype in which they are quantized, and their ranges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantload.errors import NonFiniteWeight, listed
from quantload.loader.casting import cast
from quantload.loader.plan import Plan, PlanRow
from quantload.loader.row_reader import RowReader, pieces
from quantload.quant.activation import with_input_scale
from quantload.quant.qtensor import QuantTensor
from quantload.quant.scales import merged_range, shared_range
from quantload.quant.scheme import WeightScheme
from quantload.quant.search import search_scales

_MOST_THREADS = 32  # that share the memory of a GPU


@dataclass
class WeightRows:
    """Reads and quantizes the weights of a plan; used by one thread.

    Args:
        plan: What is carried out.
        reader: Reads the source; rows come on its device.
    """

    plan: Plan
    reader: RowReader
    _decoded: tuple[str, Tensor] | None = None
    _kept: dict[str, list[tuple[int, Tensor]]] = field(default_factory=dict)
    _mean_square: tuple[str, Tensor] | None = None

    def rows(self, row: PlanRow, *, step: int | None) -> Iterator[tuple[int, Tensor]]:
        """Yield (first row, rows) of a weight in the dtype of the plan.

        Rows are valid until the next are asked for. A weight that has to be decoded is kept until
        another is, or `shrink` is called.

        Args:
            row: Whose weight.
            step: Every piece but the last has a multiple of this many rows; None is one piece.
        """
        if row.region is None:
            if self._decoded is None or self._decoded[0] != row.module:
                self._decoded = None  # frees it
                self._decoded = row.module, self.read_whole(row).to(self.reader.device)
            yield from pieces(self._decoded[1], step=step)
            return
        if row.module in self._kept:
            yield from self._kept.pop(row.module)
            return
        entry = self.plan.source.checkpoint.tensors[row.region.tensor]
        for start, rows in self.reader.rows(entry, row.region, step=step):
            yield start, cast(rows, row.dtype, row.module)

    def shrink(self) -> None:
        """Give back memory that a large weight took."""
        self._decoded = None
        self._kept.clear()
        self.reader.shrink()

    def read_whole(self, row: PlanRow) -> Tensor:
        """Read a weight, or a tensor that is copied, in one piece."""
        source = self.plan.source
        if row.read_from not in source.weights:
            weight = source.read_plain(row.read_from)
        elif row.scheme is None:
            weight = source.read_parameter(row.read_from)
        else:
            weight = source.read_dense(row.read_from)
        return cast(weight, row.dtype, row.module)

    def shared_range(self, rows: Sequence[PlanRow]) -> Tensor | None:
        """Return the range [2] of a weight, or of all members of a fused group.

        None if no scale is computed from it.

        Raises:
            NonFiniteWeight: A member holds NaN or infinity.
        """
        if not all(row.shares_range for row in rows):
            return None
        self._kept.clear()
        is_kept = self._has_room(rows)
        of_rows = []
        for row in rows:
            parts, ranges = [], []
            for start, part in self.rows(row, step=self.step_of(row)):
                ranges.append(shared_range(part))
                parts += [(start, part)] if is_kept else []
            if is_kept:
                self._kept[row.module] = parts
            of_rows.append(merged_range(ranges))
        merged = merged_range(of_rows)
        if len(rows) > 1 and not bool(merged.isfinite().all()):
            raise _not_finite([r.module for r in rows], of_rows)
        return merged

    def _has_room(self, rows: Sequence[PlanRow]) -> bool:
        """True if weights may stay on a GPU between the look for their range and their rounding.

        Reading them again would take longer than all else. Each thread may take its share.
        """
        device = self.reader.device
        if device.type != "cuda" or not all(row.region is not None for row in rows):
            return False
        free, _ = torch.cuda.mem_get_info(device)
        return sum(row.source_bytes for row in rows) <= free // _MOST_THREADS

    def step_of(self, row: PlanRow) -> int | None:
        """Return the number of rows at whose multiples a weight may be cut; None for nowhere."""
        assert row.scheme is not None, "full precision is written as it is"
        return self.plan.target.row_step(row.scheme)

    def quantize(self, weight: Tensor, row: PlanRow, shared: Tensor | None) -> QuantTensor:
        """Quantize some rows of a weight.

        Raises:
            NonFiniteWeight: They are not finite.
            CheckpointError: Statistics of inputs have changed since the plan was made.
        """
        assert row.scheme is not None, "full precision is not quantized"
        assert row.scheme.weight is not None, "full precision is not quantized"
        try:
            quantized = self._quantize(weight, row, row.scheme.weight, shared)
        except NonFiniteWeight as error:
            raise NonFiniteWeight(
                f"weight of `{row.module}` cannot be quantized: {error.message}",
                hint=f"keep it with the rule `{row.module} = keep`, or repair the source",
            ) from error
        if row.input_absmax is None:
            return quantized
        assert row.scheme.input is not None, "only inputs that are quantized have a number"
        return with_input_scale(quantized, row.scheme.input, row.input_absmax.value)

    def _quantize(
        self, weight: Tensor, row: PlanRow, scheme: WeightScheme, shared: Tensor | None
    ) -> QuantTensor:
        """Quantize as the target and the observer of the plan say."""
        quantized = self.plan.target.quantize(weight, scheme, shared=shared)
        if self.plan.options.observer == "minmax":
            return quantized
        return search_scales(weight, quantized, scheme, importance=self._importance_of(row))

    def _importance_of(self, row: PlanRow) -> Tensor | None:
        """Return what an error in each column counts, [K] float32; None if all count alike."""
        if row.mean_square is None:
            return None
        kept = self._mean_square
        if kept is None or kept[0] != row.module:
            self._mean_square = kept = row.module, row.mean_square.read()
        return kept[1]


def _not_finite(modules: Sequence[str], ranges: Sequence[Tensor]) -> NonFiniteWeight:
    """Name the members that are to blame; with one scale for all, none can be kept alone."""
    both = zip(modules, ranges, strict=True)
    bad = [module for module, found in both if not bool(found.isfinite().all())]
    rules = ", ".join(f"`{module} = keep`" for module in modules)
    return NonFiniteWeight(
        f"weight of {listed(bad)} cannot be quantized: it holds NaN or infinity",
        hint=f"keep it and all that shares its scale with the rules {rules}, or repair the source",
    )
