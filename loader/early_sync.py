"""Has the disk take what is written while the rest is computed.

An output is finished when all of it is on the disk. The system writes little by itself as long as
there is memory: without this, most of the output would be waited for at the end.
"""

from __future__ import annotations

import os
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from quantload.loader.output_files import OutputFile
from quantload.loader.staging import output_error
from quantload.loader.writer import OutputFiles

_EVERY = 1 << 28  # bytes of a file


class EarlySync:
    """Synchronizes weight files from time to time, in a thread; use as a context manager.

    An error of the disk may be told only once: it is raised here, a later `fsync` may know nothing.

    Args:
        files: Files that are being written.
        every: Bytes of a file after which it is synchronized.
    """

    def __init__(self, files: OutputFiles, *, every: int = _EVERY) -> None:
        self._files = files
        self._file_of: dict[str, OutputFile] = {n: file for file in files.all for n in file.tensors}
        self._every = every
        self._waiting: Counter[str] = Counter()  # bytes, by file name
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sync")
        self._jobs: list[Future[None]] = []

    def __enter__(self) -> EarlySync:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def add(self, tensor_name: str, num_bytes: int) -> None:
        """Take up bytes of a tensor that are written.

        Raises:
            OutputError: An earlier part could not be written.
        """
        name = self._file_of[tensor_name].name
        self._waiting[name] += num_bytes
        if self._waiting[name] >= self._every:
            self._begin(name)
        while self._jobs and self._jobs[0].done():
            self._jobs.pop(0).result()

    def add_rest(self) -> None:
        """Take up what is left: nothing more comes."""
        for name in list(self._waiting):
            self._begin(name)

    def finish(self) -> None:
        """Wait for what is under way.

        Raises:
            OutputError: It could not be written.
        """
        for job in self._jobs:
            job.result()

    def _begin(self, name: str) -> None:
        del self._waiting[name]
        self._jobs.append(self._pool.submit(self._sync, name))

    def _sync(self, name: str) -> None:
        try:
            with self._files.opened(name) as descriptor:
                os.fdatasync(descriptor)
        except OSError as error:
            raise output_error(error, self._files.final) from error
