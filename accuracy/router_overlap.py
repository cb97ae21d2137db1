"""Whether routers of a mixture of experts choose the same experts in two models.

Counted where the experts of a block are called with the choices of their router, [T, k]: of the
experts that the reference chose for a token, how many the candidate chose too, each model on its
own hidden states. The order of the choices does not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantload.layers.experts import FusedExperts
from quantload.layers.experts_layout import holds_experts


@dataclass(frozen=True)
class RouterOverlap:
    """How often a router chose what it chose in the reference; add two to merge them.

    Args:
        tokens: Tokens that were routed.
        chosen: Experts that the reference chose for them, in all.
        shared: Of these, the ones that the candidate chose too.
    """

    tokens: int = 0
    chosen: int = 0
    shared: int = 0

    def __add__(self, other: RouterOverlap) -> RouterOverlap:
        return RouterOverlap(
            self.tokens + other.tokens, self.chosen + other.chosen, self.shared + other.shared
        )

    @property
    def share(self) -> float:
        """Share of the reference's choices that the candidate made too; 1 without any."""
        return self.shared / self.chosen if self.chosen else 1.0


def overlap(reference: Tensor, candidate: Tensor, experts: int) -> RouterOverlap:
    """Compare choices [T, k] of the experts 0..experts - 1; other numbers are none."""
    is_choice = (reference >= 0) & (reference < experts)
    is_shared = (reference[:, :, None] == candidate[:, None, :]).any(dim=-1) & is_choice
    return RouterOverlap(len(reference), int(is_choice.sum()), int(is_shared.sum()))


@dataclass
class Choices:
    """What routers of one model chose, by path of their experts, while it was watched."""

    of: dict[str, tuple[Tensor, int]] = field(default_factory=dict)

    @contextmanager
    def watching(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Watch the experts among some modules while this is open."""
        self.of = {}
        handles = [
            module.register_forward_pre_hook(partial(self._note, path), with_kwargs=True)
            for path, module in modules.items()
            if isinstance(module, FusedExperts) or holds_experts(module)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(
        self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        index = next((x for x in (*args, *kwargs.values()) if _is_choice(x)), None)
        if index is not None and path not in self.of:  # called once a forward
            self.of[path] = index, _count(module)


def _is_choice(value: object) -> bool:
    return (
        isinstance(value, Tensor) and value.ndim == 2 and value.dtype in (torch.int64, torch.int32)
    )


def _count(module: nn.Module) -> int:
    if isinstance(module, FusedExperts):
        return module.layout.experts
    return next(len(p) for p in module._parameters.values() if p is not None and p.ndim == 3)


__all__ = ["Choices", "RouterOverlap", "overlap"]
