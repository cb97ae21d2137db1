"""Whether the layers of a model can be spread over stages: nothing but hidden states may pass on.

The model runs once on the meta device. Of every tensor it is noted from which of the layers, or
from the embedding, it was computed. A layer must read what the layer before it has returned, maybe
changed in between, and nothing else of them: not the embedding, not an earlier layer, be it by an
argument, by a cache or by code between layers. What comes after the layers must read the last one
only. Otherwise the model is not cut, and the error says what was seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


EMBEDDING, HEAD = -1, -2  # beside numbers of layers: where a tensor comes from


@dataclass
class Trace:
    """What a forward on the meta device showed.

    Args:
        order: Modules in the order in which they returned, with what they returned.
        leaks: What passes on beside the hidden states: "argument `residual` of `model.layers.3`".
        given: Hidden states that the layers are given.
        states: Hidden states that they return.
        head_input: What the head reads; None if there is none.
        reads_states: True if some result is computed from the last layer, but not by the head.
    """

    order: dict[str, Any] = field(default_factory=dict)
    leaks: list[str] = field(default_factory=list)
    given: list[Tensor] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    head_input: Tensor | None = None
    reads_states: bool = False


def trace(model: TransformersModel, *, embedding: str, layers: list[str], head: str = "") -> Trace:
    """Run a model on the meta device and follow what is computed from its embedding.

    Args:
        model: On the meta device.
        embedding: Path of the token embedding.
        layers: Paths of its layers, in order.
        head: Path of its output head, "" if it has none.

    Raises:
        Exception: What the model's code raises where there are no values.
    """
    return probe(model, lambda: _watched(model, _Places(embedding, layers, head)))


@dataclass(frozen=True)
class _Places:
    embedding: str
    layers: list[str]
    head: str


@contextmanager
def _watched(model: nn.Module, places: _Places) -> Iterator[Trace]:
    found = Trace()
    follow = _Follow(found, places.layers)
    handles = list(_hooks(model, found, follow, places))
    try:
        with follow:
            yield found
    finally:
        for handle in handles:
            handle.remove()


class _Follow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows tensors: for each, from which layers it comes.

    Tensors are kept alive, so that an id stays that of one tensor.
    """

    def __init__(self, found: Trace, layers: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found, self.layers = found, layers
        self.origins: dict[int, frozenset[int]] = {}
        self.inside: tuple[int, frozenset[int]] | None = None  # layer that runs, what it may read
        self.is_behind = False  # all layers have run
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
            origins = self.of((args, kwargs))
            if self.inside is not None and not origins <= self.inside[1]:
                self._leak(self.inside[0], origins - self.inside[1])
            elif self.is_behind and (wrong := origins - {len(self.layers) - 1, HEAD}):
                name = _name(self.layers, min(wrong))
                self.found.leaks.append(f"what comes after the layers reads what comes from {name}")
            if origins:
                self.mark(result, origins)
        return result

    def _leak(self, layer: int, origins: frozenset[int]) -> None:
        names = [_name(self.layers, one) for one in sorted(origins)]
        self.found.leaks.append(f"`{self.layers[layer]}` reads what comes from {names[0]}")

    def of(self, values: object) -> frozenset[int]:
        """Return where tensors come from."""
        none: frozenset[int] = frozenset()
        return none.union(*(self.origins.get(id(x), none) for x in _tensors(values)))

    def mark(self, values: object, origins: frozenset[int]) -> None:
        """Note where tensors come from."""
        for x in _tensors(values):
            self.origins[id(x)] = origins
            self._alive.append(x)


def _name(layers: list[str], origin: int) -> str:
    return "the embedding" if origin == EMBEDDING else f"`{layers[origin]}`"


def _tensors(values: object) -> Iterator[Tensor]:
    return (x for x in tree_leaves(values) if isinstance(x, Tensor))


def _hooks(model: nn.Module, found: Trace, follow: _Follow, places: _Places) -> Iterator[Any]:
    for path, module in model.named_modules():
        if path == places.embedding:
            yield module.register_forward_hook(
                lambda *a: follow.mark(a[-1], frozenset((EMBEDDING,)))
            )
        elif path in places.layers:
            number = places.layers.index(path)
            yield module.register_forward_pre_hook(
                _enter_layer(number, path, found, follow), with_kwargs=True
            )
            yield module.register_forward_hook(_leave_layer(number, found, follow))
        elif path == places.head and path:
            yield module.register_forward_hook(_note_head(found, follow))
        if path == "":
            yield module.register_forward_hook(_check_result(found, follow, places.layers))
        yield module.register_forward_hook(_note(path, found))


def _note(path: str, found: Trace) -> Callable[..., None]:
    def note(_: nn.Module, __: tuple[Any, ...], output: object) -> None:
        found.order.setdefault(path, output)

    return note


def _enter_layer(number: int, path: str, found: Trace, follow: _Follow) -> Callable[..., None]:
    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = {f"{n}": value for n, value in enumerate(args)} | kwargs
        states = named.pop("0" if args else "hidden_states", None)
        if not isinstance(states, Tensor):
            found.leaks.append(f"`{path}` is not given `hidden_states`")
        else:
            found.given.append(states)
        for name, value in named.items():
            if follow.of(value):
                found.leaks.append(f"argument `{name}` of `{path}` is computed by other layers")
        origins, before = follow.of(states), number - 1 if number else EMBEDDING
        for one in sorted(origins - {before}):
            name = _name(follow.layers, one)
            found.leaks.append(f"the hidden states that `{path}` is given come from {name} as well")
        if before not in origins:
            name = _name(follow.layers, before)
            found.leaks.append(f"the hidden states that `{path}` is given do not come from {name}")
        follow.inside = number, origins

    return enter


def _leave_layer(number: int, found: Trace, follow: _Follow) -> Callable[..., None]:
    def leave(_: nn.Module, __: tuple[Any, ...], output: object) -> None:
        follow.inside = None
        follow.is_behind = number == len(follow.layers) - 1
        follow.mark(output, frozenset((number,)))
        states = next(_tensors(output[0] if isinstance(output, tuple) else output), None)
        if states is not None:
            found.states.append(states)

    return leave


def _note_head(found: Trace, follow: _Follow) -> Callable[..., None]:
    def note(_: nn.Module, args: tuple[Any, ...], output: object) -> None:
        found.head_input = next(_tensors(args), None)
        wrong = follow.of(args) - {len(follow.layers) - 1}
        for one in sorted(wrong):
            found.leaks.append(f"what comes after the layers reads {_name(follow.layers, one)}")
        follow.mark(output, frozenset((HEAD,)))

    return note


def _check_result(found: Trace, follow: _Follow, layers: list[str]) -> Callable[..., None]:
    def check(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:  # noqa: ANN401
        origins = follow.of(dict(output) if isinstance(output, dict) else output) - {HEAD}
        found.reads_states = len(layers) - 1 in origins
        for one in sorted(origins - {len(layers) - 1}):
            found.leaks.append(f"the result reads {_name(layers, one)}")

    return check


__all__ = ["Trace", "trace"]
