"""Write the files of a plan: all created at full size first, then filled tensor by tensor.

The output lies in a hidden folder beside its final place until it is complete; then it is renamed.
Tensors may come in any order. `finish` refuses to end while a tensor is missing.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
from torch import Tensor

from quantload.errors import OutputError, listed
from quantload.loader.open import INDEX
from quantload.loader.output_files import OutputFile

_MARKER = ".quantload-unfinished"  # says that a staging folder is ours to remove


class CheckpointWriter:
    """Writes one checkpoint; use as a context manager, which removes everything on an error.

    Args:
        folder: Final place; must not exist, or be an empty folder.
        files: Files with every tensor's place.

    Raises:
        OutputError: The place is taken, is a file, or the disk is too small.
    """

    def __init__(self, folder: Path, files: Sequence[OutputFile]) -> None:
        self.folder = Path(os.path.abspath(folder))  # noqa: PTH100 - resolves no links
        self.staging = self.folder.with_name(f".{self.folder.name}.unfinished")
        self._files = {name: file for file in files for name in file.tensors}
        self._all_files = files
        self._written: set[str] = set()
        self._marker: BinaryIO | None = None  # open and locked while the staging folder is ours

    def __enter__(self) -> CheckpointWriter:
        check_place(self.folder)
        try:
            self._remove_old_staging()
            self.staging.mkdir(parents=True)
            self._marker = (self.staging / _MARKER).open("wb")
            fcntl.flock(self._marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._create_files()
        except OSError as error:
            self._discard()
            raise self._error(error) from error
        return self

    def _error(self, error: OSError) -> OutputError:
        """Return the error of a failed write, with what is needed where there was no room."""
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        needed = sum(file.num_bytes for file in self._all_files)
        return _output_error(error, self.folder, f", {needed} bytes are needed" if is_full else "")

    def _create_files(self) -> None:
        total = sum(file.num_bytes for file in self._all_files)
        free = shutil.disk_usage(self.staging).free
        if free < total:
            raise OutputError(
                f"disk is too small: {total} bytes needed, {free} free, at `{self.folder}`"
            )
        for file in self._all_files:
            with (self.staging / file.name).open("wb") as stream:
                stream.write(file.header)
                stream.truncate(file.num_bytes)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._discard()
        self._release()

    def _remove_old_staging(self) -> None:
        if not self.staging.exists():
            return
        marker = self.staging / _MARKER
        if not marker.is_file():
            raise OutputError(
                f"`{self.staging}` is in the way and was not made by quantload",
                hint="move it away",
            )
        with marker.open("rb") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise OutputError(f"another process is writing `{self.folder}`") from error
            shutil.rmtree(self.staging)

    def _discard(self) -> None:
        if self._marker is not None:
            shutil.rmtree(self.staging, ignore_errors=True)
        self._release()

    def _release(self) -> None:
        if self._marker is not None:
            self._marker.close()
            self._marker = None

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor to its place.

        Args:
            name: Name in the output; must be in the plan.
            tensor: Must have the planned dtype and shape.
        """
        file = self._files[name]
        planned = file.tensors[name]
        assert name not in self._written, f"{name} is written twice"
        assert (tensor.dtype, tuple(tensor.shape)) == (planned.dtype, planned.shape), (
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}, planned were {planned.dtype} "
            f"{planned.shape}"
        )
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        try:
            with (self.staging / file.name).open("r+b", buffering=0) as stream:
                _write_at(stream.fileno(), data.data, file.offsets[name])
        except OSError as error:
            raise self._error(error) from error
        self._written.add(name)

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a JSON file beside the weights."""
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        try:
            (self.staging / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise self._error(error) from error

    def finish(self) -> Path:
        """Write the index, check that nothing is missing, and give the folder its name."""
        missing = set(self._files) - self._written
        assert not missing, f"planned tensors were not written: {listed(missing)}"
        if len(self._all_files) > 1:
            self.write_json(INDEX, self._index())
        try:
            self.staging.rename(self.folder)  # replaces an empty folder
            self._release()
            (self.folder / _MARKER).unlink()
        except OSError as error:
            raise self._error(error) from error
        return self.folder

    def _index(self) -> dict[str, Any]:
        total = sum(t.num_bytes for file in self._all_files for t in file.tensors.values())
        weight_map = {name: file.name for name, file in sorted(self._files.items())}
        return {"metadata": {"total_size": total}, "weight_map": weight_map}


def check_place(folder: Path) -> None:
    """Check that a folder may be written.

    Raises:
        OutputError: It is a file, or a folder that is not empty.
    """
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise OutputError(f"output `{folder}` is a file or a link, expected a new folder")
    try:
        taken = folder.is_dir() and any(folder.iterdir())
    except OSError as error:
        raise _output_error(error, folder) from error
    if taken:
        raise OutputError(
            f"output folder `{folder}` is not empty",
            hint="give a new name, or remove the folder first",
        )


def _write_at(descriptor: int, data: memoryview, position: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], position + done)


def _output_error(error: OSError, folder: Path, more: str = "") -> OutputError:
    if isinstance(error, OutputError):
        return error
    return OutputError(f"cannot write `{folder}`: {error.strerror or error}{more}")
