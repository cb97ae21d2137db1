"""Watch the inputs of linear layers and of experts while a model runs.

    linear layers    whatever enters their forward, [..., K]
    experts          the tokens that were routed to each, and what enters its second weight

Layers that are handed one tensor object share one sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantload.accuracy.input_sums import InputSums
from quantload.accuracy.places import Place
from quantload.accuracy.streaming_step import HeadInput
from quantload.errors import ModelError
from quantload.layers.experts import FusedExperts
from quantload.layers.experts_grouped import Groups
from quantload.layers.linear import QuantLinear
from quantload.layers.meta_model import is_transposed_linear


class InputWatch:
    """Sums up the inputs of the layers of a model, by place."""

    def __init__(self) -> None:
        self.sums: dict[Place, InputSums] = {}
        self.places: set[Place] = set()
        self.transposed: set[str] = set()  # paths of layers that store their weight as [K, N]
        self._last: tuple[Tensor, int, InputSums] | None = None

    @contextmanager
    def watching(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Watch some modules, given by path, while this is open."""
        handles: list[Any] = []
        inside: list[str] = []  # layers of ours, whose own modules are not layers of the model
        for path, module in modules.items():
            if any(path.startswith(f"{outer}.") for outer in inside[-1:]):
                continue
            if isinstance(module, FusedExperts):
                handles += self._watch_experts(path, module)
                inside.append(path)
            elif _is_linear(module):
                self.places.add((path, "weight", -1))
                if is_transposed_linear(module):
                    self.transposed.add(path)
                hook = partial(self._enter_linear, path)
                handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
                inside.append(path)
        try:
            yield
        finally:
            self._last = None
            for handle in handles:
                handle.remove()

    def _watch_experts(self, path: str, module: FusedExperts) -> Iterator[Any]:
        layout = module.layout
        for projection in layout.projections:
            for expert in range(layout.experts):
                self.places.add((path, projection.leaf, expert))
            product = module.get_submodule(f"{projection.leaf}_experts")
            enter = partial(self._enter_experts, path, projection.leaf, not layout.is_routed)
            yield product.register_forward_pre_hook(enter)

    def _enter_linear(
        self, path: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        x = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)), None)
        if x is None:
            raise ModelError(f"`{path}` is called without a tensor")
        if x.numel():
            self._add((path, "weight", -1), self._sums_of(x))

    def _sums_of(self, x: Tensor) -> InputSums:
        last = self._last
        if last is not None and last[0] is x and last[1] == x._version:
            return last[2]
        sums = InputSums.of(x)
        self._last = x, x._version, sums
        return sums

    def _enter_experts(
        self, path: str, leaf: str, skips_zeros: bool, _: nn.Module, args: tuple[Any, ...]
    ) -> None:
        rows: Tensor = args[0]
        groups: Groups = args[1]
        parts = torch.split(rows, [*groups.counts, rows.shape[0] - sum(groups.counts)])
        for expert, part in enumerate(parts[:-1]):
            # where tokens come sorted, each expert is handed all: those of others are zero
            kept = part[part.ne(0).any(dim=-1)] if skips_zeros else part
            if kept.shape[0]:
                self._add((path, leaf, expert), InputSums.of(kept))

    def _add(self, place: Place, sums: InputSums) -> None:
        before = self.sums.get(place)
        self.sums[place] = sums if before is None else before + sums


def _is_linear(module: nn.Module) -> bool:
    """True if the module multiplies its input [..., K] with a weight of K input features."""
    ours = isinstance(module, QuantLinear | HeadInput)
    return ours or isinstance(module, nn.Linear) or is_transposed_linear(module)


__all__ = ["InputWatch"]
