"""`quantload allocate`: schemes under a budget of bits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantload.cli_options import JSON, QUIET, TRUST
from quantload.cli_tokens import read_tokens, token_options
from quantload.errors import ConfigError, OutputError, counted

if TYPE_CHECKING:
    from quantload.accuracy.score_table import ScoreTable
    from quantload.api_allocate import Allocation

_CURVE_ROWS = 9
_WORST = 10


@click.command()
@click.argument("source")
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--bits", type=click.FloatRange(min=0), required=True, help="Bits of a weight.")
@click.option("--schemes", required=True, help="Names with commas between: W4A16,W8A16,keep")
@click.option(
    "--score",
    type=click.Choice(["gradient", "kl"]),
    default="gradient",
    show_default=True,
    help="What scores layers: one backward pass, or one group quantized at a time (slow).",
)
@click.option("--no-data", is_flag=True, help="Score by weights alone: tokens only judge, if any.")
@click.option(
    "--scores",
    "scores_file",
    type=click.Path(path_type=Path),
    help="JSON file of scores: taken from there if it is there, else written.",
)
@click.option(
    "--cost",
    type=click.Choice(["stored", "active"]),
    default="stored",
    show_default=True,
    help="What counts of experts: all of their bits, or the share that a token meets.",
)
@click.option("--no-verify", is_flag=True, help="Do not run the result beside plain choices.")
@token_options(max_tokens=2048, least=4, without="tokens that the model makes up")
@click.option("--device", help="cpu or cuda; default cuda if there is one.")
@click.option(
    "--dtype", default="float32", show_default=True, help="dtype of the run; auto: the model's own."
)
@click.option("--overwrite", is_flag=True, help="Replace OUTPUT if it is there.")
@TRUST
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
    the model's output; the result is judged beside two plain choices of the same size on other
    tokens, and the best is written. With --scores another budget is solved without scoring again.
    """
    from quantload import api_allocate
    from quantload.api_baseline import write_text
    from quantload.cli_output import BarProgress, print_json

    if output.exists() and not flags["overwrite"]:
        raise OutputError(f"`{output}` is there already", hint="`--overwrite` replaces it")
    scores = _read_scores(flags)
    with BarProgress(quiet=flags["quiet"]) as progress:
        found = api_allocate.allocate_schemes(
            source,
            bits=bits,
            schemes=[name.strip() for name in schemes.split(",") if name.strip()],
            sequences=_sequences(source, flags, is_scored=scores is not None),
            score="weights" if flags["no_data"] else flags["score"],
            scores=scores,
            cost=flags["cost"],
            verify=_is_verified(flags),
            device=flags["device"],
            dtype=flags["dtype"],
            progress=progress,
            trust_remote_code=flags["trust_remote_code"],
        )
    if flags["scores_file"] is not None and scores is None:
        write_text(flags["scores_file"], found.table.to_json())
    write_text(output, found.rules_text())
    if flags["as_json"]:
        print_json(allocation_json(found))
    else:
        show_allocation(found, output)


def _read_scores(flags: dict[str, Any]) -> ScoreTable | None:
    """Return the scores of a file that is there.

    Raises:
        ConfigError: It cannot be read, or was scored in another way than is asked for.
    """
    from quantload.accuracy.score_table import ScoreTable

    file = flags["scores_file"]
    if file is None or not file.exists():
        return None
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read `{file}`: {error}") from error
    found = ScoreTable.from_json(text, str(file))
    asked = "weights" if flags["no_data"] else flags["score"]
    if found.score != asked:
        raise ConfigError(
            f"`{file}` has scores by `{found.score}`, expected `{asked}`",
            hint="give `--scores` another file, or ask for what it has",
        )
    return found


def _has_tokens(flags: dict[str, Any]) -> bool:
    names = ("data", "token_ids", "prompts", "prompts_file", "generated")
    return any(flags.get(name) for name in names)


def _is_verified(flags: dict[str, Any]) -> bool:
    return not flags["no_verify"] and (not flags["no_data"] or _has_tokens(flags))


def _sequences(source: str, flags: dict[str, Any], *, is_scored: bool) -> list[list[int]]:
    is_verified = _is_verified(flags)
    if not is_verified and (flags["no_data"] or is_scored):
        return []
    kept = read_tokens(source, flags, generate=not flags["no_data"])
    if len(kept) == 1 and not flags["no_data"]:  # half to score, half to judge
        middle = len(kept[0]) // 2
        kept = [kept[0][:middle], kept[0][middle:]]
    if not all(kept):
        raise ConfigError("one token cannot both score and judge", hint="give a longer text")
    return kept


def show_allocation(found: Allocation, output: Path) -> None:
    """Print what was tried, what other budgets would give, and which is written."""
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
            "" if mix.kl_mean is None else f"{mix.kl_mean:.4f}",
            "" if mix.kl_standard_error is None else f"{mix.kl_standard_error:.4f}",
            ", ".join(f"{count} {scheme}" for scheme, count in sorted(counts.items())),
        )
    out = console()
    out.print(table)
    if (ratio := found.additivity) is not None:
        is_kept = "" if found.adds_up else ": effects do not add up, trust the measured KL only"
        out.print(f"measured KL over the sum of the parts: {ratio:.2f}{is_kept}")
    curve = make_table("Other budgets", [("bits/weight", True), ("sum of scores", True)])
    for bits, score in _thinned(found.curve):
        curve.add_row(f"{bits:.3f}", f"{score:.4g}")
    out.print(curve)
    estimated = {m: row.estimated for m, row in found.table.rows.items() if row.estimated}
    if estimated:
        names = ", ".join(list(estimated)[:_WORST])
        more = f" and {len(estimated) - _WORST} more" if len(estimated) > _WORST else ""
        out.print(
            f"{counted(len(estimated), 'module')} scored by weights alone, in proportion to others "
            f"of their kind: {names}{more}"
        )
    if found.best.name != found.mixes[0].name:
        out.print(
            f"the choice {found.best.name} has less KL than the one {found.mixes[0].name}: it is "
            "what is written"
        )
    out.print(f"written: {output}")


def _thinned(curve: tuple[tuple[float, float], ...]) -> list[tuple[float, float]]:
    """Return some points of a curve, its ends among them."""
    last = len(curve) - 1
    count = min(last, _CURVE_ROWS - 1)
    return [curve[round(n * last / count)] for n in range(count + 1)] if count else list(curve)


def allocation_json(found: Allocation) -> dict[str, Any]:
    """Return an allocation for machines."""
    return {
        "quantload_allocate": 2,
        "best": found.best.name,
        "score": found.table.score,
        "predicted": found.predicted,
        "additivity": found.additivity,
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
        "curve": [{"bits_per_weight": bits, "score": score} for bits, score in found.curve],
        "scores": {module: dict(row.scores) for module, row in found.table.rows.items()},
        "estimated": {m: row.estimated for m, row in found.table.rows.items() if row.estimated},
    }


__all__ = ["allocate", "allocation_json", "show_allocation"]
