"""Where the bytes of a source go: quantized, copied, decoded to full precision, or dropped.

Each stored byte is counted once; together they are the source, and that is asserted. A tensor that
holds the weights of many experts is shared out to them.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from quantload.loader.plan import Plan, PlanRow
from quantload.loader.source import is_of_input

Use = Literal["quantized", "copied", "decoded", "dropped"]
USES: tuple[Use, ...] = ("quantized", "copied", "decoded", "dropped")
Fate = tuple[Use, str]  # and the reason, for people
INPUT_SCALES = "fixed input scale of the source's own scheme"


@dataclass(frozen=True)
class Tally:
    """Bytes of tensor data of a source, by what becomes of them.

    Args:
        total: Bytes of all tensors of the source.
        reasons: Bytes, and the number of tensors if it is known, by use and by reason, for people.
    """

    total: int
    reasons: Mapping[Fate, tuple[int, int | None]]

    @property
    def read(self) -> int:
        """Bytes that a conversion reads: all but those that are dropped."""
        return self.total - self.of("dropped")

    def of(self, use: Use) -> int:
        """Return the bytes of one use."""
        return sum(size for (kind, _), (size, _) in self.reasons.items() if kind == use)


def tally(plan: Plan) -> Tally:
    """Say what becomes of every tensor of a source."""
    tensors = plan.source.checkpoint.tensors
    fates = _fates(plan)
    lost = set(tensors) - set(fates)
    assert not lost, f"the plan says nothing of {sorted(lost)[:3]}"
    sizes: Counter[Fate] = Counter()
    counts: Counter[Fate] = Counter()
    for name, entry in tensors.items():
        shares = _shares(entry.num_bytes, fates[name])
        sizes.update(shares)
        counts[max(shares, key=lambda fate: shares[fate])] += 1
    reasons: dict[Fate, tuple[int, int | None]] = {
        fate: (sizes[fate], counts[fate]) for fate in sorted(sizes, key=_order)
    }
    left_out = plan.source.dropped
    reasons |= {("dropped", reason): (size, None) for reason, size in left_out.items()}
    found = Tally(
        total=sum(e.num_bytes for e in tensors.values()) + sum(left_out.values()),
        reasons=reasons,
    )
    assert sum(map(found.of, USES)) == found.total, "what becomes of a source does not add up"
    return found


def _fates(plan: Plan) -> dict[str, dict[str, Fate]]:
    """Return what becomes of each tensor of the source, for every weight that is a part of it."""
    fates: dict[str, dict[str, Fate]] = {}
    for name, weight, use, reason in _uses(plan):
        known = fates.setdefault(name, {}).get(weight)
        # a weight that two modules read (a head that was tied) counts as what is done most to it
        if known is None or USES.index(use) < USES.index(known[0]):
            fates[name][weight] = use, reason
    return fates


def _shares(num_bytes: int, fates: Mapping[str, Fate]) -> dict[Fate, int]:
    """Share the bytes of a tensor out to the weights, equal in size, that are parts of it."""
    weights = Counter(fates.values())
    bounds = [num_bytes * end // weights.total() for end in accumulate(weights.values(), initial=0)]
    return {
        fate: stop - start for fate, (start, stop) in zip(weights, pairwise(bounds), strict=True)
    }


def _order(use: Fate) -> tuple[int, str]:
    return USES.index(use[0]), use[1]


def _uses(plan: Plan) -> Iterator[tuple[str, str, Use, str]]:
    """Yield (tensor of the source, weight that is a part of it, what becomes of that, why)."""
    weights = plan.source.weights
    for row in plan.rows:
        if row.read_from not in weights:
            yield row.read_from, row.read_from, "copied", _reason(row)
            continue
        weight = weights[row.read_from]
        use: Use = "copied"
        if row.scheme is not None and not row.keeps_values:
            use = "quantized"
        elif row.scheme is None and weight.is_quantized:
            use = "decoded"
        keeps_inputs = row.keeps_values and any(is_of_input(t.name) for t in row.outputs)
        for leaf, name in weight.leaves.items():
            if is_of_input(leaf) and not keeps_inputs:
                yield name, weight.module, "dropped", INPUT_SCALES
            else:
                yield name, weight.module, use, _reason(row)
    for tensor in plan.plain:
        yield tensor.source, tensor.source, "copied", "norms, biases and other small tensors"


def _reason(row: PlanRow) -> str:
    if row.scheme is not None:
        return f"to {row.scheme}" if not row.keeps_values else f"same values, as {row.scheme}"
    return without_numbers(row.reason)


def without_numbers(reason: str) -> str:
    """Return a reason without the numbers of layers and experts, so that it is one for them all."""
    if reason.startswith("rule "):  # numbers of a rule are what the user wrote
        return reason
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", reason)


def scheme_rows(plan: Plan) -> list[tuple[str, int, int, int]]:
    """Return (scheme, modules, weights, bytes written) for each scheme of a plan, largest first."""
    modules: Counter[str] = Counter()
    weights: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for row in plan.rows:
        name = str(row.scheme or str(row.dtype).removeprefix("torch."))
        modules[name] += 1
        weights[name] += math.prod(row.shape)
        sizes[name] += row.output_bytes
    for tensor in plan.plain:
        name = str(tensor.dtype).removeprefix("torch.")
        weights[name] += math.prod(tensor.shape)
        sizes[name] += tensor.num_bytes
    ordered = sorted(sizes, key=lambda name: (-weights[name], name))
    return [(name, modules[name], weights[name], sizes[name]) for name in ordered]
