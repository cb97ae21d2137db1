"""ModelOpt: fixed input scales that are missing, since an expert saw no token of the calibration.

Such an expert takes the largest scale of the others of its block. Any other layer without one has
its input quantized while the model runs.

Source: `set_expert_quantizer_amax` of ModelOpt 0.47.0, which gives them the largest on export.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from quantload.errors import listed
from quantload.loader.checkpoint import Checkpoint
from quantload.loader.source import SourceWeight

_LEAF = "input_scale"
_EXPERT = re.compile(r"(.*\.experts)\.\d+(\..+)")


def with_input_scales(
    checkpoint: Checkpoint, weights: Mapping[str, SourceWeight]
) -> tuple[dict[str, SourceWeight], list[str]]:
    """Give experts without an input scale that of another expert.

    Args:
        checkpoint: An open checkpoint.
        weights: What was described of it, by module.

    Returns:
        The weights by module, and warnings.
    """
    found = dict(weights)
    lacking = [module for module, weight in found.items() if _lacks_scale(weight)]
    if not lacking:
        return found, []
    others = _largest_scales(checkpoint, found, {_block_of(module) for module in lacking})
    filled = [module for module in lacking if _block_of(module) in others]
    for module in filled:
        leaves = {**found[module].leaves, _LEAF: others[_block_of(module)]}
        found[module] = replace(found[module], leaves=leaves)
    rest = sorted(set(lacking) - set(filled))
    warnings = []
    if filled:
        warnings.append(
            f"{len(filled)} experts have no `{_LEAF}`; they take the largest of the other experts "
            f"of their block: {listed(filled)}, in `{checkpoint.name}`"
        )
    if rest:
        warnings.append(
            f"{len(rest)} modules have no `{_LEAF}`; their inputs are quantized while the model "
            f"runs: {listed(rest)}, in `{checkpoint.name}`"
        )
    return found, warnings


def _lacks_scale(weight: SourceWeight) -> bool:
    if weight.experts or weight.scheme is None or weight.scheme.input is None:
        return False
    return not weight.scheme.input.dynamic and _LEAF not in weight.leaves


def _block_of(module: str) -> tuple[str, ...]:
    """Return what the experts of a block have in common; () for any other module."""
    match = _EXPERT.fullmatch(module)
    return match.groups() if match else ()


def _largest_scales(
    checkpoint: Checkpoint, weights: Mapping[str, SourceWeight], blocks: set[tuple[str, ...]]
) -> dict[tuple[str, ...], str]:
    """Return the name of the tensor with the largest input scale of each block."""
    names = defaultdict(list)
    for module, weight in weights.items():
        block = _block_of(module)
        if block and block in blocks and _LEAF in weight.leaves:
            names[block].append(weight.leaves[_LEAF])
    return {
        b: max(some, key=lambda name: float(checkpoint.read(name))) for b, some in names.items()
    }


__all__ = ["with_input_scales"]
