"""Put the tensors of a checkpoint into a model, and account for every element.

From headers alone it is decided where each tensor goes, and proven that every place gets its
elements exactly once: a gap, an overlap, a leftover or a wrong shape is an error before anything is
read. Then tensors are read one module at a time; a layer that has all of its tensors packs them at
once, so that little is in memory beside the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from quantload.errors import UnexpectedTensor, listed
from quantload.loader.checkpoint import files_kept_open
from quantload.loader.cuts import Joining, check_all_taken, resolved, shape_after, taken
from quantload.loader.formats.finite import FiniteChecks
from quantload.loader.left_out import tell_left_out, why_left_out
from quantload.loader.places import Job, Places, RankShare, as_float
from quantload.loader.reading import Reading, owned, put_in_row
from quantload.loader.readings import Readings
from quantload.loader.receivers import Receiver, is_experts_receiver, is_receiver
from quantload.loader.source import Source, SourceWeight
from quantload.loader.stream import Stream
from quantload.loader.wrapper_names import about_wrapped
from quantload.mappers.mapper import Target, WeightMapper
from quantload.progress import Progress, Silent
from quantload.quant.qtensor import QuantTensor
from quantload.quant.region import WHOLE, Region


@dataclass(frozen=True)
class Assignment:
    """What was done.

    Args:
        dropped: Tensors that were left out, with the reason.
        untied: Tied parameters that the checkpoint holds with values of their own.
        elsewhere: Bytes of tensors that only other ranks need.
        read: Bytes that were read for this rank.
    """

    dropped: Mapping[str, str]
    untied: tuple[str, ...] = field(default=())
    elsewhere: int = 0
    read: int = 0


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
    todo = _by_module(jobs)
    readings = _planned_readings(todo, model, source, places, device)
    fetches = [f for found in readings.values() for reading in found for f in reading.fetches]
    progress = progress or Silent()
    total = sum(reading.num_bytes for found in readings.values() for reading in found)
    progress.start("load", total=total, unit="B")
    filler = _Filler(places, source.checkpoint.name, device, exact=exact)
    with Stream(fetches, device) as stream:
        for path in _as_read(todo, readings):
            module = model.get_submodule(path)
            for job in todo[path]:
                for reading in readings.pop(id(job)):
                    stream.wait(reading.fetches)
                    filler.fill(module, job, reading)
                    progress.advance(reading.num_bytes, note=job.name)
            if is_receiver(module):
                module.finish(device)
    filler.checks.finish()
    progress.finish()
    return Assignment(dropped, places.tie(), elsewhere, total)


# -- planning ---------------------------------------------------------------------------------


def planned(
    model: nn.Module,
    source: Source,
    mapper: WeightMapper,
    *,
    tied: Mapping[str, str],
    share: RankShare | None = None,
) -> list[Job]:
    """Say where each tensor would go, and prove as `assign` does that it could; nothing is read."""
    places = Places(model, tied, share or RankShare())
    jobs, _, _ = _jobs(model, source, mapper, places)
    places.check(jobs)
    return jobs


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
            hint="; ".join(
                (
                    *(mapper.explain(name) for name in lost[:3]),
                    *about_wrapped(lost, source.checkpoint.wrappers),
                )
            ),
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
    if weight is not None and is_receiver(model.get_submodule(target.module)):
        shape = (weight.experts, *weight.shape) if weight.experts else weight.shape
        goal = shape  # output features first, however the file has them
    cut = resolved(cut, shape, goal)
    shape = shape_after(shape, cut, name)
    slots, shape = places.slots_of(target, shape, is_parameter=weight is None)
    if len(slots) > 1:  # a part of every expert's weight is a slot, not a part of one parameter
        target = replace(target, slot=slots.start, join=None)
    return Job(
        target=replace(target, cut=cut),
        name=name,
        weight=weight,
        shape=shape,
        num_bytes=0,
        slots=len(slots),
        step=slots.step,
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


def _planned_readings(
    todo: Mapping[str, list[Job]],
    model: nn.Module,
    source: Source,
    places: Places,
    device: torch.device,
) -> dict[int, list[Reading]]:
    """Return what is read for each job, by its id."""
    planner = Readings(source, device)
    found: dict[int, list[Reading]] = {}
    for path, jobs in todo.items():
        module = model.get_submodule(path)
        leaves: dict[str, dict[int, Reading]] = {}
        for job in jobs:
            part = places.share.parts.get(job.target.name)
            region = WHOLE if part is None else part[1]
            read = planner.of(job, module, region, places.dtype_of(job.target))
            found[id(job)] = read
            slots = leaves.setdefault(job.target.leaf, {})
            for reading in read:
                slots[job.target.slot if reading.slot is None else reading.slot] = reading
        for slots in leaves.values():
            if len(slots) > 1 and is_receiver(module):  # members of a stack, experts
                put_in_row(slots)
    return found


def _as_read(todo: Mapping[str, list[Job]], readings: Mapping[int, list[Reading]]) -> Iterator[str]:
    """Yield modules in the order in which they are complete."""
    last: dict[str, int] = {}
    for path, jobs in todo.items():
        found = [reading for job in jobs for reading in readings[id(job)]]
        reads = (read.index for reading in found for f in reading.fetches for read in f.reads[-1:])
        last[path] = max(reads, default=-1)
    yield from sorted(todo, key=lambda path: last[path])


class _Filler:
    """Puts what was read into a model."""

    def __init__(
        self, places: Places, checkpoint_name: str, device: torch.device, *, exact: bool
    ) -> None:
        self.checks = FiniteChecks(checkpoint_name)
        self._places, self._device, self._exact = places, device, exact
        self._joining = Joining()

    def fill(self, module: nn.Module, job: Job, reading: Reading) -> None:
        """Put a value into its place."""
        value = reading.value()
        if isinstance(value, Tensor):
            self.checks.add(value, job.name if job.weight is None else job.weight.parameter_name)
        elif not self._exact:
            value = value.evaluated_in(self._places.dtype_of(job.target))
        if not reading.is_cut:
            value = taken(value, job.target.cut, job.name)
            if job.target.join is not None:
                whole = self._joining.add(job.target.place, job.target.join, value)
                if whole is None:  # other parts of the parameter follow
                    return
                value = whole
        if not is_receiver(module):
            self._places.write(job, value, self._device, is_cut=reading.is_cut)
        elif reading.is_cut:
            slot = job.target.slot if reading.slot is None else reading.slot
            if isinstance(value, Tensor):
                value = as_float(value, module.dtype, job)
            module.receive(job.target.leaf, slot, value.to(self._device))
        else:
            _hand_over(module, job, value, self._device)


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
        first = is_experts_receiver(module) and module.has_input_first(job.target.leaf)
        if job.weight is None and value.ndim > 2 and first:
            value = value.transpose(1, 2)
        yield from zip(job.targets(), value.reshape(-1, *job.shape), strict=True)
        return
    for number, target in enumerate(job.targets()):
        yield target, value.rows(number * rows, (number + 1) * rows)


def _own(value: QuantTensor | Tensor, region: Region, *, is_part: bool) -> QuantTensor | Tensor:
    """Return a region in memory of its own: a view would keep the whole tensor alive."""
    return value if region.is_whole and not is_part else owned(region.of(value))
