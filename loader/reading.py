"""`Reading`: one value that a model needs, and what of the files is read for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quantload.loader.checkpoint import MadeEntry, TensorEntry
from quantload.loader.runs import Fetch, Row
from quantload.quant.qtensor import QuantTensor

Value = QuantTensor | Tensor


@dataclass(frozen=True, eq=False)
class Reading:
    """One value of a job.

    Args:
        value: Returns it, once its fetches are there.
        fetches: What is streamed for it; none if `value` reads by itself.
        num_bytes: Bytes that are read for it.
        slot: The slot that it goes to; None is that of the job, or all of them.
        is_cut: True if it is what this rank holds; False if it is all of the tensor.
        is_straight: True if the one fetch is the value, in memory that the model keeps.
    """

    value: Callable[[], Value]
    fetches: tuple[Fetch, ...] = ()
    num_bytes: int = 0
    slot: int | None = None
    is_cut: bool = False
    is_straight: bool = False


def lies_in_file(entry: TensorEntry) -> bool:
    """True if the bytes of a tensor can be read as they are."""
    return entry.is_contiguous and not isinstance(entry, MadeEntry)


def owned(value: Value) -> Value:
    """Return a value in memory of its own: a view would keep the whole tensor alive."""
    if isinstance(value, Tensor):
        return value.clone(memory_format=torch.contiguous_format)
    copies: dict[str, Any] = {name: part.clone() for name, part in value.tensors().items()}
    return replace(value, **copies)


def put_in_row(readings: Mapping[int, Reading]) -> None:
    """Let the slots of a leaf lie one after the other in one tensor, if they can.

    A layer that puts its members into one weight then has it already.

    Args:
        readings: What is read, by slot.
    """
    found = [readings[slot] for slot in sorted(readings)]
    if not all(reading.is_straight and reading.is_cut for reading in found):
        return
    fetches = [reading.fetches[0] for reading in found]
    kinds = {(f.portion.entry.dtype, f.portion.shape[1:]) for f in fetches}
    if len(kinds) == 1:
        Row(fetches)


__all__ = ["Reading", "Value", "lies_in_file", "owned", "put_in_row"]
