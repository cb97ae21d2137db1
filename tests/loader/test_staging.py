"""The unfinished output: what a run that ended early leaves, who may continue it, who may not."""

import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from quantload.errors import CheckpointError, NonFiniteWeight, OutputError, WorkerError
from quantload.loader import staging as module
from quantload.loader.staging import Identity, Staging, check_place, is_certain

OURS, OTHER = Identity("abc", "`m` to W4A16"), Identity("def", "`m` to W8A8")


def _staging(folder, identity=OURS, **options):
    return Staging(folder, identity, **options)


def _finish(folder, identity=OURS):
    with _staging(folder, identity) as staging:
        staging.begin()
        (staging.checkpoint / "config.json").write_text("{}")
        return staging.finish()


def _interrupted(folder, tasks=1, error=KeyboardInterrupt):
    with pytest.raises(error), _staging(folder) as staging:  # noqa: PT012
        staging.begin()
        (staging.checkpoint / "weights").write_text("w")
        for number in range(tasks):
            staging.note(number, 255 + number)
        raise error
    return staging.home


def test_the_output_gets_its_name_at_the_end(tmp_path):
    folder = tmp_path / "deep" / "out"
    with _staging(folder) as staging:
        staging.begin()
        (staging.checkpoint / "config.json").write_text("{}")
        assert not folder.exists()
        assert staging.finish() == folder
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert list(folder.parent.iterdir()) == [folder]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, OSError, RuntimeError])
def test_errors_of_the_machine_keep_finished_tasks(tmp_path, caplog, error):
    home = _interrupted(tmp_path / "out", tasks=2, error=error)
    assert f"the same command continues where this one ended; `{home}`" in caplog.text
    with _staging(tmp_path / "out") as staging:
        staging.begin()
        assert staging.finished_tasks() == {0: 255, 1: 256}
        assert (staging.checkpoint / "weights").read_text() == "w"
        staging.finish()
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_errors_before_the_first_task_leave_nothing(tmp_path):
    _interrupted(tmp_path / "out", tasks=0)
    assert list(tmp_path.iterdir()) == []


def test_errors_about_content_leave_nothing(tmp_path):
    with pytest.raises(NonFiniteWeight), _staging(tmp_path / "out") as staging:  # noqa: PT012
        staging.begin()
        staging.note(0, 1)
        raise NonFiniteWeight("`w` is not finite")
    assert list(tmp_path.iterdir()) == []


def _read_error():
    try:
        raise OSError(5, "Input/output error")
    except OSError as cause:
        error = CheckpointError("cannot read `x`")
        error.__cause__ = cause
        return error


@pytest.mark.parametrize(
    ("error", "certain"),
    [
        (NonFiniteWeight("x"), True),
        (CheckpointError("x"), True),
        (_read_error(), False),
        (OutputError("x"), False),
        (WorkerError("x"), False),
        (WorkerError("x", is_certain=True), True),
        (KeyboardInterrupt(), False),
        (MemoryError(), False),
        (OSError(5, "x"), False),
        (AssertionError(), False),
    ],
)
def test_what_the_same_command_would_meet_again(error, certain):
    assert is_certain(error) is certain


def test_another_conversion_may_not_continue(tmp_path):
    home = _interrupted(tmp_path / "out")
    with pytest.raises(OutputError) as caught, _staging(tmp_path / "out", OTHER) as staging:
        staging.begin()
    text = str(caught.value)
    assert "was begun by another conversion: found `m` to W4A16, this is `m` to W8A8" in text
    assert f"hint: finish it with its own command, or remove `{home}`" in text
    assert caught.value.__cause__ is None
    with _staging(tmp_path / "out") as staging:
        staging.begin()
        assert staging.finished_tasks() == {0: 255}


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"digest": "abc"}', "null", "\0\0\0"], ids=repr
)
def test_a_plan_that_is_torn_is_nothing_of_worth(tmp_path, content):
    home = _interrupted(tmp_path / "out")
    (home / "plan.json").write_text(content)
    with _staging(tmp_path / "out") as staging:
        staging.begin()
        assert staging.finished_tasks() == {}
        assert list(staging.checkpoint.iterdir()) == []
        assert json.loads((home / "plan.json").read_text())["digest"] == "abc"


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"0 ff\n1 1", {0: 255}),
        (b"0 ff\n1", {0: 255}),
        (b"0 ff", {}),
        (b"", {}),
        (b"\0\0\0\0\n0 ff\n", {0: 255}),
        (b"0 ff\n\xff\xfe 3\n2 10\n", {0: 255, 2: 16}),
        (b"0 ff\n-1 3\n1 -3\n 1 3\n1 3 4\n2 10\n", {0: 255, 2: 16}),
        (b"0 ff\n0 10\n", {0: 16}),
        (b"7 ffffffffffffffff\n", {7: 2**64 - 1}),
    ],
)
def test_torn_journals(tmp_path, content, found):
    home = _interrupted(tmp_path / "out")
    (home / "done-0").write_bytes(content)
    with _staging(tmp_path / "out") as staging:
        staging.begin()
        assert staging.finished_tasks() == found
        staging.note(5, 0xABC)
        assert staging.finished_tasks() == {**found, 5: 0xABC} | _torn(content)


def _torn(content):
    """A torn line that happens to be one: its checksum is that of nothing, so it does no harm."""
    last = content.rpartition(b"\n")[2]
    return {int(last.split()[0]): int(last.split()[1], 16)} if len(last.split()) == 2 else {}


def test_ranks_have_journals_of_their_own(tmp_path):
    with _staging(tmp_path / "out") as first, _staging(tmp_path / "out", rank=1) as second:
        first.begin()
        second.join()
        first.note(0, 1)
        second.note(1, 2)
        assert first.finished_tasks() == second.finished_tasks() == {0: 1, 1: 2}
        assert {"done-0", "done-1"} <= {path.name for path in first.home.iterdir()}
        first.finish()
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_a_rank_with_another_plan(tmp_path):
    with (  # noqa: PT012 - joining is what raises
        _staging(tmp_path / "out") as first,
        pytest.raises(OutputError, match="this process would convert `m` to W8A8, the first one"),
        _staging(tmp_path / "out", OTHER, rank=1) as second,
    ):
        first.begin()
        second.join()
    with (
        pytest.raises(OutputError, match="is not there, though the first process made it"),
        _staging(tmp_path / "elsewhere", rank=1) as second,
    ):
        second.join()


def test_an_error_of_another_rank_removes_nothing(tmp_path):
    with _staging(tmp_path / "out") as first:
        first.begin()
        first.note(0, 1)
        with pytest.raises(NonFiniteWeight), _staging(tmp_path / "out", rank=1) as second:  # noqa: PT012
            second.join()
            raise NonFiniteWeight("x")
        assert first.finished_tasks() == {0: 1}


# -- killed while it ends --------------------------------------------------------------------------


def _kill_at(folder, function, call, *, identity=OURS):
    """Finish in a process that is killed just before the given call of a function of `Path`."""

    def run():
        real, count = getattr(Path, function), [0]

        def dying(*arguments, **options):
            count[0] += 1
            if count[0] == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        with _staging(folder, identity) as staging:
            staging.begin()
            if not staging.is_complete:
                (staging.checkpoint / "config.json").write_text("{}")
                staging.note(0, 1)
            setattr(Path, function, dying)
            staging.finish()
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    return process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("function", "call"),
    [("rename", 1), ("rename", 2), *(("unlink", n) for n in range(1, 5)), ("glob", 1)],
)
@pytest.mark.parametrize("is_empty_there", [False, True])
def test_killed_while_it_ends(tmp_path, function, call, is_empty_there):
    folder = tmp_path / "out"
    if is_empty_there:
        folder.mkdir()
    assert _kill_at(folder, function, call)
    if (function, call) != ("rename", 1):
        with pytest.raises(OutputError, match="another conversion"), _staging(folder, OTHER) as s:
            s.begin()
    check_place(folder)
    with _staging(folder) as staging:
        staging.begin()
        assert staging.is_complete is ((function, call) != ("rename", 1))
        assert staging.finish() == folder
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize(("function", "call"), [("unlink", 5), ("rmdir", 1)])
def test_killed_as_its_last_act(tmp_path, function, call):
    """The output is complete; what is left of its place is in nobody's way."""
    folder = tmp_path / "out"
    assert _kill_at(folder, function, call)
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    with pytest.raises(OutputError, match="is not empty"):
        check_place(folder)
    folder.rename(tmp_path / "elsewhere")
    _finish(folder, OTHER)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "out"]


# -- places ----------------------------------------------------------------------------------------


def test_an_empty_folder_is_used(tmp_path):
    (tmp_path / "out").mkdir()
    assert (_finish(tmp_path / "out") / "config.json").exists()


@pytest.mark.parametrize("name", ["", ".", "../here", "./"])
def test_the_present_folder_is_used_if_it_is_empty(tmp_path, monkeypatch, name):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert _finish(Path(name)) == tmp_path / "here"
    assert (tmp_path / "here" / "config.json").exists()
    assert list(tmp_path.iterdir()) == [tmp_path / "here"]


def test_places_that_are_taken(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    places = {
        tmp_path / "file": "is a file or a link",
        tmp_path / "full": "is not empty",
        tmp_path / "link": "a link",
        Path("/"): "is not empty",
    }
    for place, message in places.items():
        with pytest.raises(OutputError, match=message):
            check_place(place)
    with pytest.raises(OutputError, match=r"cannot write `.*`: Not a directory"):
        _finish(tmp_path / "file" / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full", "link"]


def test_a_folder_of_others_in_the_place_of_the_unfinished_one(tmp_path):
    for name in ("thesis.txt", "plan.json.old"):
        home = tmp_path / f".{name}.unfinished"
        home.mkdir()
        (home / name).touch()
        with pytest.raises(OutputError, match="unfinished` is in the way and was not made by"):
            _finish(tmp_path / name)
        assert (home / name).exists()
    (tmp_path / ".file.unfinished").touch()
    with pytest.raises(OutputError, match="is in the way"):
        _finish(tmp_path / "file")


def test_a_folder_that_fills_up_meanwhile(tmp_path):
    with (  # noqa: PT012 - finishing is what raises
        pytest.raises(OutputError, match="Directory not empty"),
        _staging(tmp_path / "out") as staging,
    ):
        staging.begin()
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "x").touch()
        staging.finish()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["x"]


def test_two_runs_at_once(tmp_path):
    with _staging(tmp_path / "out") as staging:
        staging.begin()
        staging.note(0, 1)
        for identity in (OURS, OTHER):
            with pytest.raises(OutputError, match=r"another process is writing `.*out`"):
                _finish(tmp_path / "out", identity)
        assert staging.finished_tasks() == {0: 1}
        staging.finish()
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_a_place_that_vanishes_before_it_is_locked(tmp_path, monkeypatch):
    """Another process ends between the opening of its lock and the locking: begin anew."""
    real, calls = module.fcntl.flock, []

    def flock(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            (tmp_path / ".out.unfinished" / "lock").unlink()
        if len(calls) == 2:
            (tmp_path / ".out.unfinished" / "lock").unlink()
            (tmp_path / ".out.unfinished" / "lock").touch()
        return real(*arguments)

    monkeypatch.setattr(module.fcntl, "flock", flock)
    assert _finish(tmp_path / "out").exists()
    assert len(calls) == 3
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_a_journal_that_cannot_be_written(tmp_path):
    with (  # noqa: PT012 - noting is what raises
        pytest.raises(OutputError, match=r"cannot write `.*out`: Is a directory"),
        _staging(tmp_path / "out") as staging,
    ):
        staging.begin()
        (staging.home / "done-0").mkdir()
        staging.note(0, 1)


def test_bytes_are_on_the_disk_before_they_have_their_name(tmp_path, monkeypatch):
    steps, fsync, rename = [], os.fsync, Path.rename

    def synced(descriptor):
        steps.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def renamed(path, target):
        steps.append(f"{path.name} to {Path(target).name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    _finish(tmp_path / "out")
    steps = steps[steps.index("config.json") :]
    assert steps == [
        *("config.json", "checkpoint", "plan.json to finished", "checkpoint to out"),
        tmp_path.name,
    ]
