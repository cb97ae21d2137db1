"""How loops are compiled by numba, and kept on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from numba import njit

# Divisions by zero give infinity or NaN, as in PyTorch. Nothing may change the order or the
# rounding of float operations: `fastmath` stays off.
_OPTIONS = {"nogil": True, "error_model": "numpy"}

inlined = njit(**_OPTIONS)
# For sums whose last bits do not matter: several elements at a time.
in_any_order = njit(fastmath={"reassoc"}, **_OPTIONS)


class Kernel:
    """A compiled function that is kept on disk where that is possible.

    It lies beside the source file or, if nothing can be written there, in the user's cache folder.
    What is kept is found by the function's name. numba takes it as long as the file of the function
    is the same, and asks nothing about the files of what it calls: the name tells these.

    Args:
        function: Compiled on its first call with each set of dtypes. It raises nothing.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function
        self._compiled: Callable[..., None] | None = None
        self._is_cached = True

    def __call__(self, *arguments: Any) -> None:
        """Run on these arguments, without the interpreter's lock."""
        try:
            self._compiled = self._compiled or self._compile()
            self._compiled(*arguments)
        except Exception:
            if not self._is_cached:
                raise
            # no folder for the cache, a full disk, a damaged file: whatever numba makes of it
            self._is_cached, self._compiled = False, None
            self(*arguments)

    def _compile(self) -> Callable[..., None]:
        self._function.__qualname__ = f"{self._function.__name__}-{_sources_digest()}"
        compiled: Callable[..., None] = njit(cache=self._is_cached, **_OPTIONS)(self._function)
        return compiled


@cache
def _sources_digest() -> str:
    """Tells the sources of all loops: eight hexadecimal digits."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("compiled_*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:8]
