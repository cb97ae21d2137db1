"""The generated quantization_config against compressed-tensors, and parsing of foreign ones."""

import json
import warnings
from functools import cache

import compressed
import pytest
import torch

from quantload.errors import FormatMismatch, UnsupportedVariant
from quantload.loader.formats.compressed_tensors_config import (
    build_config,
    parse_config,
    validate_config,
    written_format,
)
from quantload.quant.scheme import PRESETS, parse_scheme

NAMES = [name for name, scheme in PRESETS.items() if scheme.weight is not None]


@cache
def _quantization_config():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from compressed_tensors.quantization import QuantizationConfig
    return QuantizationConfig


@pytest.mark.parametrize("name", NAMES)
def test_the_library_reads_the_preset_back(name):
    config = build_config({"a.b": parse_scheme(name)}, ["lm_head"])
    json.dumps(config)
    read = _quantization_config().model_validate(config)
    (group,) = read.config_groups.values()
    theirs = compressed.preset(name)
    for part in ("weights", "input_activations"):
        ours, expected = getattr(group, part), getattr(theirs, part)
        assert (ours is None) == (expected is None)
        if ours is None:
            continue
        for key in ("num_bits", "type", "symmetric", "strategy", "group_size", "dynamic"):
            assert getattr(ours, key) == getattr(expected, key), (part, key)
        assert ours.block_structure == expected.block_structure
    assert group.targets == ["Linear"]
    assert read.ignore == ["lm_head"]
    assert read.format == written_format(parse_scheme(name))


@pytest.mark.parametrize("name", [*NAMES, "W4A16:g32", "W4A16_ASYM:channel", "W8A16:g64"])
def test_what_is_generated_is_parsed_back(name):
    scheme = parse_scheme(name)
    config = build_config({"a.b": scheme}, [])
    found = parse_config(config).match("a.b", ("Linear",))
    assert found is not None
    assert (found[0].scheme, found[0].format) == (scheme, written_format(scheme))
    validate_config(config)


def test_several_schemes_have_groups_of_exact_names():
    schemes = {
        "m.0.q": parse_scheme("W4A16"),
        "m.0.k": parse_scheme("W8A8"),
        "m.1.q": parse_scheme("W4A16"),
        "m.1.k": parse_scheme("W4A16:g64"),
    }
    config = build_config(schemes, ["lm_head"])
    assert config["format"] == "mixed-precision"
    targets = [group["targets"] for group in config["config_groups"].values()]
    assert sorted(name for names in targets for name in names) == sorted(schemes)
    assert {group["format"] for group in config["config_groups"].values()} == {
        "pack-quantized",
        "int-quantized",
    }
    validate_config(config)
    parsed = parse_config(config)
    for name, scheme in schemes.items():
        assert parsed.match(name, ("Linear",))[0].scheme == scheme
    assert parsed.match("m.2.q", ("Linear",)) is None


def test_heads_and_embeddings_are_targets_by_name():
    scheme = parse_scheme("W8A16")
    config = build_config(
        {"a.q": scheme, "embed": scheme, "lm_head": scheme}, [], named=["embed", "lm_head"]
    )
    (group,) = config["config_groups"].values()
    assert group["targets"] == ["Linear", "embed", "lm_head"]


def test_a_config_for_the_cache_alone():
    cache_scheme = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}
    config = build_config({}, [], cache_scheme={**cache_scheme, "dynamic": False})
    assert config["format"] == "dense"
    assert config["config_groups"] == {}
    validate_config(config)
    assert parse_config(config).groups == ()


def test_the_order_of_modules_does_not_matter():
    one, two = parse_scheme("W4A16"), parse_scheme("W8A16")
    first = build_config({"a": one, "b": two}, [])
    second = build_config({"b": two, "a": one}, [])
    assert first == second


def test_validation_is_that_of_the_library():
    config = build_config({"a": parse_scheme("W4A16")}, [])
    config["config_groups"]["group_0"]["weights"]["strategy"] = "spiral"
    with pytest.raises(FormatMismatch, match="compressed-tensors refuses the generated config"):
        validate_config(config)


def _group(**weights):
    return {
        "config_groups": {"g": {"targets": ["Linear"], "weights": weights}},
        "format": "int-quantized",
    }


@pytest.mark.parametrize(
    ("weights", "granularity", "group_size", "block"),
    [
        ({}, "tensor", None, None),
        ({"group_size": 64}, "group", 64, None),
        ({"group_size": -1}, "channel", None, None),
        ({"strategy": "block", "block_structure": [64, 32]}, "block", None, (64, 32)),
        ({"strategy": "block", "block_structure": "128x64"}, "block", None, (128, 64)),
    ],
)
def test_strategies_are_inferred_as_by_the_library(weights, granularity, group_size, block):
    (group,) = parse_config(_group(**weights)).groups
    found = group.scheme.weight
    assert (found.granularity, found.group_size, found.block) == (granularity, group_size, block)
    theirs = compressed.library().QuantizationArgs(**weights)
    assert theirs.strategy == granularity


@pytest.mark.parametrize("name", ["W4A16", "W8A8", "FP8_DYNAMIC", "w4a16_asym"])
@pytest.mark.parametrize("layout", [None, "mixed-precision"])
def test_groups_named_by_a_preset(name, layout):
    (group,) = parse_config({"config_groups": {name: ["Linear"]}, "format": layout}).groups
    assert group.scheme == PRESETS[name.upper()]
    assert group.format == written_format(group.scheme)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (_group(num_bits=4, type="float"), FormatMismatch, "holds integers, but the group says"),
        (_group(num_bits=5, type="float"), UnsupportedVariant, "5-bit `float` values are not read"),
        (_group(num_bits=16), UnsupportedVariant, "16-bit `int` values are not read"),
        (_group(num_bits="4"), UnsupportedVariant, "4-bit `int` values are not read"),
        (_group(strategy="token"), UnsupportedVariant, "weight strategy `token` is not read"),
        (_group(strategy="group"), FormatMismatch, "`group_size` is `None`, expected a positive"),
        (_group(strategy="group", group_size=0), FormatMismatch, "`group_size` is `0`"),
        (_group(group_size="128"), FormatMismatch, "`group_size` is `128`"),
        (_group(strategy="block"), FormatMismatch, "`block_structure` is `None`"),
        (_group(strategy="block", block_structure="8"), FormatMismatch, "`block_structure` is `8`"),
        ({"config_groups": []}, None, ""),
        ({"config_groups": [1]}, FormatMismatch, "`config_groups` of the quantization config"),
        (
            {"config_groups": {"g": 3}},
            FormatMismatch,
            "group `g` of the quantization config is `3`",
        ),
        ({"config_groups": {"W9A9": []}}, UnsupportedVariant, "preset `W9A9`"),
        ({"config_groups": {"dense": []}}, UnsupportedVariant, "preset `dense`"),
        ({"ignore": "lm_head"}, FormatMismatch, "`ignore` of the quantization config is `lm_head`"),
        ({"ignore": ["re:*"]}, FormatMismatch, "`re:*` in `ignore`"),
        (
            {"transform_config": {"config_groups": {"u": {}}}},
            UnsupportedVariant,
            "`transform_config`",
        ),
        ({"sparsity_config": {"format": "sparse-24"}}, UnsupportedVariant, "`sparsity_config`"),
        ({"sparsity_config": {"format": "dense"}}, None, ""),
        ({"sparsity_config": {}, "transform_config": {"config_groups": {}}}, None, ""),
    ],
)
def test_foreign_configs(config, error, message):
    if error is None:
        assert parse_config(config).groups == ()
        return
    with pytest.raises(error) as caught:
        parse_config(config)
    assert message in str(caught.value)


def test_the_dtype_of_codes_is_that_of_the_library():
    for name in NAMES:
        theirs, grid = compressed.preset(name).weights, PRESETS[name].weight.grid
        if theirs.type == "float" and theirs.num_bits < 8:  # packed into bytes
            assert (grid.storage, grid.bits) == (torch.uint8, theirs.num_bits)
            continue
        assert grid.storage == theirs.pytorch_dtype()
        assert grid.storage in (torch.int8, torch.float8_e4m3fn)
