"""How `compare --structure` shows its result: a table in the terminal, or Markdown."""

from __future__ import annotations

from collections.abc import Iterable

import click

from quantload.accuracy.compare import ModelComparison, about_input_scales
from quantload.accuracy.structure import LayerStructure, StructureComparison
from quantload.cli_compare import safe, safe_cell
from quantload.cli_output import console, make_table, named_rows, printable, shape_text
from quantload.errors import counted, listed

_COLUMNS = ("layer", "count", "shape", "reference", "candidate", "bits", "bits now", "zero scales")
_TEXTS = ("layer", "reference", "candidate")


def show_structure(comparison: ModelComparison, *, every: bool, markdown: bool) -> None:
    """Print how both sides hold their layers; those alike are one row unless `every` is wanted."""
    assert comparison.structure is not None, "the structure was compared"
    rows = _rows(comparison.structure, every=every)
    lines = structure_lines(comparison)
    if markdown:
        click.echo("\n".join(_markdown(rows, lines)))
        return
    table = make_table("Layers", [(name, name not in _TEXTS) for name in _COLUMNS])
    for row in rows:
        table.add_row(*map(printable, row))
    out = console()
    out.print(table)
    for line in lines:
        out.print(printable(line), markup=False)


def structure_lines(comparison: ModelComparison) -> list[str]:
    """Return the summary in sentences."""
    structure = comparison.structure
    assert structure is not None, "the structure was compared"
    quantized = [layer for layer in structure.layers if layer.candidate != layer.reference]
    lines = [
        f"{counted(len(structure.layers), 'layer')}, {len(quantized)} held in another way",
        f"bits of a weight, with scales, zero points and padding: {structure.bits:.3f}, the "
        f"reference's {structure.reference_bits:.3f}",
    ]
    if structure.quantized_bits:
        lines.append(f"bits of a weight that is quantized: {structure.quantized_bits:.3f}")
    for names, where in (
        (comparison.only_in_reference, "reference"),
        (comparison.only_in_candidate, "candidate"),
    ):
        if names:
            lines.append(f"only in the {where}: {listed(names)}")
    zeros = {layer.module: layer.zero_scales for layer in structure.layers if layer.zero_scales}
    if zeros:
        lines.append(
            f"{counted(sum(zeros.values()), 'scale is', 'scales are')} zero, in {listed(zeros)}"
        )
    lines += about_input_scales(comparison)
    lines += [f"PROBLEM {problem}" for problem in comparison.problems]
    lines += [f"EXCEEDS {failure}" for failure in comparison.failures]
    return [*lines, "passed" if comparison.passed else "FAILED"]


def _rows(structure: StructureComparison, *, every: bool) -> list[tuple[str, ...]]:
    return [
        tuple(row)
        for row in named_rows([(layer.module, _cells(layer)) for layer in structure.layers], every)
    ]


def _cells(layer: LayerStructure) -> tuple[str, ...]:
    return (
        shape_text(layer.shape),
        layer.reference or "-",
        layer.candidate or "-",
        f"{layer.reference_bits:.3f}" if layer.reference else "-",
        f"{layer.bits:.3f}" if layer.candidate else "-",
        str(layer.zero_scales or ""),
    )


def _markdown(rows: Iterable[tuple[str, ...]], lines: list[str]) -> list[str]:
    *sentences, verdict = lines
    text = [
        f"## quantload compare: structure {verdict}",
        "",
        *(f"- {safe(line)}" for line in sentences),
    ]
    text += ["", f"| {' | '.join(_COLUMNS)} |"]
    text += ["|" + "|".join("---" if name in _TEXTS else "---:" for name in _COLUMNS) + "|"]
    return text + ["| " + " | ".join(map(safe_cell, row)) + " |" for row in rows]


__all__ = ["show_structure", "structure_lines"]
