"""Run the blocks of a model from the last to the first, so that gradients reach every layer.

    forward     block by block, see `streaming.py`; the hidden states that enter each one are kept
    backwards   the last block is loaded and run again from what entered it; the gradient of its
                input is that of the output of the block before, and so on

In memory are one block, what autograd keeps of one batch in it, and the hidden states between all
blocks, on the CPU. That is activation checkpointing at the block boundaries (Chen et al. 2016,
arXiv 1604.06174), with the weights let go of as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn

from quantload.accuracy.streaming import StreamedModel
from quantload.accuracy.streaming_step import DoneLayer, LayerStep
from quantload.errors import ModelError
from quantload.layers.pipeline import PipelineCut


@dataclass(frozen=True)
class KeptStates:
    """What a forward leaves for the way back.

    Args:
        entering: What enters each block, by block and batch: [B, T, H] on the CPU; None for the
            first block, which the model gives itself.
        returned: How many parts the tuple has that each layer returns; 0 for no tuple.
    """

    entering: Sequence[Sequence[Tensor | None]]
    returned: Sequence[int]


@dataclass(frozen=True)
class BackwardBlock:
    """A block that is loaded, on the way back.

    Args:
        path: Path of the layer; "" for a model that is loaded as a whole.
        number: Number of the block.
        modules: Modules by path, as `Block` has them.
        forward: Runs [B, T] token ids from the hidden states that enter the block (which need a
            gradient, or None for the first), with a graph; returns hidden states or logits.
    """

    path: str
    number: int
    modules: Mapping[str, nn.Module]
    forward: Callable[[Tensor, Tensor | None], Tensor]


@torch.no_grad()
def run_forward(
    model: StreamedModel, batches: Sequence[Tensor], done: Callable[[], None]
) -> KeptStates:
    """Run batches [B, T] up to the last block, and keep what enters each.

    Args:
        model: Not run yet.
        batches: Token ids.
        done: Called after each block.
    """
    entering: list[list[Tensor | None]] = [[None] * len(batches)]
    returned: list[int] = []
    for block in islice(model.blocks(), model.num_blocks - 1):  # the last runs on the way back
        states = [block.step(ids, entering[-1][n]) for n, ids in enumerate(batches)]
        entering.append(states)
        returned.append(getattr(block.step, "returned", 0))
        done()
    return KeptStates(entering, [*returned, 0])


def backwards(
    model: StreamedModel, returned: Sequence[int], *, outside: bool = True
) -> Iterator[BackwardBlock]:
    """Load one block after the other, the last one first; each is let go of before the next.

    Args:
        model: Not run yet.
        returned: From `run_forward`.
        outside: Load what lies outside the layers too; without it blocks cannot run by themselves.
    """
    if model.cut is None:
        yield _whole(model)
        return
    layers = model.model.get_submodule(model.cut.layers)
    assert isinstance(layers, nn.ModuleList), f"{model.cut.layers} is a list of layers"
    waiting = list(layers)
    for number, layer in enumerate(waiting):
        layers[number] = DoneLayer(layer, returned=returned[number])
    if outside:
        model._load_outside(model.cut, with_head=True)
    places = model._outside(model.cut) if outside else {"first": {}, "last": {}}
    for number in reversed(range(model.cut.count)):
        yield _loaded(model, model.cut, waiting[number], number, places)
        layers[number] = DoneLayer(waiting[number], returned=returned[number])
        waiting[number] = nn.Identity()


def _loaded(
    model: StreamedModel,
    cut: PipelineCut,
    layer: nn.Module,
    number: int,
    outside: Mapping[str, Mapping[str, nn.Module]],
) -> BackwardBlock:
    layers = model.model.get_submodule(cut.layers)
    assert isinstance(layers, nn.ModuleList), "as was seen before"
    path = f"{cut.layers}.{number}"
    model._load_layer(cut, layer, number)
    layers[number] = layer
    modules = {f"{path}.{name}": module for name, module in layer.named_modules() if name}
    modules |= outside["first"] if number == 0 else {}
    modules |= outside["last"] if number == cut.count - 1 else {}
    following = layers[number + 1] if number + 1 < cut.count else None

    def forward(ids: Tensor, state: Tensor | None) -> Tensor:
        start = _gradients_from_embedding(model) if state is None else nullcontext()
        step = LayerStep(layer, following, None, state, model.device)
        with torch.enable_grad(), start, step:
            logits = model._forward(ids)
        return _checked(step.result if following is not None else logits)

    return BackwardBlock(path, number, modules, forward)


def _whole(model: StreamedModel) -> BackwardBlock:
    (block,) = model.blocks(with_logits=True)

    def forward(ids: Tensor, _: Tensor | None) -> Tensor:
        with torch.enable_grad(), _gradients_from_embedding(model):
            return _checked(model._forward(ids))

    return BackwardBlock("", 0, block.modules, forward)


@contextmanager
def _gradients_from_embedding(model: StreamedModel) -> Iterator[None]:
    """Let gradients flow from the embedding's output on, for no parameter."""

    def start(_: nn.Module, __: object, output: Tensor) -> Tensor:
        return output.detach().requires_grad_()

    handle = model.model.get_input_embeddings().register_forward_hook(start)
    try:
        yield
    finally:
        handle.remove()


def _checked(result: Tensor | None) -> Tensor:
    if result is None:
        raise ModelError(
            "the model gives no logits: gradients need a language model with an output head"
        )
    return result


__all__ = ["BackwardBlock", "KeptStates", "backwards", "run_forward"]
