"""Which layers lose most, and which stand out among their like.

    share        part of the sum over all rows of (relative error)^2: noise-to-signal ratios of
                 layers add up (Lin, Talathi and Annapureddy, "Fixed Point Quantization of Deep
                 Convolutional Networks", ICML 2016)
    over_type    by how many dB the error is above the mean of the other layers of its projection
                 type and encoding: types differ by 10 dB by nature, so only like is held to like
    z            the same in standard deviations of those others

The error of a row is that of its isolated output; that of its weight where no output was measured,
or where fewer than 32 tokens reached an expert. Experts of one block and projection are one row:
their sums added up, and the worst of them by name.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from quantload.accuracy.compare import LayerComparison, ModelComparison
from quantload.quant.metrics import ErrorSums

FEWEST_OTHERS = 4  # layers of a type that say what is usual
STANDS_OUT = 4.0  # standard deviations of the others
_SMALLEST_DB = 0.3  # of a real change: where all others are alike, less stands out too


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a module lies, by its name.

    Args:
        kind: Projection type: the name after the number of its block, as "mlp.down_proj".
        depth: Number of its block; None for what is in none, as a head.
        stack: What stands before that number, as "model.layers".
        expert: Number of the expert; None for what is none.
    """

    kind: str
    depth: int | None
    stack: str
    expert: int | None

    @property
    def group(self) -> str:
        """Its name, with `*` for the number of an expert."""
        return self.kind if self.depth is None else f"{self.stack}.{self.depth}.{self.kind}"


def place_of(module: str) -> Place:
    """Take the name of a module apart."""
    parts = module.split(".")
    numbers = [at for at, part in enumerate(parts) if part.isdecimal()]
    expert = None
    for at in numbers[1:]:
        if "expert" in parts[at - 1]:
            expert, parts[at] = int(parts[at]), "*"
            break
    if not numbers or numbers[0] == 0:
        return Place(kind=".".join(parts), depth=None, stack="", expert=expert)
    first = numbers[0]
    return Place(
        kind=".".join(parts[first + 1 :]) or parts[first - 1],
        depth=int(parts[first]),
        stack=".".join(parts[:first]),
        expert=expert,
    )


@dataclass(frozen=True, kw_only=True)
class RankedLayer:
    """A row of a report: a layer, or all experts of one block and projection.

    Args:
        name: Checkpoint name, with `*` for the numbers of experts.
        kind: Projection type; with the stack's name where a model has several stacks.
        depth: Number of its block; None for what is in none.
        rows: What was compared: one row, or one for each expert.
        weight: Error sums of the weights; None if none was compared.
        output: Error sums of the isolated outputs; None if none can be told.
        few: Experts that too few tokens reached to say something.
        share: See the top of this file; NaN where the error is no number.
        over_type_db: Likewise; NaN where fewer than 4 others are of this type.
        z: Likewise.
    """

    name: str
    kind: str
    depth: int | None
    rows: tuple[LayerComparison, ...]
    weight: ErrorSums | None
    output: ErrorSums | None
    few: int = 0
    share: float = math.nan
    over_type_db: float = math.nan
    z: float = math.nan

    @property
    def error(self) -> ErrorSums:
        """The sums that it is ranked by."""
        return self.output or self.weight or ErrorSums()

    @property
    def worst(self) -> LayerComparison:
        """The row with the largest error; by weights where few tokens reached some of the rows."""
        return max(self.rows, key=lambda row: _severity(_error_of(row, is_few=self.few > 0)))

    @property
    def worst_error(self) -> ErrorSums:
        """Error sums of `worst`."""
        return _error_of(self.worst, is_few=self.few > 0)

    @property
    def is_experts(self) -> bool:
        """True for the experts of one block and projection."""
        return "*" in self.name.split(".")

    @property
    def reference(self) -> str:
        """What the reference holds."""
        return _joined(row.reference for row in self.rows)

    @property
    def candidate(self) -> str:
        """What the candidate holds."""
        return _joined(row.candidate for row in self.rows)

    @property
    def tokens(self) -> int:
        """Tokens that reached it; each expert counts its own."""
        return sum(row.tokens for row in self.rows)

    @property
    def output_median(self) -> float:
        """Median over tokens of the output's error; of experts their median; NaN without."""
        found = [row.output_median for row in self.rows if row.output_median is not None]
        return statistics.median(found) if found else math.nan

    @property
    def failures(self) -> tuple[str, ...]:
        """What exceeds a limit or is not finite."""
        found = [(row, row.problem or row.failure) for row in self.rows]
        return tuple(f"`{row.module}`: {why}" for row, why in found if why)


def _joined(texts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(text for text in texts if text))


def _error_of(row: LayerComparison, *, is_few: bool) -> ErrorSums:
    if is_few and row.weight is not None:
        return row.weight
    return row.output or row.weight or ErrorSums()


def _severity(sums: ErrorSums) -> float:
    return math.inf if math.isnan(sums.relative) else sums.relative


def ranked_layers(comparison: ModelComparison, *, merge_experts: bool = True) -> list[RankedLayer]:
    """Return the rows of a comparison, those that lose most first.

    Args:
        comparison: From `api.compare`.
        merge_experts: Make the experts of one block and projection one row.
    """
    few = set(comparison.few)
    places = {row.module: place_of(row.module) for row in comparison.layers}
    groups: dict[str, list[LayerComparison]] = defaultdict(list)
    for row in comparison.layers:
        groups[places[row.module].group if merge_experts else row.module].append(row)
    stacks = {place.stack for place in places.values() if place.depth is not None}
    found = []
    for name, rows in groups.items():
        place = places[rows[0].module]
        kind = place.kind
        if place.depth is not None and len(stacks) > 1:
            kind = f"{place.stack}.#.{kind}"
        found.append(_merged(name, kind, place.depth, rows, few))
    found = _with_distances(_with_shares(found))
    return sorted(found, key=lambda layer: _severity(layer.error), reverse=True)


def _merged(
    name: str, kind: str, depth: int | None, rows: Sequence[LayerComparison], few: set[str]
) -> RankedLayer:
    weights = [row.weight for row in rows if row.weight is not None]
    outputs = [row.output for row in rows if row.output is not None and row.module not in few]
    return RankedLayer(
        name=name,
        kind=kind,
        depth=depth,
        rows=tuple(rows),
        weight=sum(weights, ErrorSums()) if weights else None,
        output=sum(outputs, ErrorSums()) if outputs else None,
        few=sum(row.module in few for row in rows),
    )


def _with_shares(layers: Sequence[RankedLayer]) -> list[RankedLayer]:
    squares = [layer.error.relative**2 for layer in layers]
    total = sum(square for square in squares if math.isfinite(square))
    return [
        replace(layer, share=square / total if total else 0.0) if math.isfinite(square) else layer
        for layer, square in zip(layers, squares, strict=True)
    ]


def _with_distances(layers: Sequence[RankedLayer]) -> list[RankedLayer]:
    alike: dict[tuple[str, str, bool], list[float]] = defaultdict(list)
    for layer in layers:
        if math.isfinite(layer.error.sqnr_db):
            alike[_type(layer)].append(layer.error.sqnr_db)
    return [_with_distance(layer, alike) for layer in layers]


def _type(layer: RankedLayer) -> tuple[str, str, bool]:
    """What layers have to share to be held to each other."""
    return layer.kind, layer.candidate, layer.output is None


def _with_distance(
    layer: RankedLayer, alike: Mapping[tuple[str, str, bool], Sequence[float]]
) -> RankedLayer:
    own = layer.error.sqnr_db
    others = list(alike[_type(layer)])
    if not math.isfinite(own):
        return layer
    others.remove(own)
    if len(others) < FEWEST_OTHERS:
        return layer
    over = statistics.fmean(others) - own
    spread = statistics.stdev(others)
    return replace(layer, over_type_db=over, z=over / spread if spread else math.nan)


def standing_apart(layers: Iterable[RankedLayer], *, count: int = 3) -> list[RankedLayer]:
    """Return the layers that are worst among their like: by 4 standard deviations and 0.3 dB."""
    found = [
        layer for layer in layers if layer.z >= STANDS_OUT and layer.over_type_db >= _SMALLEST_DB
    ]
    return sorted(found, key=lambda layer: layer.z, reverse=True)[:count]


__all__ = [
    "FEWEST_OTHERS",
    "STANDS_OUT",
    "Place",
    "RankedLayer",
    "place_of",
    "ranked_layers",
    "standing_apart",
]
