"""Put the tensors of a checkpoint into a model, and account for every element.

From headers alone it is decided where each tensor goes, and proven that every place gets its
elements exactly once: a gap, an overlap, a leftover or a wrong shape is an error before anything is
read. Then tensors are read one module at a time; a layer that has all of its tensors packs them at
once, so that little is in memory beside the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from quantload.errors import UnexpectedTensor, listed
from quantload.loader.checkpoint import files_kept_open
from quantload.loader.cuts import Joining, check_all_taken, resolved, shape_after, taken
from quantload.loader.formats.finite import refuse_nonfinite
from quantload.loader.left_out import tell_left_out, why_left_out
from quantload.loader.places import (
    ExpertsReceiver,
    Job,
    Places,
    RankShare,
    Receiver,
    as_float,
)
from quantload.loader.source import Source, SourceWeight
from quantload.mappers.mapper import Target, WeightMapper
from quantload.progress import Progress, Silent
from quantload.quant.qtensor import QuantTensor
from quantload.quant.region import Region


@dataclass(frozen=True)
class Assignment:
    """What was done.

    Args:
        dropped: Tensors that were left out, with the reason.
        untied: Tied parameters that the checkpoint holds with values of their own.
        elsewhere: Bytes of tensors that only other ranks need.
    """

    dropped: Mapping[str, str]
    untied: tuple[str, ...] = field(default=())
    elsewhere: int = 0


@files_kept_open()
def assign(  # noqa: PLR0913 - a keyword for each fact about the model
    model: nn.Module,
    source: Source,
    mapper: WeightMapper,
    *,
    device: torch.device,
    tied: Mapping[str, str],
    exact: bool = True,
    share: RankShare | None = None,
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
        share: What of the model this rank holds; None is all of it.
        progress: Told about bytes as they are read.

    Raises:
        MissingTensor: A place of the model gets nothing.
        UnexpectedTensor: A tensor has no place, or two have one place.
        ShapeError: A tensor has another shape than its place.
        FormatMismatch: Codes would be cast into a float parameter.
        NonFiniteWeight: A tensor holds NaN or infinity.
    """
    places = Places(model, tied, share or RankShare())
    jobs, dropped, elsewhere = _jobs(model, source, mapper, places)
    places.check(jobs)
    tell_left_out(dropped)
    todo, progress = _by_module(jobs), progress or Silent()
    progress.start("load", total=sum(job.num_bytes for job in jobs), unit="B")
    joining = Joining()
    for path, module_jobs in todo.items():
        module = model.get_submodule(path)
        for job in module_jobs:
            value = _read(source, job, module, device)
            progress.advance(job.num_bytes, note=job.name)
            if not exact and isinstance(value, QuantTensor):
                value = value.evaluated_in(places.dtype_of(job.target))
            if job.target.join is not None:
                whole = joining.add(job.target.place, job.target.join, value)
                if whole is None:  # other parts of the parameter follow
                    continue
                value = whole
            if isinstance(module, Receiver):
                _hand_over(module, job, value, device)
            else:
                places.write(job, value, device)
        if isinstance(module, Receiver):
            module.finish(device)
    progress.finish()
    return Assignment(dropped, places.tie(), elsewhere)


# -- planning ---------------------------------------------------------------------------------


def _jobs(
    model: nn.Module, source: Source, mapper: WeightMapper, places: Places
) -> tuple[list[Job], dict[str, str], int]:
    jobs: list[Job] = []
    dropped: dict[str, str] = {}
    lost: list[str] = []
    elsewhere = 0
    for job_name, weight, shape, names in _tensors(source):
        num_bytes = sum(_num_bytes(source, name) for name in names)
        targets = [places.place_of(target) for target in _targets_of(job_name, weight, mapper)]
        here = [target for target in targets if places.has(target)]
        rest = [target for target in targets if target not in here]
        if targets and all(places.share.is_elsewhere(target) for target in rest):
            check_all_taken(targets, shape, job_name)
            for number, target in enumerate(here):
                jobs.append(_job(model, places, target, job_name, weight, shape))
                jobs[-1] = replace(jobs[-1], num_bytes=0 if number else num_bytes)
            elsewhere += 0 if here else num_bytes
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
    return jobs, dropped, elsewhere


def _job(
    model: nn.Module,
    places: Places,
    target: Target,
    name: str,
    weight: SourceWeight | None,
    shape: tuple[int, ...],
) -> Job:
    goal, cut = places.goal_of(target, shape), target.cut
    if weight is not None and isinstance(model.get_submodule(target.module), Receiver):
        shape = (weight.experts, *weight.shape) if weight.experts else weight.shape
        goal = shape  # output features first, however the file has them
    cut = resolved(cut, shape, goal)
    shape = shape_after(shape, cut, name)
    slots, shape = places.slots_of(target, shape, is_parameter=weight is None)
    return Job(
        target=replace(target, cut=cut),
        name=name,
        weight=weight,
        shape=shape,
        num_bytes=0,
        slots=slots,
    )


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


def _targets_of(name: str, weight: SourceWeight | None, mapper: WeightMapper) -> tuple[Target, ...]:
    if weight is None:
        return mapper.targets(name)
    targets = mapper.targets(weight.parameter_name)
    if not targets and not weight.is_quantized:  # a matrix that is not called "weight"
        targets = mapper.targets(next(iter(weight.leaves.values())))
    return targets


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
    elif job.weight.is_matrix or isinstance(module, Receiver):
        value = source.read_weight(job.name)
    else:
        value = source.read_parameter(job.name)
    if isinstance(value, Tensor):
        value = value.to(device)
        name = job.name if job.weight is None else job.weight.parameter_name
        refuse_nonfinite(value, name, source.checkpoint.name)
    return taken(value, job.target.cut, job.name)


def _hand_over(
    module: Receiver, job: Job, value: QuantTensor | Tensor, device: torch.device
) -> None:
    """Give a layer what it waits for, cut to what this rank holds of it."""
    leaf = job.target.leaf
    if isinstance(value, Tensor):
        value = as_float(value, module.dtype, job)
    for target, part in _parts(module, job, value):
        region = module.region(leaf, target.slot)
        if region is not None:
            module.receive(leaf, target.slot, _own(part, region, is_part=job.slots > 1).to(device))


def _parts(
    module: Receiver, job: Job, value: QuantTensor | Tensor
) -> Iterator[tuple[Target, QuantTensor | Tensor]]:
    """Yield what goes to each slot; experts that lie in one tensor are taken apart."""
    if job.slots == 1:
        yield job.target, value
        return
    rows = job.shape[0]
    if isinstance(value, Tensor):
        first = isinstance(module, ExpertsReceiver) and module.has_input_first(job.target.leaf)
        if job.weight is None and value.ndim > 2 and first:
            value = value.transpose(1, 2)
        yield from zip(job.targets(), value.reshape(-1, *job.shape), strict=True)
        return
    for number, target in enumerate(job.targets()):
        yield target, value.rows(number * rows, (number + 1) * rows)


def _own(value: QuantTensor | Tensor, region: Region, *, is_part: bool) -> QuantTensor | Tensor:
    """Return a region in memory of its own: a view would keep the whole tensor alive."""
    if region.is_whole and not is_part:
        return value
    if isinstance(value, Tensor):
        return region.of(value).clone(memory_format=torch.contiguous_format)
    part = region.of(value)
    copies: dict[str, Any] = {name: tensor.clone() for name, tensor in part.tensors().items()}
    return replace(part, **copies)
