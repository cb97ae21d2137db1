"""What quantizing each layer costs the model: one backward pass, no search.

    score = 1 / 2T  sum over tokens t and output features n of (g[t, n] * dY[t, n])^2

g is the gradient of the loss (cross-entropy, summed over tokens) with respect to the layer's
output; dY is what quantizing its weight, and rounding its input, changes there. The sum is the
diagonal of the Fisher information along dY, with which ModelOpt's `auto_quantize` scores layers;
half of it, a token, is the second-order estimate of KL(reference || quantized) in nats. Errors
count by what the rest of the model makes of them, not by their size.

The model runs block by block, forward and back (`streaming_backwards.py`); beside each block of the
reference lies that of each scheme, whose layers are handed the reference's inputs. Experts are
scored on the tokens that the reference routes to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from quantload.accuracy.output_columns import ALONE, Columns, output_columns
from quantload.accuracy.scoring_memory import check_memory, scoring_bytes
from quantload.accuracy.streaming import StreamedModel
from quantload.accuracy.streaming_backwards import BackwardBlock, backwards, run_forward
from quantload.accuracy.streaming_tokens import batches_of, check_sequences
from quantload.errors import ConfigError, ModelError
from quantload.layers.experts import FusedExperts
from quantload.layers.experts_grouped import Groups
from quantload.progress import Progress

Scores = dict[str, dict[str, float]]  # by module and scheme
Labels = Literal["text", "sampled"]
Open = Callable[[], StreamedModel]
_BATCH_TOKENS = 512
_LOSS_TOKENS = 256  # whose distributions are in work at a time


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


def gradient_scores(
    reference: Open,
    candidates: Mapping[str, Open],
    modules: Sequence[str],
    sequences: Sequence[Sequence[int]],
    progress: Progress,
    *,
    labels: Labels = "text",
    seed: int = 0,
) -> Sensitivity:
    """Score what each scheme costs in each module.

    Args:
        reference: Opens the reference, in the dtype in which gradients are computed.
        candidates: Opens the model with all of its weights in a scheme, by name of the scheme.
        modules: Checkpoint names of the weights that are scored, as the candidates name them.
        sequences: Token ids; those of less than two tokens are left out.
        progress: Advances by blocks.
        labels: Whose next token the loss is of: the text's, or one drawn from the reference.
        seed: Of what is drawn.

    Raises:
        ConfigError: No sequence has two tokens, or ids are none of the vocabulary.
        ModelError: The model gives no logits, or gradients are not finite.
    """
    usable = [ids for ids in sequences if len(ids) > 1]
    if not usable:
        raise ConfigError("no sequence has two tokens", hint="give a longer text")
    model = reference()
    check_sequences(model.model, usable)
    batches = batches_of(usable, _BATCH_TOKENS)
    needed = scoring_bytes(
        model,
        candidates=len(candidates),
        num_tokens=sum(map(len, usable)),
        batch_tokens=max(ids.numel() for ids in batches),
    )
    check_memory(model, needed)
    phase = f"scores, about {sum(needed) / 2**30:.1f} GiB"
    progress.start(phase, total=2 * model.num_blocks, unit="blocks")
    kept = run_forward(model, batches, done=lambda: progress.advance(1))
    progress.advance(1)
    model, others = reference(), {name: opened() for name, opened in candidates.items()}
    for name, other in others.items():
        if (other.num_blocks, other.cut is None) != (model.num_blocks, model.cut is None):
            raise ModelError(f"blocks of the model differ under `{name}`")
    sums = _Sums(next(iter(others.values())), modules)
    loss = _Loss(labels, torch.Generator().manual_seed(seed))
    gradients: list[Tensor | None] = [None] * len(batches)
    ways = [backwards(model, kept.returned)]
    ways += [
        backwards(other, kept.returned, outside=sums.reach_outside) for other in others.values()
    ]
    for blocks in zip(*ways, strict=True):
        block, twins = blocks[0], dict(zip(others, blocks[1:], strict=True))
        for place, ids in enumerate(batches):
            state = kept.entering[block.number][place]
            with sums.scoring(block, {name: twin.modules for name, twin in twins.items()}):
                gradients[place] = _step(block, ids, state, gradients[place], loss)
        progress.advance(1, note=block.path)
    progress.finish()
    return sums.result(sum(map(len, usable)))


def _step(
    block: BackwardBlock, ids: Tensor, state: Tensor | None, gradient: Tensor | None, loss: _Loss
) -> Tensor | None:
    """Run a batch forward and back through a block; returns the gradient of what enters it."""
    if state is not None:
        state = state.detach().requires_grad_()
    result = block.forward(ids, state)
    if gradient is None:
        gradient = loss.gradient(result.detach(), ids)
    result.backward(gradient.to(result.device, result.dtype))  # type: ignore[no-untyped-call]
    return None if state is None else state.grad


@dataclass
class _Loss:
    """Cross-entropy of next tokens, summed.

    Args:
        labels: Which.
        generator: Draws them.
    """

    labels: Labels
    generator: torch.Generator

    @torch.no_grad()
    def gradient(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Return the gradient [B, T, V] of the loss for logits [B, T, V] and ids [B, T].

        It is softmax(logits) - onehot(label), and 0 where there is no label.
        """
        result = torch.empty_like(logits)
        for row, out, text in zip(logits, result, ids, strict=True):
            for start in range(0, len(text), _LOSS_TOKENS):
                part = slice(start, start + _LOSS_TOKENS)
                p = row[part].float().softmax(dim=-1)
                if self.labels == "sampled":
                    drawn = torch.multinomial(p.cpu(), 1, generator=self.generator)
                else:
                    drawn = text[start + 1 : start + 1 + len(p), None]
                    p[len(drawn) :] = 0  # nothing comes after the last token
                p[: len(drawn)].scatter_add_(1, drawn.to(p.device), p.new_full(drawn.shape, -1.0))
                out[part] = p
        return result


@dataclass
class _Layer:
    """What is known of one layer's outputs.

    Args:
        columns: Which weights compute them.
        sums: [E, N] float64 of squared products, by scheme; E = 1 for a layer of its own.
        tokens: Of each expert.
    """

    columns: list[Columns]
    sums: dict[str, Tensor] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)


class _Sums:
    """Sums of (gradient * change)^2 for each output feature of each layer.

    Args:
        model: One of the candidates, not loaded: knows where each weight's outputs are.
        modules: What is scored.
    """

    def __init__(self, model: StreamedModel, modules: Sequence[str]) -> None:
        self._modules = list(modules)
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
                hook = _hook(layer, found, skips_zeros=skips_zeros)
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
                    of[name] += part / (2 * num_tokens)
        wrong = [m for m, of in scores.items() if any(v != v or v > 1e300 for v in of.values())]
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


def _hook(layer: _Layer, twins: Mapping[str, _Twin], *, skips_zeros: bool) -> Any:  # noqa: ANN401
    """Return a forward hook that scores a layer when the gradient of its output comes.

    Args:
        layer: Where sums go.
        twins: The layer under each scheme.
        skips_zeros: Rows of zeros are tokens of other experts.
    """

    def watch(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        x, groups = args[0].detach(), [arg for arg in args[1:] if isinstance(arg, Groups)]
        if torch.is_grad_enabled() and output.requires_grad and x.numel():
            values = output.detach()
            output.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient: score(x, groups, values, gradient)
            )

    @torch.no_grad()
    def score(x: Tensor, groups: list[Groups], output: Tensor, gradient: Tensor) -> None:
        flat = gradient.flatten(0, -2).float()
        counts = groups[0].counts if groups else [len(flat)]
        rest = len(flat) - sum(counts)  # rows of no expert
        for expert, part in enumerate(torch.split(x.flatten(0, -2), [*counts, rest])[:-1]):
            number = int(part.ne(0).any(dim=-1).sum()) if skips_zeros else len(part)
            layer.tokens[expert] = layer.tokens.get(expert, 0) + number
        for name, twin in twins.items():
            change = (twin(x, *groups) - output).flatten(0, -2).float()
            squares = (flat * change).double().square()
            empty = squares.new_zeros(len(counts), squares.shape[-1])
            total = layer.sums.setdefault(name, empty)
            for expert, part in enumerate(torch.split(squares, [*counts, rest])[:-1]):
                total[expert] += part.sum(dim=0)

    return watch


__all__ = ["Labels", "Open", "Scores", "Sensitivity", "gradient_scores"]
