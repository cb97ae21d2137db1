"""The charts of the report pages: which numbers they show, and what is said beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from markupsafe import Markup

from quantload.accuracy.compare import BlockComparison
from quantload.accuracy.html_pages import chart, drawn, number, percent
from quantload.accuracy.html_parts import Figure, LegendEntry, Part
from quantload.accuracy.layer_ranking import RankedLayer, place_of
from quantload.accuracy.svg_axes import Axis, linear_axis
from quantload.accuracy.svg_charts import Series, line_chart, swatch
from quantload.quant.metrics import ErrorSums


def _decibel_scale(db: float) -> str:
    """Relative error in percent at a SQNR."""
    value = 100 * 10 ** (-db / 20)
    return f"{value:.3g} %" if value < 1000 else f"{float(f'{value:.1g}'):.0f} %"


_SECOND: tuple[str, Callable[[float], str]] = ("relative error", _decibel_scale)


# -- error by depth --------------------------------------------------------------------------------


_MEASURED: tuple[tuple[str, Callable[[RankedLayer], ErrorSums | None]], ...] = (
    ("Isolated output", lambda layer: layer.output),
    ("Weight", lambda layer: layer.weight),
)


def by_depth(layers: Sequence[RankedLayer]) -> Part:
    """Chart the SQNR of outputs and of weights by number of block, a line a projection type."""
    deep = [layer for layer in layers if layer.depth is not None]
    if not any(_is_lossy(layer.weight) or _is_lossy(layer.output) for layer in deep):
        return Part(why="No layer in a numbered block differs, so there is no error by depth.")
    kinds = _kinds(deep)
    figures = []
    for title, of in _MEASURED:
        chosen = [layer for layer in deep if _is_lossy(of(layer))]
        if chosen:
            missing = len(deep) - len(chosen)
            figures.append(
                Figure(
                    title=f"{title}: SQNR by block",
                    chart=_depth_chart(chosen, kinds, of, title),
                    note=f"{missing} without a number here: equal, or not measured."
                    if missing
                    else "",
                )
            )
    return Part(figures=figures, legend=_legend(kinds))


def _is_lossy(sums: ErrorSums | None) -> bool:
    return sums is not None and math.isfinite(sums.sqnr_db)


def _kinds(layers: Sequence[RankedLayer]) -> list[str]:
    """Projection types that differ somewhere, in the order of the model."""
    lossy = [layer for layer in layers if _is_lossy(layer.weight) or _is_lossy(layer.output)]
    return sorted({layer.kind for layer in lossy})


def _legend(labels: Sequence[str]) -> list[LegendEntry]:
    return [
        LegendEntry(label=label, style=style, swatch=drawn(swatch(style)))
        for style, label in enumerate(labels)
    ]


def _depth_chart(
    layers: Sequence[RankedLayer],
    kinds: Sequence[str],
    of: Callable[[RankedLayer], ErrorSums | None],
    title: str,
) -> Markup:
    series = []
    for style, kind in enumerate(kinds):
        rows = sorted(
            (layer for layer in layers if layer.kind == kind), key=lambda layer: layer.depth or 0
        )
        points = [
            (float(row.depth or 0), sums.sqnr_db, _tooltip(row, sums))
            for row in rows
            if (sums := of(row)) is not None
        ]
        series.append(Series(points=points, style=style))
    depths = [point[0] for one in series for point in one.points]
    values = [point[1] for one in series for point in one.points]
    return chart(
        lambda size: line_chart(
            series,
            x=depth_axis(depths),
            y=linear_axis("SQNR, dB", values),
            title=f"{title}: SQNR in dB by number of block, one line a projection type",
            size=size,
            second=_SECOND,
        )
    )


def depth_axis(depths: Sequence[float]) -> Axis:
    """Return the axis of block numbers: half a block wider than the outermost ones."""
    low, high = min(depths), max(depths)
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 1000) if (high - low) / step <= 10)
    first = math.ceil(low / step) * step
    ticks = [(float(at), str(at)) for at in range(first, int(high) + 1, step)]
    return Axis(label="number of block", low=low - 0.5, high=high + 0.5, ticks=ticks)


def _tooltip(layer: RankedLayer, sums: ErrorSums) -> str:
    text = f"{layer.name}: {sums.sqnr_db:.2f} dB, {percent(sums.relative)}"
    if not layer.is_experts:
        return text
    worst = layer.worst
    return (
        f"{text} over {len(layer.rows)} experts; worst {place_of(worst.module).expert}: "
        f"{percent(layer.worst_error.relative)}"
    )


# -- propagation -----------------------------------------------------------------------------------


def propagation(blocks: Sequence[BlockComparison]) -> Part:
    """Chart what each block adds and what has gathered after it."""
    charts = (
        (
            "Sums over all tokens",
            [block.injected.relative for block in blocks],
            [block.propagated.relative for block in blocks],
        ),
        (
            "Median over tokens",
            [block.injected_median for block in blocks],
            [block.propagated_median for block in blocks],
        ),
    )
    finite = [
        db for _, *both in charts for one in both for db in map(_decibels, one) if db is not None
    ]
    if not finite:
        return Part(why="" if not blocks else "The outputs of all blocks are equal.")
    y = linear_axis("SQNR, dB", finite)
    return Part(
        figures=[
            Figure(title=title, chart=_block_chart(blocks, (injected, propagated), y, title))
            for title, injected, propagated in charts
        ],
        legend=_legend(_BLOCK_LINES),
    )


_BLOCK_LINES = ("injected", "propagated")


def _block_chart(
    blocks: Sequence[BlockComparison], values: Sequence[Sequence[float]], y: Axis, title: str
) -> Markup:
    series = []
    for style, (label, errors) in enumerate(zip(_BLOCK_LINES, values, strict=True)):
        points = []
        for at, (block, error) in enumerate(zip(blocks, errors, strict=True)):
            db = _decibels(error)
            text = f"{block.path}: {label} {percent(error)}, {number(db)} dB"
            points.append((float(at), math.nan if db is None else db, text))
        series.append(Series(points=points, style=style))
    return chart(
        lambda size: line_chart(
            series,
            x=depth_axis([float(at) for at in range(len(blocks))]),
            y=y,
            title=f"{title}: SQNR in dB of the hidden states after each block",
            size=size,
            second=_SECOND,
        )
    )


def _decibels(relative: float) -> float | None:
    return -20 * math.log10(relative) if 0 < relative < math.inf else None


__all__ = ["by_depth", "depth_axis", "propagation"]
