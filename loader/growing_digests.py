"""sha256 of files while they grow: what is written is hashed as soon as everything before it is.

A digest goes through its file from start to end and takes as long as the conversion itself; done
afterwards, it would be one thread's work for every file.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from quantload.errors import OutputError
from quantload.loader.output_files import OutputFile
from quantload.loader.writer import OutputFiles

_PIECE = 1 << 22


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

    def add(self, names: Iterable[str]) -> None:
        """Take up tensors that are written."""
        for growing in {self._of[name]: None for name in names if self._of[name].add(name)}:
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
                for name in growing.file.tensors:
                    growing.add(name)
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
        self._waiting = sorted(file.tensors, key=lambda name: file.offsets[name], reverse=True)
        self._written: set[str] = set()
        self._lock = threading.Lock()
        self._is_claimed = False

    def add(self, name: str) -> bool:
        """Take up a tensor that is written; True if more of the file can be hashed."""
        self._written.add(name)
        before, ready = self._ready, self._ready
        while self._waiting and self._waiting[-1] in self._written:
            last = self._waiting.pop()
            # one without elements may lie before what was written already
            ready = max(ready, self.file.offsets[last] + self.file.tensors[last].num_bytes)
        with self._lock:
            self._ready = ready
        return ready > before

    def claim(self) -> bool:
        """Claim the file for the calling thread's job; False if another has it."""
        with self._lock:
            is_free, self._is_claimed = not self._is_claimed, True
            return is_free

    def catch_up(self) -> None:
        """Hash what is ready, and give the file free; who calls has claimed it."""
        with self._files.opened(self.file.name) as descriptor:
            while True:
                with self._lock:
                    many = min(_PIECE, self._ready - self._hashed)
                    if not many:
                        self._is_claimed = False
                        return
                self._hash(descriptor, many)

    def _hash(self, descriptor: int, many: int) -> None:
        try:
            piece = os.pread(descriptor, many, self._hashed)
        except OSError as error:
            raise OutputError(
                f"cannot read `{self.file.name}` back: {error.strerror or error}"
            ) from error
        if not piece:
            raise OutputError(f"`{self.file.name}` has become shorter while it was written")
        self._digest.update(piece)
        self._hashed += len(piece)

    def digest(self) -> str:
        """Return the digest of the whole file."""
        assert self._hashed == self.file.num_bytes, f"`{self.file.name}` is not hashed to its end"
        return self._digest.hexdigest()
