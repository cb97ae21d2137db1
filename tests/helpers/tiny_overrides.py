"""What shrinking by field names cannot know about an architecture, by model type."""

from __future__ import annotations

from typing import Any

SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("dim", "emb_dim", "embedding_dim", "embedding_size", "model_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "ffn_hidden_size", "mlp_dim"), 96),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "n_inner", "dff", "dim_ff"), 96),
    **dict.fromkeys(("intermediate_size_mlp", "dense_intermediate_size", "d_inner"), 96),
    **dict.fromkeys(("feed_forward_size", "projection_hidden_dim", "projector_hidden_size"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("shared_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "share_expert_dim"), 32),
    **dict.fromkeys(("shared_experts_intermediate_size",), 32),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(
        ("swa_num_attention_heads", "attention_heads", "num_encoder_attention_heads"), 4
    ),
    **dict.fromkeys(("num_decoder_attention_heads", "index_n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "v_head_dim", "qk_nope_head_dim", "d_kv"), 16),
    **dict.fromkeys(("dim_head", "d_head", "attention_head_size", "kv_channels"), 16),
    **dict.fromkeys(("index_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("global_head_dim", "linear_head_dim", "query_pre_attn_scalar"), 16),
    "qk_head_dim": 24,
    "qk_rope_head_dim": 8,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "projection_dim"), 32),
    **dict.fromkeys(("linear_num_key_heads",), 2),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("num_layers", "depth", "encoder_layers", "decoder_layers", "layers"), 2),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers", "first_k_dense_replace"), 1),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size"), 128),
    **dict.fromkeys(("unpadded_vocab_size", "vocab_offset"), 128),
    "hidden_size_per_layer_input": 16,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 64),
    **dict.fromkeys(("original_max_position_embeddings", "context_length"), 32),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 4),
    **dict.fromkeys(("moe_num_experts", "moe_num_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "topk_groups"), 1),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size"), 8),
    **dict.fromkeys(("index_topk", "local_attention"), 8),
    **dict.fromkeys(("image_size",), 32),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 8),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 8),
    "out_hidden_size": 64,
}


_MLA = {"head_dim": 8, "num_key_value_heads": 4}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16}
_TOP_2 = {"num_experts_per_tok": 2}

# Dotted field -> value; "!field" is given to the config class before its sizes are shrunk.
OVERRIDES: dict[str, dict[str, Any]] = {
    "axk1": _MLA,
    "bamba": {**_MAMBA, "!attn_layer_indices": [1], "!num_hidden_layers": 3},
    "blt": {
        "encoder_hash_byte_group_vocab": 64,
        "encoder_hash_byte_group_size": [3, 4],
        "encoder_config.hidden_size_global": 128,
        "decoder_config.hidden_size_global": 128,
        "global_config.hidden_size": 128,
        "global_config.head_dim": 32,
        **{f"{part}.vocab_size": 260 for part in ("encoder_config", "decoder_config")},
        "patcher_config.vocab_size": 260,
    },
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    },
    "dbrx": {
        "attn_config.rope_theta": 1e4,
        "attn_config.kv_n_heads": 2,
        "attn_config.clip_qkv": 8.0,
        "num_key_value_heads": 2,
        "ffn_config.ffn_hidden_size": 96,
        "ffn_config.moe_top_k": 2,
    },
    "deepseek_v2": {**_MLA, **_TOP_2, "first_k_dense_replace": 1},
    "deepseek_v3": _MLA,
    "dory": {
        "n_input_layers": 2,
        "n_recurrent_layers": 2,
        "n_output_layers": 2,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "mlp"] * 2 + ["full_attention", "mlp"],
    },
    "dots1": {
        "n_routed_experts": 4,
        "num_local_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        **_TOP_2,
    },
    "dots3_note_text": {"head_dim": 24},
    "dots3_note": {
        "text_config.head_dim": 24,
        "vision_config.adapter_in_dim": 64,
        "vision_config.adapter_out_dim": 64,
        "audio_config.adapter_input_size": 64,
    },
    "emu3": {
        "vq_config.base_channels": 32,
        "vq_config.codebook_size": 64,
        "vq_config.attention_dropout": 0.0,
        "text_config.attention_dropout": 0.0,
        "vocabulary_map": {"<image>": 100, "<|extra_200|>": 101},
    },
    "chameleon": {"vq_config.base_channels": 32, "vocabulary_map": {"<image>": 100}},
    "gemma3": {"mm_tokens_per_image": 4},
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "num_hidden_layers": 4,
        "laurel_rank": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0],
        "intermediate_size": [96] * 4,
    },
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {**_MAMBA, "!layer_types": ["linear_attention", "full_attention"] * 16},
    "hrm_text": {"num_layers_per_stack": 2},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "hunyuan_vl": {
        "text_config.head_dim": 16,
        "text_config.rope_parameters.mrope_section": [4, 2, 2],
    },
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_hidden_layers": 4,
        "mamba_dt_rank": 8,
        "expert_layer_period": 2,
        "expert_layer_offset": 0,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention", "conv"],
        "num_hidden_layers": 3,
        "num_dense_layers": 1,
    },
    "longcat_flash": {**_MLA, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "reformer": {
        "is_decoder": True,
        "axial_pos_shape": [8, 8],
        "axial_pos_embds_dim": [16, 48],
        "attn_layers": ["local", "lsh"],
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_buckets": 2,
        "hash_seed": 0,
    },
    "qwen4_exp": {
        "text_config.indexer_n_heads": 4,
        "text_config.indexer_kv_heads": 1,
        "text_config.indexer_head_dim": 16,
        "text_config.indexer_budget": 8,
        "text_config.indexer_compress_ratio": 2,
        "text_config.hc_lowrank": 16,
        "text_config.ngram_vocab_size_base": 200,
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "hc_lowrank": 16,
    },
    "step3p7": {"text_config.sliding_window": 8},
    "xmod": {"default_language": "en_XX"},
    "youtu": _MLA,
    "zamba": {
        "num_hidden_layers": 4,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "mamba_dt_rank": 4,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "mamba_headdim": 16,
        "kv_channels": 16,
        "num_query_groups": 4,
        "adapter_rank": 16,
    },
    # with images
    "kimi_k25": {f"text_config.{k}": v for k, v in _MLA.items()},
    "apertus1p5": {
        "audio_config.codebook_dim": 64,
        "audio_config.hidden_size": 64,
        "image_token_offset": 60,
        "audio_token_offset": 76,
        "vision_config.codebook_size": 16,
        "vision_config.base_channels": 32,
        "audio_config.decoder_hidden_size": 64,
        "audio_config.decoder_num_layers": 1,
        "audio_config.codebook_size": 16,
    },
    "cohere_compass": {
        "text_config.rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e4}
        }
    },
    "deepseek_ocr2": {
        "text_config.mlp_layer_types": ["dense", "sparse"],
        "text_config.num_experts_per_tok": 2,
        "text_config.moe_intermediate_size": 32,
        "text_config.n_group": 1,
        "text_config.topk_group": 1,
    },
    "diffusion_gemma": {
        "text_config.num_experts": 4,
        "text_config.top_k_experts": 2,
        "text_config.moe_intermediate_size": 32,
    },
    "florence2": {"text_config.max_position_embeddings": 64},
    "gemma4_assistant": {
        "!text_config": {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 30}
    },
    **{
        k: {
            "text_config.rope_parameters.mrope_section": [2, 1, 1]
            if k == "glm4v_moe"
            else [4, 2, 2]
        }
        for k in ("glm46v", "glm4v", "glm4v_moe", "glm_ocr", "paddleocr_vl")
    },
    **{
        k: {"text_config.rope_parameters.mrope_section": [4, 2, 2]}
        for k in ("qwen2_vl", "qwen2_5_vl")
    },
    **{
        k: {
            "vision_start_token_id": 90,
            "vision_end_token_id": 91,
            "text_config.rope_parameters.mrope_section": [4, 2, 2],
        }
        for k in ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")
    },
    "granite4_vision": {
        "deepstack_layer_map": [[-1, 0]],
        "spatial_target_layers": [0, 1],
        "downsample_rate": "4/8",
    },
    "janus": {
        "vq_config.base_channels": 32,
        "vq_config.latent_channels": 64,
        "vq_config.num_embeddings": 64,
    },
    "ernie4_5_vl_moe": {"text_config.rope_parameters.mrope_section": [3, 3, 2]},
    "inkling2": {"vision_config.text_hidden_size": 64},
    "inkling2_loop": {"vision_config.text_hidden_size": 64},
    "glm5_next": {"text_config.index_topk": 16, "text_config.index_kpool": 8},
    "molmo2": {"adapter_config.vision_feature_layer": [1, 0]},
}
