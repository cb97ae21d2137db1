"""Tiny models for tests of ranks, whose sizes do not divide by their number."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

# 8 query heads and 2 for keys and values: fewer than ranks. 131 tokens and 96 features are no
# multiples of 8 and 64, blocks of 128 are cut everywhere.
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 3}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16, "tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16, **WINDOWS},
    "mixtral": {"head_dim": 16, "num_local_experts": 4},
    "deepseek_v3": {
        **{"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8},
        **{"v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2},
        **{"topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 32},
        **{"num_key_value_heads": 8, "n_shared_experts": 1},
    },
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, **WINDOWS},
    "phi3": {},
    "jamba": {
        **{"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
        **{"expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 8},
        "use_mamba_kernels": False,
    },
}
# What each has that others have not stands behind it.
ODD: dict[str, dict[str, Any]] = {
    "falcon": {"alibi": False},  # layers return tuples and call their cache `layer_past`
    "bert": {"is_decoder": True},  # the head is in a module with a bias of its own
    "mamba": {"use_cache": True},  # reads the dtype of the head's weight; float32 between layers
    "bamba": {  # layers return two things
        **{"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16},
        **{"mamba_d_state": 8, "mamba_chunk_size": 8},
    },
    "llama4_text": {  # reads the dtype of the embedding's weight
        **{"head_dim": 16, "num_local_experts": 2, "intermediate_size_mlp": 96},
        "attention_chunk_size": 32,
    },
    "olmo": {},  # norms have no weights: no parameter is left where all layers are ours
    "diffllama": {},  # halves of the heads are told apart
    "doge": {"num_attention_heads": 4, "num_key_value_heads": 2},  # a number for each key head
}


def write_model(model_type: str, folder: Path, sizes: Mapping[str, Any] | None = None) -> None:
    """Write a random model; `sizes` replace those of this file."""
    torch.manual_seed(0)
    known = SIZES | (MODELS | ODD)[model_type]
    config = AutoConfig.for_model(model_type, **(known | dict(sizes or {})))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.3 * noise if parameter.ndim == 1 else 0.08 * noise)
    model.save_pretrained(folder)
