"""Ranks as threads of one process: what layers exchange, without processes or torch.distributed.

Each exchange waits for all ranks, adds or joins in the order of ranks, and hands every rank its own
copy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from quantload.runtime.parallel import Parallel

T = TypeVar("T")


class Meeting:
    """Where ranks put what they exchange."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.values: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait()
        found = list(self.values)
        self.barrier.wait()  # nobody overwrites before everybody has read
        return found


@dataclass(frozen=True)
class ThreadRank(Parallel):
    """A rank of tensor parallelism that is a thread."""

    meeting: Meeting = field(default_factory=lambda: Meeting(1))

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.tp_size == 1:
            return x
        parts = self.meeting.exchange(self.tp_rank, x)
        return sum(parts[1:], start=parts[0].clone())

    def all_reduce_max(self, x: Tensor) -> Tensor:
        if self.tp_size == 1:
            return x
        return torch.stack(self.meeting.exchange(self.tp_rank, x)).amax(0)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        if self.tp_size == 1:
            return x
        return torch.cat(self.meeting.exchange(self.tp_rank, x), dim)

    def exchange(self, value: T) -> list[T]:
        return self.meeting.exchange(self.tp_rank, value)


def in_ranks(size: int, work: Callable[[Parallel], T]) -> list[T]:
    """Run `work` once a rank, at the same time; returns the results by rank."""
    first = ThreadRank(tp_size=size, meeting=Meeting(size))
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with torch.no_grad():
                results[rank] = work(replace(first, tp_rank=rank))
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)
            first.meeting.barrier.abort()  # the others must not wait for this one

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    real = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if errors:
        raise (real or errors)[0]
    return results
