"""Plans of sharing layers: heads stay whole, blocks stay together, and shapes prove the rest."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from fake_source import tiny_config
from torch import nn

from quantload.layers.attention import use_attention
from quantload.layers.meta_model import build_on_meta, tensor_parallel_plan
from quantload.layers.sharding import ShardPlan, Style, plan_sharding

NOWHERE = Path("/nowhere")
ATTENTION = "model.layers.0.self_attn"


def plan_of(model_type: str, ranks: int, **options: object) -> ShardPlan:
    return plan_sharding(built(model_type, **options), ranks)


def built(model_type: str = "llama", **options: object) -> nn.Module:
    config = tiny_config(model_type, **options)
    model = build_on_meta(config, NOWHERE, dtype=torch.float32)
    use_attention(model)
    return model


def kinds(plan: ShardPlan) -> dict[str, int]:
    return dict(Counter(style.kind for style in plan.styles.values()))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_every_layer_of_a_plain_decoder_is_cut(model_type, ranks):
    plan = plan_of(model_type, ranks, vocab_size=131)
    assert kinds(plan) == {"vocabulary": 2, "column": 10, "row": 4}
    assert plan.styles[f"{ATTENTION}.q_proj"] == Style("column", 16)
    assert plan.styles["model.layers.1.mlp.down_proj"] == Style("row", 1)
    assert not plan.replicated()


def test_ranks_that_outnumber_key_value_heads_share_them():
    style = plan_of("llama", 4).styles[f"{ATTENTION}.k_proj"]
    assert [style.rows(32, rank, 4) for rank in range(4)] == [(0, 16), (0, 16), (16, 32), (16, 32)]


def test_parts_are_equal_and_cover_all():
    assert [Style("column").rows(96, rank, 4) for rank in range(4)] == [
        (0, 24), (24, 48), (48, 72), (72, 96)
    ]  # fmt: skip
    assert [Style("row").columns(6, rank, 3) for rank in range(3)] == [(0, 2), (2, 4), (4, 6)]
    assert Style("row").rows(6, 0, 3) is None
    assert Style("column").columns(6, 0, 3) is None


def test_a_block_whose_heads_do_not_divide_is_replicated_as_a_whole():
    plan = plan_of("llama", 8)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        style = plan.styles[f"{ATTENTION}.{name}"]
        assert style.kind == "replicated"
        assert "4 heads cannot be shared by 8 ranks" in style.reason
    assert plan.styles["model.layers.0.mlp.up_proj"].kind == "column"


def test_a_model_without_a_plan_is_replicated():
    plan = plan_of("gpt2", 2)
    assert set(kinds(plan)) == {"replicated"}
    assert list(plan.replicated()) == ["not in the tensor parallel plan of the model"]


def model_with(forward) -> nn.Module:
    model = built()
    block = type(model.model.layers[0].mlp)
    model.model.layers[1].mlp.__class__ = type("Odd", (block,), {"forward": forward})
    return model


def test_a_block_that_does_not_fit_when_cut_is_replicated_and_the_others_are_not():
    def forward(self, x):
        return self.down_proj(torch.ones(96, device=x.device) * self.up_proj(x))

    plan = plan_sharding(model_with(forward), 2)
    assert plan.styles["model.layers.0.mlp.up_proj"].kind == "column"
    for name in ("up_proj", "down_proj"):
        style = plan.styles[f"model.layers.1.mlp.{name}"]
        assert style.kind == "replicated"
        assert "shapes do not fit" in style.reason


def test_a_block_that_returns_another_shape_when_cut_is_replicated():
    def forward(self, x):
        y = self.down_proj(self.up_proj(x))
        return y[..., : self.up_proj(x).shape[-1] * 64 // 96].repeat_interleave(2, -1)[..., :64]

    plan = plan_sharding(model_with(forward), 4)
    assert plan.styles["model.layers.1.mlp.up_proj"].kind == "replicated"
    assert plan.styles["model.layers.0.mlp.up_proj"].kind == "column"


def test_a_model_that_does_not_run_is_replicated():
    def forward(self, x):
        raise RuntimeError("not on meta")

    plan = plan_sharding(model_with(forward), 2)
    assert "column" not in kinds(plan)
    assert any("cannot be proven" in reason for reason in plan.replicated())


def test_numbers_of_heads_are_cut_with_the_heads():
    model = built()
    sinks = nn.Parameter(torch.empty(4, device="meta"))
    model.model.layers[0].self_attn.sinks = sinks
    assert plan_sharding(model, 2).vectors == (f"{ATTENTION}.sinks",)


def half_of(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([second, first], -1)


NEEDS_ALL = {
    "mean": lambda x: x - x.mean(-1, keepdim=True),
    "softmax": lambda x: x.softmax(-1),
    "norm": lambda x: nn.functional.normalize(x, dim=-1),
    "layer norm": lambda x: nn.functional.layer_norm(x, x.shape[-1:]),
    "halves": half_of,
    "order": lambda x: x.flip(-1),
    "interleaved": lambda x: x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2),
    "factor": lambda x: x * x.shape[-1] ** -0.5,
    "count": lambda x: x / x.shape[-1],
    "numbers": lambda x: x * torch.arange(x.shape[-1], device=x.device),
    "running sum": lambda x: x.cumsum(-1),
    "first ones": lambda x: x + torch.ones(96, device=x.device).cumsum(0)[: x.shape[-1]],
    "largest": lambda x: x * (x >= x.topk(4, -1).values[..., -1:]),
}


def in_heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (-1, 4))


def turned(x: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(in_heads(x).float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * 2.0).flatten(-3).to(x.dtype)


TREATS_ALIKE = {
    "complex pairs of a head": turned,
    "activation": lambda x: nn.functional.silu(x) * 2.0,
    "over tokens": lambda x: x - x.mean(1, keepdim=True),
    "by head": lambda x: in_heads(x).softmax(-1).flatten(-2),
    "moved": lambda x: in_heads(x).transpose(1, 2).contiguous().transpose(1, 2).flatten(2),
    "norm of a head": lambda x: nn.functional.layer_norm(in_heads(x), (4,)).flatten(-2),
}


def mlp_with(between) -> nn.Module:
    def forward(self, x):
        return self.down_proj(between(self.up_proj(x)))

    return model_with(forward)


@pytest.mark.parametrize("between", NEEDS_ALL)
def test_what_needs_all_features_is_replicated_although_shapes_fit(between):
    plan = plan_sharding(mlp_with(NEEDS_ALL[between]), 2)
    for name in ("up_proj", "down_proj"):
        style = plan.styles[f"model.layers.1.mlp.{name}"]
        assert style.kind == "replicated"
        assert style.reason
    assert plan.styles["model.layers.0.mlp.up_proj"].kind == "column"
    assert plan.styles["model.layers.1.self_attn.q_proj"].kind == "column"


@pytest.mark.parametrize("between", TREATS_ALIKE)
def test_what_treats_features_alike_is_cut(between):
    plan = plan_sharding(mlp_with(TREATS_ALIKE[between]), 2)
    assert plan.styles["model.layers.1.mlp.up_proj"].kind == "column"


def test_attention_under_a_function_of_transformers_is_replicated():
    model = build_on_meta(tiny_config("llama"), NOWHERE, dtype=torch.float32)
    style = plan_sharding(model, 2).styles[f"{ATTENTION}.q_proj"]
    assert style.kind == "replicated"
    assert "attention does not run" in style.reason


def test_sinks_of_all_heads_beside_some_heads_are_seen():
    model = built("gpt_oss", num_local_experts=2, num_experts_per_tok=1)
    assert plan_sharding(model, 2).styles[f"{ATTENTION}.q_proj"].kind == "column"
    for layer in model.model.layers:  # a size of heads that nothing names: sinks are not cut
        del layer.self_attn.head_dim
        forward = type(layer.self_attn).forward

        def run(self, *args, forward=forward, **kwargs):
            self.__dict__["head_dim"] = 16
            try:
                return forward(self, *args, **kwargs)
            finally:
                del self.__dict__["head_dim"]

        layer.self_attn.__class__ = type("Odd", (type(layer.self_attn),), {"forward": run})
    style = plan_sharding(model, 2).styles[f"{ATTENTION}.q_proj"]
    assert (style.kind, style.reason) == (
        "replicated",
        "shapes do not fit when it is cut (ValueError)",
    )


def test_layers_that_are_one_parameter_are_replicated():
    model = built()
    first, second = model.model.layers
    second.mlp.up_proj.weight = first.mlp.up_proj.weight
    plan = plan_sharding(model, 2)
    for number in (0, 1):
        assert plan.styles[f"model.layers.{number}.mlp.down_proj"].kind == "replicated"
        assert plan.styles[f"model.layers.{number}.self_attn.q_proj"].kind == "column"


LATENT = {
    **{
        "num_key_value_heads": 4,
        "head_dim": 8,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
    },
    **{"qk_nope_head_dim": 16, "v_head_dim": 12, "n_routed_experts": 2, "num_experts_per_tok": 1},
    **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 32},
}


@pytest.mark.parametrize("ranks", [2, 4])
def test_latent_attention_is_cut_by_heads_and_its_latents_are_whole(ranks):
    plan = plan_of("deepseek_v3", ranks, **LATENT)
    assert plan.styles[f"{ATTENTION}.q_b_proj"] == Style("column", 24)
    assert plan.styles[f"{ATTENTION}.kv_b_proj"] == Style("column", 28)
    assert plan.styles[f"{ATTENTION}.o_proj"] == Style("row", 12)
    for name in ("q_a_proj", "kv_a_proj_with_mqa"):
        style = plan.styles[f"{ATTENTION}.{name}"]
        assert style.reason == "not in the tensor parallel plan of the model"


def test_latent_attention_without_latents_of_queries():
    plan = plan_of("deepseek_v3", 2, **(LATENT | {"q_lora_rank": None}))
    assert plan.styles[f"{ATTENTION}.q_proj"] == Style("column", 24)
    assert plan.styles[f"{ATTENTION}.o_proj"] == Style("row", 12)


def test_latent_attention_is_whole_where_heads_do_not_divide():
    plan = plan_of("deepseek_v3", 8, **LATENT)
    for name in ("q_b_proj", "kv_b_proj", "o_proj"):
        assert plan.styles[f"{ATTENTION}.{name}"].kind == "replicated"
    assert plan.styles["model.layers.0.mlp.down_proj"].kind == "row"


def test_latent_attention_that_reads_its_own_number_of_heads_is_whole():
    model = built("deepseek_v3", **LATENT)
    block = type(model.model.layers[1].self_attn)

    def expand_kv(self, kv_nope, k_rot):
        keys, values = block.expand_kv(self, kv_nope, k_rot)
        return keys.sub(keys.mean(1, keepdim=True)), values  # over all heads

    model.model.layers[1].self_attn.__class__ = type("Odd", (block,), {"expand_kv": expand_kv})
    plan = plan_sharding(model, 2)
    for name in ("q_b_proj", "kv_b_proj", "o_proj"):
        assert plan.styles[f"model.layers.1.self_attn.{name}"].kind == "replicated"
        assert plan.styles[f"{ATTENTION}.{name}"].kind in ("column", "row")


def without_plan(model: nn.Module) -> nn.Module:
    """Take the MLPs out of the model's own plan."""
    kept = {k: v for k, v in tensor_parallel_plan(model).items() if ".mlp." not in k}
    assert kept
    model._tp_plan = kept
    return model


def test_gated_units_that_a_plan_leaves_out_are_cut():
    model = without_plan(built())
    plan = plan_sharding(model, 2)
    assert plan.styles["model.layers.0.mlp.gate_proj"] == Style("column", 1)
    assert plan.styles["model.layers.1.mlp.down_proj"] == Style("row", 1)


def test_gated_units_that_no_forward_reaches_are_whole():
    model = without_plan(built())
    block = model.model.layers[1]
    block.spare = type(block.mlp)(model.config).to("meta")
    plan = plan_sharding(model, 2)
    style = plan.styles["model.layers.1.spare.down_proj"]
    assert style.kind == "replicated"
    assert "does not reach" in style.reason
    assert plan.styles["model.layers.1.mlp.down_proj"].kind == "row"


def test_a_part_of_one_that_is_repeated_over_all_is_seen():
    """One feature a rank would be repeated into all of them; shapes fit."""

    def between(x):
        whole = torch.zeros(*x.shape[:-1], 96, device=x.device)
        whole.copy_(x)
        return x * whole.mean(-1, keepdim=True)

    plan = plan_sharding(mlp_with(between), 96)
    assert plan.styles["model.layers.1.mlp.up_proj"].kind == "replicated"
    assert plan.styles["model.layers.0.mlp.up_proj"].kind == "column"
