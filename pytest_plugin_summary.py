"""What the pytest plugin says at the end of a session, from what its checks told.

Checks tell by properties of their tests, which come with the reports of tests: from the workers of
pytest-xdist too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

TEST = "quantload_test"  # of a test: where its baseline is, without suffix
USED = "quantload_baseline"  # of a check: its baseline
NOTE = "quantload_note"  # of a check: what is said of it at the end


def summary_lines(stats: Mapping[str, Sequence[object]], config: pytest.Config) -> list[str]:
    """Return notes on checks, then the baselines that no test has used.

    Args:
        stats: Reports of tests by outcome.
        config: Of the session.
    """
    reports = [
        report
        for found in stats.values()
        for report in found
        if isinstance(report, pytest.TestReport)
    ]
    told = [pair for report in reports for pair in report.user_properties]
    lines = list(dict.fromkeys(str(value) for key, value in told if key == NOTE))
    if _leaves_out(config, stats):
        return lines
    passed = [
        pair
        for report in reports
        if report.passed and report.when == "call"
        for pair in report.user_properties
    ]
    unused = _unused(_values(told, TEST), _values(passed, TEST), _values(told, USED))
    return [*lines, *(f"{file} is used by no test" for file in unused)]


def _values(told: Iterable[tuple[str, object]], key: str) -> set[str]:
    return {str(value) for name, value in told if name == key}


def _leaves_out(config: pytest.Config, stats: Mapping[str, Sequence[object]]) -> bool:
    """True if tests may have been left out, so that nothing is known of their baselines."""
    option = config.option
    chosen = ("keyword", "markexpr", "deselect", "lf", "stepwise", "collectonly")
    if stats.get("deselected") or any(getattr(option, name, None) for name in chosen):
        return True
    failed = len(stats.get("failed", ())) + len(stats.get("error", ()))
    stopped = 0 < (getattr(option, "maxfail", 0) or 0) <= failed
    return stopped or any("::" in str(argument) for argument in config.args)


def _unused(ran: Iterable[str], passed: set[str], used: set[str]) -> Iterator[Path]:
    """Yield baselines that no test has used, of modules that have run or are gone.

    Args:
        ran: Of each test its baseline without suffix.
        passed: Those of tests that passed; one that failed may not have come to all its checks.
        used: Baselines that were used.
    """
    tests = [Path(one) for one in ran]
    modules = {(test.parent, test.name.split(".")[0]) for test in tests}
    for folder in sorted({test.parent for test in tests}):
        for file in sorted(folder.glob("*.json")):
            module = file.name.split(".")[0]
            is_gone = not (folder.parent / f"{module}.py").exists()
            if str(file) in used or not ((folder, module) in modules or is_gone):
                continue
            owners = [t for t in tests if t.parent == folder and _is_of(file, t)]
            if all(str(test) in passed for test in owners) and _is_baseline(file):
                yield file


def _is_of(file: Path, test: Path) -> bool:
    return file.stem == test.name or file.stem.startswith((f"{test.name}.", f"{test.name}-."))


def _is_baseline(file: Path) -> bool:
    with file.open("rb") as stream:
        return b'"quantload_baseline"' in stream.read(200)


__all__ = ["NOTE", "TEST", "USED", "summary_lines"]
