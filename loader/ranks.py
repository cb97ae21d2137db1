"""The processes that write one output together, as `torchrun` starts them.

Each makes the same plan, takes its share of the tasks and writes to the same files on a shared
disk; the first prepares and ends. They only tell each other that they are ready, or have failed:
one that fails leaves a note in the store that connected them, at which the others look between
tasks.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from quantload.errors import ConfigError, WorkerError
from quantload.loader.staging import is_certain

_log = logging.getLogger("quantload")
_AGAIN = "run the same command again: it continues where this one ended"
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_FOREVER = timedelta(days=7)  # a rank may have far more to do than another
_FAILED = "quantload/failed"
_LOOK_EVERY = 0.5  # seconds


class _OtherFailedError(Exception):
    """Another process has failed; what with, is exchanged afterwards."""


class _Store(Protocol):
    """What is used of a store of torch.distributed."""

    def set(self, key: str, value: str) -> None:
        """Leave a note."""

    def check(self, keys: list[str]) -> bool:
        """True if all of these notes are there."""
        ...


@dataclass
class _Notes:
    """The store that connects the processes, and when this one looked into it last."""

    store: _Store | None = None
    looked: float = 0.0


@dataclass(frozen=True)
class Ranks:
    """This process among those that write together.

    Args:
        rank: Number of this process.
        size: Number of processes.
        here: Number of processes on this machine.
        local: Number of this process among these.
    """

    rank: int = 0
    size: int = 1
    here: int = 1
    local: int = 0
    _notes: _Notes = field(default_factory=_Notes, repr=False, compare=False)

    @classmethod
    def from_environment(cls) -> Ranks:
        """Return what `torchrun` says of this process; a single one without it.

        Raises:
            ConfigError: The environment holds no such numbers.
        """
        if not all(name in os.environ for name in _VARIABLES):
            return cls()
        rank, size = _number("RANK", least=0), _number("WORLD_SIZE", least=1)
        if rank >= size:
            raise ConfigError(f"`RANK` is {rank}, expected less than `WORLD_SIZE`, {size}")
        here = _number("LOCAL_WORLD_SIZE", least=1, missing=1)
        return cls(rank=rank, size=size, here=here, local=_number("LOCAL_RANK", least=0, missing=0))

    @property
    def is_first(self) -> bool:
        """True for the process that prepares and ends."""
        return self.rank == 0

    @contextmanager
    def together(self) -> Iterator[None]:
        """Connect the processes while this is open; an error of this one is told to the others.

        Raises:
            WorkerError: They cannot be connected.
        """
        if self.size == 1:
            yield
            return
        try:
            store, rank, size = next(rendezvous("env://", timeout=_FOREVER))
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=size, timeout=_FOREVER
            )
        except (RuntimeError, ValueError) as error:
            raise WorkerError(
                f"{self.size} processes cannot be connected: {_first_line(error)}",
                hint="start them with `torchrun`",
            ) from error
        self._notes.store = store
        try:
            yield
        except WorkerError:
            raise
        except _OtherFailedError as stopped:
            self.wait()  # raises what the other failed with
            raise WorkerError("another process failed", hint=_AGAIN) from stopped
        except BaseException as error:
            self._tell_error(error)
            raise
        finally:
            self._notes.store = None
            dist.destroy_process_group()

    def look_around(self) -> None:
        """Stop this process if another has failed; to be called between tasks, in any thread.

        `together` then raises the WorkerError that says what the other failed with.
        """
        notes, now = self._notes, time.monotonic()
        if notes.store is None or now - notes.looked < _LOOK_EVERY:
            return
        notes.looked = now
        try:
            has_failed = notes.store.check([_FAILED])
        except RuntimeError as error:  # the process that keeps the store is gone
            raise WorkerError(
                f"another process is gone: {_first_line(error)}", hint=_AGAIN
            ) from error
        if has_failed:
            raise _OtherFailedError

    def _tell_error(self, error: BaseException) -> None:
        """Tell the others, who learn of it when they look around, or wait."""
        try:
            if self._notes.store is not None:
                self._notes.store.set(_FAILED, str(self.rank))
            _exchange(_Problem(str(error) or type(error).__name__, is_certain(error)))
        except (WorkerError, RuntimeError) as gone:  # the error of this process is to be seen
            _log.warning("%s", _first_line(gone))

    def wait(self) -> None:
        """Wait for all processes.

        Raises:
            WorkerError: One of them failed, or is gone.
        """
        if self.size == 1:
            return
        failed = [(rank, found) for rank, found in enumerate(_exchange(None)) if found is not None]
        if failed:
            certain = any(found.is_certain for _, found in failed)
            raise WorkerError(
                "; ".join(f"process {rank} failed: {found.text}" for rank, found in failed),
                hint="" if certain else _AGAIN,
                is_certain=certain,
            )


@dataclass(frozen=True)
class _Problem:
    """What went wrong in one process, and whether it would again."""

    text: str
    is_certain: bool


def _exchange(problem: _Problem | None) -> list[_Problem | None]:
    """Exchange what went wrong; returns it by rank."""
    found: list[_Problem | None] = [None] * dist.get_world_size()
    try:
        dist.all_gather_object(found, problem)
    except RuntimeError as error:  # what gloo raises when a connection is closed
        raise WorkerError(f"another process is gone: {_first_line(error)}", hint=_AGAIN) from error
    return found


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _number(name: str, *, least: int, missing: int | None = None) -> int:
    text = os.environ.get(name, "" if missing is None else str(missing))
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(f"`{name}` is `{text}`, expected a number of at least {least}")
    return int(text)
