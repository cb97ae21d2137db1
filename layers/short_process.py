"""Run a function in a short-lived copy of this process, so that the memory it takes is given back.

transformers' model code takes 200 MiB to import, which nothing needs once a model was probed.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from quantload.layers.deferred_import import defer_import

Result = TypeVar("Result")
_log = logging.getLogger("quantload")
_HEAVY = "transformers.modeling_utils"
_RARELY = (100_000, 20, 100)  # what is imported and built all lives: little garbage to be found


def run_apart(function: Callable[[], Result]) -> Result:
    """Return what a function returns, computed in a copy of this process where that is safe.

    It is safe, and of use, while this is the only thread, CUDA is not in use, and transformers'
    model code is not imported. Else, and where the copy fails, the function runs here.

    Args:
        function: Takes nothing and changes nothing; its result can be pickled.
    """
    return begin_apart(function)()


def begin_apart(function: Callable[[], Result]) -> Callable[[], Result]:
    """Start what `run_apart` does; what is returned waits for the result, and is called once.

    Between the two this process does what needs no result; where the function runs here, it runs
    when it is waited for.
    """
    if not _is_safe():
        return function
    receiving, sending = os.pipe()
    try:
        child = _fork()
    except OSError:  # no memory for a copy, no more processes
        os.close(receiving)
        os.close(sending)
        return function
    if not child:
        _answer(function, sending)
    os.close(sending)

    return lambda: _received(receiving, child, function)


@contextmanager
def warm_copy(
    function: Callable[..., Result], warm: Callable[[], object]
) -> Iterator[Callable[..., Callable[[], Result]]]:
    """Start a copy of this process that gets ready beside it, and answers one question.

    Yields what asks it: called with the arguments of the function, it returns what waits for the
    result. Where no copy is safe, or it fails, the function runs here, when it is waited for. A
    copy that was not asked ends with the block.

    Args:
        function: Changes nothing; its arguments and result can be pickled.
        warm: What the copy does until it is asked, such as an import.
    """
    if not _is_safe():
        yield lambda *arguments: lambda: function(*arguments)
        return
    question = os.memfd_create("quantload")
    pipes = [*os.pipe(), *os.pipe()]
    listening, asking, receiving, sending = pipes
    try:
        child = _fork()
    except OSError:
        for descriptor in (question, *pipes):
            os.close(descriptor)
        yield lambda *arguments: lambda: function(*arguments)
        return
    if not child:
        os.close(asking)  # so that it sees when nobody will ask
        os.close(receiving)
        _answer(lambda: function(*_asked(warm, listening, question)), sending)
    os.close(listening)
    os.close(sending)
    is_running = True

    def ask(*arguments: object) -> Callable[[], Result]:
        with os.fdopen(os.dup(question), "wb") as file:
            pickle.dump(arguments, file, protocol=pickle.HIGHEST_PROTOCOL)
        os.write(asking, b"?")

        def wait() -> Result:
            nonlocal is_running
            is_running = False
            return _received(os.dup(receiving), child, lambda: function(*arguments))

        return wait

    try:
        yield ask
    finally:
        if is_running:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        for descriptor in (question, asking, receiving):
            os.close(descriptor)


def _asked(warm: Callable[[], object], listening: int, question: int) -> tuple[object, ...]:
    """Get ready, and return the arguments of the question."""
    warm()
    if not os.read(listening, 1):
        raise EOFError("nobody asks")
    os.lseek(question, 0, os.SEEK_SET)
    with os.fdopen(question, "rb") as file:
        arguments: tuple[object, ...] = pickle.load(file)  # noqa: S301 - from our own process
    return arguments


def _received(receiving: int, child: int, function: Callable[[], Result]) -> Result:
    """Return what a copy answers; where it failed, what the function returns here."""
    with os.fdopen(receiving, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if status or not answer:
        _log.debug("the copy of this process failed: status %d", status)
        return function()
    result: Result = pickle.loads(answer)  # noqa: S301 - from our own copy
    return result


def _is_safe() -> bool:
    return (
        hasattr(os, "fork")
        and sys.platform == "linux"
        and _HEAVY not in sys.modules
        and threading.active_count() == 1
        and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    )


def _fork() -> int:
    with warnings.catch_warnings():
        # NOTE: Python 3.12 warns of the idle threads of numerical libraries, which survive a fork
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _answer(function: Callable[[], object], pipe: int) -> None:
    """Send the result and end the copy at once: what else the process would do is not its own."""
    status = 1
    try:
        gc.freeze()  # collections leave the pages alone that both share
        gc.enable()
        gc.set_threshold(*_RARELY)
        defer_import("scipy.optimize", "linear_sum_assignment")
        torch.set_num_threads(1)  # the threads of the pool are not in the copy
        with os.fdopen(pipe, "wb") as file:
            pickle.dump(function(), file, protocol=pickle.HIGHEST_PROTOCOL)
        status = 0
    finally:
        os._exit(status)
