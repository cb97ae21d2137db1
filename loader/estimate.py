"""What a conversion will take: bytes are exact, memory is a bound, time is measured on a sample.

The probe reads some pieces of the source, quantizes and encodes rows of its own weights with what
the conversion uses and in as many threads, hashes, and writes a few megabytes where the output will
lie (a temporary file, removed at once). It takes about a second, two where loops are compiled.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from quantload.errors import QuantloadError
from quantload.loader.plan import Plan, PlanRow
from quantload.loader.row_reader import RowReader, pieces
from quantload.loader.weight_rows import WeightRows
from quantload.loader.workers import Resources
from quantload.quant import compiled
from quantload.quant.scales import merged_range, shared_range

_SAMPLES = 32  # places of the source that are looked at
_PIECE = 1 << 20
_PAGE = 1 << 12
_WRITTEN = 1 << 22
_READ_SECONDS = 0.3
_LARGEST_DECODED = 1 << 27  # bytes of a weight that is decoded for the probe
_FULL = "full precision"


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What was measured on this machine, in bytes per second.

    Args:
        threads: Threads that computed at the same time.
        read: Source, in one thread.
        cached: Share of the sampled pages of the source that were in the page cache; None where the
            system does not tell.
        convert: Source bytes that are decoded, quantized and encoded by all threads together, by
            scheme; "full precision" for quantized weights that are decoded only. Schemes that could
            not be tried are left out.
        sha256: Hashing, one file a thread.
        write: Output, into the page cache, in one thread.
        flush: Output, until it is on the disk.
        free: Bytes that are free where the output will lie.
        obstacle: Why writing could not be measured; "" if it was.
        seconds: What the probe took.
    """

    threads: int
    read: float
    cached: float | None
    convert: Mapping[str, float]
    sha256: float
    write: float | None
    flush: float | None
    free: int | None
    obstacle: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Seconds that a conversion takes, without verification.

    Args:
        read, convert, write, flush, sha256: Seconds of each part.
        low: If the parts overlap as far as there are threads, and the output stays in the page
            cache.
        high: If they do not, and the output is on the disk at the end.
        not_tried: Schemes that were counted with the rate of the slowest other.
    """

    read: float
    convert: float
    write: float
    flush: float
    sha256: float
    low: float
    high: float
    not_tried: tuple[str, ...]


def estimate(plan: Plan, rates: Rates) -> Estimate | None:
    """Return how long a conversion takes on a machine that stays as busy as during the probe.

    Args:
        plan: What is carried out.
        rates: From `probe`.

    Returns:
        None if nothing could be written, or none of several schemes could be tried.
    """
    if rates.write is None or rates.flush is None:
        return None
    work = _converted_bytes(plan)
    not_tried = tuple(sorted(work.keys() - rates.convert.keys()))
    if not_tried and not rates.convert:
        return None
    slowest = min(rates.convert.values(), default=0.0)
    read = sum(t.num_bytes for t in plan.source.checkpoint.tensors.values()) / rates.read
    convert = sum(size / rates.convert.get(name, slowest) for name, size in work.items())
    write, flush = plan.output_bytes / rates.write, plan.output_bytes / rates.flush
    hashed = plan.output_bytes / rates.sha256
    hashers = min(rates.threads, len(plan.files))
    computed = convert + hashed * hashers / rates.threads
    return Estimate(
        read=read,
        convert=convert,
        write=write,
        flush=flush,
        sha256=hashed,
        low=max(read / rates.threads, computed, write / rates.threads, hashed),
        high=read + convert + flush + hashed,
        not_tried=not_tried,
    )


def _converted_bytes(plan: Plan) -> Counter[str]:
    """Return the source bytes that go through a decoder or quantizer, by scheme."""
    work: Counter[str] = Counter()
    for name, rows in _rows_by_scheme(plan).items():
        work[name] = sum(row.source_bytes for row in rows)
    return work


def _rows_by_scheme(plan: Plan) -> dict[str, list[PlanRow]]:
    """Return the rows whose bytes change, by scheme."""
    found: dict[str, list[PlanRow]] = {}
    for row in plan.rows:
        if row.scheme is not None and not row.keeps_values:
            found.setdefault(str(row.scheme), []).append(row)
        elif row.scheme is None and _is_quantized(plan, row):
            found.setdefault(_FULL, []).append(row)
    return found


def _is_quantized(plan: Plan, row: PlanRow) -> bool:
    weight = plan.source.weights.get(row.read_from)
    return weight is not None and weight.is_quantized


def probe(plan: Plan, output: Path, resources: Resources) -> Rates:
    """Measure what this machine does with pieces of a source.

    Args:
        plan: What will be carried out.
        output: Where it will be written; need not exist, nothing of the probe stays.
        resources: Threads and device that will be used.
    """
    began = time.perf_counter()
    threads = resources.threads()
    cached, read = _read_rate(plan)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        convert = _convert_rates(plan, resources)
    finally:
        torch.set_num_threads(before)
    block = os.urandom(_WRITTEN)
    hashers = min(threads, len(plan.files))
    sha256 = hashers * len(block) / _together(lambda: hashlib.sha256(block).digest(), hashers)
    write, flush, free, obstacle = _write_rates(output, block)
    return Rates(
        threads=threads,
        read=read,
        cached=cached,
        convert=convert,
        sha256=sha256,
        write=write,
        flush=flush,
        free=free,
        obstacle=obstacle,
        seconds=time.perf_counter() - began,
    )


def _since(started: float) -> float:
    return max(1e-9, time.perf_counter() - started)


def _together(work: Callable[[], object], threads: int) -> float:
    """Return the seconds that several threads take to do the same work at the same time."""
    with ThreadPoolExecutor(max_workers=threads) as pool:
        started = time.perf_counter()
        for running in [pool.submit(work) for _ in range(threads)]:
            running.result()
        return _since(started)


# -- reading ---------------------------------------------------------------------------------------


def _read_rate(plan: Plan) -> tuple[float | None, float]:
    """Return the share of the source in the page cache, and bytes per second of reading it."""
    places = _places(_stretches(plan))
    held = [_is_cached(path, start) for path, start in places]
    known = [state for state in held if state is not None]
    done, seconds = 0, 0.0
    buffer = memoryview(bytearray(_PIECE))
    for number in range(len(places)):  # far apart from each other, so that a part stands for all
        index = number * 13 % len(places)
        path, start = places[index]
        with path.open("rb", buffering=0) as file:
            began = time.perf_counter()
            file.seek(start)
            done += file.readinto(buffer) or 0
            seconds += time.perf_counter() - began
            if held[index] is False:  # leave the cache as it was: the next probe shall see it too
                os.posix_fadvise(file.fileno(), start, _PIECE, os.POSIX_FADV_DONTNEED)
        if seconds > _READ_SECONDS:
            break
    return sum(known) / len(known) if known else None, max(1, done) / max(1e-9, seconds)


def _stretches(plan: Plan) -> list[tuple[Path, int, int]]:
    """Return (file, first byte, bytes) of what is read: of each file the tensors, not the rest.

    Layers that are left out lie between them. Of a pickled file it is not known where they are.
    """
    found: dict[tuple[Path, int], int] = {}
    for entry in plan.source.checkpoint.tensors.values():
        if entry.loaded is not None:
            found[entry.file, 0] = entry.file.stat().st_size
        else:
            place = entry.file, entry.start
            found[place] = max(entry.num_bytes, found.get(place, 0))
    return [(path, start, size) for (path, start), size in sorted(found.items())]


def _places(stretches: Sequence[tuple[Path, int, int]]) -> list[tuple[Path, int]]:
    """Return places spread evenly over the bytes of parts of files, at the start of a page."""
    ends = list(accumulate(size for _, _, size in stretches))
    sizes = {path: path.stat().st_size for path, _, _ in stretches}
    found = []
    for number in range(_SAMPLES if ends else 0):
        position = (2 * number + 1) * ends[-1] // (2 * _SAMPLES)
        index = bisect_right(ends, position)
        path, start, size = stretches[min(index, len(stretches) - 1)]
        start += position - (ends[min(index, len(ends) - 1)] - size)
        found.append((path, max(0, min(start, sizes[path] - _PIECE)) // _PAGE * _PAGE))
    return found


def _is_cached(path: Path, start: int) -> bool | None:
    """True if a page of a file is in the page cache; None where the system does not tell."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.preadv(descriptor, [bytearray(1)], start, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except (OSError, AttributeError):  # a file system or system without such reads
        return None
    finally:
        os.close(descriptor)
    return True


# -- decoding and quantizing -----------------------------------------------------------------------


def _convert_rates(plan: Plan, resources: Resources) -> dict[str, float]:
    by_scheme = _rows_by_scheme(plan)
    compiled.expect(plan.quantized_elements)
    found = {}
    with closing(RowReader(resources.device)) as reader:
        weights = WeightRows(plan, reader)
        for name, rows in by_scheme.items():
            try:
                speed = _convert_rate(weights, rows, resources.threads())
            except QuantloadError:  # a weight that is not finite: the conversion will say so
                continue
            if speed is not None:
                found[name] = speed
    return found


def _convert_rate(weights: WeightRows, rows: Sequence[PlanRow], threads: int) -> float | None:
    """Return source bytes per second for the rows of a scheme; None if all are too large to try."""
    row = max(rows, key=lambda row: row.source_bytes)
    if row.region is not None and row.scheme is not None and weights.step_of(row) is not None:
        return _rate_of_rows(weights, row, threads)
    row = min(rows, key=lambda row: row.source_bytes)
    if row.source_bytes * threads > _LARGEST_DECODED:
        return None
    if row.region is not None and row.scheme is not None:
        return _rate_of_rows(weights, row, threads)
    return _rate_of_decoding(weights, row, threads)


@torch.no_grad()
def _rate_of_rows(weights: WeightRows, row: PlanRow, threads: int) -> float:
    """Return bytes per second of quantizing the first rows of a weight that lies so in its file."""
    assert row.region is not None, "only such a weight lies row by row"
    _, part = next(weights.rows(row, step=weights.step_of(row)))
    stored = weights.plan.source.checkpoint.tensors[row.region.tensor].dtype.itemsize
    return threads * part.numel() * stored / _quantizing(weights, row, part, threads)


@torch.no_grad()
def _rate_of_decoding(weights: WeightRows, row: PlanRow, threads: int) -> float:
    """Return source bytes per second of decoding a weight, and of quantizing it if it has to be."""
    weight = weights.read_whole(row)
    seconds = _together(lambda: weights.read_whole(row), threads)
    if row.scheme is not None:
        weight = weight.to(weights.reader.device)
        _, part = next(pieces(weight, step=weights.step_of(row)))
        if row.shares_range:  # decoded once more, for the range of all members of its group
            seconds *= 2
        seconds += _quantizing(weights, row, part, threads) * len(weight) / len(part)
    return threads * row.source_bytes / seconds


def _quantizing(weights: WeightRows, row: PlanRow, part: Tensor, threads: int) -> float:
    """Return the seconds that threads take to quantize and encode some rows, each all of them."""
    _quantize(weights, row, part)  # what is compiled, is compiled now
    return _together(lambda: _quantize(weights, row, part), threads)


@torch.no_grad()
def _quantize(weights: WeightRows, row: PlanRow, part: Tensor) -> None:
    assert row.scheme is not None, "only quantized rows are tried"
    shared = merged_range([shared_range(part)]) if row.shares_range else None
    quantized = weights.quantize(part, row, shared)
    rows, columns = row.shape
    for leaf in weights.plan.target.encode(quantized, row.scheme, (rows, columns)).values():
        leaf.cpu()  # a GPU has to be done with it


# -- writing ---------------------------------------------------------------------------------------


def _write_rates(output: Path, block: bytes) -> tuple[float | None, float | None, int | None, str]:
    """Return bytes per second into the page cache and to the disk, free bytes, what hindered."""
    place = output.absolute()
    while not place.is_dir():
        place = place.parent
    try:
        status = os.statvfs(place)
        with tempfile.TemporaryFile(dir=place, prefix=".quantload-probe-", buffering=0) as file:
            started = time.perf_counter()
            file.write(block)
            write = _since(started)
            os.fsync(file.fileno())
            flush = _since(started)
    except OSError as error:
        return None, None, None, f"cannot write in `{place}`: {error.strerror or error}"
    return len(block) / write, len(block) / flush, status.f_bavail * status.f_frsize, ""
