"""One forward of a model that computes nothing, in the first way that the model's code allows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

from quantload.layers.meta_forward import run_mixed, run_on_meta
from quantload.layers.meta_model import TransformersModel, dummy_inputs, without_attention
from quantload.layers.quick_meta import QuickMeta

T = TypeVar("T")

_WAYS = ((False, run_on_meta), (True, run_mixed), (False, run_mixed))


def probe(model: TransformersModel, watch: Callable[[], AbstractContextManager[T]]) -> T:
    """Run a model once and return what was seen.

    Args:
        model: Parameters on any device; they are not read.
        watch: Makes what watches one forward, a context manager; a forward that fails is watched by
            one, the next way to run it by another.

    Raises:
        Exception: What the model's code raised the first time, if every way fails.
    """
    first: Exception | None = None
    for masks, run in _WAYS:
        with QuickMeta(), watch() as seen, without_attention(model, masks=masks):  # type: ignore[no-untyped-call]
            try:
                run(model, {**dummy_inputs(model), "use_cache": False})
            except Exception as error:  # noqa: BLE001 - model code raises anything
                first = first or error
                continue
            return seen
    assert first is not None, "there is more than one way"
    raise first


__all__ = ["probe"]
