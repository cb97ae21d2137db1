"""Decoding: prompts in, tokens out, one step of the model for all rows of a batch.

The device runs one step ahead of the host: while the tokens of a step are copied and looked at, the
next one is computed already. What is computed for rows that turn out to be done is thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from quantload.errors import ConfigError, ModelError
from quantload.runtime.step_graphs import BATCHES, SHORTEST, Slot, rows_of_slot
from quantload.runtime.step_model import CacheScales, StepModel

Reason = Literal["", "stop", "length"]
Chooser = Callable[[Tensor, Tensor], Tensor]
_LENGTHS = 128  # caches are multiples of this, so that one serves requests of near lengths
_SLOTS = 4  # caches and graphs that are kept


@dataclass(frozen=True)
class Rules:
    """How rows are continued.

    Args:
        max_new_tokens: The most tokens each row gets.
        choose: Chooses the next tokens [B] from what rows have so far, [B, T] ids padded on the
            left with `pad_id`, and their logits [B, V] float32, which it may change. It must not
            wait for the device. None takes the most likely ones.
        stop_ids: A row that gets one of these is done; it keeps the id.
        stop: Asked with (row, its new ids) after each token: True if the row is done.
        pad_id: Id that stands where rows have no token.
    """

    max_new_tokens: int
    choose: Chooser | None = None
    stop_ids: Collection[int] = ()
    stop: Callable[[int, Sequence[int]], bool] | None = None
    pad_id: int = 0


class NewToken(NamedTuple):
    """A token that a row got.

    Args:
        row: Number of the prompt.
        token: Its id.
        reason: Why the row is done with it: "stop" or "length"; "" if it goes on.
    """

    row: int
    token: int
    reason: Reason


@dataclass(frozen=True)
class Generated:
    """What a row got.

    Args:
        ids: Its new tokens, with the one that stopped it.
        reason: Why it is done: "stop" or "length".
    """

    ids: list[int]
    reason: Reason


class Decoder:
    """Continues prompts with a model, and keeps caches and graphs for the next ones.

    One stream at a time: the tokens of another would overwrite its cache.

    Args:
        model: What is run.
        graphs: Capture steps in CUDA graphs where that is possible.
        cache_dtype: See `StepModel.new_cache`.
        scales: See `StepModel.new_cache`.
        max_batch: Rows that are run together; more prompts are run one batch after the other.
    """

    def __init__(
        self,
        model: StepModel,
        *,
        graphs: bool = True,
        cache_dtype: torch.dtype | None = None,
        scales: CacheScales | None = None,
        max_batch: int = BATCHES[-1],
    ) -> None:
        self.model, self.graphs, self.max_batch = model, graphs, max_batch
        self._cache_dtype, self._scales = cache_dtype, scales
        self._slots: dict[int, Slot] = {}
        self._pool: tuple[int, int] | None = None
        self._busy = False

    def stream(self, prompts: Sequence[Sequence[int]], rules: Rules) -> Iterator[NewToken]:
        """Yield each token as it is known, in the order of the steps.

        Raises:
            ConfigError: A prompt is empty or has ids that the model has not, or `rules` ask for
                nothing.
            ModelError: Another stream of this decoder is not finished.
        """
        self._check(prompts, rules)
        return self._batches(prompts, rules)

    def _batches(self, prompts: Sequence[Sequence[int]], rules: Rules) -> Iterator[NewToken]:
        if self._busy:
            raise ModelError(
                "another stream of this decoder is not finished",
                hint="take all its tokens or close it, or make a decoder of your own",
            )
        self._busy = True
        try:
            for first in range(0, len(prompts), self.max_batch):
                batch = prompts[first : first + self.max_batch]
                yield from self._stream(batch, rules, first)
        finally:
            self._busy = False

    def generate(self, prompts: Sequence[Sequence[int]], rules: Rules) -> list[Generated]:
        """Return what `stream` yields, by row."""
        ids: list[list[int]] = [[] for _ in prompts]
        reasons: list[Reason] = [""] * len(prompts)
        for row, token, reason in self.stream(prompts, rules):
            ids[row].append(token)
            reasons[row] = reason
        return [Generated(found, why) for found, why in zip(ids, reasons, strict=True)]

    def slot(self, batch: int, length: int) -> Slot:
        """Return the slot that runs `batch` rows of up to `length` tokens; made where needed."""
        rows = rows_of_slot(batch)
        found = self._slots.pop(rows, None)
        if found is None or found.cache.length < length:
            found = None  # its memory is free for the larger one
            while len(self._slots) >= _SLOTS:
                del self._slots[next(iter(self._slots))]
            found = self._new_slot(rows, length)
        self._slots[rows] = found  # the last one used is the last in order
        return found

    def _new_slot(self, rows: int, length: int) -> Slot:
        length = -(-max(length, SHORTEST) // _LENGTHS) * _LENGTHS
        if self._pool is None and self.graphs and self.model.device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
        cache = self.model.new_cache(rows, length, self._cache_dtype, scales=self._scales)
        return Slot(self.model, cache, graphs=self.graphs, pool=self._pool)

    def _check(self, prompts: Sequence[Sequence[int]], rules: Rules) -> None:
        if rules.max_new_tokens < 1:
            raise ConfigError(
                f"`max_new_tokens` is `{rules.max_new_tokens}`, expected at least 1 new token"
            )
        for number, prompt in enumerate(prompts):
            if not prompt:
                raise ConfigError(f"prompt {number} has no tokens, expected at least 1")
            wrong = next((i for i in prompt if not 0 <= i < self.model.vocab_size), None)
            if wrong is not None:
                raise ConfigError(
                    f"prompt {number} has the id `{wrong}`, expected ids from 0 to "
                    f"{self.model.vocab_size - 1}",
                    hint="is it the tokenizer of this model?",
                )

    def _stream(
        self, prompts: Sequence[Sequence[int]], rules: Rules, first: int
    ) -> Iterator[NewToken]:
        longest = max(len(prompt) for prompt in prompts)
        length = longest + rules.max_new_tokens
        try:
            slot = self.slot(len(prompts), length)
            logits = slot.start(*self._padded(prompts, slot.cache.batch, rules.pad_id))
        except Exception as error:
            # a cache that is too large for the memory would serve all later prompts
            self._slots.pop(rows_of_slot(len(prompts)), None)
            if _is_out_of_memory(error):
                said = (str(error) or type(error).__name__).splitlines()[0]
                raise ModelError(
                    f"no memory on `{self.model.device}` for a cache of {len(prompts)} x {length} "
                    f"tokens (prompts x their own and new tokens): {said}",
                    hint="give fewer prompts at a time, or ask for fewer new tokens",
                ) from error
            raise
        choosing = _Choosing(prompts, rules, slot) if rules.choose is not None else None
        if choosing is not None:
            choosing(logits)
        rows = _Rows(len(prompts), rules, first)
        runs_ahead = self.model.device.type == "cuda"
        for number in range(rules.max_new_tokens):
            reading = _Reading(slot.tokens)
            more = number + 1 < rules.max_new_tokens
            if more and runs_ahead:
                _advance(slot, choosing)
            yield from rows.take(reading.tokens())
            if not rows.running:
                return
            if more and not runs_ahead:
                _advance(slot, choosing)

    def _padded(
        self, prompts: Sequence[Sequence[int]], rows: int, pad_id: int
    ) -> tuple[Tensor, Tensor]:
        """Return ids [rows, T] padded on the right, and lengths [rows]; the first row fills up."""
        filled = [*prompts, *([prompts[0]] * (rows - len(prompts)))]
        longest = max(len(prompt) for prompt in filled)
        ids = torch.tensor([[*p, *([pad_id] * (longest - len(p)))] for p in filled])
        lengths = torch.tensor([len(prompt) for prompt in filled])
        return ids.to(self.model.device), lengths.to(self.model.device)


def _advance(slot: Slot, choosing: _Choosing | None) -> None:
    logits = slot.step()
    if choosing is not None:
        choosing(logits)


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


class _Rows:
    """What the rows of a batch have got, and which go on."""

    def __init__(self, count: int, rules: Rules, first: int) -> None:
        self._ids: list[list[int]] = [[] for _ in range(count)]
        self._rules, self._first = rules, first
        self._stop_ids = frozenset(rules.stop_ids)
        self.running = list(range(count))

    def take(self, tokens: Sequence[int]) -> Iterator[NewToken]:
        """Give each running row its token."""
        for row in tuple(self.running):
            ids, token = self._ids[row], tokens[row]
            ids.append(token)
            reason = self._reason(row, ids)
            if reason:
                self.running.remove(row)
            yield NewToken(self._first + row, token, reason)

    def _reason(self, row: int, ids: Sequence[int]) -> Reason:
        asked = self._rules.stop is not None and self._rules.stop(self._first + row, ids)
        if ids[-1] in self._stop_ids or asked:
            return "stop"
        return "length" if len(ids) == self._rules.max_new_tokens else ""


class _Choosing:
    """Lets `rules.choose` decide in place of the most likely tokens."""

    def __init__(self, prompts: Sequence[Sequence[int]], rules: Rules, slot: Slot) -> None:
        assert rules.choose is not None, "there is something to ask"
        self._choose, self._slot = rules.choose, slot
        self._length, self._rows = max(len(prompt) for prompt in prompts), len(prompts)
        room = [rules.pad_id] * rules.max_new_tokens
        ids = [[*[rules.pad_id] * (self._length - len(p)), *p, *room] for p in prompts]
        self._ids = torch.tensor(ids).to(slot.tokens.device)

    @torch.no_grad()
    def __call__(self, logits: Tensor) -> None:
        """Write the tokens that follow `logits` [B, V] where the next step reads them."""
        scores = logits[: self._rows].to(torch.float32, copy=True)
        chosen = self._choose(self._ids[:, : self._length], scores)
        self._ids[:, self._length] = chosen
        self._slot.tokens[: self._rows] = chosen
        self._length += 1


class _Reading:
    """Copies tokens [B] to the host without holding up what is launched afterwards."""

    def __init__(self, tokens: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tokens.device.type != "cuda":
            self._host = tokens.clone()
            return
        self._host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        self._host.copy_(tokens, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(tokens.device))

    def tokens(self) -> list[int]:
        """Wait for the copy."""
        if self._event is not None:
            self._event.synchronize()
        found: list[int] = self._host.tolist()
        return found


def generate(model: StepModel, prompts: Sequence[Sequence[int]], rules: Rules) -> list[Generated]:
    """Continue prompts; a `Decoder` keeps caches and graphs for the next ones.

    Args:
        model: What is run.
        prompts: Ids of each prompt.
        rules: How they are continued.

    Raises:
        ConfigError: See `Decoder.stream`.
    """
    return Decoder(model).generate(prompts, rules)


__all__ = ["Chooser", "Decoder", "Generated", "NewToken", "Reason", "Rules", "generate"]
