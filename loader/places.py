"""The places of a model that tensors of a checkpoint go to, and the proof that each is filled.

A place is a parameter, a buffer, or what a layer of ours waits for. Shapes are those of the whole
model, whatever part of it this rank holds: so every rank proves the same, and what it does not hold
is accounted for as well.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NoReturn

import torch
from torch import Tensor, nn

from quantload.errors import FormatMismatch, MissingTensor, ShapeError, UnexpectedTensor, listed
from quantload.loader.receivers import (
    ExpertsReceiver,
    Receiver,
    TiedReceiver,
    is_experts_receiver,
    is_receiver,
)
from quantload.loader.source import FLOAT_DTYPES, SourceWeight
from quantload.loader.ties import hint_of_missing, tell_untied
from quantload.mappers.mapper import Target
from quantload.quant.qtensor import QuantTensor
from quantload.quant.region import Region


@dataclass(frozen=True)
class RankShare:
    """What of a model one rank holds, beside what its layers say of themselves.

    Args:
        parts: Parameters of which it holds a region: {name: (shape of the whole, region)}.
        elsewhere: Dotted paths of modules that other ranks hold, with all that is in them.
    """

    parts: Mapping[str, tuple[tuple[int, ...], Region]] = field(default_factory=dict)
    elsewhere: tuple[str, ...] = ()

    def is_elsewhere(self, target: Target) -> bool:
        """True if another rank holds a place."""
        return any(f"{target.name}.".startswith(f"{path}.") for path in self.elsewhere)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One tensor or weight of the checkpoint and its place.

    Args:
        target: Where it goes; of several slots, the first.
        name: Name of the tensor, or of the module of the weight.
        weight: The weight, if it is one; None for a plain tensor.
        shape: Shape of what goes to each slot.
        num_bytes: Bytes to read.
        slots: How many slots it fills: the experts of a block that lie in one tensor fill many.
        step: From one of them to the next: 2 for gate alone of experts that have gate and up.
    """

    target: Target
    name: str
    weight: SourceWeight | None
    shape: tuple[int, ...]
    num_bytes: int
    slots: int = 1
    step: int = 1

    def targets(self) -> Iterator[Target]:
        """Yield every place that it fills."""
        first = self.target.slot
        for slot in range(first, first + self.slots * self.step, self.step):
            yield replace(self.target, slot=slot)


class Places:
    """Every place of a model that a tensor can go to, and who goes there.

    Args:
        model: Parameters on the meta device; some modules may be receivers.
        tied: Parameters that are another one: {"lm_head.weight": "model.embed_tokens.weight"}.
        share: What of it this rank holds.
    """

    def __init__(self, model: nn.Module, tied: Mapping[str, str], share: RankShare) -> None:
        self.model = model
        self.tied = dict(tied)
        self.share = share
        self.shapes: dict[Target, tuple[int, ...]] = {}
        self._slots: Counter[tuple[str, str]] = Counter()
        for path, module in model.named_modules(remove_duplicate=False):
            if is_receiver(module):
                for (leaf, slot), shape in module.awaits().items():
                    self.shapes[Target(path, leaf, slot)] = shape
                    self._slots[path, leaf] += 1
            else:
                for leaf, tensor in _own_tensors(module):
                    target = Target(path, leaf)
                    whole = share.parts.get(target.name)
                    self.shapes[target] = tuple(tensor.shape) if whole is None else whole[0]

    def dtype_of(self, target: Target) -> torch.dtype:
        """Return the dtype in which a place holds, or multiplies with, floats."""
        module = self.model.get_submodule(target.module)
        if is_receiver(module):
            return module.dtype
        return dict(_own_tensors(module))[target.leaf].dtype

    def place_of(self, target: Target) -> Target:
        """Return the place that a mapper means: a piece of experts may be a slot of a layer."""
        slots = self._slots[target.module, target.leaf]
        if target.piece is None or not slots:
            return target
        slot = target.piece.expert * target.piece.parts + target.piece.part
        return replace(target, slot=slot, piece=None)

    def has(self, target: Target) -> bool:
        """True if the model has this place."""
        return target.place in self.shapes

    def goal_of(self, target: Target, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the model's own parameter, as far as it decides on transposition.

        Args:
            target: A place; of experts that are handed over one by one, the first slot.
            shape: Shape of what is stored, the number of experts first.
        """
        place, module = self.shapes[target.place], self.model.get_submodule(target.module)
        if not is_experts_receiver(module) or len(shape) != len(place) + 1:
            return place
        parts = 1 if target.join else self._slots[target.module, target.leaf] // shape[0]
        rows = place[0] * parts
        matrix = (rows, *place[1:])
        return (shape[0], *(matrix[::-1] if module.has_input_first(target.leaf) else matrix))

    def slots_of(
        self, target: Target, shape: tuple[int, ...], *, is_parameter: bool
    ) -> tuple[range, tuple[int, ...]]:
        """Return the slots that a tensor fills, and what shape goes to each.

        Args:
            target: Its place.
            shape: Its shape; with experts the number of these comes first.
            is_parameter: It is laid out as the model's own parameter, not output features first.

        Raises:
            ShapeError: The layer has not that many slots.
        """
        module = self.model.get_submodule(target.module)
        if not is_experts_receiver(module) or len(shape) == len(self.shapes[target.place]):
            return range(target.slot, target.slot + 1), shape
        slots = self._slots[target.module, target.leaf]
        rows, *columns = shape[1:]
        if columns and is_parameter and module.has_input_first(target.leaf):
            rows, columns = columns[0], [rows]
        parts, left = divmod(slots, shape[0])
        if left or not parts or (target.join is None and rows % parts):
            raise ShapeError(
                f"a tensor of shape `{shape}` cannot be that of `{target.name}`, which has "
                f"{slots} slots of shape `{self.shapes[target.place]}`"
            )
        if target.join is None:
            return range(slots), (rows // parts, *columns)
        axis = 2 if len(shape) > 2 and module.has_input_first(target.leaf) else 1
        if (target.join.parts, target.join.axis) != (parts, axis):
            raise ShapeError(
                f"a tensor that is {target.join} along axis {target.join.axis} cannot be that of "
                f"`{target.name}`, whose experts have {parts} parts along axis {axis}"
            )
        return range(target.join.part, slots, parts), (rows, *columns)

    def check(self, jobs: list[Job]) -> None:
        """Prove that every place gets its elements exactly once.

        Raises:
            UnexpectedTensor: Two tensors for one place.
            ShapeError: A tensor of another shape.
            MissingTensor: A place that gets no tensor, or too few elements.
        """
        filled: dict[Target, Job] = {}
        elements: Counter[Target] = Counter()
        for job in jobs:
            for target in job.targets():
                part = replace(target, cut=None)
                if part in filled:
                    raise UnexpectedTensor(
                        f"two tensors for one place: `{filled[part].name}` and `{job.name}` both "
                        f"belong to `{part}`"
                    )
                filled[part] = job
                expected = self._shape_of(target, job.shape)
                if job.shape != expected:
                    raise ShapeError(
                        f"tensor `{job.name}` has shape `{job.shape}`, expected `{expected}` for "
                        f"`{target}`"
                    )
                elements[target.place] += math.prod(job.shape)
        self._check_joined(jobs, elements)
        short = [t for t, shape in self.shapes.items() if elements[t] < math.prod(shape)]
        short = [t for t in short if not self._is_optional(t, elements)]
        if short:
            self._raise_missing(short, elements)

    def _check_joined(self, jobs: list[Job], elements: Counter[Target]) -> None:
        for job in jobs:
            place, join = job.target.place, job.target.join
            if join is not None and elements[place] > math.prod(self.shapes[place]):
                raise ShapeError(
                    f"tensors that share `{place}` have {elements[place]} elements, expected "
                    f"{math.prod(self.shapes[place])}; one of them is `{job.name}`"
                )

    def _shape_of(self, target: Target, found: tuple[int, ...]) -> tuple[int, ...]:
        shape = self.shapes[target.place]
        if target.join is not None:  # parts may be of any height
            axis = target.join.axis
            return (*shape[:axis], *found[axis : axis + 1], *shape[axis + 1 :])
        piece = target.piece
        if piece is None:
            return shape
        shape = (*shape[:1], *shape[:0:-1]) if piece.is_transposed else shape
        if len(shape) != 3 or piece.expert >= shape[0] or shape[1] % piece.parts:
            raise ShapeError(f"`{target.name}` has shape `{shape}`, without a place for `{target}`")
        return shape[1] // piece.parts, shape[2]

    def _raise_missing(self, short: list[Target], elements: Counter[Target]) -> NoReturn:
        partly = [target for target in short if elements[target]]
        if partly:
            counts = f"{elements[partly[0]]} of {math.prod(self.shapes[partly[0]])}"
            raise MissingTensor(
                f"the checkpoint has only a part of {self._listed(partly)}: {counts} elements",
                hint="a shard may be missing",
            )
        raise MissingTensor(
            f"the checkpoint has no tensor for {self._listed(short)} "
            f"({len(short)} of {len(self.shapes)} places of the model)",
            hint=hint_of_missing(self.model, {target.name for target in short}),
        )

    def _listed(self, places: Iterable[Target]) -> str:
        """Name places by the layers that the model's author wrote, not by what they were fused to.

        A member of a fused layer knows it as `stack` and its own place there as `slot`.
        """
        members = {
            (id(vars(module)["stack"]), vars(module)["slot"]): path
            for path, module in self.model.named_modules()
            if {"stack", "slot"} <= vars(module).keys()
        }
        return listed(self._as_written(place, members) for place in places)

    def _as_written(self, place: Target, members: Mapping[tuple[int, int], str]) -> str:
        stack = self.model.get_submodule(place.module)
        path = members.get((id(stack), place.slot))
        return str(place) if path is None else f"{path}.{place.leaf}"

    def _is_optional(self, target: Target, elements: Counter[Target]) -> bool:
        """True if a tied twin is there, or if the model computed a counter or index itself."""
        if elements[target]:
            return False
        canonical = self.tied.get(target.name, target.name)
        twins = {canonical, *(alias for alias, owner in self.tied.items() if owner == canonical)}
        twins.remove(target.name)
        if any(other.name in twins for other in elements if elements[other]):
            return True
        buffer = self.model.get_submodule(target.module)._buffers.get(target.leaf)
        return (
            buffer is not None and buffer.device.type != "meta" and not buffer.is_floating_point()
        )

    def write(
        self,
        job: Job,
        value: QuantTensor | Tensor,
        device: torch.device,
        *,
        is_cut: bool = False,
    ) -> None:
        """Make a tensor, or with `is_cut` this rank's part of it, the parameter of its place."""
        module, leaf = self.model.get_submodule(job.target.module), job.target.leaf
        tensors = module._parameters if leaf in module._parameters else module._buffers
        place = tensors[leaf]
        assert place is not None, "the place of a job exists"
        value = fitting(value.to(device), place.dtype, job)
        if not is_cut and job.target.name in self.share.parts:
            value = self.share.parts[job.target.name][1].of(value).clone()
        piece = job.target.piece
        if piece is not None:
            if place.device.type == "meta":
                place = torch.empty(place.shape, dtype=place.dtype, device=device)
            axis = 1 if piece.is_transposed else 0
            part = place.data[piece.expert].chunk(piece.parts, axis)[piece.part]
            part.copy_(value.t() if axis else value)
            value = place
        if leaf in module._parameters and not isinstance(value, nn.Parameter):
            value = nn.Parameter(value, requires_grad=False)
        tensors[leaf] = value  # type: ignore[assignment]  # parameters go to parameters

    def tie(self) -> tuple[str, ...]:
        """Make tied parameters one object again, unless the checkpoint holds different values.

        Returns:
            The parameters that are not tied any more.
        """
        untied = []
        for alias, owner in self.tied.items():
            shared = self._shared_by_layers(alias, owner)
            if shared is not None:
                untied += [] if shared else [alias]
                continue
            one, two = _parameter(self.model, owner), _parameter(self.model, alias)
            if one.device.type == "meta":
                one = two
            elif two.device.type != "meta" and not torch.equal(one, two):
                untied.append(alias)
                tell_untied(alias, owner, two, one)
                continue
            for name in (owner, alias):
                path, _, leaf = name.rpartition(".")
                self.model.get_submodule(path)._parameters[leaf] = one
        return tuple(untied)

    def _shared_by_layers(self, alias: str, owner: str) -> bool | None:
        """Let layers of ours share their weight; None if they are none, False if they differ."""
        layers = [self.model.get_submodule(name.rpartition(".")[0]) for name in (alias, owner)]
        heads = [layer for layer in layers if isinstance(layer, TiedReceiver)]
        if not heads or not all(is_receiver(layer) for layer in layers):
            return None
        other = next(layer for layer in layers if layer is not heads[0])
        if heads[0].share_weight(other):
            return True
        values = [layer.weight for layer in layers]
        tell_untied(alias, owner, *values)  # type: ignore[arg-type]
        return False


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for leaf, parameter in module._parameters.items():
        if parameter is not None:
            yield leaf, parameter
    for leaf, buffer in module._buffers.items():
        if buffer is not None and leaf not in module._non_persistent_buffers_set:
            yield leaf, buffer


def _parameter(model: nn.Module, name: str) -> nn.Parameter:
    path, _, leaf = name.rpartition(".")
    parameter = model.get_submodule(path)._parameters[leaf]
    assert parameter is not None, f"tied parameter {name} exists"
    return parameter


def as_float(value: Tensor, dtype: torch.dtype, job: Job) -> Tensor:
    """Cast floats; see `fitting`.

    Raises:
        FormatMismatch: These are codes.
    """
    if value.dtype not in FLOAT_DTYPES:
        raise FormatMismatch(
            f"tensor `{job.name}` is `{value.dtype}`, expected floats for `{job.target}`: packed "
            "codes are never cast to values",
            hint="the quantization config of the checkpoint does not cover this tensor",
        )
    return value.to(dtype)


def fitting(value: QuantTensor | Tensor, dtype: torch.dtype, job: Job) -> Tensor:
    """Return the tensor in the dtype of its place; only floats are cast."""
    if isinstance(value, QuantTensor):
        return value.dequantize(dtype)
    if dtype.is_floating_point:
        return as_float(value, dtype, job)
    if value.dtype != dtype:
        raise FormatMismatch(
            f"tensor `{job.name}` is `{value.dtype}`, expected `{dtype}` for `{job.target}`"
        )
    return value


__all__ = [
    "ExpertsReceiver",
    "Job",
    "Places",
    "RankShare",
    "Receiver",
    "TiedReceiver",
    "as_float",
    "fitting",
    "is_experts_receiver",
    "is_receiver",
]
