"""What a layer of ours tells and is told while a checkpoint is loaded."""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor

from quantload.quant.qtensor import QuantTensor
from quantload.quant.region import Region


@runtime_checkable
class Receiver(Protocol):
    """A layer that takes tensors instead of having parameters.

    Args:
        dtype: dtype of the floats that it takes.
    """

    dtype: torch.dtype

    def awaits(self) -> dict[tuple[str, int], tuple[int, ...]]:
        """Return the shape of each tensor of the whole layer, by leaf and slot."""

    def region(self, leaf: str, slot: int) -> Region | None:
        """Return what of a tensor this rank holds; None if all of it is another rank's."""

    def receive(self, leaf: str, slot: int, value: QuantTensor | Tensor) -> None:
        """Take a tensor, cut to its region."""

    def finish(self, device: torch.device) -> None:
        """Pack what was received; nothing is missing."""


@runtime_checkable
class ExpertsReceiver(Receiver, Protocol):
    """A layer of E experts, whose weights come one by one: [N, K], output features first.

    A leaf is the name of the parameter that holds the experts in the model's own code, a slot is
    expert * parts + part: gate_up_proj has two parts if rows of gate come before those of up, one
    if they alternate.
    """

    def has_input_first(self, leaf: str) -> bool:
        """Say whether the model's own parameter is [E, K, N] instead of [E, N, K]."""


@runtime_checkable
class TiedReceiver(Receiver, Protocol):
    """A layer that may hold one weight with another: an output head."""

    def share_weight(self, other: Any) -> bool:  # noqa: ANN401 - the layer that it is tied to
        """Make the loaded weight of one that of both; False if both have values of their own."""


def is_receiver(module: object) -> TypeGuard[Receiver]:
    """True if a module is a `Receiver`; `isinstance` takes a hundred times as long to say so."""
    return _has(_class_of(module), ("awaits", "region", "receive", "finish"))


def is_experts_receiver(module: object) -> TypeGuard[ExpertsReceiver]:
    """True if a module is an `ExpertsReceiver`."""
    return is_receiver(module) and _has(_class_of(module), ("has_input_first",))


def _class_of(module: object) -> Any:  # noqa: ANN401 - mypy takes no class as a key
    return type(module)


@cache
def _has(kind: Any, methods: tuple[str, ...]) -> bool:  # noqa: ANN401 - a class
    return all(callable(getattr(kind, method, None)) for method in methods)


__all__ = [
    "ExpertsReceiver",
    "Receiver",
    "TiedReceiver",
    "is_experts_receiver",
    "is_receiver",
]
