"""Whether the layers of a model can be spread over stages: nothing but hidden states may pass on.

The model runs once on the meta device. Every tensor that is computed from the token embedding is
followed. A layer that is handed one beside its hidden states (an earlier layer's, or the embedding
itself) could not run in another stage than its origin; nor could what comes after the layers, if it
reads the embedding. Then the model is not cut, and the error says what was seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quantload.layers.meta_model import TransformersModel
from quantload.layers.probe import probe

# Operations that take a tensor for its shape, dtype and device alone.
_SHAPE_ONLY = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "new_")


@dataclass
class Trace:
    """What a forward on the meta device showed.

    Args:
        order: Modules in the order in which they returned, with what they returned.
        leaks: What passes on beside the hidden states: "argument `residual` of `model.layers.3`".
    """

    order: dict[str, Any] = field(default_factory=dict)
    leaks: list[str] = field(default_factory=list)


def trace(model: TransformersModel, *, embedding: str, layers: list[str]) -> Trace:
    """Run a model on the meta device and follow what is computed from its embedding.

    Args:
        model: On the meta device.
        embedding: Path of the token embedding.
        layers: Paths of its layers, in order.

    Raises:
        Exception: What the model's code raises where there are no values.
    """
    return probe(model, lambda: _watched(model, embedding, layers))


@contextmanager
def _watched(model: nn.Module, embedding: str, layers: list[str]) -> Iterator[Trace]:
    found, follow = Trace(), _Follow()
    handles = list(_hooks(model, found, follow, embedding, layers))
    try:
        with follow:
            yield found
    finally:
        for handle in handles:
            handle.remove()


class _Follow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows tensors: `early` are computed from the embedding, not through a layer; `all` from it.

    Tensors are kept alive, so that an id stays that of one tensor.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.early: set[int] = set()
        self.all: set[int] = set()
        self._alive: list[Tensor] = []

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - the protocol of torch
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        result = func(*args, **(kwargs or {}))
        if not func.__name__.startswith(_SHAPE_ONLY):
            inputs = list(_tensors((args, kwargs)))
            for known in (self.early, self.all):
                if any(id(x) in known for x in inputs):
                    self._add(known, _tensors(result))
        return result

    def mark(self, values: object, *, early: bool) -> None:
        """Follow tensors from here on."""
        self._add(self.all, _tensors(values))
        if early:
            self._add(self.early, _tensors(values))
        else:
            self.early.difference_update(id(x) for x in _tensors(values))

    def _add(self, known: set[int], tensors: Iterable[Tensor]) -> None:
        for x in tensors:
            known.add(id(x))
            self._alive.append(x)


def _tensors(values: object) -> Iterator[Tensor]:
    return (x for x in tree_leaves(values) if isinstance(x, Tensor))


def _hooks(
    model: nn.Module, found: Trace, follow: _Follow, embedding: str, layers: list[str]
) -> Iterator[Any]:
    for path, module in model.named_modules():
        if path == embedding:
            yield module.register_forward_hook(lambda *a: follow.mark(a[-1], early=True))
        elif path in layers:
            yield module.register_forward_pre_hook(
                _check_layer(path, found, follow), with_kwargs=True
            )
            yield module.register_forward_hook(lambda *a: follow.mark(a[-1], early=False))
        elif not any(path.startswith(f"{layer}.") for layer in layers):
            yield module.register_forward_pre_hook(
                _check_after(path, found, follow, layers[-1]), with_kwargs=True
            )
        yield module.register_forward_hook(_note(path, found))


def _note(path: str, found: Trace) -> Callable[..., None]:
    def note(_: nn.Module, __: tuple[Any, ...], output: object) -> None:
        found.order.setdefault(path, output)

    return note


def _check_layer(path: str, found: Trace, follow: _Follow) -> Callable[..., None]:
    def check(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = {f"{n}": value for n, value in enumerate(args)} | kwargs
        named.pop("0" if args else "hidden_states", None)
        for name, value in named.items():
            if any(id(x) in follow.all for x in _tensors(value)):
                found.leaks.append(f"argument `{name}` of `{path}` is computed by other layers")

    return check


def _check_after(path: str, found: Trace, follow: _Follow, last: str) -> Callable[..., None]:
    def check(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if last in found.order and any(id(x) in follow.early for x in _tensors((args, kwargs))):
            found.leaks.append(f"`{path}`, after the layers, reads the embedding")

    return check


__all__ = ["Trace", "trace"]
