"""A comparison as one self-contained page.

Parts that have no data are left out, with a sentence that says why. The numbers are those of the
comparison: what a cell shows is rounded, what it is sorted by is not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from quantload import __version__
from quantload.accuracy import html_charts, html_distributions
from quantload.accuracy.compare import LayerComparison, ModelComparison, about_input_scales
from quantload.accuracy.html_pages import listed_all, number, percent, render, sortable
from quantload.accuracy.html_parts import Cell, Column, Row
from quantload.accuracy.layer_ranking import RankedLayer, place_of, ranked_layers, standing_apart
from quantload.errors import counted
from quantload.quant.metrics import ErrorSums

_HISTOGRAMS = 8
_FAILURES = 10


def comparison_page(comparison: ModelComparison, *, reference: str, candidate: str) -> str:
    """Return the page.

    Args:
        comparison: What `api.compare` returned.
        reference: Name of the reference, for the heading.
        candidate: Name of the candidate.
    """
    layers = ranked_layers(comparison)
    columns = _columns(layers)
    return render(
        "comparison.html.j2",
        version=__version__,
        reference=reference,
        candidate=candidate,
        passed=comparison.passed,
        lines=_lines(comparison, layers),
        facts=_facts(comparison),
        depth=html_charts.by_depth(layers),
        propagation=html_charts.propagation(comparison.blocks),
        kl=html_distributions.kl_parts(comparison.end),
        histograms=html_distributions.step_histograms(layers, count=_HISTOGRAMS),
        has_tokens=bool(comparison.end or comparison.blocks)
        or any(layer.output for layer in layers),
        columns=columns,
        rows=[_layer_row(layer, columns) for layer in layers],
        expert_columns=_EXPERT_COLUMNS,
        experts=_expert_rows(layers, few=set(comparison.few), unseen=set(comparison.unseen)),
        router_columns=_ROUTER_COLUMNS,
        routers=_router_rows(comparison),
        structure_columns=_STRUCTURE_COLUMNS,
        structure=_structure_rows(comparison),
    )


# -- the head --------------------------------------------------------------------------------------


def _lines(
    comparison: ModelComparison, layers: Sequence[RankedLayer]
) -> list[tuple[str, str, bool]]:
    """Return (what, names, whether that is bad) of what numbers alone do not say."""
    standing = [
        f"{row.name} ({row.over_type_db:+.2f} dB, z {row.z:.1f})" for row in standing_apart(layers)
    ]
    bad = [*comparison.problems, *comparison.failures]
    lines = [
        ("Encodings", _encodings(comparison), False),
        *(("Fails", text, True) for text in bad[:_FAILURES]),
        ("Fail too", f"{max(len(bad) - _FAILURES, 0) or ''}", True),
        ("Limits", ", ".join(comparison.limits), False),
        ("Only in the reference", listed_all(comparison.only_in_reference), True),
        ("Only in the candidate", listed_all(comparison.only_in_candidate), False),
        ("Far above the other layers of its type", "; ".join(standing), False),
        ("Not exercised, no token reached", listed_all(comparison.unseen), False),
        ("Fewer than 32 tokens reached", listed_all(comparison.few), False),
        ("Outputs that could not be compared", listed_all(comparison.uncompared), False),
        *(("Input scales", text, False) for text in about_input_scales(comparison)),
        ("The models were not run", comparison.not_run, True),
        ("The models were in memory as a whole", comparison.why_whole, False),
    ]
    return [line for line in lines if line[1]]


def _encodings(comparison: ModelComparison) -> str:
    """Say what the weights are held in, most frequent first."""
    found = Counter(
        _holds(row.reference, row.candidate)
        for row in comparison.layers
        if row.candidate and not row.is_plain
    )
    return ", ".join(f"{held} ({count})" for held, count in found.most_common())


def _facts(comparison: ModelComparison) -> list[tuple[str, str, str]]:
    """Return (name, number, what belongs to it)."""
    facts = [*_about_bits(comparison), *_about_weights(comparison)]
    end = comparison.end
    if comparison.tokens is not None:
        tokens = comparison.tokens
        of = f"in {counted(tokens.sequences, 'sequence')}, sha256 {tokens.sha256[:12]}"
        facts.append(("Tokens", str(tokens.count), of))
    if end is None:
        return facts
    kl = [end.kl_quantile(fraction) for fraction in (0.5, 0.99, 0.999)]
    errors = [end.kl_quantile_standard_error(fraction) for fraction in (0.5, 0.99)]
    facts += [
        (
            "KL, mean",
            f"{end.kl_mean:.4g}",
            f"{_plus_minus(end.kl_standard_error, '.2g')} nats",
        ),
        ("KL, median", f"{kl[0]:.4g}", f"{_plus_minus(errors[0], '.2g')} nats"),
        (
            "KL, p99",
            f"{kl[1]:.4g}",
            f"{_plus_minus(errors[1], '.2g')} nats, p99.9 {kl[2]:.4g}".lstrip(),
        ),
        (
            "Same first token",
            f"{100 * end.top1:.2f} %",
            _plus_minus(100 * end.top1_standard_error, ".2f"),
        ),
    ]
    if math.isfinite(end.loss_mean_change):
        facts.append(
            (
                "Change of ln perplexity",
                f"{end.loss_mean_change:+.4f}",
                f"{_plus_minus(end.loss_standard_error, '.4f')} from {end.reference_loss:.4f}",
            )
        )
    return facts


def _plus_minus(error: float, form: str) -> str:
    """Return a standard error; "" where a single token has none."""
    return f"\u00b1 {error:{form}}" if math.isfinite(error) else ""


def _about_bits(comparison: ModelComparison) -> list[tuple[str, str, str]]:
    structure = comparison.structure
    if structure is None:
        return []
    more = f"was {structure.reference_bits:.2f}"
    if structure.quantized_bits:
        more += f"; of quantized weights {structure.quantized_bits:.2f}"
    return [("Stored bits a weight", f"{structure.bits:.2f}", more)]


def _about_weights(comparison: ModelComparison) -> list[tuple[str, str, str]]:
    weights = [row for row in comparison.layers if row.weight and not row.is_plain]
    if not weights:
        return []
    changed = [row for row in weights if row.differs]
    values = [row.weight.sqnr_db for row in changed if row.weight and not row.problem]
    mean = f"mean SQNR {sum(values) / len(values):.2f} dB" if values else ""
    return [("Weights that differ", f"{len(changed)} of {len(weights)}", mean)]


# -- tables ----------------------------------------------------------------------------------------

_LAYER = Column(name="layer", is_text=True)
_WEIGHT = Column(name="weight", hint="relative L2 error of the weight")
_WEIGHT_DB = Column(name="weight dB", hint="SQNR of the weight")
_OUTPUT = Column(name="output", hint="relative L2 error of the output on the reference's input")
_MEDIAN = Column(name="median", hint="median over tokens of the output's relative error")
_OUTPUT_DB = Column(name="output dB", hint="SQNR of the output on the reference's input")
_INPUT = Column(name="input", hint="error of the output by rounding the layer's input alone")
_TOKENS = Column(name="tokens", hint="tokens that reached it")
_SHARE = Column(name="share", hint="part of the sum of squared relative errors")
_OVER = Column(name="over type", hint="above the mean of the other layers of its projection")
_Z = Column(name="z", hint="that in standard deviations of those layers")
_STEPS = Column(name="steps", hint="largest error in steps between neighbouring codes")
_ROW = Column(name="worst row", hint="output feature with the largest relative error, and that")
_HOLDS = Column(name="holds", is_text=True, hint="encoding in the candidate")
_WORST = Column(name="worst expert", is_text=True, hint="its number and its error")
_FEW = Column(name="few", hint="experts that fewer than 32 tokens reached")
_NOTE = Column(name="note", is_text=True)
_EXPERT_COLUMNS = [_LAYER, _WEIGHT, _WEIGHT_DB, _OUTPUT, _MEDIAN, _OUTPUT_DB, _TOKENS, _STEPS]
_EXPERT_COLUMNS += [_HOLDS, _NOTE]


def _columns(layers: Sequence[RankedLayer]) -> list[Column]:
    has_output = any(layer.output for layer in layers)
    has_experts = any(layer.is_experts for layer in layers)
    differ_in_tokens = len({layer.tokens for layer in layers if layer.output}) > 1
    return [
        *[_LAYER, _WEIGHT, _WEIGHT_DB],
        *([_OUTPUT, _MEDIAN, _OUTPUT_DB] if has_output else []),
        *([_INPUT] if any(_input(layer) for layer in layers) else []),
        *([_TOKENS] if differ_in_tokens else []),
        *[_SHARE, _OVER, _Z],
        *([_STEPS] if any(_max_steps(layer) is not None for layer in layers) else []),
        *([_WORST, _FEW] if has_experts else []),
        *([_ROW] if any(layer.worst.worst_row is not None for layer in layers) else []),
        _HOLDS,
    ]


def _input(layer: RankedLayer) -> ErrorSums | None:
    found = [row.input for row in layer.rows if row.input is not None]
    return sum(found, ErrorSums()) if found else None


def _max_steps(layer: RankedLayer) -> float | None:
    found = [row.rounding.max_steps for row in layer.rows if row.rounding is not None]
    return max(found) if found else None


def _layer_row(layer: RankedLayer, columns: Sequence[Column]) -> Row:
    worst = f"{place_of(layer.worst.module).expert}: {percent(layer.worst_error.relative)}"
    few = float(layer.few) if layer.is_experts else None
    cells = {
        _LAYER: Cell(text=layer.name, more=_why(layer)),
        **_error_cells(layer.weight, layer.output, layer.output_median),
        _TOKENS: _cell(float(layer.tokens) if layer.output else None, ".0f"),
        _INPUT: _relative(_input(layer)),
        _SHARE: Cell(text=percent(layer.share, 2), sort=sortable(layer.share)),
        _OVER: _cell(layer.over_type_db, "+.2f"),
        _Z: _cell(layer.z, "+.1f"),
        _STEPS: _cell(_max_steps(layer), ".3f"),
        _WORST: Cell(text=worst if layer.is_experts else ""),
        _FEW: _cell(few, ".0f"),
        _ROW: _worst_row(layer.worst),
        _HOLDS: Cell(text=layer.candidate),
    }
    return Row(cells=[cells[column] for column in columns], is_bad=bool(layer.failures))


def _worst_row(row: LayerComparison) -> Cell:
    if row.worst_row is None:
        return Cell(text="")
    error = row.worst_row_error
    return Cell(text=f"{row.worst_row}: {_percent(error, 1)}", sort=sortable(error))


def _why(layer: RankedLayer) -> str:
    if layer.is_experts:
        return listed_all(layer.failures)
    (row,) = layer.rows
    return row.problem or row.failure


def _error_cells(
    weight: ErrorSums | None, output: ErrorSums | None, median: float | None
) -> dict[Column, Cell]:
    return {
        _WEIGHT: _relative(weight),
        _WEIGHT_DB: _decibel(weight),
        _OUTPUT: _relative(output),
        _MEDIAN: Cell(text=percent(median), sort=sortable(median)),
        _OUTPUT_DB: _decibel(output),
    }


def _relative(sums: ErrorSums | None) -> Cell:
    value = None if sums is None else sums.relative
    return Cell(text=_percent(value), sort=sortable(value))


def _percent(value: float | None, digits: int = 3) -> str:
    """Return a relative error in percent, or say why there is none."""
    if value is None or math.isfinite(value):
        return percent(value, digits)
    return "not finite" if math.isnan(value) else "reference is 0"


def _decibel(sums: ErrorSums | None) -> Cell:
    value = None if sums is None else sums.sqnr_db
    return Cell(text="equal" if value == math.inf else number(value), sort=sortable(value))


def _cell(value: float | None, form: str) -> Cell:
    return Cell(text=number(value, form), sort=sortable(value))


def _holds(reference: str, candidate: str) -> str:
    return candidate if reference == candidate else f"{reference} \u2192 {candidate}".strip()


def _expert_rows(layers: Sequence[RankedLayer], *, few: set[str], unseen: set[str]) -> list[Row]:
    return [
        _expert_row(row, is_few=row.module in few, is_unseen=row.module in unseen)
        for layer in layers
        if layer.is_experts
        for row in layer.rows
    ]


def _expert_row(row: LayerComparison, *, is_few: bool, is_unseen: bool) -> Row:
    why = row.problem or row.failure
    note = "no token reached it" if is_unseen else "too few tokens" if is_few else ""
    cells = {
        _LAYER: Cell(text=row.module, more=why),
        **_error_cells(row.weight, row.output, row.output_median),
        _TOKENS: _cell(0.0 if is_unseen else float(row.tokens), ".0f"),
        _STEPS: _cell(None if row.rounding is None else row.rounding.max_steps, ".3f"),
        _HOLDS: Cell(text=row.candidate),
        _NOTE: Cell(text=note),
    }
    return Row(cells=[cells[column] for column in _EXPERT_COLUMNS], is_bad=bool(why))


_ROUTER_COLUMNS = [
    Column(name="experts", is_text=True),
    Column(name="same choices", hint="of the reference's choices, those that the candidate made"),
    Column(name="tokens"),
]


def _router_rows(comparison: ModelComparison) -> list[Row]:
    found = sorted(comparison.routers.items(), key=lambda pair: pair[1].share)
    return [
        Row(
            cells=[
                Cell(text=path),
                Cell(text=percent(same.share, 2), sort=sortable(same.share)),
                _cell(float(same.tokens), ".0f"),
            ]
        )
        for path, same in found
    ]


_STRUCTURE_COLUMNS = [
    _LAYER,
    Column(name="shape", is_text=True),
    Column(name="bits", hint="stored bits a weight, with scales, zero points and padding"),
    Column(name="reference's bits"),
    _HOLDS,
    Column(name="reference holds", is_text=True),
]


def _structure_rows(comparison: ModelComparison) -> list[Row]:
    """Return what both hold, where nothing else was measured."""
    if comparison.structure is None or comparison.layers:
        return []
    skipped = set(comparison.structure.skipped)
    return [
        Row(
            cells=[
                Cell(text=layer.module, more=layer.problem or why),
                Cell(text="x".join(map(str, layer.shape))),
                _cell(layer.bits, ".2f"),
                _cell(layer.reference_bits, ".2f"),
                Cell(text=layer.candidate),
                Cell(text=layer.reference),
            ],
            is_bad=bool(layer.problem or why),
        )
        for layer in comparison.structure.layers
        for why in ("in full precision, although its like are not" * (layer.module in skipped),)
    ]


__all__ = ["comparison_page"]
