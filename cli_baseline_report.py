"""How the check of a baseline is shown: on a terminal, in JSON, JUnit and GitHub's annotations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from quantload.errors import NotComparable, QuantloadError, counted, listed, printable

if TYPE_CHECKING:
    from quantload.accuracy.baseline_verdict import BaselineReport, LayerVerdict

_SHOWN = 10


def summary(report: BaselineReport, *, strict: bool = False) -> list[str]:
    """Return the verdict in sentences; those about failures begin with FAILED.

    Args:
        report: From `check_baseline`.
        strict: Layers that are better than the baseline fail too.
    """
    lines = [f"{counted(report.unchanged, 'layer is', 'layers are')} as in the baseline"]
    if report.changed:
        lines.append(f"{counted(len(report.changed), 'layer has', 'layers have')} changed")
    if again := len(report.layers) - len(report.changed):
        told = counted(again, "unchanged layer was", "unchanged layers were")
        lines.append(f"{told} measured too")
    lines += _about_bits(report)
    lines += list(report.notes)
    if report.better:
        names = listed(verdict.name for verdict in report.better)
        begin = "FAILED " if strict else ""
        lines.append(f"{begin}better than the baseline, which can be tightened: {names}")
    lines += [f"FAILED {line}" for line in report.config]
    for layers, what in ((report.added, "not in the baseline"), (report.removed, "missing")):
        if layers:
            lines.append(f"FAILED {what}: {listed(layers)}")
    lines += [f"{'FAILED ' if gate.failed else ''}{gate.text}" for gate in report.gates]
    broken = sum(bool(verdict.failure) for verdict in report.layers)
    if broken:
        told = counted(broken, "layer is worse than it", "layers are worse than they")
        lines.append(f"FAILED {told} may be")
    if _passed(report, strict=strict):
        return [*lines, "passed"]
    return [*lines, *_where(report), "FAILED"]


def _passed(report: BaselineReport, *, strict: bool) -> bool:
    return report.passed and not (strict and report.better)


def _about_bits(report: BaselineReport) -> Iterator[str]:
    if report.baseline is None or report.now is None:
        return
    before, now = report.baseline.bits_per_weight, report.now.bits_per_weight
    if abs(now - before) > 1e-4 * before:
        yield f"bits a weight: {before:.4g} -> {now:.4g}"


def _where(report: BaselineReport) -> Iterator[str]:
    """Say what the baseline and the check were made on, in case that explains it."""
    for what, made in (("baseline", report.baseline), ("check", report.now)):
        if made is not None and made.made_on:
            on = ", ".join(f"{name} {value}" for name, value in made.made_on.items())
            yield f"{what} made on: {on}"


def failure_text(report: BaselineReport, *, accept: str, strict: bool = False) -> str:
    """Return what a failing check says: the worst ten layers, and how to accept them.

    Args:
        report: From `check_baseline`.
        accept: The command that writes the baseline anew.
        strict: Layers that are better than the baseline fail too.
    """
    lines = [f"  {_line(verdict)}" for verdict in report.worst(_SHOWN)]
    shown = [printable(line) for line in (*lines, *summary(report, strict=strict))]
    return "\n".join([*shown, f"to accept: {accept}"])


def _line(verdict: LayerVerdict) -> str:
    line = (
        f"{verdict.name}: {verdict.before.weight:.5g} -> {_now(verdict)} "
        f"({verdict.change_db:+.3f} dB, tolerance {verdict.tolerance_db:.3g} dB)"
    )
    return f"{line}: {verdict.failure}" if verdict.failure else line


def _now(verdict: LayerVerdict) -> str:
    about = "" if verdict.now.estimate_db is None else "about "
    return f"{about}{verdict.now.weight:.5g}"


def show_check(report: BaselineReport, *, accept: str, strict: bool = False) -> None:
    """Print the worst layers and the verdict."""
    from quantload.cli_output import console, make_table

    out = console()
    if report.layers:
        names = ("layer", "before", "now", "change", "tolerance", "")
        table = make_table(
            "The layers that grew most", [(name, name not in ("layer", "")) for name in names]
        )
        for verdict in report.worst(_SHOWN):
            table.add_row(
                printable(verdict.name),
                f"{verdict.before.weight:.5g}",
                _now(verdict),
                f"{verdict.change_db:+.3f} dB",
                f"{verdict.tolerance_db:.3g} dB",
                printable(verdict.failure),
            )
        out.print(table)
    for line in summary(report, strict=strict):
        out.print(printable(line))
    if not _passed(report, strict=strict):
        out.print(f"to accept: {accept}", soft_wrap=True)


def check_json(report: BaselineReport, *, strict: bool = False) -> dict[str, Any]:
    """Return a check for machines."""
    return {
        "quantload_baseline_check": 1,
        "passed": _passed(report, strict=strict),
        "unchanged": report.unchanged,
        "added": list(report.added),
        "removed": list(report.removed),
        "config": list(report.config),
        "failures": list(report.failures),
        "notes": list(report.notes),
        "gates": [
            {
                "what": gate.what,
                "change": round(gate.change, 6),
                "allowed": gate.allowed,
                "failed": gate.failed,
            }
            for gate in report.gates
        ],
        "layers": [
            {
                "layer": verdict.name,
                "before": verdict.before.weight,
                "now": verdict.now.weight,
                "estimated": verdict.now.estimate_db is not None,
                "change_db": round(verdict.change_db, 6),
                "tolerance_db": verdict.tolerance_db,
                "failure": verdict.failure,
            }
            for verdict in report.worst(len(report.layers))
        ],
    }


def write_check_page(
    page: Path,
    report: BaselineReport,
    *,
    candidate: str,
    baseline: str,
    accept: str,
    strict: bool = False,
) -> None:
    """Write a check as an HTML page.

    Args:
        page: The file; it appears only when it is complete.
        report: From `check_baseline`.
        candidate: Name of the checkpoint that was checked.
        baseline: Name of the baseline's file.
        accept: The command that writes the baseline anew.
        strict: Layers that are better than the baseline fail too.

    Raises:
        OutputError: The page cannot be written.
    """
    from quantload.accuracy.html_check import check_page  # jinja2 only where it is needed
    from quantload.api_baseline import write_text

    text = check_page(
        report,
        candidate=Path(candidate).name or candidate,
        baseline=baseline,
        accept=accept,
        strict=strict,
    )
    write_text(page, text)


# -- for CI ----------------------------------------------------------------------------------------


def junit_text(report: BaselineReport, file: Path, *, strict: bool = False) -> str:
    """Return a JUnit report: a case for each layer that was measured, one for the rest."""
    lines = summary(report, strict=strict)
    rest = [line.removeprefix("FAILED ") for line in lines if line.startswith("FAILED ")]
    broken = sum(bool(verdict.failure) for verdict in report.layers)
    failed = not _passed(report, strict=strict)
    suite = ElementTree.Element(
        "testsuite",
        name=f"quantload baseline {file.name}",
        tests=str(len(report.layers) + 1),
        failures=str(broken + failed),
        errors="0",
    )
    for verdict in report.worst(len(report.layers)):
        case = ElementTree.SubElement(suite, "testcase", classname=file.stem, name=verdict.name)
        if verdict.failure:
            ElementTree.SubElement(case, "failure", message=verdict.failure)
    case = ElementTree.SubElement(suite, "testcase", classname=file.stem, name="baseline")
    if failed:
        ElementTree.SubElement(case, "failure", message="; ".join(rest) or "FAILED")
    return _xml(suite)


def error_junit(error: QuantloadError, file: Path) -> str:
    """Return a JUnit report of a check that could not be made."""
    suite = ElementTree.Element(
        "testsuite", name=f"quantload baseline {file.name}", tests="1", failures="0", errors="1"
    )
    case = ElementTree.SubElement(suite, "testcase", classname=file.stem, name="baseline")
    ElementTree.SubElement(case, "error", message=str(error), type=type(error).__name__)
    return _xml(suite)


def _xml(suite: ElementTree.Element) -> str:
    """Return the file's text; what XML cannot hold, as control characters of names, is escaped."""
    ElementTree.indent(suite)
    for element in suite.iter():
        for key, value in element.attrib.items():
            element.set(key, printable(value, keep="\n" if key == "message" else ""))
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def github_lines(report: BaselineReport, file: Path, *, strict: bool = False) -> list[str]:
    """Return workflow commands of GitHub Actions: an error for each failure, notices for gains."""
    lines = [
        f"::error file={_escaped(str(file), of_property=True)},"
        f"title={_escaped(verdict.name, of_property=True)}::{_escaped(verdict.failure)}"
        for verdict in report.worst(len(report.layers))
        if verdict.failure
    ]
    for line in summary(report, strict=strict):
        if line.startswith("FAILED "):
            lines.append(_annotation("error", file, line.removeprefix("FAILED ")))
    if report.better and not strict:
        lines.append(
            _annotation(
                "notice",
                file,
                f"{counted(len(report.better), 'layer is', 'layers are')} better than the "
                "baseline, which can be tightened",
            )
        )
    return lines


def error_lines(error: QuantloadError, file: Path) -> list[str]:
    """Return the annotation of a check that could not be made."""
    what = "not comparable" if isinstance(error, NotComparable) else "no check"
    return [_annotation("error", file, f"{what}: {error}")]


def _annotation(kind: str, file: Path, text: str) -> str:
    return f"::{kind} file={_escaped(str(file), of_property=True)}::{_escaped(text)}"


def _escaped(text: str, *, of_property: bool = False) -> str:
    """Escape as GitHub's runner unescapes; in properties `:` and `,` too."""
    text = printable(text, keep="\r\n")
    for character, code in (("%", "%25"), ("\r", "%0D"), ("\n", "%0A")):
        text = text.replace(character, code)
    if of_property:
        text = text.replace(":", "%3A").replace(",", "%2C")
    return text


__all__ = [
    "check_json",
    "error_junit",
    "error_lines",
    "failure_text",
    "github_lines",
    "junit_text",
    "show_check",
    "summary",
    "write_check_page",
]
