"""`ARCHITECTURES`: one row an architecture that is read from GGUF; see `gguf_rows.py` for columns.

Decoders with the module names of llama are here, all others in `gguf_other_architectures.py`.
"""

from __future__ import annotations

from dataclasses import replace

from quantload.loader.gguf_other_architectures import (
    BLOOM,
    FALCON,
    GPT2,
    LFM2,
    MAMBA,
    QWEN35,
    QWEN35_MOE,
    T5,
    T5_ENCODER,
    UMT5,
    UMT5_ENCODER,
)
from quantload.loader.gguf_rows import (
    ATTENTION_BIAS,
    BOTH_BIASES,
    MIXTRAL_EXPERTS,
    QWEN_EXPERTS,
    SHARED_EXPERT,
    SILU,
    UNTIED,
    Architecture,
    Row,
    attention,
    decoder,
    gated_mlp,
    head_norms,
    keys_without,
    mlp,
    norms,
    outer,
)

_LLAMA = Architecture(
    "LlamaForCausalLM",
    "llama",
    outer(),
    decoder(
        *norms(),
        *attention(bias="attention_bias", out_bias="attention_bias", interleaved=True),
        *gated_mlp(bias="mlp_bias"),
    ),
    constants=SILU,
    options=BOTH_BIASES,
    config_options=("attention_bias", "mlp_bias"),
)
_QWEN2 = Architecture(
    "Qwen2ForCausalLM",
    "qwen2",
    outer(),
    decoder(*norms(), *attention(bias="always"), *gated_mlp()),
    constants=SILU,
    options=UNTIED,
)
_QWEN3 = replace(
    _QWEN2,
    hf_class="Qwen3ForCausalLM",
    model_type="qwen3",
    blocks=decoder(
        *norms(),
        *attention(bias="attention_bias", out_bias="attention_bias"),
        *head_norms(),
        *gated_mlp(),
    ),
    options=ATTENTION_BIAS,
    config_options=("attention_bias",),
)
_GEMMA = Architecture(
    "GemmaForCausalLM",
    "gemma",
    outer(norm_change="plus_one"),
    decoder(*norms(change="plus_one"), *attention(), *gated_mlp()),
    constants={"hidden_act": "gelu_pytorch_tanh", "attention_bias": False},
    options=UNTIED,
)
_GEMMA_NORMS = (
    Row("attn_norm", "input_layernorm", "hidden", change="plus_one"),
    Row("post_attention_norm", "post_attention_layernorm", "hidden", change="plus_one"),
    Row("ffn_norm", "pre_feedforward_layernorm", "hidden", change="plus_one"),
    Row("post_ffw_norm", "post_feedforward_layernorm", "hidden", change="plus_one"),
)
_GEMMA2 = replace(
    _GEMMA,
    hf_class="Gemma2ForCausalLM",
    model_type="gemma2",
    blocks=decoder(*_GEMMA_NORMS, *attention(), *gated_mlp()),
    constants={"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False},
)
_NEMOTRON = Architecture(
    "NemotronForCausalLM",
    "nemotron",
    outer(norm_bias="always", norm_change="plus_one"),
    decoder(
        *norms(bias="always", change="plus_one"),
        *attention(bias="attention_bias", out_bias="attention_bias"),
        *mlp("mlp.up_proj", "mlp.down_proj", bias="mlp_bias"),
    ),
    keys=keys_without(eps="norm_eps"),
    constants={"hidden_act": "relu2"},
    options=ATTENTION_BIAS | {"mlp_bias": "blk.0.ffn_up.bias"},
    config_options=("attention_bias", "mlp_bias"),
    rotary="part",
)
_STABLELM = Architecture(
    "StableLmForCausalLM",
    "stablelm",
    outer(norm_bias="always"),
    decoder(
        Row("attn_norm", "input_layernorm", "hidden", bias="always"),
        Row("ffn_norm", "post_attention_layernorm", "hidden", when="second_norm", bias="always"),
        *attention(bias="use_qkv_bias"),
        Row("attn_q_norm", "self_attn.q_layernorm.norms.{e}", "heads head", when="qk_layernorm"),
        Row("attn_k_norm", "self_attn.k_layernorm.norms.{e}", "kv_heads head", when="qk_layernorm"),
        *gated_mlp(),
    ),
    keys=keys_without("head", eps="layer_norm_eps"),
    constants=SILU,
    options=UNTIED
    | {
        "use_qkv_bias": "blk.0.attn_q.bias",
        "qk_layernorm": "blk.0.attn_q_norm.weight",
        "second_norm": "blk.0.ffn_norm.weight",
    },
    config_options=("use_qkv_bias", "qk_layernorm"),
    rotary="part",
)
_STARCODER2 = Architecture(
    "Starcoder2ForCausalLM",
    "starcoder2",
    outer(norm_bias="always"),
    decoder(
        *norms(bias="always"),
        *attention(bias="use_bias", out_bias="use_bias"),
        *mlp("mlp.c_fc", "mlp.c_proj", bias="use_bias"),
    ),
    keys=keys_without("head", eps="norm_epsilon"),
    constants={"hidden_act": "gelu_pytorch_tanh"},
    options=UNTIED | {"use_bias": "blk.0.attn_q.bias"},
    config_options=("use_bias",),
)
_PHI3 = Architecture(
    "Phi3ForCausalLM",
    "phi3",
    outer(),
    decoder(
        *norms(),
        Row("attn_qkv", "self_attn.qkv_proj", "qkv hidden"),
        Row("attn_output", "self_attn.o_proj", "hidden q"),
        Row("ffn_up", "mlp.gate_up_proj", "gate_up hidden"),
        Row("ffn_down", "mlp.down_proj", "hidden intermediate"),
    ),
    keys=keys_without("head"),
    constants=SILU,
    options=UNTIED,
    rotary="part",
)
_MIXTRAL = replace(
    _LLAMA,
    hf_class="MixtralForCausalLM",
    model_type="mixtral",
    blocks=decoder(*norms(), *attention(interleaved=True), *MIXTRAL_EXPERTS),
    options=UNTIED,
    config_options=(),
)
_QWEN2_MOE = replace(
    _QWEN2,
    hf_class="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    blocks=decoder(*norms(), *attention(bias="always"), *QWEN_EXPERTS, *SHARED_EXPERT),
    constants=SILU | {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
)
_QWEN3_MOE = replace(
    _QWEN3,
    hf_class="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    blocks=decoder(
        *norms(),
        *attention(bias="attention_bias", out_bias="attention_bias"),
        *head_norms(),
        *QWEN_EXPERTS,
    ),
    constants=SILU | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
)
_GEMMA3 = replace(
    _GEMMA2,
    hf_class="Gemma3ForCausalLM",
    model_type="gemma3_text",
    blocks=decoder(*_GEMMA_NORMS, *attention(), *head_norms(change="plus_one"), *gated_mlp()),
)
_GEMMA4_INPUTS = (  # embeddings of tokens that enter each layer
    Row("per_layer_token_embd", "model.embed_tokens_per_layer", "vocab inputs", "layer_inputs"),
    Row(
        "per_layer_model_proj", "model.per_layer_model_projection", "inputs hidden", "layer_inputs"
    ),
    Row("per_layer_proj_norm", "model.per_layer_projection_norm", "input", "layer_inputs"),
)
_SCALE = (".scale", "")
_GEMMA4_LAYER = (
    Row("attn_norm", "input_layernorm", "hidden"),
    Row("post_attention_norm", "post_attention_layernorm", "hidden"),
    Row("ffn_norm", "pre_feedforward_layernorm", "hidden"),
    Row("post_ffw_norm", "post_feedforward_layernorm", "hidden"),
    Row("layer_output_scale", "layer_scalar", "1", suffix=(".weight", "")),
    Row("attn_q", "self_attn.q_proj", "q hidden"),
    Row("attn_k", "self_attn.k_proj", "kv hidden", "own_k"),
    Row("attn_v", "self_attn.v_proj", "kv hidden", "own_v"),
    Row("attn_output", "self_attn.o_proj", "hidden q"),
    Row("attn_q_norm", "self_attn.q_norm", "head"),
    Row("attn_k_norm", "self_attn.k_norm", "head", "own_k"),
    *gated_mlp(),
    Row("inp_gate", "per_layer_input_gate", "input hidden", "layer_inputs"),
    Row("proj", "per_layer_projection", "hidden input", "layer_inputs"),
    Row("post_norm", "post_per_layer_input_norm", "hidden", "layer_inputs"),
    Row("pre_ffw_norm_2", "pre_feedforward_layernorm_2", "hidden", "has_experts"),
    Row("post_ffw_norm_1", "post_feedforward_layernorm_1", "hidden", "has_experts"),
    Row("post_ffw_norm_2", "post_feedforward_layernorm_2", "hidden", "has_experts"),
    Row("ffn_gate_inp", "router.proj", "experts hidden", "has_experts"),
    Row("ffn_gate_inp", "router.scale", "hidden", "has_experts", suffix=(".scale", "")),
    Row(
        "ffn_down_exps", "router.per_expert_scale", "experts", "has_experts", suffix=(".scale", "")
    ),
    Row(
        "ffn_gate_up_exps",
        "experts.gate_up_proj",
        "experts moe_twice hidden",
        "has_experts",
        suffix=(".weight", ""),
    ),
    Row(
        "ffn_down_exps",
        "experts.down_proj",
        "experts hidden moe",
        "has_experts",
        suffix=(".weight", ""),
    ),
)
_GEMMA4 = replace(
    _GEMMA2,
    hf_class="Gemma4ForCausalLM",
    model_type="gemma4_text",
    outer=(*outer(), *_GEMMA4_INPUTS),
    blocks=decoder(*_GEMMA4_LAYER),
    keys=keys_without(head="global_head_dim"),
    options=UNTIED
    | {
        "layer_inputs": "per_layer_token_embd.weight",
        "has_experts": "blk.0.ffn_gate_inp.weight",
    },
    rotary="by layer",
)
_MINIMAX_M2 = Architecture(
    "MiniMaxM2ForCausalLM",
    "minimax_m2",
    outer(),
    decoder(
        *norms(),
        *attention(),
        Row("attn_q_norm", "self_attn.q_norm", "q"),
        Row("attn_k_norm", "self_attn.k_norm", "kv"),
        *MIXTRAL_EXPERTS,
        Row(
            "exp_probs_b",
            "block_sparse_moe.e_score_correction_bias",
            "experts",
            suffix=(".bias", ""),
        ),
    ),
    constants=SILU
    | {
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
    },
    options=UNTIED,
    rotary="part",
)
_GPT_OSS = Architecture(
    "GptOssForCausalLM",
    "gpt_oss",
    outer(),
    decoder(
        *norms(second="post_attention_norm"),
        *attention(bias="always", out_bias="always"),
        Row("attn_sinks", "self_attn.sinks", "heads", suffix=(".weight", "")),
        Row("ffn_gate_inp", "mlp.router", "experts hidden", bias="always"),
        Row(
            "ffn_gate_exps ffn_up_exps",
            "mlp.experts.gate_up_proj",
            "experts moe hidden",
            change="transposed",
            suffix=(".weight", ""),
        ),
        Row(
            "ffn_gate_exps ffn_up_exps",
            "mlp.experts.gate_up_proj_bias",
            "experts moe",
            suffix=(".bias", ""),
        ),
        Row(
            "ffn_down_exps",
            "mlp.experts.down_proj",
            "experts hidden moe",
            change="transposed",
            suffix=(".weight", ""),
        ),
        Row("ffn_down_exps", "mlp.experts.down_proj_bias", "experts hidden", suffix=(".bias", "")),
    ),
    constants=SILU | {"attention_bias": True},
    options=UNTIED,
)

ARCHITECTURES = {
    "llama": _LLAMA,
    "llama with experts": _MIXTRAL,
    "qwen2": _QWEN2,
    "qwen2moe": _QWEN2_MOE,
    "qwen3": _QWEN3,
    "qwen3moe": _QWEN3_MOE,
    "qwen35": QWEN35,
    "qwen35moe": QWEN35_MOE,
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3": _GEMMA3,
    "gemma4": _GEMMA4,
    "gpt-oss": _GPT_OSS,
    "minimax-m2": _MINIMAX_M2,
    "nemotron": _NEMOTRON,
    "phi3": _PHI3,
    "stablelm": _STABLELM,
    "starcoder2": _STARCODER2,
    "bloom": BLOOM,
    "falcon": FALCON,
    "gpt2": GPT2,
    "lfm2": LFM2,
    "mamba": MAMBA,
    "t5": T5,
    "t5 with biases in all layers": UMT5,
    "t5encoder": T5_ENCODER,
    "t5encoder with biases in all layers": UMT5_ENCODER,
}
