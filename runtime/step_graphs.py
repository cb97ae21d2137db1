"""Steps of one batch at fixed addresses: eager, or as one CUDA graph that is replayed.

A slot holds a cache, the tokens and positions that a step reads, and the logits that it leaves. A
step ends by choosing the most likely token of each row, and by moving on: replayed without
anything in between, the graph decodes greedily. A captured step is first held against the eager
one, from the same state: code that decides on the host by what it has seen would show there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from quantload.runtime.prompt_graphs import PromptGraphs
from quantload.runtime.step_model import StepCache, StepModel

_log = logging.getLogger("quantload")

BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64)  # rows of a slot; a batch takes the next larger one
_WARM_UP = 3  # steps before a capture, in which kernels are compiled and tuned
_TRIAL = 4  # steps that are compared
_TOLERANCE = 0.02  # relative L2: other summation orders, not other values
SHORTEST = 32  # tokens a row of a slot holds at least: the trials take some


def _next_by_torch(logits: Tensor, tokens: Tensor, positions: Tensor) -> None:
    """Write the most likely tokens of logits [B, V], and add 1 to the positions."""
    positions.add_(1)
    tokens.copy_(logits.argmax(-1))


def _next_on(device: torch.device) -> Callable[[Tensor, Tensor, Tensor], None]:
    """Return what ends a step: torch's argmax of one row takes 36 us of an H200."""
    if device.type != "cuda":
        return _next_by_torch
    try:
        from quantload.runtime.kernels.next_token import next_token, prepare
    except ImportError:
        return _next_by_torch
    prepare(device)
    return next_token


class Slot:
    """The steps of a batch.

    Args:
        model: What is run.
        cache: Its cache, which belongs to the slot from now on.
        graphs: Capture the step where the model and the device allow it.
        pool: Memory pool that the graphs of a model share.
    """

    def __init__(
        self,
        model: StepModel,
        cache: StepCache,
        *,
        graphs: bool,
        pool: tuple[int, int] | None = None,
    ) -> None:
        self.model, self.cache = model, cache
        self.tokens = torch.zeros(cache.batch, dtype=torch.int64, device=model.device)
        self.positions = torch.zeros_like(self.tokens)
        self.logits: Tensor | None = None
        self._next = _next_on(model.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self.why_eager = self._why_eager(graphs)
        self._prefill: Callable[[Tensor, Tensor], Tensor] = partial(model.prefill, cache=cache)
        if not self.why_eager:
            self._capture(pool)
        if self.is_captured and model.captures_prompts:
            self._prefill = PromptGraphs(model, cache, pool)

    @property
    def is_captured(self) -> bool:
        """True if a step is one replay."""
        return self._graph is not None

    def _why_eager(self, graphs: bool) -> str:
        if not graphs:
            return "graphs are switched off"
        if self.model.device.type != "cuda":
            return f"CUDA graphs need CUDA, found `{self.model.device.type}`"
        return self.model.why_not_captured

    @torch.no_grad()
    def start(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Prefill; returns the logits [B, V] after the prompts, see `StepModel.prefill`."""
        self.cache.reset()
        logits = self._prefill(ids, lengths)
        self.positions.copy_(lengths)
        self.tokens.copy_(logits.argmax(-1))
        return logits

    @torch.no_grad()
    def step(self) -> Tensor:
        """Run `tokens` at `positions`; returns logits [B, V] that are valid until the next step.

        Afterwards `tokens` are the most likely ones and `positions` the next ones.
        """
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()
        assert self.logits is not None, "a step leaves logits"
        return self.logits

    def _run(self) -> None:
        self.logits = self.model.step(self.tokens, self.positions, self.cache)
        self._next(self.logits, self.tokens, self.positions)

    # -- capturing -----------------------------------------------------------------------------

    @torch.no_grad()
    def _capture(self, pool: tuple[int, int] | None) -> None:
        """Capture a step, or say in `why_eager` why that failed."""
        try:
            self._trial_prompt()
            stream = torch.cuda.Stream(self.model.device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(self.model.device))
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UP):
                    self._run()
            torch.cuda.current_stream(self.model.device).wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):  # type: ignore[arg-type]
                self._run()
        except RuntimeError as error:  # an operation that cannot be captured
            self.why_eager = f"the step cannot be captured: {str(error).splitlines()[0]}"
            _log.warning("decoding runs without CUDA graphs: %s", self.why_eager)
            return
        captured = self.logits
        expected = self._trial()
        self._graph, self.logits = graph, captured
        found = self._trial()
        distance = float((found - expected).norm() / expected.norm())
        if not distance <= _TOLERANCE:  # NaN is no agreement either
            self._graph = None
            self.why_eager = (
                f"the captured step gives other logits than the eager one: relative error "
                f"`{distance:.3g}`, expected at most `{_TOLERANCE}`"
            )
            _log.warning("decoding runs without CUDA graphs: %s", self.why_eager)
        self.cache.reset()

    def _trial_prompt(self) -> None:
        """Prefill a few tokens, not as many in each row."""
        batch, device = self.cache.batch, self.model.device
        numbers = torch.arange(batch * 4, device=device).reshape(batch, 4)
        lengths = torch.arange(batch, device=device) % 3 + 2
        self.start(numbers * 7 % self.model.vocab_size, lengths)

    def _trial(self) -> Tensor:
        """Return the logits [steps, B, V] of a few steps after the same prompts."""
        self._trial_prompt()
        found = []
        for number in range(_TRIAL):
            self.tokens.copy_((self.positions * 5 + number) % self.model.vocab_size)
            found.append(self.step().float().clone())
        return torch.stack(found)


def rows_of_slot(batch: int) -> int:
    """Return how many rows the slot of a batch has."""
    return next((rows for rows in BATCHES if rows >= batch), batch)


__all__ = ["BATCHES", "SHORTEST", "Slot", "rows_of_slot"]
