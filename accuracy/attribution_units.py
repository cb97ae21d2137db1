"""What two checkpoints of one model differ in, as units that can be exchanged one at a time.

    layer     one module of the model: a linear layer with its bias, a norm, an embedding, one
              projection of all experts of a block
    group     layers that a runtime fuses, found in a forward (q/k/v, gate/up), as one; the rest as
              before
    block     all that differs in one block of layers

What is equal in both, in its values and in how its input is rounded, is no unit: between two
releases of a checkpoint only the layers that changed are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from quantload.accuracy.places import places_of
from quantload.accuracy.streaming import StreamedModel
from quantload.accuracy.value_digest import value_digest
from quantload.errors import NotComparable
from quantload.layers.experts import FusedExperts
from quantload.layers.pipeline import PipelineCut
from quantload.loader.experts import apart_as_in, split_experts
from quantload.loader.source import Source, SourceWeight
from quantload.progress import Progress
from quantload.quant.qtensor import QuantTensor

By = Literal["layer", "group", "block"]
_EXPERT = re.compile(r"\.experts\.\d+\.")
_NAMED = 8  # members of a group whose names are written out


@dataclass(frozen=True)
class Site:
    """What of a model is exchanged.

    Args:
        path: Path of a module in the model.
        leaf: Name of the one tensor of it that is exchanged; "" exchanges the module.
    """

    path: str
    leaf: str = ""

    def __str__(self) -> str:
        return f"{self.path}.{self.leaf}" if self.leaf else self.path


@dataclass(frozen=True, kw_only=True)
class Unit:
    """What is exchanged at once.

    Args:
        name: Checkpoint name, or the names of all members; the path in the model where one place
            holds several modules of the checkpoint (experts).
        sites: What is exchanged.
        modules: Checkpoint names of what differs in it.
        reference: What the reference holds.
        candidate: What the candidate holds.
        first: Number of the first block that it has a part in.
        last: Number of the last.
    """

    name: str
    sites: tuple[Site, ...]
    modules: tuple[str, ...]
    reference: str
    candidate: str
    first: int
    last: int

    @property
    def has_outputs(self) -> bool:
        """True if whole modules are exchanged, so that there are outputs to compare."""
        return not any(site.leaf for site in self.sites)


@dataclass(frozen=True)
class Difference:
    """How a tensor differs: what each side holds, for people."""

    reference: str
    candidate: str


@dataclass
class _Found:
    """What differs at one site.

    Args:
        of: Differences by checkpoint name of the module, or of the tensor.
    """

    of: dict[str, Difference] = field(default_factory=dict)


def find_units(
    reference: StreamedModel, candidate: StreamedModel, by: By, progress: Progress
) -> tuple[list[Unit], list[str]]:
    """Read both checkpoints and return what differs, and the names of what is equal.

    Args:
        reference: Not run yet.
        candidate: Not run yet.
        by: What is exchanged at once.
        progress: Advances by tensors.

    Returns:
        Units in the order of the model; checkpoint names of equal weights and tensors.

    Raises:
        NotComparable: A place of one model is not in the other.
    """
    differing, equal = _differences(reference.source, candidate.source, progress)
    sites: dict[Site, _Found] = {}
    places = _Sites(reference, candidate)
    for name, difference in differing.items():
        for site in dict.fromkeys(places.of(name)):
            module = name if site.leaf else _module_of(name, reference.source, candidate.source)
            sites.setdefault(site, _Found()).of.setdefault(module, difference)
    return list(_units(sites, reference, candidate, by)), equal


# -- what differs ----------------------------------------------------------------------------------


@torch.no_grad()
def _differences(
    reference: Source, candidate: Source, progress: Progress
) -> tuple[dict[str, Difference], list[str]]:
    one = apart_as_in(reference, candidate)
    other = apart_as_in(candidate, one)
    differing: dict[str, Difference] = {}
    equal: list[str] = []
    weights = list(dict.fromkeys((*one.weights, *other.weights)))
    plain = list(dict.fromkeys((*one.plain, *other.plain)))
    progress.start("weights", total=len(weights) + len(plain), unit="tensors")
    for name in weights:
        found = _of_weight(one, other, name)
        if found is None:
            equal.append(name)
        else:
            differing[name] = found
        progress.advance(1, note=name)
    for name in plain:
        found = _of_plain(one, other, name)
        if found is None:
            equal.append(name)
        else:
            differing[name] = found
        progress.advance(1, note=name)
    progress.finish()
    return differing, equal


def _of_weight(one: Source, other: Source, module: str) -> Difference | None:
    """Return how a weight differs; None if it does not."""
    held = one.weights.get(module), other.weights.get(module)
    difference = Difference(*(w.encoding if w is not None else "none" for w in held))
    if held[0] is None or held[1] is None or _input_of(held[0]) != _input_of(held[1]):
        return difference
    if held[0].is_quantized != held[1].is_quantized:
        return difference  # without reading: whatever the values are, the exchange shows it
    values = one.read_weight(module), other.read_weight(module)
    if _is_same(*values):
        return None
    if _input_of(held[0]) is None and torch.equal(*(_numbers(value) for value in values)):
        return None
    return difference


def _of_plain(one: Source, other: Source, name: str) -> Difference | None:
    held = one.plain.get(name), other.plain.get(name)
    texts = (str(e.dtype).removeprefix("torch.") if e is not None else "none" for e in held)
    difference = Difference(*texts)
    if held[0] is None or held[1] is None:
        return difference
    values = one.read_plain(name), other.read_plain(name)
    if _is_same(*values):
        return None
    if all(value.is_floating_point() for value in values):
        numbers = [_numbers(value) for value in values]
        if numbers[0].shape == numbers[1].shape and torch.equal(*numbers):
            return None
    return difference


def _is_same(one: QuantTensor | Tensor, other: QuantTensor | Tensor) -> bool:
    return value_digest(one) == value_digest(other)


def _numbers(value: QuantTensor | Tensor) -> Tensor:
    return value.float() if isinstance(value, Tensor) else value.dequantize(torch.float32)


def _input_of(weight: SourceWeight) -> object:
    return None if weight.scheme is None else weight.scheme.input


# -- where it lies ---------------------------------------------------------------------------------


class _Sites:
    """Says what of two models a weight or another tensor of their checkpoints is part of."""

    def __init__(self, reference: StreamedModel, candidate: StreamedModel) -> None:
        self._models = reference, candidate
        self._experts = [split_experts(model.source, unserved=True) for model in self._models]

    def of(self, name: str) -> Iterator[Site]:
        """Yield the sites of a weight (by module), or of another tensor (by its name)."""
        for model, experts in zip(self._models, self._experts, strict=True):
            source = experts.source
            if name in source.weights or name in model.source.weights:
                for path, leaf, _ in places_of(name, model.mapper, experts):
                    yield _site(path, leaf, *self._models)
            elif name in source.plain or name in model.source.plain:
                parameter = experts.parameter_of.get(name.rpartition(".")[0], name)
                for target in model.mapper.targets(name) or model.mapper.targets(parameter):
                    yield _site(target.module, target.leaf, *self._models)


def _site(path: str, leaf: str, reference: StreamedModel, candidate: StreamedModel) -> Site:
    try:
        modules = [model.model.get_submodule(path) for model in (reference, candidate)]
    except AttributeError as error:
        raise NotComparable(f"`{path}` is not in both models: {error}") from error
    one, other = modules
    if isinstance(one, FusedExperts) and isinstance(other, FusedExperts):
        for projection in one.layout.projections:
            if leaf in (projection.leaf, projection.bias_leaf):
                return Site(f"{path}.{projection.leaf}_experts")
    is_whole = any(isinstance(module, FusedExperts) for module in modules)
    if not is_whole and any(_has_parts(module) for module in modules):
        return Site(path, leaf)
    return Site(path)


def _has_parts(module: nn.Module) -> bool:
    """True if modules inside it have tensors of their own."""
    return any(True for child in module.children() for _ in (*child.parameters(), *child.buffers()))


def _module_of(name: str, *sources: Source) -> str:
    """Return the module of a weight (that is its name) or of another tensor."""
    return name if any(name in s.weights for s in sources) else name.rpartition(".")[0] or name


# -- what goes together ----------------------------------------------------------------------------


def _units(
    sites: Mapping[Site, _Found], reference: StreamedModel, candidate: StreamedModel, by: By
) -> Iterator[Unit]:
    cut = reference.cut
    together: dict[object, dict[Site, _Found]] = {}
    keys = _Keys(reference, candidate, by)
    for site, found in sites.items():
        together.setdefault(keys.of(site), {})[site] = found
    units = [
        _unit(
            dict(sorted(members.items(), key=lambda item: keys.rank(item[0]))),
            cut,
            tied=keys.partners(members),
            count=reference.num_blocks,
            by=by,
        )
        for members in together.values()
    ]
    yield from sorted(units, key=lambda unit: (unit.first, unit.last))


class _Keys:
    """Says which sites are one unit."""

    def __init__(self, reference: StreamedModel, candidate: StreamedModel, by: By) -> None:
        self._cut, self._by = reference.cut, by
        self._group: dict[str, tuple[str, ...]] = {}
        for group in reference.prepared.siblings.groups if by == "group" else ():
            self._group |= dict.fromkeys(group, group)
        self._tied: dict[str, str] = {}  # by path: of what the candidate ties
        for one, two in candidate.prepared.tied.items():
            self._tied[one.rpartition(".")[0]] = two.rpartition(".")[0]

    def of(self, site: Site) -> object:
        path = self._tied.get(site.path, site.path)
        number = block_number(path, self._cut)
        if self._by == "block" and number is not None:
            return number
        return self._group.get(path, path if not site.leaf else site)

    def rank(self, site: Site) -> int:
        """Return the place of a site in its group, which is that of the forward."""
        group = self._group.get(site.path, ())
        return group.index(site.path) if group else 0

    def partners(self, members: Iterable[Site]) -> list[Site]:
        """Return what the candidate ties to some sites, and so is exchanged with them."""
        paths = {site.path for site in members}
        pairs = self._tied.items()
        found = [two for one, two in pairs if one in paths]
        found += [one for one, two in pairs if two in paths or two in found]
        return [Site(path) for path in dict.fromkeys(found) if path not in paths]


def _unit(
    members: Mapping[Site, _Found], cut: PipelineCut | None, *, tied: list[Site], count: int, by: By
) -> Unit:
    sites = (*members, *tied)
    differences = {name: d for found in members.values() for name, d in found.of.items()}
    numbers = [block_number(site.path, cut) for site in sites]
    inside = [number for number in numbers if number is not None]
    name = _name(members, cut, by)
    if inside and len(inside) == len(sites):
        first, last = min(inside), max(inside)
    else:
        is_after = all(_is_after(site.path, cut) for site in sites)
        first, last = (count - 1 if is_after else 0), count - 1
    return Unit(
        name=name + (f", tied to {', '.join(map(str, tied))}" if tied else ""),
        sites=sites,
        modules=tuple(differences),
        reference=_joined(d.reference for d in differences.values()),
        candidate=_joined(d.candidate for d in differences.values()),
        first=first,
        last=last,
    )


def _name(members: Mapping[Site, _Found], cut: PipelineCut | None, by: By) -> str:
    numbers = {block_number(site.path, cut) for site in members}
    if by == "block" and cut is not None and None not in numbers:
        return f"{cut.layers}.{min(n for n in numbers if n is not None)}"
    names = [name for found in members.values() for name in found.of]
    names = list(dict.fromkeys(_EXPERT.sub(".experts.*.", name) for name in names))
    parents = {name.rpartition(".")[0] for name in names}
    if len(parents) == 1 and 1 < len(names) <= _NAMED:
        return f"{parents.pop()}.{'+'.join(name.rpartition('.')[2] for name in names)}"
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _joined(texts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(texts))


def block_number(path: str, cut: PipelineCut | None) -> int | None:
    """Return the number of the block that a path lies in; None outside of all, or without any."""
    start = f"{cut.layers}." if cut is not None else ""
    if cut is None or not path.startswith(start):
        return None
    return int(path.removeprefix(start).partition(".")[0])


def _is_after(path: str, cut: PipelineCut | None) -> bool:
    after = (*cut.after, cut.head) if cut is not None else ()
    return any(f"{path}.".startswith(f"{one}.") for one in after if one)


__all__ = ["By", "Site", "Unit", "block_number", "find_units"]
