"""Tables of the GEMM benchmark in Markdown, from the rows of its JSON file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gemm_goals import GOALS

Row = Mapping[str, Any]


def is_ours(row: Row) -> bool:
    """True if the row is quantload's kernel."""
    return str(row["name"]).startswith("ours")


def best(rows: Iterable[Row]) -> Row | None:
    """Return the fastest row whose result was right."""
    return min((row for row in rows if row["ok"]), key=lambda row: float(row["us"]), default=None)


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return one table a format: ours, the best other kernel and the goal for each cell."""
    tables = []
    for fmt in dict.fromkeys(row["fmt"] for row in rows):
        for rounds in (False, True):
            held = [row for row in rows if row["fmt"] == fmt and row["rounds_input"] == rounds]
            if held:
                tables.append(_table(fmt, held, rounds=rounds))
    return "\n\n".join(tables)


def _table(fmt: str, rows: list[dict[str, Any]], *, rounds: bool) -> str:
    tokens = sorted({row["m"] for row in rows})
    title = f"**{fmt}**" + (", rounding of the input in the time" if rounds else "")
    lines = [
        f"{title}: us, share of the limit; best other kernel",
        "",
        "| shape | " + " | ".join(f"M = {m}" for m in tokens) + " |",
        "|---" * (len(tokens) + 1) + "|",
    ]
    for shape in dict.fromkeys(row["shape"] for row in rows):
        cells = [[row for row in rows if row["shape"] == shape and row["m"] == m] for m in tokens]
        lines.append(f"| {shape} | " + " | ".join(_ours(cell) for cell in cells) + " |")
        if any(best(row for row in cell if not is_ours(row)) for cell in cells):
            lines.append("| *best other* | " + " | ".join(_other(cell) for cell in cells) + " |")
        goals = GOALS.get(fmt, {}).get(shape, {}) if not rounds else {}
        if goals:
            shown = (f"{goals[m]:g}" if m in goals else "" for m in tokens)
            lines.append("| *goal* | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def _ours(cell: list[dict[str, Any]]) -> str:
    ours = best(row for row in cell if is_ours(row))
    other = best(row for row in cell if not is_ours(row))
    if ours is None:
        return "wrong" if any(is_ours(row) for row in cell) else ""
    share = f" ({100 * ours['limit_us'] / ours['us']:.0f} %)" if ours["limit_us"] else ""
    mark = "**" if other is None or ours["us"] <= other["us"] else ""
    return f"{mark}{_us(ours['us'])}{mark}{share}"


def _other(cell: list[dict[str, Any]]) -> str:
    other = best(row for row in cell if not is_ours(row))
    return "" if other is None else f"{_us(other['us'])} {other['name']}"


def _us(value: float) -> str:
    return f"{value:.2f}" if value < 20 else f"{value:.1f}" if value < 200 else f"{value:.0f}"
