"""Weights that are quantized already: which keep their values, and what `--lossless` refuses."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from quantload.errors import NotLossless, listed
from quantload.loader.formats.compressed_tensors_lossless import planned_scheme
from quantload.loader.plan_row import PlanRow
from quantload.loader.source import FLOAT_DTYPES, Source, SourceWeight
from quantload.quant.scheme import Scheme


def same_scheme(weight: SourceWeight, *, try_all: bool = False) -> tuple[Scheme | None, str]:
    """Return the scheme in which a weight keeps its values, and the reason.

    Args:
        weight: A weight of the source.
        try_all: Hope for whole numbers where zero points are floats; an error later if they are
            not.

    Returns:
        None keeps it in full precision: it is, or there is no such scheme.
    """
    if weight.scheme is None or weight.scheme.weight is None:
        return None, "full precision in the source"
    try:
        if weight.obstacle:
            raise NotLossless(weight.obstacle)
        if weight.scheme.weight.zero == "float" and not try_all:
            raise NotLossless("its zero points are floats (`--lossless` tries nevertheless)")
        return planned_scheme(weight), f"as it is, {weight.encoding}"
    except NotLossless as error:
        return None, f"dequantized: {error}"


def is_in_scheme(weight: SourceWeight, scheme: Scheme) -> bool:
    """True if a weight can keep its values in this very scheme."""
    found = same_scheme(weight)[0]
    return found is not None and (found.weight, found.input) == (scheme.weight, scheme.input)


def refuse_loss(source: Source, rows: Iterable[PlanRow]) -> None:
    """Refuse rows that would change values.

    Raises:
        NotLossless: There are some; the first of them are named.
    """
    problems = {row.module: problem for row in rows if (problem := _loss(source, row))}
    if not problems:
        return
    first = next(iter(problems))
    raise NotLossless(
        f"{len(problems)} modules would change their values: {listed(problems)}; `{first}`: "
        f"{problems[first]}",
        hint="leave out `--lossless`, or give these modules another rule, for example "
        f"`{first} = dense` with `--dtype float32`",
    )


def _loss(source: Source, row: PlanRow) -> str:
    """Say how a row changes values; "" if it does not."""
    if row.keeps_values:
        return ""
    weight = source.weights.get(row.read_from)
    stored = weight.dtype if weight is not None else source.plain[row.read_from].dtype
    if row.scheme is not None:
        kind = "quantized again" if weight is not None and weight.is_quantized else "quantized"
        return f"it would be {kind} to {row.scheme} ({row.reason})"
    if row.is_same and weight is not None and weight.is_quantized:
        return row.reason
    if stored in FLOAT_DTYPES and not _holds(row.dtype, stored):
        return f"it is computed in `{stored}`, which `{row.dtype}` does not hold ({row.reason})"
    return ""


def _holds(target: torch.dtype, source: torch.dtype) -> bool:
    return torch.promote_types(target, source) == target
