"""Whether two checkpoints are of one model, so that they can be compared."""

from __future__ import annotations

from typing import TypedDict

from quantload.accuracy.config_check import find_differences
from quantload.accuracy.tied_head import with_tied_head
from quantload.errors import NotComparable, listed
from quantload.loader.experts import apart_as_in
from quantload.loader.source import Source


def apart_alike(reference: Source, candidate: Source) -> tuple[Source, Source]:
    """Return two checkpoints of one model, experts of both apart if those of one are.

    A reference whose head is its embedding has it under the name of a head that only the candidate
    has.

    Raises:
        NotComparable: They are of different models, see `check_one_model`.
    """
    reference = apart_as_in(reference, candidate)
    candidate = apart_as_in(candidate, reference)
    check_one_model(reference, candidate)
    return with_tied_head(reference, candidate), candidate


def check_one_model(reference: Source, candidate: Source) -> None:
    """Refuse checkpoints whose architecture, weights or shapes differ.

    Raises:
        NotComparable: They are of different models.
    """
    configs = candidate.checkpoint.config, reference.checkpoint.config
    differences = [str(d) for d in find_differences(*configs, ("architectures", "model_type"))]
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


class LoneNames(TypedDict):
    """Names of weights and other tensors that only one side has."""

    only_in_reference: tuple[str, ...]
    only_in_candidate: tuple[str, ...]


def lone_names(reference: Source, candidate: Source) -> LoneNames:
    """Return the names of weights and other tensors that only one side has."""
    return LoneNames(
        only_in_reference=_only_in(reference, candidate),
        only_in_candidate=_only_in(candidate, reference),
    )


def _only_in(one: Source, other: Source) -> tuple[str, ...]:
    weights = (module for module in one.weights if module not in other.weights)
    return (*weights, *(name for name in one.plain if name not in other.plain))


__all__ = ["LoneNames", "apart_alike", "check_one_model", "lone_names", "shared_plain"]
