"""Functions that run in a copy of the process: same results, and never where it is not safe."""

import os
import subprocess
import sys
import threading

from quantload.layers import short_process

SCRIPT = """
import os, sys
from quantload.layers.short_process import run_apart
{0}
"""


def run(body):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(body)], capture_output=True, text=True, check=False
    )
    return done.stdout.split(), done.returncode, done.stderr


def test_result_comes_from_a_copy_that_imports_nothing_here():
    said, status, errors = run(
        "def find():\n"
        "    import transformers.modeling_utils\n"
        "    return os.getpid(), {'a': ('b',)}\n"
        "pid, found = run_apart(find)\n"
        "print(pid != os.getpid(), found, 'transformers.modeling_utils' in sys.modules)"
    )
    assert (said, status) == (["True", "{'a':", "('b',)}", "False"], 0), errors


def test_failing_copy_is_replaced_by_a_run_here():
    said, status, errors = run(
        "here = os.getpid()\n"
        "def find(fail):\n"
        "    return fail() if os.getpid() != here else 'found'\n"
        "for fail in (lambda: os._exit(3), lambda: 1 / 0, lambda: lambda: 1):\n"
        "    print(run_apart(lambda: find(fail)))\n"
        "run_apart(lambda: {}['this'])"
    )
    assert (said, status) == (["found"] * 3, 1)
    assert "KeyError: 'this'" in errors  # the last one fails here as well: its error is told


def test_other_threads_are_no_place_for_a_copy(monkeypatch):
    monkeypatch.setattr(short_process, "_HEAVY", "no such module")
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    try:
        assert short_process.run_apart(os.getpid) == os.getpid()
    finally:
        release.set()
        thread.join()


def test_what_is_imported_already_needs_no_copy(monkeypatch):
    monkeypatch.setattr(short_process, "_HEAVY", "os")
    monkeypatch.setattr(short_process.threading, "active_count", lambda: 1)
    assert short_process.run_apart(os.getpid) == os.getpid()


ASKED = (
    "import os, sys\n"
    "from quantload.layers.short_process import warm_copy\n"
    "def add(one, two): return one + two, os.getpid()\n"
    "def fail(one, two):\n"
    "    if os.getpid() != main: raise ValueError\n"
    "    return one + two, os.getpid()\n"
    "main = os.getpid()\n"
)


def test_a_copy_that_is_ready_answers():
    code = (
        f"{ASKED}"
        "with warm_copy(lambda: None) as ask:\n"
        "    found, pid = ask(add, [1] * 100_000, [2])()\n"
        "    print(len(found), pid != main)\n"
        "    print(ask(add, 1, 2)() == (3, pid))"  # a shorter question, and the same copy
    )
    assert run(code)[0] == ["100001", "True", "True"]


def test_what_a_ready_copy_fails_at_runs_here():
    code = (
        f"{ASKED}"
        "with warm_copy(lambda: None) as ask:\n"
        "    for one in (1, 4): print(ask(fail, one, 2)() == (one + 2, main))\n"
        "    try: ask(add, 1, None)()\n"
        "    except TypeError: print('told here')"
    )
    assert run(code)[0] == ["True", "True", "told", "here"]


def test_a_copy_that_is_not_asked_ends_with_the_block():
    code = (
        f"{ASKED}"
        "try:\n"
        "    with warm_copy(lambda: None): raise KeyError\n"
        "except KeyError: pass\n"
        "try: os.waitpid(-1, os.WNOHANG)\n"
        "except ChildProcessError: print('none left')"
    )
    assert run(code)[0] == ["none", "left"]
