"""Names of every family find their place, in both layouts, and bring the values they stand for."""

from __future__ import annotations

import pytest
import torch
from named_models import CONFIGS, build, put_together, saved
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.core_model_loading import GroupWeightRename

import quantload
from quantload.layers import checkpoint_names
from quantload.layers.checkpoint_names import left_out_names, mapper_of
from quantload.mappers.mapper import Cut, Join, Piece, Target

# Families whose original checkpoints differ from their models by more than names.
CONVERTED = {
    *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "phimoe", "minimax_m2", "deepseek_v3"),
    *("jamba", "lfm2_moe", "qwen3_next", "olmo_hybrid", "hrm_text", "nomic_bert", "gte"),
    *("jina_embeddings_v3", "glm4_moe", "ernie4_5_moe", "hunyuan_v1_moe"),
}


def on_meta(model: PreTrainedModel) -> PreTrainedModel:
    with torch.device("meta"):
        made = type(model)(model.config)
    made.tie_weights()
    return made


@pytest.mark.parametrize("model_type", CONFIGS)
def test_every_tensor_finds_its_place_and_brings_its_values(model_type, tmp_path) -> None:
    model = build(model_type)
    state, meta = model.state_dict(), on_meta(model)
    tied = {*model.all_tied_weights_keys, *model.all_tied_weights_keys.values()}
    own, original = (saved(model, tmp_path / str(i), original=bool(i)) for i in range(2))
    assert (model_type in CONVERTED) == (
        {name: t.shape for name, t in own.items()}.items()
        != {name: t.shape for name, t in original.items()}.items()
        and sorted(t.shape for t in own.values()) != sorted(t.shape for t in original.values())
    )
    for stored in (own, original):
        mapper = mapper_of(meta, stored)
        places = {name: mapper.targets(name) for name in stored}
        assert [mapper.explain(name) for name in stored if not places[name]] == []
        made = put_together(places, stored, {name: t.shape for name, t in state.items()})
        assert set(state) - set(made) <= tied
        for name, value in made.items():
            assert torch.equal(value, state[name]), name


# -- families in detail ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mapper_for():
    made = {}

    def get(model_type, names=()):
        if model_type not in made:
            made[model_type] = mapper_of(on_meta(build(model_type)), names)
        return made[model_type]

    return get


def test_experts_of_mixtral(mapper_for) -> None:
    mapper = mapper_for("mixtral")
    experts = "model.layers.0.mlp.experts"
    old = "model.layers.0.block_sparse_moe.experts.3"
    assert mapper.target(f"{old}.w3.weight") == Target(
        experts, "gate_up_proj", piece=Piece(3, 1, 2)
    )
    assert mapper.target(f"{old}.w2.weight") == Target(experts, "down_proj", piece=Piece(3, 0, 1))
    scale = mapper.target(f"{old}.w1.input_scale")
    assert scale == Target(experts, "gate_up_proj.input_scale", piece=Piece(3, 0, 2))
    assert mapper.explain(f"{old}.w1.weight_scale") == (
        f"{old}.w1.weight_scale: goes with {old}.w1.weight; "
        "renaming `.block_sparse_moe.` by `.mlp.` -> model.layers.0.mlp.experts.3.w1.weight; "
        f"MergeModulelist, Concatenate -> {experts}.gate_up_proj; "
        f"-> {experts}.gate_up_proj.weight_scale[expert 3, part 0]"
    )
    # as fused-MoE engines save them, and gate and up of one expert together
    assert mapper.target(f"{experts}.w13_weight") == Target(experts, "gate_up_proj")
    assert mapper.target(f"{experts}.w2_weight") == Target(experts, "down_proj")
    fused = mapper_for("qwen3_moe").targets(f"{experts}.2.gate_up_proj.weight")
    assert [(target.leaf, target.piece) for target in fused] == [
        ("gate_up_proj", Piece(2, 0, 2)),
        ("gate_up_proj", Piece(2, 1, 2)),
    ]
    cuts = [target.cut for target in fused]
    assert cuts[0].rows == (range(cuts[0].length),)
    assert cuts[1].rows == (range(cuts[0].length, 2 * cuts[0].length),)


def test_experts_with_input_features_first(mapper_for) -> None:
    target = mapper_for("llama4_text").target(
        "model.layers.0.feed_forward.experts.1.up_proj.weight"
    )
    assert target.piece == Piece(1, 1, 2, is_transposed=True)


def test_rows_that_are_fused_on_disk(mapper_for) -> None:
    mapper = mapper_for("nomic_bert")
    layer = "encoder.layers.0.attn.Wqkv"
    targets = mapper.targets(f"{layer}.weight")
    assert [t.module.rpartition(".")[2] for t in targets] == ["q_proj", "k_proj", "v_proj"]
    assert [t.cut for t in targets] == [Cut(rows=(range(i, i + 32),)) for i in (0, 32, 64)]
    assert [t.module for t in targets] == list(mapper.layers_of(layer))
    assert mapper.module_of(layer) is None
    scales = mapper.targets(f"{layer}.weight_scale")
    assert [(t.module, t.leaf, t.cut) for t in scales] == [
        (t.module, "weight_scale", t.cut) for t in targets
    ]


def test_parts_of_one_parameter(mapper_for) -> None:
    target = mapper_for("olmo_hybrid").target("model.layers.0.linear_attn.k_conv1d.weight")
    assert (target.leaf, target.join) == ("weight", Join(1, 3))
    assert target.module == "model.layers.0.linear_attn.conv1d"


def test_prefix_of_the_base_model_both_ways(mapper_for) -> None:
    causal = mapper_for("llama")
    assert causal.target("layers.0.mlp.up_proj.weight").module == "model.layers.0.mlp.up_proj"
    config = CONFIG_MAPPING["llama"](**CONFIGS["llama"])
    from transformers import LlamaModel

    with torch.device("meta"):
        base = mapper_of(LlamaModel(config))
    assert base.target("model.layers.0.mlp.up_proj.weight").module == "layers.0.mlp.up_proj"
    assert causal.target("language_model.lm_head.weight").module == "lm_head"


def test_prediction_layers_may_be_left_out(mapper_for) -> None:
    model = on_meta(build("deepseek_v3"))
    model.config.num_nextn_predict_layers = 1
    mapper = mapper_of(model)
    for name in (
        "model.layers.2.eh_proj.weight",
        "layers.2.mlp.experts.0.up_proj.weight",
        "mtp.x.w",
    ):
        assert mapper.find(name) is None
        assert "multi-token prediction" in (mapper.why_dropped(name) or "")
    for name in ("model.layers.3.eh_proj.weight", "vision.layers.2.eh_proj.weight"):
        assert mapper.why_dropped(name) is None
    model.config.num_nextn_predict_layers = 0
    reasons = left_out_names(model)
    assert [p for p, why in reasons.items() if "multi-token" in why] == [r"(^|\.)mtp\."]


def test_names_that_mean_another_tensor_if_a_third_is_there(monkeypatch) -> None:
    """Old files have norm0 and norm1, new ones norm1 and norm2: order of asking must not matter."""

    def rules(model: PreTrainedModel) -> list[GroupWeightRename]:
        return [GroupWeightRename(["norm0", "norm1"], ["norm1", "norm2"])]

    monkeypatch.setattr(checkpoint_names, "get_model_conversion_mapping", rules)
    model = on_meta(build("llama"))
    layer = model.model.layers[0]
    layer.norm1, layer.norm2 = (torch.nn.Linear(2, 2, device="meta") for _ in range(2))
    old = [f"model.layers.0.norm{i}.weight" for i in (0, 1)]
    new = [f"model.layers.0.norm{i}.weight" for i in (1, 2)]
    for names in (old, old[::-1]):
        mapper = mapper_of(model, names)
        found = {name: mapper.target(name).name for name in names}
        assert found == dict(zip(old, new, strict=True))
    mapper = mapper_of(model, new)
    assert [mapper.target(name).name for name in new] == new


# -- through the loader, quantized ----------------------------------------------------------------


def test_fused_rows_load_as_transformers_loads_them(tmp_path) -> None:
    for model_type in ("nomic_bert", "olmo_hybrid", "hrm_text", "qwen3_vl_moe"):
        model = build(model_type)
        saved(model, tmp_path / model_type, original=True)
        loaded = quantload.load(
            tmp_path / model_type, device="cpu", fuse=False, fast_paths=False
        ).state_dict()
        for name, value in model.state_dict().items():
            assert torch.equal(loaded[name], value), name


def test_quantized_rows_that_are_fused_on_disk_stay_quantized(tmp_path) -> None:
    """gqkv of hrm_text: four layers of one quantized tensor."""
    model = build("hrm_text")
    for parameter in model.parameters():
        parameter.data *= 0.2  # its layers run several times: errors of rounding must not grow
    source, out, dense = (tmp_path / name for name in ("source", "out", "dense"))
    saved(model, source, original=True)
    quantload.convert(source, out, scheme="W8A16:g16")
    quantload.convert(out, dense, scheme="dense")
    weights = quantload.inspect(out).weights
    assert any(name.endswith("gqkv_proj") and w.is_quantized for name, w in weights.items())
    loaded = quantload.load(out, device="cpu", dtype=torch.float32)
    reference = type(model).from_pretrained(dense, dtype=torch.float32)
    ran = {row.module.rpartition(".")[2]: row.scheme for row in quantload.explain(loaded)}
    assert {ran[part] for part in ("q_proj", "k_proj", "v_proj", "up_proj")} == {"W8A16:g16"}
    ids = torch.arange(8)[None]
    with torch.no_grad():
        found, expected = loaded(ids).logits, reference(ids).logits
    assert (found - expected).norm() / expected.norm() < 1e-5
