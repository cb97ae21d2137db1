"""Threads that share tasks: order, memory, errors."""

import os
import threading
import time
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from quantload.errors import ConfigError
from quantload.loader.workers import Resources, work_through


def _tasks(*sizes):
    return [SimpleNamespace(number=i, working_bytes=size) for i, size in enumerate(sizes)]


def _work(tasks, do, *, threads=4, memory=100, finished=lambda task: None):
    work_through(tasks, lambda: nullcontext(do), threads=threads, memory=memory, finished=finished)


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("count", [0, 1, 50])
def test_every_task_is_done_once(threads, count):
    done, told = [], []
    _work(_tasks(*[1] * count), done.append, threads=threads, finished=told.append)
    assert sorted(task.number for task in done) == list(range(count))
    assert sorted(task.number for task in told) == list(range(count))
    if threads == 1:
        assert [task.number for task in told] == list(range(count))


class Memory:
    """Notes how much is in use, and keeps each task until all that fit are there."""

    def __init__(self, limit):
        self.limit, self.used, self.most, self.together = limit, 0, 0, 0
        self._running = []
        self._lock = threading.Lock()

    def do(self, task):
        with self._lock:
            self.used += task.working_bytes
            self._running.append(task)
            self.most = max(self.most, self.used)
            self.together = max(self.together, len(self._running))
            assert self.used <= self.limit or self._running == [task]
        time.sleep(0.002)
        with self._lock:
            self.used -= task.working_bytes
            self._running.remove(task)


@pytest.mark.parametrize("sizes", [[30] * 20, [60, 30, 10, 100, 20] * 5, [100] * 8])
def test_tasks_stay_within_the_memory(sizes):
    memory = Memory(100)
    _work(_tasks(*sizes), memory.do)
    assert memory.most <= 100
    assert memory.used == 0


@pytest.mark.parametrize("sizes", [[1000], [1000, 1000], [10, 1000, 10, 10, 2000, 10]])
def test_a_task_above_the_memory_runs_alone(sizes):
    memory = Memory(100)
    _work(_tasks(*sizes), memory.do)  # `do` raises if another one runs meanwhile
    assert memory.most == max(sizes)


def test_threads_run_together():
    barrier = threading.Barrier(4, timeout=20)
    _work(_tasks(*[25] * 4), lambda task: barrier.wait())
    assert barrier.n_waiting == 0


@pytest.mark.parametrize("error", [OSError(5, "x"), KeyboardInterrupt(), MemoryError()])
def test_an_error_stops_the_others(error):
    done = []

    def do(task):
        if task.number == 3:
            raise error
        time.sleep(0.001)
        done.append(task)

    before = threading.active_count()
    with pytest.raises(type(error)) as caught:
        _work(_tasks(*[25] * 10_000), do)
    assert caught.value is error
    assert len(done) < 1000
    assert threading.active_count() == before


def test_the_first_error_is_the_one_that_is_raised():
    first = threading.Event()

    def do(task):
        if task.number == 0:
            first.wait(20)
            time.sleep(0.05)
            raise ValueError("second")
        first.set()
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        _work(_tasks(1, 1), do, threads=2)


def test_an_error_while_others_wait_for_memory():
    """The failed task keeps its memory: those that wait for it must not wait for ever."""

    def do(task):
        time.sleep(0.02)
        raise ValueError(task.number)

    with pytest.raises(ValueError, match="0"):
        _work(_tasks(100, 100, 100), do)


def test_an_error_of_whoever_is_told():
    def finished(task):
        raise KeyboardInterrupt

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        _work(_tasks(*[1] * 100), lambda task: time.sleep(0.001), finished=finished)
    assert threading.active_count() == before


def test_workers_are_opened_and_closed_in_their_threads():
    opened, closed = [], []

    @contextmanager
    def worker():
        opened.append(threading.current_thread())
        yield lambda task: time.sleep(0.001)
        closed.append(threading.current_thread())

    work_through(_tasks(*[1] * 30), worker, threads=3, memory=100, finished=lambda task: None)
    assert len(set(opened)) == 3
    assert set(opened) == set(closed)
    assert threading.current_thread() not in opened

    @contextmanager
    def broken():
        raise OSError(24, "Too many open files")
        yield

    with pytest.raises(OSError, match="Too many"):
        work_through(_tasks(1, 1), broken, threads=2, memory=100, finished=lambda task: None)


def test_a_thread_computes_alone_and_the_caller_as_before():
    before, found = torch.get_num_threads(), []
    torch.set_num_threads(3)
    try:
        _work(_tasks(1, 1), lambda task: found.append(torch.get_num_threads()), threads=2)
        assert found == [1, 1]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("wrong", [{"memory": 0}, {"memory": -1}, {"workers": 0}, {"workers": -2}])
def test_resources_that_are_none(wrong):
    with pytest.raises(ConfigError, match="expected at least 1"):
        Resources(**wrong)


def test_threads_of_a_process():
    assert Resources(workers=5).threads() == Resources(workers=5).threads(processes=3) == 5
    cores = len(os.sched_getaffinity(0))
    assert Resources().threads() == cores
    assert Resources().threads(processes=cores) == Resources().threads(processes=10 * cores) == 1


@pytest.mark.parametrize(("cores", "expected"), [(1, 1), (2, 1), (4, 3), (16, 12)])
def test_a_gpu_leaves_cores_to_digests(monkeypatch, cores, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert Resources(device=torch.device("cuda")).threads() == expected
    assert Resources().threads() == cores
    assert Resources(device=torch.device("cuda"), workers=5).threads() == 5
