"""One batch through one layer of a model: what stands in the places of all others.

The forward is the model's own. It is handed the hidden states that were kept when it comes to the
layer, and ends where the next one would begin, or at the output head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quantload.errors import ModelError

_STATES = "hidden_states"
_UNKNOWN = -1


class Reached(Exception):
    """Ends a forward early: no error."""


class HeadInput(nn.Module):
    """Stands for an output head whose weight is not loaded: only its input is of interest.

    Args:
        head: The head, a linear layer.
    """

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.in_features = head.in_features

    def forward(self, x: Tensor) -> Tensor:
        """End the forward here: there are no logits of x."""
        raise Reached


class DoneLayer(nn.Module):
    """Stands for a layer that is done, or whose turn has not come: lets hidden states through.

    Args:
        layer: The layer; only what model code asks it before it calls it is kept.
        returned: How many parts the tuple has that it returned; 0 if it returned no tuple.
    """

    def __init__(self, layer: nn.Module, *, returned: int = 0) -> None:
        super().__init__()
        for name, value in vars(layer).items():
            if isinstance(value, str | int | float) and not name.startswith("_"):
                setattr(self, name, value)
        self.returned = returned

    def forward(self, hidden_states: Tensor, *_: object, **__: object) -> object:
        """Return the hidden states as they are."""
        rest = (None,) * (self.returned - 1)
        return (hidden_states, *rest) if self.returned else hidden_states


class LayerStep:
    """One batch through one layer, while this is open.

    Args:
        layer: The layer, loaded.
        following: The next one, whose input is the result; None if this is the last.
        head: The output head, where the forward of the last layer ends; None if it goes on.
        state: What the layer is given, [B, T, H] on the CPU; None lets the model give it.
        device: Where the layer is.
        ends: End the forward after the layer; the result is what it returns.

    Attributes:
        result: What the next layer is given, or this one returns, [B, T, H] on the CPU.
        head_input: What the head is given, where the forward ended there, [..., H].
        returned: How many parts the tuple has that the layer returned; 0 if it returned no tuple.
    """

    def __init__(
        self,
        layer: nn.Module,
        following: nn.Module | None,
        head: nn.Module | None,
        state: Tensor | None,
        device: torch.device,
        *,
        ends: bool = False,
    ) -> None:
        self._layer, self._following, self._head = layer, following, head
        self._state, self._device, self._ends = state, device, ends
        self._handles: list[Any] = []
        self.result: Tensor | None = None
        self.head_input: Tensor | None = None
        self.returned = _UNKNOWN

    def __enter__(self) -> LayerStep:
        add = self._handles.append
        add(self._layer.register_forward_pre_hook(self._give, with_kwargs=True))
        add(self._layer.register_forward_hook(self._note))
        if self._following is not None:
            add(self._following.register_forward_pre_hook(self._take, with_kwargs=True))
        elif self._head is not None:
            add(self._head.register_forward_pre_hook(self._keep_head_input, with_kwargs=True))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        is_missed = self.returned == _UNKNOWN or (self._following and self.result is None)
        if kind is None and is_missed:
            raise ModelError(f"a forward did not reach `{type(self._layer).__name__}`")

    def _give(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._state is None:
            return None
        x = self._state.to(self._device)
        return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, _STATES: x})

    def _note(self, _: nn.Module, __: tuple[Any, ...], output: object) -> None:
        self.returned = len(output) if isinstance(output, tuple) else 0
        if self._ends:
            x = output[0] if isinstance(output, tuple) else output
            assert isinstance(x, Tensor), "hidden states, as the proof of the cut has seen"
            self.result = x.cpu()
            raise Reached

    def _take(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep what the next layer is given: also what the model does between two layers."""
        x: Tensor = args[0] if args else kwargs[_STATES]
        self.result = x.cpu()
        raise Reached

    def _keep_head_input(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.head_input = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        raise Reached


__all__ = ["DoneLayer", "HeadInput", "LayerStep", "Reached"]
