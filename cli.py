"""The command line: arguments in, the public functions called, results printed.

Exit codes: 0 ok, 1 a check failed, 2 usage or input error, 3 not comparable.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantload import __version__
from quantload.cli_allocate import allocate
from quantload.cli_baseline import baseline
from quantload.cli_bench import bench
from quantload.cli_bisect import bisect
from quantload.cli_convert import convert
from quantload.cli_doctor import doctor
from quantload.cli_explain import explain
from quantload.cli_generate import generate
from quantload.cli_options import (
    CHECK_TP,
    EVERY,
    EXPLAIN,
    JSON,
    MODEL,
    PP,
    QUIET,
    TP,
    TRUST,
    warn,
)
from quantload.cli_stats import stats
from quantload.cli_tokens import read_tokens, token_options, tokens_given
from quantload.cli_tune import tune
from quantload.errors import ConfigError, NotComparable, QuantloadError, printable

if TYPE_CHECKING:
    from quantload.accuracy.compare import Tier


class _Commands(click.Group):
    """Turns the library's errors into a message and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401 - click's signature
        try:
            found = super().invoke(ctx)
            sys.stdout.flush()
            return found
        except NotComparable as error:
            click.echo(printable(f"error: {error}", keep="\n"), err=True)
            ctx.exit(3)
        except QuantloadError as error:
            click.echo(printable(f"error: {error}", keep="\n"), err=True)
            ctx.exit(2)
        except BrokenPipeError:
            raise  # click ends without a word, as users of pipes expect
        except OSError as error:
            _drop_output()
            click.echo(printable(f"error: {error}"), err=True)
            ctx.exit(2)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(130)


def _drop_output() -> None:
    """What could not be written shall not fail once more when the interpreter ends."""
    with suppress(OSError, ValueError):  # ValueError: stdout is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="quantload")
def main() -> None:
    """Load, convert and check quantized Hugging Face checkpoints."""


main.add_command(allocate)
main.add_command(baseline)
main.add_command(bench)
main.add_command(bisect)
main.add_command(convert)
main.add_command(doctor)
main.add_command(explain)
main.add_command(generate)
main.add_command(stats)
main.add_command(tune)


@main.command()
@click.argument("source")
@CHECK_TP
@EXPLAIN
@MODEL
@TP
@PP
@TRUST
@EVERY
@JSON
def inspect(source: str, explain: tuple[str, ...], **flags: Any) -> None:  # noqa: ANN401
    """Say what SOURCE holds, layer by layer, from its headers."""
    from quantload import api, cli_inspect, cli_model, cli_output
    from quantload.loader.tensor_parallel import about_split

    check_tp, every, as_json = flags["check_tp"], flags["every"], flags["as_json"]
    tp, pp = flags["tp"], flags["pp"]
    cli_model.check_sizes(tp, pp)
    if max(tp, pp) > 1 and not flags["model"]:
        raise click.UsageError("`--tp` and `--pp` go with `--model`")
    opened = api.inspect(source)
    if flags["model"]:
        warn(opened.warnings)
        trust = flags["trust_remote_code"]
        shares = api.model_shares(opened, tp=tp, pp=pp, trust_remote_code=trust)
        cli_model.show_model(opened, shares, tp=tp, pp=pp, every=every, as_json=as_json)
        return
    if explain:
        cli_inspect.show_routes(
            opened, explain, as_json=as_json, trust_remote_code=flags["trust_remote_code"]
        )
        return
    warn(opened.warnings)
    if check_tp:
        layers = ((w.module, w.shape, w.scheme) for w in opened.weights.values() if w.is_matrix)
        warn(about_split(layers, check_tp))
    if as_json:
        cli_output.print_json(cli_inspect.inspect_json(opened))
    else:
        cli_inspect.show_inspect(opened, every=every)


@main.command()
@click.argument("output")
@click.option("--source", help="What OUTPUT was made from; without it, its manifest is checked.")
@click.option(
    "--nearest",
    is_flag=True,
    help="The output was rounded to nearest: hold every weight to its rounding step. Known of what "
    "convert wrote.",
)
@EVERY
@JSON
@QUIET
def verify(
    output: str, source: str | None, nearest: bool, every: bool, as_json: bool, quiet: bool
) -> None:
    """Compare OUTPUT with its source, or its files with its manifest; exit 1 on a failure.

    With --source every tensor of OUTPUT is decoded and compared. Without it every file is held
    against the sha256 in the manifest that `convert` wrote; one that is damaged fails, too.
    """
    if source is None:
        if nearest or every:
            raise ConfigError("`--nearest` and `--all` are about a comparison with `--source`")
        _verify_files(output, as_json=as_json, quiet=quiet)
        return
    from quantload import api, cli_output

    with cli_output.BarProgress(quiet=quiet) as progress:
        report = api.verify(output, source, nearest=nearest, progress=progress)
    if as_json:
        cli_output.print_json(cli_output.verify_json(report))
    else:
        cli_output.show_verify(report, every=every)
    if not report.passed:
        sys.exit(1)


def _verify_files(output: str, *, as_json: bool, quiet: bool) -> None:
    from quantload import cli_output
    from quantload.loader.manifest import check_files
    from quantload.loader.open import open_checkpoint

    folder = Path(output).expanduser()
    if not folder.is_dir():
        folder = open_checkpoint(output).folder
    with cli_output.BarProgress(quiet=quiet) as progress:
        check = check_files(folder, threads=len(os.sched_getaffinity(0)), progress=progress)
    if as_json:
        cli_output.print_json(cli_output.file_check_json(check))
    else:
        cli_output.show_file_check(check)
    if not check.passed:
        sys.exit(1)


class _Limited(click.Command):
    """Takes several limits after one `--fail-over`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        spread: list[str] = []
        for arg in args:
            follows = len(spread) > 1 and spread[-2] == "--fail-over"
            if follows and not arg.startswith("-") and set(arg) & {"<", ">"}:
                spread.append("--fail-over")
            spread.append(arg)
        return super().parse_args(ctx, spread)


@main.command(cls=_Limited)
@click.argument("reference")
@click.argument("candidate")
@click.option("--structure", is_flag=True, help="Compare headers and scales only.")
@click.option("--weights", is_flag=True, help="Compare structure and weights: run nothing.")
@click.option(
    "--layers", is_flag=True, help="Run layers on equal inputs only; without tokens, made-up ones."
)
@token_options(max_tokens=4096)
@click.option(
    "--fail-over",
    "limits",
    multiple=True,
    metavar="LIMIT",
    help="Fail if a statistic is beyond a number: `layer.sqnr<15` `kl.mean>0.05`; repeatable.",
)
@click.option("--device", help="cpu or cuda; default cuda if there is one.")
@click.option(
    "--dtype",
    default="float32",
    show_default=True,
    help="dtype of the runs; auto: as the reference.",
)
@click.option("--markdown", is_flag=True, help="Print Markdown, for a pull request or a file.")
@click.option("--html", type=click.Path(path_type=Path), help="Write a page with charts to FILE.")
@TRUST
@EVERY
@JSON
@QUIET
def compare(reference: str, candidate: str, **flags: Any) -> None:  # noqa: ANN401 - click's values
    """Compare CANDIDATE with REFERENCE: what they hold, weights, and with tokens also outputs.

    REFERENCE may be quantized itself. Without tokens (--data, --token-ids, --prompt, --prompts,
    --generated) weights are compared; with them also what layers, blocks and the whole model make
    of them.

    Limits of --fail-over take the place of the built-in ones on the size of errors; damage, missing
    tensors and values that are not finite fail in any case. Exit codes: 0 within limits, 1 a limit
    is exceeded, 2 an input cannot be used, 3 not comparable (another architecture or vocabulary, or
    outputs that are not finite).
    """
    from quantload import api, cli_compare, cli_compare_structure, cli_output
    from quantload.accuracy.comparison_json import comparison_json
    from quantload.accuracy.limits import checked_tier, parse_limit
    from quantload.loader.model_dtype import parse_dtype

    tier = _tier(flags)
    runs = tier == "layers" or (tier is None and bool(tokens_given(flags)))
    checked_tier(tier, map(parse_limit, flags["limits"]), has_tokens=runs)
    sequences = read_tokens(reference, flags, generate=tier == "layers") if runs else []
    with cli_output.BarProgress(quiet=flags["quiet"]) as progress:
        result = api.compare(
            reference,
            candidate,
            sequences=sequences,
            tier=tier,
            limits=flags["limits"],
            device=flags["device"],
            dtype=parse_dtype(flags["dtype"]),
            progress=progress,
            trust_remote_code=flags["trust_remote_code"],
        )
    if flags["html"] is not None:
        cli_compare.write_page(flags["html"], result, reference=reference, candidate=candidate)
    if flags["as_json"]:
        cli_output.print_json(comparison_json(result))
    elif tier == "structure":
        cli_compare_structure.show_structure(
            result, every=flags["every"], markdown=flags["markdown"]
        )
    elif flags["markdown"]:
        click.echo(cli_compare.comparison_markdown(result))
    else:
        cli_compare.show_comparison(result, every=flags["every"])
    if tier is None and not sequences and not flags["as_json"]:
        click.echo("for outputs and KL give tokens: `--generated`, or `--data FILE`", err=True)
    if not result.passed:
        sys.exit(1)


def _tier(flags: dict[str, Any]) -> Tier | None:
    """Return the tier that one of three options names; None is all that can be measured."""
    asked: list[Tier] = [tier for tier in ("structure", "weights", "layers") if flags[tier]]
    if len(asked) > 1:
        raise ConfigError(
            f"`--{asked[0]}` and `--{asked[1]}` are both given, expected one of them",
            hint="each tier measures what those before it do",
        )
    given = tokens_given(flags)
    if asked and asked[0] != "layers" and given:
        raise ConfigError(f"`--{asked[0]}` runs nothing, and `{given[0]}` is given")
    if flags["as_json"] and flags["markdown"]:
        raise ConfigError("`--json` and `--markdown` are both given, expected one of them")
    if asked == ["structure"] and flags["html"] is not None:
        raise ConfigError("`--html` shows errors of layers, and `--structure` measures none")
    return asked[0] if asked else None


@main.command()
def schemes() -> None:
    """List the schemes."""
    from quantload.quant.scheme import PRESETS

    for name, scheme in PRESETS.items():
        click.echo(f"{name:12} {scheme.in_words}")


@main.command()
def formats() -> None:
    """List the formats that are read, those that are written, and those that are not read."""
    from quantload.loader.formats import FORMATS
    from quantload.loader.formats.detect import REFUSED
    from quantload.loader.formats.targets import TARGETS

    for row in FORMATS:
        click.echo(f"{row.name:20} {row.title}")
    click.echo("\nwritten, with --format:")
    for name, target in TARGETS.items():
        click.echo(f"{name:20} {target.title}")
    click.echo("\nnot read:")
    for method, (title, way_out) in REFUSED.items():
        click.echo(f"{method:20} {title}: {way_out}")


if __name__ == "__main__":
    main()
