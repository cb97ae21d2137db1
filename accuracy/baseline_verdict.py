"""Judge measured layers by their baseline.

A layer is held to four numbers: the relative error of its weight in dB, its largest error in steps,
its noisiest block (damage that the relative error of a large weight hides), and with tokens the
median over tokens of its output's error. All layers together are held to the means of the errors of
weights and of outputs, the hidden states to their error after each block, the end to KL and top-1
agreement. Tolerances are one-sided: what got better passes, and is told.

Arithmetic of fewer bits than the baseline's adds errors of its own to outputs; they are allowed for
as independent ones, in quadrature (`ARITHMETIC`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from quantload.accuracy.baseline import ABSENT, Baseline, LayerBaseline
from quantload.accuracy.baseline_tolerances import LAYER_SIGMAS, MEAN_SIGMAS, Tolerances

_STEPS_MORE, _BLOCK_MORE = 0.05, 4.0
_TINY = 1e-12  # a relative error that counts as none
_LARGEST_DB = 999.0


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """What arithmetic of a dtype adds to errors of outputs.

    Measured for bfloat16 on SmolLM2-135M: in quadrature 0.0020 to an output's relative error where
    only weights are quantized (W8A16) and 0.0038 where roundings of inputs flip too (W8A8), medians
    over 210 layers; 0.011 and 0.013 to that of the hidden states after a block; 0.0023 and 0.0049
    nats to the mean KL. Those of float16 follow from its eps, an eighth of that of bfloat16.

    Args:
        output: To the relative error of a layer's output, in quadrature.
        block: To that of the hidden states after a block, in quadrature.
        kl: To the mean KL, in nats.
    """

    output: float
    block: float
    kl: float


FEWEST_TOKENS = 128  # that outputs are judged by in another dtype than the baseline's
ARITHMETIC = {
    "float32": Arithmetic(output=1e-6, block=1e-5, kl=1e-6),
    "float16": Arithmetic(output=2.0**-11, block=2.0**-9, kl=1e-4),
    "bfloat16": Arithmetic(output=2.0**-8, block=2.0**-6, kl=5e-3),
}


@dataclass(frozen=True, kw_only=True)
class LayerVerdict:
    """A layer that was measured.

    Args:
        name: Checkpoint name.
        before: The baseline's numbers.
        now: The candidate's.
        change_db: By how much its worst gated error grew, in dB.
        tolerance_db: By how much it may.
        failure: What is too much; "" if nothing is.
    """

    name: str
    before: LayerBaseline
    now: LayerBaseline
    change_db: float
    tolerance_db: float
    failure: str = ""

    @property
    def is_better(self) -> bool:
        """True if the error fell by more than the tolerance."""
        return not self.failure and self.change_db < -self.tolerance_db


@dataclass(frozen=True, kw_only=True)
class Gate:
    """Something that all layers together are held to.

    Args:
        what: "mean of weights", "mean of outputs", "blocks", or a metric at the end.
        change: By how much it grew, in its own unit.
        allowed: By how much it may.
        text: The sentence.
    """

    what: str
    change: float
    allowed: float
    text: str

    @property
    def failed(self) -> bool:
        """True if it grew by more."""
        return not self.change <= self.allowed


@dataclass(frozen=True, kw_only=True)
class BaselineReport:
    """What a check found.

    Args:
        layers: The layers that were measured: those with another digest, or all.
        unchanged: How many have the digest of the baseline.
        added: Layers that the baseline does not have.
        removed: Layers that the candidate does not have.
        gates: What is judged beside single layers: means, blocks, the end.
        config: What of the candidate's config.json changes what the model computes, in sentences.
        notes: What limits this check, in sentences.
        baseline: What the candidate was held to.
        now: A baseline of the candidate as it is.
    """

    layers: tuple[LayerVerdict, ...] = ()
    unchanged: int = 0
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    gates: tuple[Gate, ...] = ()
    config: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    baseline: Baseline | None = field(default=None, repr=False)
    now: Baseline | None = field(default=None, repr=False)

    @property
    def failures(self) -> tuple[str, ...]:
        """What fails beside single layers."""
        return tuple(gate.text for gate in self.gates if gate.failed)

    @property
    def passed(self) -> bool:
        """True if nothing is worse than it may be, and no layer came or went."""
        broken = any(layer.failure for layer in self.layers)
        return not (broken or self.failures or self.config or self.added or self.removed)

    @property
    def changed(self) -> tuple[LayerVerdict, ...]:
        """Layers whose values are not those of the baseline."""
        return tuple(v for v in self.layers if v.before.candidate != v.now.candidate)

    @property
    def better(self) -> tuple[LayerVerdict, ...]:
        """Layers that are better by more than their tolerance."""
        return tuple(layer for layer in self.layers if layer.is_better)

    @property
    def estimated(self) -> tuple[LayerVerdict, ...]:
        """Layers whose errors were estimated from a sketch of the reference."""
        return tuple(layer for layer in self.layers if layer.now.estimate_db is not None)

    def worst(self, count: int = 10) -> list[LayerVerdict]:
        """Return the layers that grew most, those that fail first."""
        ranked = sorted(self.layers, key=lambda v: (bool(v.failure), v.change_db), reverse=True)
        return ranked[:count]


def judge(
    baseline: Baseline,
    now: Mapping[str, LayerBaseline],
    *,
    dtype: str = "float32",
    outputs: bool = True,
) -> BaselineReport:
    """Hold measured layers to a baseline.

    Args:
        baseline: What they are held to.
        now: From `measured_layers`, with `known` the baseline's layers.
        dtype: In which both models ran.
        outputs: Judge errors of outputs, where there are any.
    """
    shared = [name for name in baseline.layers if name in now]
    measured = [name for name in shared if now[name] is not baseline.layers[name]]
    added_by_arithmetic = added_by(baseline, dtype).output if outputs else None
    verdicts = tuple(
        _verdict(
            name,
            baseline.layers[name],
            now[name],
            baseline.tolerances.of_layer(name),
            added_by_arithmetic,
        )
        for name in measured
    )
    return BaselineReport(
        layers=verdicts,
        unchanged=sum(baseline.layers[name].candidate == now[name].candidate for name in shared),
        added=tuple(name for name in now if name not in baseline.layers),
        removed=tuple(name for name in baseline.layers if name not in now),
        gates=tuple(_about_means(baseline, now, shared, added_by_arithmetic)) if measured else (),
        baseline=baseline,
    )


def change_db(before: float, now: float) -> float:
    """Return by how many dB a relative error grew; 0 for two that are none."""
    if max(before, now) <= _TINY:
        return 0.0
    if min(before, now) <= _TINY:
        return math.copysign(_LARGEST_DB, now - before)
    return 20 * math.log10(now / before)


def beyond(before: float, now: float, more: float) -> float:
    """Return by how many dB an error lies outside of what arithmetic makes of another.

    Args:
        before: The other.
        now: The error.
        more: What arithmetic adds, in quadrature.
    """
    above = change_db(math.hypot(before, more), now)
    return above if above > 0 else min(change_db(before, now), 0.0)


def added_by(baseline: Baseline, dtype: str) -> Arithmetic:
    """Return what the arithmetic of a check adds to what that of the baseline did."""
    then, now = (ARITHMETIC.get(name, ARITHMETIC["bfloat16"]) for name in (baseline.dtype, dtype))
    least = ARITHMETIC["float32"]

    def more(one: float, other: float, floor: float) -> float:
        return max(math.sqrt(max(other**2 - one**2, 0.0)), floor)

    return Arithmetic(
        output=more(then.output, now.output, least.output),
        block=more(then.block, now.block, least.block),
        kl=max(now.kl - then.kl, least.kl),
    )


def _verdict(
    name: str,
    before: LayerBaseline,
    now: LayerBaseline,
    tolerances: Tolerances,
    added_by_arithmetic: float | None,
) -> LayerVerdict:
    grew = change_db(before.weight, now.weight)
    tolerance = max(tolerances.weight_db, LAYER_SIGMAS * (now.estimate_db or 0.0))
    failures = []
    if grew > tolerance:
        about = "" if now.estimate_db is None else "about "
        how = "" if now.estimate_db is None else ", estimated from the sketch"
        failures.append(
            f"weight error {before.weight:.5g} -> {about}{now.weight:.5g} ({grew:+.3f} dB, may "
            f"grow by {tolerance:.3g} dB{how})"
        )
    for what, old, new, limit in _bounds(before, now, tolerances):
        if new > limit:
            failures.append(f"{what} {old:.3g} -> {new:.3g}, limit {limit:.3g}")
    medians = before.output_median, now.output_median
    failures += _unmeasured(before, now, runs=added_by_arithmetic is not None)
    if medians[0] is not None and medians[1] is not None and added_by_arithmetic is not None:
        of_output = change_db(math.hypot(medians[0], added_by_arithmetic), medians[1])
        if of_output > tolerances.output_median_db:
            failures.append(
                f"output error (median of tokens) {before.output_median:.5g} -> "
                f"{now.output_median:.5g} ({of_output:+.2f} dB, may grow by "
                f"{tolerances.output_median_db:g} dB)"
            )
            if grew <= tolerance:
                grew, tolerance = of_output, tolerances.output_median_db
    return LayerVerdict(
        name=name,
        before=before,
        now=now,
        change_db=grew,
        tolerance_db=tolerance,
        failure="; ".join(failures),
    )


def _unmeasured(before: LayerBaseline, now: LayerBaseline, *, runs: bool) -> Iterator[str]:
    """Yield changes that fail since no error says what they cost."""
    if before.reference == ABSENT and before.candidate != now.candidate:
        yield "its values changed, and the reference has none to measure them by"
    is_seen = runs and before.output_median is not None and now.output_median is not None
    if before.input != now.input and not is_seen:
        yield (
            f"its input scale changed from {before.input} to {now.input}, and its output was not "
            "measured"
        )


def _bounds(
    before: LayerBaseline, now: LayerBaseline, tolerances: Tolerances
) -> Iterator[tuple[str, float, float, float]]:
    """Yield (what, before, now, limit) of the numbers that show damage to a few elements."""
    if before.steps is not None and now.steps is not None:
        grown = before.steps * 10 ** (tolerances.steps_db / 20)
        limit = max(grown, before.steps + _STEPS_MORE)
        yield "largest error in steps", before.steps, now.steps, limit
    if before.block is not None and now.block is not None:
        limit = before.block * 10 ** (tolerances.noise_db / 10) + _BLOCK_MORE
        yield "noise of the worst block", before.block, now.block, limit


def _about_means(
    baseline: Baseline,
    now: Mapping[str, LayerBaseline],
    shared: list[str],
    added_by_arithmetic: float | None,
) -> Iterator[Gate]:
    """Judge the means over the layers, which a small slip of all of them moves."""
    lossy = [name for name in shared if baseline.layers[name].weight > _TINY]
    changes = [change_db(baseline.layers[name].weight, now[name].weight) for name in lossy]
    spread = math.hypot(*(now[name].estimate_db or 0.0 for name in lossy)) / max(len(lossy), 1)
    allowed = max(baseline.tolerances.weight_mean_db, MEAN_SIGMAS * spread)
    yield _mean_gate("weight", changes, allowed)
    if added_by_arithmetic is None:
        return
    changes = [
        0.0  # was not measured
        if now[name] is baseline.layers[name]
        else change_db(math.hypot(before, added_by_arithmetic), after)
        for name in shared
        if (before := baseline.layers[name].output) and (after := now[name].output)
    ]
    if changes:
        yield _mean_gate("output", changes, baseline.tolerances.output_mean_db)


def _mean_gate(what: str, changes: list[float], allowed: float) -> Gate:
    mean = sum(changes) / max(len(changes), 1)
    return Gate(
        what=f"mean of {what}s",
        change=mean,
        allowed=allowed,
        text=f"{what} errors grew by {mean:+.4f} dB in the mean of {len(changes)} layers, may grow "
        f"by {allowed:.3g} dB",
    )


__all__ = [
    "ARITHMETIC",
    "FEWEST_TOKENS",
    "BaselineReport",
    "Gate",
    "LayerVerdict",
    "added_by",
    "beyond",
    "change_db",
    "judge",
]
