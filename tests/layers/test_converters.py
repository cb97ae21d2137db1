"""Converters are read as transformers runs them: every one it has, against its own operations."""

from __future__ import annotations

import copy
import re
from types import SimpleNamespace

import pytest
import torch
from named_models import put_together
from transformers import conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    ErnieFuseAndSplitTextVisionExperts,
    Interleave,
    MergeModulelist,
    PermuteForRope,
    Transpose,
    WeightConverter,
)

from quantload.layers.converters import ModelShapes, read_converter
from quantload.mappers.mapper import Conversion

EXPERTS, SHARDS, ROWS = 4, 3, 48
TEXT = SimpleNamespace(split_ngram_parts=SHARDS, unpadded_vocab_size=7, num_attention_heads=2)
CONFIG = SimpleNamespace(
    num_attention_heads=2,
    vision_config=SimpleNamespace(num_attention_heads=4),
    get_text_config=lambda: TEXT,
)
REFUSED = {"Inkling2LoopMergeMessageQueries", "Inkling2LoopDequantizeExperts"}


def _all_converters() -> dict[str, WeightConverter]:
    """Every converter that transformers has, those with equal patterns once."""
    found = {}
    for family, transforms in conversion_mapping._build_checkpoint_conversion_mapping().items():
        for transform in transforms:
            if isinstance(transform, WeightConverter):
                key = f"{transform.source_patterns}{transform.target_patterns}"
                found.setdefault(key, (family, transform))
    return {f"{family}-{i}": t for i, (family, t) in enumerate(found.values())}


CONVERTERS = _all_converters()


def kinds(converter: WeightConverter) -> list[str]:
    return [type(step).__name__ for step in converter.operations]


def name_for(pattern: str, number: int) -> str:
    """A name that a pattern matches."""
    text = pattern.replace("*.", f"{number}.").replace("\\", "").removeprefix("^")
    name = f"model.layers.0{text}" if text.startswith(".") else f"model.layers.0.{text}"
    if name.endswith("."):
        return name + "weight"
    last = name.rpartition(".")[2]
    is_leaf = any(part in last for part in ("weight", "bias", "projs", "embedding", "queries"))
    return name if is_leaf or "experts" in name else f"{name}.weight"


def shape_for(converter: WeightConverter, source: int) -> tuple[int, ...]:
    """A shape that the operations of a converter accept."""
    names, first = kinds(converter), converter.operations[0]
    if names[0] in ("MergeModulelist", "ErnieFuseAndSplitTextVisionExperts"):
        return (6, 5)
    if names[0] == "Transpose":
        return (3, 4, 6) if {first.dim0, first.dim1} == {1, 2} else (4, 6)
    if getattr(first, "dim", 0) == 1:
        return (3, 4 + source, 5) if names[0] == "Concatenate" else (3, 8, 5)
    return (ROWS + source, 5)


def sources_for(converter: WeightConverter) -> list[tuple[str, str, torch.Tensor]]:
    """(pattern, name, tensor) of everything that one run of a converter takes."""
    made = []
    for number, pattern in enumerate(converter.source_patterns):
        counted = EXPERTS if kinds(converter)[0] != "Concatenate" else SHARDS
        for i in range(counted if "*." in pattern else 1):
            made.append((pattern, name_for(pattern, i), torch.randn(shape_for(converter, number))))
    return made


def run_by_transformers(
    converter: WeightConverter,
    sources: list[tuple[str, str, torch.Tensor]],
    shapes: dict[str, tuple[int, ...]],
) -> dict[str, torch.Tensor]:
    converter, renamed = copy.deepcopy(converter), ""
    for pattern, name, tensor in sources:
        renamed, matched = converter.rename_source_key(name)
        assert matched == pattern
        converter.add_tensor(renamed, name, pattern, tensor)
    for pattern, tensors in converter.collected_tensors.items():
        converter.collected_tensors[pattern] = [lambda t=tensor: t for tensor in tensors]
    model = SimpleNamespace(get_parameter=lambda name: torch.empty(shapes[name]))
    made = converter.convert(renamed, model=model, config=CONFIG)
    return {name: t[0] if isinstance(t, list) else t for name, t in made.items()}


def read_by_us(
    converter: WeightConverter, names: list[str], shapes: dict[str, tuple[int, ...]]
) -> dict[str, Conversion]:
    model = ModelShapes("Model", CONFIG, shapes.get)  # type: ignore[arg-type]
    found = {}
    for name in names:
        renamed, pattern = copy.deepcopy(converter).rename_source_key(name)
        found[name] = read_converter(converter, name, renamed, pattern, model)
    return found


def shapes_told_before(converter: WeightConverter) -> dict[str, tuple[int, ...]]:
    """Shapes of parameters that an operation asks the model for."""
    first, _ = converter.rename_source_key(name_for(converter.source_patterns[0], 0))
    if kinds(converter) == ["Split"]:
        heights = [10, *[14 // (len(converter.target_patterns) - 1)] * 3]
        heights[len(converter.target_patterns) - 1] = ROWS - sum(
            heights[: len(converter.target_patterns) - 1]
        )
        names = [
            first.replace(converter.target_patterns[0], target)
            for target in converter.target_patterns
        ]
        return {name: (height, 5) for name, height in zip(names, heights, strict=False)}
    return {first: (7, 5) if kinds(converter) == ["Inkling2UnpadVocab"] else (3, 6, 4)}


@pytest.mark.parametrize("key", CONVERTERS)
def test_every_converter(key: str) -> None:
    converter = CONVERTERS[key]
    sources = sources_for(converter)
    names = [name for _, name, _ in sources]
    shapes = shapes_told_before(converter)
    if REFUSED.intersection(kinds(converter)):
        found = read_by_us(converter, names, shapes)
        assert any(kinds(converter)[0] in done.refused for done in found.values())
        return
    expected = run_by_transformers(converter, sources, shapes)
    shapes = {name: tuple(tensor.shape) for name, tensor in expected.items()}
    read = read_by_us(converter, names, shapes)
    assert [done.refused for done in read.values() if done.refused] == []
    places = {
        name: tuple(end.at(*end.name.rsplit(".", 1)) for end in done.to)
        for name, done in read.items()
    }
    stored = {name: tensor for _, name, tensor in sources}
    made = put_together(places, stored, {name: torch.Size(s) for name, s in shapes.items()})
    assert made.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(made[name], tensor), name


def test_there_are_many() -> None:
    used = {kind for converter in CONVERTERS.values() for kind in kinds(converter)}
    assert len(CONVERTERS) > 30
    assert used >= {
        *("Chunk", "Concatenate", "ErnieFuseAndSplitTextVisionExperts", "Interleave"),
        *("MergeModulelist", "PermuteForRope", "Transpose"),
    }


# -- operations that no converter of today has, and what is refused -------------------------------


def read(
    operations: list[object], *, targets: int = 1, height: int = 16, dims: int = 2
) -> Conversion:
    converter = WeightConverter(
        "qkv.weight", [f"part{i}.weight" for i in range(targets)], operations
    )
    shape = (height, 5) if dims == 2 else (3, height, 5)
    model = ModelShapes("SomeModel", CONFIG, lambda name: shape)  # type: ignore[arg-type]
    return read_converter(converter, "m.qkv.weight", "m.part0.weight", "qkv.weight", model)


@pytest.mark.parametrize(
    "operations",
    [
        [Interleave(dim=0)],
        [Interleave(dim=0, inverse=True)],
        [PermuteForRope(permute_layer_names=["qkv"])],
        [PermuteForRope(permute_layer_names=["qkv"], inverse=True)],
        [PermuteForRope(permute_layer_names=["qkv"]), Interleave(dim=0)],
        [
            Interleave(dim=0),
            PermuteForRope(permute_layer_names=["qkv"]),
            PermuteForRope(permute_layer_names=["qkv"], inverse=True),
        ],
    ],
    ids=str,
)
def test_orders_of_rows(operations: list) -> None:
    done = read(operations)
    value = torch.randn(16, 5)
    expected = {"qkv.weight": value}
    for step in operations:
        expected = step.convert(
            expected, source_patterns=["qkv.weight"], target_patterns=["qkv.weight"], config=CONFIG
        )
    (end,) = done.to
    rows = [row for run in end.cut.rows for row in run]
    assert torch.equal(value[rows], expected["qkv.weight"])


def test_parts_of_interleaved_rows() -> None:
    done = read([Interleave(dim=0), Chunk(dim=0)], targets=2, height=8)
    assert [[*end.cut.rows] for end in done.to] == [[range(0, 16, 2)], [range(1, 17, 2)]]


@pytest.mark.parametrize(
    ("operations", "reason"),
    [
        ([MergeModulelist(dim=1)], "only experts in order"),
        ([Transpose(0, 2)], "only the last two axes are, not \\[0, 2\\]"),
        ([Transpose(0, 1), Chunk(dim=0)], "`Transpose` does more than choose rows"),
        ([Interleave(dim=1), PermuteForRope(), Chunk(dim=0)], "rows of two axes"),
        ([PermuteForRope(subconfig_key="odd")], "16 rows are not those of 3 heads"),
        ([ErnieFuseAndSplitTextVisionExperts()], "are not halves"),
    ],
)
def test_refusals_name_the_architecture_and_the_operation(operations: list, reason: str) -> None:
    CONFIG.odd = SimpleNamespace(num_attention_heads=3)
    refused = read(operations).refused
    assert re.search(reason, refused)
    assert "transformers converts it for `SomeModel` by" in refused
    assert type(operations[0]).__name__ in refused


def test_unequal_chunks_are_refused() -> None:
    converter = WeightConverter("qkv.weight", ["q.weight", "k.weight"], [Chunk(dim=0)])
    heights = {"m.q.weight": (8, 5), "m.k.weight": (4, 5)}
    model = ModelShapes("M", CONFIG, heights.get)  # type: ignore[arg-type]
    done = read_converter(converter, "m.qkv.weight", "m.q.weight", "qkv.weight", model)
    assert "parameters of `[8, 4]` rows are not equal parts" in done.refused
