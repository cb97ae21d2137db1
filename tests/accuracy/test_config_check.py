"""What two config.json say differently of what a model computes."""

from __future__ import annotations

import json
import math

import pytest
from truth import CHECKPOINTS

from quantload.accuracy.config_defaults import config_differences

SHAPE = ("model_type", "hidden_size", "vocab_size", "num_hidden_layers")

CONFIG = {
    **{"model_type": "qwen3_moe", "hidden_act": "silu", "num_hidden_layers": 2, "head_dim": 16},
    **{"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "attention_bias": False, "vocab_size": 96},
    **{"num_experts_per_tok": 2, "norm_topk_prob": True, "tie_word_embeddings": False},
    **{"sliding_window": 8, "logits_scaling": 4.0, "dtype": "bfloat16"},
}
LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 96}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("num_experts_per_tok", 1), ("norm_topk_prob", False), ("attention_bias", True)],
        *[("tie_word_embeddings", True), ("logits_scaling", 8.0), ("vocab_size", 100)],
        *[("sliding_window", None), ("sliding_window", 4)],
        *[("head_dim", 8), ("rms_norm_eps", 0.1), ("hidden_act", "gelu")],
    ],
)
def test_what_changes_the_forward(key, value):
    expected = [f"config: `{key}` is `{value}`, expected `{CONFIG[key]}`"]
    assert config_differences({**CONFIG, key: value}, CONFIG) == expected
    inner = {"text_config": {**CONFIG, key: value}}, {"text_config": CONFIG}
    assert config_differences(*inner) == [expected[0].replace("`", "`text_config.", 1)]


@pytest.mark.parametrize(
    "change",
    [
        {"quantization_config": {"bits": 4}, "torch_dtype": "float16", "dtype": "float16"},
        {"transformers_version": "4.51.3", "_name_or_path": "elsewhere", "use_cache": False},
        {"bos_token_id": 7, "head_dim": None, "rms_norm_eps": 9.99999974e-06},
    ],
)
def test_what_does_not(change):
    held = CONFIG | {"transformers_version": "5", "_name_or_path": "x", "bos_token_id": 1}
    assert config_differences(held | change, held | {"use_cache": True}) == []


def test_a_head_of_its_own_is_a_weight():
    assert config_differences(CONFIG, {**CONFIG, "tie_word_embeddings": True}) == []


def test_windows_that_are_off():
    off = {**CONFIG, "use_sliding_window": False}
    assert config_differences({**off, "sliding_window": None}, off) == []


def test_rope_in_two_spellings():
    """transformers 4 writes rope_theta and rope_scaling, 5 writes rope_parameters."""
    linear = {"factor": 2.0, "rope_type": "linear"}
    old = {**CONFIG, "rope_scaling": {"factor": 2.0, "type": "linear"}}
    new = {key: value for key, value in CONFIG.items() if key != "rope_theta"}
    same = {**new, "rope_parameters": {"rope_theta": 500000.0, **linear}}
    assert config_differences(old, same) == config_differences(same, old) == []
    other = {**new, "rope_parameters": {"rope_theta": 10000.0, **linear, "factor": 4.0}}
    assert config_differences(other, old) == [
        "config: `factor` of RoPE is `4.0`, expected `2.0`",
        "config: `rope_theta` of RoPE is `10000.0`, expected `500000.0`",
    ]


@pytest.mark.parametrize("kind", ["qwen3_moe", "a_type_of_its_own"])
def test_a_base_of_rope_that_is_missing_is_that_of_its_model_type(kind):
    config = {**CONFIG, "model_type": kind}
    without = {key: value for key, value in config.items() if key != "rope_theta"}
    new = {**without, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
    lacking = ({}, {"rope_parameters": {}}, {"rope_parameters": {"rope_type": "default"}})
    for found in ({**without, **rope} for rope in lacking):
        for held in (config, new):
            line = "config: `rope_theta` of RoPE is `10000.0`, expected `500000.0`"
            assert config_differences(found, held) == [line]
            line = "config: `rope_theta` of RoPE is `500000.0`, expected `10000.0`"
            assert config_differences(held, found) == [line]
        assert config_differences(found, {**config, "rope_theta": 10000.0}) == []
    assert config_differences(new, config) == config_differences(config, new) == []


@pytest.mark.parametrize("scaling", [None, {"rope_type": "default"}, ...])
def test_a_scaling_that_was_lost(scaling):
    yarn = {**CONFIG, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    held = CONFIG if scaling is ... else {**CONFIG, "rope_scaling": scaling}
    line = "config: `rope_type` of RoPE is `default`, expected `yarn`"
    assert config_differences(held, yarn) == [line]
    assert config_differences(held, CONFIG) == []


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
LONG = {"original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({**YARN, "attention_factor": 2.0}, YARN, ["attention_factor"]),
        ({**YARN, "attention_factor": 0.1 * math.log(4.0) + 1.0}, YARN, []),
        ({**YARN, "beta_fast": 16}, YARN, ["beta_fast"]),
        ({**YARN, "beta_fast": 32.0, "partial_rotary_factor": 1.0}, YARN, []),
        ({**YARN, "partial_rotary_factor": 0.5}, YARN, ["partial_rotary_factor"]),
        ({**YARN, **LONG}, YARN, ["original_max_position_embeddings"]),
        ({**YARN, "original_max_position_embeddings": 256}, YARN, []),
    ],
)
def test_what_a_scaling_does_not_say_is_what_is_computed_without(one, other, expected):
    configs = [
        {**LLAMA, "max_position_embeddings": 256, "rope_parameters": rope} for rope in (one, other)
    ]
    for pair in (configs, configs[::-1]):
        found = config_differences(*pair)
        assert [line.split("`")[1] for line in found] == expected


@pytest.mark.parametrize(
    ("rope", "counts"),
    [
        ({"rope_type": "default"}, False),
        ({**YARN, **LONG}, False),
        (YARN, True),
        ({"rope_type": "dynamic", "factor": 2.0}, True),
    ],
)
def test_the_greatest_length_counts_where_rope_is_computed_from_it(rope, counts):
    configs = [{**LLAMA, "max_position_embeddings": n, "rope_parameters": rope} for n in (128, 256)]
    assert bool(config_differences(*configs)) is counts


def test_rope_of_each_layer_type():
    base = {"model_type": "gemma3_text", "hidden_size": 64}
    sets = {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_theta": 1e6}}
    other = {**sets, "full_attention": {"rope_theta": 1e5}}
    lines = config_differences({**base, "rope_parameters": other}, base)
    assert lines == [
        "config: `full_attention.rope_theta` of RoPE is `100000.0`, expected `1000000.0`"
    ]
    assert config_differences({**base, "rope_parameters": sets}, base) == []


@pytest.mark.parametrize(
    ("key", "value"), [("attention_bias", True), ("hidden_act", "gelu"), ("head_dim", 8)]
)
def test_a_key_that_one_lacks_has_the_default_of_its_model_type(key, value):
    (line,) = config_differences({**LLAMA, key: value}, LLAMA)
    assert line.startswith(f"config: `{key}` is `{value}`, expected the default")
    (line,) = config_differences(LLAMA, {**LLAMA, key: value})
    assert line.startswith(f"config: `{key}` is the default")
    assert f"expected `{value}`" in line


@pytest.mark.parametrize(
    "added",
    [
        {"attention_bias": False, "hidden_act": "silu", "head_dim": 16, "num_key_value_heads": 4},
        {"a_tool_was_here": True, "use_cache": False, "tie_word_embeddings": False},
    ],
)
def test_defaults_and_keys_of_a_tool_are_no_difference(added):
    assert (
        config_differences({**LLAMA, **added}, LLAMA)
        == config_differences(LLAMA, {**LLAMA, **added})
        == []
    )


@pytest.mark.skipif(not CHECKPOINTS.is_dir(), reason="no folder shared/checkpoints")
def test_no_tool_writes_what_is_taken_for_a_change():
    bases = [json.loads(path.read_text()) for path in CHECKPOINTS.glob("base/*/config.json")]
    pairs = 0
    for path in CHECKPOINTS.glob("*/*/config.json"):
        config = json.loads(path.read_text())
        same = [base for base in bases if all(base.get(k) == config.get(k) for k in SHAPE)]
        pairs += len(same)
        assert [config_differences(config, base) for base in same] == [[] for _ in same], path
    assert pairs > 150


@pytest.mark.parametrize("own", [{"model_type": "siglip_vision_model"}, {}])
def test_a_key_that_a_section_lacks_has_the_default_of_its_class(own):
    """Sections of old files do not say their model type; the outer one knows it."""
    section = {**own, "hidden_size": 64}
    held = {"model_type": "gemma3", "vision_config": section}
    changed = {**held, "vision_config": {**section, "layer_norm_eps": 0.1}}
    (line,) = config_differences(changed, held)
    assert line == "config: `vision_config.layer_norm_eps` is `0.1`, expected the default `1e-06`"
    (line,) = config_differences(held, changed)
    assert "`vision_config.layer_norm_eps` is the default" in line
    usual = {**section, "layer_norm_eps": 1e-6, "torch_dtype": "bfloat16", "use_cache": False}
    assert config_differences({**held, "vision_config": usual}, held) == []
