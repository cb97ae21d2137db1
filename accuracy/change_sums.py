"""Sums of what gradients and changes of layers' outputs make together, by weight and scheme.

    dY    outputs of a layer of a candidate minus those of the model that runs, on its inputs
    g     gradient of a loss with respect to these outputs

Sums are kept for each output feature, in float64: several weights may share a layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quantload.accuracy.output_columns import ALONE, Columns, output_columns
from quantload.accuracy.streaming import StreamedModel
from quantload.accuracy.streaming_backwards import BackwardBlock
from quantload.errors import ModelError
from quantload.layers.experts import FusedExperts
from quantload.layers.experts_grouped import Groups

Scores = dict[str, dict[str, float]]  # by module and scheme


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """What each scheme costs in each layer.

    Args:
        scores: Estimated KL in nats a token, by module and scheme; of layers whose outputs could be
            seen and that a token reached.
        tokens: Tokens that reached each module.
        unseen: Modules that no token reached: experts to which none was routed.
        hidden: Modules whose outputs cannot be told apart in the model.
        num_tokens: Tokens that were run.
    """

    scores: Scores
    tokens: Mapping[str, int]
    unseen: tuple[str, ...]
    hidden: tuple[str, ...]
    num_tokens: int


@dataclass
class _Layer:
    """What is known of one layer's outputs.

    Args:
        columns: Which weights compute them.
        sums: [E, N] float64 of (squared) products, by scheme; E = 1 for a layer of its own.
        tokens: Of each expert.
    """

    columns: list[Columns]
    sums: dict[str, Tensor] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)


class ChangeSums:
    """Sums of (gradient * change)^2, or of the products, for each output feature of each layer.

    Args:
        model: One of the candidates, not loaded: knows where each weight's outputs are.
        modules: What is scored.
        is_signed: Sum products instead of their squares.
    """

    def __init__(self, model: StreamedModel, modules: Sequence[str], *, is_signed: bool) -> None:
        self._modules, self._is_signed = list(modules), is_signed
        self._layers: dict[str, _Layer] = {}
        for columns in output_columns(model, modules):
            self._layers.setdefault(columns.path, _Layer([])).columns.append(columns)
        start = f"{model.cut.layers}." if model.cut is not None else ""
        self.reach_outside = any(not path.startswith(start) for path in self._layers)

    @contextmanager
    def scoring(
        self, block: BackwardBlock, twins: Mapping[str, Mapping[str, nn.Module]]
    ) -> Iterator[None]:
        """Score the layers of a block while it runs; `twins` are those of each scheme."""
        handles: list[Any] = []
        for path, layer in self._layers.items():
            others = {name: _Twin.of(path, modules) for name, modules in twins.items()}
            found = {name: twin for name, twin in others.items() if twin is not None}
            if path in block.modules and len(found) == len(twins):
                outer = block.modules.get(path.rpartition(".")[0])
                skips_zeros = isinstance(outer, FusedExperts) and not outer.layout.is_routed
                hook = _hook(layer, found, skips_zeros=skips_zeros, is_signed=self._is_signed)
                handles.append(block.modules[path].register_forward_hook(hook))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def result(self, num_tokens: int) -> Sensitivity:
        """Return the scores of all modules."""
        scores: Scores = {}
        tokens: dict[str, int] = {}
        known: set[str] = set()
        for layer in self._layers.values():
            for columns in layer.columns:
                known.add(columns.module)
                row = 0 if columns.expert == ALONE else columns.expert
                count = layer.tokens.get(row, 0)
                tokens[columns.module] = tokens.get(columns.module, 0) + count
                if not count:
                    continue
                of = scores.setdefault(columns.module, dict.fromkeys(layer.sums, 0.0))
                for name, sums in layer.sums.items():
                    part = float(sums[row, columns.start : columns.stop].sum())
                    of[name] += part / (num_tokens if self._is_signed else 2 * num_tokens)
        wrong = [m for m, of in scores.items() if not all(map(math.isfinite, of.values()))]
        if wrong:
            raise ModelError(
                f"the scores of `{wrong[0]}` are not finite, nor those of {len(wrong) - 1} others",
                hint="run in another dtype, for example float32",
            )
        return Sensitivity(
            scores=scores,
            tokens=tokens,
            unseen=tuple(m for m in self._modules if m in known and not tokens[m]),
            hidden=tuple(m for m in self._modules if m not in known),
            num_tokens=num_tokens,
        )


@dataclass(frozen=True)
class _Twin:
    """A layer of a candidate.

    Args:
        module: Its product.
        rounding: Rounds the rows first: `FusedExperts` keeps that of `down` beside the product.
    """

    module: nn.Module
    rounding: Callable[[Tensor], Tensor] | None

    @classmethod
    def of(cls, path: str, modules: Mapping[str, nn.Module]) -> _Twin | None:
        """Return the layer at a path; None if there is none."""
        if path not in modules:
            return None
        outer, _, name = path.rpartition(".")
        experts = modules.get(outer)
        if isinstance(experts, FusedExperts) and name == f"{experts.layout.down.leaf}_experts":
            return cls(modules[path], experts.round_down)
        return cls(modules[path], None)

    @torch.no_grad()
    def __call__(self, x: Tensor, *groups: Groups) -> Tensor:
        """Return its outputs."""
        result: Tensor = self.module(x if self.rounding is None else self.rounding(x), *groups)
        return result


@torch.no_grad()
def _change(twin: _Twin, x: Tensor, groups: Sequence[Groups], output: Tensor) -> Tensor:
    """Return what a scheme changes in the outputs of a layer, [S, N] float32."""
    return (twin(x, *groups) - output.detach()).flatten(0, -2).float()


def _hook(layer: _Layer, twins: Mapping[str, _Twin], *, skips_zeros: bool, is_signed: bool) -> Any:  # noqa: ANN401
    """Return a forward hook that scores a layer when the gradient of its output comes.

    Args:
        layer: Where sums go.
        twins: The layer under each scheme.
        skips_zeros: Rows of zeros are tokens of other experts.
        is_signed: Sum products instead of their squares.
    """

    def watch(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        x, groups = args[0].detach(), [arg for arg in args[1:] if isinstance(arg, Groups)]
        if not (torch.is_grad_enabled() and output.requires_grad and x.numel()):
            return
        # now: what models add in place to an output, or to its input, is not the layer's
        changes = {name: _change(twin, x, groups, output) for name, twin in twins.items()}
        rows = x.flatten(0, -2)
        counts = groups[0].counts if groups else [len(rows)]
        sizes = [*counts, len(rows) - sum(counts)]  # the last are rows of no expert
        for expert, part in enumerate(torch.split(rows, sizes)[:-1]):
            number = int(part.ne(0).any(dim=-1).sum()) if skips_zeros else len(part)
            layer.tokens[expert] = layer.tokens.get(expert, 0) + number
        output.register_hook(  # type: ignore[no-untyped-call]
            lambda gradient: score(changes, sizes, gradient)
        )

    @torch.no_grad()
    def score(changes: Mapping[str, Tensor], sizes: Sequence[int], gradient: Tensor) -> None:
        flat = gradient.flatten(0, -2).float()
        for name, change in changes.items():
            products = (flat * change).double()
            products = products if is_signed else products.square()
            empty = products.new_zeros(len(sizes) - 1, products.shape[-1])
            total = layer.sums.setdefault(name, empty)
            for expert, part in enumerate(torch.split(products, list(sizes))[:-1]):
                total[expert] += part.sum(dim=0)

    return watch


__all__ = ["ChangeSums", "Scores", "Sensitivity"]
