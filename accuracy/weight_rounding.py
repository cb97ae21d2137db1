"""Damage to a quantized weight that its relative error hides: errors in units of its own steps.

One group whose nibbles are swapped moves the relative error of a large weight by a few thousandths,
but its own values by many steps. What is too much depends on how a weight was made, which a
checkpoint does not say, so that its layers are judged by each other:

    rounded to nearest   three of four layers of one encoding are: each has to be
    otherwise            the noise of the worst block (the columns of a row that share a scale) may
                         be 64 times that of rounding, that of most rows 6 times; and both 4 times
                         what is usual for this projection of the model's layers
    a scale of zero      where the reference is not loses values, however few
    fewer than 4 layers  of its projection: a weight with much noise in a tenth of its rows may have
                         been rescaled before it was quantized (AWQ, SmoothQuant), but then others
                         of its encoding were too: no weight may have 3 times the noise of rows, or
                         6 times that of blocks, of the next worst

In all of them the relative error may be 3 times the median of the other layers of its projection,
or of its encoding where those are fewer than 4; more passes where rounding explains it.

Measured on the checkpoints of 18 tools: rounding to nearest leaves up to 0.56 steps where products
are rounded in another order than ours, and 1 where bfloat16 cannot hold code * scale; GPTQ and
AutoRound leave blocks of up to 36 times the noise of rounding, AWQ up to 198. The worst weight of
an encoding has up to 2.0 times the noise of rows of the next worst, 3.9 times that of blocks; its
relative error is up to 2.4 times the median. Swapped nibbles of 4-bit codes give blocks of 60 to
300, rows in another order thousands. One scale doubled, or one zero point off by one, in a weight
by GPTQ gives blocks of 12 to 21, which is as usual: only a baseline shows that.
"""

from __future__ import annotations

import math
import statistics
import sys
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantload.quant.grid import Grid
from quantload.quant.measure import Measured, measure
from quantload.quant.qtensor import QuantTensor
from quantload.quant.step_errors import StepErrors, num_values, step_errors

_ROWS_AT_ONCE = 1 << 22  # elements that are measured at a time
_FEWEST_LAYERS = 4  # that say what is usual
_NEAREST_SHARE = 0.75
_NEAREST_STEPS, _LIMIT_STEPS = 0.75, 1.05
_BLOCK_LIMIT, _ROW_LIMIT, _TIMES_USUAL = 64.0, 6.0, 4.0
_LEAST_BLOCK, _LEAST_ROW = 16.0, 3.0  # of a weight that has far more than the next worst
_TIMES_NEXT_BLOCK, _TIMES_NEXT_ROW = 6.0, 3.0
_TIMES_MEDIAN = 3.0


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """Errors of a quantized weight in units of its steps.

    Args:
        beyond: Elements that are further off than rounding to nearest explains.
        max_steps: Largest error in steps between neighbouring codes.
        block_excess: Largest noise of a row's part that shares a scale, in units of its rounding.
        row_excess: Noise in units of its rounding that nine of ten rows stay below.
        histogram: Elements by signed error in steps: [0] below -1, [1] to [40] in bins of 0.05
            from -1 to 1 that hold their lower end, [41] from 1 on.
        bias: Mean signed error in steps; infinite where a step is 0 and the weight is not.
        rail_share: Share of the codes at the ends of the grid, where what lies beyond is clipped.
        codes_used: Values of the grid that occur.
        codes: Values that the grid has.
    """

    beyond: int
    max_steps: float
    block_excess: float
    row_excess: float
    histogram: tuple[int, ...] = ()
    bias: float = 0.0
    rail_share: float = 0.0
    codes_used: int = 0
    codes: int = 0


class RoundingSums:
    """Gathers what is measured of the rows of one quantized weight."""

    def __init__(self) -> None:
        self._parts: list[Measured] = []
        self._counts: StepErrors | None = None
        self._grid: Grid | None = None
        self._is_measurable = True

    def add(self, part: QuantTensor, values: Tensor, reference: Tensor) -> Measured | None:
        """Measure some rows; None if they have no steps, or are not finite.

        Args:
            part: [n, K].
            values: [n, K], what it decodes to.
            reference: [n, K], what it was made from.
        """
        found = measure(part, values, reference, nearest=True) if self._is_measurable else None
        counted = None if found is None else step_errors(part, values, reference)
        if found is None or counted is None:
            self._is_measurable = False
            return None
        self._parts.append(found)
        self._counts = counted if self._counts is None else self._counts + counted
        self._grid = part.grid
        return found

    def result(self) -> Rounding | None:
        """Return what was found of all rows; None if some could not be measured."""
        if not self._is_measurable or self._counts is None or self._grid is None:
            return None
        noise, rounding = (
            torch.cat([getattr(part, name) for part in self._parts])
            for name in ("noise", "rounding")
        )
        row_excess = noise / rounding.clamp(min=sys.float_info.min)
        return Rounding(
            beyond=sum(int(part.beyond.sum()) for part in self._parts),
            max_steps=max(part.max_steps for part in self._parts),
            block_excess=max(part.block_excess for part in self._parts),
            row_excess=float(row_excess.quantile(0.9)),
            histogram=tuple(self._counts.bins.tolist()),
            bias=self._counts.bias,
            rail_share=self._counts.rail_share(self._grid),
            codes_used=self._counts.num_used(self._grid),
            codes=num_values(self._grid),
        )


def rounding_of(candidate: QuantTensor, values: Tensor, reference: Tensor) -> Rounding | None:
    """Measure a weight in its steps; None if it has none, or is not finite.

    Args:
        candidate: [N, K].
        values: [N, K], what it decodes to.
        reference: [N, K], what it was made from.
    """
    height = candidate.block[0]
    step = max(1, _ROWS_AT_ONCE // max(candidate.shape[1], 1) // height) * height
    sums = RoundingSums()
    for start in range(0, candidate.shape[0], step):
        stop = min(start + step, candidate.shape[0])
        sums.add(candidate.rows(start, stop), values[start:stop], reference[start:stop])
    return sums.result()


def standing_out(layers: Mapping[str, tuple[str, Rounding | None]]) -> dict[str, str]:
    """Say which layers are damaged, and in what they stand out.

    Args:
        layers: Encoding and rounding of each layer by module; layers of one encoding are judged by
            each other.
    """
    encodings: dict[str, dict[str, Rounding]] = defaultdict(dict)
    for module, (encoding, rounding) in layers.items():
        if rounding is not None:
            encodings[encoding][module] = rounding
    found: dict[str, str] = {}
    for alike in encodings.values():
        if _are_nearest(alike):
            found |= {name: _beyond_nearest(rounding) for name, rounding in alike.items()}
            found |= _lost(alike)
            continue
        for of_projection in _by_projection(alike):
            found |= _noisy(of_projection)
            if len(of_projection) < _FEWEST_LAYERS:
                found |= {n: why for n in of_projection if (why := _far_worst(n, alike))}
        found |= _lost(alike)
    return {name: why for name, why in found.items() if why}


def _are_nearest(alike: Mapping[str, Rounding]) -> bool:
    near = sum(not r.beyond or r.max_steps <= _NEAREST_STEPS for r in alike.values())
    return len(alike) >= _FEWEST_LAYERS and near >= _NEAREST_SHARE * len(alike)


def _lost(alike: Mapping[str, Rounding]) -> dict[str, str]:
    lost = (name for name, rounding in alike.items() if math.isinf(rounding.max_steps))
    return dict.fromkeys(lost, "values are lost: a scale is zero where the reference is not")


def _beyond_nearest(rounding: Rounding) -> str:
    if not rounding.beyond or rounding.max_steps <= _LIMIT_STEPS:
        return ""
    return (
        f"{rounding.beyond} values are not rounded to nearest, as other layers are: off by up to "
        f"{rounding.max_steps:.2f} steps"
    )


def _by_projection(alike: Mapping[str, Rounding]) -> list[dict[str, Rounding]]:
    projections: dict[str, dict[str, Rounding]] = defaultdict(dict)
    for module, rounding in alike.items():
        projections[_projection(module)][module] = rounding
    return list(projections.values())


def _noisy(alike: Mapping[str, Rounding]) -> dict[str, str]:
    is_known = len(alike) >= _FEWEST_LAYERS
    block_limit, row_limit = _BLOCK_LIMIT, _ROW_LIMIT
    if is_known:
        block_limit = max(
            block_limit, _TIMES_USUAL * _median(r.block_excess for r in alike.values())
        )
        row_limit = max(row_limit, _TIMES_USUAL * _median(r.row_excess for r in alike.values()))
    found = {}
    for name, rounding in alike.items():
        if not is_known and rounding.row_excess > row_limit:
            continue
        if rounding.block_excess > block_limit:
            found[name] = _too_much("a block", rounding.block_excess, block_limit)
        elif rounding.row_excess > row_limit:
            found[name] = _too_much("many rows", rounding.row_excess, row_limit)
    return found


def _far_worst(name: str, alike: Mapping[str, Rounding]) -> str:
    """Say in what a weight has far more noise than all others of its encoding; "" if it has not."""
    others = [rounding for other, rounding in alike.items() if other != name]
    if len(others) < _FEWEST_LAYERS:
        return ""
    own = alike[name]
    rows = max(_LEAST_ROW, _TIMES_NEXT_ROW * max(one.row_excess for one in others))
    blocks = max(_LEAST_BLOCK, _TIMES_NEXT_BLOCK * max(one.block_excess for one in others))
    if own.row_excess > rows:
        return _too_much("many rows", own.row_excess, rows)
    return _too_much("a block", own.block_excess, blocks) if own.block_excess > blocks else ""


def far_above(layers: Mapping[str, tuple[str, float, Rounding | None]]) -> dict[str, str]:
    """Say which layers have a relative error far above that of their like.

    Args:
        layers: Encoding, relative error and rounding of each layer by module.
    """
    by_encoding: dict[str, list[float]] = defaultdict(list)
    by_projection: dict[tuple[str, str], list[float]] = defaultdict(list)
    for module, (encoding, error, _) in sorted(layers.items(), key=lambda item: item[1][1]):
        by_encoding[encoding].append(error)
        by_projection[encoding, _projection(module)].append(error)
    found = {}
    for module, (encoding, error, rounding) in layers.items():
        if rounding is not None and rounding.row_excess <= _ROW_LIMIT:
            continue  # its steps are large
        kind = by_projection[encoding, _projection(module)]
        is_kind = len(kind) > _FEWEST_LAYERS
        alike = kind if is_kind else by_encoding[encoding]
        if len(alike) <= _FEWEST_LAYERS:
            continue
        usual = _median_of_others(alike, error)
        if error > _TIMES_MEDIAN * usual > 0:
            found[module] = (
                f"stands out: weight error {error:.3g}, and the median of the other layers of its "
                f"{'projection' if is_kind else 'encoding'} is {usual:.3g}"
            )
    return found


def _median_of_others(ordered: Sequence[float], own: float) -> float:
    """Return the median of sorted numbers without one of them."""
    at, count = bisect_left(ordered, own), len(ordered) - 1
    middle = [(count - 1) // 2, count // 2]
    return statistics.fmean(ordered[n + (n >= at)] for n in middle)


def _projection(module: str) -> str:
    return module.rpartition(".")[2]


def _median(numbers: Iterable[float]) -> float:
    return statistics.median(numbers)


def _too_much(what: str, excess: float, limit: float) -> str:
    return f"noise of {what} is {excess:.0f} times that of rounding, limit {limit:.0f}"


__all__ = ["Rounding", "RoundingSums", "far_above", "rounding_of", "standing_out"]
