"""Run token sequences through a model block by block, so that it is never wholly in memory.

    once            what lies outside the layers (embedding, norms) is loaded and stays
    for each layer  its weights are loaded, all sequences go through it, the weights are let go;
                    hidden states wait on the CPU from one layer to the next

Every step is a forward of the model's own code, in which layers that are done let everything
through and the layer in question is handed the hidden states that were kept: masks, positions and
rotary tables stay the model's own. Whether a model can be run so is proven as for the stages of a
pipeline; one that cannot is loaded as a whole, and `why_whole` says why.

Sequences of one length go together; nothing is ever padded.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from quantload.accuracy.streaming_step import DoneLayer, HeadInput, LayerStep, Reached
from quantload.accuracy.streaming_tokens import batches_of, check_sequences
from quantload.errors import MissingTensor, ModelError
from quantload.layers.experts_layout import holds_experts
from quantload.layers.experts_proof import fused_experts
from quantload.layers.experts_surgery import note_on
from quantload.layers.meta_model import TransformersModel, build_on_meta, output_head, tied_names
from quantload.layers.pipeline import PipelineCut, find_cut
from quantload.layers.preparation import PreparedModel, prepare, without_inputs
from quantload.layers.replacement import put
from quantload.layers.siblings import is_plain_linear
from quantload.layers.surgery import finish
from quantload.loader.assign import assign, planned
from quantload.loader.places import Job, RankShare
from quantload.loader.source import Source
from quantload.mappers.facts import missing_layers
from quantload.mappers.mapper import Target, WeightMapper
from quantload.progress import Progress

Watch = Callable[[Mapping[str, nn.Module]], AbstractContextManager[object]]
_OUTSIDE = -1  # number of what lies in no layer


@dataclass(frozen=True)
class _OneBlock(RankShare):
    """What is loaded for one layer: everything outside of it is elsewhere.

    Args:
        block: Path of the layer.
    """

    block: str = ""

    def is_elsewhere(self, target: Target) -> bool:
        """True if a place lies outside of the layer."""
        return not f"{target.name}.".startswith(f"{self.block}.")


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

    def blocks(self, *, with_logits: bool = False) -> Iterator[Block]:
        """Load one part of the model after the other; each is let go of before the next comes.

        Args:
            with_logits: Load the output head too, and have the last block return logits.
        """
        if self.cut is None:
            yield self._whole(with_logits=with_logits)
            return
        yield from self._layers(self.cut, with_logits=with_logits)

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

    def _layers(self, cut: PipelineCut, *, with_logits: bool) -> Iterator[Block]:
        layers = self.model.get_submodule(cut.layers)
        assert isinstance(layers, nn.ModuleList), f"{cut.layers} is a list of layers"
        waiting = list(layers)
        for number, layer in enumerate(waiting):
            layers[number] = DoneLayer(layer)
        self._load_outside(cut, with_head=with_logits)
        outside = self._outside(cut)
        head = None if with_logits else self._head(cut)
        for number in range(cut.count):
            layer, path = waiting[number], f"{cut.layers}.{number}"
            self._load_layer(cut, layer, number)
            layers[number] = layer
            modules = {f"{path}.{name}": module for name, module in layer.named_modules() if name}
            modules |= outside["first"] if number == 0 else {}
            modules |= outside["last"] if number == cut.count - 1 else {}
            step = self._stepper(layer, list(layers)[number + 1 : number + 2], head)
            yield Block(path, modules, step)
            layers[number] = DoneLayer(layer, returned=step.returned)
            waiting[number] = nn.Identity()
            del layer, modules, step  # lets go of the weights before the next ones come
            _give_back_memory()

    def _stepper(
        self, layer: nn.Module, following: Sequence[nn.Module], head: nn.Module | None
    ) -> _Stepper:
        return _Stepper(self, layer, following[0] if len(following) else None, head)

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

    def _load_outside(self, cut: PipelineCut, *, with_head: bool) -> None:
        elsewhere = [f"{cut.layers}.{number}" for number in range(cut.count)]
        tied = dict(self.prepared.tied)
        is_tied = any(f"{cut.head}.weight" in pair for pair in tied.items())
        has_width = cut.head and hasattr(self.model.get_submodule(cut.head), "in_features")
        if has_width and not is_tied and not with_head:
            put(self.model, cut.head, HeadInput(self.model.get_submodule(cut.head)))
            elsewhere.append(cut.head)
        done = assign(
            self.model,
            self._source_of(cut, _OUTSIDE),
            self.mapper,
            device=self.device,
            tied=tied,
            share=RankShare(elsewhere=tuple(elsewhere)),
        )
        finish(self.model, self.device, untied=done.untied)

    def _load_layer(self, cut: PipelineCut, layer: nn.Module, number: int) -> None:
        path = f"{cut.layers}.{number}"
        assign(
            _shell(path, layer),
            self._source_of(cut, number),
            self.mapper,
            device=self.device,
            tied={},
            share=_OneBlock(block=path),
        )
        for module in layer.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device.type != "meta":
                    module._buffers[name] = buffer.to(self.device)
        tensors = (*layer.named_parameters(), *layer.named_buffers())
        left = [name for name, tensor in tensors if tensor.device.type == "meta"]
        if left:
            raise ModelError(f"never loaded: `{left[0]}` of `{path}`")
        layer.requires_grad_(False)

    def _source_of(self, cut: PipelineCut, number: int) -> Source:
        """Return the checkpoint with nothing but what goes to one layer, or outside of them."""
        names = {job.name for job in self.jobs if _block_of(job.target.module, cut) == number}
        source = self.source
        return replace(
            source,
            weights={name: weight for name, weight in source.weights.items() if name in names},
            plain={name: entry for name, entry in source.plain.items() if name in names},
        )

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
    ) -> None:
        self._streamed, self._layer = streamed, layer
        self._following, self._head = following, head
        self.returned = 0

    @torch.no_grad()
    def __call__(self, ids: Tensor, state: Tensor | None) -> Tensor | None:
        device = self._streamed.device
        with LayerStep(self._layer, self._following, self._head, state, device) as step:
            logits = self._streamed._forward(ids)
        self.returned = step.returned
        return logits if self._following is None and self._head is None else step.result


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
    blind = {} if round_inputs else dict(_watchable_experts(model, dtype))
    jobs = planned(model, source, prepared.mapper, tied=prepared.tied)
    return StreamedModel(source, prepared, device, cut, why_whole, blind, jobs)


def _cut_of(model: TransformersModel) -> tuple[PipelineCut | None, str]:
    """Return where the layers of a model on the meta device are, or why they cannot run alone."""
    try:
        cut = find_cut(model, 1)
    except ModelError as error:
        return None, error.message.partition(": ")[2] or error.message
    for one, two in tied_names(model).items():
        if _block_of(one, cut) != _block_of(two, cut):
            return None, f"`{one}` and `{two}` are one parameter"
    head = output_head(model)
    is_known = head is None or is_plain_linear(head)
    return (cut if is_known else replace(cut, head="")), ""


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


def _block_of(path: str, cut: PipelineCut) -> int:
    """Return the number of the layer that a module or parameter lies in; -1 for none."""
    start = f"{cut.layers}."
    return int(path.removeprefix(start).partition(".")[0]) if path.startswith(start) else _OUTSIDE


def _give_back_memory() -> None:
    """Let the allocator give what is free to the system: glibc keeps what was a layer's weights."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _shell(path: str, layer: nn.Module) -> nn.Module:
    """Return a module that has nothing but a layer at a path."""
    outer = nn.Module()
    *parents, name = path.split(".")
    inner = outer
    for parent in parents:
        inner.add_module(parent, nn.Module())
        inner = inner.get_submodule(parent)
    inner.add_module(name, layer)
    return outer


__all__ = ["StreamedModel", "open_streamed"]
