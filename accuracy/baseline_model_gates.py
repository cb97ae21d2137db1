"""Judge what running both models shows of the candidate as a whole: hidden states, KL, top-1."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from quantload.accuracy.baseline import Baseline
from quantload.accuracy.baseline_verdict import Gate, added_by, beyond
from quantload.errors import NotComparable, counted, listed


def about_blocks(baseline: Baseline, now: Mapping[str, float], *, dtype: str) -> Iterator[Gate]:
    """Judge the hidden states after each block by the first that is worse than it may be.

    Args:
        baseline: With `blocks`.
        now: From `block_medians`.
        dtype: In which both models ran.
    """
    more = added_by(baseline, dtype).block
    changes = {
        path: beyond(before, now[path], more)
        for path, before in baseline.blocks.items()
        if path in now
    }
    if not changes:
        return
    allowed = baseline.tolerances.block_median_db
    worse = [path for path, change in changes.items() if change > allowed]
    shown = worse[0] if worse else max(changes, key=lambda path: changes[path])
    others = f", and after {counted(len(worse) - 1, 'later block')}" if len(worse) > 1 else ""
    yield Gate(
        what="blocks",
        change=changes[shown],
        allowed=allowed,
        text=f"error of the hidden states after `{shown}` (median of tokens) "
        f"{baseline.blocks[shown]:.5g} -> {now[shown]:.5g} ({changes[shown]:+.2f} dB, may grow by "
        f"{allowed:g} dB){others}",
    )


def about_end(
    baseline: Baseline, now: Mapping[str, tuple[float, float]], *, dtype: str = "float32"
) -> Iterator[Gate]:
    """Judge the output of the model.

    Args:
        baseline: With `end`.
        now: Mean and standard error by metric.
        dtype: In which both models ran.

    Raises:
        NotComparable: The baseline has a metric that was not measured.
    """
    _check_metrics(baseline.end, now)
    tolerances = baseline.tolerances
    for metric, (before, before_error) in baseline.end.items():
        mean, error = now[metric]
        spread = tolerances.standard_errors * math.hypot(before_error, error)
        grew = before - mean if metric == "top1" else mean - before
        more = added_by(baseline, dtype).kl
        allowed = max(spread, tolerances.top1)
        if metric != "top1":
            allowed = max(spread, tolerances.kl_relative * abs(before)) + more
        yield Gate(
            what=metric,
            change=grew,
            allowed=allowed,
            text=f"{metric} {before:.5g} +- {before_error:.2g} -> {mean:.5g} +- {error:.2g}, may "
            f"change by {allowed:.2g}",
        )


def _check_metrics(wanted: Iterable[str], found: Mapping[str, object]) -> None:
    if missing := [metric for metric in wanted if metric not in found]:
        raise NotComparable(f"the baseline has {listed(missing)} at the output, the check has not")


__all__ = ["about_blocks", "about_end"]
