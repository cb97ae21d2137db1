"""The histograms of the report pages: KL over positions, errors of weights in steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from quantload.accuracy.compare import LayerComparison
from quantload.accuracy.end_metrics import EndMetrics
from quantload.accuracy.html_pages import chart, drawn, number, percent, short
from quantload.accuracy.html_parts import Figure, Part
from quantload.accuracy.layer_ranking import RankedLayer
from quantload.accuracy.svg_axes import Axis, linear_axis, log_axis
from quantload.accuracy.svg_charts import SMALL, Bar, bar_chart

_BINS_A_DECADE = 5
_LOWEST_KL = 1e-9  # nats; below is rounding of the logits

# -- KL --------------------------------------------------------------------------------------------


def kl_parts(end: EndMetrics | None) -> Part:
    """Chart the distribution of KL over positions, and its mean by the reference's confidence."""
    if end is None:
        return Part(why="The models have no logits to compare.")
    values = [value for value in end.kl.tolist() if math.isfinite(value)]
    positive = [value for value in values if value > _LOWEST_KL]
    if not positive:
        return Part(why=f"KL is below {_LOWEST_KL:g} nats at all {end.num_tokens} positions.")
    figures = [_kl_histogram(end, positive)]
    if end.by_confidence():
        figures.append(_kl_by_confidence(end))
    return Part(figures=figures)


def kl_bins(values: Sequence[float]) -> list[tuple[int, int]]:
    """Count values by fifths of a decade: (number of the fifth from 1, count), none left out."""
    places = [math.floor(math.log10(value) * _BINS_A_DECADE) for value in values]
    return [(at, places.count(at)) for at in range(min(places), max(places) + 1)]


def _kl_histogram(end: EndMetrics, positive: Sequence[float]) -> Figure:
    bins = kl_bins(positive)
    bars = [
        Bar(
            low=at / _BINS_A_DECADE,
            high=(at + 1) / _BINS_A_DECADE,
            value=float(count),
            title=f"{10 ** (at / _BINS_A_DECADE):.2g} to {10 ** ((at + 1) / _BINS_A_DECADE):.2g} "
            f"nats: {count} positions",
        )
        for at, count in bins
    ]
    marks = [
        (math.log10(value), f"{name} {value:.4g}")
        for name, value in (
            ("median", end.kl_quantile(0.5)),
            ("mean", end.kl_mean),
            ("p99", end.kl_quantile(0.99)),
        )
        if _LOWEST_KL < value < math.inf
    ]
    rest = end.num_tokens - len(positive)
    return Figure(
        title="KL(reference || candidate) by position",
        chart=chart(
            lambda size: bar_chart(
                bars,
                x=log_axis("KL, nats (logarithmic)", bars[0].low, bars[-1].high),
                y=linear_axis("positions", [0.0, *(bar.value for bar in bars)]),
                title="Histogram of KL over positions, on a logarithmic axis",
                size=size,
                marks=marks,
            )
        ),
        note=f"{rest} of {end.num_tokens} positions are below {_LOWEST_KL:g} nats or not finite "
        "and left out."
        if rest
        else "",
    )


def _kl_by_confidence(end: EndMetrics) -> Figure:
    parts = end.by_confidence()
    ends = [*(part.low for part in parts[1:]), 1.0]
    bars = [
        Bar(
            low=float(at),
            high=at + 0.8,
            value=part.mean if math.isfinite(part.mean) else -1.0,
            title=f"probability {part.low:g} to {high:g}: mean KL {number(part.mean, '.4g')} +- "
            f"{number(part.standard_error, '.2g')} nats over {part.positions} positions",
            label=number(part.mean, ".3g"),
        )
        for at, (part, high) in enumerate(zip(parts, ends, strict=True))
    ]
    names = [f"{low:g}\u2013{high:g}" for (low, *_), high in zip(parts, ends, strict=True)]
    x = Axis(
        label="reference's largest probability",
        low=-0.2,
        high=len(bars),
        ticks=[(at + 0.4, name) for at, name in enumerate(names)],
    )
    counts = ", ".join(
        f"{part.positions} at {name}" for part, name in zip(parts, names, strict=True)
    )
    return Figure(
        title="Mean KL by confidence of the reference",
        chart=chart(
            lambda size: bar_chart(
                bars,
                x=x,
                y=linear_axis("mean KL, nats", [0.0, 1.1 * max(bar.value for bar in bars)]),
                title="Mean KL by the reference's largest probability",
                size=size,
            )
        ),
        note=f"Positions: {counts}.",
    )


# -- errors in steps -------------------------------------------------------------------------------


def step_histograms(layers: Sequence[RankedLayer], *, count: int) -> Part:
    """Chart the errors in steps of the layers that lose most; of experts, those of the worst."""
    found = [(row, counts) for row, counts in _with_histograms(layers)][:count]
    if not found:
        return Part(
            why="No weight was rounded from a full-precision reference, so there are no errors in "
            "steps."
        )
    shares = [count / sum(counts) for _, counts in found for count in counts if count]
    y = log_axis(
        "share of elements",
        float(math.floor(math.log10(min(shares)))),
        float(math.ceil(math.log10(max(shares)) + 1e-9)),
        most=5,
    )
    return Part(
        figures=[
            Figure(
                title=short(row.module),
                chart=drawn(_step_chart(row.module, counts, y)),
                note=_about_steps(row),
            )
            for row, counts in found
        ]
    )


def _with_histograms(
    layers: Sequence[RankedLayer],
) -> Iterator[tuple[LayerComparison, Sequence[int]]]:
    """Yield what has errors in steps: what fails, the worst of each type, then the others."""
    kinds: set[str] = set()
    first: list[RankedLayer] = []
    second: list[RankedLayer] = []
    for layer in layers:
        is_first = bool(layer.failures) or layer.kind not in kinds
        (first if is_first else second).append(layer)
        kinds.add(layer.kind)
    first.sort(key=lambda layer: not layer.failures)
    for layer in (*first, *second):
        failing = [row for row in layer.rows if row.problem or row.failure]
        row = failing[0] if failing else layer.worst
        if row.rounding is not None and any(row.rounding.histogram):
            yield row, row.rounding.histogram


def _about_steps(row: LayerComparison) -> str:
    rounding = row.rounding
    assert rounding is not None, "it has a histogram"
    return (
        f"{row.candidate}: largest {rounding.max_steps:.2f}, mean {rounding.bias:+.4f} steps; "
        f"{rounding.codes_used} of {rounding.codes} codes occur, "
        f"{percent(rounding.rail_share, 1)} at the ends"
    )


def _step_chart(module: str, counts: Sequence[int], y: Axis) -> str:
    total = sum(counts)
    inner = len(counts) - 2
    width = 2.0 / inner
    bars = []
    for at, count in enumerate(counts):
        low = -1.0 + (at - 1) * width
        where = f"{low:+.2f} to {low + width:+.2f} steps"
        is_beyond = at in (0, inner + 1)
        if is_beyond:
            where = "below -1 step" if at == 0 else "above +1 step"
        bars.append(
            Bar(
                low=low,
                high=low + width,
                value=math.log10(count / total) if count else -math.inf,
                title=f"{where}: {count} of {total} elements",
                style=1 if is_beyond or abs(low + width / 2) > 0.5 else 0,
            )
        )
    ticks = [(-1.0, "-1"), (-0.5, "-0.5"), (0.0, "0"), (0.5, "0.5"), (1.0, "1")]
    x = Axis(label="error in steps", low=-1.0 - width, high=1.0 + width, ticks=ticks)
    return bar_chart(
        bars,
        x=x,
        y=y,
        title=f"Errors of {module} in steps",
        size=SMALL,
        marks=[(-0.5, ""), (0.5, "")],
    )


__all__ = ["kl_bins", "kl_parts", "step_histograms"]
