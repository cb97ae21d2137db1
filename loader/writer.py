"""The files of an output: created at full size first, then filled in any order by any thread."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantload.errors import OutputError
from quantload.loader.checksum import WORD, sum_of_words
from quantload.loader.open import INDEX
from quantload.loader.output_files import OutputFile, OutputTensor
from quantload.loader.page_locked import BounceBuffer
from quantload.loader.staging import output_error

_PIECE = 1 << 22  # bytes that are read at a time to compute a checksum
_MOST_OPEN = 64  # files; more only while that many threads write to as many of them


@dataclass
class _Open:
    """An open file, and how many threads use it."""

    descriptor: int
    users: int = 0


class OutputFiles:
    """The weight files of one output; some of them are open at a time.

    Args:
        folder: Where they are; exists.
        files: Files with every tensor's place.
        final: Name of the output, for messages.

    Attributes:
        told: Is called with (tensor name, first byte, one past the last) of everything that was
            written, by the thread that wrote it.
    """

    def __init__(self, folder: Path, files: Sequence[OutputFile], *, final: Path) -> None:
        self.folder = folder
        self.final = final
        self.all = files
        self._place = {name: file for file in files for name in file.tensors}
        self._open: dict[str, _Open] = {}  # those that were used last at the end
        self._opening = threading.Lock()
        self.told: Callable[[str, int, int], None] = _tell_nobody

    def create(self) -> bool:
        """Create what is not there yet, with headers and at full size; remove everything else.

        Returns:
            True if every file was there already, as it should be.

        Raises:
            OutputError: The disk is too small, or cannot be written.
        """
        try:
            self._remove_strays()
            missing = [file for file in self.all if not self._is_created(file)]
            self._check_room(missing)
            for file in missing:
                with (self.folder / file.name).open("wb") as stream:
                    stream.write(file.header)
                    stream.truncate(file.num_bytes)
        except OSError as error:
            raise self._error(error) from error
        return not missing

    def _remove_strays(self) -> None:
        """Remove what an earlier run copied: it may be gone from the source."""
        names = {file.name for file in self.all}
        for path in self.folder.iterdir():
            if path.name in names:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def _is_created(self, file: OutputFile) -> bool:
        path = self.folder / file.name
        if not path.is_file() or path.stat().st_size != file.num_bytes:
            return False
        with path.open("rb") as stream:
            return stream.read(len(file.header)) == file.header

    def _check_room(self, missing: Iterable[OutputFile]) -> None:
        there = [file for file in self.all if file not in missing]
        written = sum((self.folder / file.name).stat().st_blocks * 512 for file in there)
        needed = sum(file.num_bytes for file in self.all) - written
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise OutputError(
                f"disk is too small: {needed} bytes needed, {free} free, at `{self.final}`"
            )

    def write(
        self, name: str, tensor: Tensor, *, first_row: int = 0, bounce: BounceBuffer | None = None
    ) -> int:
        """Write a tensor, or some of its rows, to its place.

        Args:
            name: Name in the output; must be in the plan.
            tensor: Must have the planned dtype and, but for the number of rows, shape.
            first_row: Row of the whole tensor at which it begins.
            bounce: Buffer for a tensor that is not on the CPU; None makes one.

        Returns:
            The checksum of what was written.
        """
        planned = self._place[name].tensors[name]
        fits = tensor.dtype == planned.dtype and _fits(tensor, planned, first_row)
        assert fits, (
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} from row {first_row} on, planned were "
            f"{planned.dtype} {planned.shape}"
        )
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        start = first_row * (planned.num_bytes // planned.shape[0]) if first_row else 0
        if data.device.type == "cpu":
            return self.write_bytes(name, data.numpy().data, start=start)
        pieces = (bounce or BounceBuffer(data.device)).pieces_of(data)
        return sum(self.write_bytes(name, piece, start=start + at) for at, piece in pieces) & WORD

    def write_bytes(self, name: str, data: memoryview, *, start: int) -> int:
        """Write bytes of a tensor from its byte `start` on; returns their checksum."""
        file = self._place[name]
        position = file.offsets[name] + start
        try:
            with self.opened(file.name) as descriptor:
                _write_at(descriptor, data, position)
        except OSError as error:
            raise self._error(error) from error
        self.told(name, start, start + len(data))
        return sum_of_words(data, position)

    def checksum_of(self, name: str, start: int = 0, stop: int | None = None) -> int:
        """Return the checksum of bytes of a tensor, or of all, as they are in its file now."""
        file = self._place[name]
        last = file.tensors[name].num_bytes if stop is None else stop
        position, left = file.offsets[name] + start, last - start
        total = 0
        try:
            while left:
                with self.opened(file.name) as descriptor:
                    data = os.pread(descriptor, min(left, _PIECE), position)
                if not data:
                    break
                total += sum_of_words(memoryview(data), position)
                position, left = position + len(data), left - len(data)
        except OSError as error:
            raise self._error(error) from error
        return total & WORD

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a JSON file beside the weights."""
        self.write_text(name, json.dumps(content, indent=2, ensure_ascii=False) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Write a text file beside the weights."""
        try:
            (self.folder / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise self._error(error) from error

    def write_index(self) -> None:
        """Write the index of several files; a single one has none."""
        if len(self.all) < 2:
            return
        total = sum(t.num_bytes for file in self.all for t in file.tensors.values())
        weight_map = {name: file.name for name, file in sorted(self._place.items())}
        self.write_json(INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})

    def close(self) -> None:
        """Close every file."""
        for file in self._open.values():
            os.close(file.descriptor)
        self._open.clear()

    @contextmanager
    def opened(self, name: str) -> Iterator[int]:
        """Keep a file open while this is; gives its descriptor."""
        with self._opening:
            file = self._open.pop(name, None)
            if file is None:
                self._close_idle(_MOST_OPEN - 1)
                file = _Open(os.open(self.folder / name, os.O_RDWR | os.O_CLOEXEC))
            self._open[name] = file
            file.users += 1
        try:
            yield file.descriptor
        finally:
            with self._opening:
                file.users -= 1

    def _close_idle(self, most: int) -> None:
        """Close files that nobody uses, those that were used first, until so many are open."""
        idle = [name for name, file in self._open.items() if not file.users]
        for name in idle[: max(0, len(self._open) - most)]:
            os.close(self._open.pop(name).descriptor)

    def _error(self, error: OSError) -> OutputError:
        needed = sum(file.num_bytes for file in self.all)
        return output_error(error, self.final, f", {needed} bytes are needed in all")


def _tell_nobody(name: str, start: int, stop: int) -> None:
    del name, start, stop


def _fits(tensor: Tensor, planned: OutputTensor, first_row: int) -> bool:
    shape = tuple(tensor.shape)
    if shape == planned.shape:
        return not first_row
    if len(shape) != len(planned.shape) or not shape:
        return False
    return shape[1:] == planned.shape[1:] and first_row + shape[0] <= planned.shape[0]


def _write_at(descriptor: int, data: memoryview, position: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], position + done)
