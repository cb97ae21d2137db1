"""Threads that work through tasks, within a budget of memory.

Every task is done by one thread; the slow parts (reading, arithmetic on tensors, writing) let the
others run meanwhile. A task that needs more than the whole budget runs alone.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from quantload.arguments import as_bytes, check_counts, check_type

DEFAULT_MEMORY = 1 << 30
CPU = torch.device("cpu")


class Work(Protocol):
    """A piece of work."""

    @property
    def working_bytes(self) -> int:
        """Memory that it needs."""


W = TypeVar("W", bound=Work)


@dataclass(frozen=True)
class Resources:
    """What a conversion may use.

    Args:
        memory: Bytes of working memory, above what the interpreter and its libraries take.
        workers: Threads; None takes one a core of this process's share, on a GPU three for four
            cores: digests of the output take the others.
        device: Where weights are quantized.
    """

    memory: int = DEFAULT_MEMORY
    workers: int | None = None
    device: torch.device = CPU

    def __post_init__(self) -> None:
        object.__setattr__(self, "memory", as_bytes("memory", self.memory))
        if self.workers is not None:
            object.__setattr__(self, "workers", *check_counts(1, workers=self.workers))
        hint = 'for example `torch.device("cuda")`'
        check_type("device", self.device, torch.device, expected="a `torch.device`", hint=hint)

    def threads(self, *, processes: int = 1) -> int:
        """Return the number of threads of one of several processes on this machine."""
        if self.workers is not None:
            return self.workers
        cores = len(os.sched_getaffinity(0)) // processes
        return max(1, cores if self.device.type == "cpu" else cores * 3 // 4)


def work_through(
    tasks: Iterable[W],
    worker: Callable[[], AbstractContextManager[Callable[[W], None]]],
    *,
    threads: int,
    memory: int,
    finished: Callable[[W], None],
) -> None:
    """Do every task.

    Args:
        tasks: In the order in which they are begun.
        worker: Opened by each thread; gives the function that does one task in it.
        threads: Number of threads.
        memory: Budget in bytes for the working memory of tasks that run at a time.
        finished: Is called in this thread after each task.

    Raises:
        BaseException: Whatever a task raised first; the others are ended before.
    """
    pool = _Pool(list(tasks), worker, memory)
    running: list[threading.Thread] = []
    try:
        for number in range(min(threads, len(pool.waiting))):
            thread = threading.Thread(target=pool.run, name=f"worker-{number}", daemon=True)
            thread.start()
            running.append(thread)
        pool.collect(finished)
    finally:
        pool.stop()
        for thread in running:
            thread.join()


def most_at_a_time(needs: Sequence[int], *, threads: int, memory: int) -> int:
    """Return the most memory that tasks with these needs take together in `work_through`."""
    largest = sorted(needs)[-threads:]
    return max(largest[-1], min(memory, sum(largest))) if largest else 0


class _Pool(Generic[W]):
    """What the threads share."""

    def __init__(
        self,
        tasks: list[W],
        worker: Callable[[], AbstractContextManager[Callable[[W], None]]],
        memory: int,
    ) -> None:
        self.waiting = tasks[::-1]
        self._number = len(tasks)
        self._worker = worker
        self._free = self._memory = memory
        self._condition = threading.Condition()
        self._ended: queue.SimpleQueue[W | BaseException] = queue.SimpleQueue()
        self._is_stopped = False

    def run(self) -> None:
        torch.set_num_threads(1)  # of this thread: each does whole tasks by itself
        try:
            with self._worker() as do:
                while (task := self._next()) is not None:
                    do(task)
                    self._give_back(task)
                    self._ended.put(task)
        except BaseException as error:  # noqa: BLE001 - raised again by `collect`
            self._ended.put(error)

    def collect(self, finished: Callable[[W], None]) -> None:
        for _ in range(self._number):
            ended = self._ended.get()
            if isinstance(ended, BaseException):
                raise ended
            finished(ended)

    def stop(self) -> None:
        with self._condition:
            self._is_stopped = True
            self._condition.notify_all()

    def _next(self) -> W | None:
        """Take the next task as soon as there is memory for it."""
        with self._condition:
            while self.waiting and not self._is_stopped:
                needed = min(self.waiting[-1].working_bytes, self._memory)
                if needed <= self._free:
                    self._free -= needed
                    return self.waiting.pop()
                self._condition.wait()
            return None

    def _give_back(self, task: W) -> None:
        with self._condition:
            self._free += min(task.working_bytes, self._memory)
            self._condition.notify_all()
