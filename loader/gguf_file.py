"""GGUF files: which tensors an architecture has, what transformers calls them, where they lie.

The architectures are in `gguf_architectures.py`. A file has exactly the tensors of its
architecture, in the shapes that its metadata says, or it is an error. The matrices of experts,
which a file stacks [E, N, K], are E tensors under the names that checkpoints have on the hub.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import gguf
import torch

from quantload.errors import (
    FormatMismatch,
    MissingTensor,
    UnexpectedTensor,
    UnsupportedVariant,
    listed,
)
from quantload.loader import gguf_restore as restore
from quantload.loader.checkpoint import Checkpoint, TensorEntry
from quantload.loader.gguf_config import GgufModel, read_model
from quantload.loader.gguf_header import PLAIN_DTYPES, GgufTensor
from quantload.loader.gguf_restore import GgufCheckpoint, GgufEntry
from quantload.loader.gguf_rope import TABLES
from quantload.loader.gguf_rows import Block, Row
from quantload.loader.gguf_split import read_headers

_OF_WEIGHTS_ALONE = ("plus_one", "transposed")  # changes that biases do not undergo


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file, or the files of a split model, under the names that transformers uses.

    Only headers are read, and rotary factors: they become part of the config.

    Args:
        path: A `.gguf` file; of a split model any of its files.

    Raises:
        HeaderError: A file is damaged or truncated.
        CheckpointError: A file of a split model is not there.
        UnsupportedVariant: An architecture, a feature or a type that quantload does not read.
        FormatMismatch: Metadata and tensor shapes contradict each other.
        MissingTensor: A tensor of the architecture is not there.
        UnexpectedTensor: A tensor has no place in the architecture.
    """
    header, first = read_headers(path)
    model = read_model(header, first)
    found, warnings = _of_model(header.tensors, model)
    tensors = {entry.name: entry for entry in _entries(found, model, first)}
    return GgufCheckpoint(
        name=str(path),
        folder=path.parent,
        config=model.config,
        tensors={name: tensors[name] for name in sorted(tensors, key=_natural_order)},
        gguf_file=first,
        warnings=warnings,
    )


@dataclass(frozen=True)
class _Place:
    """Where one stored tensor goes.

    Args:
        row: Its row in the table of the architecture.
        name: Hugging Face name.
        stored: GGUF names.
        axes: Names of its axes, without those of 1.
        shape: Sizes in Hugging Face order, as the metadata says, with those of 1.
        is_bias: True for the bias beside a weight.
    """

    row: Row
    name: str
    stored: tuple[str, ...]
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    is_bias: bool = False


def _of_model(
    tensors: Mapping[str, GgufTensor], model: GgufModel
) -> tuple[dict[str, GgufTensor], tuple[str, ...]]:
    """Leave out tables that are part of the config, and layers that transformers does not build."""
    kept = {name: tensor for name, tensor in tensors.items() if name not in TABLES}
    if "own_k" in model.by_layer:
        return _without_shared_keys(kept, model)
    layers, more = model.sizes["layers"], model.sizes.get("prediction_layers", 0)
    prefixes = tuple(f"blk.{layer}." for layer in range(layers, layers + min(more, len(kept))))
    extra = [name for name in kept if name.startswith(prefixes)]
    if not extra:
        return kept, ()
    warning = f"{len(extra)} tensors of multi-token prediction layers are left out"
    return {name: kept[name] for name in kept if name not in extra}, (warning,)


def _without_shared_keys(
    kept: dict[str, GgufTensor], model: GgufModel
) -> tuple[dict[str, GgufTensor], tuple[str, ...]]:
    shared = [layer for layer, own in enumerate(model.by_layer["own_k"]) if not own]
    leaves = ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")
    unused = {f"blk.{layer}.{leaf}" for layer in shared for leaf in leaves} & kept.keys()
    if not unused:
        return kept, ()
    warning = f"{len(unused)} keys and values of layers that share those of others are left out"
    return {name: kept[name] for name in kept if name not in unused}, (warning,)


# -- what the architecture expects ---------------------------------------------------------------


def _places(model: GgufModel) -> Iterator[_Place]:
    architecture = model.architecture
    for row in architecture.outer:
        yield from _place(row, Block("", "", ()), 0, model)
    for block in architecture.blocks:
        for layer in range(model.sizes[block.count]):
            for row in block.rows:
                yield from _place(row, block, layer, model)


def _place(row: Row, block: Block, layer: int, model: GgufModel) -> Iterator[_Place]:
    if not _applies(row.when, layer, model):
        return
    axes = tuple(row.axes.split())
    shape = tuple(_size(axis, layer, model) for axis in axes)
    gguf_prefix, hf_prefix = block.gguf.format(n=layer), block.hf.format(n=layer)
    stored, name = row.gguf.split(), hf_prefix + row.hf
    yield _Place(
        row,
        name + row.suffix[1],
        tuple(f"{gguf_prefix}{each}{row.suffix[0]}" for each in stored),
        axes,
        shape,
    )
    if _applies(row.bias, layer, model):
        bias = (f"{gguf_prefix}{row.gguf}.bias",)
        yield _Place(row, f"{name}.bias", bias, axes[:1], shape[:1], is_bias=True)


def _size(axis: str, layer: int, model: GgufModel) -> int:
    if axis.isdigit():
        return int(axis)
    return model.by_layer[axis][layer] if axis in model.by_layer else model.sizes[axis]


def _applies(when: str, layer: int, model: GgufModel) -> bool:
    if when in ("", "always", "never", "first"):
        return when != "never" and (when != "first" or layer == 0)
    if when in model.by_layer:
        return bool(model.by_layer[when][layer])
    if when in model.options:
        return model.options[when]
    negated = when.removeprefix("not ")
    if negated != when:
        return not model.options[negated]
    kind: str = model.config["layer_types"][layer]
    return kind == when


# -- what the file has ---------------------------------------------------------------------------


def _entries(
    tensors: Mapping[str, GgufTensor], model: GgufModel, path: Path
) -> Iterator[TensorEntry]:
    name = model.config["model_type"]
    layers = sum(model.sizes[block.count] for block in model.architecture.blocks)
    if layers > len(tensors):
        raise MissingTensor(
            f"`{layers}` layers in the metadata, but only `{len(tensors)}` tensors, in `{path}`"
        )
    places = list(_places(model))
    expected = {stored for place in places for stored in place.stored}
    if unexpected := tensors.keys() - expected:
        raise UnexpectedTensor(
            f"tensors that architecture `{name}` has no place for: {listed(unexpected)}, "
            f"in `{path}`",
            hint="the file holds more than the model, or a feature that quantload does not read",
        )
    if missing := expected - tensors.keys():
        raise MissingTensor(
            f"tensors of architecture `{name}` are missing: {listed(missing)}, in `{path}`"
        )
    for place in places:
        found = [tensors[stored] for stored in place.stored]
        for tensor in found:
            _check_shape(tensor, place)
        yield from _entry(found, place, model)


def _check_shape(tensor: GgufTensor, place: _Place) -> None:
    if _squeezed(tensor.shape) != _squeezed(place.shape):
        raise FormatMismatch(
            f"tensor `{tensor.name}` has shape `{tensor.shape}`, expected `{place.shape}` by the "
            f"metadata, in `{tensor.file}`"
        )
    if tensor.type_name not in PLAIN_DTYPES and not _may_be_blocks(place):
        raise UnsupportedVariant(
            f"tensor `{tensor.name}` of shape `{tensor.shape}` has type `{tensor.type_name}`, "
            f"expected a float type, in `{tensor.file}`"
        )


def _may_be_blocks(place: _Place) -> bool:
    """True for the weight of a linear layer or an embedding, also of one of several experts."""
    stacked = place.axes[0] == "experts" and len(place.axes) == 3
    is_matrix = len(place.axes) == 2 or stacked
    one_each = "{e}" in place.row.hf and not stacked
    is_weight = place.stored[0].endswith(".weight") and not _changes_values(place.row)
    return is_matrix and is_weight and not one_each and "1" not in place.axes


def _changes_values(row: Row) -> bool:
    return "plus_one" in row.change or "minus_exp" in row.change


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _entry(tensors: list[GgufTensor], place: _Place, model: GgufModel) -> Iterator[TensorEntry]:
    entry = _stored(tensors[0], place.shape, place.name)
    if "{e}" in place.row.hf:
        yield from _slices(entry, place.shape)
        return
    if len(tensors) > 1:
        parts = [_stored(tensor, place.shape, tensor.name) for tensor in tensors]
        entry = _joined(parts, entry, tensors, place)
    for change in place.row.change.split():
        if not place.is_bias or change not in _OF_WEIGHTS_ALONE:
            entry = _changed(entry, change, model.sizes)
    if len(place.axes) == 3 and place.axes[0] == "experts":
        rows = math.prod(entry.shape[:-1])
        entry = replace(entry, experts=place.shape[0], shape=(rows, entry.shape[-1]))
    yield entry


def _stored(tensor: GgufTensor, shape: tuple[int, ...], name: str) -> GgufEntry:
    """Return a tensor as it is stored: floats, or blocks [..., bytes per row]."""
    plain = PLAIN_DTYPES.get(tensor.type_name)
    row_bytes = tensor.num_bytes // max(1, math.prod(shape[:-1]))
    return GgufEntry(
        name=name,
        dtype=plain or torch.uint8,
        shape=shape if plain else (*shape[:-1], row_bytes),
        file=tensor.file,
        start=tensor.start,
        num_bytes=tensor.num_bytes,
        block_type="" if plain else tensor.type_name,
    )


def _slices(entry: GgufEntry, shape: tuple[int, ...]) -> Iterator[GgufEntry]:
    """Yield a tensor for each entry of the first axis; each is a run of bytes."""
    size = entry.num_bytes // shape[0]
    for number in range(shape[0]):
        yield replace(
            entry,
            name=entry.name.format(e=number),
            shape=entry.shape[1:],
            start=entry.start + number * size,
            num_bytes=size,
        )


def _joined(
    parts: list[GgufEntry], whole: GgufEntry, tensors: list[GgufTensor], place: _Place
) -> GgufEntry:
    """Join tensors [E, N, K] whose rows alternate in one parameter, and biases [E, N] likewise."""
    types = {tensor.name: tensor.type_name for tensor in tensors}
    if len(set(types.values())) > 1:
        raise UnsupportedVariant(
            f"tensors `{'`, `'.join(types)}` have types `{'`, `'.join(types.values())}`, expected "
            f"one type, since they are rows of `{place.name}`, in `{tensors[0].file}`",
            hint="quantize the model again with one type for both",
        )
    count, rows = place.shape[:2]
    flat = [replace(part, shape=(count * rows, *part.shape[2:])) for part in parts]
    return replace(
        whole,
        shape=(count, rows * len(parts), *whole.shape[2:]),
        num_bytes=sum(part.num_bytes for part in parts),
        parts=tuple(flat),
    )


def _changed(entry: GgufEntry, change: str, sizes: Mapping[str, int]) -> GgufEntry:
    if change in ("interleaved_q", "interleaved_k"):
        heads = sizes["heads" if change == "interleaved_q" else "kv_heads"]
        return replace(entry, interleaved_heads=heads)
    if change == "transposed":
        return replace(entry, is_transposed=True)
    if change == "tiled_columns":
        return _with_columns(entry, sizes)
    return replace(entry, steps=(*entry.steps, _step(change, sizes)))


def _step(change: str, sizes: Mapping[str, int]) -> restore.Step:
    if change == "plus_one":
        return restore.minus_one
    if change == "minus_exp":
        return restore.log_negated
    if change == "ungrouped_qkv":
        return partial(restore.group_qkv, heads=sizes["heads"], kv_heads=sizes["kv_heads"])
    return partial(
        restore.group_values,
        key_heads=sizes["key_heads"],
        value_heads=sizes["value_heads"],
        first=2 * sizes["key_head"] * sizes["key_heads"] if change == "tiled_qkv" else 0,
    )


def _with_columns(entry: GgufEntry, sizes: Mapping[str, int]) -> GgufEntry:
    """Order the columns of value heads: in blocks if heads are whole blocks, else once decoded."""
    step = partial(
        restore.group_value_columns, key_heads=sizes["key_heads"], value_heads=sizes["value_heads"]
    )
    size = 1
    if entry.block_type:
        size, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[entry.block_type]]
    if sizes["value_head"] % size:
        return replace(entry, late_steps=(step,))
    return replace(entry, steps=(*entry.steps, step))


def _natural_order(name: str) -> list[tuple[int, str]]:
    """Sort key that puts layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
