"""`quantload baseline`: what every layer lost, kept in a repository and checked in CI."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import click

from quantload.cli_options import JSON, QUIET
from quantload.cli_tokens import read_tokens, token_options
from quantload.errors import counted, listed

if TYPE_CHECKING:
    from quantload.accuracy.baseline_verdict import BaselineReport, LayerVerdict

_SHOWN = 10


@click.group()
def baseline() -> None:
    """Keep what every layer of a checkpoint lost in a file, and fail when one gets worse."""


@baseline.command()
@click.argument("reference")
@click.argument("candidate")
@click.argument("file", type=click.Path(path_type=Path))
@token_options(max_tokens=2048)
@click.option("--device", help="cpu or cuda; default cuda if there is one.")
@click.option("--overwrite", is_flag=True, help="Replace FILE: accept what CANDIDATE has lost.")
@JSON
@QUIET
def write(
    reference: str,
    candidate: str,
    file: Path,
    *,
    overwrite: bool,
    as_json: bool,
    **flags: Any,  # noqa: ANN401 - click's values
) -> None:
    """Measure every layer of CANDIDATE against REFERENCE and write that to FILE.

    With tokens (--data, --generated, ...) both also run, and outputs of layers, KL and top-1
    agreement are kept; the token ids are in FILE, so that every check runs the same.
    """
    from quantload import api_baseline
    from quantload.cli_output import BarProgress, console, print_json

    with BarProgress(quiet=flags["quiet"]) as progress:
        made = api_baseline.write_baseline(
            reference,
            candidate,
            file,
            sequences=read_tokens(reference, flags),
            device=flags["device"],
            overwrite=overwrite,
            progress=progress,
        )
    if as_json:
        print_json({"quantload_baseline": 1, "file": str(file), "layers": len(made.layers)})
        return
    console().print(
        f"{file}: {counted(len(made.layers), 'layer')} of {made.candidate} against "
        f"{made.reference}, {made.bits_per_weight:.2f} bits a weight"
    )


@baseline.command()
@click.argument("candidate")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--ref", "reference", help="The reference; needed if a layer has changed.")
@click.option("--device", help="cpu or cuda; default cuda if there is one.")
@click.option("--strict", is_flag=True, help="Fail too if layers are better than the baseline.")
@click.option("--junit", type=click.Path(path_type=Path), help="Write a JUnit report.")
@click.option("--github", is_flag=True, help="Print annotations for GitHub Actions.")
@JSON
@QUIET
def check(
    candidate: str,
    file: Path,
    *,
    reference: str | None,
    junit: Path | None,
    **flags: Any,  # noqa: ANN401 - click's values
) -> None:
    """Hold CANDIDATE to the baseline FILE.

    Exit codes: 0 no layer is worse than it may be, 1 one is, 2 an input cannot be used, 3 it cannot
    be compared (another reference, encoding or model, or a changed layer without --ref).
    """
    from quantload import api_baseline
    from quantload.cli_output import BarProgress, print_json

    with BarProgress(quiet=flags["quiet"]) as progress:
        report = api_baseline.check_baseline(
            candidate, file, reference=reference, device=flags["device"], progress=progress
        )
    if junit is not None:
        api_baseline.write_text(junit, junit_text(report, file))
    if flags["github"]:
        click.echo("\n".join(github_lines(report, file)))
    if flags["as_json"]:
        print_json(check_json(report))
    else:
        accept = f"quantload baseline write {reference or 'REF'} {candidate} {file} --overwrite"
        show_check(report, accept=accept)
    if not report.passed or (flags["strict"] and report.better):
        sys.exit(1)


# -- showing ---------------------------------------------------------------------------------------


def summary(report: BaselineReport) -> list[str]:
    """Return the verdict in sentences."""
    lines = [f"{counted(report.unchanged, 'layer is', 'layers are')} as in the baseline"]
    if report.layers:
        lines.append(f"{counted(len(report.layers), 'layer has', 'layers have')} changed")
    if report.better:
        names = listed(verdict.name for verdict in report.better)
        lines.append(f"better than the baseline, which can be tightened: {names}")
    for layers, what in ((report.added, "not in the baseline"), (report.removed, "missing")):
        if layers:
            lines.append(f"FAILED {what}: {listed(layers)}")
    lines += [f"FAILED {failure}" for failure in report.failures]
    broken = sum(bool(verdict.failure) for verdict in report.layers)
    if broken:
        lines.append(f"FAILED {counted(broken, 'layer is', 'layers are')} worse than they may be")
    return [*lines, "passed" if report.passed else "FAILED"]


def failure_text(report: BaselineReport, *, accept: str) -> str:
    """Return what a failing check says: the worst ten layers, and how to accept them.

    Args:
        report: From `check_baseline`.
        accept: The command that writes the baseline anew.
    """
    lines = [f"  {_line(verdict)}" for verdict in report.worst(_SHOWN)]
    return "\n".join([*lines, *summary(report), f"to accept: {accept}"])


def _line(verdict: LayerVerdict) -> str:
    before, now = verdict.before.weight, verdict.now.weight
    line = (
        f"{verdict.name}: {before:.5g} -> {now:.5g} ({verdict.change_db:+.3f} dB, tolerance "
        f"{verdict.tolerance_db:g} dB)"
    )
    return f"{line}: {verdict.failure}" if verdict.failure else line


def show_check(report: BaselineReport, *, accept: str) -> None:
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
                verdict.name,
                f"{verdict.before.weight:.5g}",
                f"{verdict.now.weight:.5g}",
                f"{verdict.change_db:+.3f} dB",
                f"{verdict.tolerance_db:g} dB",
                verdict.failure,
            )
        out.print(table)
    for line in summary(report):
        out.print(line)
    if not report.passed:
        out.print(f"to accept: {accept}")


def check_json(report: BaselineReport) -> dict[str, Any]:
    """Return a check for machines."""
    return {
        "quantload_baseline_check": 1,
        "passed": report.passed,
        "unchanged": report.unchanged,
        "added": list(report.added),
        "removed": list(report.removed),
        "failures": list(report.failures),
        "layers": [
            {
                "layer": verdict.name,
                "before": verdict.before.weight,
                "now": verdict.now.weight,
                "change_db": round(verdict.change_db, 6),
                "tolerance_db": verdict.tolerance_db,
                "failure": verdict.failure,
            }
            for verdict in report.worst(len(report.layers))
        ],
    }


def junit_text(report: BaselineReport, file: Path) -> str:
    """Return a JUnit report: a case for each layer that was measured, one for the rest."""
    rest = [line.removeprefix("FAILED ") for line in summary(report) if line.startswith("FAILED ")]
    broken = sum(bool(verdict.failure) for verdict in report.layers)
    suite = ElementTree.Element(
        "testsuite",
        name=f"quantload baseline {file.name}",
        tests=str(len(report.layers) + 1),
        failures=str(broken + (not report.passed)),
    )
    for verdict in report.worst(len(report.layers)):
        case = ElementTree.SubElement(suite, "testcase", classname=file.stem, name=verdict.name)
        if verdict.failure:
            ElementTree.SubElement(case, "failure", message=verdict.failure)
    case = ElementTree.SubElement(suite, "testcase", classname=file.stem, name="baseline")
    if not report.passed:
        ElementTree.SubElement(case, "failure", message="; ".join(rest) or "FAILED")
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def github_lines(report: BaselineReport, file: Path) -> list[str]:
    """Return workflow commands of GitHub Actions: an error for each failure, notices for gains."""
    lines = [
        f"::error file={file},title={_escaped(verdict.name, of_property=True)}::"
        f"{_escaped(verdict.failure)}"
        for verdict in report.worst(len(report.layers))
        if verdict.failure
    ]
    for line in summary(report):
        if line.startswith("FAILED "):
            lines.append(f"::error file={file}::{_escaped(line.removeprefix('FAILED '))}")
    if report.better:
        lines.append(
            f"::notice file={file}::{counted(len(report.better), 'layer is', 'layers are')} better "
            "than the baseline, which can be tightened"
        )
    return lines


def _escaped(text: str, *, of_property: bool = False) -> str:
    """Escape as GitHub's runner unescapes; in properties `:` and `,` too."""
    for character, code in (("%", "%25"), ("\r", "%0D"), ("\n", "%0A")):
        text = text.replace(character, code)
    if of_property:
        text = text.replace(":", "%3A").replace(",", "%2C")
    return text


__all__ = [
    "baseline",
    "check_json",
    "failure_text",
    "github_lines",
    "junit_text",
    "show_check",
    "summary",
]
