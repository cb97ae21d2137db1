"""Charts: where points and bars lie, read back from the SVG."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

from quantload.accuracy.svg_axes import Axis, linear_axis, log_axis
from quantload.accuracy.svg_charts import (
    NARROW,
    NUM_COLOURS,
    WIDE,
    Bar,
    Series,
    bar_chart,
    line_chart,
    marker,
    swatch,
)

X = Axis(label="block", low=0.0, high=10.0, ticks=[(0.0, "0"), (5.0, "5"), (10.0, "10")])
Y = Axis(label="dB", low=10.0, high=20.0, ticks=[(10.0, "10"), (20.0, "20")])


def parsed(svg):
    return ElementTree.fromstring(svg)


def texts(svg):
    return [node.text for node in parsed(svg).iter("text")]


@pytest.mark.parametrize(
    ("values", "low", "high", "ticks"),
    [
        ([11.7, 27.2], 10.0, 30.0, ["10", "15", "20", "25", "30"]),
        ([0.0, 0.0023], 0.0, 0.0025, ["0.0000", "0.0005", "0.0010", "0.0015", "0.0020", "0.0025"]),
        ([-3.0, 101.0, math.nan, math.inf], -20.0, 120.0, None),
        ([5.0, 5.0], 4.4, 5.6, None),
        ([], 0.0, 1.0, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
    ],
)
def test_linear_axes(values, low, high, ticks):
    axis = linear_axis("x", values)
    assert axis.low == pytest.approx(low)
    assert axis.high == pytest.approx(high)
    if ticks:
        assert [text for _, text in axis.ticks] == ticks
    assert all(float(text) == pytest.approx(at) for at, text in axis.ticks)
    assert axis.low <= min((v for v in values if math.isfinite(v)), default=0.0)


def test_logarithmic_axes():
    axis = log_axis("KL", -4.0, 1.0)
    assert [text for _, text in axis.ticks] == ["0.0001", "0.001", "0.01", "0.1", "1", "10"]
    assert [at for at, _ in axis.ticks] == [-4.0, -3.0, -2.0, -1.0, 0.0, 1.0]
    short = log_axis("KL", -2.8, -1.9)  # a decade: 2 and 5 times each power too
    assert [text for _, text in short.ticks] == ["0.002", "0.005", "0.01"]
    assert all(10**at == pytest.approx(float(text)) for at, text in short.ticks)
    assert len(log_axis("KL", -30.0, 0.0).ticks) <= 8


def line_of(svg):
    (path,) = [node for node in parsed(svg).iter("path") if node.get("class") == "line"]
    places = path.get("d").replace("M", " M").replace("L", " L").split(" ")
    return path.get("d"), [float(part.lstrip("ML")) for part in places if part]


def test_points_lie_where_their_numbers_are():
    points = [(0.0, 10.0, "a"), (5.0, 15.0, "b"), (10.0, 20.0, "c")]
    svg = line_chart([Series(points=points, style=0)], x=X, y=Y, title="t", size=WIDE)
    _, places = line_of(svg)
    across, down = places[::2], places[1::2]
    assert across[1] == pytest.approx((across[0] + across[2]) / 2, abs=0.11)
    assert down[1] == pytest.approx((down[0] + down[2]) / 2, abs=0.11)
    assert across[0] < across[2] < WIDE.width
    assert 0 < down[2] < down[0] < WIDE.height  # more is higher up
    assert [node.text for node in parsed(svg).iter("title")] == ["a", "b", "c"]
    narrow = line_chart([Series(points=points, style=0)], x=X, y=Y, title="t", size=NARROW)
    assert list(parsed(narrow).iter("title")) == []  # nothing hovers there


def test_a_point_without_a_number_interrupts_the_line():
    points = [(0.0, 10.0, ""), (5.0, math.nan, ""), (10.0, 20.0, "")]
    svg = line_chart([Series(points=points, style=0)], x=X, y=Y, title="t", size=WIDE)
    drawn, _ = line_of(svg)
    assert (drawn.count("M"), drawn.count("L")) == (2, 0)
    assert "nan" not in svg


def test_a_second_scale_has_a_text_for_each_tick():
    second = ("percent", lambda db: f"<{db:.0f}>")
    svg = line_chart([], x=X, y=Y, title="t", size=WIDE, second=second, limits=[(12.0, "limit")])
    assert {"percent", "<10>", "<20>", "limit", "dB", "block"} <= set(texts(svg))


def test_bars_are_as_high_as_their_numbers():
    y = Axis(label="count", low=0.0, high=100.0, ticks=[(0.0, "0"), (100.0, "100")])
    bars = [
        Bar(low=float(at), high=at + 1.0, value=value, title=f"{value}")
        for at, value in enumerate((100.0, 25.0, 0.0, 50.0))
    ]
    svg = bar_chart(bars, x=X, y=y, title="t", size=WIDE, marks=[(1.0, "mean"), (9.9, "p99")])
    drawn = list(parsed(svg).iter("rect"))
    heights = [float(bar.get("height")) for bar in drawn]
    assert [height / heights[0] for height in heights] == pytest.approx([1, 0.25, 0.5], abs=0.002)
    assert [bar.find("title").text for bar in drawn] == ["100.0", "25.0", "50.0"]
    marks = [node for node in parsed(svg).iter("text") if node.get("class") == "mark"]
    assert [node.text for node in marks] == ["mean", "p99"]
    assert marks[0].get("y") != marks[1].get("y")  # a line of text each
    assert marks[1].get("text-anchor") == "end"  # it would leave the chart


def test_series_differ_in_more_than_colour():
    shapes = {marker(number, 0.0, 0.0, 3.0) for number in range(NUM_COLOURS)}
    assert len(shapes) == NUM_COLOURS
    swatches = {swatch(style) for style in range(4 * NUM_COLOURS)}
    assert len(swatches) == 4 * NUM_COLOURS  # the same colour again has other dashes


def test_texts_are_escaped():
    evil = '<script>"&'
    axis = Axis(label=evil, low=0.0, high=1.0, ticks=[(0.0, evil)])
    svg = line_chart(
        [Series(points=[(0.0, 0.5, evil)], style=0)],
        x=axis,
        y=axis,
        title=evil,
        size=WIDE,
        limits=[(0.5, evil)],
    )
    assert "<script>" not in svg
    assert parsed(svg).get("aria-label") == evil
    assert set(texts(svg)) == {evil}
    assert next(parsed(svg).iter("title")).text == evil
