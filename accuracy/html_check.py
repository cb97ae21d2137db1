"""A check against a baseline as one self-contained page."""

from __future__ import annotations

import math
from collections.abc import Sequence

from quantload import __version__
from quantload.accuracy.baseline_verdict import BaselineReport, LayerVerdict
from quantload.accuracy.html_charts import depth_axis
from quantload.accuracy.html_pages import chart, drawn, listed_all, number, render, sortable
from quantload.accuracy.html_parts import Cell, Column, Figure, LegendEntry, Part, Row
from quantload.accuracy.layer_ranking import Place, place_of
from quantload.accuracy.svg_axes import Axis
from quantload.accuracy.svg_charts import FULL, Series, line_chart, swatch
from quantload.errors import counted, printable

_WORST = 10
_LARGEST_DB = 60.0  # a chart's ends: an error that was none before has no dB at all
_LINEAR_DB = 0.01  # around 0, where the axis of changes is linear; beyond it is logarithmic
_TICKS_DB = (0.0, 0.1, 1.0, 10.0, _LARGEST_DB)

_COLUMNS = (
    Column(name="layer", is_text=True),
    Column(name="before", hint="relative L2 error of the weight in the baseline"),
    Column(name="now", hint="relative L2 error of the weight"),
    Column(name="change dB", hint="by how much its worst gated error grew"),
    Column(name="tolerance dB", hint="by how much it may grow"),
)
_OUTPUT_COLUMNS = (
    Column(name="output before", hint="median over tokens of the output's relative error"),
    Column(name="output now", hint="the same now"),
)


def check_page(
    report: BaselineReport, *, candidate: str, baseline: str, accept: str, strict: bool = False
) -> str:
    """Return the page.

    Args:
        report: What `api_baseline.check_baseline` returned.
        candidate: Name of the checkpoint that was checked, for the heading.
        baseline: Name of the baseline's file.
        accept: The command that writes the baseline anew; shown where the check fails.
        strict: Layers that are better than the baseline fail too.
    """
    worst = report.worst(len(report.layers))
    has_output = any(layer.now.output_median is not None for layer in worst)
    columns = (*_COLUMNS, *(_OUTPUT_COLUMNS if has_output else ()))
    rows = [_row(layer, len(columns)) for layer in worst]
    page = render(
        "check.html.j2",
        version=__version__,
        candidate=candidate,
        baseline=baseline,
        accept=accept,
        passed=report.passed and not (strict and report.better),
        facts=_facts(report),
        lines=_lines(report, strict=strict),
        depth=_by_depth(report.layers),
        columns=columns,
        worst=rows[:_WORST],
        rest=rows[_WORST:],
    )
    return printable(page, keep="\n")  # a name may turn the direction of writing


def _facts(report: BaselineReport) -> list[tuple[str, str, str]]:
    """Return (name, number, what belongs to it)."""
    broken = sum(bool(layer.failure) for layer in report.layers)
    facts = [
        ("Unchanged layers", str(report.unchanged), ""),
        ("Changed layers", str(len(report.changed)), f"{len(report.layers)} measured"),
        ("Worse than they may be", str(broken), ""),
        ("Better than the baseline", str(len(report.better)), ""),
    ]
    before, now = report.baseline, report.now
    if before is None or now is None:
        return facts
    facts.append(
        ("Bits a weight", f"{now.bits_per_weight:.3f}", f"was {before.bits_per_weight:.3f}")
    )
    names = {"kl_mean": "KL, mean", "top1": "Same first token"}
    for metric, (mean, error) in now.end.items():
        was = f", was {before.end[metric][0]:.4g}" if metric in before.end else ""
        facts.append((names.get(metric, metric), f"{mean:.4g}", f"\u00b1 {error:.2g}{was}"))
    return facts


def _lines(report: BaselineReport, *, strict: bool) -> list[tuple[str, bool]]:
    """Return (sentence, whether that is bad) of what concerns all layers together."""
    lines = [
        (f"{counted(len(names), 'layer')} {what}: {listed_all(names)}", True)
        for names, what in (
            (report.added, "not in the baseline"),
            (report.removed, "missing from the candidate"),
        )
        if names
    ]
    lines += [(line, True) for line in report.config]
    lines += sorted(
        ((gate.text, gate.failed) for gate in report.gates), key=lambda line: not line[1]
    )
    if report.better:
        names = listed_all([layer.name for layer in report.better])
        lines.append((f"Better than the baseline, which can be tightened: {names}", strict))
    lines += [(note, False) for note in report.notes]
    for what, made in (("Baseline", report.baseline), ("Check", report.now)):
        if made is not None and made.made_on:
            on = ", ".join(f"{name} {value}" for name, value in made.made_on.items())
            lines.append((f"{what} made on: {on}", False))
    return lines


def _row(layer: LayerVerdict, columns: int) -> Row:
    why = layer.failure or ("better: the baseline can be tightened" if layer.is_better else "")
    before, now = layer.before, layer.now
    cells = [
        Cell(text=layer.name, more=why),
        _error(before.weight),
        _error(now.weight, is_about=now.estimate_db is not None),
        Cell(text=f"{layer.change_db:+.3f}", sort=sortable(layer.change_db)),
        Cell(text=f"{layer.tolerance_db:.3g}", sort=sortable(layer.tolerance_db)),
        _error(before.output_median),
        _error(now.output_median),
    ]
    return Row(cells=cells[:columns], is_bad=bool(layer.failure))


def _error(value: float | None, *, is_about: bool = False) -> Cell:
    text = number(value, ".5g")
    return Cell(text=f"about {text}" if is_about else text, sort=sortable(value))


def _by_depth(layers: Sequence[LayerVerdict]) -> Part:
    """Chart the change in dB of each layer by number of block, a line a projection type."""
    if not layers:
        return Part(why="Every layer has the digest of the baseline: nothing was measured.")
    deep = _of_blocks(layers)
    if not deep:
        return Part(why="None of the layers that have changed is in a numbered block.")
    kinds = sorted({place.kind for place, _ in deep})
    series = [
        Series(
            points=[
                (float(place.depth or 0), _height(layer.change_db), _tooltip(layer))
                for place, layer in sorted(deep, key=lambda pair: pair[0].depth or 0)
                if place.kind == kind
            ],
            style=style,
        )
        for style, kind in enumerate(kinds)
    ]
    tolerances = {layer.tolerance_db for _, layer in deep}
    tolerance = min(tolerances)
    which = "tolerance" if len(tolerances) == 1 else "smallest tolerance"
    values = [_height(tolerance), *(y for one in series for _, y, _ in one.points)]
    shown = chart(
        lambda size: line_chart(
            series,
            x=depth_axis([x for one in series for x, _, _ in one.points]),
            y=_change_axis(values),
            title="Change of the error in dB by number of block, one line a projection type",
            size=size,
            limits=[(_height(tolerance), f"{which} {tolerance:.3g} dB")],
        ),
        wide_size=FULL,
    )
    beyond = sum(abs(layer.change_db) > _LARGEST_DB for _, layer in deep)
    note = f"{beyond} beyond {_LARGEST_DB:g} dB are drawn there. " if beyond else ""
    left = sum(place_of(layer.name).depth is None for layer in layers)
    note += f"{left} outside numbered blocks are not drawn. " if left else ""
    if any(place.expert is not None for place, _ in deep):
        note += "Of experts, those of each block that grew most."
    legend = [
        LegendEntry(label=kind, style=style, swatch=drawn(swatch(style)))
        for style, kind in enumerate(kinds)
    ]
    figure = Figure(title="Change of the error by block", chart=shown, note=note)
    return Part(figures=[figure], legend=legend)


def _of_blocks(layers: Sequence[LayerVerdict]) -> list[tuple[Place, LayerVerdict]]:
    """Return the layers in numbered blocks, of the experts of a block those that grew most."""
    found: dict[str, tuple[Place, LayerVerdict]] = {}
    for layer in layers:
        place = place_of(layer.name)
        known = found.get(place.group)
        if place.depth is not None and (known is None or layer.change_db > known[1].change_db):
            found[place.group] = place, layer
    return list(found.values())


def _height(db: float) -> float:
    """Return where a change lies on its axis, which shows 0.02 dB as well as 20."""
    size = min(abs(db), _LARGEST_DB)
    return math.copysign(math.log10(1 + size / _LINEAR_DB), db)


def _change_axis(heights: Sequence[float]) -> Axis:
    """Return the axis that holds some heights: it ends at ticks."""
    all_ticks = sorted({*_TICKS_DB, *(-tick for tick in _TICKS_DB)})
    low = max(tick for tick in all_ticks if _height(tick) <= min(0.0, *heights) + 1e-9)
    high = min(tick for tick in all_ticks if _height(tick) >= max(0.0, *heights) - 1e-9)
    ticks = [(_height(tick), f"{tick:+g}") for tick in all_ticks if low <= tick <= high]
    ticks = [(at, "0" if at == 0 else text) for at, text in ticks]
    return Axis(label="change, dB (logarithmic)", low=_height(low), high=_height(high), ticks=ticks)


def _tooltip(layer: LayerVerdict) -> str:
    text = f"{layer.name}: {layer.change_db:+.3f} dB, may grow by {layer.tolerance_db:.3g} dB"
    return f"{text}; {layer.failure}" if layer.failure else text


__all__ = ["check_page"]
