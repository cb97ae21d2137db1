"""What is read of a stored tensor: some of its rows, some of its columns.

A rank of a parallel model needs a part of most tensors. Rows lie one after the other in the file.
Columns lie in pieces, one in each row; pieces below a page are not worth it: then whole rows are
read, and cut in memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from quantload.loader.checkpoint import TensorEntry

SMALLEST_PIECE = 4096  # bytes: a page, the least that a system reads
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Segment:
    """Pieces of a file, each `stride` bytes behind the one before it.

    Args:
        start: First byte, in the file.
        pieces: How many; 1 is a range of bytes.
        piece_bytes: Bytes of each.
        stride: Bytes from one to the next.
    """

    start: int
    pieces: int
    piece_bytes: int
    stride: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all pieces together."""
        return self.pieces * self.piece_bytes


@dataclass(frozen=True, slots=True)
class Portion:
    """A part of a stored tensor.

    Args:
        entry: The tensor; its elements lie in the file one after the other.
        rows: (start, stop) of each run along its first axis, in the order of the result; None is
            all.
        columns: (start, stop) along its second and last axis; None is all.
    """

    entry: TensorEntry
    rows: tuple[Span, ...] | None = None
    columns: Span | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of what is read."""
        shape = list(self.entry.shape)
        if self.rows is not None:
            shape[0] = sum(stop - start for start, stop in self.rows)
        if self.columns is not None:
            shape[1] = self.columns[1] - self.columns[0]
        return tuple(shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of what is read."""
        return math.prod(self.shape) * self.entry.dtype.itemsize

    def segments(self) -> list[Segment]:
        """Return where it lies, in the order of the result."""
        if self.rows is None and self.columns is None:
            return [Segment(self.entry.start, 1, self.entry.num_bytes, 0)]
        row_bytes = math.prod(self.entry.shape[1:]) * self.entry.dtype.itemsize
        runs = ((0, self.entry.shape[0]),) if self.rows is None else self.rows
        if self.columns is None:
            return [
                Segment(self.entry.start + start * row_bytes, 1, (stop - start) * row_bytes, 0)
                for start, stop in runs
            ]
        first, last = (column * self.entry.dtype.itemsize for column in self.columns)
        return [
            Segment(
                self.entry.start + start * row_bytes + first, stop - start, last - first, row_bytes
            )
            for start, stop in runs
        ]

    def as_entry(self) -> TensorEntry:
        """Return the header that a file of this part alone would have; where it lies is not told.

        What reads it gets the part from elsewhere.
        """
        return replace(self.entry, shape=self.shape, num_bytes=self.num_bytes)


def portion_of(
    entry: TensorEntry, rows: Sequence[Span] | None, columns: Span | None
) -> tuple[Portion, Span | None]:
    """Return what to read for rows and columns of a tensor, and what columns to take of that.

    Args:
        entry: A tensor [N, K], [N, ...] or [N]; of one without columns `columns` says nothing.
        rows: (start, stop) of each run; None is all.
        columns: (start, stop); None is all.
    """
    runs = None if rows is None else tuple(rows)
    if runs == ((0, entry.shape[0] if entry.shape else 1),):
        runs = None
    if columns is None or len(entry.shape) != 2 or columns == (0, entry.shape[1]):
        return Portion(entry, runs), None
    if (columns[1] - columns[0]) * entry.dtype.itemsize < SMALLEST_PIECE:
        return Portion(entry, runs), columns
    return Portion(entry, runs, columns), None


def composed(taken: Sequence[range] | None, rows: Sequence[Span] | None) -> list[Span] | None:
    """Return the runs of a tensor that are rows of rows of it.

    Args:
        taken: Runs of the tensor that are taken, of step 1; None is all of it.
        rows: Runs of what is taken; None is all of it.
    """
    if taken is None or rows is None:
        runs = None if taken is None else [(run.start, run.stop) for run in taken]
        return runs if rows is None else list(rows)
    found: list[Span] = []
    for start, stop in rows:
        before = 0  # rows of the runs before this one
        for run in taken:
            first, last = max(start - before, 0), min(stop - before, len(run))
            if first < last:
                found.append((run.start + first, run.start + last))
            before += len(run)
    return found


__all__ = ["SMALLEST_PIECE", "Portion", "Segment", "Span", "composed", "portion_of"]
