"""Compare the weights of two checkpoints of one model; for the limits see `compare.py`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TypedDict

import torch
from torch import Tensor

from quantload.accuracy.compare import LayerComparison, ModelComparison
from quantload.accuracy.config_check import config_differences
from quantload.accuracy.weight_rounding import Rounding, rounding_of, standing_out
from quantload.errors import NotComparable, listed
from quantload.loader.checkpoint import files_kept_open
from quantload.loader.experts import apart_as_in
from quantload.loader.source import Source, SourceWeight, as_parameter
from quantload.progress import Progress
from quantload.quant.metrics import error_sums
from quantload.quant.qtensor import QuantTensor


@torch.no_grad()
@files_kept_open()
def compare_weights(reference: Source, candidate: Source, progress: Progress) -> ModelComparison:
    """Compare every weight and every other float tensor; one of each is in memory at a time.

    Raises:
        NotComparable: They are of different models: no weight is in both, or architectures or
            shapes differ.
    """
    reference = apart_as_in(reference, candidate)
    candidate = apart_as_in(candidate, reference)
    check_one_model(reference, candidate)
    shared = [module for module in reference.weights if module in candidate.weights]
    rows = []
    progress.start("weights", total=len(shared), unit="layers")
    for module in shared:
        rows.append(_compare_weight(reference, candidate, module))
        progress.advance(1, note=module)
    progress.finish()
    damage = standing_out({row.module: (row.candidate, row.rounding) for row in rows})
    rows = [replace(row, damage=damage.get(row.module, "")) for row in rows]
    compared = (
        compare_plain(reference, candidate, name) for name in shared_plain(reference, candidate)
    )
    return ModelComparison(
        layers=(*rows, *(row for row in compared if row.differs)),
        only_in_reference=_only_in(reference, candidate),
        only_in_candidate=_only_in(candidate, reference),
    )


def _compare_weight(reference: Source, candidate: Source, module: str) -> LayerComparison:
    return compare_values(
        (reference.weights[module], reference.read_weight(module)),
        (candidate.weights[module], candidate.read_weight(module)),
    )


def compare_values(
    reference: tuple[SourceWeight, QuantTensor | Tensor],
    candidate: tuple[SourceWeight, QuantTensor | Tensor],
) -> LayerComparison:
    """Compare one weight that was read from both checkpoints."""
    (described, original), (weight, held) = reference, candidate
    rounding: Rounding | None = None
    values = held if isinstance(held, Tensor) else held.dequantize()
    if isinstance(held, QuantTensor) and isinstance(original, Tensor):
        rounding = rounding_of(held, values, original)
    expected = original if isinstance(original, Tensor) else original.dequantize()
    return LayerComparison(
        module=weight.module,
        reference=described.encoding,
        candidate=weight.encoding,
        weight=error_sums(as_parameter(values, weight), as_parameter(expected, described)),
        rounding=rounding,
        **_limits(described, weight),
    )


class _Limits(TypedDict, total=False):
    """Limits of a row of a comparison; none if its schemes differ."""

    weight_limit: float
    output_limit: float


def _limits(reference: SourceWeight, candidate: SourceWeight) -> _Limits:
    """Return the limits of a row by field: see the top of the file."""
    if reference.scheme != candidate.scheme:
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


def check_one_model(reference: Source, candidate: Source) -> None:
    """Refuse checkpoints whose architecture, weights or shapes differ.

    Raises:
        NotComparable: They are of different models.
    """
    configs = candidate.checkpoint.config, reference.checkpoint.config
    differences = config_differences(*configs, ("architectures", "model_type"))
    if differences:
        raise NotComparable("not of one model: " + "; ".join(differences))
    shared = [module for module in reference.weights if module in candidate.weights]
    if not shared:
        raise NotComparable(
            f"`{reference.checkpoint.name}` and `{candidate.checkpoint.name}` have no weight of "
            f"the same name: {listed(reference.weights)} against {listed(candidate.weights)}"
        )
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for module in shared:
        one, other = reference.weights[module], candidate.weights[module]
        shapes[f"weight of `{module}`"] = one.parameter_shape, other.parameter_shape
    for name in shared_plain(reference, candidate):
        entries = reference.plain[name], candidate.plain[name]
        shapes[f"tensor `{name}`"] = tuple(entries[0].shape), tuple(entries[1].shape)
    for what, (expected, found) in shapes.items():
        if expected != found:
            raise NotComparable(
                f"{what} has shape `{expected}` in the reference, `{found}` in the candidate"
            )


def shared_plain(reference: Source, candidate: Source) -> list[str]:
    """Return the float tensors that both have beside their 2-D weights."""
    return [
        name
        for name, entry in reference.plain.items()
        if name in candidate.plain
        and entry.dtype.is_floating_point
        and candidate.plain[name].dtype.is_floating_point
    ]


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


def _only_in(one: Source, other: Source) -> tuple[str, ...]:
    weights = (module for module in one.weights if module not in other.weights)
    return (*weights, *(name for name in one.plain if name not in other.plain))


__all__ = [
    "cast_limit",
    "check_one_model",
    "compare_plain",
    "compare_values",
    "compare_weights",
    "shared_plain",
    "sum_limit",
]
