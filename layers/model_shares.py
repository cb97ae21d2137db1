"""What each rank would hold of a model: class, style, shape, scheme and bytes, module by module."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from quantload.layers.embedding import VocabParallelEmbedding
from quantload.layers.experts import FusedExperts
from quantload.layers.experts_surgery import note_on
from quantload.layers.linear import QuantLinear
from quantload.layers.preparation import PreparedModel
from quantload.layers.sharding import Style
from quantload.layers.stack import LinearStack, StackView

Place = tuple[str, str, int]  # module, leaf, slot


@dataclass(frozen=True, kw_only=True)
class ModuleShare:
    """What one rank holds of a module.

    Args:
        module: Dotted path in the model.
        kind: Its class.
        style: How ranks share it: "column", "row", ..., "replicated"; "" if nobody shares.
        shape: Shape of its largest tensor, of the whole model.
        held: Shape of what the rank holds of that.
        scheme: How it is quantized.
        num_bytes: Bytes of the checkpoint that the rank holds of it, scales included.
        stage: Number of the pipeline stage.
        fused_into: Path of the stack that computes it, "" if it runs on its own.
        reason: Why it is replicated, or not fused with layers that read the same input.
    """

    module: str
    kind: str
    style: str
    shape: tuple[int, ...]
    held: tuple[int, ...]
    scheme: str
    num_bytes: int
    stage: int = 0
    fused_into: str = ""
    reason: str = ""


def shares_of(
    prepared: PreparedModel, stored: Mapping[Place, int], *, stage: int
) -> list[ModuleShare]:
    """Say what a rank holds of a model.

    Args:
        prepared: Its model, before anything is loaded.
        stored: Bytes in the checkpoint of what goes to each place.
        stage: Number of its stage.
    """
    found = []
    for path, module in prepared.model.named_modules():
        if isinstance(module, LinearStack):
            continue  # told by its members
        share = _share(prepared, path, module, stored, stage)
        if share is not None:
            found.append(share)
    return found


def _share(
    prepared: PreparedModel,
    path: str,
    module: nn.Module,
    stored: Mapping[Place, int],
    stage: int,
) -> ModuleShare | None:
    tensors = list(_tensors(prepared, path, module))
    if not tensors:
        return None
    _, shape, held = max(tensors, key=lambda tensor: math.prod(tensor[1]))
    stack = module.__dict__["stack"] if isinstance(module, StackView) else None
    style = None if prepared.plan is None else prepared.plan.styles.get(path)
    layer = stack if stack is not None else module
    return ModuleShare(
        module=path,
        kind=type(layer).__name__,
        style=_style(prepared, style, layer),
        shape=shape,
        held=held,
        scheme=_scheme(layer),
        num_bytes=sum(_held_bytes(stored.get(place, 0), *sizes) for place, *sizes in tensors),
        stage=stage,
        fused_into=stack.prefix if stack is not None else "",
        reason=(style.reason if style is not None else "")
        or note_on(module)
        or _why_alone(prepared, path),
    )


def _style(prepared: PreparedModel, style: Style | None, layer: nn.Module) -> str:
    if style is not None:
        return style.kind
    if prepared.plan is None or not isinstance(layer, FusedExperts):
        return ""
    return "whole experts" if layer.mode == "expert" else "part of each expert"


def _why_alone(prepared: PreparedModel, path: str) -> str:
    """Say why a layer is not fused with those that read the same input; "" if it is or has none."""
    group = next((g for g in prepared.siblings.groups if path in g), ())
    others = [other for other in group if other != path]
    if not others or isinstance(prepared.model.get_submodule(path), StackView):
        return ""
    names = ", ".join(other.rpartition(".")[2] for other in others)
    return f"not fused with {names}: schemes, dtypes, biases or shares differ"


def _scheme(module: nn.Module) -> str:
    if isinstance(module, QuantLinear | VocabParallelEmbedding):
        return str(module.scheme)
    if isinstance(module, FusedExperts):
        schemes = {str(scheme) for scheme in module.schemes.values()}
        return ", ".join(sorted(schemes)) or "dense"
    return "dense"


def _held_bytes(num_bytes: int, shape: tuple[int, ...], held: tuple[int, ...]) -> int:
    return num_bytes * math.prod(held) // max(1, math.prod(shape))


def _tensors(
    prepared: PreparedModel, path: str, module: nn.Module
) -> Iterator[tuple[Place, tuple[int, ...], tuple[int, ...]]]:
    """Yield (place, shape of the whole, shape of what is held) of the tensors of a module."""
    if isinstance(module, StackView):
        stack: LinearStack = module.__dict__["stack"]
        yield from (t for t in _awaited(stack.prefix, stack) if t[0][2] == module.slot)
    elif isinstance(module, QuantLinear | FusedExperts | VocabParallelEmbedding):
        yield from _awaited(path, module)
    else:
        for leaf, parameter in module.named_parameters(recurse=False):
            held = tuple(parameter.shape)
            whole = prepared.parts.get(f"{path}.{leaf}")
            yield (path, leaf, 0), held if whole is None else whole[0], held


def _awaited(
    path: str, module: QuantLinear | FusedExperts | VocabParallelEmbedding
) -> Iterator[tuple[Place, tuple[int, ...], tuple[int, ...]]]:
    for (leaf, slot), shape in module.awaits().items():
        region = module.region(leaf, slot)
        held = (0,) if region is None else region.shape_of(shape)
        yield (path, leaf, slot), shape, held


__all__ = ["ModuleShare", "shares_of"]
