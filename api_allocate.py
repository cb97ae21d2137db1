"""Schemes under a budget of bits: which layers get which, and whether that is worth it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from quantload.api_load import parse_device
from quantload.api_plan import inspect, plan
from quantload.errors import ConfigError, listed
from quantload.loader.plan import Plan
from quantload.loader.plan_row import PlanRow
from quantload.loader.quantized_view import quantized_view
from quantload.loader.source import Source
from quantload.progress import Progress, Silent
from quantload.quant.allocation import Option, allocate

KEEP = "keep"


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Schemes for all groups, and what they cost.

    Args:
        name: How it was chosen.
        schemes: Name of the scheme, by module.
        bits_per_weight: Of the weights that are shared out, scales included.
        kl_mean: KL(reference || mix) in nats a token, on tokens that no score has seen.
        kl_standard_error: Of that mean.
    """

    name: str
    schemes: Mapping[str, str]
    bits_per_weight: float
    kl_mean: float
    kl_standard_error: float


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """What was chosen.

    Args:
        best: The mix with the least KL.
        mixes: All that were tried: by gradients, by a rule of layers' kinds, and uniform.
        sum_of_parts: Sum of the scores of the mix by gradients.
        scores: Score of each scheme, by module.
    """

    best: Mix
    mixes: tuple[Mix, ...]
    sum_of_parts: float
    scores: Mapping[str, Mapping[str, float]] = field(repr=False)

    def rules_text(self) -> str:
        """Return a file for `quantload convert --config`."""
        counts: dict[str, int] = {}
        for scheme in self.best.schemes.values():
            counts[scheme] = counts.get(scheme, 0) + 1
        usual = max(sorted(counts), key=lambda scheme: counts[scheme])
        lines = [
            f"# {self.best.bits_per_weight:.3f} bits a weight, KL {self.best.kl_mean:.4f} +- "
            f"{self.best.kl_standard_error:.4f} nats a token, chosen {self.best.name}",
            f'scheme = "{usual}"',
            "",
            "[rules]",
        ]
        lines += [
            f'"{module}" = "{scheme}"'
            for module, scheme in self.best.schemes.items()
            if scheme != usual
        ]
        return "\n".join(lines) + "\n"


def allocate_schemes(
    source: str | Path,
    *,
    bits: float,
    schemes: Sequence[str],
    sequences: Sequence[Sequence[int]],
    device: str | torch.device | None = None,
    progress: Progress | None = None,
) -> Allocation:
    """Choose each fused group's scheme so that all weights together take `bits` bits a weight.

    Half of the sequences score the schemes (`accuracy/sensitivity.py`), the other half judge the
    result beside two plain choices of the same size: if one of those is better it is taken.

    Args:
        source: A checkpoint, best in full precision.
        bits: Stored bits of a weight, scales included, in the mean of those that are shared out;
            what `convert` keeps by default (head, embeddings, routers) does not count.
        schemes: Names of schemes, and "keep" for full precision.
        sequences: Token ids; two sequences at least.
        device: Where the model runs, in float32; None takes CUDA where there is one.
        progress: Draws progress; silent by default.

    Raises:
        ConfigError: The budget is below the smallest scheme, schemes do not fit, there are too few
            tokens, or layers cannot be scored.
    """
    if len(set(schemes)) < 2 or len(sequences) < 2:
        raise ConfigError(
            f"found `{len(set(schemes))}` schemes and `{len(sequences)}` sequences, expected two "
            "of each and more"
        )
    from quantload.accuracy.sensitivity import gradient_scores  # transformers: seconds
    from quantload.accuracy.streaming import open_streamed

    progress, place = progress or Silent(), parse_device(device)
    opened = inspect(source)
    half = len(sequences) // 2
    plans = {name: plan(opened, name) for name in schemes if name != KEEP}
    sizes = _sizes(plans, opened, keep=KEEP in schemes)
    views = {name: quantized_view(made, device=place) for name, made in plans.items()}
    model = open_streamed(opened, device=place, dtype=torch.float32)
    scores = gradient_scores(model, views, list(sizes), sequences[:half], progress)
    if KEEP in schemes:
        scores = {module: {**of, KEEP: 0.0} for module, of in scores.items()}
    groups = _groups(next(iter(plans.values())), sizes)
    judge = _Judge(opened, sizes, sequences[half:], place, progress)
    budget = bits * sum(row.elements for row in sizes.values())
    chosen = _by_gradients(groups, sizes, scores, budget)
    mixes = (
        judge.mix("by gradients", chosen),
        judge.mix("by kind of layer", _by_kind(groups, sizes, budget)),
        judge.mix("uniform", _uniform(groups, sizes)),
    )
    return Allocation(
        best=min(mixes, key=lambda mix: mix.kl_mean),
        mixes=mixes,
        sum_of_parts=sum(scores[module][scheme] for module, scheme in chosen.items()),
        scores=scores,
    )


@dataclass(frozen=True)
class _Sizes:
    """Elements of a weight, and its stored bits by scheme."""

    elements: int
    bits: Mapping[str, float]


def _sizes(plans: Mapping[str, Plan], source: Source, *, keep: bool) -> dict[str, _Sizes]:
    rows: dict[str, dict[str, PlanRow]] = {}
    for name, made in plans.items():
        for row in made.rows:
            if row.scheme is not None:
                rows.setdefault(row.module, {})[name] = row
    partial = [module for module, of in rows.items() if len(of) < len(plans)]
    if partial:
        raise ConfigError(f"{listed(partial)} cannot have each of the schemes")
    found = {}
    for module, of in rows.items():
        elements = source.weights[module].shape[0] * source.weights[module].shape[1]
        bits = {name: 8.0 * row.output_bytes for name, row in of.items()}
        if keep:
            bits[KEEP] = 8.0 * next(iter(of.values())).dtype.itemsize * elements
        found[module] = _Sizes(elements, bits)
    return found


def _groups(made: Plan, sizes: Mapping[str, _Sizes]) -> list[tuple[str, ...]]:
    """Return the modules that must have one scheme together, in the order of the checkpoint."""
    of = {module: group for group in made.groups for module in group}
    found: dict[tuple[str, ...], None] = {}
    for module in sizes:
        members = tuple(m for m in of.get(module, (module,)) if m in sizes)
        found[members] = None
    return list(found)


def _by_gradients(
    groups: Sequence[tuple[str, ...]],
    sizes: Mapping[str, _Sizes],
    scores: Mapping[str, Mapping[str, float]],
    budget: float,
) -> dict[str, str]:
    options = {
        group[0]: [
            Option(
                scheme=name,
                bits=sum(sizes[module].bits[name] for module in group),
                cost=sum(scores[module][name] for module in group),
            )
            for name in sizes[group[0]].bits
        ]
        for group in groups
    }
    chosen = allocate(options, budget)
    return {module: chosen[group[0]].scheme for group in groups for module in group}


def _uniform(groups: Sequence[tuple[str, ...]], sizes: Mapping[str, _Sizes]) -> dict[str, str]:
    """The smallest scheme everywhere."""
    total = {name: sum(row.bits[name] for row in sizes.values()) for name in _names(sizes)}
    smallest = min(total, key=lambda name: (total[name], name))
    return {module: smallest for group in groups for module in group}


def _names(sizes: Mapping[str, _Sizes]) -> tuple[str, ...]:
    return tuple(next(iter(sizes.values())).bits)


def _by_kind(
    groups: Sequence[tuple[str, ...]], sizes: Mapping[str, _Sizes], budget: float
) -> dict[str, str]:
    """Spend on q/k/v and down projections at both ends and in every third layer first.

    That is the rule of llama.cpp's K-quant recipes ("use_more_bits").
    """
    chosen = _uniform(groups, sizes)
    left = budget - sum(sizes[module].bits[scheme] for module, scheme in chosen.items())
    ranked = sorted(range(len(groups)), key=lambda n: (_class_of(groups, n), n))
    for number in ranked:
        group = groups[number]
        for name in sorted(_names(sizes), key=lambda name: -sizes[group[0]].bits[name]):
            more = sum(sizes[m].bits[name] - sizes[m].bits[chosen[m]] for m in group)
            if 0 < more <= left:
                left -= more
                chosen |= dict.fromkeys(group, name)
                break
    return chosen


def _class_of(groups: Sequence[tuple[str, ...]], number: int) -> int:
    kind = groups[number][0].rpartition(".")[2]
    alike = [n for n, group in enumerate(groups) if group[0].rpartition(".")[2] == kind]
    depth, count = alike.index(number), len(alike)
    at_ends = depth < count // 8 or depth >= 7 * count // 8 or (depth - count // 8) % 3 == 2
    matters = kind in ("down_proj", "v_proj", "q_proj", "qkv_proj")
    return 0 if matters and at_ends else 1 if matters else 2


class _Judge:
    """Measures mixes on tokens that no score has seen."""

    def __init__(
        self,
        source: Source,
        sizes: Mapping[str, _Sizes],
        sequences: Sequence[Sequence[int]],
        device: torch.device,
        progress: Progress,
    ) -> None:
        self._source, self._sizes, self._sequences = source, sizes, sequences
        self._device, self._progress = device, progress

    def mix(self, name: str, schemes: Mapping[str, str]) -> Mix:
        from quantload.accuracy.compare_outputs import compare_running

        rules = {module: scheme for module, scheme in schemes.items() if scheme != KEEP}
        made = plan(self._source, None, rules=rules)
        found = compare_running(
            self._source,
            quantized_view(made, device=self._device),
            self._sequences,
            self._progress,
            device=self._device,
            dtype=torch.float32,
        )
        if found.end is None:
            raise ConfigError("the model gives no logits: mixes of schemes cannot be judged")
        bits = sum(self._sizes[module].bits[scheme] for module, scheme in schemes.items())
        return Mix(
            name=name,
            schemes=dict(schemes),
            bits_per_weight=bits / sum(row.elements for row in self._sizes.values()),
            kl_mean=found.end.kl_mean,
            kl_standard_error=found.end.kl_standard_error,
        )


__all__ = ["Allocation", "Mix", "allocate_schemes"]
