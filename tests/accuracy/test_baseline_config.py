"""What of config.json is a change, and what is the same in other words."""

from __future__ import annotations

import json

import pytest

from quantload.accuracy.baseline_config import changed_facts, kept_facts

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def without(*keys):
    return {key: value for key, value in LLAMA.items() if key not in keys}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rms_norm_eps", 0.1),
        ("rope_theta", 500000.0),
        ("hidden_act", "gelu"),
        ("num_hidden_layers", 2),
        ("head_dim", 8),
        ("num_key_value_heads", 1),
        ("attention_bias", True),
        ("sliding_window", 64),
        ("tie_word_embeddings", True),
        ("num_experts_per_tok", 1),
    ],
)
def test_another_value_is_told_whatever_was_there(key, value):
    for before, now in ((LLAMA, LLAMA | {key: value}), (LLAMA | {key: value}, LLAMA)):
        (line,) = changed_facts(before, now)
        assert key in line


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (LLAMA, LLAMA | {"hidden_act": "silu", "attention_bias": False, "head_dim": 16}),
        (LLAMA, LLAMA | {"rope_scaling": None, "mlp_bias": False, "unknown": None}),
        (LLAMA, without("rope_theta")),
        (
            LLAMA,
            without("rope_theta")
            | {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
        ),
        (LLAMA | {"num_key_value_heads": 4}, without("num_key_value_heads")),
        (LLAMA, LLAMA | {"rms_norm_eps": 9.999999747378752e-06}),
        (LLAMA, LLAMA | {"sliding_window": 64, "use_sliding_window": False}),
    ],
)
def test_defaults_and_other_spellings_are_no_change(before, now):
    assert changed_facts(before, now) == []
    assert changed_facts(now, before) == []


def test_a_scaling_is_told():
    scaled = LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    assert changed_facts(LLAMA, scaled) == [
        "config: `rope_type` of RoPE is `linear`, expected `default`"
    ]
    emptied = without("rope_theta") | {"rope_parameters": {"rope_type": "default"}}
    assert changed_facts(LLAMA | {"rope_theta": 5e5}, emptied) == [
        "config: `rope_theta` of RoPE is `10000.0`, expected `500000.0`"
    ]


def test_a_default_that_was_not_written_down_is_known():
    assert changed_facts(without("rope_theta"), LLAMA | {"rope_theta": 5e5}) == [
        "config: `rope_theta` of RoPE is `500000.0`, expected `10000.0`"
    ]
    (line,) = changed_facts(LLAMA, LLAMA | {"attention_bias": True})
    assert line == "config: `attention_bias` is `True`, expected the default `False`"
    nested = {"model_type": "x", "text_config": LLAMA}
    (line,) = changed_facts(nested, nested | {"text_config": LLAMA | {"attention_bias": True}})
    assert "`text_config.attention_bias`" in line


def test_what_is_kept_is_json_without_bookkeeping():
    config = LLAMA | {
        "quantization_config": {"bits": 4},
        "transformers_version": "5",
        "_name_or_path": "/home",
        "limit": float("inf"),
    }
    kept = kept_facts(config)
    assert kept == LLAMA | {"limit": "Infinity"}
    json.dumps(kept, allow_nan=False)
