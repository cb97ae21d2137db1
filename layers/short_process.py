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
from typing import Any, NoReturn, TypeVar

import torch

from quantload.layers.deferred_import import defer_import

Result = TypeVar("Result")
_log = logging.getLogger("quantload")
_HEAVY = "transformers.modeling_utils"
_LENGTH = 8  # bytes that say how long an answer is
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


Ask = Callable[..., Callable[[], Any]]


@contextmanager
def warm_copy(warm: Callable[[], object]) -> Iterator[Ask]:
    """Start a copy of this process that gets ready beside it, and answers questions.

    Yields what asks it: called with a function of a module and its arguments, it returns what waits
    for the result; a question is asked once the one before it is answered. Where no copy is safe,
    or it fails, the function runs here, when it is waited for. The copy ends with the block.

    Args:
        warm: What the copy does until it is asked, such as an import.
    """
    copy = _Copy(warm) if _is_safe() else None
    try:
        yield _run_later if copy is None else copy.ask
    finally:
        if copy is not None:
            copy.end()


def _run_later(function: Callable[..., Result], *arguments: object) -> Callable[[], Result]:
    return lambda: function(*arguments)


class _Copy:
    """A copy of this process that waits for questions.

    Args:
        warm: See `warm_copy`.
    """

    def __init__(self, warm: Callable[[], object]) -> None:
        # a file, not a pipe: who asks does not wait until the copy is ready
        self._question = os.memfd_create("quantload")
        pipes = listening, self._asking, receiving, sending = [*os.pipe(), *os.pipe()]
        self._child = 0
        try:
            child = _fork()
        except OSError:  # no memory for a copy, no more processes
            for descriptor in pipes:
                os.close(descriptor)
            return
        if not child:
            os.close(self._asking)  # so that it sees when nobody will ask
            os.close(receiving)
            _in_copy(lambda: self._serve(warm, listening, sending))
        os.close(listening)
        os.close(sending)
        self._answers = os.fdopen(receiving, "rb")
        self._child = child

    def ask(self, function: Callable[..., Result], *arguments: object) -> Callable[[], Result]:
        """Ask for what a function returns; see `warm_copy`."""
        try:
            if not self._child:
                raise BrokenPipeError
            os.ftruncate(self._question, 0)
            os.lseek(self._question, 0, os.SEEK_SET)
            with os.fdopen(os.dup(self._question), "wb") as file:
                pickle.dump((function, arguments), file, protocol=pickle.HIGHEST_PROTOCOL)
            os.write(self._asking, b"?")
        except BrokenPipeError:  # it has failed at an earlier question
            return _run_later(function, *arguments)
        return lambda: self._answer_to(function, *arguments)

    def _answer_to(self, function: Callable[..., Result], *arguments: object) -> Result:
        length = int.from_bytes(self._answers.read(_LENGTH), "little")
        answer = self._answers.read(length) if length else b""
        if not length or len(answer) < length:
            _log.debug("the copy of this process failed")
            return function(*arguments)
        result: Result = pickle.loads(answer)  # noqa: S301 - from our own copy
        return result

    def _serve(self, warm: Callable[[], object], listening: int, sending: int) -> None:
        warm()
        with os.fdopen(sending, "wb") as answers:
            while os.read(listening, 1):
                os.lseek(self._question, 0, os.SEEK_SET)
                with os.fdopen(os.dup(self._question), "rb") as file:
                    function, arguments = pickle.load(file)  # noqa: S301 - from our own process
                answer = pickle.dumps(function(*arguments), protocol=pickle.HIGHEST_PROTOCOL)
                answers.write(len(answer).to_bytes(_LENGTH, "little") + answer)
                answers.flush()

    def end(self) -> None:
        """End the copy."""
        if not self._child:
            return
        os.kill(self._child, signal.SIGKILL)
        os.waitpid(self._child, 0)
        self._answers.close()
        for descriptor in (self._question, self._asking):
            os.close(descriptor)


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

    def send() -> None:
        with os.fdopen(pipe, "wb") as file:
            pickle.dump(function(), file, protocol=pickle.HIGHEST_PROTOCOL)

    _in_copy(send)


def _in_copy(work: Callable[[], None]) -> NoReturn:
    """Do the work of a copy, and end it."""
    status = 1
    try:
        gc.freeze()  # collections leave the pages alone that both share
        gc.enable()
        gc.set_threshold(*_RARELY)
        defer_import("scipy.optimize", "linear_sum_assignment")
        torch.set_num_threads(1)  # the threads of the pool are not in the copy
        work()
        status = 0
    finally:
        os._exit(status)
