"""Conversions that end early, and are continued: the same bytes as if nothing had happened."""

import errno
import hashlib
import multiprocessing
import os
import signal

import pytest
import tiny_checkpoints as tiny
import torch
from converting import plan_of
from safetensors.torch import load_file

import quantload.loader.tasks as tasks_module
from quantload.errors import CheckpointError, HeaderError, OutputError
from quantload.loader.convert import run_plan
from quantload.loader.convert_task import TaskRunner
from quantload.loader.staging import Staging
from quantload.loader.tasks import tasks_of
from quantload.loader.workers import Resources
from quantload.progress import Silent

SCHEME, SHARD = "NVFP4A16", 10_000
ONE = Resources(workers=1)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tiny.llama(tmp_path_factory.mktemp("resume") / "in", layers=1)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def _plan(source, scheme=SCHEME, **options):
    return plan_of(source, scheme, **{"max_shard_bytes": SHARD, **options})


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    """What an undisturbed run with one thread writes."""
    output = run_plan(_plan(source), tmp_path_factory.mktemp("whole") / "out", Silent(), ONE)
    assert len(list(output.glob("*.safetensors"))) > 3
    return _hashes(output)


def _hashes(folder):
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.iterdir()}


def _counted(owner, name, before):
    """Replace a function; `before` is called with the number of each call and its arguments."""
    usual, count = getattr(owner, name), [0]

    def function(*arguments, **options):
        count[0] += 1
        before(count[0], *arguments)
        return usual(*arguments, **options)

    setattr(owner, name, function)


def _killed(plan, output, arm):
    """Convert in a forked process, which kills itself as `arm` says."""

    def run():
        torch.set_num_threads(1)
        arm()
        run_plan(plan, output, Silent(), ONE)
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    return process.exitcode == -signal.SIGKILL


def _at(owner, name, call):
    def before(number, *_):
        if number == call:
            os.kill(os.getpid(), signal.SIGKILL)

    return lambda: _counted(owner, name, before)


def _inside_a_write(call):
    pwrite = os.pwrite

    def before(number, file, data, position):
        if number == call:
            pwrite(file, data[: len(data) // 2], position)
            os.kill(os.getpid(), signal.SIGKILL)

    return lambda: _counted(os, "pwrite", before)


def _continued(plan, output, monkeypatch=None):
    """Run it again; returns the numbers of tasks that were done."""
    run, done = TaskRunner.run, []

    def noted(runner, task):
        done.append(task.number)
        return run(runner, task)

    TaskRunner.run = noted
    try:
        assert run_plan(plan, output, Silent(), ONE) == output
    finally:
        TaskRunner.run = run
    assert not output.with_name(f".{output.name}.unfinished").exists()
    return done


NUM_TASKS = 9


def test_the_number_of_tasks(source):
    assert len(tasks_of(_plan(source))) == NUM_TASKS


@pytest.mark.parametrize("call", range(1, NUM_TASKS + 1))
@pytest.mark.parametrize("owner", [TaskRunner, Staging], ids=["before", "after"])
def test_killed_around_every_task(tmp_path, source, whole, owner, call):
    plan, name = _plan(source), "run" if owner is TaskRunner else "note"
    assert _killed(plan, tmp_path / "out", _at(owner, name, call))
    assert [path.name for path in tmp_path.iterdir()] == [".out.unfinished"]
    assert len(_continued(plan, tmp_path / "out")) == NUM_TASKS - (call - 1)
    assert _hashes(tmp_path / "out") == whole


@pytest.mark.parametrize("call", [1, 2, 5, 12, 20, 24])
def test_killed_inside_a_write(tmp_path, source, whole, call):
    assert _killed(_plan(source), tmp_path / "out", _inside_a_write(call))
    assert len(_continued(_plan(source), tmp_path / "out")) < NUM_TASKS or call < 5
    assert _hashes(tmp_path / "out") == whole


def test_killed_again_and_again(tmp_path, source, whole):
    for call in (3, 2, 1, 4, 2):
        assert _killed(_plan(source), tmp_path / "out", _at(Staging, "note", call))
    assert len(_continued(_plan(source), tmp_path / "out")) == NUM_TASKS - 7
    assert _hashes(tmp_path / "out") == whole


# -- what was written is damaged -------------------------------------------------------------------


@pytest.fixture
def begun(tmp_path, source):
    """A run that was killed after six tasks."""
    assert _killed(_plan(source), tmp_path / "out", _at(Staging, "note", 7))
    return tmp_path / ".out.unfinished"


def _zero(path):
    path.write_bytes(path.read_bytes()[:-300] + bytes(300))


def _flip(path):
    content = bytearray(path.read_bytes())
    content[-5] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [_zero, _flip])
def test_damaged_bytes_are_written_again(begun, source, whole, damage):
    """As after a power failure: the journal is on the disk, the last blocks are not."""
    file = min((begun / "checkpoint").glob("*.safetensors"), key=lambda f: f.stat().st_mtime)
    damage(file)
    done = _continued(_plan(source), begun.parent / "out")
    assert NUM_TASKS - 6 < len(done) < NUM_TASKS
    assert _hashes(begun.parent / "out") == whole


def _shorten(path):
    os.truncate(path, path.stat().st_size - 1)


def _lengthen(path):
    os.truncate(path, path.stat().st_size + 8)


def _spoil_header(path):
    path.write_bytes(b"\0" * 16 + path.read_bytes()[16:])


@pytest.mark.parametrize("damage", [os.unlink, _shorten, _lengthen, _spoil_header])
def test_files_that_are_not_as_planned(begun, source, whole, damage):
    damage(sorted((begun / "checkpoint").glob("*.safetensors"))[0])
    _continued(_plan(source), begun.parent / "out")
    assert _hashes(begun.parent / "out") == whole


@pytest.mark.parametrize("more", [b"3 ", b"3", b"3 12", b"\0\0\0\0", b"x\n", b"999 1\n"])
def test_torn_journals(begun, source, whole, more):
    journal = begun / "done-0"
    journal.write_bytes(journal.read_bytes() + more)
    assert len(_continued(_plan(source), begun.parent / "out")) == NUM_TASKS - 6
    assert _hashes(begun.parent / "out") == whole


def test_a_journal_that_is_gone(begun, source, whole):
    (begun / "done-0").unlink()
    assert len(_continued(_plan(source), begun.parent / "out")) == NUM_TASKS
    assert _hashes(begun.parent / "out") == whole


def test_side_files_of_an_earlier_state_are_not_kept(begun, source, whole):
    (begun / "checkpoint" / "vocab.json").write_text("{}")
    (begun / "checkpoint" / "code").mkdir()
    (begun / "checkpoint" / "code" / "x.py").touch()
    _continued(_plan(source), begun.parent / "out")
    assert _hashes(begun.parent / "out") == whole


# -- a different command ---------------------------------------------------------------------------


def test_another_command_is_refused(begun, source, whole, monkeypatch):
    refused = [_plan(source, "W8A8"), _plan(source, max_shard_bytes=10**9)]
    refused += [_plan(source, dtype=torch.float32)]
    for plan in refused:
        with pytest.raises(OutputError, match="was begun by another conversion"):
            run_plan(plan, begun.parent / "out", Silent())
    with monkeypatch.context() as patch, pytest.raises(OutputError, match="another"):  # noqa: PT012
        patch.setattr(tasks_module, "__version__", "0.0.0")
        run_plan(_plan(source), begun.parent / "out", Silent())
    state = (source / "model.safetensors").stat()
    os.utime(source / "model.safetensors", ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    with pytest.raises(OutputError, match="or the source has changed since"):
        run_plan(_plan(source), begun.parent / "out", Silent())
    os.utime(source / "model.safetensors", ns=(state.st_atime_ns, state.st_mtime_ns))
    assert len(_continued(_plan(source), begun.parent / "out")) == NUM_TASKS - 6
    assert _hashes(begun.parent / "out") == whole


# -- disks that fail -------------------------------------------------------------------------------


def _fails_at(call, number):
    def before(count, *_):
        if count == call:
            raise OSError(number, os.strerror(number))

    return before


def _reads_fail_at(call, file):
    """The numbered read of this one file fails: finished output is read back in between."""
    preadv, count = os.preadv, [0]

    def reading(descriptor, *arguments):
        if os.path.samestat(os.fstat(descriptor), file.stat()):
            count[0] += 1
            if count[0] == call:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(descriptor, *arguments)

    return reading


@pytest.mark.parametrize("call", [1, 7, 19, 24])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_fails(tmp_path, source, whole, monkeypatch, call, number):
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", os.pwrite)  # is put back
        _counted(os, "pwrite", _fails_at(call, number))
        with pytest.raises(OutputError) as caught:
            run_plan(_plan(source), tmp_path / "out", Silent(), ONE)
    text = f"cannot write `{tmp_path / 'out'}`: {os.strerror(number)}, "
    assert text in str(caught.value)
    assert ("make room and run the same command again" in str(caught.value)) is (
        number != errno.EIO
    )
    assert (tmp_path / ".out.unfinished").exists() is (call > 1)
    _continued(_plan(source), tmp_path / "out")
    assert _hashes(tmp_path / "out") == whole


@pytest.mark.parametrize("call", [1, 4, 14])
def test_a_source_that_cannot_be_read(tmp_path, source, whole, monkeypatch, call):
    file = source / "model.safetensors"
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", _reads_fail_at(call, file))
        with pytest.raises(CheckpointError) as caught:
            run_plan(_plan(source), tmp_path / "out", Silent(), ONE)
    assert str(caught.value) == f"cannot read `{file}`: Input/output error"
    assert (tmp_path / ".out.unfinished").exists() is (call > 1)
    _continued(_plan(source), tmp_path / "out")
    assert _hashes(tmp_path / "out") == whole


def test_a_source_that_is_cut_off_meanwhile(tmp_path, source, whole):
    folder = tmp_path / "in"
    tiny.write(folder, tiny.config(layers=1), load_file(source / "model.safetensors"))
    plan = _plan(folder)
    os.truncate(folder / "model.safetensors", 30_000)
    with pytest.raises(HeaderError) as caught:
        run_plan(plan, tmp_path / "out", Silent(), ONE)
    assert "file ends inside tensor `" in str(caught.value)
    assert f"in `{folder / 'model.safetensors'}`" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("threads", [2, 4])
@pytest.mark.parametrize("call", [2, 9])
def test_threads_end_together(tmp_path, source, whole, monkeypatch, threads, call):
    resources = Resources(workers=threads, memory=1)  # every task is above the budget
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", os.pwrite)
        _counted(os, "pwrite", _fails_at(call, errno.ENOSPC))
        with pytest.raises(OutputError, match="No space left on device"):
            run_plan(_plan(source), tmp_path / "out", Silent(), resources)
    run_plan(_plan(source), tmp_path / "out", Silent(), resources)
    assert _hashes(tmp_path / "out") == whole
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]
