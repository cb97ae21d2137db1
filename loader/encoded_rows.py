"""The tensors that a quantized weight of a plan becomes, some rows at a time.

Rows that stay in the cache are read, quantized and encoded before the next are. Whoever puts the
parts together, in files or in memory, gets the tensors of the weight quantized at once.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from quantload.errors import NotLossless
from quantload.loader.formats.compressed_tensors_lossless import encode_lossless
from quantload.loader.lost_scales import LostScales
from quantload.loader.output_files import Leaf
from quantload.loader.plan import Plan, PlanRow
from quantload.loader.weight_rows import WeightRows
from quantload.quant.qtensor import QuantTensor


def encoded_rows(
    weights: WeightRows, row: PlanRow, shared: Tensor | None
) -> Iterator[tuple[str, Tensor, int]]:
    """Yield (leaf, part, first row of the leaf) of a weight that is quantized, in order.

    A leaf that all rows have in common comes once, with the first of them.

    Args:
        weights: Reads and quantizes the source; parts are on the device of its reader, but for a
            weight that keeps its values.
        row: The weight, with its scheme.
        shared: [2] its `WeightRows.shared_range`.

    Raises:
        NonFiniteWeight: The weight is not finite.
        ConfigError: It is so small that the dtype of its scales has none for it.
        NotLossless: It keeps its values, and they would change.
    """
    for start, leaves in _encoded(weights, row, shared):
        yield from _placed(weights.plan, row, leaves, start)


def _encoded(
    weights: WeightRows, row: PlanRow, shared: Tensor | None
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    assert row.scheme is not None, "full precision is not encoded"
    if row.keeps_values:
        yield 0, _same_values(weights.plan, row)
        return
    nearest = weights.plan.options.observer == "minmax"
    lost = LostScales(row, nearest=nearest, shares=shared is not None)
    for start, weight in weights.rows(row, step=weights.step_of(row)):
        quantized = weights.quantize(weight, row, shared)
        lost.see(weight, quantized)
        yield start, weights.plan.target.encode(quantized, row.scheme, _matrix_shape(row))
    lost.end()


def _placed(
    plan: Plan, row: PlanRow, leaves: dict[str, Tensor], start: int
) -> Iterator[tuple[str, Tensor, int]]:
    """Yield where the leaves of the rows from `start` on lie in the leaves of the weight."""
    planned = {output.name: output.shape for output in row.outputs}
    before = _layout(plan, row, start) if start else {}
    for leaf, part in leaves.items():
        if not start:
            yield leaf, part, 0
        elif tuple(part.shape) != planned[f"{row.module}.{leaf}"]:
            yield leaf, part, before[leaf].shape[0]


def _layout(plan: Plan, row: PlanRow, rows: int) -> dict[str, Leaf]:
    """Return the tensors that the first rows of a weight fill."""
    assert row.scheme is not None, "full precision has no leaves"
    return plan.target.layout(row.scheme, (rows, _matrix_shape(row)[1]), row.dtype)


def _matrix_shape(row: PlanRow) -> tuple[int, int]:
    rows, columns = row.shape
    return rows, columns


def _same_values(plan: Plan, row: PlanRow) -> dict[str, Tensor]:
    """Encode what the source holds, code for code."""
    assert row.scheme is not None, "only quantized weights keep their codes"
    weight = plan.source.read_weight(row.read_from)
    planned = {o.name.removeprefix(f"{row.module}."): Leaf(o.dtype, o.shape) for o in row.outputs}
    try:
        if not isinstance(weight, QuantTensor):
            raise NotLossless("its format decodes it to floats")
        return encode_lossless(weight, row.scheme, planned)
    except NotLossless as error:
        raise NotLossless(
            f"`{row.module}` ({row.source}) cannot be written as {row.scheme} with the same "
            f"values: {error.message}",
            hint=f"dequantize it with the rule `{row.module} = dense`",
        ) from error
