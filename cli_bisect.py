"""`quantload bisect`: what causes the drift of a candidate."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

from quantload.cli_options import EVERY, JSON, QUIET, TRUST
from quantload.cli_tokens import read_tokens, token_options
from quantload.errors import counted, listed

if TYPE_CHECKING:
    from quantload.accuracy.attribution_result import Attribution, KlMean, UnitDrift

_SHOWN = 10


@click.command()
@click.argument("reference")
@click.argument("candidate")
@token_options(max_tokens=512, without="the reference makes them up")
@click.option(
    "--by",
    type=click.Choice(["layer", "group", "block"]),
    default="group",
    show_default=True,
    help="What is exchanged at once; a group is what runtimes fuse: q/k/v, gate/up, experts.",
)
@click.option(
    "--first-tokens",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="Tokens on which everything that differs is tried.",
)
@click.option(
    "--top",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    help="How many are then looked at closer, on all tokens.",
)
@click.option("--device", help="cpu or cuda; default cuda if there is one.")
@click.option(
    "--dtype",
    default="float32",
    show_default=True,
    help="dtype of the runs; auto: as the reference.",
)
@click.option("--markdown", is_flag=True, help="Print Markdown, for a pull request or a file.")
@TRUST
@EVERY
@JSON
@QUIET
def bisect(reference: str, candidate: str, **flags: Any) -> None:  # noqa: ANN401 - click's values
    """Rank what causes the drift of CANDIDATE: its layers are put into REFERENCE one at a time.

    Layers that are equal in both are left out. For the first of the ranking two more numbers are
    measured: what noise of the same size does in the same place, and how much of the drift goes
    away where CANDIDATE gets that layer of REFERENCE.

    Exit codes: 0 done, 2 an input cannot be used, 3 the two cannot be compared.
    """
    from quantload import api_bisect
    from quantload.cli_output import BarProgress, print_json
    from quantload.loader.model_dtype import parse_dtype

    with BarProgress(quiet=flags["quiet"]) as progress:
        found = api_bisect.bisect(
            reference,
            candidate,
            sequences=read_tokens(reference, flags, generate=True),
            by=flags["by"],
            first_tokens=flags["first_tokens"],
            top=flags["top"],
            device=flags["device"],
            dtype=parse_dtype(flags["dtype"]),
            progress=progress,
            trust_remote_code=flags["trust_remote_code"],
        )
    if flags["as_json"]:
        print_json(attribution_json(found))
    elif flags["markdown"]:
        click.echo(attribution_markdown(found, every=flags["every"]))
    else:
        show_attribution(found, every=flags["every"])


# -- showing ---------------------------------------------------------------------------------------

_COLUMNS = (
    ("exchanged", False),
    ("candidate", False),
    ("KL", True),
    ("+-", True),
    ("tokens", True),
    ("share", True),
    ("output error", True),
    ("of its kind", True),
    ("of noise", True),
    ("gone if put back", True),
)


def _cells(found: Attribution, row: UnitDrift) -> tuple[str, ...]:
    return (
        row.unit.name,
        row.unit.candidate,
        _number(row.kl.mean),
        _number(row.kl.standard_error),
        str(row.kl.tokens),
        _percent(row.share),
        _percent(row.error, digits=2),
        _times(row.of_kind) + (f" {row.member.rpartition('.')[2]} !" if row.stands_out else ""),
        _times(row.noise_ratio),
        _percent(found.removed(row)),
    )


def _number(value: float) -> str:
    if math.isnan(value):
        return ""
    return "not finite" if math.isinf(value) else f"{value:.3g}"


def _percent(value: float | None, *, digits: int = 1) -> str:
    return "" if value is None else f"{100 * value:.{digits}f} %"


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} x"


def _kl(found: KlMean) -> str:
    return f"{_number(found.mean)} +- {_number(found.standard_error) or '?'}"


def summary_lines(found: Attribution) -> list[str]:
    """Return what the numbers say, a line each."""
    names = {"layer": "layer", "group": "fused group", "block": "block"}
    lines = [
        f"KL(reference || candidate) {_kl(found.whole)} nats a token over "
        f"{counted(found.whole.tokens, 'token')}; "
        f"{counted(len(found.units), names[found.by])} differ, "
        f"{counted(len(found.equal), 'weight or tensor', 'weights and tensors')} are equal in both "
        "and were left out"
    ]
    lines += [found.verdict] if found.units else ["nothing differs: nothing was exchanged"]
    if found.leaders:
        lines.append(found.leaders)
    if found.standing_out:
        named = [f"{row.member} ({_times(row.of_kind)})" for row in found.standing_out]
        lines.append(
            f"outputs that are off by more than is usual for their kind: {listed(named)}; those "
            "that show at the output come first"
        )
    if found.nothing:
        lines.append(
            f"exchanging nothing gave KL {found.nothing:.3g}, expected 0: smaller numbers say "
            "nothing"
        )
    elif found.units:
        lines.append("exchanging nothing gave KL 0")
    lines += [f"{line}; no exchange of layers shows that" for line in found.config]
    if found.why_whole:
        lines.append(f"the models were in memory as a whole: {found.why_whole}")
    return lines


def show_attribution(found: Attribution, *, every: bool = False) -> None:
    """Print the ranking and what it says."""
    from quantload.cli_output import console, make_table

    rows = found.units if every else found.units[:_SHOWN]
    title = "All that differs" if every else f"The {len(rows)} that cause most of the drift"
    out = console()
    if rows:
        table = make_table(title, list(_COLUMNS))
        for row in rows:
            table.add_row(*_cells(found, row))
        out.print(table)
    for line in summary_lines(found):
        out.print(line)


def attribution_markdown(found: Attribution, *, every: bool = False) -> str:
    """Return the ranking as Markdown."""
    rows = found.units if every else found.units[:_SHOWN]
    lines = ["## quantload bisect", "", *(f"- {line}" for line in summary_lines(found))]
    if rows:
        lines += ["", "| " + " | ".join(name for name, _ in _COLUMNS) + " |"]
        lines.append("|" + "".join("---:|" if right else "---|" for _, right in _COLUMNS))
        lines += ["| " + " | ".join(_cells(found, row)) + " |" for row in rows]
    return "\n".join(lines)


def attribution_json(found: Attribution) -> dict[str, Any]:
    """Return the ranking for machines; numbers that are not finite are null."""
    from quantload.cli_output import finite

    return {
        "quantload_bisect": 1,
        "by": found.by,
        "whole": _kl_json(found.whole),
        "whole_first_pass": _kl_json(found.whole_first),
        "sum_of_parts": finite(found.sum_of_parts),
        "additivity": finite(found.additivity),
        "verdict": found.verdict,
        "nothing_exchanged": found.nothing,
        "lead_standard_errors": None if found.lead is None else finite(found.lead),
        "units": [
            {
                "name": row.unit.name,
                "modules": list(row.unit.modules),
                "reference": row.unit.reference,
                "candidate": row.unit.candidate,
                "kl": _kl_json(row.kl),
                "refined": row.refined,
                "share": row.share,
                "output_error": row.error,
                "times_its_kind": row.of_kind,
                "of_module": row.member,
                "stands_out": row.stands_out,
                "suspect": row.is_suspect,
                "noise": _kl_json(row.noise),
                "put_back": _kl_json(row.put_back),
                "gone_if_put_back": found.removed(row),
            }
            for row in found.units
        ],
        "equal": list(found.equal),
        "config_differences": list(found.config),
        "loaded_whole": found.why_whole,
    }


def _kl_json(found: KlMean | None) -> dict[str, Any] | None:
    from quantload.cli_output import finite

    if found is None:
        return None
    return {
        "mean": finite(found.mean),
        "standard_error": finite(found.standard_error),
        "tokens": found.tokens,
    }


__all__ = [
    "attribution_json",
    "attribution_markdown",
    "bisect",
    "show_attribution",
    "summary_lines",
]
