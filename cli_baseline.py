"""`quantload baseline`: what every layer lost, kept in a repository and checked in CI."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from quantload.cli_baseline_report import (
    check_json,
    error_junit,
    error_lines,
    github_lines,
    junit_text,
    show_check,
    write_check_page,
)
from quantload.cli_options import JSON, QUIET
from quantload.cli_tokens import read_tokens, token_options
from quantload.errors import QuantloadError, counted, listed, printable

_DEVICE = click.option("--device", help="cpu or cuda; default cuda if there is one.")
_DTYPE = click.option(
    "--dtype",
    default="float32",
    show_default=True,
    help="dtype of the runs; auto: as the reference.",
)


@click.group()
def baseline() -> None:
    """Keep what every layer of a checkpoint lost in a file, and fail when one gets worse."""


@baseline.command()
@click.argument("reference")
@click.argument("candidate")
@click.argument("file", type=click.Path(path_type=Path))
@token_options(max_tokens=2048)
@_DEVICE
@_DTYPE
@click.option(
    "--repeats",
    type=click.IntRange(min=0, max=4),
    default=0,
    show_default=True,
    help="Run the tokens again in other arithmetic (bfloat16, other numbers of threads), and set "
    "tolerances from how far the errors move.",
)
@click.option(
    "--remade",
    multiple=True,
    metavar="CANDIDATE",
    help="What the same tool made of REFERENCE once more: tolerances are set from how far its "
    "errors lie apart; repeatable.",
)
@click.option(
    "--sketch/--no-sketch",
    default=None,
    help="Keep a sketch of REFERENCE beside FILE (2 KB a layer), so that a check can estimate the "
    "errors of layers that have changed without it.",
)
@click.option("--overwrite", is_flag=True, help="Replace FILE: accept what CANDIDATE has lost.")
@JSON
@QUIET
def write(
    reference: str,
    candidate: str,
    file: Path,
    *,
    as_json: bool,
    **flags: Any,  # noqa: ANN401 - click's values
) -> None:
    """Measure every layer of CANDIDATE against REFERENCE and write that to FILE.

    With tokens (--data, --generated, ...) both also run, and outputs of layers, hidden states, KL
    and top-1 agreement are kept; the token ids are in FILE, so that every check runs the same. With
    --overwrite the tokens and tolerances of FILE stay, unless others are given.
    """
    from quantload import api_baseline
    from quantload.accuracy.baseline_config import changed_facts
    from quantload.accuracy.baseline_sketch import sketch_place
    from quantload.accuracy.baseline_verdict import FEWEST_TOKENS
    from quantload.cli_output import BarProgress, console, print_json

    with BarProgress(quiet=flags["quiet"]) as progress:
        made = api_baseline.write_baseline(
            reference,
            candidate,
            file,
            sequences=read_tokens(reference, flags) or None,
            progress=progress,
            **{name: flags[name] for name in _PASSED_ON},
        )
    repeats = made.repeats
    differences = changed_facts(made.reference_config, made.candidate_config)
    uncovered = (made.quantization or {}).get("left_out", [])
    if as_json:
        print_json(
            {
                "quantload_baseline": 1,
                "file": str(file),
                "layers": len(made.layers),
                "config": differences,
                "uncovered": uncovered,
                "tokens": 0 if made.tokens is None else made.tokens.count,
                "repeat_sigma_db": {} if repeats is None else dict(repeats.sigma_db),
                "sketch": None if made.sketch is None else made.sketch.file,
            }
        )
        return
    out = console()
    out.print(
        f"{file}: {counted(len(made.layers), 'layer')} of {made.candidate} against "
        f"{made.reference}, {made.bits_per_weight:.2f} bits a weight"
    )
    if made.tokens is not None:
        told = counted(made.tokens.count, "token was", "tokens were")
        out.print(f"{told} run, sha256 {made.tokens.sha256}")
        if made.tokens.count < FEWEST_TOKENS:
            out.print(
                f"fewer than {FEWEST_TOKENS} tokens: a check in another dtype judges weights only"
            )
    for line in differences:
        out.print(printable(f"{line}, as the reference has it"))
    if uncovered:
        count = counted(len(uncovered), "quantized layer")
        out.print(printable(f"the quantization config leaves {count} out: {listed(uncovered)}"))
    if repeats is not None:
        noise = ", ".join(f"{name} {value:.3g} dB" for name, value in repeats.sigma_db.items())
        out.print(f"repeats ({', '.join(repeats.runs)}) lie apart by: {noise}")
    if made.sketch is not None:
        out.print(
            f"{sketch_place(file, made.sketch.file)}: its estimates are off by "
            f"{made.sketch.sigma_db:.2f} dB (rms)"
        )


_PASSED_ON = ("device", "dtype", "repeats", "remade", "sketch", "overwrite")


@baseline.command()
@click.argument("candidate")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--ref", "reference", help="The reference; needed if a layer has changed.")
@click.option("--only", default="*", metavar="GLOB", help="Look at layers of such names only.")
@click.option("--measure-all", is_flag=True, help="Measure layers that have not changed too.")
@_DEVICE
@_DTYPE
@click.option("--strict", is_flag=True, help="Fail too if layers are better than the baseline.")
@click.option("--junit", type=click.Path(path_type=Path), help="Write a JUnit report.")
@click.option("--html", type=click.Path(path_type=Path), help="Write a page with charts to FILE.")
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

    with _told(file, junit, github=flags["github"]), BarProgress(quiet=flags["quiet"]) as progress:
        report = api_baseline.check_baseline(
            candidate,
            file,
            reference=reference,
            progress=progress,
            **{name: flags[name] for name in ("only", "measure_all", "device", "dtype")},
        )
    failed = not report.passed or (flags["strict"] and bool(report.better))
    if junit is not None:
        api_baseline.write_text(junit, junit_text(report, file, strict=flags["strict"]))
    command = ["quantload", "baseline", "write", reference or "REF", candidate, str(file)]
    accept = shlex.join([*command, "--overwrite"])
    if flags["html"] is not None:
        write_check_page(
            flags["html"],
            report,
            candidate=candidate,
            baseline=str(file),
            accept=accept,
            strict=flags["strict"],
        )
    if flags["github"]:
        click.echo("\n".join(github_lines(report, file, strict=flags["strict"])))
    if flags["as_json"]:
        print_json(check_json(report, strict=flags["strict"]))
    else:
        show_check(report, accept=accept, strict=flags["strict"])
    if failed:
        sys.exit(1)


@contextmanager
def _told(file: Path, junit: Path | None, *, github: bool) -> Iterator[None]:
    """Put what ends a check into the reports too, so that no earlier one is taken for its."""
    from quantload import api_baseline

    try:
        yield
    except QuantloadError as error:
        if junit is not None:
            api_baseline.write_text(junit, error_junit(error, file))
        if github:
            click.echo("\n".join(error_lines(error, file)))
        raise


__all__ = ["baseline"]
