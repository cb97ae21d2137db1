"""The place where an output grows until it is complete, and what a run that ended early left there.

    .NAME.unfinished/       beside the output NAME, on the same disk
        lock                held by the process that writes
        plan.json           identity of the conversion: digest of source, decisions and layout;
                            is called `finished` once the output is complete, so that only the
                            rename is left
        done-R              one line a finished task: its number and the checksum of its bytes;
                            rank R of several processes writes its own
        checkpoint/         the files of the output; becomes NAME at the end

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
import re
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
_LINE = re.compile(rb"([0-9]{1,9}) ([0-9a-f]{1,16})")


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
        rank: Of this process among those that write together; rank 0 begins and finishes, the
            others join.
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
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and self._lock is not None and not self.is_complete:
            if is_certain(error) or not self._holds_work():
                shutil.rmtree(self.home, ignore_errors=True)
            else:
                _log.warning(
                    "the same command continues where this one ended; `%s` holds what is done",
                    self.home,
                )
        self._release()

    def begin(self) -> None:
        """Prepare the place, or take over what an earlier run left there.

        Raises:
            OutputError: The place is taken, is a file, or belongs to another conversion.
        """
        try:
            self._begin()
        except OutputError:
            raise
        except OSError as error:
            raise output_error(error, self.folder) from error

    def join(self) -> None:
        """Check that what the first process began is what this one is about to do.

        Raises:
            OutputError: It is not, or not visible from here.
        """
        found = self._stored_identity()
        if found is None:
            raise OutputError(
                f"`{self.home}` is not there, though the first process made it",
                hint="all processes write to one folder: give one on a disk that they share",
            )
        if found.digest != self._identity.digest:
            raise OutputError(
                f"this process would convert {self._identity.summary}, the first one "
                f"{found.summary}, or another state of the source",
                hint="start all processes with the same command and the same version",
            )

    @property
    def is_complete(self) -> bool:
        """True if an earlier run was stopped between its last byte and its end."""
        return (self.home / "finished").exists()

    def finished_tasks(self) -> dict[int, int]:
        """Return the checksums of finished tasks, by number, as all ranks noted them.

        Lines that are no lines, as a power failure leaves, do not count.
        """
        found = {}
        try:
            for file in sorted(self.home.glob(_DONE + "*")):
                whole, _, _ = file.read_bytes().rpartition(b"\n")
                for match in map(_LINE.fullmatch, whole.split(b"\n")):
                    if match is not None:
                        found[int(match[1])] = int(match[2], 16)
        except OSError as error:
            raise output_error(error, self.folder) from error
        return found

    def note(self, task: int, checksum: int) -> None:
        """Note that a task is written."""
        line = f"{task} {checksum:x}\n".encode("ascii")
        try:
            with self._noting:
                if self._done is None:
                    self._done = _journal(self.home / f"{_DONE}{self._rank}")
                self._done.write(line)
        except OSError as error:
            raise output_error(error, self.folder) from error

    def forget(self) -> None:
        """Forget every finished task: the files are made anew."""
        for file in self.home.glob(_DONE + "*"):
            file.unlink()

    def finish(self) -> Path:
        """Give the output its name, after all of it is on the disk."""
        try:
            if not self.is_complete:
                _sync(self.checkpoint)
                (self.home / "plan.json").rename(self.home / "finished")
            if self.checkpoint.exists():
                self.checkpoint.rename(self.folder)  # replaces an empty folder
                _sync_one(self.folder.parent)
            self._remove_home()
        except OSError as error:
            raise output_error(error, self.folder) from error
        return self.folder

    # -- preparation ---------------------------------------------------------------------------

    def _begin(self) -> None:
        check_place(self.folder)
        if self.home.exists() and not self._is_ours():
            raise OutputError(
                f"`{self.home}` is in the way and was not made by quantload", hint="move it away"
            )
        while self._lock is None:
            self._lock = self._try_lock()
        found = self._stored_identity()
        if found is None:
            self._begin_anew()
        elif found.digest != self._identity.digest:
            self._release()  # it stays as it is
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
        for name in ("finished", "plan.json"):
            try:
                content = json.loads((self.home / name).read_text(encoding="utf-8"))
                return Identity(content["digest"], content["summary"])
            except (FileNotFoundError, ValueError, KeyError, TypeError):
                continue
        return None

    def _try_lock(self) -> BinaryIO | None:
        """Lock the place; None if another process removed it meanwhile, as its last act."""
        path = self.home / "lock"
        self.home.mkdir(parents=True, exist_ok=True)
        try:
            lock = path.open("ab")
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.stat().st_ino == os.fstat(lock.fileno()).st_ino:
                return lock
        except BlockingIOError as error:
            lock.close()
            raise OutputError(f"another process is writing `{self.folder}`") from error
        except FileNotFoundError:
            pass
        lock.close()
        return None

    def _begin_anew(self) -> None:
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
        """Remove all but the output; the mark that it is complete goes last, then the lock."""
        self.forget()
        for name in ("plan.json", "plan.json.new", "finished", "lock"):
            (self.home / name).unlink(missing_ok=True)
        self.home.rmdir()
        self._release()

    def _holds_work(self) -> bool:
        try:
            return bool(self.finished_tasks())
        except OutputError:
            return True  # nobody knows

    def _release(self) -> None:
        for stream in (self._lock, self._done):
            if stream is not None:
                stream.close()
        self._lock = self._done = None


def is_certain(error: BaseException) -> bool:
    """True if the same command would meet the error again: it is about content, not the machine."""
    if isinstance(error, WorkerError):
        return error.is_certain
    if not isinstance(error, QuantloadError) or isinstance(error, OutputError):
        return False
    return not isinstance(error.__cause__, OSError)


def _journal(file: Path) -> BinaryIO:
    """Open a journal for more lines; a torn last one gets its end, so that it stays alone."""
    stream = file.open("a+b", buffering=0)
    if stream.tell():
        stream.seek(-1, os.SEEK_END)
        if stream.read(1) != b"\n":
            stream.write(b"\n")
    return stream


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
    try:
        taken = folder.is_dir() and any(folder.iterdir())
    except OSError as error:
        raise output_error(error, folder) from error
    if taken and not _is_complete(absolute(folder)):
        raise OutputError(
            f"output folder `{folder}` is not empty",
            hint="give a new name, or remove the folder first",
        )


def _is_complete(folder: Path) -> bool:
    """True if a run was stopped between the rename to `folder` and its end."""
    return bool(folder.name) and (unfinished_name(folder) / "finished").exists()


def output_error(
    error: OSError, folder: Path, more: str = "", *, continues: bool = True
) -> OutputError:
    """Return the error of a failed write to `folder`; `continues`: what is there is used again."""
    if isinstance(error, OutputError):
        return error
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    again = "make room and run the same command again"
    hint = f"{again}: it continues" if continues else again
    return OutputError(
        f"cannot write `{folder}`: {error.strerror or error}{more}", hint=hint if is_full else ""
    )


def _sync(folder: Path) -> None:
    """Wait until everything in a folder is on the disk: a name may not outlive its bytes."""
    for path in [*folder.rglob("*"), folder]:
        _sync_one(path)


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that has nothing to wait for
            raise
    finally:
        os.close(descriptor)
