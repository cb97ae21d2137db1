"""Load what lies outside the layers of a model, and its layers one by one."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from quantload.accuracy.experts_in_file import (
    BLOCK_BYTES,
    bytes_of,
    can_stay_in_file,
    leave_experts_in_file,
)
from quantload.accuracy.held_weights import hold_as_stored, hold_decoded
from quantload.accuracy.streaming_step import HeadInput
from quantload.accuracy.vocabulary_in_file import VocabularyInFile
from quantload.errors import ModelError
from quantload.layers.experts import FusedExperts
from quantload.layers.pipeline import PipelineCut
from quantload.layers.preparation import PreparedModel
from quantload.layers.replacement import put
from quantload.layers.surgery import finish
from quantload.loader.assign import assign
from quantload.loader.places import Job, RankShare
from quantload.loader.source import Source
from quantload.mappers.mapper import Target

OUTSIDE = -1  # number of what lies in no layer


@dataclass(frozen=True)
class _OneBlock(RankShare):
    """What is loaded for one layer: everything outside of it is elsewhere.

    Args:
        block: Path of the layer.
    """

    block: str = ""

    def is_elsewhere(self, target: Target) -> bool:
        """True if a place lies outside of the layer, or in a part that is elsewhere too."""
        is_outside = not f"{target.name}.".startswith(f"{self.block}.")
        return is_outside or super().is_elsewhere(target)


@dataclass(frozen=True)
class BlockLoader:
    """Loads the parts of a model that runs block by block.

    Args:
        source: Its checkpoint.
        prepared: The model on the meta device.
        device: Where it runs.
        cut: Where its layers are.
        jobs: Where each tensor goes.
    """

    source: Source
    prepared: PreparedModel
    device: torch.device
    cut: PipelineCut
    jobs: Sequence[Job]

    def outside(self, vocabulary: VocabularyInFile, *, with_head: bool) -> None:
        """Load what lies outside the layers and does not stay in the file."""
        model, cut = self.prepared.model, self.cut
        elsewhere = [f"{cut.layers}.{number}" for number in range(cut.count)]
        elsewhere += vocabulary.paths
        tied = {one: two for one, two in self.prepared.tied.items() if not _inside(one, elsewhere)}
        is_tied = any(f"{cut.head}.weight" in pair for pair in tied.items())
        is_loaded = bool(cut.head) and cut.head not in elsewhere
        has_width = is_loaded and hasattr(model.get_submodule(cut.head), "in_features")
        if has_width and not is_tied and not with_head:
            put(model, cut.head, HeadInput(model.get_submodule(cut.head)))
            elsewhere.append(cut.head)
        with _taken_out(model, vocabulary.paths):
            done = assign(
                model,
                self._source_of(lambda job: block_of(job.target.module, cut) == OUTSIDE),
                self.prepared.mapper,
                device=self.device,
                tied=tied,
                share=RankShare(elsewhere=tuple(elsewhere)),
            )
        finish(model, self.device, untied=done.untied, keeps_ties=vocabulary.is_tied)

    def layer(self, layer: nn.Module, number: int) -> None:
        """Load one layer."""
        path = f"{self.cut.layers}.{number}"
        hold_as_stored(layer, self.source, self.jobs, path)
        shell, large = _shell(path, layer), [f"{path}.{name}" for name in _large_experts(layer)]
        with _taken_out(shell, large):
            self._part(
                shell, path, lambda job: block_of(job.target.module, self.cut) == number, large
            )
        for block in large:
            experts = shell.get_submodule(block)
            assert isinstance(experts, FusedExperts), "as was looked for"
            leave_experts_in_file(experts, partial(self._experts, block), self.device)
        for module in layer.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device.type != "meta":
                    module._buffers[name] = buffer.to(self.device)
        tensors = (*layer.named_parameters(), *layer.named_buffers())
        left = [name for name, tensor in tensors if tensor.device.type == "meta"]
        if left:
            raise ModelError(f"never loaded: `{left[0]}` of `{path}`")
        hold_decoded(layer)
        layer.requires_grad_(False)

    def _experts(self, path: str, waiting: nn.Module) -> None:
        """Load what a module waits for that stands for the experts of a block at a path."""
        leaves = {leaf for leaf, _ in waiting.awaits()}  # type: ignore[operator]
        self._part(
            _shell(path, waiting),
            path,
            lambda job: job.target.module == path and job.target.leaf in leaves,
        )

    def _part(
        self,
        shell: nn.Module,
        path: str,
        wanted: Callable[[Job], bool],
        elsewhere: Sequence[str] = (),
    ) -> None:
        assign(
            shell,
            self._source_of(wanted),
            self.prepared.mapper,
            device=self.device,
            tied={},
            share=_OneBlock(block=path, elsewhere=tuple(elsewhere)),
        )

    def _source_of(self, wanted: Callable[[Job], bool]) -> Source:
        """Return the checkpoint with nothing but what is wanted."""
        names = {job.name for job in self.jobs if wanted(job)}
        source = self.source
        return replace(
            source,
            weights={name: weight for name, weight in source.weights.items() if name in names},
            plain={name: entry for name, entry in source.plain.items() if name in names},
        )


def block_of(path: str, cut: PipelineCut) -> int:
    """Return the number of the layer that a module or parameter lies in; -1 for none."""
    start = f"{cut.layers}."
    return int(path.removeprefix(start).partition(".")[0]) if path.startswith(start) else OUTSIDE


def give_back_memory() -> None:
    """Let the allocator give what is free to the system: glibc keeps what was a layer's weights."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _large_experts(layer: nn.Module) -> Iterator[str]:
    """Yield the paths of experts in a layer that are read some at a time."""
    for name, module in layer.named_modules():
        is_large = isinstance(module, FusedExperts) and bytes_of(module) > BLOCK_BYTES
        if is_large and isinstance(module, FusedExperts) and can_stay_in_file(module):
            yield name


@contextmanager
def _taken_out(model: nn.Module, paths: Sequence[str]) -> Iterator[None]:
    """Leave modules out of a model while this is open: they load themselves."""
    taken: Mapping[str, nn.Module] = {path: model.get_submodule(path) for path in paths}

    def place(path: str, module: nn.Module) -> None:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, module)

    for path in taken:
        place(path, nn.Identity())
    try:
        yield
    finally:
        for path, module in taken.items():
            place(path, module)


def _inside(name: str, paths: Sequence[str]) -> bool:
    return any(f"{name}.".startswith(f"{path}.") for path in paths)


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


__all__ = ["OUTSIDE", "BlockLoader", "block_of", "give_back_memory"]
