"""Which modules stay in full precision by default, and why."""

import pytest

from quantload.mappers.default_keeps import reason_to_keep

LAYER = "model.layers.3"


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("lm_head", "output head"),
        ("model.lm_head", "output head"),
        ("transformer.output_layer", "output head"),
        ("embed_out", "output head"),
        ("model.layers.61.shared_head.head", "output head"),
        (f"{LAYER}.mlp.gate", "router"),
        (f"{LAYER}.block_sparse_moe.gate", "router"),
        (f"{LAYER}.mlp.router", "router"),
        (f"{LAYER}.mlp.router.classifier", "router"),
        (f"{LAYER}.mlp.gate.wg", "router"),
        (f"{LAYER}.mlp.shared_expert_gate", "router"),
        (f"{LAYER}.linear_attn.in_proj_a", "small state-space or indexer projection"),
        (f"{LAYER}.linear_attn.in_proj_ba", "small state-space or indexer projection"),
        (f"{LAYER}.mixer.x_proj", "small state-space or indexer projection"),
        (f"{LAYER}.mixer.dt_proj", "small state-space or indexer projection"),
        (f"{LAYER}.self_attn.indexer.weights_proj", "small state-space or indexer projection"),
        ("vision_tower.layers.0.mlp.fc1", "vision or audio tower"),
        ("model.visual.blocks.0.attn.qkv", "vision or audio tower"),
        ("multi_modal_projector.linear_1", "vision or audio tower"),
        ("audio_tower.layers.0.fc1", "vision or audio tower"),
        ("mtp.layers.0.mlp.up_proj", "multi-token prediction block"),
        ("model.layers.61.eh_proj", "multi-token prediction block"),
        (f"{LAYER}.input_layernorm", "norm"),
        (f"{LAYER}.self_attn.q_norm", "norm"),
        ("model.norm", "norm"),
        ("transformer.ln_f", "norm"),
        ("transformer.h.0.ln_1", "norm"),
        ("encoder.layer_norm", "norm"),
        ("encoder.layer.0.output.LayerNorm", "norm"),
        ("model.rmsnorm", "norm"),
        ("blocks.0.norm1", "norm"),
    ],
)
def test_kept_with_a_reason(module, reason):
    assert reason_to_keep(module, "linear") == reason


@pytest.mark.parametrize(
    "module",
    [
        f"{LAYER}.mlp.gate_proj",
        f"{LAYER}.mlp.gate_up_proj",
        f"{LAYER}.mlp.experts.7.down_proj",
        f"{LAYER}.mlp.shared_expert.gate_proj",
        f"{LAYER}.self_attn.q_proj",
        f"{LAYER}.linear_attn.in_proj_qkvz",
        f"{LAYER}.mixer.in_proj",
        f"{LAYER}.mixer.out_proj",
        f"{LAYER}.navigator.up_proj",
        f"{LAYER}.normalizer_proj",
        f"{LAYER}.lm_head_adapter",
        f"{LAYER}.supervision_tower",
        "model.layers.0.kernel.lnx",
        "mtpx.up_proj",
    ],
)
def test_quantized_by_default(module):
    assert reason_to_keep(module, "linear") is None


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("head", "output head"),
        ("embedding", "embedding"),
        ("convolution", "convolution"),
        ("other", "not a linear layer"),
        ("linear", None),
    ],
)
def test_the_kind_decides_whatever_the_name(kind, reason):
    assert reason_to_keep("a.b", kind) == reason
