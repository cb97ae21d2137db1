"""Give one module another forward: it becomes an instance of a class derived from its own.

The new class comes first, then that of the model's code, so that `super().forward` is what ran
before, `isinstance` and the name stay true, and hooks, parameters and children are untouched. A
class made on the fly cannot be pickled by name; the module is pickled as the pair that made it.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn


class Swapped(nn.Module):
    """A forward that is put before that of another class."""

    original: ClassVar[type[nn.Module]]
    forward_of: ClassVar[type[Swapped]]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:  # noqa: ANN401 - pickle's protocol
        """Copy and pickle as the pair of classes and the state."""
        return _empty, (self.forward_of, self.original), self.__dict__


def swap_class(module: nn.Module, forward_of: type[Swapped]) -> None:
    """Let a module run the forward of `forward_of`."""
    assert not isinstance(module, Swapped), f"{type(module).__name__} was swapped already"
    module.__class__ = _class(forward_of, type(module))


_classes: dict[tuple[type, type], type[Swapped]] = {}  # one of each pair


def _class(forward_of: type[Swapped], original: type[nn.Module]) -> type[Swapped]:
    pair = (forward_of, original)
    if pair in _classes:
        return _classes[pair]
    content = {
        "__module__": original.__module__,
        "__doc__": original.__doc__,
        "original": original,
        "forward_of": forward_of,
    }
    return _classes.setdefault(pair, type(original.__name__, (forward_of, original), content))


def _empty(forward_of: type[Swapped], original: type[nn.Module]) -> nn.Module:
    cls = _class(forward_of, original)
    return cls.__new__(cls)


__all__ = ["Swapped", "swap_class"]
