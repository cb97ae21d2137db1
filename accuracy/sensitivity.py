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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor

from quantload.accuracy.change_sums import ChangeSums, Scores, Sensitivity
from quantload.accuracy.scoring_memory import check_memory, scoring_bytes
from quantload.accuracy.streaming import StreamedModel
from quantload.accuracy.streaming_backwards import BackwardBlock, backwards, run_forward
from quantload.accuracy.streaming_tokens import batches_of, check_sequences
from quantload.errors import ConfigError, ModelError
from quantload.progress import Progress

Labels = Literal["text", "sampled"]
Open = Callable[[], StreamedModel]
_BATCH_TOKENS = 512
_LOSS_TOKENS = 256  # whose distributions are in work at a time


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
    way = _Way(reference, candidates, batches_of(usable, _BATCH_TOKENS), progress)
    loss = _NextToken(labels, torch.Generator().manual_seed(seed))
    return way.back("scores", modules, loss, is_signed=False)


def slopes(
    mix: Open,
    reference: Open,
    candidates: Mapping[str, Open],
    modules: Sequence[str],
    sequences: Sequence[Sequence[int]],
    progress: Progress,
) -> Sensitivity:
    """Say by how much KL(reference || mix) grows where one module of a mix gets another scheme.

    That is sum g * (Y' - Y) over its outputs, a token, g being the gradient of that KL at the mix:
    what the errors of all other layers make of the change is in it, which scores at the reference
    leave out. It is of first order: what the change does by itself comes on top.

    Args:
        mix: Opens the model in which each module has a scheme of its own, inputs not rounded.
        reference: Opens the reference.
        candidates: As for `gradient_scores`.
        modules: As for `gradient_scores`.
        sequences: Token ids.
        progress: Advances by blocks.

    Raises:
        QuantloadError: As `gradient_scores`.
    """
    batches = batches_of(sequences, _BATCH_TOKENS)
    way = _Way(mix, candidates, batches, progress)
    teacher = _Teacher(reference, batches)
    return way.back("scores at the mix", modules, teacher, is_signed=True)


@dataclass(frozen=True)
class _Way:
    """Forward and back through the blocks of a model, with the same blocks in other schemes.

    Args:
        opened: Opens the model.
        candidates: Opens it in a scheme, by name.
        batches: [B, T] token ids each.
        progress: Advances by blocks.
    """

    opened: Open
    candidates: Mapping[str, Open]
    batches: Sequence[Tensor]
    progress: Progress

    def back(
        self, phase: str, modules: Sequence[str], loss: _Loss, *, is_signed: bool
    ) -> Sensitivity:
        """Score modules.

        Args:
            phase: What the progress is of.
            modules: Which.
            loss: Gives the gradient at the logits.
            is_signed: Sum products of gradient and change, instead of their squares.
        """
        model, num_tokens = self.opened(), sum(ids.numel() for ids in self.batches)
        check_sequences(model.model, [row for ids in self.batches for row in ids.tolist()])
        self._start(model, phase, num_tokens)
        kept = run_forward(model, self.batches, done=lambda: self.progress.advance(1))
        self.progress.advance(1)
        model, others = self.opened(), {name: make() for name, make in self.candidates.items()}
        for name, other in others.items():
            if (other.num_blocks, other.cut is None) != (model.num_blocks, model.cut is None):
                raise ModelError(f"blocks of the model differ under `{name}`")
        sums = ChangeSums(next(iter(others.values())), modules, is_signed=is_signed)
        gradients: list[Tensor | None] = [None] * len(self.batches)
        ways = [backwards(model, kept.returned)]
        ways += [backwards(o, kept.returned, outside=sums.reach_outside) for o in others.values()]
        for block, *rest in zip(*ways, strict=True):
            twins = {name: twin.modules for name, twin in zip(others, rest, strict=True)}
            for place, ids in enumerate(self.batches):
                state = kept.entering[block.number][place]
                with sums.scoring(block, twins):
                    at_end = partial(loss.gradient, ids=ids, place=place)
                    gradients[place] = _step(block, ids, state, gradients[place], at_end)
            self.progress.advance(1, note=block.path)
        self.progress.finish()
        return sums.result(num_tokens)

    def _start(self, model: StreamedModel, phase: str, num_tokens: int) -> None:
        needed = scoring_bytes(
            model,
            candidates=len(self.candidates) + 1,  # what a loss may hold
            num_tokens=num_tokens,
            batch_tokens=max(ids.numel() for ids in self.batches),
        )
        check_memory(model, needed)
        about = f"{phase}, about {sum(needed) / 2**30:.1f} GiB"
        self.progress.start(about, total=2 * model.num_blocks, unit="blocks")


def _step(
    block: BackwardBlock,
    ids: Tensor,
    state: Tensor | None,
    gradient: Tensor | None,
    at_end: Callable[[Tensor], Tensor],
) -> Tensor | None:
    """Run a batch forward and back through a block; returns the gradient of what enters it.

    Args:
        block: The block.
        ids: [B, T].
        state: What enters it, or None.
        gradient: Gradient of what comes out of it; None of the last block.
        at_end: Gives that from logits.
    """
    if state is not None:
        state = state.detach().requires_grad_()
    result = block.forward(ids, state)
    if gradient is None:
        gradient = at_end(result.detach())
    result.backward(gradient.to(result.device, result.dtype))  # type: ignore[no-untyped-call]
    return None if state is None else state.grad


class _Loss(Protocol):
    """Gives the gradient of a loss that is summed over tokens."""

    def gradient(self, logits: Tensor, *, ids: Tensor, place: int) -> Tensor:
        """Return the gradient [B, T, V] for logits [B, T, V] of the batch `ids` [B, T]."""


@dataclass
class _NextToken:
    """Cross-entropy of next tokens.

    Args:
        labels: Which.
        generator: Draws them.
    """

    labels: Labels
    generator: torch.Generator

    @torch.no_grad()
    def gradient(self, logits: Tensor, *, ids: Tensor, place: int) -> Tensor:
        """Return softmax(logits) - onehot(label), and 0 where there is no label."""
        del place
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


class _Teacher:
    """KL(reference || model).

    Args:
        reference: Opens the reference.
        batches: [B, T] token ids each.
    """

    def __init__(self, reference: Open, batches: Sequence[Tensor]) -> None:
        self._kept = run_forward(reference(), batches, done=lambda: None)
        self._last = next(backwards(reference(), self._kept.returned))

    @torch.no_grad()
    def gradient(self, logits: Tensor, *, ids: Tensor, place: int) -> Tensor:
        """Return softmax(logits) - softmax(logits of the reference)."""
        state = self._kept.entering[self._last.number][place]
        expected = self._last.forward(ids, state).detach()
        result = torch.empty_like(logits)
        for row, out, wanted in zip(logits, result, expected, strict=True):
            for start in range(0, len(row), _LOSS_TOKENS):
                part = slice(start, start + _LOSS_TOKENS)
                out[part] = row[part].float().softmax(-1) - wanted[part].float().softmax(-1)
        return result


__all__ = ["Labels", "Open", "Scores", "Sensitivity", "gradient_scores", "slopes"]
