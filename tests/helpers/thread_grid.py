"""Tensor and pipeline parallel ranks as threads of one process; see `thread_ranks.py`."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from thread_ranks import Meeting, ThreadRank
from torch import Tensor

from quantload.runtime.parallel import Parallel

T = TypeVar("T")


@dataclass(frozen=True)
class GridRank(ThreadRank):
    """A rank of both kinds."""

    stages: Meeting = field(default_factory=lambda: Meeting(1))
    inbox: Sequence[Any] = ()  # a queue for each stage, of ranks with one tp_rank

    def send(self, x: Tensor) -> None:
        if not self.is_last_stage:
            self.inbox[self.pp_rank + 1].put(x.clone())

    def receive(self, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        x = self.inbox[self.pp_rank].get(timeout=60)
        assert tuple(x.shape) == tuple(shape)
        assert x.dtype == dtype
        return x

    def broadcast(self, x: Tensor, stage: int) -> Tensor:
        if self.pp_size == 1:
            return x
        sent = self.stages.exchange(self.pp_rank, x)[stage % self.pp_size]
        assert sent.shape == x.shape, (sent.shape, x.shape)
        assert sent.dtype == x.dtype
        return sent.clone()


def grid(tp: int, pp: int) -> list[GridRank]:
    """Return the connected ranks, by rank."""
    rows = [Meeting(tp) for _ in range(pp)]
    columns = [Meeting(pp) for _ in range(tp)]
    boxes = [[queue.Queue() for _ in range(pp)] for _ in range(tp)]
    return [
        GridRank(
            tp_rank=t,
            tp_size=tp,
            pp_rank=s,
            pp_size=pp,
            meeting=rows[s],
            stages=columns[t],
            inbox=boxes[t],
        )
        for s in range(pp)
        for t in range(tp)
    ]


def together(ranks: Sequence[GridRank], work: Callable[[Parallel], T]) -> list[T]:
    """Run `work` once a rank, at the same time; returns the results by rank."""
    results: list[Any] = [None] * len(ranks)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            with torch.no_grad():
                results[number] = work(replace(ranks[number]))
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)
            for rank in ranks:  # the others must not wait for this one
                rank.meeting.barrier.abort()
                rank.stages.barrier.abort()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    broken = (threading.BrokenBarrierError, queue.Empty)
    real = [error for error in errors if not isinstance(error, broken)]
    if errors:
        raise (real or errors)[0]
    return results
