"""What the command line shows: progress bars on stderr, tables and JSON on stdout."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import (
    Progress as RichProgress,
)
from rich.table import Table
from rich.text import Text

from quantload.accuracy.verify import VerifyReport
from quantload.errors import printable as printable
from quantload.loader.manifest import FileCheck

_WIDTH_WITHOUT_TERMINAL = 1000  # nothing is wrapped in a file or a pipe


def console(*, stderr: bool = False) -> Console:
    """Return a console that does not wrap tables when the output goes to a file."""
    # NOTE: with markup, `[a-z]` in the name of a rule would be taken for a style.
    plain = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not plain.is_terminal:
        plain.width = _WIDTH_WITHOUT_TERMINAL
    return plain


def size(num_bytes: float) -> str:
    """Bytes for people, in binary units."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"


def rate(bytes_per_second: float) -> str:
    """Bytes a second for people, in decimal units, as disks and memory are sold."""
    if bytes_per_second < 1e8:
        return f"{bytes_per_second / 1e6:.1f} MB/s"
    return f"{bytes_per_second / 1e9:.2f} GB/s"


class _RateColumn(ProgressColumn):
    """Steps a second: bytes in GB/s, other units as they are."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        unit = task.fields["unit"]
        if speed is None:
            return Text("-")
        return Text(rate(speed) if unit == "B" else f"{speed:.1f} {unit}/s")


class BarProgress:
    """The progress protocol as bars on stderr with rate and time left; draws only on a terminal."""

    def __init__(self, *, quiet: bool) -> None:
        output = console(stderr=True)
        self._bars = RichProgress(
            TextColumn("{task.description:<9}"),
            BarColumn(bar_width=30),
            TextColumn("{task.percentage:>3.0f}%"),
            _RateColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", style="dim"),
            console=output,
            disable=quiet or not output.is_terminal,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> BarProgress:
        if not self._bars.disable:  # rich 14 would end an empty display with a line
            self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._bars.disable:
            self._bars.stop()

    def start(self, phase: str, *, total: int, unit: str) -> None:
        """Add a bar."""
        self._task = self._bars.add_task(phase, total=total, unit=unit, note="")

    def advance(self, amount: int, *, note: str = "") -> None:
        """Advance the newest bar."""
        if self._task is not None:
            self._bars.update(self._task, advance=amount, note=note)

    def finish(self) -> None:
        """Fill the newest bar."""
        if self._task is not None:
            total = self._bars.tasks[self._task].total
            self._bars.update(self._task, completed=total, note="")
            self._task = None


def print_json(content: Mapping[str, Any]) -> None:
    """Print one JSON object on the last line of stdout."""
    print(json.dumps(content, ensure_ascii=False, allow_nan=False, default=str))


# -- rows that differ only in layer numbers are shown as one ---------------------------------------


def collapse(rows: Sequence[tuple[str, tuple[str, ...]]]) -> list[tuple[str, int, tuple[str, ...]]]:
    """Merge rows whose names differ in numbers only and whose cells are equal.

    Args:
        rows: (dotted name, cells).

    Returns:
        (name with ranges such as `model.layers.{0-29}.mlp.up_proj`, number of rows, cells).
    """
    merged: dict[tuple[str, tuple[str, ...]], list[list[int]]] = {}
    for name, cells in rows:
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "#", name)
        numbers = [int(part) for part in name.split(".") if part.isdecimal()]
        merged.setdefault((pattern, cells), []).append(numbers)
    return [
        (_with_ranges(pattern, numbers), len(numbers), cells)
        for (pattern, cells), numbers in merged.items()
    ]


def _with_ranges(pattern: str, numbers: Sequence[Sequence[int]]) -> str:
    name = pattern
    for position in range(len(numbers[0])):
        name = name.replace("#", _ranges({row[position] for row in numbers}), 1)
    return name


def _ranges(numbers: Iterable[int]) -> str:
    ordered = sorted(numbers)
    runs: list[list[int]] = []
    for number in ordered:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    if len(ordered) == 1:
        return str(ordered[0])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return "{" + ",".join(parts) + "}"


def make_table(title: str, columns: Sequence[tuple[str, bool]]) -> Table:
    """Return an empty table; columns are (name, right-aligned)."""
    heading = Text(title, no_wrap=True, overflow="ignore")  # else wrapped at the table's width
    table = Table(title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.title = heading
    for name, right in columns:
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    return table


def named_rows(rows: Sequence[tuple[str, tuple[str, ...]]], every: bool) -> list[tuple[str, ...]]:
    """Give rows (name, cells) their count; those that differ in a layer's number become one."""
    if every:
        return [(name, "1", *cells) for name, cells in rows]
    return [(name, str(count), *cells) for name, count, cells in collapse(rows)]


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape as "4096x128"."""
    return "x".join(map(str, shape))


# -- verify ----------------------------------------------------------------------------------------


def verify_json(report: VerifyReport) -> dict[str, Any]:
    """Return a verification for machines; infinite SQNR is null."""
    return {
        "quantload_verify": 1,
        "passed": report.passed,
        "layers": [
            {
                "module": layer.module,
                "source": layer.source,
                "scheme": layer.scheme,
                "bits_per_weight": round(layer.bits_per_weight, 4),
                "relative_error": finite(layer.relative),
                "sqnr_db": finite(layer.sqnr_db),
                "max_abs": finite(layer.max_abs),
                "floor_db": finite(layer.floor_db),
                "max_steps": finite(layer.max_steps),
                "problem": layer.problem,
            }
            for layer in report.layers
        ],
        "problems": list(report.problems),
        "notes": list(report.notes),
    }


def file_check_json(check: FileCheck) -> dict[str, Any]:
    """Return a check against a manifest for machines."""
    return {
        "quantload_verify": 1,
        "passed": check.passed,
        "files": check.num_files,
        "bytes": check.num_bytes,
        "problems": list(check.problems),
    }


def show_file_check(check: FileCheck) -> None:
    """Print what a manifest says of the files of a folder."""
    out = console()
    out.print(
        f"{check.num_files} files, {check.num_bytes} bytes, held against the sha256 of the manifest"
    )
    for problem in check.problems:
        out.print(f"FAILED {problem}", style="red", markup=False)
    out.print("verify: passed" if check.passed else "verify: FAILED")


def finite(number: float) -> float | None:
    """Return a number that JSON can hold; infinity and NaN become None."""
    return number if abs(number) < float("inf") else None


def show_verify(report: VerifyReport, *, worst: int = 10, every: bool = False) -> None:
    """Print the worst layers, a summary by scheme, and everything that failed."""
    out = console()
    for note in report.notes:
        out.print(note, markup=False)
    quantized = [layer for layer in report.layers if layer.scheme != "dense"]
    shown = sorted(quantized, key=lambda layer: layer.sqnr_db)
    shown = list(report.layers) if every else shown[:worst]
    title = "All layers" if every else f"The {len(shown)} layers with the largest error"
    table = make_table(
        title,
        [
            *[("module", False), ("scheme", False), ("bits/weight", True), ("error", True)],
            *[("SQNR dB", True), ("floor", True)],
        ],
    )
    for layer in shown:
        table.add_row(
            layer.module,
            layer.scheme,
            f"{layer.bits_per_weight:.2f}",
            f"{100 * layer.relative:.3f} %",
            f"{layer.sqnr_db:.2f}",
            f"{layer.floor_db:.1f}",
        )
    if shown:
        out.print(table)
    for scheme in sorted({layer.scheme for layer in quantized}):
        values = [layer.sqnr_db for layer in quantized if layer.scheme == scheme]
        out.print(
            f"{scheme}: {len(values)} layers, SQNR mean {sum(values) / len(values):.2f} dB, "
            f"lowest {min(values):.2f} dB"
        )
    dense = len(report.layers) - len(quantized)
    out.print(f"full precision: {dense} weights")
    for failure in report.failures():
        out.print(f"FAILED {failure}", style="red", markup=False)
    out.print("verify: passed" if report.passed else "verify: FAILED")
