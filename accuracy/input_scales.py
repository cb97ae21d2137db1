"""Static scales of inputs: what can be told of them without running anything.

What an input scale is worth depends on the inputs, which no checkpoint has. Told are those that
differ where both sides hold one under the same name, and those that are far from what the same
projection has in other layers. Activations of one projection differ by a hundred times between
layers of sound models, so that only what is 1000 times off counts as far.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from dataclasses import dataclass

import torch

from quantload.loader.source import Source

_LEAVES = ("input_scale", "input_global_scale", "activation_scale")
_TIMES = 1000.0
_FEWEST_OTHERS = 2
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True, kw_only=True)
class InputScales:
    """Static input scales of a candidate.

    Args:
        count: Layers that have one.
        differ: Layers whose scale is not the reference's.
        far: Layers whose scale is 1000 times and more off that of their like.
    """

    count: int = 0
    differ: tuple[str, ...] = ()
    far: tuple[str, ...] = ()


def compare_input_scales(reference: Source, candidate: Source) -> InputScales:
    """Hold the static input scales of a candidate to the reference's and to each other."""
    held: dict[str, float] = {}
    differ: list[str] = []
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for module, weight in candidate.weights.items():
        leaf = next((leaf for leaf in _LEAVES if leaf in weight.leaves), None)
        if leaf is None or not candidate.checkpoint.tensors[weight.leaves[leaf]].num_bytes:
            continue
        value = candidate.checkpoint.read(weight.leaves[leaf]).to(torch.float64)
        held[module] = float(value.abs().log().mean())
        alike[_NUMBER.sub("#", module), leaf].append(module)
        twin = reference.weights.get(module)
        if twin is not None and leaf in twin.leaves:
            other = reference.checkpoint.read(twin.leaves[leaf]).to(torch.float64)
            if value.numel() == other.numel() and not torch.equal(value.view(-1), other.view(-1)):
                differ.append(module)
    far = [module for modules in alike.values() for module in _far(modules, held)]
    return InputScales(count=len(held), differ=tuple(differ), far=tuple(far))


def _far(modules: list[str], held: dict[str, float]) -> list[str]:
    """Return those whose logarithm is far from the median; none where too few say what is usual."""
    if len(modules) <= _FEWEST_OTHERS:
        return []
    usual = statistics.median(held[module] for module in modules)
    return [m for m in modules if not abs(held[m] - usual) < math.log(_TIMES)]


__all__ = ["InputScales", "compare_input_scales"]
