"""The processes that write one output together, as `torchrun` starts them.

Each makes the same plan, takes its share of the tasks and writes to the same files on a shared
disk; the first prepares and ends. They only tell each other that they are ready, or have failed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from quantload.errors import WorkerError

_FOREVER = timedelta(days=7)  # a rank may have far more to do than another


@dataclass(frozen=True)
class Ranks:
    """This process among those that write together.

    Args:
        rank: Number of this process.
        size: Number of processes.
        here: Number of processes on this machine.
    """

    rank: int = 0
    size: int = 1
    here: int = 1

    @classmethod
    def from_environment(cls) -> Ranks:
        """Return what `torchrun` says of this process; a single one without it."""
        return cls(
            rank=int(os.environ.get("RANK", "0")),
            size=int(os.environ.get("WORLD_SIZE", "1")),
            here=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        )

    @property
    def is_first(self) -> bool:
        """True for the process that prepares and ends."""
        return self.rank == 0

    @contextmanager
    def together(self) -> Iterator[None]:
        """Connect the processes while this is open; an error of this one is told to the others."""
        if self.size == 1:
            yield
            return
        dist.init_process_group("gloo", timeout=_FOREVER)
        try:
            yield
        except WorkerError:
            raise
        except BaseException as error:
            _tell(str(error) or type(error).__name__)
            raise
        finally:
            dist.destroy_process_group()

    def wait(self) -> None:
        """Wait for all processes.

        Raises:
            WorkerError: One of them failed, or is gone.
        """
        if self.size == 1:
            return
        problems = _tell("")
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text]
        if failed:
            raise WorkerError(
                "another process failed: " + "; ".join(failed),
                hint="run the same command again: it continues where this one ended",
            )


def _tell(problem: str) -> list[str]:
    """Exchange what went wrong, "" for nothing; returns it by rank."""
    found: list[str] = [""] * dist.get_world_size()
    try:
        dist.all_gather_object(found, problem)
    except RuntimeError as error:  # what gloo raises when a connection is closed
        raise WorkerError(
            f"another process is gone: {str(error).splitlines()[0]}",
            hint="run the same command again: it continues where this one ended",
        ) from error
    return found
