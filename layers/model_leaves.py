"""The names that tensors of a model can have: what a `WeightMapper` is asked about."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from quantload.arguments import shown
from quantload.errors import WrongType
from quantload.mappers.mapper import WeightMapper
from quantload.mappers.name_rules import NameRules


def leaves_of(model: nn.Module) -> dict[str, frozenset[str]]:
    """Return the parameters and persistent buffers of each module's own, by its dotted path.

    A layer that waits for tensors instead of having parameters counts with what it waits for.
    """
    return {
        path: frozenset((*_parameters(module), *_buffers(module), *_awaited(module)))
        for path, module in model.named_modules(remove_duplicate=False)
    }


def _parameters(module: nn.Module) -> list[str]:
    return [name for name, parameter in module._parameters.items() if parameter is not None]


def _buffers(module: nn.Module) -> list[str]:
    named = module._buffers.items()
    transient = module._non_persistent_buffers_set
    return [name for name, buffer in named if buffer is not None and name not in transient]


def _awaited(module: nn.Module) -> set[str]:
    awaits: Callable[[], Mapping[tuple[str, int], object]] | None = getattr(module, "awaits", None)
    return set() if awaits is None else {leaf for leaf, _ in awaits()}


def mapper_by_hand(model: nn.Module) -> WeightMapper:
    """Return the mapper to a model that is written by hand.

    Its names are those of its modules; the class attribute `name_rules`, if it has one, turns
    checkpoint names into these. With `base_model_prefix`, the name of the module that holds all but
    the head, names may have it in front or not, as base models are saved without it.
    """
    rules = getattr(model, "name_rules", None)
    if rules is not None and not isinstance(rules, NameRules):
        raise WrongType(
            f"`{type(model).__name__}.name_rules` is {shown(rules)}, expected a `NameRules`",
            hint="for example `quantload.NameRules(prefix={...})`",
        )
    base = getattr(model, "base_model_prefix", "")
    return WeightMapper(leaves_of(model), base_prefix=base, rules=rules)


__all__ = ["leaves_of", "mapper_by_hand"]
