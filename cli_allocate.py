"""`quantload allocate`: schemes under a budget of bits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantload.cli_options import JSON, QUIET
from quantload.cli_tokens import read_tokens, token_options
from quantload.errors import ConfigError, OutputError

if TYPE_CHECKING:
    from quantload.api_allocate import Allocation


@click.command()
@click.argument("source")
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--bits", type=click.FloatRange(min=0), required=True, help="Bits of a weight.")
@click.option("--schemes", required=True, help="Names with commas between: W4A16,W8A16,keep")
@token_options(max_tokens=2048, least=4, without="tokens that the model makes up")
@click.option("--device", help="cpu or cuda; default cuda if there is one.")
@click.option("--overwrite", is_flag=True, help="Replace OUTPUT if it is there.")
@JSON
@QUIET
def allocate(
    source: str,
    output: Path,
    bits: float,
    schemes: str,
    **flags: Any,  # noqa: ANN401 - click's values
) -> None:
    """Choose a scheme for each fused group of SOURCE so that its weights take BITS bits each.

    OUTPUT is a file for `quantload convert --config`. Layers are scored by what their error does to
    the model's loss; the result is judged beside two plain choices of the same size on other
    tokens, and the best is written.
    """
    from quantload import api_allocate
    from quantload.api_baseline import write_text
    from quantload.cli_output import BarProgress, print_json

    if output.exists() and not flags["overwrite"]:
        raise OutputError(f"`{output}` is there already", hint="`--overwrite` replaces it")
    with BarProgress(quiet=flags["quiet"]) as progress:
        found = api_allocate.allocate_schemes(
            source,
            bits=bits,
            schemes=[name.strip() for name in schemes.split(",") if name.strip()],
            sequences=_sequences(source, flags),
            device=flags["device"],
            progress=progress,
        )
    write_text(output, found.rules_text())
    if flags["as_json"]:
        print_json(allocation_json(found))
    else:
        show_allocation(found, output)


def _sequences(source: str, flags: dict[str, Any]) -> list[list[int]]:
    kept = read_tokens(source, flags, generate=True)
    if len(kept) == 1:  # half to score, half to judge
        middle = len(kept[0]) // 2
        kept = [kept[0][:middle], kept[0][middle:]]
    if not all(kept):
        raise ConfigError("one token cannot both score and judge", hint="give a longer text")
    return kept


def show_allocation(found: Allocation, output: Path) -> None:
    """Print what was tried, and which is written."""
    from quantload.cli_output import console, make_table

    table = make_table(
        "Mixes of schemes",
        [("chosen", False), ("bits/weight", True), ("KL", True), ("+-", True), ("schemes", False)],
    )
    for mix in found.mixes:
        counts: dict[str, int] = {}
        for scheme in mix.schemes.values():
            counts[scheme] = counts.get(scheme, 0) + 1
        table.add_row(
            mix.name,
            f"{mix.bits_per_weight:.3f}",
            f"{mix.kl_mean:.4f}",
            f"{mix.kl_standard_error:.4f}",
            ", ".join(f"{count} {scheme}" for scheme, count in sorted(counts.items())),
        )
    out = console()
    out.print(table)
    if found.best.name != found.mixes[0].name:
        out.print(f"the choice by gradients lost: written is the one {found.best.name}")
    out.print(f"written: {output}")


def allocation_json(found: Allocation) -> dict[str, Any]:
    """Return an allocation for machines."""
    return {
        "quantload_allocate": 1,
        "best": found.best.name,
        "sum_of_parts": found.sum_of_parts,
        "mixes": [
            {
                "name": mix.name,
                "bits_per_weight": mix.bits_per_weight,
                "kl_mean": mix.kl_mean,
                "kl_standard_error": mix.kl_standard_error,
                "schemes": dict(mix.schemes),
            }
            for mix in found.mixes
        ],
        "scores": {module: dict(of) for module, of in found.scores.items()},
    }


__all__ = ["allocate", "allocation_json", "show_allocation"]
