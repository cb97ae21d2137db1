"""Configs of FP8 checkpoints: what is read of them, and what is refused by name."""

import pytest
import torch

from quantload.errors import FormatMismatch, QuantloadError, UnsupportedVariant
from quantload.loader.checkpoint import Checkpoint
from quantload.loader.formats.fp8_config import parse_config


def parsed(tmp_path, **config):
    config = {"quant_method": "fp8", **config}
    return parse_config(Checkpoint("tiny", tmp_path, {}, {}, quantization_config=config))


@pytest.mark.parametrize(
    ("config", "facts"),
    [
        ({}, {"block": None, "is_block_stated": False, "is_static": False, "divides": False}),
        ({"weight_block_size": None}, {"block": None, "is_block_stated": True}),
        ({"weight_block_size": [128, 64]}, {"block": (128, 64), "is_block_stated": True}),
        ({"activation_scheme": "static"}, {"is_static": True, "is_weight_only": False}),
        ({"activation_scheme": "DYNAMIC"}, {"is_static": False, "is_weight_only": False}),
        ({"activation_scheme": None}, {"is_static": False}),
        ({"quant_method": "MXFP8"}, {"block": (1, 32), "exponents_only": True}),
        ({"scale_fmt": "ue8m0"}, {"exponents_only": False}),
        ({"scale_fmt": "ue8m0", "weight_block_size": [1, 32]}, {"exponents_only": True}),
        ({"scale_fmt": None, "weight_block_size": [1, 32]}, {"exponents_only": False}),
        ({"method": "fp8"}, {"divides": True, "is_weight_only": True, "is_block_stated": True}),
        (
            {"weight_scale_method": "row", "weight_scale_semantics": "inverse"},
            {"divides": True, "method_of_scale": "row"},
        ),
        ({"bits": 8, "sym": True, "data_type": "fp"}, {"divides": False}),
        ({"modules_to_convert": ["a.b"]}, {"converted": frozenset({"a.b"})}),
        ({"expert_dtype": "fp4"}, {}),
    ],
)
def test_facts(tmp_path, config, facts):
    found = parsed(tmp_path, **config)
    assert {name: getattr(found, name) for name in facts} == facts


@pytest.mark.parametrize(
    ("keys", "grid"),
    [
        ({}, "e4m3"),
        ({"fmt": "e4m3"}, "e4m3"),
        ({"fmt": None}, "e4m3"),
        ({"format": "float8_e4m3fn", "checkpoint_format": "float8_e4m3fn"}, "e4m3"),
        ({"checkpoint_format": "float8_e5m2"}, "e5m2"),
    ],
)
def test_number_formats(tmp_path, keys, grid):
    assert parsed(tmp_path, **keys).grid.name == grid


@pytest.mark.parametrize(
    "config",
    [
        {"activation_scheme": "per_tensor_magic"},
        {"fmt": "float8_e4m3fnuz"},
        {"scale_fmt": "ue4m3"},
        {"expert_dtype": "int4"},
        {"weight_scale_method": "group"},
        {"weight_scale_semantics": "multiplier", "weight_scale_method": "row"},
        {"data_type": "int"},
        {"dynamic": {"+:.*q_proj": {"bits": 4}}},
        {"extra_config": {"a.q_proj": {"bits": 4}}},
    ],
)
def test_variants_that_are_not_read(tmp_path, config):
    with pytest.raises(UnsupportedVariant, match=next(iter(config))):
        parsed(tmp_path, **config)


@pytest.mark.parametrize(
    "config",
    [
        {"fmt": "e4m3", "format": "float8_e5m2"},
        {"quant_method": "mxfp8", "weight_block_size": [128, 128]},
        {"sym": False},
        {"bits": 4},
        {"extra_config": {"a": {"bits": "16"}}},
        {"dynamic": {"-:(": {}}},
        {"ignored_layers": ["re:("]},
    ],
)
def test_contradictions(tmp_path, config):
    with pytest.raises(FormatMismatch):
        parsed(tmp_path, **config)


KEYS = [
    *("activation_scheme", "weight_block_size", "ignored_layers", "modules_to_not_convert"),
    *("extra_config", "dynamic", "fmt", "format", "checkpoint_format", "scale_fmt"),
    *("expert_dtype", "weight_scale_method", "weight_scale_semantics", "bits", "data_type"),
    "modules_to_convert",
]
ODD = [0, -1, 1.5, True, "x", [], [0, 0], [1], [-1, 2], [True, 2], [1.0, 2], ["a", 1], {}, {"a": 1}]
ODD += [{"a": None}, [[1, 2]], [None], float("nan"), "", "[128, 128]"]


@pytest.mark.parametrize("key", KEYS)
def test_values_of_any_type_are_read_or_refused_by_name(tmp_path, key):
    messages = []
    for value in ODD:
        try:
            parsed(tmp_path, **{key: value})
        except QuantloadError as error:
            messages.append(str(error))
    assert all(key in message for message in messages)
    assert len(messages) > len(ODD) // 2
    parsed(tmp_path, **{key: None})


def test_modules_that_are_left_out(tmp_path):
    found = parsed(
        tmp_path,
        ignored_layers=["lm_head"],
        modules_to_not_convert=["model.layers.0.mlp.gate_up_proj"],
        extra_config={"model.layers.1.mlp.down_proj": {"bits": 16}, "b": {"bits": 8}},
        dynamic={r"-:.*\.o_proj": {}},
    )
    assert found.excluded_by("lm_head") == "ignored_layers: lm_head"
    assert found.excluded_by("model.layers.0.mlp.up_proj").startswith("modules_to_not_convert")
    assert found.excluded_by("model.layers.1.mlp.down_proj").startswith("extra_config")
    assert found.excluded_by("model.layers.1.self_attn.o_proj").startswith("dynamic")
    assert not found.excluded_by("model.layers.1.mlp.up_proj")
    assert not found.excluded_by("b")


def test_inputs(tmp_path):
    dynamic = parsed(tmp_path, weight_block_size=[128, 64])
    assert dynamic.input_of((128, 64)).group_size == 64
    assert dynamic.input_of(None).granularity == "token"
    assert dynamic.input_of(None).grid.storage == torch.float8_e4m3fn
    assert parsed(tmp_path, method="fp8").input_of(None) is None
    assert not parsed(tmp_path, activation_scheme="static").input_of((8, 8)).dynamic
    assert parsed(tmp_path, quant_method="mxfp8").input_of((1, 32)).scale == "e8m0"
