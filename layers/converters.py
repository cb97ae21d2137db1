"""What transformers' weight converters do, read without running them: which rows go where.

    MergeModulelist(0)                   one expert's weight: a piece of [E, N, K]
    MergeModulelist(0), Concatenate(1)   the same, one of several parts of each expert
    ErnieFuseAndSplitTextVisionExperts   the same; the first half of the experts goes to one
                                         parameter, the second half to the other
    Concatenate(d)                       a part of a parameter (of `num_shards_attribute` parts)
    Chunk(d), Split(d)                   rows that are fused on disk: a cut for each target
    Interleave(d)                        rows that alternate on disk
    PermuteForRope                       rows that are ordered otherwise within heads
    Transpose                            the last two axes change places; "by shape" with check_dims
    Inkling2UnpadVocab                   the first rows
    Inkling2LoopDequantizeExperts        nothing, if the weight is not quantized

Chunk and Split after Interleave, and PermuteForRope after Chunk, are read as well. So rows of
codes, scales and biases follow, where running the operation needs the finished floats. Every other
operation is refused by name. How many rows a tensor has is told by the parameters that get them.

Source: transformers 5.24.0 and 5.16.0, `core_model_loading.py` and `conversion_mapping.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers import PreTrainedConfig
from transformers.core_model_loading import ConversionOps, WeightConverter

from quantload.mappers.targets import Conversion, Converted, Cut, Join, Piece

Shape = tuple[int, ...]
Rows = tuple[range, ...]


@dataclass(frozen=True)
class ModelShapes:
    """What converters ask about a model.

    Args:
        architecture: Name of its class, for errors.
        config: Its config.
        shape_of: Shape of a parameter by name, with or without the base model's prefix; None if
            the model has none of this name.
    """

    architecture: str
    config: PreTrainedConfig
    shape_of: Callable[[str], Shape | None]


class _Unread(Exception):
    """An operation, or how it is used, is not built."""


class _Name(NamedTuple):
    """A name that a converter matched.

    Args:
        name: The name.
        targets: Full names of its targets.
        source: Position of the pattern that matched among those of the converter.
        number: What `*` stood for, if the pattern has one.
    """

    name: str
    targets: tuple[str, ...]
    source: int
    number: int | None


def read_converter(
    converter: WeightConverter, name: str, renamed: str, pattern: str, shapes: ModelShapes
) -> Conversion:
    """Return which parts of which parameters a tensor fills.

    Args:
        converter: The converter that matched.
        name: The name that it matched, after all renamings.
        renamed: What `converter.rename_source_key` made of it: the name of the first target.
        pattern: The pattern of a source that matched.
        shapes: The model.
    """
    operations = [type(step).__name__ for step in converter.operations]
    matched = _Name(
        name=name,
        targets=_full_names(converter.target_patterns, renamed),
        source=list(converter.source_patterns).index(pattern),
        number=_number(pattern, name),
    )
    try:
        ends = _read(converter, operations, matched, shapes)
    except _Unread as why:
        return Conversion(
            (Converted(renamed),),
            refused=f"transformers converts it for `{shapes.architecture}` by "
            f"{', '.join(operations)}, which is not built: {why}",
        )
    return Conversion(ends, steps=(f"{', '.join(operations)} -> {matched.targets[0]}",))


def ends_on_boundary(pattern: str, name: str) -> bool:
    """False if a pattern only fits the start of a longer word, `.weight` in `.weight_scale`.

    transformers 5.24 sees to it itself, 5.16 does not.
    """
    found = re.search(pattern.replace("*.", r".*\."), name)
    longer = found is not None and re.match(r"\w", name[found.end() :])
    return not (longer and pattern[-1].isalnum())


def _full_names(patterns: Sequence[str], first: str) -> tuple[str, ...]:
    """Return the names of all targets, from that of the first."""
    patterns = [pattern.replace("\\.", ".") for pattern in patterns]
    if len(patterns) == 1 or patterns[0] not in first:
        return (first,)
    before, _, after = first.partition(patterns[0])
    return tuple(before + pattern + after for pattern in patterns)


def _number(pattern: str, name: str) -> int | None:
    found = re.search(pattern.replace("*.", r"(\d+)\."), name) if "*." in pattern else None
    return None if found is None else int(found[1])


def _read(
    converter: WeightConverter, operations: list[str], name: _Name, shapes: ModelShapes
) -> tuple[Converted, ...]:
    steps = list(converter.operations)
    sources = len(converter.source_patterns)
    if operations[0] == "MergeModulelist":
        return _one_expert(steps, name, sources)
    if operations == ["ErnieFuseAndSplitTextVisionExperts"]:
        return _split_experts(steps[0], name, sources, shapes)
    if operations == ["Concatenate"]:
        return _joined(steps[0], name, sources, shapes)
    if operations == ["Transpose"]:
        return _transposed(steps[0], name, shapes)
    if operations == ["Inkling2UnpadVocab"]:
        return _without_padding(steps[0], name, shapes)
    if operations[0] == "Inkling2LoopDequantizeExperts":
        if name.source:
            raise _Unread("its quantized experts are in a format that is not read")
        steps = steps[1:]
    elif sources > 1:
        raise _Unread("it takes several tensors")
    return _rows(steps, name, shapes)


# -- operations ---------------------------------------------------------------------------------


def _one_expert(steps: list[ConversionOps], name: _Name, sources: int) -> tuple[Converted, ...]:
    dims = [(type(step).__name__, getattr(step, "dim", None)) for step in steps]
    merge, join = ("MergeModulelist", 0), ("Concatenate", 1)
    if dims not in ([merge], [merge, join]) or (sources > 1) != (len(dims) > 1):
        raise _Unread(f"only experts in order and their parts one after the other are, not {dims}")
    if name.number is None or len(name.targets) > 1:
        raise _Unread("the number of the expert is not in the name")
    return (Converted(name.targets[0], piece=Piece(name.number, name.source, sources)),)


def _split_experts(
    step: ConversionOps, name: _Name, sources: int, shapes: ModelShapes
) -> tuple[Converted, ...]:
    if (getattr(step, "stack_dim", 0), getattr(step, "concat_dim", 1)) != (0, 1):
        raise _Unread("its experts are stacked along another axis")
    counts = [shape[0] for shape in _shapes(name, shapes)]
    total = sum(counts)
    if name.number is None or counts != _chunks(total, len(counts)):
        raise _Unread(f"`{counts}` experts are not halves of the list on disk")
    first = 0
    for target, count in zip(name.targets, counts, strict=True):
        if name.number < first + count:
            return (Converted(target, piece=Piece(name.number - first, name.source, sources)),)
        first += count
    raise _Unread(f"the model has {total} experts, and this is number {name.number}")


def _joined(
    step: ConversionOps, name: _Name, sources: int, shapes: ModelShapes
) -> tuple[Converted, ...]:
    dim = getattr(step, "dim", 0)
    attribute = getattr(step, "num_shards_attribute", None)
    part, parts = name.source, sources
    if attribute is not None:
        if sources > 1 or name.number is None:
            raise _Unread("the number of the shard is not in the name")
        part, parts = name.number, int(getattr(shapes.config.get_text_config(), attribute))
    if parts == 1:
        return (Converted(name.targets[0]),)
    return (Converted(name.targets[0], join=Join(part, parts, dim)),)


def _transposed(step: ConversionOps, name: _Name, shapes: ModelShapes) -> tuple[Converted, ...]:
    axes = sorted((getattr(step, "dim0", 0), getattr(step, "dim1", 1)))
    if axes not in ([0, 1], [1, 2]):
        raise _Unread(f"only the last two axes are, not {axes}")
    shape = shapes.shape_of(name.targets[0])
    if shape is not None and axes != [len(shape) - 2, len(shape) - 1]:
        raise _Unread(f"only the last two axes are, not {axes} of a parameter of shape `{shape}`")
    cut = Cut(transposed="by shape" if getattr(step, "check_dims", False) else "always")
    return (Converted(name.targets[0], cut=cut),)


def _without_padding(
    step: ConversionOps, name: _Name, shapes: ModelShapes
) -> tuple[Converted, ...]:
    if getattr(step, "inverse", False):
        raise _Unread("it adds rows")
    rows = int(shapes.config.get_text_config().unpadded_vocab_size)
    cut = Cut(rows=(range(rows),), rest="padding of the vocabulary")
    return (Converted(name.targets[0], cut=cut),)


def _rows(steps: list[ConversionOps], name: _Name, shapes: ModelShapes) -> tuple[Converted, ...]:
    """Read operations that only choose and order rows."""
    known = {"Chunk", "Split", "Interleave", "PermuteForRope"}
    unknown = [type(step).__name__ for step in steps if type(step).__name__ not in known]
    if unknown:
        raise _Unread(f"`{unknown[0]}` does more than choose rows")
    axis = next((int(step.dim) for step in steps if hasattr(step, "dim")), 0)
    if any(getattr(step, "dim", axis) != axis for step in steps):
        raise _Unread("rows of two axes are chosen")
    if not steps:
        return (Converted(name.targets[0]),)
    if len(name.targets) == 1 and shapes.shape_of(name.targets[0]) is None:
        return (Converted(name.targets[0]),)  # the model has no place for it: told as such
    heights = [shape[axis] for shape in _shapes(name, shapes)]
    chosen: list[Rows] = [(range(sum(heights)),)]
    for step in steps:
        chosen = _apply(step, chosen, heights, name, shapes)
    if len(chosen) != len(heights):
        raise _Unread(f"{len(chosen)} parts for {len(heights)} parameters")
    return tuple(
        Converted(target, cut=Cut(rows=rows, axis=axis))
        for target, rows in zip(name.targets, chosen, strict=True)
    )


def _shapes(name: _Name, shapes: ModelShapes) -> list[Shape]:
    found = [shapes.shape_of(target) for target in name.targets]
    missing = [target for target, shape in zip(name.targets, found, strict=True) if shape is None]
    if missing:
        raise _Unread(f"the model has no parameter `{missing[0]}`")
    return [shape for shape in found if shape is not None]


def _apply(
    step: Any,  # noqa: ANN401 - operations have attributes of their own
    chosen: list[Rows],
    heights: list[int],
    name: _Name,
    shapes: ModelShapes,
) -> list[Rows]:
    kind = type(step).__name__
    if kind in ("Chunk", "Split"):
        if len(chosen) > 1:
            raise _Unread("parts are split again")
        if kind == "Chunk" and heights != _chunks(sum(heights), len(heights)):
            raise _Unread(f"parameters of `{heights}` rows are not equal parts")
        return _cut(chosen[0], heights)
    if kind == "Interleave":
        return [_taken(rows, _alternating(_length(rows), inverse=step.inverse)) for rows in chosen]
    config = shapes.config
    if step.subconfig_key is not None:
        config = getattr(config, step.subconfig_key, config)
    heads = int(getattr(config, "num_attention_heads", 1))
    # The patterns of the targets name parts once they are split, and of the source before.
    labels = name.targets if len(chosen) > 1 else (name.name,)
    names = step.permute_layer_names
    return [
        _taken(rows, _rope_order(_length(rows), heads, inverse=step.inverse))
        if names is None or any(part in label for part in names)
        else rows
        for rows, label in zip(chosen, labels, strict=True)
    ]


# -- rows -----------------------------------------------------------------------------------------


def _chunks(total: int, parts: int) -> list[int]:
    """Heights of `torch.chunk`: equal, the last one may be smaller."""
    each = math.ceil(total / parts)
    return [min(each, total - start) for start in range(0, total, each)]


def _length(rows: Rows) -> int:
    return sum(len(run) for run in rows)


def _cut(rows: Rows, heights: list[int]) -> list[Rows]:
    parts, start = [], 0
    for height in heights:
        parts.append(_taken(rows, (range(start, start + height),)))
        start += height
    return parts


def _alternating(total: int, *, inverse: bool) -> Rows:
    """Order of `Interleave`: [N / 2, 2] rows become [2, N / 2]; the inverse goes back."""
    if total % 2:
        raise _Unread(f"{total} rows cannot alternate")
    half = total // 2
    if inverse:
        return tuple(range(i, total, half) for i in range(half))
    return range(0, total, 2), range(1, total, 2)


def _rope_order(total: int, heads: int, *, inverse: bool) -> Rows:
    """Order of `PermuteForRope`: [H, D / 2, 2] rows become [H, 2, D / 2]; the inverse goes back."""
    if total % (2 * heads):
        raise _Unread(f"{total} rows are not those of {heads} heads")
    size = total // heads
    steps = (size // 2, size // 2) if inverse else (2, 2)
    count = size // 2 if inverse else 2
    return tuple(
        range(head * size + i, (head + 1) * size, steps[0])
        for head in range(heads)
        for i in range(count)
    )


def _taken(rows: Rows, order: Rows) -> Rows:
    """Return rows in a new order: entry i of the result is entry `order[i]` of `rows`."""
    if len(rows) == 1:  # the usual case, without a list of all rows
        run = rows[0]
        return tuple(run[part.start : part.stop : part.step] for part in order)
    every = [row for run in rows for row in run]
    return tuple(_runs([every[row] for part in order for row in part]))


def _runs(rows: list[int]) -> list[range]:
    """Return as few ranges as hold these rows in this order."""
    runs: list[range] = []
    start = 0
    while start < len(rows):
        step = rows[start + 1] - rows[start] if start + 1 < len(rows) else 1
        stop = start + 1
        while step > 0 and stop < len(rows) and rows[stop] - rows[stop - 1] == step:
            stop += 1
        runs.append(range(rows[start], rows[stop - 1] + max(step, 1), max(step, 1)))
        start = stop
    return runs


__all__ = ["ModelShapes", "Shape", "ends_on_boundary", "read_converter"]
