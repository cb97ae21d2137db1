"""Put the tensors of a checkpoint into a model, and account for every element.

From headers alone it is decided where each tensor goes, and proven that every place gets its
elements exactly once: a gap, an overlap, a leftover or a wrong shape is an error before anything is
read. Then tensors are read one module at a time; a layer that has all of its tensors packs them at
once, so that little is in memory beside the model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NoReturn, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from quantload.errors import FormatMismatch, MissingTensor, ShapeError, UnexpectedTensor, listed
from quantload.loader.checkpoint import files_kept_open
from quantload.loader.formats.finite import refuse_nonfinite
from quantload.loader.left_out import why_left_out
from quantload.loader.source import FLOAT_DTYPES, Source, SourceWeight
from quantload.loader.ties import hint_of_missing, tell_untied
from quantload.mappers.mapper import Target, WeightMapper
from quantload.progress import Progress, Silent
from quantload.quant.qtensor import QuantTensor


@runtime_checkable
class Receiver(Protocol):
    """A layer that takes whole tensors instead of having parameters.

    Args:
        dtype: dtype of the floats that it takes.
    """

    dtype: torch.dtype

    def awaits(self) -> dict[tuple[str, int], tuple[int, ...]]:
        """Return the shape of each tensor that the layer waits for, by leaf and slot."""

    def receive(self, leaf: str, slot: int, value: QuantTensor | Tensor) -> None:
        """Take one tensor."""

    def finish(self, device: torch.device) -> None:
        """Pack what was received; nothing is missing."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One tensor or weight of the checkpoint and its place.

    Args:
        target: Where it goes.
        name: Name of the tensor, or of the module of the weight.
        weight: The weight, if it is one; None for a plain tensor.
        shape: Shape that arrives.
        num_bytes: Bytes to read.
    """

    target: Target
    name: str
    weight: SourceWeight | None
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True)
class Assignment:
    """What was done.

    Args:
        dropped: Tensors that were left out, with the reason.
        untied: Tied parameters that the checkpoint holds with values of their own.
    """

    dropped: Mapping[str, str]
    untied: tuple[str, ...] = field(default=())


@files_kept_open()
def assign(
    model: nn.Module,
    source: Source,
    mapper: WeightMapper,
    *,
    device: torch.device,
    tied: Mapping[str, str],
    exact: bool = True,
    progress: Progress | None = None,
) -> Assignment:
    """Load a checkpoint into a model on the meta device.

    Floats are cast to the dtype of their parameter; nothing else is ever cast.

    Args:
        model: Parameters on the meta device; some modules may be receivers.
        source: An open checkpoint.
        mapper: Knows the names of this model, and its stacks.
        device: Where the model shall live.
        tied: Parameters that are another one: {"lm_head.weight": "model.embed_tokens.weight"}.
        exact: Give quantized weights the producer's own values; False evaluates them in the dtype
            of the model, if that is wider.
        progress: Told about bytes as they are read.

    Raises:
        MissingTensor: A place of the model gets nothing.
        UnexpectedTensor: A tensor has no place, or two have one place.
        ShapeError: A tensor has another shape than its place.
        FormatMismatch: Codes would be cast into a float parameter.
        NonFiniteWeight: A tensor holds NaN or infinity.
    """
    places = _Places(model, tied)
    jobs, dropped = _jobs(model, source, mapper, places)
    places.check(jobs)
    todo, progress = _by_module(jobs), progress or Silent()
    progress.start("load", total=sum(job.num_bytes for job in jobs), unit="B")
    for path, module_jobs in todo.items():
        module = model.get_submodule(path)
        for job in module_jobs:
            value = _read(source, job, module, device)
            if not exact and isinstance(value, QuantTensor):
                value = value.evaluated_in(places.dtype_of(job.target))
            if isinstance(module, Receiver):
                _hand_over(module, job, value, device)
            else:
                places.write(job, value, device)
            progress.advance(job.num_bytes, note=job.name)
        if isinstance(module, Receiver):
            module.finish(device)
    progress.finish()
    return Assignment(dropped, places.tie())


# -- planning ---------------------------------------------------------------------------------


def _jobs(
    model: nn.Module, source: Source, mapper: WeightMapper, places: _Places
) -> tuple[list[Job], dict[str, str]]:
    jobs: list[Job] = []
    dropped: dict[str, str] = {}
    lost: list[str] = []
    for job_name, weight, shape, names in _tensors(source):
        target = _target_of(job_name, weight, mapper)
        if target is not None and places.has(target):
            if weight is not None and _is_layer_weight(weight, model.get_submodule(target.module)):
                shape = weight.shape
            num_bytes = sum(_num_bytes(source, name) for name in names)
            jobs.append(
                Job(target=target, name=job_name, weight=weight, shape=shape, num_bytes=num_bytes)
            )
        elif (reason := mapper.why_dropped(names[0])) is not None:
            dropped.update(dict.fromkeys(names, reason))
        elif weight is None and (reason := why_left_out(source, job_name)):
            dropped[job_name] = reason
        else:
            lost += names
    if lost:
        raise UnexpectedTensor(
            f"tensors have no place in the model: {listed(lost)}, in `{source.checkpoint.name}`",
            hint="; ".join(mapper.explain(name) for name in lost[:3]),
        )
    return jobs, dropped


def _tensors(
    source: Source,
) -> Iterator[tuple[str, SourceWeight | None, tuple[int, ...], tuple[str, ...]]]:
    """Yield (name, weight or None, shape, tensor names) of all that the checkpoint holds."""
    for module, weight in source.weights.items():
        yield module, weight, weight.parameter_shape, tuple(weight.leaves.values())
    for name, entry in source.plain.items():
        yield name, None, entry.shape, (name,)


def _num_bytes(source: Source, name: str) -> int:
    entry = source.checkpoint.tensors.get(name)
    return 0 if entry is None else entry.num_bytes


def _target_of(name: str, weight: SourceWeight | None, mapper: WeightMapper) -> Target | None:
    if weight is None:
        return mapper.find(name)
    target = mapper.find(weight.parameter_name)
    if target is None and not weight.is_quantized:  # a matrix that is not called "weight"
        target = mapper.find(next(iter(weight.leaves.values())))
    return target


def _by_module(jobs: list[Job]) -> dict[str, list[Job]]:
    todo: dict[str, list[Job]] = {}
    for job in jobs:
        todo.setdefault(job.target.module, []).append(job)
    return todo


# -- reading ----------------------------------------------------------------------------------


def _read(
    source: Source, job: Job, module: nn.Module, device: torch.device
) -> QuantTensor | Tensor:
    if job.weight is None:
        value: QuantTensor | Tensor = source.read_plain(job.name)
    elif job.weight.is_matrix or _is_layer_weight(job.weight, module):
        value = source.read_weight(job.name)
    else:
        value = source.read_parameter(job.name)
    if isinstance(value, Tensor):
        value = value.to(device)
        name = job.name if job.weight is None else job.weight.parameter_name
        refuse_nonfinite(value, name, source.checkpoint.name)
    return value


def _is_layer_weight(weight: SourceWeight, module: nn.Module) -> bool:
    """True if the weight goes to a layer of ours, which takes [N, K] however the model has it."""
    return isinstance(module, Receiver) and not weight.experts


def _hand_over(
    module: Receiver, job: Job, value: QuantTensor | Tensor, device: torch.device
) -> None:
    if isinstance(value, Tensor):
        value = _as_float(value, module.dtype, job)
    module.receive(job.target.leaf, job.target.slot, value.to(device))


def _as_float(value: Tensor, dtype: torch.dtype, job: Job) -> Tensor:
    if value.dtype not in FLOAT_DTYPES:
        raise FormatMismatch(
            f"tensor `{job.name}` is `{value.dtype}`, expected floats for `{job.target}`: packed "
            "codes are never cast to values",
            hint="the quantization config of the checkpoint does not cover this tensor",
        )
    return value.to(dtype)


def _fitting(value: QuantTensor | Tensor, dtype: torch.dtype, job: Job) -> Tensor:
    """Return the tensor in the dtype of its place; only floats are cast."""
    if isinstance(value, QuantTensor):
        return value.dequantize(dtype)
    if dtype.is_floating_point:
        return _as_float(value, dtype, job)
    if value.dtype != dtype:
        raise FormatMismatch(
            f"tensor `{job.name}` is `{value.dtype}`, expected `{dtype}` for `{job.target}`"
        )
    return value


class _Places:
    """Every place of a model that a tensor can go to, and who goes there."""

    def __init__(self, model: nn.Module, tied: Mapping[str, str]) -> None:
        self.model = model
        self.tied = dict(tied)
        self.shapes: dict[Target, tuple[int, ...]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            if isinstance(module, Receiver):
                for (leaf, slot), shape in module.awaits().items():
                    self.shapes[Target(path, leaf, slot)] = shape
            else:
                for leaf, tensor in _own_tensors(module):
                    self.shapes[Target(path, leaf)] = tuple(tensor.shape)

    def dtype_of(self, target: Target) -> torch.dtype:
        """Return the dtype in which a place holds, or multiplies with, floats."""
        module = self.model.get_submodule(target.module)
        if isinstance(module, Receiver):
            return module.dtype
        return dict(_own_tensors(module))[target.leaf].dtype

    def has(self, target: Target) -> bool:
        return replace(target, piece=None) in self.shapes

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
            if job.target in filled:
                raise UnexpectedTensor(
                    f"two tensors for one place: `{filled[job.target].name}` and `{job.name}` both "
                    f"belong to `{job.target}`"
                )
            filled[job.target] = job
            expected = self._shape_of(job.target)
            if job.shape != expected:
                raise ShapeError(
                    f"tensor `{job.name}` has shape `{job.shape}`, expected `{expected}` for "
                    f"`{job.target}`"
                )
            elements[replace(job.target, piece=None)] += math.prod(job.shape)
        short = [t for t, shape in self.shapes.items() if elements[t] < math.prod(shape)]
        short = [t for t in short if not self._is_optional(t, elements)]
        if short:
            self._raise_missing(short, elements)

    def _shape_of(self, target: Target) -> tuple[int, ...]:
        shape = self.shapes[replace(target, piece=None)]
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
                f"the checkpoint has only a part of {listed(partly)}: {counts} elements",
                hint="a shard may be missing",
            )
        raise MissingTensor(
            f"the checkpoint has no tensor for {listed(short)} "
            f"({len(short)} of {len(self.shapes)} places of the model)",
            hint=hint_of_missing(self.model, {target.name for target in short}),
        )

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

    def write(self, job: Job, value: QuantTensor | Tensor, device: torch.device) -> None:
        """Make a tensor the parameter or buffer of its place, or a part of it."""
        module, leaf = self.model.get_submodule(job.target.module), job.target.leaf
        tensors = module._parameters if leaf in module._parameters else module._buffers
        place = tensors[leaf]
        assert place is not None, "the place of a job exists"
        value = _fitting(value.to(device), place.dtype, job)
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
