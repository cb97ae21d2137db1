"""How architectures keep experts: held to what transformers forms its parameters from."""

import re

import pytest
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from quantload.mappers.expert_layouts import LAYOUTS, layout_of, text_config, why_no_layout

CONVERTED = [kind for kind, layout in LAYOUTS.items() if layout.is_converted]


def _conversions(kind):
    found = get_checkpoint_conversion_mapping(kind)
    return found or get_checkpoint_conversion_mapping(kind.removesuffix("_text"))


@pytest.mark.parametrize("kind", CONVERTED)
def test_projections_are_those_that_transformers_merges(kind):
    merged = {}
    for step in _conversions(kind):
        if isinstance(step, WeightConverter) and "experts" in step.target_patterns[0]:
            kinds = [(type(part), getattr(part, "dim", None)) for part in step.operations]
            sources = [re.sub(r"\\", "", text) for text in step.source_patterns]
            parts = tuple(text.removesuffix(".weight").rpartition(".")[2] for text in sources)
            several = [(Concatenate, 1)] if len(parts) > 1 else []
            assert kinds == [(MergeModulelist, 0), *several]
            merged[step.target_patterns[0].rpartition(".")[2]] = parts
    assert merged == LAYOUTS[kind].projections


@pytest.mark.parametrize("kind", [k for k in CONVERTED if LAYOUTS[k].renames])
def test_renamed_blocks_are_renamed_back_by_transformers(kind):
    old = {
        "mixtral": ["gate.weight"],
        "minimax_m2": ["gate.weight", "e_score_correction_bias"],
        "phimoe": ["router.weight"],
    }[kind]
    for leaf in (*old, "experts.3.w1.weight"):
        name = f"model.layers.0.mlp.{leaf}"
        renamed = LAYOUTS[kind].renamed(name)
        assert renamed.startswith("model.layers.0.block_sparse_moe.")
        for step in _conversions(kind):
            if not isinstance(step, WeightConverter):
                renamed, _ = step.rename_source_key(renamed)
        assert renamed == name
    untouched = "model.layers.0.self_attn.q_proj.weight"
    assert LAYOUTS[kind].renamed(untouched) == untouched


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"model_type": "mixtral"}, "mixtral"),
        ({"model_type": "llama4", "text_config": {"model_type": "llama4_text"}}, "llama4_text"),
        ({"model_type": "llama4", "text_config": {}}, "llama4_text"),
        (
            {
                "model_type": "qwen3_omni_moe",
                "thinker_config": {"text_config": {"model_type": "qwen3_omni_moe_text"}},
            },
            "qwen3_omni_moe_text",
        ),
    ],
)
def test_the_text_model_counts(config, kind):
    assert layout_of(config) is LAYOUTS[kind]


def test_architectures_without_a_layout_have_a_reason():
    assert layout_of({"model_type": "gpt_oss"}) is None
    assert "vLLM 0.32 leaves out" in why_no_layout({"model_type": "gpt_oss"})
    assert "for `nobody`" in why_no_layout({"model_type": "nobody"})
    assert text_config({"text_config": {"a": 1}}) == {"a": 1}


@pytest.mark.parametrize(
    ("kind", "parameter", "shape", "expected"),
    [
        ("qwen3_moe", "gate_up_proj", (4, 64, 32), False),
        ("qwen3_moe", "down_proj", (4, 32, 64), False),
        ("qwen3_moe", "gate_up_proj", (4, 32, 64), None),
        ("llama4_text", "gate_up_proj", (4, 32, 64), True),
        ("llama4_text", "down_proj", (4, 64, 32), True),
        ("llama4_text", "down_proj", (4, 32, 64), None),
        ("qwen3_vl_moe_text", "gate_up_proj", (4, 32, 64), True),
        ("qwen3_vl_moe_text", "gate_up_proj", (4, 64, 32), False),
        ("qwen3_vl_moe_text", "down_proj", (4, 64, 32), True),
        ("qwen3_vl_moe_text", "down_proj", (4, 32, 64), False),
        ("qwen3_vl_moe_text", "down_proj", (4, 32, 32), None),
        ("qwen3_vl_moe_text", "down_proj", (4, 48, 64), None),
    ],
)
def test_orientation_at_a_hidden_size_of_32(kind, parameter, shape, expected):
    assert LAYOUTS[kind].is_transposed(parameter, shape, 32) is expected
