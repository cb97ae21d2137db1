"""Run two checkpoints of one model side by side, block by block: neither is ever wholly in memory.

For each block of layers the reference's is loaded, then the candidate's, and all tokens go through:

    isolated      every linear layer of the reference hands its input to the candidate's too; where
                  the candidate rounds inputs, the reference's weight gets the rounded one as well,
                  which tells what of the error is the input's
    injected      the candidate's block gets the reference's hidden states: what it adds
    propagated    the candidate's block gets the candidate's own hidden states: what has gathered
    routers       which experts each model chooses on its own hidden states
    end           KL(reference || candidate), top-1 agreement and loss of the next token; logits are
                  computed for some tokens at a time

Experts are compared one by one on the tokens that the reference routed to them; with fewer than 32
tokens an expert's number says little, and with none it has none: it is named, never counted as 0.

A model that cannot be run block by block is loaded as a whole; then both are.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from quantload.accuracy.end_metrics import EndMetrics, EndSums
from quantload.accuracy.output_errors import FEWEST_TOKENS, OutputErrors
from quantload.accuracy.places import checkpoint_names, half_path
from quantload.accuracy.rounded_inputs import rounded_input, rounded_rows
from quantload.accuracy.router_overlap import Choices, RouterOverlap, overlap
from quantload.accuracy.streaming import Block, StreamedModel, open_streamed
from quantload.accuracy.streaming_end import OutputEnd
from quantload.accuracy.streaming_tokens import batches_of, check_sequences
from quantload.errors import NotComparable
from quantload.layers.experts import FusedExperts
from quantload.layers.experts_grouped import Groups
from quantload.layers.experts_layout import holds_experts
from quantload.loader.checkpoint import files_kept_open
from quantload.loader.source import Source
from quantload.progress import Progress

_BATCH_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class OutputComparison:
    """What running both models showed.

    Args:
        isolated: Errors of each layer on the reference's inputs, by checkpoint name; gate and up of
            an expert that are one product have one error.
        isolated_inputs: Of layers whose inputs the candidate rounds, the errors that this alone
            makes: the reference's weight on the rounded input against that on the input as it is.
        injected: Errors of each block on the reference's hidden states, by path.
        propagated: Errors of each block on the candidate's own, by path.
        routers: How often routers chose what they chose in the reference, by path of their experts.
        end: Agreement at the output; None for a model without logits.
        unseen: Experts that no token reached.
        few: Experts that fewer than 32 tokens reached.
        uncompared: Layers and experts of the reference for which the candidate has nothing of the
            same form, so that they have no isolated error.
        why_whole: Why the models were in memory as a whole; "" if they were not.
    """

    isolated: Mapping[str, OutputErrors]
    injected: Mapping[str, OutputErrors]
    propagated: Mapping[str, OutputErrors]
    end: EndMetrics | None
    isolated_inputs: Mapping[str, OutputErrors] = field(default_factory=dict)
    routers: Mapping[str, RouterOverlap] = field(default_factory=dict)
    unseen: tuple[str, ...] = ()
    few: tuple[str, ...] = ()
    uncompared: tuple[str, ...] = ()
    why_whole: str = ""


@files_kept_open()
@torch.no_grad()
def compare_running(  # noqa: PLR0913 - a keyword for each choice of the user
    reference: Source,
    candidate: Source,
    sequences: Sequence[Sequence[int]],
    progress: Progress,
    *,
    device: torch.device,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    isolated_only: bool = False,
) -> OutputComparison:
    """Run token sequences through both checkpoints.

    Args:
        reference: The checkpoint that is taken as right; its inputs are not rounded.
        candidate: The checkpoint that is judged, with inputs rounded as its schemes say.
        sequences: Token ids; every position counts.
        progress: Advances by blocks.
        device: Where both run.
        dtype: dtype in which both run.
        trust_remote_code: Run modelling code that comes with a checkpoint.
        isolated_only: Compare layers on the reference's inputs, nothing else: the candidate's
            hidden states are not computed, which takes a third of the products away.

    Raises:
        ConfigError: A token id is none of the vocabulary, or a sequence is too long.
        NotComparable: The models differ in their blocks, or an output is not finite.
    """
    models = tuple(
        open_streamed(
            source,
            device=device,
            dtype=dtype,
            round_inputs=is_candidate,
            trust_remote_code=trust_remote_code,
        )
        for source, is_candidate in ((reference, False), (candidate, True))
    )
    _check_alike(*models)
    check_sequences(models[0].model, sequences)
    names = checkpoint_names(models[0].source, models[0].mapper)
    batches = batches_of(sequences, _BATCH_TOKENS)
    run = _Run(batches, isolated_only=isolated_only, halved=names.halves)
    progress.start("blocks", total=models[0].num_blocks + 1, unit="blocks")
    ways = [model.blocks(apart=True) for model in models]
    for _ in range(models[0].num_blocks):
        progress.advance(1, note=run.block(*(next(way) for way in ways)))
    for way in ways:
        next(way, None)  # lets go of the last block
    if models[0].cut is not None:
        run.end(*(model.end() for model in models))
    progress.advance(1, note="logits")
    progress.finish()
    found = run.result(models[0].why_whole or models[1].why_whole)
    return _by_checkpoint_name(found, names.whole | names.of_halves)


def _by_checkpoint_name(
    found: OutputComparison, names: Mapping[str, Sequence[str]]
) -> OutputComparison:
    """Rename what is named by paths in the model."""

    def named(errors: Mapping[str, OutputErrors]) -> dict[str, OutputErrors]:
        return {name: one for path, one in errors.items() for name in names.get(path, [path])}

    return replace(
        found,
        isolated=named(found.isolated),
        isolated_inputs=named(found.isolated_inputs),
        unseen=tuple(name for path in found.unseen for name in names.get(path, [path])),
        few=tuple(name for path in found.few for name in names.get(path, [path])),
    )


def _check_alike(reference: StreamedModel, candidate: StreamedModel) -> None:
    counts = reference.num_blocks, candidate.num_blocks
    if counts[0] != counts[1]:
        raise NotComparable(
            f"the reference has `{counts[0]}` blocks, the candidate `{counts[1]}`: "
            f"{reference.why_whole or candidate.why_whole or 'their configs differ'}"
        )
    if (reference.cut is None) != (candidate.cut is None):
        why = reference.why_whole or candidate.why_whole
        raise NotComparable(f"only one of both can be run block by block: {why}")


@dataclass
class _Run:
    """Both models' hidden states, and the errors so far.

    Args:
        batches: [B, T] token ids each.
        isolated_only: The candidate's blocks do not run, only its layers on given inputs.
        halved: Products of experts whose halves are layers of their own, by path.
    """

    batches: Sequence[Tensor]
    isolated_only: bool = False
    halved: Collection[str] = ()
    isolated: dict[str, OutputErrors] = field(default_factory=dict)
    rounded: dict[str, OutputErrors] = field(default_factory=dict)
    injected: dict[str, OutputErrors] = field(default_factory=dict)
    propagated: dict[str, OutputErrors] = field(default_factory=dict)
    routers: dict[str, RouterOverlap] = field(default_factory=dict)
    experts: dict[str, int] = field(default_factory=dict)
    uncompared: dict[str, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._states: list[Tensor | None] = [None] * len(self.batches)
        self._own: list[Tensor | None] = [None] * len(self.batches)
        self._end = EndSums()

    def block(self, reference: Block, candidate: Block) -> str:
        """Run all batches through one block of both; returns its path."""
        choices = Choices(), Choices()
        for place, ids in enumerate(self.batches):
            given, own = self._states[place], self._own[place]
            isolated = self._isolated(reference.modules, candidate.modules)
            with isolated, choices[0].watching(reference.modules):
                expected = reference.step(ids, given)
            if self.isolated_only:
                self._states[place] = self._own[place] = expected
                continue
            with choices[1].watching(candidate.modules):
                got = candidate.step(ids, own)
            self._add_choices(*choices)
            if not reference.path:  # both are in memory as a whole
                self._add_logits(ids, expected, got)
                continue
            assert expected is not None, "hidden states come out of every block"
            assert got is not None, "hidden states come out of every block"
            added = got if _is_same(given, own) else candidate.step(ids, given)
            assert added is not None, "as before"
            self._add(self.injected, reference.path, added, expected)
            self._add(self.propagated, reference.path, got, expected)
            # equal states are one object, so that the next block need not run on both
            self._states[place], self._own[place] = (
                expected,
                expected if _is_same(expected, got) else got,
            )
        return reference.path

    def _add_choices(self, reference: Choices, candidate: Choices) -> None:
        for path, (index, experts) in reference.of.items():
            if path in candidate.of:
                before = self.routers.get(path, RouterOverlap())
                self.routers[path] = before + overlap(index, candidate.of[path][0], experts)

    # -- logits --------------------------------------------------------------------------------

    def end(self, reference: OutputEnd, candidate: OutputEnd) -> None:
        """Go on from the last block of both to their logits."""
        for place, ids in enumerate(self.batches):
            states = self._states[place], self._own[place]
            assert states[0] is not None, "all blocks have run"
            assert states[1] is not None, "all blocks have run"
            if reference.is_per_token(ids) and candidate.is_per_token(ids):
                given = reference.head_inputs(ids, states[0])
                own = candidate.head_inputs(ids, states[1])
                for rows, tokens in reference.parts(ids):
                    some = ids[rows, tokens]
                    with self._isolated(reference.modules, candidate.modules):
                        expected = reference.logits(some, given[rows, tokens])
                    if self.isolated_only:
                        continue
                    got = candidate.logits(some, own[rows, tokens])
                    following = ids[rows, tokens.start + 1 : tokens.stop + 1]
                    self._add_part(expected, got, following)
                continue
            with self._isolated(reference.modules, candidate.modules):
                whole = reference.all_logits(ids, states[0])
            if self.isolated_only:
                continue
            self._add_logits(ids, whole, candidate.all_logits(ids, states[1]))

    def _add_logits(self, ids: Tensor, expected: Tensor | None, got: Tensor | None) -> None:
        if expected is not None and got is not None:
            self._add_part(expected, got, ids[:, 1:])

    def _add_part(self, expected: Tensor, got: Tensor, following: Tensor) -> None:
        """Add logits [B, T, V] of both and the tokens [B, T or T - 1] that come next."""
        if expected.shape != got.shape:
            raise NotComparable(
                f"vocabularies differ: {expected.shape[-1]} logits against {got.shape[-1]}"
            )
        for name, logits in (("reference", expected), ("candidate", got)):
            if not all(bool(end.isfinite()) for end in torch.aminmax(logits)):
                raise NotComparable(f"logits of the {name} are not finite")
        for row, one, other in zip(following, expected, got, strict=True):
            self._end.add_part(one, other, row)

    def _add(
        self, errors: dict[str, OutputErrors], path: str, candidate: Tensor, reference: Tensor
    ) -> None:
        found = errors.setdefault(path, OutputErrors())
        found.add(candidate, reference)
        # a value that is not finite makes its sum so
        for name, total in (("reference", found.sums.signal), ("candidate", found.sums.noise)):
            if not math.isfinite(total):
                raise NotComparable(f"`{path}` of the {name} gives values that are not finite")

    # -- layers on equal inputs ----------------------------------------------------------------

    @contextmanager
    def _isolated(
        self, reference: Mapping[str, nn.Module], candidate: Mapping[str, nn.Module]
    ) -> Iterator[None]:
        handles: list[Any] = []
        for path, module in reference.items():
            other = candidate.get(path)
            is_experts = isinstance(module, FusedExperts) or holds_experts(module)
            if not is_experts and (not _is_linear(module) or _is_inside(path, reference)):
                continue
            if isinstance(module, FusedExperts) and isinstance(other, FusedExperts):
                handles += self._expert_hooks(path, module, other)
            elif not is_experts and other is not None and _is_linear(other):
                handles.append(module.register_forward_hook(self._linear_hook(path, other)))
            else:
                self.uncompared[path] = None
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _linear_hook(self, path: str, other: nn.Module):  # type: ignore[no-untyped-def]  # noqa: ANN202
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if not inputs:
                return
            self._add(self.isolated, path, other(inputs[0]), output)
            rounded = rounded_input(other, inputs[0])
            if rounded is not None:  # past the hooks of the reference's layer
                self._add(self.rounded, path, module.forward(rounded), output)

        return hook

    def _expert_hooks(self, path: str, module: FusedExperts, other: FusedExperts) -> Iterator[Any]:
        for projection in module.layout.projections:
            product = module.get_submodule(f"{projection.leaf}_experts")
            twin = other.get_submodule(f"{projection.leaf}_experts")
            names = [f"{path}.{number}.{projection.leaf}" for number in module.experts]
            for name in names:
                self.experts.setdefault(name, 0)
            yield product.register_forward_hook(self._expert_hook(names, twin))

    def _expert_hook(self, names: Sequence[str], twin: nn.Module):  # type: ignore[no-untyped-def]  # noqa: ANN202
        def hook(module: nn.Module, inputs: tuple[Tensor, Groups], output: Tensor) -> None:
            rows, groups = inputs
            got = twin(rows, groups)
            rounded = rounded_rows(twin, rows, groups)
            alone = None if rounded is None else module.forward(rounded, groups)
            start = 0
            for name, count in zip(names, groups.counts, strict=True):
                part = slice(start, start + count)
                start += count
                self.experts[name] += count
                if count:
                    self._add_expert(self.isolated, name, got[part], output[part])
                if count and alone is not None:
                    self._add_expert(self.rounded, name, alone[part], output[part])

        return hook

    def _add_expert(
        self, errors: dict[str, OutputErrors], name: str, candidate: Tensor, reference: Tensor
    ) -> None:
        """Add outputs [S, N] of an expert; gate and up are halves of one product."""
        if name not in self.halved:
            self._add(errors, name, candidate, reference)
            return
        halves = (x.chunk(2, dim=-1) for x in (candidate, reference))
        for number, (one, other) in enumerate(zip(*halves, strict=True)):
            self._add(errors, half_path(name, number), one, other)

    def result(self, why_whole: str) -> OutputComparison:
        """Return what was found."""
        counts = self.experts.items()
        return OutputComparison(
            isolated=self.isolated,
            isolated_inputs=self.rounded,
            routers=self.routers,
            injected=self.injected,
            propagated=self.propagated,
            end=self._end.metrics(),
            unseen=tuple(name for name, count in counts if not count),
            few=tuple(name for name, count in counts if 0 < count < FEWEST_TOKENS),
            uncompared=tuple(self.uncompared),
            why_whole=why_whole,
        )


def _is_same(one: Tensor | None, other: Tensor | None) -> bool:
    """True if both are nothing, or hold equal values."""
    if one is None or other is None:
        return one is other
    return one is other or torch.equal(one, other)


def _is_linear(module: nn.Module) -> bool:
    """True if the module maps `in_features` to `out_features`, whatever its class."""
    return hasattr(module, "in_features") and hasattr(module, "out_features")


def _is_inside(path: str, modules: Mapping[str, nn.Module]) -> bool:
    """True if a module is a part of a layer of ours, or of experts."""
    outer, _, _ = path.rpartition(".")
    while outer:
        holder = modules.get(outer)
        if holder is not None and (isinstance(holder, FusedExperts) or _is_linear(holder)):
            return True
        outer, _, _ = outer.rpartition(".")
    return False


__all__ = ["OutputComparison", "compare_running"]
