"""Page-locked memory between files and a GPU, which copies to and from it by itself.

A copy between a GPU and other memory goes through a buffer of the driver, and the thread waits for
it. Pieces are small, so that they are still in the cache when the GPU, or the system, takes them
over; several threads read, or write, the pieces of one tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from types import TracebackType
from typing import TypeVar

import torch
from torch import Tensor

PIECE_BYTES = 1 << 22
_BUFFERS = 2  # of a thread: one is filled while the other one is copied
RING_BYTES = _BUFFERS * PIECE_BYTES
Result = TypeVar("Result")


class Buffer:
    """Memory between a file and a device.

    Args:
        num_bytes: Its size.
        device: On the other side; memory is page-locked for a GPU, if the system allows it.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        memory = _page_locked(num_bytes) if device.type == "cuda" else None
        self.memory = torch.empty(num_bytes, dtype=torch.uint8) if memory is None else memory
        self.view = self.memory.numpy().data
        self.event: torch.cuda.Event | None = None

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Note that what a stream was given until now uses it."""
        self.event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self.event.record(stream)
        return self.event

    def wait(self) -> None:
        """Wait until nothing is copied to or from it any more; other threads run meanwhile."""
        if self.event is not None:
            self.event.synchronize()


def _page_locked(num_bytes: int) -> Tensor | None:
    """Return memory that a GPU copies from by itself; None where the system refuses it."""
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:
        return None


class Ring:
    """Buffers that threads use in turn, and the threads; a context manager.

    Args:
        device: Where tensors are.
        threads: How many work at a time; 1 is whoever calls.
        piece_bytes: Size of a buffer.
    """

    def __init__(
        self, device: torch.device, *, threads: int = 1, piece_bytes: int = PIECE_BYTES
    ) -> None:
        self.device, self.piece_bytes = device, piece_bytes
        self._pool = ThreadPoolExecutor(threads, "copies") if threads > 1 else None
        self._of_thread = threading.local()

    def __enter__(self) -> Ring:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End its threads, once they are done."""
        if self._pool is not None:
            self._pool.shutdown()

    def fill(self, place: Tensor, read: Callable[[memoryview, int], None]) -> None:
        """Read into a tensor on the device, and return once the last copy is done.

        Args:
            place: [bytes] uint8.
            read: Fills memory with what is from a byte of `place` on; by any thread.
        """

        def do(buffer: Buffer, at: int) -> torch.cuda.Event | None:
            part = place[at : at + self.piece_bytes]
            read(buffer.view[: part.numel()], at)
            part.copy_(buffer.memory[: part.numel()], non_blocking=True)
            return self._copied(buffer)

        for event in self.each_piece(place.numel(), do):
            if event is not None:  # who computes next would wait in a loop that takes a core
                event.synchronize()

    def drain(self, tensor: Tensor, take: Callable[[memoryview, int], Result]) -> list[Result]:
        """Return what `take` makes of every piece of a tensor [bytes] uint8 on the device.

        Args:
            tensor: What is copied.
            take: Is given bytes, valid as long as it runs, and where they begin; by any thread.
        """

        def do(buffer: Buffer, at: int) -> Result:
            part = tensor[at : at + self.piece_bytes]
            buffer.memory[: part.numel()].copy_(part, non_blocking=True)
            self._copied(buffer)
            buffer.wait()
            return take(buffer.view[: part.numel()], at)

        return self.each_piece(tensor.numel(), do)

    def each_piece(self, num_bytes: int, do: Callable[[Buffer, int], Result]) -> list[Result]:
        """Return what a function returns for every piece of so many bytes, in their order.

        All have ended then, whatever they raise.

        Args:
            num_bytes: Bytes of all pieces.
            do: Is called with a buffer that is free, and where the piece begins, by any thread, on
                the stream of who calls.
        """
        starts = range(0, num_bytes, self.piece_bytes)
        if self._pool is None or len(starts) < 2:
            return [do(self._next(), at) for at in starts]
        is_cuda = self.device.type == "cuda"
        stream = torch.cuda.current_stream(self.device) if is_cuda else None

        def run(at: int) -> Result:
            with torch.cuda.stream(stream):  # of None it is none
                return do(self._next(), at)

        jobs = [self._pool.submit(run, at) for at in starts]
        wait(jobs)
        return [job.result() for job in jobs]

    def _next(self) -> Buffer:
        """Return the buffer of this thread whose turn it is; nothing is copied from it any more."""
        buffers: list[Buffer] = self._of_thread.__dict__.setdefault("buffers", [])
        if len(buffers) < (_BUFFERS if self.device.type == "cuda" else 1):
            buffer = Buffer(self.piece_bytes, self.device)
        else:
            buffer = buffers.pop(0)
        buffers.append(buffer)
        buffer.wait()
        return buffer

    def _copied(self, buffer: Buffer) -> torch.cuda.Event | None:
        if self.device.type != "cuda":
            return None
        return buffer.record(torch.cuda.current_stream(self.device))


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Let a thread compute and copy on a stream of its own: it waits for nobody else's work."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()


__all__ = ["PIECE_BYTES", "RING_BYTES", "Buffer", "Ring", "own_stream"]
