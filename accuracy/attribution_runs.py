"""Run many variants of two models side by side, block by block, in one pass over their weights.

A variant is the reference (or the candidate) with one unit exchanged for the other's. Until the
blocks of its unit come it is what its base is, and costs nothing; in them it runs by itself, on the
hidden states of its base; after them it goes on with its own hidden states, many variants at a
time, along the batch, where that gives the same bits. So each variant costs the blocks behind its
unit, weights are loaded once, and in memory are one block of each model and the hidden states.

    KL     KL(reference || variant) of each position, at the output
    error  of the outputs of the exchanged modules, on the inputs that the base gives them

Positions of all variants are those of the same tokens: differences of variants are paired.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from quantload.accuracy.attribution_exchange import Exchange, Mode
from quantload.accuracy.attribution_units import Unit
from quantload.accuracy.output_errors import OutputErrors
from quantload.accuracy.reference_output import ReferenceOutput
from quantload.accuracy.streaming import Block, StreamedModel
from quantload.errors import ModelError
from quantload.progress import Progress

_STEP_TOKENS = 2048  # that go through a block at a time
_LOGITS_BYTES = 1 << 28  # of logits that are there at a time, or of one variant

Base = Literal["reference", "candidate"]


@dataclass(frozen=True)
class Variant:
    """A model of which one unit is exchanged.

    Args:
        base: Whose blocks run.
        unit: What is exchanged for that of the other model; None runs the base as it is.
        mode: "noise" keeps the unit but adds noise to the outputs of its modules: of each token,
            of the norm of the error that the exchange would make, in a random direction. "nothing"
            exchanges the unit for itself: what that changes is a fault of the measurement.
    """

    base: Base
    unit: Unit | None
    mode: Mode = "swap"

    @property
    def first(self) -> float:
        """Number of the block where it leaves its base; infinity for a base."""
        return math.inf if self.unit is None else self.unit.first

    @property
    def last(self) -> float:
        """Number of the last block in which something is exchanged."""
        return math.inf if self.unit is None else self.unit.last


CANDIDATE = Variant("candidate", None, "nothing")


@dataclass
class Measured:
    """What a variant showed.

    Args:
        kl: KL(reference || variant) of each position, float64 in nats, a batch each.
        errors: Of the outputs of the exchanged modules, by path; only of those that are exchanged
            in the reference.
    """

    kl: list[Tensor] = field(default_factory=list)
    errors: dict[str, OutputErrors] = field(default_factory=dict)

    @property
    def positions(self) -> Tensor:
        """KL of each position, [T] float64; infinity where the output is no number."""
        return torch.cat(self.kl)


@torch.no_grad()
def run_variants(
    reference: StreamedModel,
    candidate: StreamedModel,
    variants: Sequence[Variant],
    batches: Sequence[Tensor],
    progress: Progress,
    *,
    phase: str = "runs",
    seed: int = 0,
) -> dict[Variant, Measured]:
    """Run all variants.

    Args:
        reference: Not run yet; the outputs of all variants are held against its outputs.
        candidate: Not run yet.
        variants: What is run.
        batches: [B, T] token ids each.
        progress: Advances by the runs of a block with one batch of one variant.
        phase: What the progress is of.
        seed: Of the noise.

    Raises:
        NotComparable: Outputs of the reference are not finite, or vocabularies differ.
        ModelError: The model has no logits.
    """
    found = {variant: Measured() for variant in variants}
    models = reference, candidate
    chains = [_Chain("reference", models, found, len(batches), seed)]
    if any(variant.base == "candidate" for variant in variants):
        chains.append(_Chain("candidate", models[::-1], found, len(batches), seed))
    count = reference.num_blocks
    total = sum(chain.num_runs(number) for chain in chains for number in range(count))
    progress.start(phase, total=total * len(batches), unit="runs")
    pairs = zip(*(model.blocks(with_logits=True) for model in models), strict=True)
    for number, blocks in enumerate(pairs):
        own = dict(zip(("reference", "candidate"), blocks, strict=True))
        for place, ids in enumerate(batches):
            output: ReferenceOutput | None = None
            for chain in chains:
                step = _Step(own[chain.base], number, place, ids, number == count - 1)
                output = chain.run(step, output)
                progress.advance(chain.num_runs(number), note=blocks[0].path)
    progress.finish()
    return found


# -- one base and its variants ---------------------------------------------------------------------


@dataclass(frozen=True)
class _Step:
    """One batch through one block.

    Args:
        block: The block of the base.
        number: Its number.
        place: Number of the batch.
        ids: [B, T].
        is_last: True if logits come out of it.
    """

    block: Block
    number: int
    place: int
    ids: Tensor
    is_last: bool


class _Chain:
    """A base, its variants and their hidden states.

    Args:
        base: Whose blocks run.
        models: The base and the other model.
        found: What all variants show; only those of this base are run here.
        num_batches: How many batches there are.
        seed: Of the noise.
    """

    def __init__(
        self,
        base: Base,
        models: tuple[StreamedModel, StreamedModel],
        found: Mapping[Variant, Measured],
        num_batches: int,
        seed: int,
    ) -> None:
        self.base = base
        self._own, self._other = (model.model for model in models)
        self._itself = Variant(base, None, "nothing")
        self._found = {variant: found[variant] for variant in found if variant.base == base}
        self._variants = [v for v in self._found if v.unit is not None]
        self._states: list[dict[Variant, Tensor]] = [{} for _ in range(num_batches)]
        self._seed = seed
        self._couples = couples_tokens(models[0])
        self._batches: dict[torch.Size, bool] = {}  # whether variants go along the batch, by shape
        self._checked: dict[torch.Size, int] = {}  # number of the block where that was seen

    def num_runs(self, number: int) -> int:
        """Return how many variants run in a block, the base included."""
        return 1 + sum(variant.first <= number for variant in self._variants)

    def run(self, step: _Step, output: ReferenceOutput | None) -> ReferenceOutput | None:
        """Run a batch of the base and of all variants through a block.

        Args:
            step: What is run.
            output: The outputs of the reference at the last block, if they are known.

        Returns:
            The outputs of the reference at the last block.
        """
        states = self._states[step.place]
        alone = [v for v in self._variants if v.first <= step.number <= v.last]
        rest = [v for v in self._variants if v.last < step.number]
        result = _result(step.block.step(step.ids, states.get(self._itself)))
        if step.is_last and output is None:
            output = ReferenceOutput(result)
        after: dict[Variant, Tensor] = {}
        self._keep(self._itself, result, after, output)
        for variant in alone:
            given = states.get(variant, states.get(self._itself))
            with self._exchanged(variant, step):
                changed = _result(step.block.step(step.ids, given))
            self._keep(variant, changed, after, output)
        for variants in self._chunks(rest, step, output):
            self._check_batching(variants, step, result)
            for variant, changed in zip(variants, self._together(variants, step), strict=True):
                self._keep(variant, changed, after, output)
        self._states[step.place] = after
        return output

    def _keep(
        self,
        variant: Variant,
        result: Tensor,
        after: dict[Variant, Tensor],
        output: ReferenceOutput | None,
    ) -> None:
        if output is None:
            after[variant] = result
        elif variant in self._found:
            self._found[variant].kl.append(output.kl(result))

    def _chunks(
        self, variants: Sequence[Variant], step: _Step, output: ReferenceOutput | None
    ) -> Iterator[Sequence[Variant]]:
        tokens = _STEP_TOKENS
        if output is not None:
            tokens = min(tokens, _LOGITS_BYTES // (4 * output.vocabulary))
        each = max(1, tokens // step.ids.numel())
        for start in range(0, len(variants), each):
            yield variants[start : start + each]

    def _together(self, variants: Sequence[Variant], step: _Step) -> Iterator[Tensor]:
        """Yield what variants give in which nothing is exchanged here, one after the other."""
        states = self._states[step.place]
        if len(variants) > 1 and self._batches.get(step.ids.shape, True):
            yield from self._along_the_batch([states[variant] for variant in variants], step)
            return
        for variant in variants:
            yield _result(step.block.step(step.ids, states[variant]))

    def _along_the_batch(self, states: Sequence[Tensor], step: _Step) -> Sequence[Tensor]:
        ids = step.ids.repeat(len(states), 1)
        result = _result(step.block.step(ids, torch.cat(list(states))))
        return torch.split(result, step.ids.shape[0])

    def _check_batching(self, variants: Sequence[Variant], step: _Step, alone: Tensor) -> None:
        """See once a block whether the base gives the same bits among others as by itself.

        Products of few rows are summed in another order; and what would then be seen is not what
        was exchanged.
        """
        states, shape = self._states[step.place], step.ids.shape
        if len(variants) < 2 or not self._batches.setdefault(shape, not self._couples):
            return
        if self._checked.get(shape) == step.number:
            return
        self._checked[shape] = step.number
        rows = [states[variant] for variant in (*variants[1:], self._itself)]
        self._batches[shape] = torch.equal(self._along_the_batch(rows, step)[-1], alone)

    @contextmanager
    def _exchanged(self, variant: Variant, step: _Step) -> Iterator[None]:
        assert variant.unit is not None, "bases have nothing to exchange"
        is_measured = step.number == variant.unit.first and self.base == "reference"
        errors = self._found[variant].errors if is_measured else None
        seed = self._seed + step.place  # the same noise wherever it is added again
        exchange = Exchange(self._own, self._other, variant.mode, errors, seed)
        try:
            for site in variant.unit.sites:
                exchange.put(site)
            yield
        finally:
            exchange.undo()


def _result(result: Tensor | None) -> Tensor:
    if result is None:
        raise ModelError("the model gives no logits: KL needs a language model with an output head")
    return result


def couples_tokens(model: StreamedModel) -> bool:
    """True if the scale of an input depends on all tokens that go through a layer together."""
    schemes = (weight.scheme for weight in model.source.weights.values())
    inputs = (scheme.input for scheme in schemes if scheme is not None)
    return any(i is not None and i.dynamic and i.granularity == "tensor" for i in inputs)


__all__ = [
    "CANDIDATE",
    "Base",
    "Measured",
    "Variant",
    "couples_tokens",
    "run_variants",
]
