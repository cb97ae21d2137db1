"""Read ranges and pieces of files into memory that is there already."""

from __future__ import annotations

import mmap
import os
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from quantload.errors import CheckpointError
from quantload.loader.checkpoint import TensorEntry, file_ends
from quantload.loader.runs import Read


class FileReader:
    """Reads for several threads; each file is opened once, and closed after its last read.

    On a network disk each opening costs a round trip.

    Args:
        reads: All that will be read.
    """

    def __init__(self, reads: Iterable[Read]) -> None:
        self._left = Counter(read.file for read in reads)
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close what is open."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def fill(self, read: Read, buffers: Sequence[memoryview]) -> None:
        """Read into buffers, one after the other.

        Args:
            read: What is read.
            buffers: Together as long as it.

        Raises:
            HeaderError: The file is shorter than its header says.
            CheckpointError: It cannot be read.
        """
        try:
            descriptor = self._opened(read.file)
            if read.pieces == 1:
                self._fill_range(descriptor, read, list(buffers))
            else:
                self._fill_pieces(descriptor, read, buffers[0])
            self._release(read.file)
        except OSError as error:
            raise CheckpointError(
                f"cannot read `{read.file}`: {error.strerror or error}, in tensor "
                f"`{read.parts[0].fetch.portion.entry.name}`"
            ) from error

    def _opened(self, file: Path) -> int:
        with self._lock:
            if file not in self._descriptors:
                self._descriptors[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            return self._descriptors[file]

    def _release(self, file: Path) -> None:
        with self._lock:
            self._left[file] -= 1
            if not self._left[file]:
                os.close(self._descriptors.pop(file))

    def _fill_range(self, descriptor: int, read: Read, buffers: list[memoryview]) -> None:
        position = read.start
        while buffers:
            got = os.preadv(descriptor, buffers, position)
            if not got:
                raise _ends(read, position)
            position += got
            while buffers and got >= len(buffers[0]):
                got -= len(buffers.pop(0))
            if got:
                buffers[0] = buffers[0][got:]

    def _fill_pieces(self, descriptor: int, read: Read, buffer: memoryview) -> None:
        """Copy pieces out of a mapping: a system call for each would take longer than the bytes."""
        piece_bytes = read.num_bytes // read.pieces
        length = (read.pieces - 1) * read.stride + piece_bytes
        size = os.fstat(descriptor).st_size
        if read.start + length > size:  # a mapping beyond the end would kill the process
            raise _ends(read, size)
        before = read.start % mmap.ALLOCATIONGRANULARITY
        with mmap.mmap(
            descriptor, before + length, prot=mmap.PROT_READ, offset=read.start - before
        ) as mapped:
            whole = np.frombuffer(mapped, np.uint8, count=length, offset=before)
            pieces = np.lib.stride_tricks.as_strided(
                whole, (read.pieces, piece_bytes), (read.stride, 1), writeable=False
            )
            np.copyto(np.frombuffer(buffer, np.uint8).reshape(pieces.shape), pieces)
            del whole, pieces  # a mapping that is looked at cannot be closed


def _ends(read: Read, position: int) -> Exception:
    """Return the error of a file that ends at or before a position of a read."""
    entries: list[TensorEntry] = [part.fetch.portion.entry for part in read.parts]
    entry = next((e for e in entries if position < e.start + e.num_bytes), entries[-1])
    return file_ends(entry, max(0, position - entry.start))


__all__ = ["FileReader"]
