"""What the command line shows of a conversion: its plan before, what became of it after."""

from __future__ import annotations

import dataclasses
from typing import Any

from quantload.api import Conversion
from quantload.cli_output import console, make_table, named_rows, rate, shape_text, size
from quantload.loader.estimate import Estimate, Rates
from quantload.loader.plan import Plan, PlanRow
from quantload.loader.side_files import side_files
from quantload.loader.tally import USES, scheme_rows, tally

_MOST_FILES = 12  # of an output that are listed one by one


@dataclasses.dataclass(frozen=True)
class Forecast:
    """What a plan will take.

    Args:
        peak_memory: Bytes above the interpreter's own, see `peak_memory.peak_memory`.
        rates: What was measured.
        time: Seconds; None if it cannot be told.
    """

    peak_memory: int
    rates: Rates
    time: Estimate | None


# -- before ----------------------------------------------------------------------------------------


def show_plan(plan: Plan, forecast: Forecast, *, every: bool = False) -> None:
    """Print a plan as tables: modules, schemes, files, and what it will take."""
    out = console()
    table = make_table(
        f"Plan for {plan.source.checkpoint.name} ({plan.source.format_name})",
        [
            *[("module", False), ("n", True), ("shape", False), ("from", False), ("to", False)],
            *[("bytes each", True), ("why", False)],
        ],
    )
    rows = [
        (
            row.module,
            (shape_text(row.shape), row.source, _target(row), str(row.output_bytes), row.reason),
        )
        for row in plan.rows
    ]
    for cells in named_rows(rows, every):
        table.add_row(*cells)
    out.print(table)
    plain = sum(tensor.num_bytes for tensor in plan.plain)
    out.print(f"{len(plan.plain)} other tensors are copied: {plain} bytes")
    out.print(f"{len(plan.groups)} fused groups, from the {plan.groups_origin}")
    if text := _about_importance(plan):
        out.print(text)
    out.print()
    _show_schemes(plan)
    _show_files(plan, every=every)
    _show_forecast(plan, forecast)


def _target(row: PlanRow) -> str:
    return str(row.scheme) if row.scheme else str(row.dtype).removeprefix("torch.")


def _about_importance(plan: Plan) -> str:
    """Say how many searches weigh errors by statistics; "" if nothing is searched."""
    if plan.options.observer != "search":
        return ""
    rows = [row for row in plan.rows if row.scheme is not None and not row.keeps_values]
    weighed = sum(row.mean_square is not None for row in rows)
    file = plan.options.stats.file if plan.options.stats else None
    source = f" of `{file}`" if file and weighed else ""
    return (
        f"scales of {len(rows)} modules are searched, {weighed} of them with errors weighed by "
        f"input_mean_square{source}"
    )


def _show_schemes(plan: Plan) -> None:
    columns = [("scheme", False), ("modules", True), ("weights", True), ("bits/weight", True)]
    table = make_table("Schemes", [*columns, ("bytes", True)])
    rows = scheme_rows(plan)
    weights, written = sum(row[2] for row in rows), sum(row[3] for row in rows)
    rows.append(("all", sum(row[1] for row in rows), weights, written))
    for name, modules, count, num_bytes in rows:
        bits = f"{8 * num_bytes / max(1, count):.2f}"
        table.add_row(name, str(modules), str(count), bits, str(num_bytes))
    console().print(table)


def _show_files(plan: Plan, *, every: bool) -> None:
    out = console()
    files = plan.files if every or len(plan.files) <= _MOST_FILES else ()
    out.print()
    for file in files:
        out.print(f"{file.name}: {file.num_bytes} bytes")
    if not files:
        sizes = [file.num_bytes for file in plan.files]
        names = f"{plan.files[0].name} to {plan.files[-1].name}"
        out.print(f"{names}: {min(sizes)} to {max(sizes)} bytes; `--all` lists them")
    out.print(
        f"output: {plan.output_bytes} bytes ({size(plan.output_bytes)}) of weight files, "
        f"{len(plan.files)} file{'s' if len(plan.files) > 1 else ''}"
    )
    checkpoint = plan.source.checkpoint
    if checkpoint.gguf_file is None:
        beside = [file.stat().st_size for file in side_files(checkpoint.folder)]
        out.print(f"beside them: {len(beside)} files of the source, {sum(beside)} bytes, and the")
        out.print("config, model card and manifest of the output")


def _show_forecast(plan: Plan, forecast: Forecast) -> None:
    out, rates, time = console(), forecast.rates, forecast.time
    out.print(f"\nmemory: at most {size(forecast.peak_memory)} above the interpreter's own")
    if rates.free is not None:
        short = "; TOO LITTLE" if rates.free < plan.output_bytes else ""
        out.print(f"disk: {size(plan.output_bytes)} needed, {size(rates.free)} free{short}")
    if time is None:
        reason = rates.obstacle or "no weight of the source could be tried"
        out.print(f"time: not known, {reason}")
        return
    out.print(
        f"time: {_seconds(time.low)} to {_seconds(time.high)} with {rates.threads} "
        f"thread{'s' if rates.threads > 1 else ''}, without verification, while the machine is as "
        f"busy as during the probe of {rates.seconds:.1f} s:"
    )
    found = tally(plan)
    out.print(f"  read      {_seconds(time.read)}  {rate(rates.read)}, {_about_cache(rates)}")
    out.print(f"  convert   {_seconds(time.convert)}  {_about_schemes(rates, time)}")
    out.print(f"  write     {_seconds(time.write)}  {rate(rates.write or 0)} into the page cache")
    out.print(f"            {_seconds(time.flush)}  {rate(rates.flush or 0)} to the disk")
    out.print(f"  sha256    {_seconds(time.sha256)}  {rate(rates.sha256)}")
    out.print("  the shorter time if these overlap and the output stays in the page cache, the")
    out.print("  longer if nothing overlaps and the output is on the disk at the end")
    out.print(f"  {found.read} bytes are read, {plan.output_bytes} written")


def _seconds(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _about_cache(rates: Rates) -> str:
    if rates.cached is None:
        return "page cache or disk: the system does not tell"
    return f"{100 * rates.cached:.0f} % of the sampled places were in the page cache"


def _about_schemes(rates: Rates, time: Estimate) -> str:
    parts = [f"{name} {rate(speed)}" for name, speed in rates.convert.items()]
    parts += [f"{name} not tried, taken as the slowest other" for name in time.not_tried]
    return ", ".join(parts) + " of source" if parts else "nothing is computed"


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return a plan for machines."""
    return {
        "quantload_plan": 1,
        "source": plan.source.checkpoint.name,
        "source_format": plan.source.format_name,
        "groups_origin": plan.groups_origin,
        "groups": [list(group) for group in plan.groups],
        "modules": [
            {
                "module": row.module,
                "shape": list(row.shape),
                "source": row.source,
                "scheme": str(row.scheme) if row.scheme else None,
                "dtype": str(row.dtype).removeprefix("torch."),
                "reason": row.reason,
                "importance": row.mean_square.entry.name if row.mean_square else None,
                "source_bytes": row.source_bytes,
                "output_bytes": row.output_bytes,
                "tensors": {t.name: [str(t.dtype)[6:], list(t.shape)] for t in row.outputs},
            }
            for row in plan.rows
        ],
        "plain": {t.name: [str(t.dtype)[6:], list(t.shape)] for t in plan.plain},
        "schemes": [
            {
                "scheme": name,
                "modules": modules,
                "weights": weights,
                "bytes": written,
                "bits_per_weight": round(8 * written / max(1, weights), 4),
            }
            for name, modules, weights, written in scheme_rows(plan)
        ],
        "files": {file.name: file.num_bytes for file in plan.files},
        "output_bytes": plan.output_bytes,
        "quantization_config": plan.config.get("quantization_config"),
        "warnings": list(plan.warnings),
    }


def forecast_json(forecast: Forecast) -> dict[str, Any]:
    """Return what a plan will take for machines: seconds, bytes, bytes per second."""
    return {
        "peak_memory_bytes": forecast.peak_memory,
        "rates": dataclasses.asdict(forecast.rates),
        "seconds": dataclasses.asdict(forecast.time) if forecast.time else None,
    }


# -- after -----------------------------------------------------------------------------------------


def show_summary(done: Conversion) -> None:
    """Print what became of the bytes of the source, and what the conversion took."""
    found = tally(done.plan)
    columns = [("bytes", True), ("tensors", True), ("became", False), ("why", False)]
    table = make_table(f"What became of {found.total} bytes of tensors", columns)
    for (use, reason), (num_bytes, count) in found.reasons.items():
        table.add_row(str(num_bytes), "" if count is None else str(count), use, reason)
    out = console()
    out.print(table)
    sums = ", ".join(f"{found.of(use)} {use}" for use in USES if found.of(use) or use == "dropped")
    out.print(f"{sums}: {found.total} bytes in all")
    if not done.seconds:
        out.print("written by an earlier run, and verified again")
        return
    out.print(
        f"{_seconds(done.seconds)}, {rate(found.read / done.seconds)} of source, "
        f"peak memory {size(done.peak_rss)} with the interpreter"
    )


def summary_json(done: Conversion) -> dict[str, Any]:
    """Return the summary of a conversion for machines."""
    found = tally(done.plan)
    return {
        "source_bytes": {"total": found.total, **{use: found.of(use) for use in USES}},
        "reasons": [
            {"became": use, "reason": reason, "bytes": num_bytes, "tensors": count}
            for (use, reason), (num_bytes, count) in found.reasons.items()
        ],
        "seconds": done.seconds,
        "source_bytes_per_second": found.read / done.seconds if done.seconds else None,
        "peak_rss_bytes": done.peak_rss,
    }
