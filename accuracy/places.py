"""Where in a model the weights of a checkpoint's modules lie, experts one by one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from quantload.loader.experts import Experts, split_experts
from quantload.loader.source import Source
from quantload.mappers.mapper import WeightMapper

# Path of a module, name of its parameter, and which expert; -1 for a layer of its own.
Place = tuple[str, str, int]
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def places_of(module: str, mapper: WeightMapper, experts: Experts) -> Iterator[Place]:
    """Yield the places that the weight of a module fills.

    Args:
        module: Checkpoint name.
        mapper: From checkpoint names to places of the model.
        experts: The checkpoint with experts that lie in one parameter taken apart.
    """
    targets = mapper.targets(f"{module}.weight")
    for target in targets:
        expert = -1 if target.piece is None else target.piece.expert
        yield target.module, target.leaf, expert
    parameter = experts.parameter_of.get(module)
    number = _EXPERT.search(module)
    if not targets and parameter is not None and number is not None:
        for target in mapper.targets(parameter):
            yield target.module, target.leaf, int(number[1])


@dataclass(frozen=True, kw_only=True)
class CheckpointNames:
    """Checkpoint names of weights, by path in the model.

    Args:
        whole: Of layers, and of a product of one expert.
        halves: Products of experts of which one weight computes the first half of the outputs,
            another the second: gate and up.
    """

    whole: dict[str, list[str]] = field(default_factory=dict)
    halves: dict[str, dict[int, list[str]]] = field(default_factory=dict)

    @property
    def of_halves(self) -> dict[str, list[str]]:
        """Names by path and half."""
        return {
            half_path(key, n): names for key, of in self.halves.items() for n, names in of.items()
        }


def half_path(path: str, number: int) -> str:
    """Return how one half of a product is called."""
    return f"{path}/{number}"


def checkpoint_names(source: Source, mapper: WeightMapper) -> CheckpointNames:
    """Return what the layers of a model are called in its checkpoint."""
    experts = split_experts(source, unserved=True)
    found = CheckpointNames()
    for module in experts.source.weights:
        for path, leaf, number in places_of(module, mapper, experts):
            key = path if number < 0 else f"{path}.{number}.{leaf}"
            found.whole.setdefault(key, []).append(module)
        for target in mapper.targets(f"{module}.weight"):
            piece = target.piece
            if piece is not None and piece.parts == 2:
                key = f"{target.module}.{piece.expert}.{target.leaf}"
                found.halves.setdefault(key, {}).setdefault(piece.part, []).append(module)
    return found


__all__ = ["CheckpointNames", "Place", "checkpoint_names", "half_path", "places_of"]
