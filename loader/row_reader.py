"""Read weights of a source in rows, through one buffer that is used again and again.

What is read is quantized or compared while it is in the cache; to fill new memory for every tensor
would take longer than to read it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from quantload.errors import CheckpointError
from quantload.loader.checkpoint import TensorEntry, file_ends
from quantload.loader.page_locked import BounceBuffer
from quantload.loader.plan_row import SourceRegion
from quantload.loader.source import FLOAT_DTYPES, Source, SourceWeight

CHUNK_BYTES = 1 << 22  # of a weight that is in work at a time on a CPU
_MOST_OPEN = 16
GPU_CHUNK_BYTES = 1 << 26  # elsewhere, where every step costs a launch and a wait


class RowReader:
    """Reads tensors of safetensors files; used by one thread.

    Args:
        device: Where rows are needed. For a GPU they are read through page-locked buffers, and
            chunks are larger.
        chunk_bytes: Bytes of a weight that are in work at a time; None is what serves the device.

    Attributes:
        bounce: Its buffer between files and a GPU; who has the thread may use it between reads.
    """

    def __init__(self, device: torch.device, *, chunk_bytes: int | None = None) -> None:
        self.device = device
        default = CHUNK_BYTES if device.type == "cpu" else GPU_CHUNK_BYTES
        self.chunk_bytes = default if chunk_bytes is None else chunk_bytes
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self.bounce = BounceBuffer(device)
        self._open: dict[Path, int] = {}

    def close(self) -> None:
        """Close all files."""
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def shrink(self) -> None:
        """Give back a buffer that has grown for a weight in one piece."""
        if self._buffer.numel() > 2 * max(CHUNK_BYTES, self.chunk_bytes):
            self._buffer = torch.empty(0, dtype=torch.uint8)

    def rows(
        self, entry: TensorEntry, region: SourceRegion, *, step: int | None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield (first row, rows) of a weight [N, K], on the device, as stored.

        Args:
            entry: The tensor that holds it.
            region: Where it lies.
            step: Every piece but the last has a multiple of this many rows; None is one piece.

        Rows on a CPU are valid until the next are asked for.
        """
        many = region.rows
        if step is not None:
            many = rows_of(self.chunk_bytes, region.row_stride * entry.dtype.itemsize, step)
        for start in range(0, region.rows, many):
            stop = min(region.rows, start + many)
            yield start, self.read_rows(entry, region, start, stop)

    def read_rows(self, entry: TensorEntry, region: SourceRegion, start: int, stop: int) -> Tensor:
        """Read rows start..stop of a weight: [stop - start, K] on the device."""
        size = entry.dtype.itemsize
        elements = (stop - start - 1) * region.row_stride + region.columns
        first, num_bytes = (region.first + start * region.row_stride) * size, elements * size
        if self.device.type == "cpu":
            raw = self.read(entry, first, num_bytes)
        else:
            raw = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
            self.bounce.fill(raw, lambda data, at: self.fill(entry, first + at, data))
        floats = raw.view(entry.dtype)
        return floats.as_strided((stop - start, region.columns), (region.row_stride, 1))

    def read(self, entry: TensorEntry, start: int, num_bytes: int) -> Tensor:
        """Read bytes of a tensor from its byte `start` on: [num_bytes] uint8 in host memory.

        They are valid until the next are asked for.

        Raises:
            CheckpointError: See `fill`.
        """
        if self.device.type != "cpu" and num_bytes <= self.bounce.piece_bytes:
            piece = self.bounce.free().memory[:num_bytes]
        else:
            if self._buffer.numel() < num_bytes:
                self._buffer = torch.empty(num_bytes, dtype=torch.uint8)
            piece = self._buffer[:num_bytes]
        self.fill(entry, start, piece.numpy().data)
        return piece

    def fill(self, entry: TensorEntry, start: int, data: memoryview) -> None:
        """Read what is from byte `start` of a tensor on into memory.

        Raises:
            HeaderError: The file is shorter than its header says.
            CheckpointError: It cannot be read.
        """
        done = 0
        try:
            descriptor = self._descriptor(entry.file)
            while done < len(data):
                got = os.preadv(descriptor, [data[done:]], entry.start + start + done)
                if not got:
                    raise file_ends(entry, start + done)
                done += got
        except OSError as error:
            raise CheckpointError(
                f"cannot read `{entry.file}`: {error.strerror or error}"
            ) from error

    def _descriptor(self, file: Path) -> int:
        if file not in self._open:
            while len(self._open) >= _MOST_OPEN:
                os.close(self._open.pop(next(iter(self._open))))  # the one that was opened first
            self._open[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        return self._open[file]


def region_of(weight: SourceWeight, source: Source) -> SourceRegion | None:
    """Return where a plain matrix lies; None if it has to be decoded or put in order."""
    entry = source.checkpoint.tensors.get(weight.parameter_name)
    if entry is None or not entry.is_contiguous or source.reader.widens_floats:
        return None
    if weight.is_quantized or entry.shape != weight.shape or entry.dtype not in FLOAT_DTYPES:
        return None
    rows, columns = weight.shape
    return SourceRegion(tensor=entry.name, first=0, rows=rows, columns=columns, row_stride=columns)


def rows_of(num_bytes: int, row_bytes: int, step: int) -> int:
    """Return how many rows make `num_bytes`: a multiple of `step`, at least one."""
    return max(1, num_bytes // (row_bytes * step or 1)) * step


def pieces(weight: Tensor, *, step: int | None) -> Iterator[tuple[int, Tensor]]:
    """Yield (first row, rows) of a weight [N, K] that is in memory, as `RowReader.rows` does."""
    many = weight.shape[0]
    if step is not None:
        num_bytes = CHUNK_BYTES if weight.device.type == "cpu" else GPU_CHUNK_BYTES
        many = rows_of(num_bytes, weight[:1].nbytes, step)
    for start in range(0, weight.shape[0], max(1, many)):
        yield start, weight[start : start + many]
