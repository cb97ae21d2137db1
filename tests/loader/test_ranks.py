"""Several processes that write one output together."""

import hashlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest
import tiny_checkpoints as tiny
import torch
from converting import plan_of
from safetensors.torch import load_file

from quantload.errors import ConfigError, QuantloadError
from quantload.loader.convert import run_plan
from quantload.loader.convert_task import TaskRunner
from quantload.loader.ranks import Ranks
from quantload.loader.staging import Staging
from quantload.loader.tasks import share_of, tasks_of
from quantload.loader.workers import Resources
from quantload.progress import Silent


def _die():
    run, count = TaskRunner.run, [0]

    def dying(runner, task):
        count[0] += 1
        if count[0] == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return run(runner, task)

    TaskRunner.run = dying


def _fail_to_read(source):
    """The fourth read of this checkpoint fails: finished output is read back in between."""
    preadv, count, file = os.preadv, [0], source / "model.safetensors"

    def failing(descriptor, *arguments):
        if os.path.samestat(os.fstat(descriptor), file.stat()):
            count[0] += 1
            if count[0] == 4:
                raise OSError(5, "Input/output error")
        return preadv(descriptor, *arguments)

    os.preadv = failing


def _free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _one(rank, environment, source, output, scheme, before, errors):
    """One process, forked: to import everything again would take seconds."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    with errors.open("w") as stream:
        sys.stderr = stream
        try:
            before()
            plan = plan_of(source, scheme, max_shard_bytes=30_000)
            run_plan(plan, output, Silent(), Resources(workers=2), Ranks.from_environment())
        except QuantloadError as error:
            stream.write(f"error: {error}\n")
            stream.flush()
            os._exit(2)
    os._exit(0)


def _start(source, output, scheme="NVFP4A16", *, ranks=2, before=None, schemes=None):
    """Run the ranks as torchrun does; returns (exit status, stderr) of each."""
    port, running = str(_free_port()), []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(ranks):
            environment = {
                **{"RANK": str(rank), "LOCAL_RANK": str(rank)},
                **{"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            }
            first = (before or {}).get(rank, lambda: None)
            mine = (schemes or {}).get(rank, scheme)
            errors = Path(folder) / str(rank)
            arguments = (rank, environment, source, output, mine, first, errors)
            process = multiprocessing.get_context("fork").Process(target=_one, args=arguments)
            process.start()
            running.append((process, errors))
        for process, _ in running:
            process.join(timeout=120)
            assert process.exitcode is not None, "it hangs"
        return [(process.exitcode, errors.read_text()) for process, errors in running]


def _hashes(folder):
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.iterdir()}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tiny.llama(tmp_path_factory.mktemp("ranks") / "in")
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(scope="module", autouse=True)
def whole(source, tmp_path_factory):
    """What this process writes alone; it imports and compiles what the forked ones need."""
    plan = plan_of(source, "NVFP4A16", max_shard_bytes=30_000)
    output = run_plan(plan, tmp_path_factory.mktemp("whole") / "out", Silent())
    return _hashes(output)


@pytest.mark.parametrize("ranks", [2, 4])
def test_any_number_of_processes_writes_the_same_bytes(tmp_path, source, whole, ranks):
    ended = _start(source, tmp_path / "out", ranks=ranks)
    assert [status for status, _ in ended] == [0] * ranks, ended
    assert _hashes(tmp_path / "out") == whole
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


@pytest.mark.parametrize("killed", [0, 1])
def test_a_process_that_is_killed_fails_the_others(tmp_path, source, whole, killed):
    out = tmp_path / "out"
    ended = _start(source, out, before={killed: _die})
    assert ended[killed][0] == -signal.SIGKILL
    status, text = ended[1 - killed]
    assert status == 2
    assert "error: another process is gone: " in text
    assert "hint: run the same command again: it continues where this one ended" in text
    assert [path.name for path in tmp_path.iterdir()] == [".out.unfinished"]
    done = (tmp_path / ".out.unfinished" / f"done-{killed}").read_text().splitlines()
    assert len(done) >= 2
    ended = _start(source, out, ranks=3 if killed else 1)
    assert all(status == 0 for status, _ in ended), ended
    assert _hashes(out) == whole
    assert list(tmp_path.iterdir()) == [out]


def test_an_error_of_one_process_is_told_by_all(tmp_path, source, whole):
    failing = {1: partial(_fail_to_read, source)}
    (first, text), (second, cause) = _start(source, tmp_path / "out", before=failing)
    assert (first, second) == (2, 2)
    message = f"cannot read `{source / 'model.safetensors'}`: Input/output error"
    assert f"error: {message}" in cause
    assert f"error: process 1 failed: {message}" in text
    assert "hint: run the same command again" in text
    assert [path.name for path in tmp_path.iterdir()] == [".out.unfinished"]
    ended = _start(source, tmp_path / "out")
    assert all(status == 0 for status, _ in ended), ended
    assert _hashes(tmp_path / "out") == whole


def _take_long():
    run = TaskRunner.run

    def slow(runner, task):
        time.sleep(0.6)  # longer than a process waits between two looks at the others
        return run(runner, task)

    TaskRunner.run = slow


def test_an_error_of_one_process_stops_the_others_soon(tmp_path, source):
    failing = {0: _take_long, 1: partial(_fail_to_read, source)}
    ended = _start(source, tmp_path / "out", before=failing)
    assert [status for status, _ in ended] == [2, 2]
    assert "error: process 1 failed: cannot read" in ended[0][1]
    share = share_of(tasks_of(plan_of(source, "NVFP4A16", max_shard_bytes=30_000)), 0, 2)
    done = (tmp_path / ".out.unfinished" / "done-0").read_text().splitlines()
    assert len(done) <= 4 < len(share)  # two threads, which look before each task


def _as_float16():
    global plan_of
    plan_of = partial(plan_of, dtype=torch.float16)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_an_error_about_content_leaves_nothing(tmp_path, source, name):
    """Whichever process finds it."""
    made = load_file(source / "model.safetensors")
    made[name][0, 0] = 1e5
    folder = tmp_path / "in"
    tiny.write(folder, tiny.config(), made)
    ended = _start(folder, tmp_path / "out", before={0: _as_float16, 1: _as_float16})
    assert [status for status, _ in ended] == [2, 2]
    assert all(f"1 values of `{name.removesuffix('.weight')}" in text for _, text in ended), ended
    assert sum("failed: " in text for _, text in ended) == 1
    assert not any("run the same command again" in text for _, text in ended)
    assert list(tmp_path.iterdir()) == [folder]


def test_a_process_with_another_command(tmp_path, source):
    (first, text), (second, cause) = _start(source, tmp_path / "out", schemes={1: "W8A8"})
    assert (first, second) == (2, 2)
    assert "error: this process would convert " in cause
    assert "error: process 1 failed: this process would convert " in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("at", ["rename", "unlink"])
def test_killed_while_the_first_process_ends(tmp_path, source, whole, at):
    """All processes find the output complete, and the first one ends it."""

    def die():
        finish = Staging.finish

        def dying(*_, **__):
            os.kill(os.getpid(), signal.SIGKILL)

        def ending(staging):
            if at == "rename":
                (staging.home / "plan.json").rename(staging.home / "finished")
            setattr(Path, at, dying)
            return finish(staging)

        Staging.finish = ending

    ended = _start(source, tmp_path / "out", before={0: die})
    assert [status for status, _ in ended] == [-signal.SIGKILL, 0]
    assert (tmp_path / "out").exists() is (at == "unlink")
    ended = _start(source, tmp_path / "out")
    assert [status for status, _ in ended] == [0, 0], ended
    assert _hashes(tmp_path / "out") == whole
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


# -- what the environment says ---------------------------------------------------------------------

TORCHRUN = {
    **{"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},
    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
}


def test_what_torchrun_says(monkeypatch):
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    assert Ranks.from_environment() == Ranks()
    assert Ranks().is_first
    monkeypatch.setenv("WORLD_SIZE", "8")  # some schedulers set it for every job
    assert Ranks.from_environment() == Ranks()
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert Ranks.from_environment() == Ranks(rank=5, size=8, here=4, local=1)
    assert not Ranks.from_environment().is_first


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("RANK", "-1", "`RANK` is `-1`, expected a number of at least 0"),
        ("RANK", "8", "`RANK` is 8, expected less than `WORLD_SIZE`, 8"),
        ("WORLD_SIZE", "", "`WORLD_SIZE` is ``, expected a number"),
        ("LOCAL_WORLD_SIZE", "0", "`LOCAL_WORLD_SIZE` is `0`, expected a number of at least 1"),
        ("LOCAL_RANK", "x", "`LOCAL_RANK` is `x`"),
    ],
)
def test_an_environment_that_makes_no_sense(monkeypatch, name, value, message):
    for key, usual in {**TORCHRUN, name: value}.items():
        monkeypatch.setenv(key, usual)
    with pytest.raises(ConfigError) as caught:
        Ranks.from_environment()
    assert message in str(caught.value)


def test_a_single_process_waits_for_nobody():
    alone = Ranks()
    with alone.together():
        assert alone.wait() is None


@pytest.mark.slow
def test_torchrun(tmp_path, source):
    """The command line, as users start it on several processors."""
    command = ["-m", "quantload", "convert", str(source)]
    more = ["--scheme", "NVFP4A16", "--workers", "1", "--max-shard-size", "30KB"]
    one = [sys.executable, *command, str(tmp_path / "one"), *more]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    two = [*torchrun, "--nproc-per-node", "2", *command, str(tmp_path / "two"), *more]
    ended = [subprocess.run(c, capture_output=True, text=True, check=False) for c in (one, two)]
    assert [done.returncode for done in ended] == [0, 0], ended
    assert _hashes(tmp_path / "one") == _hashes(tmp_path / "two")
    assert ended[1].stdout.count("written: ") == 1
