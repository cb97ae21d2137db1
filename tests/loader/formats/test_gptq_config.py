"""GPTQ's config: which modules are quantized, and how."""

import pytest

from quantload.errors import FormatMismatch, QuantloadError, UnsupportedVariant
from quantload.loader.formats.agreement import ConfigSays
from quantload.loader.formats.gptq_config import parse_gptq_config
from quantload.loader.formats.gptq_layout import GptqLayout

BASE = {"bits": 4, "group_size": 128}
LAYER = "model.layers.3.mlp.down_proj"


def says(config, module):
    return config.says_of(module, config.rule_of(module))


def layout_of(config, module):
    return config.layout_of(module, config.rule_of(module))


def parsed(**values):
    return parse_gptq_config({**BASE, **values}, "memory")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {"zero_offset": 1, "symmetric": True}),
        ({"sym": None, "desc_act": None}, {"symmetric": True}),
        ({"sym": False}, {"symmetric": False}),
        ({"group_size": -1}, {"group_size": -1}),
        ({"desc_act": True}, {"desc_act": True}),
        ({"checkpoint_format": "gptq"}, {"zero_offset": 1}),
        ({"format": "gptq_v2"}, {"zero_offset": 0}),
        ({"checkpoint_format": "GPTQ_V2", "format": "gptq"}, {"zero_offset": 0}),
        ({"checkpoint_format": "gptq_p"}, {"zero_offset": 0}),
        ({"checkpoint_format": "gptq_p", "bits": 3}, {"zero_offset": 0, "is_planar": True}),
        ({"bits": 3}, {"is_planar": False}),
        ({"bits": 5}, {"is_planar": True}),
        ({"bits": 6, "format": "gptq_p"}, {"is_planar": True}),
        ({"bits": 7}, {"is_planar": True}),
        ({"bits": 5, "provider": "auto-round"}, {"is_planar": False, "needs_groups": False}),
        ({"bits": 6, "provider": "auto-round"}, {"is_planar": False, "zeros_borrow": False}),
        ({"bits": 7, "provider": "auto-round"}, {"is_planar": False, "zero_offset": 1}),
        ({"bits": 6, "provider": "another"}, {"is_planar": True}),
        (
            {"meta": {"quantizer": ["gptqmodel:7.7.0"]}},
            {"zeros_borrow": True, "needs_groups": True},
        ),
        ({"meta": {"quantizer": "gptqmodel:1.2"}}, {"zeros_borrow": True}),
        ({"meta": {"quantizer": ["optimum:1.2", "GPTQModel:2.0"]}}, {"zeros_borrow": True}),
        ({"meta": {"quantizer": ["gptqmodel:7.7.0"]}, "bits": 3}, {"zeros_borrow": False}),
        ({"meta": {"quantizer": ["gptqmodel:7.7"]}, "format": "gptq_v2"}, {"zeros_borrow": False}),
        ({"meta": {"quantizer": "auto_gptq"}}, {"zeros_borrow": False, "needs_groups": False}),
        ({"meta": None, "pack_dtype": "int32", "dynamic": None}, {}),
        ({"dynamic": {}, "modules_in_block_to_quantize": []}, {}),
    ],
)
def test_layout(values, expected):
    found = layout_of(parsed(**values), LAYER)
    assert found.bits == values.get("bits", 4)
    for name, value in expected.items():
        assert getattr(found, name) == value, name


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"bits": None}, FormatMismatch, "`bits` is missing, expected an integer"),
        ({"bits": "4"}, FormatMismatch, "`bits` is `'4'`, expected an integer"),
        ({"bits": 4.0}, FormatMismatch, "`bits` is `4.0`"),
        ({"bits": True}, FormatMismatch, "`bits` is `True`"),
        ({"bits": 9}, UnsupportedVariant, "`bits` is `9`, expected one of 2, 3"),
        ({"bits": -4}, UnsupportedVariant, "`bits` is `-4`"),
        ({"bits": 16}, UnsupportedVariant, "`bits` is `16`"),
        ({"group_size": None}, FormatMismatch, "`group_size` is missing"),
        ({"group_size": 0}, FormatMismatch, "`group_size` is `0`"),
        ({"group_size": -2}, FormatMismatch, "`group_size` is `-2`"),
        ({"group_size": "128"}, FormatMismatch, "`group_size` is `'128'`"),
        ({"group_size": [128, 128]}, FormatMismatch, "`group_size` is"),
        ({"sym": "yes"}, FormatMismatch, "`sym` is `'yes'`, expected true or false"),
        ({"desc_act": 1}, FormatMismatch, "`desc_act` is `1`"),
        ({"lm_head": "x"}, FormatMismatch, "`lm_head` is `'x'`"),
        ({"checkpoint_format": "marlin"}, UnsupportedVariant, "format `marlin` is not read"),
        ({"format": "bitblas"}, UnsupportedVariant, "format `bitblas` is not read"),
        ({"format": "qqq"}, UnsupportedVariant, "format `qqq` is not read"),
        ({"format": 3}, UnsupportedVariant, "format `3` is not read"),
        ({"pack_dtype": "int16"}, UnsupportedVariant, "`pack_dtype` `int16`"),
        ({"dynamic": ["a"]}, FormatMismatch, "`dynamic` is"),
        ({"dynamic": {"(": {}}}, FormatMismatch, r"`dynamic` has `\(`, which is no regular"),
        ({"dynamic": {"a": 4}}, FormatMismatch, "`dynamic: a` is `4`, expected an object"),
        ({"dynamic": {"a": {"bits": 11}}}, UnsupportedVariant, "`bits` is `11`"),
        ({"dynamic": {"a": {"group_size": None}}}, FormatMismatch, "`group_size` is missing"),
        ({"dynamic": {"a": {"sym": 0}}}, FormatMismatch, "`sym` is `0`"),
        ({"modules_in_block_to_quantize": "a"}, FormatMismatch, "expected a list"),
        ({"modules_in_block_to_quantize": [["a", 3]]}, FormatMismatch, "expected names"),
    ],
)
def test_values_that_make_no_sense(values, error, message):
    with pytest.raises(error, match=message) as caught:
        parsed(**values)
    assert "`memory`" in str(caught.value)


@pytest.mark.parametrize("missing", ["bits", "group_size"])
def test_what_must_be_there(missing):
    config = {key: value for key, value in BASE.items() if key != missing}
    with pytest.raises(FormatMismatch, match=f"`{missing}` is missing"):
        parse_gptq_config(config, "memory")


DYNAMIC = {
    r"-:.*\.down_proj": {},
    r"+:.*layers\.1\..*": {"bits": 8, "group_size": 32},
    r"model\.layers\.1\.mlp\.up_proj": {"bits": 2},
    r".*up_proj": {"sym": False, "desc_act": True, "mse": 2.4},
    "lm_head": {"bits": 8},
    "^model\\.layers\\.7$": {"bits": 8},
}


@pytest.mark.parametrize(
    ("module", "entry", "layout"),
    [
        ("model.layers.1.mlp.down_proj", r"dynamic: -:.*\.down_proj", None),
        ("model.layers.1.mlp.up_proj", r"dynamic: +:.*layers\.1\..*", (8, 32, True, False)),
        ("model.layers.11.mlp.up_proj", "dynamic: .*up_proj", (4, 128, False, True)),
        ("lm_head", "dynamic: lm_head", (8, 128, True, False)),
        ("model.layers.0.mlp.gate_proj", "all linear layers in blocks", (4, 128, True, False)),
        ("model.layers.7.q_proj", "all linear layers in blocks", (4, 128, True, False)),
    ],
)
def test_dynamic_rules_in_their_order(module, entry, layout):
    config = parsed(dynamic=DYNAMIC)
    said = says(config, module)
    assert said.entry == entry
    assert said.is_quantized is (layout is not None)
    if layout is not None:
        found = layout_of(config, module)
        assert (found.bits, found.group_size, found.symmetric, found.desc_act) == layout


def test_dynamic_rules_that_name_one_module():
    exact = {"lm_head": {}, r"model\.layers\.0\.a": {}, "^model.layers.0.b$": {}, ".*c": {}}
    config = parsed(dynamic=exact)
    names = ["lm_head", *(f"model.layers.0.{leaf}" for leaf in "abc")]
    assert [says(config, name).is_exact for name in names] == [True, True, True, False]


@pytest.mark.parametrize(
    ("parts", "module", "expected"),
    [
        ([], LAYER, (True, "all linear layers in blocks", False)),
        ([["mlp.down_proj"], ["q_proj"]], LAYER, (True, ": mlp.down_proj", False)),
        (["q_proj", LAYER], LAYER, (True, f": {LAYER}", True)),
        ([["q_proj"]], LAYER, (False, "modules_in_block_to_quantize", False)),
        ([], "model.embed_tokens", (False, "all linear layers in blocks", False)),
        (["q_proj"], "lm_head", (False, "lm_head: False", False)),
    ],
)
def test_modules_in_block_to_quantize(parts, module, expected):
    found = says(parsed(modules_in_block_to_quantize=parts), module)
    assert (found.is_quantized, found.is_exact) == (expected[0], expected[2])
    assert found.entry.endswith(expected[1])


def test_the_head():
    assert says(parsed(lm_head=True), "lm_head") == ConfigSays(True, "lm_head: True")
    assert not says(parsed(), "lm_head").is_quantized


@pytest.mark.parametrize("name", ["model.language_model.layers.0.q", "language_model.layers.0.q"])
def test_rules_meet_the_other_names_of_a_module(name):
    config = parsed(dynamic={r"-:model\.layers\.0\.q": {}})
    assert not says(config, name).is_quantized
    assert says(config, "model.visual.layers.0.q").is_quantized


def test_3_bit_zero_points_that_gptqmodel_damaged():
    values = {"bits": 3, "sym": False}
    for version in ("1.4.0", "6.0.3", "7.7.0"):
        config = parsed(**values, meta={"quantizer": [f"gptqmodel:{version}"]})
        if version == "7.7.0":
            assert isinstance(layout_of(config, LAYER), GptqLayout)
            continue
        with pytest.raises(UnsupportedVariant, match=f"GPTQModel {version} wrote with an error"):
            layout_of(config, LAYER)
    sound = parsed(**values, format="gptq_v2", meta={"quantizer": ["gptqmodel:1.4.0"]})
    assert layout_of(sound, LAYER).zero_offset == 0
    with pytest.raises(QuantloadError, match="wrote with an error"):
        layout_of(parsed(meta={"quantizer": "gptqmodel"}, **values), LAYER)
