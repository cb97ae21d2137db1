"""Damage to a quantized weight that its relative error hides: errors in units of its own steps.

One group whose nibbles are swapped moves the relative error of a large weight by a few thousandths,
but its own values by many steps. What is too much depends on how a weight was made, which a
checkpoint does not say, so that its layers are judged by each other:

    rounded to nearest   three of four layers of one kind are within 3/4 of a step everywhere: each
                         has to be, up to 1.05 (a sum or a product that is rounded too)
    otherwise            the noise of the worst block (the columns of a row that share a scale) may
                         be 48 times that of rounding, and 6 times the median of layers of its kind

Measured on the checkpoints of 18 tools: rounding to nearest leaves 0.55 steps (0.98 where powers of
two clip) and blocks of 4.1; GPTQ and AutoRound up to 6.4 steps and blocks of 36. Columns that were
rescaled (AWQ, SmoothQuant) differ in all layers, with blocks of 20 to 200. Swapped nibbles of 4-bit
codes give blocks of 100 to 300.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from quantload.quant.measure import measure
from quantload.quant.qtensor import QuantTensor

_ROWS_AT_ONCE = 1 << 22  # elements that are measured at a time
_NEAREST, _NEAREST_LIMIT = 0.75, 1.05
_NEAREST_SHARE, _FEWEST_LAYERS = 0.75, 4
_BLOCK_LIMIT, _BLOCKS_OF_OTHERS = 48.0, 6.0


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """Errors of a quantized weight in units of its steps.

    Args:
        max_steps: Largest error in steps between neighbouring codes.
        block_excess: Largest noise of a row's part that shares a scale, in units of its rounding.
    """

    max_steps: float
    block_excess: float


def rounding_of(candidate: QuantTensor, values: Tensor, reference: Tensor) -> Rounding | None:
    """Measure a weight in its steps; None if it has none, or is not finite.

    Args:
        candidate: [N, K].
        values: [N, K], what it decodes to.
        reference: [N, K], what it was made from.
    """
    height = candidate.block[0]
    step = max(1, _ROWS_AT_ONCE // max(candidate.shape[1], 1) // height) * height
    worst = Rounding(max_steps=0.0, block_excess=0.0)
    for start in range(0, candidate.shape[0], step):
        stop = min(start + step, candidate.shape[0])
        found = measure(
            candidate.rows(start, stop), values[start:stop], reference[start:stop], nearest=False
        )
        if found is None:
            return None
        worst = Rounding(
            max_steps=max(worst.max_steps, found.max_steps),
            block_excess=max(worst.block_excess, found.block_excess),
        )
    return worst


def standing_out(layers: Mapping[str, tuple[str, Rounding | None]]) -> dict[str, str]:
    """Say which layers are damaged, and in what they stand out.

    Args:
        layers: Kind and rounding of each layer; layers of one kind are judged by each other.
    """
    kinds: dict[str, dict[str, Rounding]] = defaultdict(dict)
    for name, (kind, rounding) in layers.items():
        if rounding is not None:
            kinds[kind][name] = rounding
    found: dict[str, str] = {}
    for alike in kinds.values():
        found |= _beyond_nearest(alike) if _are_nearest(alike) else _noisy(alike)
    return found


def _are_nearest(alike: Mapping[str, Rounding]) -> bool:
    near = sum(rounding.max_steps <= _NEAREST for rounding in alike.values())
    return len(alike) >= _FEWEST_LAYERS and near >= _NEAREST_SHARE * len(alike)


def _beyond_nearest(alike: Mapping[str, Rounding]) -> dict[str, str]:
    return {
        name: (
            f"off by up to {rounding.max_steps:.2f} steps, where other layers are rounded to "
            "nearest"
        )
        for name, rounding in alike.items()
        if rounding.max_steps > _NEAREST_LIMIT
    }


def _noisy(alike: Mapping[str, Rounding]) -> dict[str, str]:
    usual = statistics.median(rounding.block_excess for rounding in alike.values())
    limit = max(_BLOCK_LIMIT, _BLOCKS_OF_OTHERS * usual)
    return {
        name: (
            f"noise of a block is {rounding.block_excess:.0f} times that of rounding, limit "
            f"{limit:.0f}"
        )
        for name, rounding in alike.items()
        if rounding.block_excess > limit
    }


__all__ = ["Rounding", "rounding_of", "standing_out"]
