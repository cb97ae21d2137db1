"""What becomes of every byte of a source: it adds up, or the plan is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from quantload.loader.output_files import OutputTensor
from quantload.loader.plan_row import PlanRow
from quantload.loader.source import Source, SourceWeight

AGAIN = "scales and zero points of weights that are quantized again"
DEQUANTIZED = "scales and zero points of weights that are dequantized"
INPUTS = "fixed scales of inputs"
QUANTIZED, COPIED = "quantized", "copied"


@dataclass(frozen=True)
class Accounting:
    """Bytes of the source's tensors by what becomes of them.

    Args:
        quantized: Weights that are quantized, or written with the codes that they have.
        copied: Tensors in full precision; also those that are cast, or dequantized.
        dropped: Tensors that are not written, by reason.
    """

    quantized: int
    copied: int
    dropped: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes of all of them: those of the source."""
        return self.quantized + self.copied + sum(self.dropped.values())


def account_for(
    source: Source, rows: Sequence[PlanRow], plain: Sequence[OutputTensor]
) -> Accounting:
    """Say what becomes of each tensor of a source.

    Args:
        source: What is converted; what it leaves out already counts as dropped.
        rows: Rows of the plan.
        plain: All other tensors that are written.
    """
    fates = _fates(source, rows, plain)
    lost = set(source.checkpoint.tensors) - set(fates)
    assert not lost, f"the plan says nothing of {sorted(lost)[:3]}"
    found: Counter[str] = Counter(source.dropped)
    for name, entry in source.checkpoint.tensors.items():
        found[fates[name]] += entry.num_bytes
    return Accounting(
        quantized=found.pop(QUANTIZED, 0),
        copied=found.pop(COPIED, 0),
        dropped={reason: count for reason, count in found.items() if count},
    )


def _fates(
    source: Source, rows: Sequence[PlanRow], plain: Sequence[OutputTensor]
) -> dict[str, str]:
    """Return what becomes of each tensor, by name."""
    fates = dict.fromkeys((tensor.source for tensor in plain), COPIED)
    own = [row for row in rows if row.module == row.read_from]
    untied = [row for row in rows if row.module != row.read_from]
    for row in (*own, *untied):  # the weight's own row decides; a head reads it once more
        weight = source.weights.get(row.read_from)
        if weight is None:
            fates.setdefault(row.read_from, COPIED)
            continue
        for name, fate in _of_weight(row, weight, source):
            fates.setdefault(name, fate)
    return fates


def _of_weight(row: PlanRow, weight: SourceWeight, source: Source) -> Iterator[tuple[str, str]]:
    """Yield what becomes of each tensor of a weight."""
    done = COPIED if row.scheme is None else QUANTIZED
    beside = DEQUANTIZED if row.scheme is None else AGAIN
    codes = max(
        weight.leaves.values(),
        key=lambda name: source.checkpoint.tensors[name].num_bytes,
        default="",
    )
    written = {tensor.name.removeprefix(f"{row.module}.") for tensor in row.outputs}
    for leaf, name in weight.leaves.items():
        if "input" in leaf or "activation" in leaf:
            is_kept = row.keeps_values and any("input" in other for other in written)
            yield name, done if is_kept else INPUTS
        elif name == codes or row.keeps_values:
            yield name, done
        else:
            yield name, beside
