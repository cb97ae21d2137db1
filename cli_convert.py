"""`quantload convert`: plan, write, verify."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantload.cli_options import (
    CHECK_TP,
    EVERY,
    JSON,
    QUIET,
    RULE,
    SCHEME,
    TRUST,
    file_settings,
    parse_size,
    read_rules,
    warn,
)
from quantload.errors import ConfigError

if TYPE_CHECKING:
    from quantload.api import Conversion
    from quantload.loader.plan import Plan
    from quantload.loader.ranks import Ranks
    from quantload.loader.stats import InputStatistics
    from quantload.loader.workers import Resources


@click.command()
@click.argument("source")
@click.argument("output", type=click.Path(path_type=Path))
@SCHEME
@RULE
@click.option("--config", type=click.Path(path_type=Path), help="TOML file with rules.")
@click.option("--group-size", type=int, help="Group size of --scheme.")
@click.option(
    "--format",
    "format_name",
    default="compressed-tensors",
    show_default=True,
    metavar="NAME",
    help="Format of OUTPUT; `quantload formats` lists them.",
)
@click.option(
    "--dtype",
    help="float32, bfloat16 or float16, for full precision and scales; default (auto) as stored.",
)
@click.option("--on-split", type=click.Choice(["error", "keep", "promote"]), default="error")
@click.option(
    "--max-shard-size",
    metavar="SIZE",
    help="Largest data of one output file.  [default: 5GB; 0.5GB or more where 8 files are less]",
)
@click.option("--layers", default="", metavar="0-1", help="Write a model of these layers only.")
@click.option(
    "--observer",
    type=click.Choice(["minmax", "search"]),
    default="minmax",
    show_default=True,
    help="Scales from the largest values, or those of the least error.",
)
@click.option("--lossless", is_flag=True, help="Refuse whatever would change a value.")
@click.option(
    "--stats",
    type=click.Path(path_type=Path),
    help="Statistics of inputs, for static schemes and `--observer search`.",
)
@click.option(
    "--input-absmax",
    type=float,
    metavar="X",
    help="Largest |x| of inputs that --stats does not list.",
)
@click.option("--plan", "only_plan", is_flag=True, help="Print what would be done, write nothing.")
@click.option("--no-verify", is_flag=True, help="Do not check the output against the source.")
@click.option("--push", metavar="OWNER/NAME", help="Upload the verified output to the hub.")
@click.option("--private", is_flag=True, help="Make the repository of --push private.")
@click.option("--workers", type=int, metavar="N", help="Threads; default one a core.")
@click.option("--memory", default="1GiB", show_default=True, help="Working memory of a process.")
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda, to quantize on.")
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
    """Convert SOURCE (folder, GGUF file or hub id) into the new folder OUTPUT.

    A run that was interrupted is continued by the same command. Several processes share the work
    when `torchrun --nproc-per-node N -m quantload convert ...` starts them.
    """
    from quantload import api
    from quantload.loader.formats.targets import target_named
    from quantload.loader.model_dtype import parse_dtype
    from quantload.loader.plan import PlanOptions
    from quantload.loader.ranks import Ranks
    from quantload.loader.staging import check_place
    from quantload.loader.tensor_parallel import about_split

    flags |= file_settings(config)
    file_scheme, all_rules = read_rules(config, rules)
    scheme = scheme or file_scheme
    if scheme is None and not all_rules:
        raise ConfigError(
            "no scheme: expected `--scheme`, `--rule` or `--config`",
            hint="for example `--scheme W4A16`; `quantload schemes` lists them",
        )
    if scheme is None and flags["group_size"] is not None:
        raise ConfigError("`--group-size` is that of `--scheme`, which is not given")
    ranks = Ranks.from_environment()
    resources = _resources(flags, ranks)
    may_be_done = _check_push(output, flags, ranks)
    if not flags["only_plan"] and not may_be_done:
        check_place(output)  # before anything is downloaded
    size = flags["max_shard_size"]
    arguments: dict[str, Any] = {
        "rules": all_rules,
        "group_size": flags["group_size"],
        "trust_remote_code": flags["trust_remote_code"],
        "options": PlanOptions(
            dtype=parse_dtype(flags["dtype"]),
            on_split=flags["on_split"],
            max_shard_bytes=size and parse_size(size),
            lossless=flags["lossless"],
            observer=flags["observer"],
            layers=flags["layers"],
            target=target_named(flags["format_name"]),
            stats=_statistics(flags),
        ),
    }
    plan = api.plan(source, scheme, **arguments)
    if not ranks.is_first:
        if not flags["only_plan"]:
            _carry_out(plan, output, {**flags, "quiet": True}, may_be_done, resources, ranks)
        return
    warn(plan.warnings)
    if flags["check_tp"]:
        layers = ((row.module, row.shape, row.scheme) for row in plan.rows)
        warn(about_split(layers, flags["check_tp"]))
    if flags["only_plan"]:
        _show_plan(plan, output, flags, resources)
        return
    done = _carry_out(plan, output, flags, may_be_done, resources, ranks)
    passed = done.report is None or done.report.passed
    address = _push(output, flags) if passed and flags["push"] else None
    _show_result(done, output, address, flags)
    if not passed:
        sys.exit(1)


def _statistics(flags: dict[str, Any]) -> InputStatistics | None:
    from quantload.loader.stats import InputStatistics, read_stats

    file, stated = flags["stats"], flags["input_absmax"]
    if stated is not None and not (math.isfinite(stated) and stated > 0):
        raise ConfigError(f"`--input-absmax` is `{stated}`, expected a finite number above zero")
    if file is not None:
        return read_stats(file, stated=stated)
    return None if stated is None else InputStatistics(stated=stated)


def _resources(flags: dict[str, Any], ranks: Ranks) -> Resources:
    """Return what a process may use; those of one machine take a GPU each, in turn."""
    import torch

    from quantload import api
    from quantload.loader.workers import Resources

    device = api.parse_device(flags["device"])
    if flags["device"] == "cuda":
        device = torch.device("cuda", ranks.local % torch.cuda.device_count())
    return Resources(memory=parse_size(flags["memory"]), workers=flags["workers"], device=device)


def _check_push(output: Path, flags: dict[str, Any], ranks: Ranks) -> bool:
    """Check the options of an upload; True if the output may be there already, to be uploaded."""
    if not flags["push"]:
        if flags["private"]:
            raise ConfigError("`--private` is that of `--push`, which is not given")
        return False
    if flags["no_verify"]:
        raise ConfigError("`--push` uploads what was verified: leave out `--no-verify`")
    from quantload.loader.manifest import MANIFEST
    from quantload.loader.push import check_push

    if ranks.is_first and not flags["only_plan"]:  # the one that uploads
        check_push(flags["push"])  # before hours of work
    return (output / MANIFEST).is_file()


def _show_plan(plan: Plan, output: Path, flags: dict[str, Any], resources: Resources) -> None:
    from quantload import cli_output, cli_plan
    from quantload.accuracy.verify import verification_memory
    from quantload.loader.estimate import estimate, probe
    from quantload.loader.peak_memory import peak_memory

    rates = probe(plan, output, resources)
    peaks = [peak_memory(plan, resources)]
    if not flags["no_verify"]:
        peaks.append(verification_memory(plan, resources))
    forecast = cli_plan.Forecast(
        peak_memory=max(peaks),
        rates=rates,
        time=estimate(plan, rates),
    )
    if flags["as_json"]:
        content = {**cli_plan.plan_json(plan), "forecast": cli_plan.forecast_json(forecast)}
        cli_output.print_json(content)
    else:
        cli_plan.show_plan(plan, forecast, every=flags["every"])


def _carry_out(
    plan: Plan,
    output: Path,
    flags: dict[str, Any],
    may_be_done: bool,
    resources: Resources,
    ranks: Ranks,
) -> Conversion:
    from quantload import api, cli_output
    from quantload.loader.manifest import describes

    with cli_output.BarProgress(quiet=flags["quiet"]) as progress:
        if may_be_done and describes(output, plan):  # an upload that was broken off
            report = None
            if ranks.is_first:
                report = api.verify_plan(plan, output, progress, resources)
            return api.Conversion(plan, output, report)
        return api.execute(
            plan,
            output,
            verify_output=not flags["no_verify"],
            progress=progress,
            resources=resources,
            ranks=ranks,
        )


def _push(output: Path, flags: dict[str, Any]) -> str:
    from quantload import cli_output
    from quantload.loader.push import push_folder
    from quantload.loader.workers import Resources

    with cli_output.BarProgress(quiet=flags["quiet"]) as progress:
        return push_folder(
            output,
            flags["push"],
            private=flags["private"],
            threads=Resources().threads(),
            progress=progress,
            quiet=flags["quiet"] or not sys.stderr.isatty(),
        )


def _show_result(
    done: Conversion, output: Path, address: str | None, flags: dict[str, Any]
) -> None:
    from quantload import cli_output, cli_plan

    if flags["as_json"]:
        cli_output.print_json(
            {
                **cli_plan.plan_json(done.plan),
                "folder": str(output),
                "verify": cli_output.verify_json(done.report) if done.report else None,
                "summary": cli_plan.summary_json(done),
                "pushed": address,
            }
        )
        return
    if done.report is not None:
        cli_output.show_verify(done.report)
    cli_plan.show_summary(done)
    if address is not None:
        click.echo(f"pushed: {address}")
    click.echo(f"written: {output} ({cli_output.size(done.plan.output_bytes)})")
