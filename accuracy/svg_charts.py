"""Charts as SVG text: lines with markers, and bars; colours come from the page's style sheet.

A series is told apart by its marker and its dashes too, never by colour alone. Every point and bar
says its numbers in a <title>, which browsers show as a tooltip. Coordinates in the functions'
arguments are those of the data; lengths are units of the view box.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from quantload.accuracy.svg_axes import Axis
from quantload.errors import printable

NUM_COLOURS = 8
_DASHES = ("", "6 3", "2 2", "8 2 2 2")
_TOP, _BOTTOM, _RIGHT = 24.0, 38.0, 12.0
_LETTER = 6.3  # width of a letter at most, of text of size 11
_LINE = 13.0


@dataclass(frozen=True, kw_only=True)
class Series:
    """A line with markers.

    Args:
        points: (x, y, tooltip); y that is not finite interrupts the line.
        style: Which colour, marker and dashes it has.
        is_dashed: Dashed, whatever the style.
    """

    points: Sequence[tuple[float, float, str]]
    style: int
    is_dashed: bool = False


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A bar.

    Args:
        low: Its left end.
        high: Its right end.
        value: Its height.
        title: Tooltip.
        label: Text above it.
        style: Which colour it has.
    """

    low: float
    high: float
    value: float
    title: str
    label: str = ""
    style: int = 0


@dataclass(frozen=True, kw_only=True)
class Size:
    """Size of a chart in units of its view box.

    Args:
        width: Across.
        height: Down.
        marker: Half the width of a marker.
        has_titles: Give points and bars tooltips; of no use where nothing hovers.
    """

    width: float
    height: float
    marker: float = 3.0
    has_titles: bool = True


FULL = Size(width=900, height=320)
WIDE = Size(width=620, height=300)
NARROW = Size(width=350, height=250, marker=2.2, has_titles=False)
SMALL = Size(width=310, height=180)


# -- charts ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Frame:
    """Where the data lie in the view box."""

    size: Size
    x: Axis
    y: Axis
    left: float
    right: float
    top: float

    def across(self, value: float) -> float:
        """Map a value of the x axis."""
        return self.left + (value - self.x.low) / (self.x.high - self.x.low) * self._wide

    def down(self, value: float) -> float:
        """Map a value of the y axis."""
        return self.bottom - (value - self.y.low) / (self.y.high - self.y.low) * (
            self.bottom - self.top
        )

    @property
    def bottom(self) -> float:
        """Where the x axis lies."""
        return self.size.height - _BOTTOM

    @property
    def _wide(self) -> float:
        return self.right - self.left


def line_chart(
    series: Sequence[Series],
    *,
    x: Axis,
    y: Axis,
    title: str,
    size: Size,
    second: tuple[str, Callable[[float], str]] | None = None,
    limits: Sequence[tuple[float, str]] = (),
) -> str:
    """Draw lines with markers.

    Args:
        series: The lines.
        x: Axis below.
        y: Axis on the left.
        title: What is shown, for those who cannot see it.
        size: Of the view box.
        second: Label of a second scale on the right, and its text for a tick of `y`.
        limits: (y, text) of lines across.
    """
    texts = [second[1](value) for value, _ in y.ticks] if second else []
    frame = _frame(size, x, y, right=_LETTER * max(map(len, texts), default=0) + 8)
    parts = [*_axes(frame), *(_second_scale(frame, *second) if second else [])]
    parts += [_line(frame, one) for one in series]
    parts += [_limit(frame, value, text) for value, text in limits]
    return _svg(parts, size, title)


def bar_chart(
    bars: Sequence[Bar],
    *,
    x: Axis,
    y: Axis,
    title: str,
    size: Size,
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """Draw bars.

    Args:
        bars: From left to right; those below the y axis' lower end are left out.
        x: Axis below.
        y: Axis on the left.
        title: What is shown, for those who cannot see it.
        size: Of the view box.
        marks: (x, text) of lines upwards; each has its own line of text above the bars.
    """
    texts = sum(bool(text) for _, text in marks)
    frame = _frame(size, x, y, above=texts * _LINE)
    parts = [*_axes(frame), *(_bar(frame, bar) for bar in bars if bar.value > y.low)]
    line = 0
    for value, text in marks:
        parts.append(_mark(frame, value, text, line))
        line += bool(text)
    return _svg(parts, size, title)


def _frame(size: Size, x: Axis, y: Axis, *, right: float = 0.0, above: float = 0.0) -> _Frame:
    widest = max((len(text) for _, text in y.ticks), default=1)
    return _Frame(
        size=size,
        x=x,
        y=y,
        left=_LETTER * widest + 10,
        right=size.width - max(right, _RIGHT),
        top=_TOP + above,
    )


def _svg(parts: Sequence[str], size: Size, title: str) -> str:
    return (
        f'<svg viewBox="0 0 {_n(size.width)} {_n(size.height)}" role="img" '
        f'aria-label="{escape(printable(title))}">{"".join(parts)}</svg>'
    )


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _text(x: float, y: float, text: str, *, anchor: str = "", style: str = "") -> str:
    return (
        f'<text x="{_n(x)}" y="{_n(y)}"'
        + (f' text-anchor="{anchor}"' if anchor else "")
        + (f' class="{style}"' if style else "")
        + f">{escape(printable(text))}</text>"
    )


def _axes(frame: _Frame) -> list[str]:
    parts = []
    for value, text in frame.y.ticks:
        y = frame.down(value)
        parts.append(f'<path class="grid" d="M{_n(frame.left)} {_n(y)}H{_n(frame.right)}"/>')
        parts.append(_text(frame.left - 6, y + 4, text, anchor="end"))
    room = (frame.right - frame.left) / max(len(frame.x.ticks), 1)
    widest = max((len(text) for _, text in frame.x.ticks), default=1)
    every = max(1, math.ceil((widest * _LETTER + 6) / max(room, 1.0)))
    for value, text in frame.x.ticks[::every]:
        x = frame.across(value)
        parts.append(f'<path class="tick" d="M{_n(x)} {_n(frame.bottom)}v4"/>')
        parts.append(_text(x, frame.bottom + 16, text, anchor="middle"))
    parts.append(f'<path class="axis" d="M{_n(frame.left)} {_n(frame.bottom)}H{_n(frame.right)}"/>')
    parts.append(_text(2, 12, frame.y.label, style="label"))
    middle = (frame.left + frame.right) / 2
    parts.append(
        _text(middle, frame.size.height - 5, frame.x.label, anchor="middle", style="label")
    )
    return parts


def _second_scale(frame: _Frame, label: str, text_of: Callable[[float], str]) -> list[str]:
    parts = [_text(frame.size.width - 2, 12, label, anchor="end", style="label")]
    for value, _ in frame.y.ticks:
        parts.append(_text(frame.right + 5, frame.down(value) + 4, text_of(value)))
    return parts


def _limit(frame: _Frame, value: float, text: str) -> str:
    y = frame.down(value)
    return f'<path class="limit" d="M{_n(frame.left)} {_n(y)}H{_n(frame.right)}"/>' + _text(
        frame.right - 4, y - 4, text, anchor="end", style="limit"
    )


def _mark(frame: _Frame, value: float, text: str, line: int) -> str:
    x = frame.across(value)
    top = _TOP + line * _LINE + _LINE - 4 if text else frame.top
    drawn = f'<path class="mark" d="M{_n(x)} {_n(top - 6)}V{_n(frame.bottom)}"/>'
    if not text:
        return drawn
    is_left = x + len(text) * _LETTER + 4 < frame.size.width
    anchor, place = ("", x + 4) if is_left else ("end", x - 4)
    return drawn + _text(place, top, text, anchor=anchor, style="mark")


def _line(frame: _Frame, series: Series) -> str:
    number = series.style % NUM_COLOURS
    dash = "5 4" if series.is_dashed else _DASHES[series.style // NUM_COLOURS % len(_DASHES)]
    path, is_broken, markers = "", True, []
    for x, y, title in series.points:
        if not math.isfinite(y):
            is_broken = True
            continue
        at = frame.across(x), frame.down(y)
        path += f"{'M' if is_broken else 'L'}{_n(at[0])} {_n(at[1])}"
        is_broken = False
        shape = marker(number, *at, frame.size.marker)
        inner = f"<title>{escape(printable(title))}</title>" if frame.size.has_titles else ""
        markers.append(f'<path d="{shape}">{inner}</path>' if inner else f'<path d="{shape}"/>')
    return (
        f'<g class="series c{number}" data-series="{series.style}">'
        f'<path class="line" d="{path}"{_dashes(dash)}/>'
        f'<g class="dots">{"".join(markers)}</g></g>'
    )


def _dashes(dash: str) -> str:
    return f' stroke-dasharray="{dash}"' if dash else ""


def _bar(frame: _Frame, bar: Bar) -> str:
    x, right = frame.across(bar.low), frame.across(bar.high)
    y = frame.down(min(bar.value, frame.y.high))
    text = escape(printable(bar.title))
    title = f"<title>{text}</title>" if frame.size.has_titles else ""
    drawn = (
        f'<rect class="bar c{bar.style % NUM_COLOURS}" x="{_n(x + 0.5)}" y="{_n(y)}" '
        f'width="{_n(max(right - x - 1, 0.5))}" height="{_n(max(frame.bottom - y, 0.5))}">'
        f"{title}</rect>"
    )
    if not bar.label:
        return drawn
    return drawn + _text((x + right) / 2, y - 5, bar.label, anchor="middle")


def marker(number: int, x: float, y: float, half: float) -> str:
    """Return the path of one of eight shapes, centred at x and y."""
    r, d = half, half * 1.3
    arc = f"a{_n(r)} {_n(r)} 0 1 0"
    shapes = (
        f"M{_n(x - r)} {_n(y)}{arc} {_n(2 * r)} 0{arc} {_n(-2 * r)} 0",
        f"M{_n(x - r)} {_n(y - r)}h{_n(2 * r)}v{_n(2 * r)}h{_n(-2 * r)}z",
        f"M{_n(x)} {_n(y - d)}l{_n(d)} {_n(2 * r)}h{_n(-2 * d)}z",
        f"M{_n(x)} {_n(y - d)}l{_n(d)} {_n(d)}l{_n(-d)} {_n(d)}l{_n(-d)} {_n(-d)}z",
        f"M{_n(x)} {_n(y + d)}l{_n(d)} {_n(-2 * r)}h{_n(-2 * d)}z",
        f"M{_n(x - r)} {_n(y - r)}l{_n(2 * r)} {_n(2 * r)}m0 {_n(-2 * r)}l{_n(-2 * r)} {_n(2 * r)}",
        f"M{_n(x - d)} {_n(y)}h{_n(2 * d)}m{_n(-d)} {_n(-d)}v{_n(2 * d)}",
        f"M{_n(x - d)} {_n(y)}l{_n(2 * d)} {_n(-d)}v{_n(2 * d)}z",
    )
    return shapes[number % len(shapes)]


def swatch(style: int, *, is_dashed: bool = False) -> str:
    """Return a piece of a series for a legend."""
    number = style % NUM_COLOURS
    dash = "5 4" if is_dashed else _DASHES[style // NUM_COLOURS % len(_DASHES)]
    return (
        f'<svg class="swatch series c{number}" viewBox="0 0 30 12" aria-hidden="true">'
        f'<path class="line" d="M1 6H29"{_dashes(dash)}/>'
        f'<g class="dots"><path d="{marker(number, 15, 6, 3.5)}"/></g></svg>'
    )


__all__ = [
    "FULL",
    "NARROW",
    "NUM_COLOURS",
    "SMALL",
    "WIDE",
    "Bar",
    "Series",
    "Size",
    "bar_chart",
    "line_chart",
    "marker",
    "swatch",
]
