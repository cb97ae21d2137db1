"""What a plan makes to do: pieces of work that any thread or process can do in any order.

A task is one module, or the members of a fused group where they share a value (the global scale of
NVFP4); or one tensor that is copied. Which rows are read, and what bytes come out, is fixed by the
plan alone, so that the output does not depend on who does what.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quantload import __version__
from quantload.errors import CheckpointError
from quantload.loader.manifest import described
from quantload.loader.output_files import OutputFile, OutputTensor
from quantload.loader.plan import Plan, PlanRow
from quantload.loader.row_reader import CHUNK_BYTES
from quantload.loader.staging import Identity

_CHUNKS = 6  # of rows that are in work, in bfloat16: what is read, codes, fields, and copies
_FLOATS = 3  # copies of a decoded weight in float32 that exist at a time
_COPY_BYTES = 1 << 26  # of a tensor that one task copies: else the last one is waited for alone


@dataclass(frozen=True)
class Task:
    """A piece of work.

    Args:
        number: Its place in the plan; journals name it by this.
        rows: Modules whose weights are read, quantized and written together.
        copied: A tensor that is copied, or cast; None if there are rows.
        source_bytes: Bytes that it reads.
        working_bytes: Memory that it needs.
        span: (start, stop), the bytes of its one output that it copies; None is all of them.
    """

    number: int
    rows: tuple[PlanRow, ...]
    copied: OutputTensor | None
    source_bytes: int
    working_bytes: int
    span: tuple[int, int] | None = None

    @property
    def written(self) -> Iterator[tuple[OutputTensor, int, int]]:
        """What it writes: (tensor, first byte, one past the last)."""
        for output in self.outputs:
            start, stop = self.span or (0, output.num_bytes)
            yield output, start, stop

    @property
    def outputs(self) -> tuple[OutputTensor, ...]:
        """The tensors that it writes."""
        if self.copied is not None:
            return (self.copied,)
        return tuple(tensor for row in self.rows for tensor in row.outputs)


def tasks_of(plan: Plan) -> list[Task]:
    """Return the tasks of a plan, in the order of the output: the place in the list is the number.

    Files are so filled from their start to their end.
    """
    found: list[Task] = []
    for rows in sharing(plan):
        task = Task(
            number=0,
            rows=rows,
            copied=None,
            source_bytes=sum(row.source_bytes for row in rows),
            working_bytes=max(working_bytes(plan, row) for row in rows),
        )
        found += _apart(task) if len(rows) == 1 and is_copied(plan, rows[0]) else [task]
    for tensor in plan.plain:
        entry = plan.source.checkpoint.tensors[tensor.source]
        is_raw = entry.is_contiguous and entry.dtype == tensor.dtype
        task = Task(
            number=0,
            rows=(),
            copied=tensor,
            source_bytes=entry.num_bytes,
            working_bytes=CHUNK_BYTES if is_raw else 3 * entry.num_bytes,
        )
        found += _apart(task) if is_raw else [task]
    return [replace(task, number=number) for number, task in enumerate(found)]


def is_copied(plan: Plan, row: PlanRow) -> bool:
    """True if the bytes of a weight are those of the source, in one piece."""
    if row.scheme is not None or row.region is None:
        return False
    entry = plan.source.checkpoint.tensors[row.region.tensor]
    return entry.dtype == row.dtype and row.region.row_stride == row.region.columns


def _apart(task: Task) -> Iterator[Task]:
    """Yield the parts of a task that copies bytes: several threads may share a large tensor."""
    (output,) = task.outputs
    if output.num_bytes <= _COPY_BYTES:
        yield task
        return
    for start in range(0, output.num_bytes, _COPY_BYTES):
        stop = min(start + _COPY_BYTES, output.num_bytes)
        yield replace(
            task,
            source_bytes=stop - start,
            working_bytes=min(task.working_bytes, CHUNK_BYTES),
            span=(start, stop),
        )


def working_bytes(plan: Plan, row: PlanRow) -> int:
    """Return the memory that the conversion of a module takes, estimated from above."""
    step = None if row.scheme is None else plan.target.row_step(row.scheme)
    if row.region is not None and (row.scheme is None or step is not None):
        return _CHUNKS * max(CHUNK_BYTES, 4 * row.region.columns * (step or 1))
    elements = 1
    for size in row.shape:
        elements *= size
    return row.source_bytes + row.output_bytes + _FLOATS * 4 * elements


def share_of(tasks: Sequence[Task], rank: int, ranks: int) -> list[Task]:
    """Return the tasks of one of several processes: a run of neighbours of about equal bytes."""
    total = sum(task.source_bytes for task in tasks) or 1
    share, before = [], 0
    for task in tasks:
        if min(ranks - 1, before * ranks // total) == rank:
            share.append(task)
        before += task.source_bytes
    return share


def spread_over_files(
    tasks: Sequence[Task], files: Sequence[OutputFile], *, together: int
) -> list[Task]:
    """Return tasks in an order in which neighbours write to different files.

    A system lets one thread at a time write to a file, and a digest goes through it from its start:
    with some files at a time all threads write, and as many digests are computed. They come in
    rounds of about as many files, so that the last one is not left to a thread or two.

    Args:
        tasks: In the order of the output.
        files: What they write to.
        together: Most files that are filled at a time, each from its start to its end.
    """
    file_of = {name: number for number, file in enumerate(files) for name in file.tensors}
    waiting: dict[int, deque[Task]] = {}
    for task in tasks:
        waiting.setdefault(file_of[task.outputs[0].name], deque()).append(task)
    order: list[Task] = []
    queue = deque(waiting.values())
    rounds = -(-len(queue) // together)
    current = [queue.popleft() for _ in range(-(-len(queue) // max(1, rounds)))]
    while current:
        for place, left in enumerate(current):
            order.append(left.popleft())
            if not left and queue:
                current[place] = queue.popleft()
        current = [left for left in current if left]
    return order


def identity_of(plan: Plan) -> Identity:
    """Return what makes two runs the same conversion: source, decisions, layout of the output."""
    files = {entry.file for entry in plan.source.checkpoint.tensors.values()}
    content = {
        "version": __version__,
        "description": described(plan),
        "source": [_fingerprint(plan, name) for name in sorted(plan.source.checkpoint.tensors)],
        "files": sorted(_state_of(file) for file in files),
        "rows": [
            (
                *(row.module, repr(row.scheme), row.read_from, row.keeps_values, str(row.dtype)),
                repr(row.input_absmax),
                row.mean_square and row.mean_square.sha256,
            )
            for row in plan.rows
        ],
        "output": [(f.name, hashlib.sha256(f.header).hexdigest()) for f in plan.files],
        "config": plan.config,
        "config_files": plan.config_files,
        "lossless": plan.lossless,
        "copied_at_once": _COPY_BYTES,  # numbers of tasks follow from it
    }
    text = json.dumps(content, sort_keys=True, default=str)
    schemes = Counter(str(row.scheme or "full precision") for row in plan.rows)
    counted = ", ".join(f"{count} x {scheme}" for scheme, count in schemes.most_common())
    summary = f"`{plan.source.checkpoint.name}` to {plan.target.name} ({counted})"
    return Identity(hashlib.sha256(text.encode()).hexdigest(), summary)


def _state_of(file: Path) -> tuple[str, int, int]:
    try:
        found = file.stat()
    except OSError as error:
        raise CheckpointError(f"cannot read `{file}`: {error.strerror or error}") from error
    return file.name, found.st_size, found.st_mtime_ns


def _fingerprint(plan: Plan, name: str) -> tuple[object, ...]:
    entry = plan.source.checkpoint.tensors[name]
    return (name, str(entry.dtype), entry.shape, entry.file.name, entry.start, entry.num_bytes)


def sharing(plan: Plan) -> list[tuple[PlanRow, ...]]:
    """Return the modules of each task, in the order of the plan: several if they share a value."""
    group_of = {module: number for number, group in enumerate(plan.groups) for module in group}
    tasks: dict[object, list[PlanRow]] = {}
    for row in plan.rows:
        key: object = row.module
        if _shares_group_range(row) and row.module in group_of:
            key = group_of[row.module], row.scheme
        tasks.setdefault(key, []).append(row)
    return [tuple(rows) for rows in tasks.values()]


def _shares_group_range(row: PlanRow) -> bool:
    """True if a scale is computed from the range of all members of a fused group."""
    if row.scheme is None or row.scheme.weight is None:
        return False
    return row.shares_range and row.scheme.weight.scale == "e4m3"
