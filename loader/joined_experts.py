"""Join experts that are stored one by one where their model has them in one parameter.

llm-compressor writes the experts of gpt-oss so (`mappers/expert_layouts.py`, `UNSERVED`), and no
`WeightConverter` of transformers puts them together. Behind this view they are weights of E experts
as other formats have them:

    B.experts.{e}.gate_proj.<leaf>  ->  weight `B.experts.gate_up_proj`, its rows alternate
    B.experts.{e}.up_proj.<leaf>
    B.experts.{e}.gate_proj.bias    ->  tensor `B.experts.gate_up_proj_bias` [E, 2I] likewise
    B.experts.{e}.down_proj.<leaf>  ->  weight `B.experts.down_proj`

`split_experts` of `loader/experts.py` is the inverse.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantload.errors import FormatMismatch, MissingTensor
from quantload.loader.checkpoint import MadeEntry, TensorEntry
from quantload.loader.source import Reader, Source, SourceWeight
from quantload.mappers.expert_layouts import ExpertLayout, text_config, unserved_layout_of
from quantload.quant.qtensor import QuantTensor
from quantload.quant.stacking import stack, take_rows

_EXPERT = re.compile(r"(?P<block>.*\.experts)\.(?P<expert>\d+)\.(?P<projection>[^.]+)")
_COUNTS = ("num_local_experts", "num_experts")


@dataclass(frozen=True)
class _Members:
    """The modules that one parameter joins: expert by expert, its projections in order."""

    modules: tuple[str, ...]
    parts: int

    @property
    def experts(self) -> int:
        """Number of experts, E."""
        return len(self.modules) // self.parts


class JoinedReader(Reader):
    """Reads experts that are stored one by one as weights of all of them.

    Args:
        apart: The checkpoint as it is stored.
        members: Modules of each parameter, by its name.
        tensors: Tensors as the view has them.
    """

    def __init__(
        self, apart: Source, members: Mapping[str, _Members], tensors: Mapping[str, TensorEntry]
    ) -> None:
        super().__init__(replace(apart.checkpoint, tensors=tensors))
        self.apart = apart
        self.widens_floats = apart.reader.widens_floats
        self.cache_scheme = apart.reader.cache_scheme
        self.warnings = list(apart.reader.warnings)
        self.entries = copy.copy(apart.reader.entries)
        self._members = members

    @property
    def modules_of(self) -> dict[str, tuple[str, ...]]:
        """The modules that each parameter joins, by its name."""
        return {parameter: members.modules for parameter, members in self._members.items()}

    @property
    def parameter_of(self) -> dict[str, str]:
        """The parameter that holds each module, by module."""
        return {
            module: parameter
            for parameter, members in self._members.items()
            for module in members.modules
        }

    def weights(self) -> Mapping[str, SourceWeight]:
        """Describe every weight, by module; that of experts by the name of its parameter."""
        parameter_of = self.parameter_of
        found: dict[str, SourceWeight] = {}
        for module, weight in self.apart.weights.items():
            parameter = parameter_of.get(module)
            if parameter is None:
                found[module] = weight
            elif parameter not in found:
                found[parameter] = self._describe(parameter)
        return found

    def _describe(self, parameter: str) -> SourceWeight:
        members = self._members[parameter]
        weights = [self.apart.weights[module] for module in members.modules]
        first = weights[0]
        for weight in weights[1:]:
            if _kind(weight) != _kind(first):
                raise FormatMismatch(
                    f"`{weight.module}` is {weight.encoding} of shape `{weight.shape}`, "
                    f"`{first.module}` of its block is {first.encoding} of shape `{first.shape}`; "
                    f"expected one kind, since the model has them in one parameter, in "
                    f"`{self.checkpoint.name}`"
                )
        prefix = parameter.rpartition(".")[0] + "."
        return replace(
            first,
            module=parameter,
            shape=(members.parts * first.shape[0], first.shape[1]),
            leaves={
                f"{weight.module.removeprefix(prefix)}.{leaf}": name
                for weight in weights
                for leaf, name in weight.leaves.items()
            },
            parameter=parameter,
            experts=members.experts,
            is_transposed=True,
        )

    def decode(self, weight: SourceWeight) -> QuantTensor | Tensor:
        """Read a weight; see `Reader.decode`."""
        members = self._members.get(weight.module)
        if members is None:
            return self.apart.reader.decode(weight)
        values = [self.apart.read_weight(module) for module in members.modules]
        quantized = [value for value in values if isinstance(value, QuantTensor)]
        floats = [value for value in values if isinstance(value, Tensor)]
        if not quantized:
            rows = alternating(members.experts, members.parts, floats[0].shape[0])
            return torch.cat(floats)[rows]
        rows = alternating(members.experts, members.parts, quantized[0].shape[0])
        return take_rows(stack(quantized), rows)


def _kind(weight: SourceWeight) -> tuple[object, ...]:
    return weight.shape, weight.scheme, weight.encoding, weight.dtype


def alternating(experts: int, parts: int, rows: int) -> Tensor:
    """Return which rows of [E, P, N, ...] stacked follow each other in [E, N, P, ...]: [E * N * P].

    Args:
        experts: E.
        parts: P, the projections whose rows alternate.
        rows: N, the rows of one projection.
    """
    return torch.arange(experts * parts * rows).reshape(experts, parts, rows).mT.reshape(-1)


def join_experts(source: Source) -> Source:
    """Return a checkpoint whose single experts are joined if its model has them in one parameter.

    Raises:
        MissingTensor: An expert, or one of its projections or biases, is missing.
        FormatMismatch: Experts of one parameter differ in scheme or shape.
    """
    layout = unserved_layout_of(source.checkpoint.config)
    blocks: dict[str, dict[tuple[int, str], str]] = defaultdict(dict)
    for module in source.weights if layout is not None else ():
        if match := _EXPERT.fullmatch(module):
            blocks[match["block"]][int(match["expert"]), match["projection"]] = module
    if layout is None or not blocks:
        return source
    count = _count(source, blocks.values())
    members = {
        f"{block}.{parameter}": _members(source, block, found, projections, count)
        for block, found in blocks.items()
        for parameter, projections in layout.projections.items()
    }
    tensors = _with_joined_biases(source, members, layout)
    reader = JoinedReader(source, members, tensors)
    weights = reader.weights()
    consumed = {name for weight in weights.values() for name in weight.leaves.values()}
    return replace(
        source,
        checkpoint=reader.checkpoint,
        reader=reader,
        weights=weights,
        plain={name: entry for name, entry in tensors.items() if name not in consumed},
    )


def as_stored(source: Source) -> Source:
    """Return a checkpoint with its experts one by one if it is stored so; else as it is."""
    return source.reader.apart if isinstance(source.reader, JoinedReader) else source


def _count(source: Source, blocks: Iterable[Mapping[tuple[int, str], str]]) -> int:
    """Return E: as the config says, else as the highest number says."""
    config = text_config(source.checkpoint.config)
    stated = next((config[key] for key in _COUNTS if isinstance(config.get(key), int)), 0)
    return max(stated, *(expert + 1 for found in blocks for expert, _ in found))


def _members(
    source: Source,
    block: str,
    found: Mapping[tuple[int, str], str],
    projections: Sequence[str],
    count: int,
) -> _Members:
    wanted = [(expert, projection) for expert in range(count) for projection in projections]
    for expert, projection in wanted:
        if (expert, projection) not in found:
            raise MissingTensor(
                f"`{block}.{expert}.{projection}` has no weight, expected "
                f"{' and '.join(projections)} of all {count} experts of this block, in "
                f"`{source.checkpoint.name}`"
            )
    return _Members(tuple(found[key] for key in wanted), len(projections))


def _with_joined_biases(
    source: Source, members: Mapping[str, _Members], layout: ExpertLayout
) -> dict[str, TensorEntry]:
    """Return the tensors of a checkpoint, biases of single experts joined to [E, P * N]."""
    joined: dict[str, MadeEntry] = {}
    parts: set[str] = set()
    for parameter, member in members.items() if layout.has_biases else ():
        names = [f"{module}.bias" for module in member.modules]
        if any(name in source.plain for name in names):
            joined[names[0]] = _joined_bias(source, f"{parameter}_bias", names, member)
            parts.update(names)
    tensors: dict[str, TensorEntry] = {}
    for name, entry in source.checkpoint.tensors.items():
        if name in joined:
            tensors[joined[name].name] = joined[name]
        elif name not in parts:
            tensors[name] = entry
    return tensors


def _joined_bias(source: Source, name: str, parts: Sequence[str], members: _Members) -> MadeEntry:
    entries: list[TensorEntry] = []
    for part in parts:
        entry = source.plain.get(part)
        if entry is None:
            raise MissingTensor(
                f"tensor `{part}` is missing in `{source.checkpoint.name}`, where other experts of "
                "its block have one"
            )
        first = entries[0] if entries else entry
        if (entry.dtype, entry.shape) != (first.dtype, first.shape) or len(entry.shape) != 1:
            raise FormatMismatch(
                f"tensor `{part}` is `{entry.dtype}` of shape `{entry.shape}`, expected "
                f"`{first.dtype}` of shape [N] like `{first.name}`, in `{source.checkpoint.name}`"
            )
        entries.append(entry)
    rows = entries[0].shape[0]
    order = alternating(members.experts, members.parts, rows)
    return MadeEntry(
        name=name,
        dtype=entries[0].dtype,
        shape=(members.experts, members.parts * rows),
        file=entries[0].file,
        start=entries[0].start,
        num_bytes=sum(entry.num_bytes for entry in entries),
        parts=tuple(entries),
        make=lambda values: torch.cat(list(values))[order],
    )
