"""Run token sequences through a model block by block, so that it is never wholly in memory.

    once            what lies outside the layers (norms) is loaded and stays; embedding and head
                    stay in the file, see `vocabulary_in_file.py`
    for each layer  its weights are loaded, all sequences go through it, the weights are let go;
                    hidden states wait on the CPU from one layer to the next

Every step is a forward of the model's own code, in which layers that are done let everything
through and the layer in question is handed the hidden states that were kept: masks, positions and
rotary tables stay the model's own. Whether a model can be run so is proven as for the stages of a
pipeline; one that cannot is loaded as a whole, and `why_whole` says why.

Sequences of one length go together; nothing is ever padded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from quantload.accuracy.streaming_end import OutputEnd
from quantload.accuracy.streaming_load import BlockLoader, block_of, give_back_memory
from quantload.accuracy.streaming_step import DoneLayer, LayerStep, Reached
from quantload.accuracy.streaming_tokens import batches_of, check_sequences
from quantload.accuracy.vocabulary_in_file import leave_in_file
from quantload.errors import MissingTensor, ModelError
from quantload.layers.experts_layout import holds_experts
from quantload.layers.experts_proof import fused_experts
from quantload.layers.experts_surgery import note_on
from quantload.layers.meta_model import TransformersModel, build_on_meta, output_head, tied_names
from quantload.layers.pipeline import PipelineCut, find_cut
from quantload.layers.preparation import PreparedModel, prepare, without_inputs
from quantload.layers.probe import probe
from quantload.layers.replacement import put
from quantload.layers.siblings import is_plain_linear
from quantload.layers.surgery import finish
from quantload.loader.assign import assign, planned
from quantload.loader.places import Job
from quantload.loader.source import Source
from quantload.mappers.facts import missing_layers
from quantload.mappers.mapper import WeightMapper
from quantload.progress import Progress

Watch = Callable[[Mapping[str, nn.Module]], AbstractContextManager[object]]


@dataclass(frozen=True)
class Block:
    """A part of a model that is loaded, while it is the turn of this part.

    Args:
        path: Path of the layer; "" for a model that is loaded as a whole.
        modules: Modules by path. Modules outside the layers come with the first layer, those after
            them (the last norm, the head) with the last.
        step: Runs a batch [B, T] through the block, from the hidden states that the block before
            returned for it (None for the first), and returns what the next one is given, [B, T, H]
            on the CPU; the last returns the logits [B, T, V], or None where nobody asked for them.
    """

    path: str
    modules: Mapping[str, nn.Module]
    step: Callable[[Tensor, Tensor | None], Tensor | None]


@dataclass(frozen=True)
class StreamedModel:
    """A model that is run block by block; see the top of this file.

    Args:
        source: Its checkpoint.
        prepared: On the meta device; taken apart while it runs, which it does once.
        device: Where it runs.
        cut: Where its layers are; None if it is loaded as a whole.
        why_whole: Why it is; "" if it is not.
        blind: Experts whose inputs cannot be watched, with the reason, by path.
        jobs: Where each tensor goes.
    """

    source: Source
    prepared: PreparedModel
    device: torch.device
    cut: PipelineCut | None
    why_whole: str
    blind: Mapping[str, str]
    jobs: Sequence[Job] = field(default_factory=list, repr=False)

    @property
    def model(self) -> TransformersModel:
        """The model, of which only a part is loaded at a time."""
        return self.prepared.model

    @property
    def mapper(self) -> WeightMapper:
        """From checkpoint names to places of the model."""
        return self.prepared.mapper

    @property
    def num_blocks(self) -> int:
        """Number of parts that are in memory one after the other."""
        return 1 if self.cut is None else self.cut.count

    @torch.no_grad()
    def run(
        self,
        sequences: Sequence[Sequence[int]],
        watch: Watch,
        progress: Progress,
        *,
        batch_tokens: int = 2048,
    ) -> None:
        """Run token sequences through the model; results are what `watch` sees.

        Args:
            sequences: Token ids.
            watch: Called for each block with its modules by path; what it returns is open while all
                sequences run through that block. Modules outside the layers come with the first
                layer, those after them (the last norm, the head) with the last.
            progress: Advances by blocks.
            batch_tokens: Sequences of one length go together up to this many tokens.

        Raises:
            ConfigError: A token id is none of the vocabulary, or a sequence is too long.
            ModelError: The model cannot run them.
        """
        check_sequences(self.model, sequences)
        batches = batches_of(sequences, batch_tokens)
        states: list[Tensor | None] = [None] * len(batches)
        progress.start("blocks", total=self.num_blocks, unit="blocks")
        for block in self.blocks():
            with watch(block.modules):
                for place, ids in enumerate(batches):
                    states[place] = block.step(ids, states[place])
            progress.advance(1, note=block.path)
        progress.finish()

    def blocks(self, *, with_logits: bool = False, apart: bool = False) -> Iterator[Block]:
        """Load one part of the model after the other; each is let go of before the next comes.

        Args:
            with_logits: Have the last block return logits.
            apart: Leave what follows the layers out of the last block, which returns hidden states
                as all others do: `end` goes on with them, some tokens at a time. Of a model that is
                loaded as a whole the one block returns logits.
        """
        if self.cut is None:
            yield self._whole(with_logits=with_logits or apart)
            return
        yield from self._layers(self.cut, with_logits=with_logits, apart=apart)

    # -- as a whole ----------------------------------------------------------------------------

    def _whole(self, *, with_logits: bool) -> Block:
        tied = self.prepared.tied
        done = assign(self.model, self.source, self.mapper, device=self.device, tied=tied)
        finish(self.model, self.device, untied=done.untied)

        def step(ids: Tensor, _: Tensor | None) -> Tensor | None:
            logits = self._forward(ids)
            return logits if with_logits else None

        return Block("", dict(self.model.named_modules()), step)

    # -- block by block ------------------------------------------------------------------------

    def _layers(self, cut: PipelineCut, *, with_logits: bool, apart: bool) -> Iterator[Block]:
        layers = self._list(cut)
        waiting = list(layers)
        for number, layer in enumerate(waiting):
            layers[number] = DoneLayer(layer)
        self._load_outside(cut, with_head=with_logits or apart)
        outside = self._outside(cut)
        head = None if with_logits else self._head(cut)
        for number in range(cut.count):
            layer, path = waiting[number], f"{cut.layers}.{number}"
            self._load_layer(cut, layer, number)
            layers[number] = layer
            modules = {f"{path}.{name}": module for name, module in layer.named_modules() if name}
            modules |= outside["first"] if number == 0 else {}
            modules |= outside["last"] if number == cut.count - 1 and not apart else {}
            following = layers[number + 1] if number + 1 < cut.count else None
            step = _Stepper(self, layer, following, head, apart=apart)
            yield Block(path, modules, step)
            layers[number] = DoneLayer(layer, returned=step.returned)
            waiting[number] = nn.Identity()
            step.let_go()
            modules.clear()  # whoever still has the block: its weights go before the next come
            del layer, modules, step
            give_back_memory()

    def end(self) -> OutputEnd:
        """Return what follows the layers, after all blocks have run that were asked for `apart`."""
        assert self.cut is not None, "a model that is loaded as a whole has no end apart"
        last = self._list(self.cut)[-1]
        assert isinstance(last, DoneLayer), "all blocks have run"
        return OutputEnd(self.model, last, self.cut.head, self._forward, self.device)

    def _list(self, cut: PipelineCut) -> nn.ModuleList:
        layers = self.model.get_submodule(cut.layers)
        assert isinstance(layers, nn.ModuleList), f"{cut.layers} is a list of layers"
        return layers

    def _head(self, cut: PipelineCut) -> nn.Module | None:
        return self.model.get_submodule(cut.head) if cut.head else None

    def _outside(self, cut: PipelineCut) -> dict[str, dict[str, nn.Module]]:
        """Return the modules outside the layers, which come with the first or the last of them."""
        after = (*cut.after, *([cut.head] if cut.head else []))
        found: dict[str, dict[str, nn.Module]] = {"first": {}, "last": {}}
        for path, module in self.model.named_modules():
            if not f"{path}.".startswith(f"{cut.layers}."):
                is_after = any(f"{path}.".startswith(f"{one}.") for one in after)
                found["last" if is_after else "first"][path] = module
        return found

    def _loader(self, cut: PipelineCut) -> BlockLoader:
        return BlockLoader(self.source, self.prepared, self.device, cut, self.jobs)

    def _load_outside(self, cut: PipelineCut, *, with_head: bool) -> None:
        vocabulary = leave_in_file(
            self.model,
            self.source,
            self.jobs,
            self.prepared.tied,
            embedding=cut.embedding,
            head=cut.head,
            layers=cut.layers,
            device=self.device,
        )
        self._loader(cut).outside(vocabulary, with_head=with_head)

    def _load_layer(self, cut: PipelineCut, layer: nn.Module, number: int) -> None:
        self._loader(cut).layer(layer, number)

    def _forward(self, ids: Tensor) -> Tensor | None:
        """Run the model; returns its logits, or None if it ended before or has none."""
        tokens = ids.to(self.device)
        inputs = {"input_ids": tokens}
        if self.model.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = tokens
        with suppress(Reached):
            logits: Tensor | None = getattr(self.model(**inputs, use_cache=False), "logits", None)
            return logits
        return None


class _Stepper:
    """Runs batches through one layer; see `Block`."""

    def __init__(
        self,
        streamed: StreamedModel,
        layer: nn.Module,
        following: nn.Module | None,
        head: nn.Module | None,
        *,
        apart: bool,
    ) -> None:
        self._streamed, self._layer = streamed, layer
        self._following, self._head = following, head
        self._ends = apart and following is None
        self.returned = 0

    @torch.no_grad()
    def __call__(self, ids: Tensor, state: Tensor | None) -> Tensor | None:
        streamed, device = self._streamed, self._streamed.device
        ends, head = self._ends, None if self._ends else self._head
        with LayerStep(self._layer, self._following, head, state, device, ends=ends) as step:
            logits = streamed._forward(ids)
        self.returned = step.returned
        has_logits = self._following is None and head is None and not ends
        return logits if has_logits else step.result

    def let_go(self) -> None:
        """Forget the layer: its turn is over."""
        self._layer = nn.Identity()


def open_streamed(
    source: Source,
    *,
    device: torch.device,
    dtype: torch.dtype,
    round_inputs: bool = False,
    trust_remote_code: bool = False,
) -> StreamedModel:
    """Prepare a checkpoint's model to be run block by block; no weights are read.

    That the checkpoint has all that the model needs, and nothing else, is proven here. Layers run
    one by one; experts become `FusedExperts`, whose inputs can be watched.

    Args:
        source: An open checkpoint, quantized or not.
        device: Where it runs.
        dtype: dtype in which it runs.
        round_inputs: Quantize inputs of layers as the schemes say.
        trust_remote_code: Run modelling code that comes with the checkpoint.

    Raises:
        QuantloadError: As `quantload.load`.
    """
    found = source.checkpoint
    if reason := missing_layers(found.config, found.tensors):
        raise MissingTensor(f"`{found.name}` is incomplete: {reason}")
    model = build_on_meta(
        found.config, found.folder, dtype=dtype, trust_remote_code=trust_remote_code
    )
    cut, why_whole = _cut_of(model)
    schemes = {name: w.scheme for name, w in source.weights.items() if w.scheme is not None}
    prepared = prepare(
        model,
        schemes if round_inputs else without_inputs(schemes),
        source.weights,
        dtype=dtype,
        names=found.tensors,
        fuse=False,
    )
    blind = dict(_watchable_experts(model, dtype))
    jobs = planned(model, source, prepared.mapper, tied=prepared.tied)
    return StreamedModel(source, prepared, device, cut, why_whole, blind, jobs)


def _cut_of(model: TransformersModel) -> tuple[PipelineCut | None, str]:
    """Return where the layers of a model on the meta device are, or why they cannot run alone."""
    try:
        cut = find_cut(model, 1)
    except ModelError as error:
        return None, error.message.partition(": ")[2] or error.message
    for one, two in tied_names(model).items():
        if block_of(one, cut) != block_of(two, cut):
            return None, f"`{one}` and `{two}` are one parameter"
    if reason := _why_not_past_layers(model, cut):
        return None, reason
    head = output_head(model)
    is_known = head is None or is_plain_linear(head)
    return (cut if is_known else replace(cut, head="")), ""


def _why_not_past_layers(model: TransformersModel, cut: PipelineCut) -> str:
    """Say why the model does not run where its layers let hidden states through; "" if it does."""
    layers = model.get_submodule(cut.layers)
    assert isinstance(layers, nn.ModuleList), f"{cut.layers} is a list of layers"
    own = list(layers)
    for number, layer in enumerate(own):
        layers[number] = DoneLayer(layer, returned=cut.returned[number])
    try:
        probe(model, nullcontext)
    except Exception as error:  # noqa: BLE001 - code of models raises anything
        return f"its code asks its layers for more than hidden states: {error}"
    finally:
        for number, layer in enumerate(own):
            layers[number] = layer
    return ""


def _watchable_experts(model: TransformersModel, dtype: torch.dtype) -> Iterator[tuple[str, str]]:
    """Put our experts in the place of the model's own; yields those that stay, with the reason."""
    for path, module in list(model.named_modules()):
        if not holds_experts(module):
            continue
        ours = note_on(module) or fused_experts(module, schemes={}, dtype=dtype, prefix=path)
        if isinstance(ours, str):
            yield path, ours
        else:
            put(model, path, ours)


__all__ = ["StreamedModel", "open_streamed"]
