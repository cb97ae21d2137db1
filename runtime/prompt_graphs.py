"""Short prompts as CUDA graphs: a host launches operations slower than a card runs them.

Prompts are padded on the right to one of a few lengths, which causal models do not see. Lengths
that come again are captured; a graph's logits are held against those of the same prompts run as
they are captured, but eagerly. transformers makes a mask of its own where it believes to be
captured, and attention with a mask adds in another order: in a model that rounds inputs to FP8 that
alone moves logits by several per cent.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from quantload.runtime.step_model import StepCache, StepModel

_log = logging.getLogger("quantload")

MOST_TOKENS = 4096  # of a batch, padding included: with more the card is the slower one
_GRAPHS = 8  # that are kept
_TOLERANCE = 0.02  # relative L2, as of steps; on an H200 there was no difference at all


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    ids: Tensor
    lengths: Tensor
    logits: Tensor


class PromptGraphs:
    """Runs prompts into a cache.

    Args:
        model: What is run; its prefill must be one that can be captured.
        cache: Its cache.
        pool: Memory pool that the graphs of a model share.
    """

    def __init__(self, model: StepModel, cache: StepCache, pool: tuple[int, int] | None) -> None:
        self._model, self._cache, self._pool = model, cache, pool
        self._captured: OrderedDict[int, _Captured] = OrderedDict()
        self._seen: set[int] = set()
        self.why_eager = ""

    def __call__(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Return the logits [B, V] after prompts ids [B, T]; see `StepModel.prefill`."""
        longest = padded_length(ids.shape[1])
        fits = longest <= self._cache.length and longest * len(ids) <= MOST_TOKENS
        if self.why_eager or not fits:
            return self._model.prefill(ids, lengths, self._cache)
        ids = torch.nn.functional.pad(ids, (0, longest - ids.shape[1]))
        if longest in self._captured:
            self._captured.move_to_end(longest)
            return _replayed(self._captured[longest], ids, lengths)
        logits = self._model.prefill(ids, lengths, self._cache)
        if longest in self._seen:
            self._capture(ids, lengths)
        self._seen.add(longest)
        return logits

    def _capture(self, ids: Tensor, lengths: Tensor) -> None:
        """Keep a graph of these prompts' shape, or say in `why_eager` why there is none."""
        static = ids.clone(), lengths.clone()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool):  # type: ignore[arg-type]
                logits = self._model.prefill(*static, self._cache)
        except RuntimeError as error:  # an operation that cannot be captured
            self.why_eager = f"prompts cannot be captured: {str(error).splitlines()[0]}"
            _log.info("%s", self.why_eager)
            return
        captured = _Captured(graph, *static, logits)
        with _as_if_captured():
            expected = self._model.prefill(ids, lengths, self._cache)
        found = _replayed(captured, ids, lengths)
        distance = float((found.float() - expected.float()).norm() / expected.float().norm())
        if not distance <= _TOLERANCE:
            self.why_eager = f"captured prompts give other logits: relative error `{distance:.3g}`"
            _log.warning("%s", self.why_eager)
            self._captured.clear()
            return
        self._captured[ids.shape[1]] = captured
        while len(self._captured) > _GRAPHS:
            self._captured.popitem(last=False)


@contextmanager
def _as_if_captured() -> Iterator[None]:
    """Let what asks torch whether the stream is captured hear that it is.

    transformers asks while it makes masks. Another thread that asks meanwhile hears it as well.
    """
    asked = torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = lambda: True
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = asked


def _replayed(captured: _Captured, ids: Tensor, lengths: Tensor) -> Tensor:
    captured.ids.copy_(ids)
    captured.lengths.copy_(lengths)
    captured.graph.replay()
    return captured.logits.clone()


def padded_length(length: int) -> int:
    """Return the length to which prompts are padded: at most an eighth more, from 256 on."""
    step = 32
    while step * 16 < length and step < 1024:
        step *= 2
    return -(-length // step) * step


__all__ = ["MOST_TOKENS", "PromptGraphs", "padded_length"]
