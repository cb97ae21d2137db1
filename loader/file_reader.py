"""Read ranges and pieces of files into memory that is there already."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from quantload.errors import CheckpointError
from quantload.loader.checkpoint import TensorEntry, file_ends
from quantload.loader.runs import Read


class FileReader:
    """Reads for one thread; keeps the file that it read last open.

    On a network disk each opening costs a round trip, and reads come in the order of the files.
    """

    def __init__(self) -> None:
        self._file: Path | None = None
        self._descriptor = -1

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._descriptor)
        self._file = None

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
        except OSError as error:
            raise CheckpointError(
                f"cannot read `{read.file}`: {error.strerror or error}, in tensor "
                f"`{read.parts[0].fetch.portion.entry.name}`"
            ) from error

    def _opened(self, file: Path) -> int:
        if file is not self._file and file != self._file:  # comparing paths takes a while
            self.close()
            self._descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            self._file = file
        return self._descriptor

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
