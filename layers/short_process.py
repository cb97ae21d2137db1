"""Run a function in a short-lived copy of this process, so that the memory it takes is given back.

transformers' model code takes 200 MiB to import, which nothing needs once a model was probed.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import sys
import threading
import warnings
from collections.abc import Callable
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

    def wait() -> Result:
        with os.fdopen(receiving, "rb") as pipe:
            answer = pipe.read()
        _, status = os.waitpid(child, 0)
        if status or not answer:
            _log.debug("the copy of this process failed: status %d", status)
            return function()
        result: Result = pickle.loads(answer)  # noqa: S301 - from our own copy
        return result

    return wait


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
