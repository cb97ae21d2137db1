"""A tiny mixture of experts on disk."""

from __future__ import annotations

from pathlib import Path

import tiny_checkpoints as tiny
import torch


def tiny_moe(folder: Path) -> Path:
    """A tiny Qwen3-MoE with each expert's weights by themselves."""
    hidden, inner, experts = 64, 64, 4
    content = tiny.config(hidden=hidden, intermediate=inner) | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": inner,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    made = tiny.tensors(tiny.config(hidden=hidden, intermediate=inner))
    dense = {name: tensor for name, tensor in made.items() if ".mlp." not in name}
    generator = torch.Generator().manual_seed(3)
    for layer in range(2):
        for name in ("q_norm", "k_norm"):
            dense[f"model.layers.{layer}.self_attn.{name}.weight"] = torch.ones(
                hidden // 4, dtype=torch.bfloat16
            )
        mlp = f"model.layers.{layer}.mlp"
        dense[f"{mlp}.gate.weight"] = torch.randn(experts, hidden, generator=generator).bfloat16()
        for expert in range(experts):
            for name in ("gate_proj", "up_proj", "down_proj"):
                weight = torch.randn(inner, hidden, generator=generator) * 0.05
                dense[f"{mlp}.experts.{expert}.{name}.weight"] = weight.bfloat16()
    return tiny.write(folder, content, dense)
