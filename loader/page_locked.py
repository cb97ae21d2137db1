"""Page-locked memory between files and a GPU, which copies to and from it by itself.

A copy between a GPU and other memory goes through a buffer of the driver, and the thread waits for
it. Pieces are large: after each read, write and wait a thread has to get the interpreter back from
the others, which takes as long as some megabytes of a copy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

PIECE_BYTES = 1 << 24


class Buffer:
    """Memory between a file and a device.

    Args:
        num_bytes: Its size.
        device: On the other side; memory is page-locked for a GPU, if the system allows it.
        is_awake: Wait in a loop that takes a core: shorter, where a copy is waited for each time.
    """

    def __init__(self, num_bytes: int, device: torch.device, *, is_awake: bool = False) -> None:
        memory = _page_locked(num_bytes) if device.type == "cuda" else None
        self.memory = torch.empty(num_bytes, dtype=torch.uint8) if memory is None else memory
        self.view = self.memory.numpy().data
        self._is_locked = memory is not None
        self._is_awake = is_awake
        self._event: torch.cuda.Event | None = None

    def record(self, stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
        """Note that what a stream was given until now uses it; the CPU has none, and no event."""
        if stream is None:
            return None
        self._event = torch.cuda.Event(blocking=not self._is_awake)  # type: ignore[no-untyped-call]
        self._event.record(stream)
        return self._event

    def copy_to(
        self, place: Tensor, *, at: int, to: int, num_bytes: int, stream: torch.cuda.Stream | None
    ) -> None:
        """Copy some of its bytes to the device, and do not wait.

        Args:
            place: [bytes] uint8, contiguous.
            at: First byte, here.
            to: First byte in `place`.
            num_bytes: How many.
            stream: Of the device, the current one; None for the CPU.

        Raises:
            RuntimeError: CUDA refuses.
        """
        copy = _copy_of_runtime() if self._is_locked else None
        if copy is None or stream is None:
            part = self.memory[at : at + num_bytes]
            place[to : to + num_bytes].copy_(part, non_blocking=True)
            return
        target, source = place.data_ptr() + to, self.memory.data_ptr() + at
        error = copy(target, source, num_bytes, stream.cuda_stream)
        if error:
            raise RuntimeError(f"CUDA error {error} while {num_bytes} bytes are copied to a GPU")

    def wait(self) -> None:
        """Wait until nothing is copied to or from it any more; other threads run meanwhile."""
        if self._event is not None and not self._event.query():  # type: ignore[no-untyped-call]
            self._event.synchronize()


@cache
def _copy_of_runtime() -> Callable[[int, int, int, int], int] | None:
    """Return CUDA's copy from the host: (to, from, bytes, stream) -> error; None if there is none.

    torch lets other threads run while it issues a copy. That takes microseconds, to get the
    interpreter back from them can take a hundred times as long.
    """
    try:  # the library that torch has loaded
        found = ctypes.PyDLL(f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}")
        copy = found.cudaMemcpyAsync
    except (OSError, AttributeError):
        return None
    size = ctypes.c_size_t
    copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, size, ctypes.c_int, ctypes.c_void_p]
    copy.restype = ctypes.c_int
    return lambda to, source, num_bytes, stream: int(copy(to, source, num_bytes, 1, stream))


def _page_locked(num_bytes: int) -> Tensor | None:
    """Return memory that a GPU copies from by itself; None where the system refuses it."""
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:
        return None


class BounceBuffer:
    """A buffer through which one thread reads for a GPU, and writes what is there.

    It has one piece: to copy it takes the GPU a tenth of the time that a file takes.

    Args:
        device: Where tensors are.
        piece_bytes: Its size.
    """

    def __init__(self, device: torch.device, *, piece_bytes: int = PIECE_BYTES) -> None:
        self.device, self.piece_bytes = device, piece_bytes
        self._made: Buffer | None = None

    def free(self) -> Buffer:
        """Return its memory once nothing is copied from or to it any more."""
        if self._made is None:
            self._made = Buffer(self.piece_bytes, self.device)
        self._made.wait()
        return self._made

    def _stream(self) -> torch.cuda.Stream | None:
        return torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

    def fill(self, place: Tensor, read: Callable[[memoryview, int], None]) -> None:
        """Read into a tensor on the device, and return once the last copy is done.

        Args:
            place: [bytes] uint8.
            read: Fills memory with what is from a byte of `place` on.
        """
        stream = self._stream()
        for at in range(0, place.numel(), self.piece_bytes):
            num_bytes = min(self.piece_bytes, place.numel() - at)
            buffer = self.free()
            read(buffer.view[:num_bytes], at)
            buffer.copy_to(place, at=0, to=at, num_bytes=num_bytes, stream=stream)
            buffer.record(stream)
        self.free()  # who computes next would wait in a loop that takes a core

    def pieces_of(self, tensor: Tensor) -> Iterator[tuple[int, memoryview]]:
        """Yield (first byte, bytes) of a tensor [bytes] uint8 on the device.

        Bytes are valid until the next are asked for.
        """
        stream = self._stream()
        for at in range(0, tensor.numel(), self.piece_bytes):
            part = tensor[at : at + self.piece_bytes]
            buffer = self.free()
            buffer.memory[: part.numel()].copy_(part, non_blocking=True)
            buffer.record(stream)
            yield at, self.free().view[: part.numel()]


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


__all__ = ["PIECE_BYTES", "BounceBuffer", "Buffer", "own_stream"]
