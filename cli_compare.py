"""How `compare` shows its result: a table in the terminal, Markdown, JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from quantload.accuracy.compare import ModelComparison, about_input_scales
from quantload.accuracy.end_metrics import EndMetrics, KLOfPart
from quantload.accuracy.layer_ranking import (
    STANDS_OUT,
    RankedLayer,
    place_of,
    ranked_layers,
    standing_apart,
)
from quantload.accuracy.router_overlap import RouterOverlap
from quantload.cli_output import console, make_table, printable
from quantload.errors import counted, listed
from quantload.quant.metrics import ErrorSums

_SHOWN = 10
_GAP = 2  # between columns
_LEGEND = (
    "ranked by share of the sum of squared relative errors; over type: dB above the mean of the "
    "other layers of its projection; z: that in their standard deviations"
)


@dataclass(frozen=True, kw_only=True)
class _Column:
    """A column of the table of layers.

    Args:
        name: Its heading.
        cell: Makes its text.
        is_text: True for names, which are aligned to the left.
        rank: The column with the highest goes first where the terminal is too narrow; 0 stays.
    """

    name: str
    cell: Callable[[RankedLayer], str]
    is_text: bool = False
    rank: int = 0


def _percent(sums: ErrorSums | None) -> str:
    return "" if sums is None else f"{100 * sums.relative:.3f} %"


def _number(value: float, form: str, unit: str = "") -> str:
    return f"{value:{form}}{unit}" if math.isfinite(value) else ""


def _worst_expert(layer: RankedLayer) -> str:
    if not layer.is_experts:
        return ""
    number = place_of(layer.worst.module).expert
    return f"{number} of {len(layer.rows)}: {_percent(layer.worst_error)}"


def _columns(layers: Sequence[RankedLayer]) -> list[_Column]:
    has_output = any(layer.output is not None for layer in layers)
    columns = [
        _Column(name="layer", cell=lambda row: row.name, is_text=True),
        _Column(name="holds", cell=lambda row: row.candidate, is_text=True, rank=5),
        _Column(name="weight", cell=lambda row: _percent(row.weight), rank=3 if has_output else 0),
        _Column(name="output", cell=lambda row: _percent(row.output)),
        _Column(name="SQNR dB", cell=lambda row: _number(row.error.sqnr_db, ".2f")),
        _Column(name="share", cell=lambda row: _number(100 * row.share, ".2f", " %"), rank=1),
        _Column(name="over type", cell=lambda row: _number(row.over_type_db, "+.2f"), rank=2),
        _Column(name="z", cell=lambda row: _number(row.z, "+.1f")),
        _Column(name="worst expert", cell=_worst_expert, rank=4),
    ]
    is_there = {"output": has_output, "worst expert": any(layer.is_experts for layer in layers)}
    return [column for column in columns if is_there.get(column.name, True)]


def _that_fit(columns: Sequence[_Column], rows: Sequence[RankedLayer], width: int) -> list[_Column]:
    """Leave out columns until no row has to be wrapped, the least important ones first."""
    widths = {
        column.name: max(len(column.name), *(len(column.cell(row)) for row in rows)) + _GAP
        for column in columns
    }
    kept = list(columns)
    while sum(widths[column.name] for column in kept) - _GAP > width:
        least = max(kept, key=lambda column: column.rank)
        if not least.rank:
            break
        kept.remove(least)
    return kept


def show_comparison(comparison: ModelComparison, *, every: bool = False) -> None:
    """Print the worst ten layers (or all, also each expert) and the summary."""
    out = console()
    layers = ranked_layers(comparison, merge_experts=not every)
    rows = layers if every else layers[:_SHOWN]
    if rows:
        columns = _that_fit(_columns(rows), rows, out.width)
        title = "All layers" if every else f"The {counted(len(rows), 'layer')} that lose most"
        table = make_table(title, [(column.name, not column.is_text) for column in columns])
        for row in rows:
            table.add_row(*(printable(column.cell(row)) for column in columns))
        out.print(table)
        out.print(_LEGEND, style="dim")
        out.print()
    if comparison.end is not None and comparison.end.by_confidence():
        names = ("reference's probability", "tokens", "mean KL")
        table = make_table("KL by confidence of the reference", [(name, True) for name in names])
        for cells in _confidence_cells(comparison.end):
            table.add_row(*cells)
        out.print(table)
        out.print()
    for line in summary_lines(comparison):
        out.print(printable(line), style=_style(line))


def _style(line: str) -> str:
    if line.startswith(("PROBLEM", "EXCEEDS", "FAILED")):
        return "bold red"
    return "bold green" if line.startswith("passed") else ""


def _confidence_cells(end: EndMetrics) -> list[tuple[str, str, str]]:
    parts = end.by_confidence()
    ends = [*(f"{part.low:g}" for part in parts[1:]), "1"]
    return [
        (f"{part.low:g} to {high}", str(part.positions), _mean_of(part))
        for part, high in zip(parts, ends, strict=True)
    ]


def _mean_of(part: KLOfPart) -> str:
    if not math.isfinite(part.mean):
        return "-"
    return f"{part.mean:.4g}{_plus_minus(part.standard_error, '.2g')} nats"


def _quantile(end: EndMetrics, fraction: float) -> str:
    error = end.kl_quantile_standard_error(fraction)
    return f"{end.kl_quantile(fraction):.4g}{_plus_minus(error, '.2g')}"


# -- the summary -----------------------------------------------------------------------------------


def summary_lines(comparison: ModelComparison) -> list[str]:
    """Return the summary in sentences."""
    lines = [f"PROBLEM {problem}" for problem in comparison.problems]
    weights = [row for row in comparison.layers if row.weight and not row.is_plain]
    changed = [row for row in weights if row.differs]
    equal = counted(len(weights) - len(changed), "is equal", "are equal")
    lines.append(f"{counted(len(changed), 'weight differs', 'weights differ')}, {equal}")
    values = [row.weight.sqnr_db for row in changed if row.weight and not row.problem]
    if values:
        mean = sum(values) / len(values)
        lines.append(f"mean SQNR of the weights that differ: {mean:.2f} dB")
    if comparison.structure is not None and comparison.structure.quantized_bits:
        bits = comparison.structure
        lines.append(
            f"stored bits a weight: {bits.bits:.2f}, the reference's {bits.reference_bits:.2f}; of "
            f"quantized weights {bits.quantized_bits:.2f}"
        )
    others = sum(row.is_plain for row in comparison.layers)
    if others:
        lines.append(counted(others, "other tensor differs", "other tensors differ"))
    for names, where in (
        (comparison.only_in_reference, "reference"),
        (comparison.only_in_candidate, "candidate"),
    ):
        if names:
            lines.append(f"only in the {where}: {listed(names)}")
    lines += about_input_scales(comparison)
    lines += _about_outliers(comparison)
    lines += _about_rescaling(comparison)
    lines += _about_running(comparison)
    if comparison.end is not None:
        lines += _end_lines(comparison.end)
    lines += [f"EXCEEDS {failure}" for failure in comparison.failures[:_SHOWN]]
    if (count := len(comparison.failures)) > _SHOWN:
        lines.append(
            f"and {counted(count - _SHOWN, 'more exceeds its limit', 'more exceed theirs')}"
        )
    lines.append("passed: every error is within its limit" if comparison.passed else "FAILED")
    return lines


def _about_outliers(comparison: ModelComparison) -> list[str]:
    """Name the layers that are far worse than their like."""
    found = standing_apart(ranked_layers(comparison))
    if not found:
        return []
    names = ", ".join(f"`{row.name}` ({row.over_type_db:+.2f} dB, z {row.z:.1f})" for row in found)
    return [f"far above the other layers of its type (z {STANDS_OUT:g} or more): {names}"]


def _about_rescaling(comparison: ModelComparison) -> list[str]:
    """Say what a candidate may be whose norms differ, beside weights that exceed their limit."""
    failed = [row for row in comparison.layers if row.failure]
    norms = [row for row in failed if row.is_plain and row.module.endswith(".weight")]
    if not norms or len(norms) == len(failed):
        return []
    return [
        f"{counted(len(norms), 'norm differs', 'norms differ')} too: if scales were folded into "
        "them before quantizing (AWQ, SmoothQuant), weights and isolated outputs cannot be held to "
        "the reference's; judge the whole by `--fail-over kl>...` with tokens"
    ]


def _end_lines(end: EndMetrics) -> list[str]:
    return [
        f"KL(reference || candidate): mean {end.kl_mean:.4g}"
        f"{_plus_minus(end.kl_standard_error, '.2g')} nats, "
        f"median {_quantile(end, 0.5)}, p99 {_quantile(end, 0.99)}, "
        f"p99.9 {_quantile(end, 0.999)}, over {counted(end.num_tokens, 'token')}",
        f"same first token: {100 * end.top1:.2f}"
        f"{_plus_minus(100 * end.top1_standard_error, '.2f')} %",
        *(
            [
                f"ln perplexity: {end.reference_loss:.4f}, the candidate's "
                f"{end.loss_mean_change:+.4f}{_plus_minus(end.loss_standard_error, '.4f')}"
            ]
            if math.isfinite(end.loss_mean_change)
            else []
        ),
    ]


def _plus_minus(error: float, form: str) -> str:
    """Return a standard error behind its mean; "" where a single token has none."""
    return f" +- {error:{form}}" if math.isfinite(error) else ""


def _about_running(comparison: ModelComparison) -> list[str]:
    """Say what the blocks lost, and what could not be measured."""
    lines = []
    if comparison.tokens is not None:
        tokens = comparison.tokens
        lines.append(
            f"{counted(tokens.count, 'token')} in {counted(tokens.sequences, 'sequence')}, sha256 "
            f"of the ids {tokens.sha256}"
        )
    if comparison.blocks:
        worst = max(comparison.blocks, key=lambda block: block.injected.relative)
        last = comparison.blocks[-1]
        lines.append(
            f"`{worst.path}` adds most to the hidden states, "
            f"{100 * worst.injected.relative:.3f} %; "
            f"{100 * last.propagated.relative:.3f} % have gathered after `{last.path}`"
        )
    if comparison.routers:
        path, worst_router = min(comparison.routers.items(), key=lambda pair: pair[1].share)
        mean = sum(comparison.routers.values(), RouterOverlap()).share
        lines.append(
            f"routers make {100 * mean:.2f} % of the reference's choices of experts, least in "
            f"`{path}`: {100 * worst_router.share:.2f} %"
        )
    if comparison.unseen:
        lines.append(f"not exercised, no token reached: {listed(comparison.unseen)}")
    if comparison.few:
        lines.append(f"fewer than 32 tokens reached: {listed(comparison.few)}")
    if comparison.uncompared:
        lines.append(f"outputs that could not be compared: {listed(comparison.uncompared)}")
    if comparison.not_run:
        lines.append(f"the models were not run: {comparison.not_run}")
    if comparison.why_whole:
        lines.append(f"the models were in memory as a whole: {comparison.why_whole}")
    return lines


# -- pages -----------------------------------------------------------------------------------------


def write_page(file: Path, comparison: ModelComparison, *, reference: str, candidate: str) -> None:
    """Write a comparison as a page; it appears only when it is complete.

    Args:
        file: The HTML file.
        comparison: What `api.compare` returned.
        reference: What the user called the reference.
        candidate: What the user called the candidate.

    Raises:
        OutputError: The file cannot be written.
    """
    from quantload.accuracy.html_report import comparison_page  # jinja2 only where it is needed
    from quantload.api_baseline import write_text

    page = comparison_page(
        comparison, reference=_base_name(reference), candidate=_base_name(candidate)
    )
    write_text(file, page)


def _base_name(name: str) -> str:
    """Return the last part of a path or of a hub id."""
    return Path(name).name or name


# -- Markdown --------------------------------------------------------------------------------------


def comparison_markdown(comparison: ModelComparison) -> str:
    """Return the comparison as Markdown: verdict, summary and worst ten; the rest is folded."""
    layers = ranked_layers(comparison)
    *lines, verdict = summary_lines(comparison)
    parts = [f"## quantload compare: {verdict}", "", *(f"- {safe(line)}" for line in lines), ""]
    parts += [f"**The {counted(min(len(layers), _SHOWN), 'layer')} that lose most**", ""]
    parts += _markdown_table(layers, layers[:_SHOWN])
    parts += ["", f"<sub>{_LEGEND}</sub>"]
    if comparison.end is not None and comparison.end.by_confidence():
        parts += ["", "| reference's probability | tokens | mean KL |", "|---|---:|---:|"]
        parts += ["| " + " | ".join(cells) + " |" for cells in _confidence_cells(comparison.end)]
    if len(layers) > _SHOWN:
        rest = layers[_SHOWN:]
        parts += ["", f"<details><summary>{counted(len(rest), 'more layer')}</summary>", ""]
        parts += [*_markdown_table(layers, rest), "", "</details>"]
    return "\n".join(parts)


def _markdown_table(layers: Sequence[RankedLayer], rows: Sequence[RankedLayer]) -> list[str]:
    columns = _columns(layers)
    heads = " | ".join(column.name for column in columns)
    marks = "|".join("---" if column.is_text else "---:" for column in columns)
    lines = [f"| {heads} |", f"|{marks}|"]
    return lines + [
        "| " + " | ".join(safe_cell(column.cell(row)) for column in columns) + " |" for row in rows
    ]


def safe(text: str) -> str:
    """Escape what would start HTML or steer what shows it; names come from files."""
    for character, code in (("&", "&amp;"), ("<", "&lt;")):
        text = text.replace(character, code)
    return printable(text)


def safe_cell(text: str) -> str:
    """Escape what would end a cell too, or start emphasis, code or a link."""
    return re.sub(r"([\\`*\[|])", r"\\\1", safe(text))


__all__ = [
    "comparison_markdown",
    "safe",
    "safe_cell",
    "show_comparison",
    "summary_lines",
    "write_page",
]
