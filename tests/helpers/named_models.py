"""Tiny models of many families, saved under the names of both layouts, for tests of names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto import modeling_auto as auto

from quantload.mappers.mapper import Target

_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    **_IDS,
}
_EXPERTS = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
}
_MOE = {
    **{**_TEXT, **_EXPERTS, "rotary_dim": 8},
    **{"first_k_dense_replace": 0, "moe_layer_start_index": 0},
}
_MLA = {
    **_TEXT,
    **_EXPERTS,
    **{"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "head_dim": 8},
    **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 1},
    **{"topk_group": 1, "first_k_dense_replace": 1, "num_hidden_layers": 2, "n_shared_experts": 1},
}
_GPT2 = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64, "vocab_size": 64, **_IDS}
_OLD = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 64,
    **_IDS,
}
_BERT = {**_OLD, "intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0}
_DELTA = {
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2},
    **{"linear_num_value_heads": 4, "num_hidden_layers": 2},
    "layer_types": ["linear_attention", "full_attention"],
}
_VISION = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "image_size": 16},
    **{"num_attention_heads": 4, "patch_size": 8},
}
_QWEN_VISION = {
    **{"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4},
    **{
        "mlp_ratio": 2,
        "intermediate_size": 48,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
    },
    "deepstack_visual_indexes": [0],
}
_MROPE = {
    **_TEXT,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
}

CONFIGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi", "stablelm", "olmo2"),
            *("starcoder2", "cohere2", "granite", "glm4", "nemotron", "smollm3", "exaone4"),
        ),
        _TEXT,
    ),
    "phi3": {**_TEXT, "original_max_position_embeddings": 64},
    "gpt2": _GPT2,
    "gpt_neox": {**_OLD, "intermediate_size": 48, "max_position_embeddings": 64},
    "bloom": {"hidden_size": 32, "n_layer": 1, "n_head": 4, "vocab_size": 64, **_IDS},
    "falcon": _OLD,
    "opt": {**_TEXT, "ffn_dim": 48, "word_embed_proj_dim": 32, "pad_token_id": 1},
    "mamba2": {
        **{"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64, "state_size": 8, **_IDS},
        **{"num_heads": 8, "head_dim": 8, "n_groups": 1, "expand": 2},
    },
    **dict.fromkeys(
        (
            *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "phimoe", "minimax_m2", "gpt_oss"),
            *("llama4_text", "granitemoe", "glm4_moe", "ernie4_5_moe", "hunyuan_v1_moe"),
        ),
        _MOE,
    ),
    "deepseek_v3": _MLA,
    "jamba": {
        **_TEXT,
        **_EXPERTS,
        "num_hidden_layers": 2,
        "attn_layer_offset": 0,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "lfm2_moe": {
        **_TEXT,
        **_EXPERTS,
        "num_hidden_layers": 2,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention"],
    },
    "qwen3_next": {**_TEXT, **_EXPERTS, **_DELTA},
    "olmo_hybrid": {**_TEXT, **_DELTA},
    "hrm_text": {**_TEXT},
    "bert": _BERT,
    "roberta": _BERT,
    "nomic_bert": _BERT,
    "gte": _BERT,
    "jina_embeddings_v3": _BERT,
    "electra": {**_BERT, "embedding_size": 16},
    "qwen2_vl": {"text_config": _MROPE, "vision_config": _QWEN_VISION, "vocab_size": 64},
    "qwen3_vl_moe": {
        "text_config": {**_MROPE, **_EXPERTS, "decoder_sparse_step": 1},
        "vision_config": _QWEN_VISION,
    },
    "gemma3": {"text_config": _TEXT, "vision_config": _VISION, "mm_tokens_per_image": 4},
    "llava": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_VISION, "model_type": "clip_vision_model"},
    },
}

CONFIGS = {kind: values for kind, values in CONFIGS.items() if kind in CONFIG_MAPPING}


def build(model_type: str) -> PreTrainedModel:
    """Build a tiny random model of one model type, with a head if it has such a class."""
    config = CONFIG_MAPPING[model_type](**CONFIGS[model_type])
    config.dtype = "float32"
    mappings = (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING,
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        auto.MODEL_MAPPING,
    )
    model_class = next(m[type(config)] for m in mappings if type(config) in m)
    generator = torch.Generator().manual_seed(0)
    model: PreTrainedModel = model_class(config).eval()
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return model


def saved(model: PreTrainedModel, folder: Path, *, original: bool) -> dict[str, Tensor]:
    """Save a model under the names of its original checkpoints, or its own; return the tensors."""
    model.save_pretrained(folder, save_original_format=original)
    tensors: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def taken_by_hand(stored: Tensor, target: Target, shape: torch.Size) -> Tensor:
    """What a target says is taken of a stored tensor, index by index."""
    cut = target.cut
    if cut is None:
        return stored
    if cut.rows is not None:
        order = torch.tensor([row for run in cut.rows for row in run])
        stored = stored.index_select(cut.axis, order)
    swaps = cut.transposed == "always" or (cut.transposed == "by shape" and stored.shape != shape)
    return stored.transpose(-1, -2) if swaps else stored


def put_together(
    places: Mapping[str, tuple[Target, ...]],
    stored: Mapping[str, Tensor],
    shapes: Mapping[str, torch.Size],
) -> dict[str, Tensor]:
    """Fill the parameters of a model as the targets of its tensors say; each element once."""
    made: dict[str, Tensor] = {}
    joined: dict[str, dict[int, Tensor]] = {}
    axes: dict[str, int] = {}
    for name, targets in places.items():
        for target in targets:
            value = taken_by_hand(stored[name], target, shapes[target.name])
            if target.piece is not None:
                piece = target.piece
                whole = made.setdefault(target.name, torch.full(shapes[target.name], torch.nan))
                axis = 1 if piece.is_transposed else 0
                part = whole[piece.expert].chunk(piece.parts, axis)[piece.part]
                assert part.isnan().all(), f"{target} is filled twice"
                part.copy_(value.T if axis else value)
            elif target.join is not None:
                joined.setdefault(target.name, {})[target.join.part] = value
                axes[target.name] = target.join.axis
            else:
                assert target.name not in made, f"{target} is filled twice"
                made[target.name] = value
    for name, parts in joined.items():
        made[name] = torch.cat([parts[i] for i in sorted(parts)], axes[name])
    return made
