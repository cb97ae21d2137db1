"""Where in a model the weights of a checkpoint's modules lie, experts one by one."""

from __future__ import annotations

import re
from collections.abc import Iterator

from quantload.loader.experts import Experts
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


__all__ = ["Place", "places_of"]
