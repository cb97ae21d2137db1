"""Stream parts of a checkpoint into memory: several threads read, one takes what has arrived.

    CPU   threads read straight into the memory that the model will have
    GPU   each thread has a buffer of page-locked memory that it reads into and that is copied to
          the device, on a stream beside that of the computations, while the others read. What is
          read has to be in the cache of the processor still: with a second buffer a thread would
          not wait for the copy, and be slower

Threads take the reads in the order of the files, whoever is free the next. What is taken, and in
which order, does not depend on them: who waits for a tensor gets it, or the error of its first read
that failed. Host memory is the buffers; on the device there is, beside what is kept, no more than
what was read ahead (`Settings.ahead_bytes`) and the weights in work.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import TracebackType

import torch
from torch import Tensor

from quantload.loader.file_reader import FileReader
from quantload.loader.page_locked import Buffer
from quantload.loader.runs import GAP_BYTES, Fetch, Read, plan_reads

MIB = 1 << 20
_ROUNDING = 512  # bytes to which torch rounds an allocation


@dataclass(frozen=True)
class Settings:
    """How a checkpoint is streamed.

    Args:
        threads: Threads that read.
        read_bytes: Most bytes of a read.
        gap_bytes: Longest gap between two tensors that is read through.
        ahead_bytes: Most bytes that are read ahead of what is taken, of weights to be decoded.
        has_buffers: Read into buffers and copy from there; False reads straight into the result,
            which has to be on the CPU.
    """

    threads: int
    read_bytes: int
    gap_bytes: int = GAP_BYTES
    ahead_bytes: int = 512 * MIB
    has_buffers: bool = True

    @classmethod
    def of(cls, device: torch.device) -> Settings:
        """Return what serves a device: processes of one host share its cores."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
        cores = max(2, cores // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
        if device.type == "cpu":
            return cls(
                threads=min(4, cores), read_bytes=16 * MIB, ahead_bytes=64 * MIB, has_buffers=False
            )
        return cls(threads=min(16, cores), read_bytes=8 * MIB)  # measured on an H200, 16 cores


class Stream:
    """Reads in the background; a context manager, at whose end all threads have ended.

    Args:
        fetches: All that is read.
        device: Where it goes.
        settings: How.

    Attributes:
        bytes_read: Bytes that were read of the files until now, gaps between tensors included.
    """

    def __init__(
        self, fetches: Sequence[Fetch], device: torch.device, settings: Settings | None = None
    ) -> None:
        settings = settings or Settings.of(device)
        self.reads = plan_reads(
            fetches, read_bytes=settings.read_bytes, gap_bytes=settings.gap_bytes
        )
        self._files = FileReader(self.reads)
        longest = max((read.num_bytes for read in self.reads), default=0)
        self.settings = replace(
            settings,
            threads=min(settings.threads, len(self.reads)),
            read_bytes=min(settings.read_bytes, longest),
        )
        self.fetches, self.device = fetches, device
        self.bytes_read = 0
        self._lock = threading.Lock()  # of all that follows; its conditions wake one side each
        self._arrived = threading.Condition(self._lock)
        self._has_room = threading.Condition(self._lock)
        self._allocating = threading.Lock()
        self._awaited: Read | None = None
        self._next, self._needed, self._ahead = 0, -1, 0
        self._is_stopped = False
        self._broken: BaseException | None = None
        self._threads: list[threading.Thread] = []
        self._copies: torch.cuda.Stream | None = None

    def __enter__(self) -> Stream:
        if self.device.type == "cuda":
            self._copies = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            self._copies.wait_stream(torch.cuda.current_stream(self.device))
            self._reserve()
        for number in range(self.settings.threads):
            thread = threading.Thread(
                target=self._work, name=f"quantload-reader-{number}", daemon=True
            )
            self._threads.append(thread)
            thread.start()
        return self

    def _reserve(self) -> None:
        """Take the device's memory for the model at once; torch then cuts its tensors out of it.

        Hundreds of allocations, each while copies run, took longer than the copies. Of weights that
        are decoded their stored size is an estimate: what is left over serves other tensors.
        """
        wanted = {True: 0, False: 0}
        for fetch in self.fetches:
            wanted[fetch.is_kept] += fetch.portion.num_bytes + _ROUNDING
        for is_kept, stream in ((True, self._copies), (False, None)):
            try:
                with torch.cuda.stream(stream):
                    torch.empty(wanted[is_kept], dtype=torch.uint8, device=self.device)
            except torch.OutOfMemoryError:  # in one piece; in many it may be there
                return

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._is_stopped = True
            self._has_room.notify_all()
        for thread in self._threads:
            thread.join()
        self._files.close()
        if self._copies is not None:  # buffers may be given away only when nobody copies from them
            self._copies.synchronize()
            if not all(fetch.is_kept for fetch in self.fetches):
                torch.cuda.empty_cache()  # what was decoded lay in memory of this stream alone

    # -- taking --------------------------------------------------------------------------------

    def wait(self, fetches: Iterable[Fetch]) -> None:
        """Return once all of these are there; on a GPU, for what is computed from now on.

        Raises:
            QuantloadError: One of their reads failed.
        """
        wanted = list(fetches)
        reads = sorted({id(r): r for f in wanted for r in f.reads}.values(), key=lambda r: r.index)
        with self._lock:
            if reads and reads[-1].index > self._needed:
                self._needed = reads[-1].index
                if self._next <= self._needed:
                    self._has_room.notify_all()
            for read in reversed(reads):  # they end about in their order: one wake-up for all
                self._awaited = read
                while not read.is_done and self._broken is None:
                    self._arrived.wait()
            self._awaited = None
            if error := next((r.error for r in reads if r.error), self._broken):
                raise error
        if self._copies is not None:
            stream = torch.cuda.current_stream(self.device)
            for read in reads:
                assert read.event is not None, "a read that is done was copied"
                stream.wait_event(read.event)
        for fetch in wanted:
            self._hand_over(fetch)

    def _hand_over(self, fetch: Fetch) -> None:
        if not fetch.is_allocated:  # it has no bytes
            fetch.allocated()
            return
        if self._copies is not None:  # made on another stream than the one that will use it
            fetch.allocated().record_stream(torch.cuda.current_stream(self.device))
        if not fetch.is_kept:
            with self._lock:
                was_full = self._ahead > self.settings.ahead_bytes
                self._ahead -= fetch.portion.num_bytes
                if was_full and self._ahead <= self.settings.ahead_bytes:
                    self._has_room.notify_all()

    # -- reading -------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            with self._on_copies():
                buffer = None
                while (read := self._taken()) is not None:
                    if buffer is None and self.settings.has_buffers:
                        buffer = Buffer(self.settings.read_bytes, self.device, is_awake=True)
                    self._fetch(read, buffer)
                if buffer is not None:  # memory that is given back may be another's at once
                    buffer.wait()
        except BaseException as error:  # noqa: BLE001 - raised again by who waits
            with self._lock:
                self._broken = error
                self._arrived.notify_all()

    def _on_copies(self) -> AbstractContextManager[object]:
        if self._copies is None:
            return nullcontext()
        torch.cuda.set_device(self._copies.device)
        return torch.cuda.stream(self._copies)

    def _taken(self) -> Read | None:
        """Return the next read; waits while too much lies there that nobody has taken yet."""
        with self._lock:
            while not self._is_stopped and self._next < len(self.reads):
                if self._ahead <= self.settings.ahead_bytes or self._next <= self._needed:
                    self._next += 1
                    return self.reads[self._next - 1]
                self._has_room.wait()
            return None

    def _fetch(self, read: Read, buffer: Buffer | None) -> None:
        error: BaseException | None = None
        try:
            if buffer is None:
                self._files.fill(read, self._places_of(read))
            else:
                self._read_through(buffer, read)
        except BaseException as caught:  # noqa: BLE001 - raised again by who waits for the read
            error = caught
        with self._lock:
            read.error, read.is_done = error, True
            self.bytes_read += 0 if error else read.num_bytes
            if self._awaited is read:
                self._arrived.notify_all()

    def _read_through(self, buffer: Buffer, read: Read) -> None:
        buffer.wait()
        self._files.fill(read, [buffer.view[: read.num_bytes]])
        for part in read.parts:
            buffer.copy_to(
                self._memory_of(part.fetch),
                at=part.at,
                to=part.to,
                num_bytes=part.num_bytes,
                stream=self._copies,
            )
        read.event = buffer.record(self._copies)

    def _places_of(self, read: Read) -> list[memoryview]:
        """Return the memory of a read's parts, with something between them for the gaps."""
        places: list[memoryview] = []
        at = 0
        for part in read.parts:
            if part.at > at:
                places.append(memoryview(bytearray(part.at - at)))
            place = self._memory_of(part.fetch)[part.to : part.to + part.num_bytes]
            places.append(place.numpy().data)
            at = part.at + part.num_bytes
        return places

    def _memory_of(self, fetch: Fetch) -> Tensor:
        with self._allocating:
            if not fetch.is_allocated and not fetch.is_kept:
                with self._lock:
                    self._ahead += fetch.portion.num_bytes
            return fetch.allocated()


__all__ = ["Settings", "Stream"]
