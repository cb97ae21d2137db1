"""`quantload convert`: plan, write, verify."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from quantload.cli_options import (
    CHECK_TP,
    EVERY,
    JSON,
    QUIET,
    TRUST,
    parse_size,
    read_rules,
    warn,
)
from quantload.errors import ConfigError


@click.command()
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
@CHECK_TP
@EVERY
@TRUST
@JSON
@QUIET
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
    warn(plan.warnings)
    if flags["check_tp"]:
        layers = ((row.module, row.shape, row.scheme) for row in plan.rows)
        warn(about_split(layers, flags["check_tp"]))
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
