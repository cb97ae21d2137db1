"""`quantload stats`: what enters the layers of a model, for `quantload convert --stats`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantload.cli_options import JSON, QUIET, TRUST, warn
from quantload.cli_tokens import read_tokens, token_options
from quantload.errors import counted

if TYPE_CHECKING:
    from quantload.accuracy.statistics import InputStatisticsReport


@click.command()
@click.argument("source")
@click.argument("output", type=click.Path(path_type=Path))
@token_options(max_tokens=4096, without="tokens that the model makes up")
@click.option("--device", help="cpu or cuda; default cuda if there is one.")
@click.option(
    "--dtype", default="float32", show_default=True, help="dtype of the run; auto: the model's own."
)
@click.option("--overwrite", is_flag=True, help="Replace OUTPUT if it is there.")
@TRUST
@JSON
@QUIET
def stats(
    source: str,
    output: Path,
    **flags: Any,  # noqa: ANN401 - click's values
) -> None:
    """Run tokens through SOURCE block by block and write what enters its layers to OUTPUT.

    OUTPUT is a safetensors file that `convert --stats` takes: mean square, largest and smallest
    values of each input feature, and how many tokens reached each layer and each expert. Without
    any given tokens the model makes up the tokens itself, with a fixed seed.
    """
    from quantload import api, api_stats
    from quantload.accuracy.statistics_file import check_free
    from quantload.cli_output import BarProgress, print_json
    from quantload.loader.peak_memory import peak_rss

    started = time.perf_counter()
    check_free(output, overwrite=flags["overwrite"])
    opened = api.inspect(source)
    warn(opened.warnings)
    with BarProgress(quiet=flags["quiet"]) as progress:
        report = api_stats.stats(
            opened,
            output,
            sequences=read_tokens(source, flags) or None,
            max_tokens=flags["max_tokens"],
            device=flags["device"],
            dtype=flags["dtype"],
            overwrite=flags["overwrite"],
            progress=progress,
            trust_remote_code=flags["trust_remote_code"],
        )
    seconds, peak = time.perf_counter() - started, peak_rss()
    if flags["as_json"]:
        print_json(stats_json(report, seconds=seconds, peak=peak))
        return
    warn(report.warnings)
    show_stats(report, seconds=seconds, peak=peak)


def show_stats(report: InputStatisticsReport, *, seconds: float, peak: int) -> None:
    """Print what was collected."""
    from quantload.cli_output import console, size

    out = console()
    out.print(
        f"{counted(report.num_tokens, 'token')} in {counted(report.num_sequences, 'sequence')}, "
        f"statistics of {counted(len(report.sums), 'module')}"
    )
    counts = sorted(sums.count for name, sums in report.sums.items() if ".experts." in name)
    if counts:
        middle = counts[len(counts) // 2]
        out.print(f"tokens of an expert: {counts[0]} to {counts[-1]}, {middle} in the middle")
    out.print(f"{seconds:.1f} s, peak memory {size(peak)}")
    out.print(f"written: {report.file}")


def stats_json(report: InputStatisticsReport, *, seconds: float, peak: int) -> dict[str, Any]:
    """Return what was collected for machines; the numbers of single features are in the file."""
    return {
        "quantload_stats": 1,
        "file": str(report.file),
        "metadata": dict(report.metadata),
        "num_tokens": report.num_tokens,
        "num_sequences": report.num_sequences,
        "modules": {
            module: {"tokens": sums.count, "input_absmax": sums.absmax}
            for module, sums in report.sums.items()
        },
        "unseen": list(report.unseen),
        "without_statistics": list(report.uncovered),
        "loaded_whole": report.why_whole,
        "warnings": list(report.warnings),
        "seconds": seconds,
        "peak_rss": peak,
    }


__all__ = ["show_stats", "stats", "stats_json"]
