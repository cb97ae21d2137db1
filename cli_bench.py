"""`quantload bench`: how fast a model prefills and decodes."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from quantload.cli_generate import KV_CACHE, cache_of
from quantload.cli_options import JSON, QUIET, SCHEME, TRUST
from quantload.errors import ConfigError

if TYPE_CHECKING:
    from quantload.api_bench import BenchReport


@click.command()
@click.argument("model", required=False)
@click.option("--synthetic", metavar="NAME", help="Random weights of a shape such as llama-8b.")
@click.option("--layers", type=int, help="With --synthetic: blocks; default those of the shape.")
@click.option("--batch", default="1,16,64", show_default=True, help="Numbers of prompts.")
@click.option("--prompt-tokens", default=512, show_default=True, help="Tokens of each prompt.")
@click.option("--new-tokens", default=128, show_default=True, help="Tokens that each gets.")
@KV_CACHE
@click.option("--no-graphs", is_flag=True, help="Run steps without CUDA graphs.")
@click.option("--no-fuse", is_flag=True, help="Run the model's own forward, not the fused step.")
@click.option("--device", help="cpu or cuda; default cuda if there is one.")
@click.option("--dtype", help="dtype of activations; default (auto) that of the config.")
@SCHEME
@TRUST
@JSON
@QUIET
def bench(model: str | None, **flags: Any) -> None:  # noqa: ANN401 - click's values
    """Say how fast MODEL prefills and decodes, and how near that is to the card's limit.

    Without MODEL, --synthetic builds one with random weights. With --scheme its weights are
    quantized.
    """
    from quantload import api_bench, cli_output

    loaded, name = _model(model, flags)
    kind, scales = cache_of(flags["kv_cache"], loaded, model)
    report = api_bench.bench(
        loaded,
        name=name,
        batches=_numbers(flags["batch"]),
        prompt_tokens=flags["prompt_tokens"],
        new_tokens=flags["new_tokens"],
        cache_dtype=kind,
        scales=scales,
        graphs=not flags["no_graphs"],
        fused=False if flags["no_fuse"] else None,
    )
    if flags["as_json"]:
        cli_output.print_json(_as_json(report))
    else:
        _show(report)


def _model(model: str | None, flags: dict[str, Any]) -> tuple[Any, str]:
    from quantload import api, api_bench, cli_output

    if (model is None) == (flags["synthetic"] is None):
        raise ConfigError("expected MODEL or `--synthetic NAME`, one of them")
    dtype = flags["dtype"]
    if model is None:
        name = flags["synthetic"]
        options = {"device": flags["device"], "layers": flags["layers"]}
        made = api_bench.synthetic(name, flags["scheme"], dtype=dtype, **options)
        return made, f"{name} {flags['scheme'] or 'dense'}, random weights"
    if flags["layers"] is not None:
        raise ConfigError("`--layers` goes with `--synthetic`")
    with cli_output.BarProgress(quiet=flags["quiet"]) as progress:
        loaded = api.load(
            model,
            scheme=flags["scheme"],
            device=flags["device"],
            dtype=dtype,
            trust_remote_code=flags["trust_remote_code"],
            progress=progress,
        )
    return loaded, f"{model} {flags['scheme'] or ''}".strip()


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"`--batch` is `{text}`, expected numbers such as `1,16,64`") from error


def _as_json(report: BenchReport) -> dict[str, Any]:
    rows = [
        {
            **asdict(times),
            "prefill_tokens_per_second": times.prefill_rate,
            "decode_tokens_per_second": times.decode_rate,
            "bytes_per_second": times.bytes_rate,
            "share_of_read_rate": report.limit_share(times),
        }
        for times in report.batches
    ]
    return {"quantload_bench": 1, **asdict(report), "batches": rows}


def _show(report: BenchReport) -> None:
    from quantload.cli_output import console, make_table, size

    out = console()
    table = make_table(
        f"{report.model}: {report.device}, {report.dtype}, cache {report.cache_dtype}",
        [
            *[("batch", True), ("prefill tokens/s", True), ("first token ms", True)],
            *[("ms a token", True), ("tokens/s", True), ("GB/s", True), ("of the limit", True)],
            ("graph", False),
        ],
    )
    for times in report.batches:
        share = report.limit_share(times)
        table.add_row(
            str(times.batch),
            f"{times.prefill_rate:,.0f}",
            f"{times.first_token * 1e3:.2f}",
            f"{times.step * 1e3:.3f}",
            f"{times.decode_rate:,.1f}",
            f"{times.bytes_rate / 1e9:,.1f}",
            "-" if share is None else f"{share:.1%}",
            "yes" if times.captured else "no",
        )
    out.print(table)
    first = report.batches[0]
    out.print(f"prompts of {first.prompt_tokens} tokens, {first.new_tokens} new ones each")
    if report.read_rate is None:
        out.print("limit: not measured on the CPU")
    else:
        out.print(f"limit: {report.read_rate / 1e9:,.0f} GB/s, a read of 1 GiB in this run")
    out.print(f"kernels: {', '.join(f'{n} x {name}' for name, n in report.kernels.items())}")
    if report.why_not_fused:
        out.print(f"step: the model's own forward ({report.why_not_fused})")
    for reason in sorted({times.why_eager for times in report.batches if times.why_eager}):
        out.print(f"no graph: {reason}")
    out.print(f"peak memory: {size(report.peak_bytes)}")


__all__ = ["bench"]
