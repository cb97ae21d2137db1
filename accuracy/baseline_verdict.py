"""Judge measured layers by their baseline; see `baseline_check.py` for what a layer is held to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from quantload.accuracy.baseline import Baseline, LayerBaseline, Tolerances
from quantload.errors import NotComparable, listed

_STEPS_FACTOR, _STEPS_MORE = 1.25, 0.05
_BLOCK_FACTOR, _BLOCK_MORE = 2.0, 4.0
_TINY = 1e-12  # a relative error that counts as none
_LARGEST_DB = 999.0


@dataclass(frozen=True, kw_only=True)
class LayerVerdict:
    """A layer that was measured.

    Args:
        name: Checkpoint name.
        before: The baseline's numbers.
        now: The candidate's.
        change_db: By how much its worst gated error grew, in dB.
        tolerance_db: By how much it may.
        failure: What is too much; "" if nothing is.
    """

    name: str
    before: LayerBaseline
    now: LayerBaseline
    change_db: float
    tolerance_db: float
    failure: str = ""

    @property
    def is_better(self) -> bool:
        """True if the error fell by more than the tolerance."""
        return not self.failure and self.change_db < -self.tolerance_db


@dataclass(frozen=True, kw_only=True)
class BaselineReport:
    """What a check found.

    Args:
        layers: The layers that were measured: those with another digest.
        unchanged: How many have the digest of the baseline.
        added: Layers that the baseline does not have.
        removed: Layers that the candidate does not have.
        failures: What fails beside single layers: means, the end.
        now: A baseline of the candidate as it is; None if nothing was measured.
    """

    layers: tuple[LayerVerdict, ...] = ()
    unchanged: int = 0
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()
    now: Baseline | None = field(default=None, repr=False)

    @property
    def passed(self) -> bool:
        """True if nothing is worse than it may be, and no layer came or went."""
        broken = any(layer.failure for layer in self.layers)
        return not (broken or self.failures or self.added or self.removed)

    @property
    def better(self) -> tuple[LayerVerdict, ...]:
        """Layers that are better by more than their tolerance."""
        return tuple(layer for layer in self.layers if layer.is_better)

    def worst(self, count: int = 10) -> list[LayerVerdict]:
        """Return the layers that grew most, those that fail first."""
        ranked = sorted(self.layers, key=lambda v: (bool(v.failure), v.change_db), reverse=True)
        return ranked[:count]


def judge(baseline: Baseline, now: Mapping[str, LayerBaseline]) -> BaselineReport:
    """Hold measured layers to a baseline.

    Args:
        baseline: What they are held to.
        now: From `measured_layers`, with `known` the baseline's layers.
    """
    shared = [name for name in baseline.layers if name in now]
    changed = [name for name in shared if now[name] is not baseline.layers[name]]
    verdicts = tuple(
        _verdict(name, baseline.layers[name], now[name], baseline.tolerances) for name in changed
    )
    return BaselineReport(
        layers=verdicts,
        unchanged=len(shared) - len(changed),
        added=tuple(name for name in now if name not in baseline.layers),
        removed=tuple(name for name in baseline.layers if name not in now),
        failures=tuple(_about_means(baseline, now, shared)),
    )


def change_db(before: float, now: float) -> float:
    """Return by how many dB a relative error grew; 0 for two that are none."""
    if max(before, now) <= _TINY:
        return 0.0
    if min(before, now) <= _TINY:
        return math.copysign(_LARGEST_DB, now - before)
    return 20 * math.log10(now / before)


def _verdict(
    name: str, before: LayerBaseline, now: LayerBaseline, tolerances: Tolerances
) -> LayerVerdict:
    grew = change_db(before.weight, now.weight)
    failures = []
    if grew > tolerances.weight_db:
        failures.append(
            f"weight error {before.weight:.5g} -> {now.weight:.5g} ({grew:+.3f} dB, may grow by "
            f"{tolerances.weight_db:g} dB)"
        )
    for what, old, new, limit in _bounds(before, now):
        if new > limit:
            failures.append(f"{what} {old:.3g} -> {new:.3g}, limit {limit:.3g}")
    tolerance = tolerances.weight_db
    if before.output_median is not None and now.output_median is not None:
        of_output = change_db(before.output_median, now.output_median)
        if of_output > tolerances.output_median_db:
            failures.append(
                f"output error (median of tokens) {before.output_median:.5g} -> "
                f"{now.output_median:.5g} ({of_output:+.2f} dB, may grow by "
                f"{tolerances.output_median_db:g} dB)"
            )
            if grew <= tolerances.weight_db:
                grew, tolerance = of_output, tolerances.output_median_db
    return LayerVerdict(
        name=name,
        before=before,
        now=now,
        change_db=grew,
        tolerance_db=tolerance,
        failure="; ".join(failures),
    )


def _bounds(before: LayerBaseline, now: LayerBaseline) -> Iterator[tuple[str, float, float, float]]:
    """Yield (what, before, now, limit) of the numbers that show damage to a few elements."""
    if before.steps is not None and now.steps is not None:
        limit = max(before.steps * _STEPS_FACTOR, before.steps + _STEPS_MORE)
        yield "largest error in steps", before.steps, now.steps, limit
    if before.block is not None and now.block is not None:
        limit = before.block * _BLOCK_FACTOR + _BLOCK_MORE
        yield "noise of the worst block", before.block, now.block, limit


def _about_means(
    baseline: Baseline, now: Mapping[str, LayerBaseline], shared: list[str]
) -> Iterator[str]:
    """Say which means over the layers grew: a small slip in all of them."""
    lossy = [name for name in shared if baseline.layers[name].weight > _TINY]
    changes = [change_db(baseline.layers[name].weight, now[name].weight) for name in lossy]
    mean = sum(changes) / max(len(changes), 1)
    if mean > baseline.tolerances.weight_mean_db:
        yield (
            f"weight errors grew by {mean:+.4f} dB in the mean of {len(lossy)} layers, may grow by "
            f"{baseline.tolerances.weight_mean_db:g} dB"
        )
    pairs = [
        (before, after)
        for name in shared
        if (before := baseline.layers[name].output) and (after := now[name].output)
    ]
    changes = [change_db(before, after) for before, after in pairs]
    mean = sum(changes) / max(len(changes), 1)
    if mean > baseline.tolerances.output_mean_db:
        yield (
            f"output errors grew by {mean:+.3f} dB in the mean of {len(pairs)} layers, may grow by "
            f"{baseline.tolerances.output_mean_db:g} dB"
        )


def about_end(
    baseline: Baseline, now: Mapping[str, tuple[float, float]], *, unchanged: bool
) -> Iterator[str]:
    """Say what at the output is worse than it may be.

    Args:
        baseline: With `end`.
        now: Mean and standard error by metric.
        unchanged: Nothing was measured.
    """
    if unchanged:
        return
    missing = [metric for metric in baseline.end if metric not in now]
    if missing:
        raise NotComparable(f"the baseline has {listed(missing)} at the output, the check has not")
    tolerances = baseline.tolerances
    for metric, (before, before_error) in baseline.end.items():
        mean, error = now[metric]
        spread = tolerances.standard_errors * math.hypot(before_error, error)
        allowed = spread
        grew = mean - before
        if metric == "top1":
            grew = -grew
        else:
            allowed = max(spread, tolerances.kl_relative * abs(before))
        if grew > allowed:
            yield (
                f"{metric} {before:.5g} +- {before_error:.2g} -> {mean:.5g} +- {error:.2g}, may "
                f"change by {allowed:.2g}"
            )


__all__ = ["BaselineReport", "LayerVerdict", "about_end", "change_db", "judge"]
