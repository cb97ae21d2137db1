"""The command line: arguments in, the public functions called, results printed.

Exit codes: 0 ok, 1 a check failed, 2 usage or input error, 3 not comparable.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from quantload import __version__
from quantload.errors import ConfigError, NotComparable, QuantloadError, listed

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


class _Commands(click.Group):
    """Turns the library's errors into a message and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401 - click's signature
        try:
            return super().invoke(ctx)
        except NotComparable as error:
            click.echo(f"error: {error}", err=True)
            ctx.exit(3)
        except QuantloadError as error:
            click.echo(f"error: {error}", err=True)
            ctx.exit(2)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="quantload")
def main() -> None:
    """Load, convert and check quantized Hugging Face checkpoints."""


def parse_size(text: str) -> int:
    """Return the bytes of a size such as "5GB", "500MiB" or "1000000".

    Raises:
        ConfigError: Not a size.
    """
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d+)?)\s*([KMGT]i?)?B?\s*", text, re.IGNORECASE)
    unit = (match[2] or "").capitalize() if match else ""
    factor = {**_UNITS, **_BINARY}.get(unit)
    if match is None or factor is None or not int(float(match[1]) * factor):
        raise ConfigError(f"not a size: `{text}`, expected for example `5GB` or `500MiB`")
    return int(float(match[1]) * factor)


def read_rules(config: Path | None, rules: tuple[str, ...]) -> tuple[str | None, list[str]]:
    """Read `--config` and append `--rule`s, which come later and so win ties.

    Returns:
        The default scheme of the file, if it has one, and all rules as PATTERN=SCHEME.

    Raises:
        ConfigError: The file is not TOML of the expected form.
    """
    if config is None:
        return None, list(rules)
    try:
        content = tomllib.loads(config.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:  # ValueError: TOML or UTF-8
        raise ConfigError(f"cannot read rules from `{config}`: {error}") from error
    unknown = set(content) - {"scheme", "rules"}
    scheme, table = content.get("scheme"), content.get("rules", {})
    if unknown or not isinstance(table, dict) or not isinstance(scheme, str | None):
        raise ConfigError(
            f"`{config}` has the keys {listed(content)}, expected the name of a `scheme` and a "
            "table `[rules]`"
        )
    return scheme, [*_rule_texts(table), *rules]


def _rule_texts(table: Mapping[str, object]) -> list[str]:
    texts = []
    for pattern, value in table.items():
        if isinstance(value, Mapping) and set(value) == {"scheme", "group_size"}:
            value = f"{value['scheme']}:g{value['group_size']}"
        elif isinstance(value, Mapping) and set(value) == {"scheme"}:
            value = value["scheme"]
        if not isinstance(value, str):
            raise ConfigError(
                f"rule `{pattern}` has the value `{value}`, expected a scheme name or "
                "`{ scheme = NAME, group_size = NUMBER }`"
            )
        texts.append(f"{pattern}={value}")
    return texts


_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
_JSON: _Decorator = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_QUIET: _Decorator = click.option("--quiet", "-q", is_flag=True, help="Show no progress bars.")
_EVERY: _Decorator = click.option("--all", "every", is_flag=True, help="One row for each module.")
_TRUST: _Decorator = click.option(
    "--trust-remote-code", is_flag=True, help="Run modelling code that comes with the checkpoint."
)


_CHECK_TP: _Decorator = click.option(
    "--check-tp",
    type=click.IntRange(min=1),
    metavar="N",
    help="Name the layers of which a split over N devices cuts a group.",
)


@main.command()
@click.argument("source")
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--scheme", help="Scheme of every layer that no rule covers, for example W4A16.")
@click.option("--rule", "rules", multiple=True, metavar="PATTERN=SCHEME", help="May be repeated.")
@click.option("--config", type=click.Path(path_type=Path), help="TOML file with rules.")
@click.option("--group-size", type=int, help="Group size of --scheme.")
@click.option("--dtype", help="float32, bfloat16 or float16, for full precision and scales.")
@click.option("--on-split", type=click.Choice(["error", "keep", "promote"]), default="error")
@click.option("--max-shard-size", default="5GB", show_default=True)
@click.option("--lossless", is_flag=True, help="Refuse whatever would change a value.")
@click.option("--plan", "only_plan", is_flag=True, help="Print what would be done, write nothing.")
@click.option("--no-verify", is_flag=True, help="Do not check the output against the source.")
@_CHECK_TP
@_EVERY
@_TRUST
@_JSON
@_QUIET
def convert(
    source: str,
    output: Path,
    scheme: str | None,
    rules: tuple[str, ...],
    config: Path | None,
    **flags: Any,  # noqa: ANN401 - click's values
) -> None:
    """Convert SOURCE (folder, GGUF file or hub id) into the new folder OUTPUT."""
    from quantload import api, cli_output
    from quantload.loader.plan import PlanOptions
    from quantload.loader.tensor_parallel import about_split
    from quantload.loader.writer import check_place

    file_scheme, all_rules = read_rules(config, rules)
    scheme = scheme or file_scheme
    if scheme is None and not all_rules:
        raise ConfigError(
            "no scheme: expected `--scheme`, `--rule` or `--config`",
            hint="for example `--scheme W4A16`; `quantload schemes` lists them",
        )
    if scheme is None and flags["group_size"] is not None:
        raise ConfigError("`--group-size` is that of `--scheme`, which is not given")
    if not flags["only_plan"]:
        check_place(output)  # before anything is downloaded
    arguments: dict[str, Any] = {
        "rules": all_rules,
        "group_size": flags["group_size"],
        "trust_remote_code": flags["trust_remote_code"],
        "options": PlanOptions(
            dtype=api.parse_dtype(flags["dtype"]),
            on_split=flags["on_split"],
            max_shard_bytes=parse_size(flags["max_shard_size"]),
            lossless=flags["lossless"],
        ),
    }
    as_json, every = flags["as_json"], flags["every"]
    plan = api.plan(source, scheme, **arguments)
    _warn(plan.warnings)
    if flags["check_tp"]:
        layers = ((row.module, row.shape, row.scheme) for row in plan.rows)
        _warn(about_split(layers, flags["check_tp"]))
    if flags["only_plan"]:
        cli_output.print_json(cli_output.plan_json(plan)) if as_json else cli_output.show_plan(
            plan, every=every
        )
        return
    with cli_output.BarProgress(quiet=flags["quiet"]) as progress:
        done = api.execute(plan, output, verify_output=not flags["no_verify"], progress=progress)
    if as_json:
        report = cli_output.verify_json(done.report) if done.report else None
        cli_output.print_json(
            {**cli_output.plan_json(plan), "folder": str(output), "verify": report}
        )
    else:
        if done.report is not None:
            cli_output.show_verify(done.report)
        click.echo(f"written: {output} ({cli_output.size(plan.output_bytes)})")
    if done.report is not None and not done.report.passed:
        sys.exit(1)


def _warn(warnings: Iterable[str]) -> None:
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)


@main.command()
@click.argument("source")
@_CHECK_TP
@_EVERY
@_JSON
def inspect(source: str, check_tp: int | None, every: bool, as_json: bool) -> None:
    """Say what SOURCE holds, layer by layer, from its headers."""
    from quantload import api, cli_inspect, cli_output
    from quantload.loader.tensor_parallel import about_split

    opened = api.inspect(source)
    _warn(opened.warnings)
    if check_tp:
        layers = ((w.module, w.shape, w.scheme) for w in opened.weights.values() if w.is_matrix)
        _warn(about_split(layers, check_tp))
    if as_json:
        cli_output.print_json(cli_inspect.inspect_json(opened))
    else:
        cli_inspect.show_inspect(opened, every=every)


@main.command()
@click.argument("output")
@click.option("--source", required=True, help="What OUTPUT was made from.")
@click.option(
    "--nearest",
    is_flag=True,
    help="The output was rounded to nearest, as convert does: hold every weight to its rounding "
    "step.",
)
@_EVERY
@_JSON
@_QUIET
def verify(
    output: str, source: str, nearest: bool, every: bool, as_json: bool, quiet: bool
) -> None:
    """Decode every tensor of OUTPUT and compare it with its source; exit 1 on a failure."""
    from quantload import api, cli_output

    with cli_output.BarProgress(quiet=quiet) as progress:
        report = api.verify(output, source, nearest=nearest, progress=progress)
    if as_json:
        cli_output.print_json(cli_output.verify_json(report))
    else:
        cli_output.show_verify(report, every=every)
    if not report.passed:
        sys.exit(1)


@main.command()
@click.argument("reference")
@click.argument("candidate")
@click.option("--data", type=click.Path(path_type=Path), help="Text file to run through both.")
@click.option("--token-ids", type=click.Path(path_type=Path), help="JSON file: lists of token ids.")
@click.option("--prompt", "prompts", multiple=True, help="Text to run through both; repeatable.")
@click.option("--max-tokens", default=4096, show_default=True, help="Tokens to run at most.")
@click.option("--device", help="cpu or cuda; default cuda if there is one.")
@click.option("--dtype", default="float32", show_default=True, help="dtype of the runs.")
@click.option("--markdown", is_flag=True, help="Print Markdown, for a pull request or a file.")
@_EVERY
@_JSON
@_QUIET
def compare(reference: str, candidate: str, **flags: Any) -> None:  # noqa: ANN401 - click's values
    """Compare CANDIDATE with REFERENCE: weights, and with text also layer outputs and KL."""
    from quantload import api, cli_compare, cli_output

    sequences = cli_compare.read_sequences(
        data=flags["data"],
        token_ids=flags["token_ids"],
        prompts=flags["prompts"],
        tokenizer=lambda: api.load_tokenizer(reference),
        max_tokens=flags["max_tokens"],
    )
    with cli_output.BarProgress(quiet=flags["quiet"]) as progress:
        result = api.compare(
            reference,
            candidate,
            sequences=sequences,
            device=flags["device"],
            dtype=api.parse_dtype(flags["dtype"]),
            progress=progress,
        )
    if flags["as_json"]:
        cli_output.print_json(cli_compare.comparison_json(result))
    elif flags["markdown"]:
        click.echo(cli_compare.comparison_markdown(result))
    else:
        cli_compare.show_comparison(result, every=flags["every"])


@main.command()
@click.argument("model")
@click.argument("prompt")
@click.option("--max-new-tokens", default=64, show_default=True)
@click.option("--chat", is_flag=True, help="Put the prompt into the chat template.")
@click.option("--sample", is_flag=True, help="Sample with the model's own settings; else greedy.")
@click.option("--seed", type=int, help="Seed of --sample.")
@click.option("--device", help="cpu or cuda; default cuda if there is one.")
@click.option("--dtype", help="float32, bfloat16 or float16; default that of the config.")
@_TRUST
@_QUIET
def generate(model: str, prompt: str, **flags: Any) -> None:  # noqa: ANN401 - click's values
    """Load MODEL and continue PROMPT."""
    from quantload import api, cli_output

    with cli_output.BarProgress(quiet=flags["quiet"]) as progress:
        loaded = api.load(
            model,
            device=flags["device"],
            dtype=api.parse_dtype(flags["dtype"]),
            trust_remote_code=flags["trust_remote_code"],
            progress=progress,
        )
    api.generate(
        loaded,
        api.load_tokenizer(model),
        prompt,
        chat=flags["chat"],
        seed=flags["seed"],
        emit=lambda text: click.echo(text, nl=False),
        max_new_tokens=flags["max_new_tokens"],
        do_sample=flags["sample"],
    )
    click.echo()


@main.command()
def schemes() -> None:
    """List the schemes."""
    from quantload.quant.scheme import PRESETS

    for name, scheme in PRESETS.items():
        click.echo(f"{name:12} {_describe(scheme)}")


def _describe(scheme: Any) -> str:  # noqa: ANN401 - a Scheme, imported lazily
    if scheme.weight is None:
        is_same = scheme.name == "same"
        return "as in the source, same values" if is_same else "full precision: dequantize or copy"
    weight = scheme.weight
    scales = {"group": f"group {weight.group_size}", "block": "block 128x128"}
    text = f"weights {weight.grid.name}, {scales.get(weight.granularity, weight.granularity)}"
    text += "" if weight.symmetric else ", zero points"
    if scheme.input is None:
        return text
    return f"{text}; inputs {scheme.input.grid.name} per {scheme.input.granularity}, dynamic"


@main.command()
def formats() -> None:
    """List the formats that are read, and those that are known but not read."""
    from quantload.loader.formats import FORMATS
    from quantload.loader.formats.detect import REFUSED

    for row in FORMATS:
        click.echo(f"{row.name:20} {row.title}")
    click.echo("\nnot read:")
    for method, (title, way_out) in REFUSED.items():
        click.echo(f"{method:20} {title}: {way_out}")


if __name__ == "__main__":
    main()
