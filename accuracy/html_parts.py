"""What the templates of the report pages are given: tables, and charts with their legends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a table.

    Args:
        name: Its heading.
        is_text: True for words, which are sorted as such.
        hint: What the number is.
    """

    name: str
    is_text: bool = False
    hint: str = ""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A cell.

    Args:
        text: What it shows.
        sort: What it is sorted by, where it is a number.
        more: A sentence below the text.
    """

    text: str
    sort: str = ""
    more: str = ""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a table; `is_bad` marks it."""

    cells: Sequence[Cell]
    is_bad: bool = False


@dataclass(frozen=True, kw_only=True)
class LegendEntry:
    """A line of a legend.

    Args:
        label: What the series is.
        style: Its number, as in the charts.
        swatch: A piece of it.
    """

    label: str
    style: int
    swatch: Markup


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A chart with its heading; `note` says what it leaves out."""

    title: str
    chart: Markup
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Charts that share a legend; without charts, `why` says why there are none."""

    figures: Sequence[Figure] = ()
    legend: Sequence[LegendEntry] = ()
    why: str = ""


__all__ = ["Cell", "Column", "Figure", "LegendEntry", "Part", "Row"]
