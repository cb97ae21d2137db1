"""`quantload explain`: which kernel multiplies with each layer of a loaded model, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from quantload.cli_options import EVERY, JSON, QUIET, RULE, SCHEME, TRUST
from quantload.errors import ConfigError

if TYPE_CHECKING:
    from quantload.api_explain import Explanation


@click.command()
@click.argument("model")
@click.option(
    "--tokens",
    default="1",
    show_default=True,
    metavar="M,M,...",
    help="Tokens of a call: say what it launches, and the limit of the card for it.",
)
@click.option("--device", help="cpu or cuda; default cuda if there is one.")
@click.option("--dtype", help="float32, bfloat16 or float16; default (auto) that of the config.")
@SCHEME
@RULE
@TRUST
@EVERY
@JSON
@QUIET
def explain(model: str, tokens: str, **flags: Any) -> None:  # noqa: ANN401 - click's values
    """Load MODEL and say for each layer which kernel serves it, and why others do not."""
    from quantload import api, cli_output

    counts = parse_numbers(tokens, "--tokens")
    with cli_output.BarProgress(quiet=flags["quiet"]) as progress:
        loaded = api.load(
            model,
            scheme=flags["scheme"],
            rules=flags["rules"],
            device=flags["device"],
            dtype=flags["dtype"],
            trust_remote_code=flags["trust_remote_code"],
            progress=progress,
        )
    found = api.explain(loaded, tokens=counts)
    if flags["as_json"]:
        cli_output.print_json(explanation_json(found))
    else:
        _show(found, every=flags["every"])


def parse_numbers(text: str, option: str) -> list[int]:
    """Return the positive numbers of "1,16,64".

    Raises:
        ConfigError: Something else stands there.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigError(f"`{option}` is `{text}`, expected positive numbers such as `1,16`")
    return [int(part) for part in parts]


def explanation_json(found: Explanation) -> dict[str, Any]:
    """Return an explanation for machines."""
    return {
        "quantload_explain": 1,
        "layers": [
            {
                "module": report.module,
                "shape": list(report.shape),
                "experts": report.experts,
                "scheme": report.scheme,
                "kernel": report.kernel,
                "layout": report.layout,
                "weight_bytes": report.weight_bytes,
                "fused_into": report.fused_into,
                "refused": [{"kernel": name, "reason": why} for name, why in report.refused],
                "note": report.note,
                "calls": [
                    {
                        "tokens": call.tokens,
                        "launches": list(call.kernels),
                        "limit_us": call.limit_us,
                        "expected_us": call.expected_us,
                        "expected_share": call.expected_share,
                    }
                    for call in report.calls
                ],
            }
            for report in found
        ],
    }


def _show(found: Explanation, *, every: bool) -> None:
    from quantload.cli_output import console, make_table

    head, *rows = found.table(every=every)
    numbers = {"n", "MiB", "share"}
    table = make_table("", [(name, name in numbers or name.startswith("limit")) for name in head])
    for row in rows:
        table.add_row(*row)
    out = console()
    out.print(table)
    for line in found.reasons():
        out.print(line, markup=False, highlight=False)
