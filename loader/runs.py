"""From the parts of a checkpoint that a model needs to the reads that fetch them.

Parts are read in the order in which they lie in the files; neighbours are read at once, small gaps
between them too, and long parts in several reads, so that several threads work on one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from quantload.loader.portion import Portion

GAP_BYTES = 1 << 19  # read through: costs less than another read, and a disk reads it anyway
_MOST_PARTS = 512  # of a read; a system call takes at most 1024 buffers


class Fetch:
    """A part of a stored tensor on its way into memory of its own.

    Args:
        portion: What is read.
        device: Where it goes.
        is_kept: True if the memory becomes part of the model, False if it is let go of after the
            weight was decoded.
    """

    __slots__ = ("_bytes", "_row", "device", "is_kept", "portion", "reads")

    def __init__(self, portion: Portion, device: torch.device, *, is_kept: bool) -> None:
        self.portion, self.device, self.is_kept = portion, device, is_kept
        self.reads: list[Read] = []
        self._bytes: Tensor | None = None
        self._row: Row | None = None

    @property
    def is_allocated(self) -> bool:
        """True if it has memory."""
        return self._bytes is not None

    def allocated(self) -> Tensor:
        """Return its memory: [bytes] uint8; only one thread at a time may call this."""
        if self._bytes is None and self._row is not None:
            self._bytes = self._row.memory_of(self)
        elif self._bytes is None:
            self._bytes = torch.empty(self.portion.num_bytes, dtype=torch.uint8, device=self.device)
        return self._bytes

    def take(self) -> Tensor:
        """Return what was read, as stored, and let go of it."""
        assert self._bytes is not None, "taken once, and after it was read"
        raw, self._bytes, self._row = self._bytes, None, None
        return raw.view(self.portion.entry.dtype).reshape(self.portion.shape)


class Row:
    """Memory in which fetches of one dtype lie one after the other.

    Args:
        fetches: In their order.
    """

    def __init__(self, fetches: Sequence[Fetch]) -> None:
        self._starts: dict[int, int] = {}
        self._device, self._size = fetches[0].device, 0
        for fetch in fetches:
            self._starts[id(fetch)] = self._size
            self._size += fetch.portion.num_bytes
            fetch._row = self
        self._memory: Tensor | None = None

    def memory_of(self, fetch: Fetch) -> Tensor:
        """Return the place of a fetch."""
        if self._memory is None:
            self._memory = torch.empty(self._size, dtype=torch.uint8, device=self._device)
        start = self._starts[id(fetch)]
        return self._memory[start : start + fetch.portion.num_bytes]


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of a read that belong to a fetch.

    Args:
        fetch: Whose they are.
        at: Where they begin in the read; gaps count.
        to: Where they begin in the memory of the fetch.
        num_bytes: How many they are.
    """

    fetch: Fetch
    at: int
    to: int
    num_bytes: int


@dataclass(slots=True, eq=False)
class Read:
    """What one thread reads at once.

    Args:
        file: File.
        start: First byte in it.
        num_bytes: How many, with gaps; of pieces those of all pieces.
        parts: What they are.
        pieces: How many pieces it has; 1 is a range of bytes.
        stride: Bytes from one piece to the next.
        index: Its number.
        is_done: True once the bytes are there, or never will be.
        error: Why they never will.
        event: On a GPU, what says that they have arrived.
    """

    file: Path
    start: int
    num_bytes: int
    parts: list[Part]
    pieces: int = 1
    stride: int = 0
    index: int = -1
    is_done: bool = False
    error: BaseException | None = None
    event: torch.cuda.Event | None = field(default=None, repr=False)


def plan_reads(fetches: Sequence[Fetch], *, read_bytes: int, gap_bytes: int) -> list[Read]:
    """Return the reads of all fetches, in the order of the files.

    Args:
        fetches: What is wanted; each then knows its reads.
        read_bytes: Most bytes of a read.
        gap_bytes: Longest gap that is read through.
    """
    ranges = [found for fetch in fetches for found in _ranges(fetch, read_bytes)]
    ranges.sort(key=lambda read: (str(read.file), read.start))
    reads: list[Read] = []
    for found in ranges:
        last = reads[-1] if reads else None
        if last is None or not _joined(last, found, read_bytes, gap_bytes):
            reads.append(found)
    for index, read in enumerate(reads):
        read.index = index
        for part in read.parts:
            if not part.fetch.reads or part.fetch.reads[-1] is not read:
                part.fetch.reads.append(read)
    return reads


def _ranges(fetch: Fetch, read_bytes: int) -> Iterator[Read]:
    """Yield the reads of one fetch, as if it were alone."""
    file, to = fetch.portion.entry.file, 0
    for segment in fetch.portion.segments():
        if segment.piece_bytes > read_bytes and segment.pieces > 1:
            for number in range(segment.pieces):
                place = to + number * segment.piece_bytes
                for start in range(0, segment.piece_bytes, read_bytes):
                    size = min(read_bytes, segment.piece_bytes - start)
                    first = segment.start + number * segment.stride + start
                    yield Read(file, first, size, [Part(fetch, 0, place + start, size)])
        elif segment.pieces == 1:
            for start in range(0, segment.num_bytes, read_bytes):
                size = min(read_bytes, segment.num_bytes - start)
                yield Read(file, segment.start + start, size, [Part(fetch, 0, to + start, size)])
        else:
            many = max(1, read_bytes // segment.piece_bytes)
            for first in range(0, segment.pieces, many):
                pieces = min(many, segment.pieces - first)
                size, start = pieces * segment.piece_bytes, segment.start + first * segment.stride
                part = Part(fetch, 0, to + first * segment.piece_bytes, size)
                yield Read(file, start, size, [part], pieces, segment.stride)
        to += segment.num_bytes


def _joined(last: Read, found: Read, read_bytes: int, gap_bytes: int) -> bool:
    """Append a range to the read before it, if they are neighbours."""
    if last.file != found.file or last.pieces > 1 or found.pieces > 1:
        return False
    gap = found.start - (last.start + last.num_bytes)
    size = found.start + found.num_bytes - last.start
    if not 0 <= gap <= gap_bytes or size > read_bytes or len(last.parts) >= _MOST_PARTS:
        return False
    part = found.parts[0]
    last.parts.append(Part(part.fetch, found.start - last.start, part.to, part.num_bytes))
    last.num_bytes = size
    return True


__all__ = ["GAP_BYTES", "Fetch", "Part", "Read", "Row", "plan_reads"]
