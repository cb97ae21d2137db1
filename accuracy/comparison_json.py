"""A comparison for machines, version 4.

    quantload_compare   4
    tier                the highest tier that was measured: structure, weights, layers or end
    passed              true if nothing is beyond a limit, damaged, missing or not finite
    structure           bits (stored bits of a weight, with scales, zero points and padding) of the
                        candidate, reference_bits, quantized_bits (of the weights that are
                        quantized), skipped (layers that the config covers and that are in full
                        precision), uncovered (quantized ones that it leaves out), added (norms
                        and biases that came), input_scales (count of static ones, differ, far
                        from their like), and layers: module, shape, what both sides hold, bits
                        of both, names of tensors by leaf, zero_scales, problem
    layers              module, what both sides hold, weight, output (isolated), input (of that, by
                        rounding the input alone): relative_error, sqnr_db, max_abs each;
                        output_median over tokens, tokens, limits of weight and output, failure,
                        worst_row of the weight and its relative error, and rounding: errors in
                        steps of the weight, see `Rounding`
    problems, failures  a line each; config_differences are the first of the problems
    not_run             why nothing was run although there are tokens; "" if something was
    only_in_reference, only_in_candidate, unseen, few_tokens, uncompared   names
    tokens              sha256 of the ids as JSON without spaces, count, sequences
    blocks              injected and propagated errors of each block, medians over tokens
    routers             share of the reference's choices of experts that the candidate made too
    limits, exceeded    limits of the user, and what is beyond them
    end                 KL, top-1 agreement and change of ln perplexity, with standard errors; KL by
                        the reference's confidence

Keys stand in this order, layers in that of the reference's files. What was not measured is null, or
empty, and so is what is infinite: the SQNR of equal weights.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from quantload.accuracy.compare import BlockComparison, LayerComparison, ModelComparison
from quantload.accuracy.end_metrics import EndMetrics
from quantload.accuracy.structure import StructureComparison
from quantload.accuracy.weight_rounding import Rounding
from quantload.quant.metrics import ErrorSums

VERSION = 4


def comparison_json(comparison: ModelComparison) -> dict[str, Any]:
    """Return a comparison as JSON, see the top of this file."""
    found = comparison
    return {
        "quantload_compare": VERSION,
        "tier": found.tier,
        "passed": found.passed,
        "structure": None if found.structure is None else _structure_json(found.structure),
        "layers": [_layer_json(row) for row in found.layers],
        "problems": list(found.problems),
        "failures": list(found.failures),
        "config_differences": list(found.config_differences),
        "only_in_reference": list(found.only_in_reference),
        "only_in_candidate": list(found.only_in_candidate),
        "tokens": None if found.tokens is None else asdict(found.tokens),
        "blocks": [_block_json(block) for block in found.blocks],
        "routers": {
            path: {"tokens": router.tokens, "share": router.share}
            for path, router in found.routers.items()
        },
        "unseen": list(found.unseen),
        "few_tokens": list(found.few),
        "uncompared": list(found.uncompared),
        "why_whole": found.why_whole,
        "not_run": found.not_run,
        "limits": list(found.limits),
        "exceeded": [
            {"limit": one.limit, "where": one.where, "value": _finite(one.value)}
            for one in found.exceeded
        ],
        "end": None if found.end is None else _end_json(found.end),
    }


def _structure_json(structure: StructureComparison) -> dict[str, Any]:
    return {
        "bits": structure.bits,
        "reference_bits": structure.reference_bits,
        "quantized_bits": structure.quantized_bits,
        "skipped": list(structure.skipped),
        "uncovered": list(structure.uncovered),
        "added": list(structure.added),
        "input_scales": {
            "count": structure.input_scales.count,
            "differ": list(structure.input_scales.differ),
            "far": list(structure.input_scales.far),
        },
        "layers": [
            {
                "module": layer.module,
                "shape": list(layer.shape),
                "reference": layer.reference,
                "candidate": layer.candidate,
                "bits": layer.bits,
                "reference_bits": layer.reference_bits,
                "tensors": dict(layer.tensors),
                "reference_tensors": dict(layer.reference_tensors),
                "zero_scales": layer.zero_scales,
                "problem": layer.problem,
            }
            for layer in structure.layers
        ],
    }


def _layer_json(row: LayerComparison) -> dict[str, Any]:
    return {
        "module": row.module,
        "reference": row.reference,
        "candidate": row.candidate,
        "is_plain": row.is_plain,
        "weight": _sums_json(row.weight),
        "output": _sums_json(row.output),
        "output_median": row.output_median,
        "input": _sums_json(row.input),
        "tokens": row.tokens,
        "weight_limit": _finite(row.weight_limit),
        "output_limit": _finite(row.output_limit),
        "failure": row.failure,
        "worst_row": row.worst_row,
        "worst_row_error": None if row.worst_row_error is None else _finite(row.worst_row_error),
        "rounding": None if row.rounding is None else _rounding_json(row.rounding),
    }


def _rounding_json(rounding: Rounding) -> dict[str, Any]:
    return {
        "max_steps": _finite(rounding.max_steps),
        "bias": _finite(rounding.bias),
        "rail_share": rounding.rail_share,
        "codes_used": rounding.codes_used,
        "codes": rounding.codes,
        "beyond": rounding.beyond,
        "block_excess": _finite(rounding.block_excess),
        "row_excess": _finite(rounding.row_excess),
        "histogram": list(rounding.histogram),
    }


def _block_json(block: BlockComparison) -> dict[str, Any]:
    return {
        "block": block.path,
        "injected": _sums_json(block.injected),
        "propagated": _sums_json(block.propagated),
        "injected_median": block.injected_median,
        "propagated_median": block.propagated_median,
    }


def _sums_json(sums: ErrorSums | None) -> dict[str, Any] | None:
    if sums is None:
        return None
    return {
        "relative_error": _finite(sums.relative),
        "sqnr_db": _finite(sums.sqnr_db),
        "max_abs": _finite(sums.max_abs),
    }


def _end_json(end: EndMetrics) -> dict[str, Any]:
    return {
        "num_tokens": end.num_tokens,
        "kl_mean": _finite(end.kl_mean),
        "kl_standard_error": _finite(end.kl_standard_error),
        **{
            f"kl_{name}{suffix}": _finite(of(fraction))
            for name, fraction in (("median", 0.5), ("p99", 0.99), ("p999", 0.999))
            for suffix, of in (
                ("", end.kl_quantile),
                ("_standard_error", end.kl_quantile_standard_error),
            )
        },
        "kl_max": _finite(end.kl_quantile(1.0)),
        "top1": end.top1,
        "top1_standard_error": end.top1_standard_error,
        "ln_perplexity": _finite(end.reference_loss),
        "ln_perplexity_change": _finite(end.loss_mean_change),
        "ln_perplexity_standard_error": _finite(end.loss_standard_error),
        "kl_by_confidence": [
            {
                "from": part.low,
                "tokens": part.positions,
                "kl_mean": _finite(part.mean),
                "kl_standard_error": _finite(part.standard_error),
            }
            for part in end.by_confidence()
        ],
    }


def _finite(number: float) -> float | None:
    """JSON has no infinity and no NaN."""
    return number if abs(number) < float("inf") else None


__all__ = ["VERSION", "comparison_json"]
