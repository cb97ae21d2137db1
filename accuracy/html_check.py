"""A check against a baseline as one self-contained page."""

from __future__ import annotations

import math
from collections.abc import Sequence

from quantload import __version__
from quantload.accuracy.baseline_verdict import BaselineReport, LayerVerdict
from quantload.accuracy.html_charts import depth_axis
from quantload.accuracy.html_pages import chart, drawn, listed_all, number, render, sortable
from quantload.accuracy.html_parts import Cell, Column, Figure, LegendEntry, Part, Row
from quantload.accuracy.layer_ranking import place_of
from quantload.accuracy.svg_axes import linear_axis
from quantload.accuracy.svg_charts import FULL, Series, line_chart, swatch
from quantload.errors import counted

_WORST = 10
_LARGEST_DB = 60.0  # a chart's ends: an error that was none before has no dB at all

_COLUMNS = [
    Column(name="layer", is_text=True),
    Column(name="before", hint="relative L2 error of the weight in the baseline"),
    Column(name="now", hint="relative L2 error of the weight"),
    Column(name="change dB", hint="by how much its worst gated error grew"),
    Column(name="tolerance dB", hint="by how much it may grow"),
    Column(name="output before", hint="median over tokens of the output's relative error"),
    Column(name="output now", hint="the same now"),
    Column(name="verdict", is_text=True, is_long=True),
]


def check_page(report: BaselineReport, *, candidate: str, baseline: str, accept: str) -> str:
    """Return the page.

    Args:
        report: What `api_baseline.check_baseline` returned.
        candidate: Name of the checkpoint that was checked, for the heading.
        baseline: Name of the baseline's file.
        accept: The command that writes the baseline anew; shown where the check fails.
    """
    worst = report.worst(len(report.layers))
    return render(
        "check.html.j2",
        version=__version__,
        candidate=candidate,
        baseline=baseline,
        accept=accept,
        passed=report.passed,
        facts=_facts(report),
        failures=_failures(report),
        better=listed_all([layer.name for layer in report.better]),
        depth=_by_depth(report.layers),
        columns=_COLUMNS,
        worst=[_row(layer) for layer in worst[:_WORST]],
        rest=[_row(layer) for layer in worst[_WORST:]],
    )


def _facts(report: BaselineReport) -> list[tuple[str, str, str]]:
    """Return (name, number, what belongs to it)."""
    broken = sum(bool(layer.failure) for layer in report.layers)
    facts = [
        ("Unchanged layers", str(report.unchanged), "same digest"),
        ("Changed layers", str(len(report.layers)), ""),
        ("Worse than they may be", str(broken), ""),
        ("Better than the baseline", str(len(report.better)), ""),
    ]
    end = {} if report.now is None else report.now.end
    names = {"kl_mean": "KL, mean", "top1": "Same first token"}
    return facts + [
        (names.get(metric, metric), f"{mean:.4f}", f"\u00b1 {error:.4f} now")
        for metric, (mean, error) in end.items()
    ]


def _failures(report: BaselineReport) -> list[str]:
    lines = [
        f"{counted(len(names), 'layer')} {what}: {listed_all(names)}"
        for names, what in (
            (report.added, "not in the baseline"),
            (report.removed, "missing from the candidate"),
        )
        if names
    ]
    return [*lines, *report.failures]


def _row(layer: LayerVerdict) -> Row:
    verdict = layer.failure or ("better: the baseline can be tightened" if layer.is_better else "")
    before, now = layer.before, layer.now
    cells = [
        Cell(text=layer.name),
        _error(before.weight),
        _error(now.weight),
        Cell(text=f"{layer.change_db:+.3f}", sort=sortable(layer.change_db)),
        Cell(text=f"{layer.tolerance_db:g}", sort=sortable(layer.tolerance_db)),
        _error(before.output_median),
        _error(now.output_median),
        Cell(text=verdict or "within its tolerance"),
    ]
    return Row(cells=cells, is_bad=bool(layer.failure))


def _error(value: float | None) -> Cell:
    return Cell(text=number(value, ".5g"), sort=sortable(value))


def _by_depth(layers: Sequence[LayerVerdict]) -> Part:
    """Chart the change in dB of each layer by number of block, a line a projection type."""
    if not layers:
        return Part(why="Every layer has the digest of the baseline: nothing was measured.")
    places = [(place_of(layer.name), layer) for layer in layers]
    deep = [(place, layer) for place, layer in places if place.depth is not None]
    if not deep:
        return Part(why="None of the layers that have changed is in a numbered block.")
    kinds = sorted({place.kind for place, _ in deep})
    series = [
        Series(
            points=[
                (float(place.depth or 0), _clipped(layer.change_db), _tooltip(layer))
                for place, layer in sorted(deep, key=lambda pair: pair[0].depth or 0)
                if place.kind == kind
            ],
            style=style,
        )
        for style, kind in enumerate(kinds)
    ]
    tolerance = min(layer.tolerance_db for _, layer in deep)
    values = [0.0, tolerance, *(y for one in series for _, y, _ in one.points)]
    shown = chart(
        lambda size: line_chart(
            series,
            x=depth_axis([x for one in series for x, _, _ in one.points]),
            y=linear_axis("change, dB", values),
            title="Change of the error in dB by number of block, one line a projection type",
            size=size,
            limits=[(tolerance, f"tolerance {tolerance:g} dB")],
        ),
        wide_size=FULL,
    )
    beyond = sum(abs(layer.change_db) > _LARGEST_DB for _, layer in deep)
    note = f"{beyond} beyond {_LARGEST_DB:g} dB are drawn there. " if beyond else ""
    left = len(layers) - len(deep)
    note += f"{left} outside numbered blocks are not drawn." if left else ""
    legend = [
        LegendEntry(label=kind, style=style, swatch=drawn(swatch(style)))
        for style, kind in enumerate(kinds)
    ]
    figure = Figure(title="Change of the error by block", chart=shown, note=note)
    return Part(figures=[figure], legend=legend)


def _clipped(db: float) -> float:
    return db if math.isnan(db) else min(max(db, -_LARGEST_DB), _LARGEST_DB)


def _tooltip(layer: LayerVerdict) -> str:
    text = f"{layer.name}: {layer.change_db:+.3f} dB, may grow by {layer.tolerance_db:g} dB"
    return f"{text}; {layer.failure}" if layer.failure else text


__all__ = ["check_page"]
