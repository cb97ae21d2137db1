"""How the result of the `compare` command is shown."""

from __future__ import annotations

import math
from typing import Any

from quantload.accuracy.compare import LayerComparison, ModelComparison
from quantload.accuracy.end_metrics import EndMetrics
from quantload.cli_output import console, finite, make_table
from quantload.errors import listed
from quantload.quant.metrics import ErrorSums

_SHOWN = 10


# -- showing ---------------------------------------------------------------------------------------

_COLUMNS = ("module", "reference", "candidate", "weight error", "weight SQNR", "output error")


def _cells(row: LayerComparison) -> tuple[str, ...]:
    return (
        row.module,
        row.reference,
        row.candidate,
        _percent(row.weight),
        f"{row.weight.sqnr_db:.2f} dB" if row.weight else "",
        _percent(row.output),
    )


def _percent(sums: ErrorSums | None) -> str:
    return "" if sums is None else f"{100 * sums.relative:.3f} %"


def _ranked(comparison: ModelComparison) -> list[LayerComparison]:
    """Worst first: by the isolated output error where there is one, else by the weight's."""

    def error(row: LayerComparison) -> float:
        sums = row.output or row.weight
        relative = sums.relative if sums else 0.0
        return math.inf if row.problem or math.isnan(relative) else relative

    return sorted(comparison.layers, key=error, reverse=True)


def summary_lines(comparison: ModelComparison) -> list[str]:
    """Return the summary in sentences."""
    lines = [f"PROBLEM {problem}" for problem in comparison.problems]
    weights = [row for row in comparison.layers if row.weight and not row.is_plain]
    changed = [row for row in weights if row.differs]
    lines.append(f"{len(changed)} weights differ, {len(weights) - len(changed)} are equal")
    values = [row.weight.sqnr_db for row in changed if row.weight and not row.problem]
    if values:
        mean = sum(values) / len(values)
        lines.append(f"mean SQNR of the weights that differ: {mean:.2f} dB")
    others = sum(row.is_plain for row in comparison.layers)
    if others:
        lines.append(f"{others} other tensors differ")
    for names, where in (
        (comparison.only_in_reference, "reference"),
        (comparison.only_in_candidate, "candidate"),
    ):
        if names:
            lines.append(f"only in the {where}: {listed(names)}")
    lines += _about_running(comparison)
    if comparison.end is not None:
        lines += _end_lines(comparison.end)
    lines += [f"EXCEEDS {failure}" for failure in comparison.failures[:_SHOWN]]
    if (count := len(comparison.failures)) > _SHOWN:
        lines.append(f"and {count - _SHOWN} more exceed their limits")
    lines.append("passed: every error is within its limit" if comparison.passed else "FAILED")
    return lines


def _end_lines(end: EndMetrics) -> list[str]:
    return [
        f"KL(reference || candidate): mean {end.kl_mean:.4f} +- {end.kl_standard_error:.4f} nats, "
        f"median {end.kl_quantile(0.5):.4f}, p99 {end.kl_quantile(0.99):.4f}, "
        f"p99.9 {end.kl_quantile(0.999):.4f}, over {end.num_tokens} tokens",
        f"same first token: {100 * end.top1:.2f} +- {100 * end.top1_standard_error:.2f} %",
        *(
            [
                f"ln perplexity: {end.reference_loss:.4f}, the candidate's "
                f"{end.loss_mean_change:+.4f} +- {end.loss_standard_error:.4f}"
            ]
            if math.isfinite(end.loss_mean_change)
            else []
        ),
    ]


def _about_running(comparison: ModelComparison) -> list[str]:
    """Say what the blocks lost, and what could not be measured."""
    lines = []
    if comparison.blocks:
        worst = max(comparison.blocks, key=lambda block: block.injected.relative)
        last = comparison.blocks[-1]
        lines.append(
            f"`{worst.path}` adds most to the hidden states, "
            f"{100 * worst.injected.relative:.3f} %; "
            f"{100 * last.propagated.relative:.3f} % have gathered after `{last.path}`"
        )
    if comparison.unseen:
        lines.append(f"not exercised, no token reached: {listed(comparison.unseen)}")
    if comparison.few:
        lines.append(f"fewer than 32 tokens reached: {listed(comparison.few)}")
    if comparison.uncompared:
        lines.append(f"outputs that could not be compared: {listed(comparison.uncompared)}")
    if comparison.why_whole:
        lines.append(f"the models were in memory as a whole: {comparison.why_whole}")
    return lines


def show_comparison(comparison: ModelComparison, *, every: bool = False) -> None:
    """Print the worst ten layers (or all) and the summary."""
    rows = list(comparison.layers) if every else _ranked(comparison)[:10]
    title = "All layers" if every else f"The {len(rows)} layers with the largest error"
    table = make_table(title, [(name, "error" in name or "SQNR" in name) for name in _COLUMNS])
    for row in rows:
        table.add_row(*_cells(row))
    out = console()
    out.print(table)
    for line in summary_lines(comparison):
        out.print(line)


def comparison_markdown(comparison: ModelComparison) -> str:
    """Return the comparison as Markdown: summary, then all layers, worst first."""
    lines = ["## quantload compare", ""]
    lines += [f"- {line}" for line in summary_lines(comparison)]
    lines += ["", "| " + " | ".join(_COLUMNS) + " |", "|" + "---|" * len(_COLUMNS)]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in _ranked(comparison)]
    return "\n".join(lines)


def comparison_json(comparison: ModelComparison) -> dict[str, Any]:
    """Return the comparison for machines; infinite numbers are null."""
    end = comparison.end
    return {
        "quantload_compare": 1,
        "layers": [
            {
                "module": row.module,
                "reference": row.reference,
                "candidate": row.candidate,
                "weight": _sums_json(row.weight),
                "output": _sums_json(row.output),
                "output_median": row.output_median,
                "tokens": row.tokens,
                "weight_limit": row.weight_limit,
                "output_limit": row.output_limit,
                "failure": row.failure,
            }
            for row in comparison.layers
        ],
        "passed": comparison.passed,
        "problems": list(comparison.problems),
        "only_in_reference": list(comparison.only_in_reference),
        "only_in_candidate": list(comparison.only_in_candidate),
        "blocks": [
            {
                "block": block.path,
                "injected": _sums_json(block.injected),
                "propagated": _sums_json(block.propagated),
                "injected_median": block.injected_median,
                "propagated_median": block.propagated_median,
            }
            for block in comparison.blocks
        ],
        "unseen": list(comparison.unseen),
        "few_tokens": list(comparison.few),
        "uncompared": list(comparison.uncompared),
        "end": None if end is None else _end_json(end),
    }


def _sums_json(sums: ErrorSums | None) -> dict[str, Any] | None:
    if sums is None:
        return None
    return {
        "relative_error": finite(sums.relative),
        "sqnr_db": finite(sums.sqnr_db),
        "max_abs": finite(sums.max_abs),
    }


def _end_json(end: EndMetrics) -> dict[str, Any]:
    return {
        "num_tokens": end.num_tokens,
        "kl_mean": end.kl_mean,
        "kl_standard_error": finite(end.kl_standard_error),
        "kl_median": end.kl_quantile(0.5),
        "kl_p99": end.kl_quantile(0.99),
        "kl_p999": end.kl_quantile(0.999),
        "top1": end.top1,
        "top1_standard_error": end.top1_standard_error,
        "ln_perplexity": finite(end.reference_loss),
        "ln_perplexity_change": finite(end.loss_mean_change),
        "ln_perplexity_standard_error": finite(end.loss_standard_error),
        "kl_by_confidence": [
            {"from": low, "tokens": count, "kl_mean": finite(mean)}
            for low, count, mean in end.by_confidence()
        ],
    }
