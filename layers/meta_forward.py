"""Run a model without memory for its parameters, although its code asks for values.

Plain meta tensors are tried first; they take milliseconds a layer. Hybrid models read masks and
lengths, and mixtures of experts ask which tokens go where: `Mixed` runs what depends on inputs and
buffers alone on the CPU, the rest on the meta device, and answers for values that nobody has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

_aten = torch.ops.aten
_LARGE = 1 << 22  # elements of a buffer above which its values are not looked at


def run_on_meta(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Run a forward whose parameters, buffers and inputs are all on the meta device.

    Args:
        model: Parameters on any device; they are not read.
        inputs: Keyword arguments of its forward, small tensors on the CPU.
    """
    on_meta = {key: _meta(value) for key, value in inputs.items()}
    with torch.no_grad(), _state_kept(model):
        torch.func.functional_call(model, _tensors(model, keep_buffers=False), kwargs=on_meta)


def run_mixed(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Run a forward of which only the parameters are on the meta device; see `Mixed`."""
    with torch.no_grad(), _state_kept(model), Mixed():  # type: ignore[no-untyped-call]
        torch.func.functional_call(model, _tensors(model, keep_buffers=True), kwargs=dict(inputs))


@contextmanager
def _state_kept(model: nn.Module) -> Iterator[None]:
    """Undo what a forward sets: RoPE that grows with the text keeps frequencies and lengths."""
    kept = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes, buffers in kept:
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)


def _tensors(model: nn.Module, *, keep_buffers: bool) -> dict[str, Tensor]:
    """Return stand-ins in bfloat16, since grouped matrix products on the meta device want it."""
    tensors = {name: _stand_in(tensor) for name, tensor in model.named_parameters()}
    for name, buffer in model.named_buffers():
        known = keep_buffers and buffer.device.type == "cpu" and buffer.numel() < _LARGE
        tensors[name] = _narrow(buffer) if known else _stand_in(buffer)
    return tensors


def _narrow(tensor: Tensor) -> Tensor:
    """Return a copy, floats in the dtype of the stand-ins."""
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor.clone()


def _stand_in(tensor: Tensor) -> Tensor:
    dtype = torch.bfloat16 if tensor.is_floating_point() else tensor.dtype
    return torch.empty_like(tensor, device="meta", dtype=dtype)


def _meta(value: Any) -> Any:  # noqa: ANN401 - an argument of any type
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


class Mixed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets meta tensors and small ones with values be used together.

    all arguments have values     the operation runs as it is
    some are on the meta device   the others follow them there; the result has no values
    a value is asked for          1 or True; every position where positions are asked for
    """

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - an operator of torch
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        devices = {t.device.type for t in _tensors_in((args, kwargs))}
        if "meta" not in devices:
            return func(*args, **kwargs)
        if func in _ANSWERS:
            return _ANSWERS[func](*args, **kwargs)
        if func is _aten._to_copy.default and _goes_to_cpu(kwargs):
            return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if func in _INDEXED:
            args = (args[0], [_positions(index) for index in args[1]], *args[2:])
        if func is _aten.split_with_sizes.default:
            args = (args[0], _summing(args[1], args[0], *args[2:]), *args[2:])
        written = args[0] if args and isinstance(args[0], Tensor) else None
        if _writes(func) and written is not None and written.device.type != "meta":
            return written  # what has values keeps them: the probe looks at no result
        args, kwargs = tree_map_only(Tensor, _meta_of, (args, kwargs))
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("meta")}
        return func(*args, **kwargs)


def _tensors_in(tree: object) -> list[Tensor]:
    found: list[Tensor] = []
    tree_map_only(Tensor, found.append, tree)
    return found


def _meta_of(tensor: Tensor) -> Tensor:
    return tensor if tensor.device.type == "meta" else _meta(tensor)


def _writes(func: Any) -> bool:  # noqa: ANN401
    """True for an operation in place."""
    return bool(func._schema.name.endswith("_") and func._schema.is_mutable)


def _goes_to_cpu(kwargs: Mapping[str, Any]) -> bool:
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == "cpu"


def _scalar(x: Tensor) -> bool | int | float:
    if x.dtype == torch.bool:
        return True
    return 1.0 if x.is_floating_point() else 1


def _all_positions(x: Tensor) -> Tensor:
    return torch.empty((x.numel(), x.ndim), dtype=torch.long, device="meta")


def _positions(index: Tensor | None) -> Tensor | None:
    """Turn a mask on the meta device into as many positions as it has elements."""
    if index is None or index.dtype not in (torch.bool, torch.uint8):
        return index
    return torch.empty(index.numel(), dtype=torch.long, device="meta")


def _summing(sizes: list[int], x: Tensor, dim: int = 0) -> list[int]:
    """Let sizes that were answered instead of known add up to the length of a tensor."""
    rest = x.shape[dim] - sum(sizes)
    return [*sizes[:-1], sizes[-1] + rest] if sizes and sizes[-1] + rest >= 0 else sizes


_ANSWERS: dict[Any, Callable[..., Any]] = {
    _aten._local_scalar_dense.default: _scalar,
    _aten.nonzero.default: _all_positions,
}
_INDEXED = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default)
