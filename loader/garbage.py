"""Long lists of small objects that all live, built without a search for garbage among them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Leave out cyclic garbage collections, which cost a third of the time.

    Headers and plans are hundreds of thousands of small objects that all live: there is nothing to
    be found.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
