"""sha256 of files while they grow: what is written is hashed as soon as everything before it is.

A digest goes through its file from start to end and takes as long as the conversion itself; done
afterwards, it would be one thread's work for every file.
"""

from __future__ import annotations

import hashlib
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from quantload.errors import OutputError
from quantload.loader.output_files import OutputFile
from quantload.loader.writer import OutputFiles

PIECE_BYTES = (
    1 << 23
)  # of each thread; hashed in some milliseconds: much longer than a thread waits for its turn


_of_thread = threading.local()


def _memory() -> memoryview:
    """Return the piece of memory of a thread: jobs are many and short."""
    found = getattr(_of_thread, "memory", None)
    if found is None:
        _of_thread.memory = found = memoryview(bytearray(PIECE_BYTES))
    return found


class GrowingDigests:
    """Hashes weight files in threads of its own; use as a context manager.

    Args:
        files: Files that are being written.
        threads: Files that are hashed at a time.
    """

    def __init__(self, files: OutputFiles, *, threads: int) -> None:
        self._growing = [_Growing(files, file) for file in files.all]
        self._of = {name: growing for growing in self._growing for name in growing.file.tensors}
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="sha256")
        self._jobs: list[Future[None]] = []

    def __enter__(self) -> GrowingDigests:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def add(self, tensor_name: str, start: int, stop: int) -> None:
        """Take up bytes start..stop of a tensor, each once: they are written. Any thread may."""
        growing = self._of[tensor_name]
        position = growing.file.offsets[tensor_name]
        if growing.add(position + start, position + stop):
            self._catch_up(growing)

    def _catch_up(self, growing: _Growing) -> None:
        if growing.claim():  # else a thread is at it, and sees what is new
            self._jobs.append(self._pool.submit(growing.catch_up))

    def finish(self, *, everything: bool) -> dict[str, str]:
        """Return the digests in hexadecimal digits, by file name.

        Args:
            everything: Every tensor is written, also those that nobody told of.

        Raises:
            OutputError: A file cannot be read back.
        """
        for growing in self._growing:
            if everything:
                growing.add_rest()
            self._catch_up(growing)
        for job in self._jobs:
            job.result()
        return {growing.file.name: growing.digest() for growing in self._growing}


class _Growing:
    """One file, and how far it is written and hashed."""

    def __init__(self, files: OutputFiles, file: OutputFile) -> None:
        self.file = file
        self._files = files
        self._digest = hashlib.sha256(file.header)
        self._hashed = self._ready = len(file.header)
        self._written: dict[int, int] = {}  # from the first byte of a part to its end
        self._lock = threading.Lock()
        self._is_claimed = False

    def add(self, start: int, stop: int) -> bool:
        """Take up bytes that are written; True if more of the file can be hashed."""
        with self._lock:
            before = self._ready
            if start < stop:
                self._written[start] = stop
            while self._ready in self._written:
                self._ready = self._written.pop(self._ready)
            return self._ready > before

    def add_rest(self) -> None:
        """Take up all that was not told of."""
        with self._lock:
            self._ready = self.file.num_bytes

    def claim(self) -> bool:
        """Claim the file for the calling thread's job; False if another has it."""
        with self._lock:
            is_free, self._is_claimed = not self._is_claimed, True
            return is_free

    def catch_up(self) -> None:
        """Hash what is ready, and give the file free; who calls has claimed it."""
        memory = _memory()
        with self._files.opened(self.file.name) as descriptor:
            while True:
                with self._lock:
                    many = min(PIECE_BYTES, self._ready - self._hashed)
                    if not many:
                        self._is_claimed = False
                        return
                self._hash(descriptor, memory[:many])

    def _hash(self, descriptor: int, memory: memoryview) -> None:
        try:
            got = os.preadv(descriptor, [memory], self._hashed)
        except OSError as error:
            raise OutputError(
                f"cannot read `{self.file.name}` back: {error.strerror or error}"
            ) from error
        if not got:
            raise OutputError(f"`{self.file.name}` has become shorter while it was written")
        self._digest.update(memory[:got])
        self._hashed += got

    def digest(self) -> str:
        """Return the digest of the whole file."""
        assert self._hashed == self.file.num_bytes, f"`{self.file.name}` is not hashed to its end"
        return self._digest.hexdigest()
