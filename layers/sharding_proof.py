"""Whether a block computes the same when its layers are cut, proven without values.

Equal shapes are not enough: a mean over features, or a split of them, fits just as well where a
rank holds some of them, and is another one. So a block runs twice on the meta device, whole and
cut, and both runs are compared operation by operation. A dimension whose size differs is one that
ranks share. Along it nothing may be done that needs all of it:

    allowed     what treats elements alike (sums of tensors, activations), moves and merges of
                dimensions that keep the rank's part in one piece, reductions and products along
                other dimensions, zeros and ones
    refused     reductions, splits, slices and joins along it, slices of its size, counting
                (`arange`), factors that follow from its size, and every operation that is not known
                here
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Shape = tuple[int, ...]

_FILL = ("zeros", "ones", "full", "empty", "new_", "scalar_tensor")
_MERGE = ("view", "_unsafe_view", "reshape", "_reshape_alias")
_KEEP = (
    *("permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "alias", "detach", "stack"),
    *("clone", "_to_copy", "contiguous", "lift_fresh", "lift_fresh_copy"),
    *("view_as_complex", "view_as_real"),  # of pairs, which lie behind all that is shared
)
_COPIES = ("copy", "copy_")  # of one tensor into another, which may repeat it
_NORMS = ("native_layer_norm", "_fused_rms_norm", "rms_norm")
# name: the dimension of each operand that is added up
_PRODUCTS = {"mm": (1, 0), "bmm": (2, 1), "addmm": (1, 0), "baddbmm": (2, 1), "matmul": (-1, -2)}


@dataclass(frozen=True)
class Step:
    """One operation of a forward.

    Args:
        name: Of the operation.
        inputs: Shapes of its tensors.
        outputs: Shapes of its results.
        numbers: Its floating point arguments.
        along: Dimensions that it names, () if it names none.
        treats_alike: True if each element of the result is computed from those in its place.
    """

    name: str
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    numbers: tuple[float, ...] = ()
    along: tuple[int, ...] | None = None
    treats_alike: bool = False


@dataclass
class Steps:
    """The operations of one forward.

    Args:
        by_module: Operations by the innermost module with parts that runs them, in order.
        callers: Modules in whose forward layers that are cut are called.
        outputs: Shapes of what modules with parts return.
    """

    by_module: dict[str, list[Step]] = field(default_factory=dict)
    callers: set[str] = field(default_factory=set)
    outputs: dict[str, list[Shape]] = field(default_factory=dict)


@contextmanager
def watch_steps(model: nn.Module, cut: Sequence[str]) -> Iterator[Steps]:
    """Note the operations of a forward, except those inside the layers that are cut.

    Args:
        model: On the meta device.
        cut: Paths of the layers that are cut.
    """
    seen, running = Steps(), [""]
    handles = []
    for path in cut:
        layer = model.get_submodule(path)
        handles.append(layer.register_forward_pre_hook(_enter_layer(seen, running)))
        handles.append(layer.register_forward_hook(lambda *_: _leave(running)))
    for path, module in model.named_modules():
        if path and path not in cut and any(True for _ in module.children()):
            handles.append(module.register_forward_pre_hook(_enter(running, path)))
            handles.append(module.register_forward_hook(_returned(seen, running, path)))
    try:
        with _Watch(seen, running):
            yield seen
    finally:
        for handle in handles:
            handle.remove()


def _enter_layer(seen: Steps, running: list[str]) -> Callable[..., None]:
    def enter(*_: object) -> None:
        seen.callers.add(running[-1])
        running.append(_INSIDE)

    return enter


def _enter(running: list[str], path: str) -> Callable[..., None]:
    return lambda *_: running.append(path)


def _leave(running: list[str]) -> None:
    running.pop()


def _returned(seen: Steps, running: list[str], path: str) -> Callable[..., None]:
    def returned(_: nn.Module, __: object, output: object) -> None:
        running.pop()
        seen.outputs[path] = [tuple(x.shape) for x in _tensors(output)]

    return returned


_INSIDE = "\0"  # in a layer that is cut; no path


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, seen: Steps, running: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen, self.running = seen, running

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - the protocol of torch
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        inputs = tuple(tuple(x.shape) for x in _tensors((args, kwargs)))  # before it is written to
        result = func(*args, **(kwargs or {}))
        where = self.running[-1]
        if where != _INSIDE:
            outputs = tuple(tuple(x.shape) for x in _tensors(result))
            is_alike = torch.Tag.pointwise in func.tags
            step = Step(
                name=func._schema.name.partition("::")[2],
                inputs=inputs,
                outputs=outputs,
                numbers=tuple(_numbers((args, kwargs), whole_ones=is_alike)),
                along=_along(func, args, kwargs or {}, inputs),
                treats_alike=is_alike,
            )
            self.seen.by_module.setdefault(where, []).append(step)
        return result


def _along(
    func: Any,  # noqa: ANN401 - an operator of torch
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    inputs: tuple[Shape, ...],
) -> tuple[int, ...] | None:
    """Return the dimensions of its first tensor that an operation works along."""
    if not inputs:
        return None
    rank = len(inputs[0])
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if "normalized_shape" in given:
        return tuple(range(rank - len(given["normalized_shape"]), rank))
    if "dim" not in names:
        return None
    default = next(a.default_value for a in func._schema.arguments if a.name == "dim")
    found = given.get("dim", default)
    if found is None:
        return tuple(range(rank))
    dims = found if isinstance(found, list | tuple) else [found]
    return tuple(dim % max(1, rank) for dim in dims) or tuple(range(rank))


def _numbers(values: object, *, whole_ones: bool) -> Iterator[float]:
    """Yield the factors among arguments; whole ones are sizes, except for sums and products."""
    kinds = (int, float) if whole_ones else (float,)
    return (x for x in tree_leaves(values) if isinstance(x, kinds))


def _tensors(values: object) -> Iterator[Tensor]:
    return (x for x in tree_leaves(values) if isinstance(x, Tensor))


# -- comparison -----------------------------------------------------------------------------------


def first_difference(whole: Steps, cut: Steps) -> tuple[str, str] | None:
    """Return the first module that computes something else where it is cut, and why.

    None if every module computes the same.
    """
    for path in sorted(cut.callers | whole.callers):
        found = whole.outputs.get(path), cut.outputs.get(path)
        if path and found[0] != found[1]:
            return path, f"returns `{found[1]}` when it is cut, expected `{found[0]}`"
    for path in sorted({*whole.by_module, *cut.by_module}):
        if not any(not caller or f"{path}.".startswith(f"{caller}.") for caller in cut.callers):
            continue
        reason = _difference(whole.by_module.get(path, []), cut.by_module.get(path, []))
        if reason:
            return path, reason
    return None


def _difference(whole: list[Step], cut: list[Step]) -> str:
    if [step.name for step in whole] != [step.name for step in cut]:
        return "does something else when it is cut"
    return next(
        (why for one, two in zip(whole, cut, strict=True) if (why := _why_not(one, two))), ""
    )


def _why_not(whole: Step, cut: Step) -> str:
    """Say why an operation computes something else on a rank's part; "" if it does not."""
    ranks = [len(s) for s in (*whole.inputs, *whole.outputs)]
    if ranks != [len(s) for s in (*cut.inputs, *cut.outputs)]:
        return f"`{whole.name}` gives other dimensions when it is cut"
    if whole.numbers != cut.numbers:
        return f"`{whole.name}` has a factor that follows from how many features there are"
    inputs = [_shared(a, b) for a, b in zip(whole.inputs, cut.inputs, strict=True)]
    outputs = [_shared(a, b) for a, b in zip(whole.outputs, cut.outputs, strict=True)]
    if not any(inputs) and not any(outputs):
        return ""
    return "" if _keeps(whole, cut, inputs, outputs) else f"`{whole.name}` needs all of a dimension"


def _shared(whole: Shape, cut: Shape) -> tuple[int, ...]:
    """Return the dimensions that ranks share."""
    return tuple(dim for dim, (a, b) in enumerate(zip(whole, cut, strict=True)) if a != b)


def _keeps(
    whole: Step, cut: Step, inputs: list[tuple[int, ...]], outputs: list[tuple[int, ...]]
) -> bool:
    """True if an operation on a rank's part gives the rank's part of the result."""
    name = whole.name
    if not whole.inputs or name.startswith(_FILL):
        return name.startswith(_FILL)
    if name in _MERGE:
        return _runs(whole.inputs[0], cut.inputs[0]) == _runs(whole.outputs[0], cut.outputs[0])
    if name in _KEEP:
        return _sizes(whole.inputs[0], cut.inputs[0]) <= _sizes(whole.outputs[0], cut.outputs[0])
    if whole.treats_alike or name in _COPIES:
        pairs = zip(whole.inputs, cut.inputs, strict=True)
        return all(_fits(a, b, whole.outputs[0], cut.outputs[0]) for a, b in pairs)
    if name in _PRODUCTS:
        return all(
            dim % len(shape) not in shared
            for dim, shape, shared in zip(
                _PRODUCTS[name], whole.inputs[-2:], inputs[-2:], strict=True
            )
        )
    if name.startswith("_scaled_dot_product"):
        return all(shared in ((), (1,)) for shared in inputs[:3])
    if name == "cat":
        dims = [dim for shared in inputs for dim in shared]
        return whole.along is not None and not set(whole.along) & set(dims)
    return _keeps_along(whole, cut, inputs)


def _keeps_along(whole: Step, cut: Step, inputs: list[tuple[int, ...]]) -> bool:
    """The same for an operation that works along dimensions, and is none of those above."""
    if whole.along is None or set(whole.along) & set(inputs[0]):
        return False
    sizes = (_sizes(a, b) for a, b in zip(whole.outputs, cut.outputs, strict=True))
    if not set().union(*sizes) <= _sizes(whole.inputs[0], cut.inputs[0]):
        return False  # as many as a rank has are taken of what all have: the first, on every rank
    return len(whole.inputs) == 1 or (whole.name in _NORMS and not any(inputs[1:]))


def _sizes(whole: Shape, cut: Shape) -> set[tuple[int, int]]:
    return {(a, b) for a, b in zip(whole, cut, strict=True) if a != b}


def _runs(whole: Shape, cut: Shape) -> tuple[int, int] | None:
    """Return how many neighbours the shared dimension has, of all ranks and of one."""
    shared = _shared(whole, cut)
    if len(shared) != 1:
        return None
    inner = prod(whole[shared[0] + 1 :])
    return whole[shared[0]] * inner, cut[shared[0]] * inner


def _fits(whole: Shape, cut: Shape, whole_result: Shape, cut_result: Shape) -> bool:
    """True if each dimension of an operand is that of the result, or one that is repeated."""
    sizes = zip(reversed(whole), reversed(cut), strict=True)
    results = zip(reversed(whole_result), reversed(cut_result), strict=True)
    return all(one in ((1, 1), two) for one, two in zip(sizes, results, strict=False))


__all__ = ["Steps", "first_difference", "watch_steps"]
