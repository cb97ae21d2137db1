"""`quantload doctor`: would that engine load it?"""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from quantload.cli_options import EVERY, JSON, TRUST

if TYPE_CHECKING:
    from quantload.loader.doctor import Diagnosis


@click.command()
@click.argument("output")
@click.option(
    "--engine",
    default="vllm",
    show_default=True,
    type=click.Choice(["vllm", "sglang", "transformers"]),
    help="Engine that shall load OUTPUT.",
)
@click.option(
    "--tp",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Devices of a tensor-parallel run.",
)
@click.option(
    "--device",
    default="cuda",
    show_default=True,
    type=click.Choice(["cuda", "cpu"]),
    help="Whose kernels count.",
)
@EVERY
@TRUST
@JSON
def doctor(output: str, engine: str, tp: int, device: str, **flags: Any) -> None:  # noqa: ANN401
    """Check offline whether an engine would load OUTPUT and run it rightly; exit 1 if not."""
    from quantload.accuracy.doctor import doctor as diagnose
    from quantload.cli_output import print_json

    diagnosis = diagnose(
        output,
        engine,
        device="cpu" if device == "cpu" else "cuda",
        parts=tp,
        trust_remote_code=flags["trust_remote_code"],
    )
    if flags["as_json"]:
        print_json(doctor_json(diagnosis))
    else:
        show_diagnosis(diagnosis, every=flags["every"])
    if not diagnosis.passed:
        sys.exit(1)


def checked_against(diagnosis: Diagnosis) -> str:
    """Say whose rules were checked: "checked against vLLM 0.32.0 rules, kernels of cuda"."""
    engine = diagnosis.engine
    text = f"checked against {engine.title} {engine.version} rules"
    if engine.devices:
        text += f", kernels of {diagnosis.device}"
    devices = f"{diagnosis.parts} devices" if diagnosis.parts > 1 else "1 device"
    return f"{text}, {devices}"


def doctor_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return a diagnosis for machines."""
    return {
        "quantload_doctor": 1,
        "checkpoint": diagnosis.name,
        "engine": diagnosis.engine.name,
        "engine_version": diagnosis.engine.version,
        "device": diagnosis.device,
        "tp": diagnosis.parts,
        "passed": diagnosis.passed,
        "findings": [asdict(finding) for finding in diagnosis.findings],
    }


def show_diagnosis(diagnosis: Diagnosis, *, every: bool = False) -> None:
    """Print findings, those of layers that differ in their number only as one, and the verdict."""
    from quantload.cli_output import console, named_rows

    out = console()
    keys = ("level", "rule", "found", "expected", "hint", "source")
    rows = [
        (finding.layer, tuple(str(getattr(finding, key)) for key in keys))
        for finding in diagnosis.findings
    ]
    for layer, count, level, rule, found, expected, hint, source in named_rows(rows, every):
        times = f" ({count} layers)" if int(count) > 1 else ""
        out.print(f"{level}: {rule}{f', {layer}' if layer else ''}{times}", markup=False)
        out.print(f"    found     {found}", markup=False)
        out.print(f"    expected  {expected}", markup=False)
        if hint:
            out.print(f"    hint      {hint}", markup=False)
        out.print(f"    rule of   {source}", markup=False)
    errors = len(diagnosis.errors)
    warnings = len(diagnosis.findings) - errors
    verdict = "loads" if diagnosis.passed else "will not load, or will be wrong"
    out.print(f"{diagnosis.name}: {verdict}; {errors} errors, {warnings} warnings", markup=False)
    out.print(checked_against(diagnosis), markup=False)


__all__ = ["checked_against", "doctor", "doctor_json", "show_diagnosis"]
