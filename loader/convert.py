"""Execute a plan: prepare the output, work through its tasks, finish.

The plan fixes every byte; who computes what, in which order and after how many interruptions does
not change them. Memory: a few chunks a thread, and for weights that have to be decoded the largest
of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

from quantload.errors import OutputError
from quantload.loader.checkpoint import files_kept_open
from quantload.loader.checksum import WORD
from quantload.loader.convert_task import TaskRunner
from quantload.loader.early_sync import EarlySync
from quantload.loader.growing_digests import GrowingDigests
from quantload.loader.manifest import MANIFEST, manifest
from quantload.loader.model_card import CARD, model_card
from quantload.loader.page_locked import own_stream
from quantload.loader.plan import Plan
from quantload.loader.ranks import Ranks
from quantload.loader.row_reader import RowReader
from quantload.loader.side_files import copy_side_files
from quantload.loader.staging import Staging
from quantload.loader.tasks import Task, identity_of, share_of, spread_over_files, tasks_of
from quantload.loader.weight_rows import WeightRows
from quantload.loader.workers import Resources, work_through
from quantload.loader.writer import OutputFiles
from quantload.progress import Progress
from quantload.quant import compiled


def run_plan(
    plan: Plan,
    folder: Path,
    progress: Progress,
    resources: Resources | None = None,
    ranks: Ranks | None = None,
) -> Path:
    """Write the checkpoint of a plan into a new folder, or continue a run that ended early.

    Args:
        plan: From `make_plan`.
        folder: Must not exist yet, or be empty; appears under its name only when it is complete.
        progress: Advances by bytes of the source.
        resources: Memory, threads and device.
        ranks: The processes that write this output together; None is this one alone.

    Raises:
        OutputError: The folder is taken, or cannot be written.
        CheckpointError: The source cannot be read.
        NonFiniteWeight: A weight to be quantized is not finite.
        NotLossless: The plan is lossless, and a value would change.
        WorkerError: Another of the processes failed.
    """
    resources, ranks = resources or Resources(), ranks or Ranks()
    _check_not_the_source(plan, folder)
    with Staging(folder, identity_of(plan), rank=ranks.rank) as staging, ranks.together():
        if ranks.is_first:
            staging.begin()
        ranks.wait()
        staging.join()
        is_complete = staging.is_complete
        ranks.wait()
        if not is_complete:
            _write(plan, staging, progress, resources, ranks)
        return staging.finish() if ranks.is_first else staging.folder


def _write(
    plan: Plan, staging: Staging, progress: Progress, resources: Resources, ranks: Ranks
) -> None:
    with closing(OutputFiles(staging.checkpoint, plan.files, final=staging.folder)) as files:
        if ranks.is_first and not files.create():
            staging.forget()
        ranks.wait()
        with (
            GrowingDigests(files, threads=resources.threads()) as digests,
            EarlySync(files) as early_sync,
        ):

            def written(task: Task) -> None:
                for output, start, stop in task.written:
                    early_sync.add(output.name, stop - start)

            if ranks.size == 1:
                files.told = digests.add
            _work(plan, files, staging, progress, resources, ranks, written)
            early_sync.add_rest()
            ranks.wait()
            if ranks.is_first:
                known = digests.finish(everything=ranks.size > 1)
                _write_side_files(plan, files, known, threads=resources.threads())
            early_sync.finish()


def _work(
    plan: Plan,
    files: OutputFiles,
    staging: Staging,
    progress: Progress,
    resources: Resources,
    ranks: Ranks,
    written: Callable[[Task], None],
) -> None:
    noted = staging.finished_tasks()
    share = share_of(tasks_of(plan), ranks.rank, ranks.size)

    def do(runner: TaskRunner, task: Task) -> None:
        ranks.look_around()
        if task.number not in noted or noted[task.number] != _checksum(files, task):
            staging.note(task.number, runner.run(task))
            return
        for output, start, stop in task.written:  # by the run before
            files.told(output.name, start, stop)

    @contextmanager
    def worker() -> Iterator[Callable[[Task], None]]:
        with (
            own_stream(resources.device),
            files_kept_open(),
            closing(RowReader(resources.device)) as reader,
        ):
            yield partial(do, TaskRunner(WeightRows(plan, reader), files))

    def finished(task: Task) -> None:
        written(task)
        progress.advance(task.source_bytes, note=_note(task))

    threads = resources.threads(processes=ranks.here)
    if resources.device.type == "cpu":  # before there are threads that would wait for each other
        compiled.expect(plan.quantized_elements)
    progress.start("convert", total=sum(task.source_bytes for task in share), unit="B")
    work_through(
        spread_over_files(share, plan.files, together=threads),
        worker,
        threads=threads,
        memory=resources.memory,
        finished=finished,
    )
    progress.finish()


def _checksum(files: OutputFiles, task: Task) -> int:
    """Return the checksum of what is in the files where a task writes."""
    return sum(files.checksum_of(t.name, start, stop) for t, start, stop in task.written) & WORD


def _note(task: Task) -> str:
    return task.copied.name if task.copied is not None else task.rows[0].module


def _write_side_files(
    plan: Plan, files: OutputFiles, digests: Mapping[str, str], *, threads: int
) -> None:
    copy_side_files(plan.source.checkpoint, files.folder)
    files.write_text(CARD, model_card(plan))
    for name, content in {"config.json": plan.config, **plan.config_files}.items():
        files.write_json(name, content)
    files.write_index()
    files.write_json(MANIFEST, manifest(plan, files.folder, known=digests, threads=threads))


def _check_not_the_source(plan: Plan, folder: Path) -> None:
    source = plan.source.checkpoint.folder.resolve()
    target = folder.resolve()
    if target == source:
        raise OutputError(f"output folder `{folder}` is the source", hint="give a new name")
    if source in target.parents and plan.source.checkpoint.gguf_file is None:
        raise OutputError(
            f"output folder `{folder}` is inside the source `{source}`",
            hint="give a folder outside of it",
        )
