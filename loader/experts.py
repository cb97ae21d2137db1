"""Take apart the experts of a block that lie in one parameter: each becomes a module of its own.

Serving engines read quantized experts one by one, see `mappers/expert_layouts.py`. Float rows of
one expert that lie together become tensors of their own, which are read where they are; other
experts are cut out when they are decoded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor

from quantload.loader.checkpoint import MadeEntry, TensorEntry
from quantload.loader.joined_experts import JoinedReader
from quantload.loader.safetensors_header import NAMES
from quantload.loader.source import FLOAT_DTYPES, Source, SourceWeight
from quantload.loader.source_view import (
    Piece,
    SeenWeight,
    renamed_weight,
    rows_of,
    slice_of,
    view_of,
)
from quantload.mappers.expert_layouts import (
    ExpertLayout,
    layout_of,
    text_config,
    unserved_layout_of,
    why_no_layout,
)

_BLOCK = "experts"


@dataclass(frozen=True)
class Experts:
    """The experts of a checkpoint.

    Args:
        source: The checkpoint with every expert as a module of its own; as it was if none lie in
            one parameter, or none can be taken apart.
        parameter_of: The parameter that each such module is part of, by module.
        renamed: Names of other modules that changed, by their new name.
        kept: Why parameters of experts stay whole, by name.
        unserved: Why no engine reads those that are modules now, by module; {} if some engine does.
    """

    source: Source
    parameter_of: Mapping[str, str] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[str, str] = field(default_factory=dict)
    unserved: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Parameter:
    """A parameter of E experts.

    Args:
        name: Its name.
        shape: [E, N, K] or [E, K, N].
        entry: Its tensor, in full precision.
        weight: What its format makes of it, if it takes it for a weight.
    """

    name: str
    shape: tuple[int, ...]
    entry: TensorEntry | None = None
    weight: SourceWeight | None = None


def split_experts(source: Source, *, unserved: bool = False) -> Experts:
    """Return a checkpoint with each of its experts as a module of its own.

    Args:
        source: An open checkpoint.
        unserved: Also if no engine reads the result.
    """
    found = list(_parameters(source))
    if not found:
        return Experts(source)
    config = source.checkpoint.config
    layout, unread = layout_of(config), ""
    if layout is None and unserved:
        layout, unread = unserved_layout_of(config), why_no_layout(config)
        if layout is not None and isinstance(source.reader, JoinedReader):
            parameter_of = source.reader.parameter_of
            return Experts(
                source.reader.apart, parameter_of, unserved=dict.fromkeys(parameter_of, unread)
            )
    if layout is None:
        reason = why_no_layout(source.checkpoint.config)
        return Experts(source, kept={parameter.name: reason for parameter in found})
    hidden = text_config(source.checkpoint.config).get("hidden_size")
    whole = {p.name: reason for p in found if (reason := _why_whole(p, layout, hidden, source))}
    blocks = {name.rpartition(".")[0] for name in whole}
    whole |= {
        p.name: "another parameter of its block stays whole"
        for p in found
        if p.name not in whole and p.name.rpartition(".")[0] in blocks
    }
    apart = [parameter for parameter in found if parameter.name not in whole]
    if not apart:
        return Experts(source, kept=whole)
    split = _split(source, apart, layout, hidden, whole)
    return replace(split, unserved=dict.fromkeys(split.parameter_of, unread)) if unread else split


def apart_as_in(source: Source, output: Source) -> Source:
    """Return a checkpoint with its experts taken apart if those of `output` are."""
    if all(module in source.weights for module in output.weights):
        return source
    experts = split_experts(source, unserved=True)
    return experts.source if output.weights.keys() & experts.parameter_of.keys() else source


def _parameters(source: Source) -> Iterator[_Parameter]:
    for name, entry in source.plain.items():
        if len(entry.shape) == 3 and entry.dtype in FLOAT_DTYPES and _is_of_experts(name):
            yield _Parameter(name=name, shape=entry.shape, entry=entry)
    for weight in source.weights.values():
        if weight.experts:
            yield _Parameter(
                name=weight.parameter_name, shape=weight.parameter_shape, weight=weight
            )


def _is_of_experts(name: str) -> bool:
    return _BLOCK in name.split(".")[:-1]


def _why_whole(parameter: _Parameter, layout: ExpertLayout, hidden: object, source: Source) -> str:
    """Say why the experts of a parameter are not taken apart; "" if they are."""
    block, _, last = parameter.name.rpartition(".")
    if last not in layout.projections or not block.endswith(f".{_BLOCK}"):
        return f"not one of {', '.join(layout.projections)} of this architecture"
    bias = source.plain.get(f"{parameter.name}_bias")
    if bias is not None and not layout.has_biases:
        return "its experts have biases, which no engine reads one by one"
    if _orientation(parameter, layout, hidden) is None:
        return (
            f"its shape `{parameter.shape}` does not tell rows from columns at a hidden size of "
            f"`{hidden}`"
        )
    rows = _matrix_shape(parameter, layout, hidden)[0]
    if rows % len(layout.projections[last]):
        return f"its {rows} rows are not those of {' and '.join(layout.projections[last])}"
    if bias is not None and bias.shape != (parameter.shape[0], rows):
        return f"its biases have shape `{bias.shape}`, expected `{(parameter.shape[0], rows)}`"
    return ""


def _orientation(parameter: _Parameter, layout: ExpertLayout, hidden: object) -> bool | None:
    """Say whether input features come first; None if that is not known."""
    last = parameter.name.rpartition(".")[2]
    is_transposed = layout.is_transposed(last, parameter.shape, hidden)
    if parameter.weight is not None and is_transposed != parameter.weight.is_transposed:
        return None
    return is_transposed


def _matrix_shape(parameter: _Parameter, layout: ExpertLayout, hidden: object) -> tuple[int, int]:
    first, last = parameter.shape[1:]
    return (last, first) if _orientation(parameter, layout, hidden) else (first, last)


def _split(
    source: Source,
    apart: list[_Parameter],
    layout: ExpertLayout,
    hidden: object,
    whole: Mapping[str, str],
) -> Experts:
    names = {name: layout.renamed(name) for name in source.checkpoint.tensors}
    tensors: dict[str, TensorEntry] = {}
    seen: dict[str, SeenWeight] = {}
    parameter_of: dict[str, str] = {}
    renamed: dict[str, str] = {}
    parts = {parameter.name: parameter for parameter in apart}
    replaced: dict[str, dict[str, TensorEntry]] = {}
    for parameter in apart:
        pieces = _pieces(parameter, layout, hidden)
        seen |= pieces
        parameter_of |= dict.fromkeys(pieces, parameter.name)
        if parameter.entry is not None and not _orientation(parameter, layout, hidden):
            replaced[parameter.name] = _entries(parameter.entry, pieces)
        if (bias := source.plain.get(f"{parameter.name}_bias")) is not None:
            replaced[bias.name] = _biases(bias, pieces)
    for name, entry in source.checkpoint.tensors.items():
        if name in replaced:
            tensors |= replaced[name]
        else:
            tensors[names[name]] = replace(entry, name=names[name])
    for module, weight in source.weights.items():
        if weight.parameter_name in parts:
            continue
        new = layout.renamed(f"{module}.").removesuffix(".")
        seen[new] = SeenWeight(weight=renamed_weight(weight, new, names), original=weight)
        if new != module:
            renamed[new] = module
    ordered = _in_order(source, seen, parameter_of)
    return Experts(view_of(source, tensors, ordered), parameter_of, renamed, whole)


def _in_order(
    source: Source, seen: Mapping[str, SeenWeight], parameter_of: Mapping[str, str]
) -> dict[str, SeenWeight]:
    """Return weights in the order of their tensors in the source."""
    place = {name: number for number, name in enumerate(source.checkpoint.tensors)}

    def key(module: str) -> int:
        original = seen[module].original
        leaves = original.leaves.values() if original is not None else ()
        names = [*leaves, parameter_of.get(module, "")]
        return min((place[name] for name in names if name in place), default=0)

    return {module: seen[module] for module in sorted(seen, key=key)}


def _pieces(parameter: _Parameter, layout: ExpertLayout, hidden: object) -> dict[str, SeenWeight]:
    """Return the weights that a parameter holds, by the module that each becomes."""
    block, _, last = parameter.name.rpartition(".")
    projections = layout.projections[last]
    rows, columns = _matrix_shape(parameter, layout, hidden)
    each = rows // len(projections)
    is_transposed = _orientation(parameter, layout, hidden)
    experts = parameter.shape[0]
    found = {}
    for expert in range(experts):
        for number, projection in enumerate(projections):
            module = layout.renamed(f"{block}.{expert}.{projection}")
            piece = Piece(expert=expert, start=number * each, stop=(number + 1) * each)
            if layout.alternates:
                step = len(projections)
                piece = Piece(expert=expert, start=number, stop=rows, step=step)
            if parameter.weight is not None:
                weight = replace(
                    parameter.weight,
                    module=module,
                    shape=(each, columns),
                    parameter="",
                    experts=0,
                    is_transposed=False,
                    sharers=experts * len(projections),
                )
                found[module] = SeenWeight(weight=weight, original=parameter.weight, piece=piece)
                continue
            entry = parameter.entry
            assert entry is not None, "a parameter is a weight or a tensor"
            leaf = layout.renamed(parameter.name) if is_transposed else f"{module}.weight"
            weight = SourceWeight(
                module=module,
                shape=(each, columns),
                scheme=None,
                encoding=NAMES[entry.dtype],
                dtype=entry.dtype,
                leaves={"weight": leaf},
                sharers=experts * len(projections) if is_transposed else 1,
            )
            found[module] = SeenWeight(
                weight=weight,
                entry=entry if is_transposed else None,
                piece=piece if is_transposed else None,
            )
    return found


def _entries(entry: TensorEntry, pieces: Mapping[str, SeenWeight]) -> dict[str, TensorEntry]:
    """Return where the weights of a float tensor [E, N, K] lie, one after the other."""
    found = {}
    start = 0
    for seen in pieces.values():
        name = seen.weight.leaves["weight"]
        found[name] = rows_of(entry, start, start + seen.weight.shape[0], name=name)
        start += seen.weight.shape[0]
    assert start * entry.shape[-1] == math.prod(entry.shape), "the experts fill their parameter"
    return found


def _biases(entry: TensorEntry, pieces: Mapping[str, SeenWeight]) -> dict[str, TensorEntry]:
    """Return where the biases of single experts lie in a tensor [E, rows]."""
    found: dict[str, TensorEntry] = {}
    for module, seen in pieces.items():
        piece, name = seen.piece, f"{module}.bias"
        assert piece is not None, "biases are taken apart with weights that are"
        rows = range(piece.start, piece.stop, piece.step)
        found[name] = MadeEntry(
            name=name,
            dtype=entry.dtype,
            shape=(len(rows),),
            file=entry.file,
            start=entry.start,
            num_bytes=len(rows) * entry.dtype.itemsize,
            parts=(slice_of(entry, piece.expert),),
            make=partial(_cut, rows=rows),
        )
    return found


def _cut(parts: Sequence[Tensor], rows: range) -> Tensor:
    return parts[0].reshape(-1)[rows.start : rows.stop : rows.step].clone()
