"""The place where an output grows until it is complete, and what a run that ended early left there.

    .NAME.unfinished/       beside the output NAME, on the same disk
        lock                held by the process that writes
        plan.json           identity of the conversion: digest of source, decisions and layout
        done-R              one line a finished task: its number and the checksum of its bytes;
                            rank R of several processes writes its own
        checkpoint/         the files of the output; becomes NAME at the end
        finished            the output is complete: only the rename is left

A run that was killed is continued by the same command: tasks whose bytes still have their checksum
are not done again. A line counts only with its line end, so a torn one is a task that is not done.
A different command may not write over what is there.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from quantload.errors import OutputError, QuantloadError, WorkerError

_log = logging.getLogger("quantload")
_OURS = ("lock", "plan.json", "plan.json.new", "checkpoint", "finished")
_DONE = "done-"


@dataclass(frozen=True)
class Identity:
    """What makes two runs the same conversion.

    Args:
        digest: Of source, decisions and layout of the output.
        summary: The conversion in a few words, for messages.
    """

    digest: str
    summary: str


class Staging:
    """The unfinished output of one conversion; use as a context manager.

    An error that the same command would meet again removes it; others, and whatever kills the
    process, leave it to be continued.

    Args:
        folder: Final place; must not exist, or be an empty folder.
        identity: Of this conversion.
        rank: Of this process among those that write together; only rank 0 prepares and ends.

    Raises:
        OutputError: The place is taken, is a file, or belongs to another conversion.
    """

    def __init__(self, folder: Path, identity: Identity, *, rank: int = 0) -> None:
        self.folder = absolute(folder)
        self.home = unfinished_name(self.folder)
        self.checkpoint = self.home / "checkpoint"
        self._identity = identity
        self._rank = rank
        self._lock: BinaryIO | None = None
        self._done: BinaryIO | None = None
        self._noting = threading.Lock()

    def __enter__(self) -> Staging:
        if self._rank:
            return self
        try:
            self._prepare()
        except OSError as error:
            self._release()
            raise output_error(error, self.folder) from error
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and self._lock is not None:
            if is_certain(error) or not self.finished_tasks():
                shutil.rmtree(self.home, ignore_errors=True)
            else:
                _log.warning(
                    "the same command continues where this one ended; `%s` holds what is done",
                    self.home,
                )
        self._release()

    @property
    def is_complete(self) -> bool:
        """True if an earlier run was stopped between its last byte and its end."""
        return (self.home / "finished").exists()

    def finished_tasks(self) -> dict[int, int]:
        """Return the checksums of finished tasks, by number, as all ranks noted them."""
        found = {}
        for file in sorted(self.home.glob(_DONE + "*")):
            whole, _, _ = file.read_text(encoding="ascii").rpartition("\n")
            for line in whole.splitlines():
                number, _, checksum = line.partition(" ")
                found[int(number)] = int(checksum, 16)
        return found

    def note(self, task: int, checksum: int) -> None:
        """Note that a task is written."""
        line = f"{task} {checksum:x}\n".encode("ascii")
        with self._noting:
            if self._done is None:
                self._done = (self.home / f"{_DONE}{self._rank}").open("ab", buffering=0)
            self._done.write(line)

    def forget(self) -> None:
        """Forget every finished task: the files are made anew."""
        for file in self.home.glob(_DONE + "*"):
            file.unlink()

    def finish(self) -> Path:
        """Give the output its name."""
        try:
            (self.home / "finished").touch()
            if self.checkpoint.exists():
                self.checkpoint.rename(self.folder)  # replaces an empty folder
            self._remove_home()
        except OSError as error:
            raise output_error(error, self.folder) from error
        return self.folder

    # -- preparation ---------------------------------------------------------------------------

    def _prepare(self) -> None:
        check_place(self.folder)
        if self.home.exists() and not self._is_ours():
            raise OutputError(
                f"`{self.home}` is in the way and was not made by quantload", hint="move it away"
            )
        self.home.mkdir(parents=True, exist_ok=True)
        self._lock = (self.home / "lock").open("ab")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OutputError(f"another process is writing `{self.folder}`") from error
        found = self._stored_identity()
        if found is None:
            self._begin()
        elif found.digest != self._identity.digest:
            raise OutputError(
                f"`{self.folder}` was begun by another conversion: found {found.summary}, this is "
                f"{self._identity.summary} (or the source has changed since)",
                hint=f"finish it with its own command, or remove `{self.home}` to begin anew",
            )

    def _is_ours(self) -> bool:
        if not self.home.is_dir():
            return False
        names = [path.name for path in self.home.iterdir()]
        return all(name in _OURS or name.startswith(_DONE) for name in names)

    def _stored_identity(self) -> Identity | None:
        """Return the identity of what is there; None if nothing of worth is."""
        try:
            content = json.loads((self.home / "plan.json").read_text(encoding="utf-8"))
            return Identity(content["digest"], content["summary"])
        except (FileNotFoundError, ValueError, KeyError):
            return None

    def _begin(self) -> None:
        (self.home / "finished").unlink(missing_ok=True)
        check_place(self.folder)
        shutil.rmtree(self.checkpoint, ignore_errors=True)
        self.forget()
        self.checkpoint.mkdir()
        content = {"digest": self._identity.digest, "summary": self._identity.summary}
        new = self.home / "plan.json.new"
        new.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        new.rename(self.home / "plan.json")

    def _remove_home(self) -> None:
        self._release()
        for file in sorted(self.home.iterdir(), key=lambda path: path.name in _OURS):
            file.unlink()
        self.home.rmdir()

    def _release(self) -> None:
        for stream in (self._lock, self._done):
            if stream is not None:
                stream.close()
        self._lock = self._done = None


def is_certain(error: BaseException) -> bool:
    """True if the same command would meet the error again: it is about content, not the machine."""
    if not isinstance(error, QuantloadError) or isinstance(error, OutputError | WorkerError):
        return False
    return not isinstance(error.__cause__, OSError)


def absolute(folder: Path) -> Path:
    """Return a folder with its full name; links are not resolved."""
    return Path(os.path.abspath(folder))  # noqa: PTH100 - resolves no links


def unfinished_name(folder: Path) -> Path:
    """Return where an output grows before it has its name."""
    return folder.with_name(f".{folder.name}.unfinished")


def check_place(folder: Path) -> None:
    """Check that a folder may be written.

    Raises:
        OutputError: It is a file, or a folder that is not empty.
    """
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise OutputError(f"output `{folder}` is a file or a link, expected a new folder")
    if (unfinished_name(absolute(folder)) / "finished").exists():
        return  # of a run that was stopped between the rename and its end
    try:
        taken = folder.is_dir() and any(folder.iterdir())
    except OSError as error:
        raise output_error(error, folder) from error
    if taken:
        raise OutputError(
            f"output folder `{folder}` is not empty",
            hint="give a new name, or remove the folder first",
        )


def output_error(error: OSError, folder: Path, more: str = "") -> OutputError:
    """Return the error of a failed write to `folder`."""
    if isinstance(error, OutputError):
        return error
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    hint = "make room and run the same command again: it continues" if is_full else ""
    return OutputError(f"cannot write `{folder}`: {error.strerror or error}{more}", hint=hint)
