"""Rows of `ARCHITECTURES` whose module names are not those of llama; see `gguf_rows.py`."""

from __future__ import annotations

from dataclasses import replace

from quantload.loader.gguf_rows import (
    HEAD,
    QWEN_EXPERTS,
    SHARED_EXPERT,
    SILU,
    UNTIED,
    Architecture,
    Block,
    Row,
    gated_mlp,
    keys_without,
    mlp,
    norms,
    outer,
)

FALCON = Architecture(
    "FalconForCausalLM",
    "falcon",
    (
        Row("token_embd", "transformer.word_embeddings", "vocab hidden"),
        Row("output_norm", "transformer.ln_f", "hidden", bias="always"),
        Row("output", "lm_head", "vocab hidden", when="untied"),
    ),
    (
        Block(
            "blk.{n}.",
            "transformer.h.{n}.",
            (
                Row("attn_norm", "input_layernorm", "hidden", when="not two_norms", bias="always"),
                Row("attn_norm", "ln_mlp", "hidden", when="two_norms", bias="always"),
                Row("attn_norm_2", "ln_attn", "hidden", when="two_norms", bias="always"),
                Row(
                    "attn_qkv",
                    "self_attention.query_key_value",
                    "qkv hidden",
                    bias="bias",
                    change="ungrouped_qkv",
                ),
                Row("attn_output", "self_attention.dense", "hidden q", bias="bias"),
                *mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", bias="bias"),
            ),
        ),
    ),
    keys=keys_without(
        "head", kv_heads="num_kv_heads", intermediate="ffn_hidden_size", eps="layer_norm_epsilon"
    ),
    constants={"activation": "gelu", "alibi": False, "parallel_attn": True},
    options=UNTIED | {"bias": "blk.0.attn_qkv.bias", "two_norms": "blk.0.attn_norm_2.weight"},
    config_options=("bias",),
)
BLOOM = Architecture(
    "BloomForCausalLM",
    "bloom",
    (
        Row("token_embd", "transformer.word_embeddings", "vocab hidden"),
        Row("token_embd_norm", "transformer.word_embeddings_layernorm", "hidden", bias="always"),
        Row("output_norm", "transformer.ln_f", "hidden", bias="always"),
        Row("output", "lm_head", "vocab hidden", when="untied"),
    ),
    (
        Block(
            "blk.{n}.",
            "transformer.h.{n}.",
            (
                *norms(bias="always"),
                Row(
                    "attn_qkv",
                    "self_attention.query_key_value",
                    "qkv hidden",
                    bias="always",
                    change="ungrouped_qkv",
                ),
                Row("attn_output", "self_attention.dense", "hidden q", bias="always"),
                *mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", bias="always"),
            ),
        ),
    ),
    keys={
        "hidden": "hidden_size",
        "layers": "n_layer",
        "heads": "n_head",
        "eps": "layer_norm_epsilon",
    },
    constants={"apply_residual_connection_post_layernorm": False},
    options=UNTIED,
    rotary="none",
)
GPT2 = Architecture(
    "GPT2LMHeadModel",
    "gpt2",
    (
        Row("token_embd", "transformer.wte", "vocab hidden"),
        Row("position_embd", "transformer.wpe", "context hidden"),
        Row("output_norm", "transformer.ln_f", "hidden", bias="always"),
        Row("output", "lm_head", "vocab hidden", when="untied"),
    ),
    (
        Block(
            "blk.{n}.",
            "transformer.h.{n}.",
            (
                Row("attn_norm", "ln_1", "hidden", bias="always"),
                Row("ffn_norm", "ln_2", "hidden", bias="always"),
                Row("attn_qkv", "attn.c_attn", "qkv hidden", bias="always", change="transposed"),
                Row("attn_output", "attn.c_proj", "hidden q", bias="always", change="transposed"),
                Row("ffn_up", "mlp.c_fc", "intermediate hidden", "", "always", "transposed"),
                Row("ffn_down", "mlp.c_proj", "hidden intermediate", "", "always", "transposed"),
            ),
        ),
    ),
    keys={
        "hidden": "n_embd",
        "intermediate": "n_inner",
        "layers": "n_layer",
        "heads": "n_head",
        "context": "n_positions",
        "eps": "layer_norm_epsilon",
    },
    constants={"activation_function": "gelu_new"},
    options=UNTIED,
    rotary="none",
)
MAMBA = Architecture(
    "MambaForCausalLM",
    "mamba",
    (
        Row("token_embd", "backbone.embeddings", "vocab hidden"),
        Row("output_norm", "backbone.norm_f", "hidden"),
        Row("output", "lm_head", "vocab hidden", when="untied"),
    ),
    (
        Block(
            "blk.{n}.",
            "backbone.layers.{n}.",
            (
                Row("attn_norm", "norm", "hidden"),
                Row("ssm_in", "mixer.in_proj", "inner_twice hidden", bias="use_bias"),
                Row("ssm_conv1d", "mixer.conv1d", "inner 1 kernel", bias="use_conv_bias"),
                Row("ssm_x", "mixer.x_proj", "time_and_states inner"),
                Row("ssm_dt", "mixer.dt_proj", "inner time", bias="always"),
                Row("ssm_a", "mixer.A_log", "inner state", "", "never", "minus_exp", ("", "")),
                Row("ssm_d", "mixer.D", "inner", suffix=("", "")),
                Row("ssm_out", "mixer.out_proj", "hidden inner", bias="use_bias"),
            ),
        ),
    ),
    keys={
        "hidden": "hidden_size",
        "layers": "num_hidden_layers",
        "eps": "layer_norm_epsilon",
        "inner": "intermediate_size",
        "kernel": "conv_kernel",
        "state": "state_size",
        "time": "time_step_rank",
    },
    constants=SILU,
    options=UNTIED | {"use_bias": "blk.0.ssm_in.bias", "use_conv_bias": "blk.0.ssm_conv1d.bias"},
    config_options=("use_bias", "use_conv_bias"),
    rotary="none",
)
LFM2 = Architecture(
    "Lfm2ForCausalLM",
    "lfm2",
    (
        Row("token_embd", "model.embed_tokens", "vocab hidden"),
        Row("token_embd_norm", "model.embedding_norm", "hidden"),
        Row("output", "lm_head", "vocab hidden", when="untied"),
    ),
    (
        Block(
            "blk.{n}.",
            "model.layers.{n}.",
            (
                Row("attn_norm", "operator_norm", "hidden"),
                Row("ffn_norm", "ffn_norm", "hidden"),
                Row("shortconv.conv", "conv.conv", "hidden 1 kernel", "conv", "conv_bias"),
                Row("shortconv.in_proj", "conv.in_proj", "conv_in hidden", "conv", "conv_bias"),
                Row("shortconv.out_proj", "conv.out_proj", "hidden hidden", "conv", "conv_bias"),
                Row("attn_q", "self_attn.q_proj", "q hidden", "full_attention"),
                Row("attn_k", "self_attn.k_proj", "kv hidden", "full_attention"),
                Row("attn_v", "self_attn.v_proj", "kv hidden", "full_attention"),
                Row("attn_output", "self_attn.out_proj", "hidden q", "full_attention"),
                Row("attn_q_norm", "self_attn.q_layernorm", "head", "full_attention"),
                Row("attn_k_norm", "self_attn.k_layernorm", "head", "full_attention"),
                Row("ffn_gate", "feed_forward.w1", "intermediate hidden"),
                Row("ffn_up", "feed_forward.w3", "intermediate hidden"),
                Row("ffn_down", "feed_forward.w2", "hidden intermediate"),
            ),
        ),
    ),
    keys=keys_without("head", eps="norm_eps", kernel="conv_L_cache"),
    constants={"block_auto_adjust_ff_dim": False},
    options=UNTIED,
)


def _t5_attention(gguf: str, hf: str) -> tuple[Row, ...]:
    return (
        Row(f"{gguf}_q", f"{hf}.q", "q hidden"),
        Row(f"{gguf}_k", f"{hf}.k", "q hidden"),
        Row(f"{gguf}_v", f"{hf}.v", "q hidden"),
        Row(f"{gguf}_o", f"{hf}.o", "hidden q"),
    )


def _t5_self_attention(biases: str) -> tuple[Row, ...]:
    bias = "0.SelfAttention.relative_attention_bias"
    return (
        Row("attn_norm", "0.layer_norm", "hidden"),
        *_t5_attention("attn", "0.SelfAttention"),
        Row("attn_rel_b", bias, "buckets heads", when=biases),
    )


def _t5_mlp(layer: int) -> tuple[Row, ...]:
    hf = f"{layer}.DenseReluDense"
    return (
        Row("ffn_norm", f"{layer}.layer_norm", "hidden"),
        Row("ffn_gate", f"{hf}.wi_0", "intermediate hidden", when="gated"),
        Row("ffn_up", f"{hf}.wi_1", "intermediate hidden", when="gated"),
        Row("ffn_up", f"{hf}.wi", "intermediate hidden", when="not gated"),
        Row("ffn_down", f"{hf}.wo", "hidden intermediate"),
    )


def _t5_encoder(biases: str) -> Block:
    rows = (*_t5_self_attention(biases), *_t5_mlp(1))
    return Block("enc.blk.{n}.", "encoder.block.{n}.layer.", rows)


def _t5_decoder(biases: str) -> Block:
    cross = (
        Row("cross_attn_norm", "1.layer_norm", "hidden"),
        *_t5_attention("cross_attn", "1.EncDecAttention"),
    )
    rows = (*_t5_self_attention(biases), *cross, *_t5_mlp(2))
    return Block("dec.blk.{n}.", "decoder.block.{n}.layer.", rows, count="decoder_layers")


T5_ENCODER = Architecture(
    "T5EncoderModel",
    "t5",
    (
        Row("token_embd", "shared", "vocab hidden"),
        Row("enc.output_norm", "encoder.final_layer_norm", "hidden"),
    ),
    (_t5_encoder("first"),),
    keys={
        "hidden": "d_model",
        "intermediate": "d_ff",
        "layers": "num_layers",
        "heads": "num_heads",
        "head": "d_kv",
        "eps": "layer_norm_epsilon",
        "buckets": "relative_attention_num_buckets",
    },
    options={"untied": HEAD, "gated": "enc.blk.0.ffn_gate.weight"},
    rotary="none",
)
UMT5_ENCODER = replace(
    T5_ENCODER, hf_class="UMT5EncoderModel", model_type="umt5", blocks=(_t5_encoder(""),)
)
T5 = replace(
    T5_ENCODER,
    hf_class="T5ForConditionalGeneration",
    outer=(
        *T5_ENCODER.outer,
        Row("dec.output_norm", "decoder.final_layer_norm", "hidden"),
        Row("output", "lm_head", "vocab hidden", when="untied"),
    ),
    blocks=(_t5_encoder("first"), _t5_decoder("first")),
    keys=T5_ENCODER.keys | {"decoder_layers": "num_decoder_layers"},  # type: ignore[operator]
)
UMT5 = replace(
    T5,
    hf_class="UMT5ForConditionalGeneration",
    model_type="umt5",
    blocks=(_t5_encoder(""), _t5_decoder("")),
)

_FULL, _LINEAR = "full_attention", "linear_attention"
_QWEN35_ATTENTION = (
    Row("attn_norm", "input_layernorm", "hidden", change="plus_one"),
    Row("post_attention_norm", "post_attention_layernorm", "hidden", change="plus_one"),
    Row("attn_q", "self_attn.q_proj", "q_and_gate hidden", _FULL),
    Row("attn_k", "self_attn.k_proj", "kv hidden", _FULL),
    Row("attn_v", "self_attn.v_proj", "kv hidden", _FULL),
    Row("attn_output", "self_attn.o_proj", "hidden q", _FULL),
    Row("attn_q_norm", "self_attn.q_norm", "head", _FULL, change="plus_one"),
    Row("attn_k_norm", "self_attn.k_norm", "head", _FULL, change="plus_one"),
    Row("attn_qkv", "linear_attn.in_proj_qkv", "linear_qkv hidden", _LINEAR, change="tiled_qkv"),
    Row("attn_gate", "linear_attn.in_proj_z", "values hidden", _LINEAR, change="tiled_values"),
    Row("ssm_alpha", "linear_attn.in_proj_a", "value_heads hidden", _LINEAR, change="tiled_heads"),
    Row("ssm_beta", "linear_attn.in_proj_b", "value_heads hidden", _LINEAR, change="tiled_heads"),
    Row("ssm_conv1d", "linear_attn.conv1d", "linear_qkv 1 kernel", _LINEAR, change="tiled_qkv"),
    Row(
        "ssm_dt",
        "linear_attn.dt_bias",
        "value_heads",
        _LINEAR,
        change="tiled_heads",
        suffix=(".bias", ""),
    ),
    Row(
        "ssm_a",
        "linear_attn.A_log",
        "value_heads",
        _LINEAR,
        change="tiled_heads minus_exp",
        suffix=("", ""),
    ),
    Row("ssm_norm", "linear_attn.norm", "value_head", _LINEAR),
    Row("ssm_out", "linear_attn.out_proj", "hidden values", _LINEAR, change="tiled_columns"),
)
QWEN35 = Architecture(
    "Qwen3_5ForCausalLM",
    "qwen3_5_text",
    outer(norm_change="plus_one"),
    (Block("blk.{n}.", "model.layers.{n}.", (*_QWEN35_ATTENTION, *gated_mlp())),),
    keys=keys_without(
        kernel="linear_conv_kernel_dim",
        key_head="linear_key_head_dim",
        value_head="linear_value_head_dim",
        key_heads="linear_num_key_heads",
        value_heads="linear_num_value_heads",
    ),
    constants=SILU | {"attention_bias": False},
    options=UNTIED,
    rotary="part",
)
QWEN35_MOE = replace(
    QWEN35,
    hf_class="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    blocks=(
        Block(
            "blk.{n}.",
            "model.layers.{n}.",
            (*_QWEN35_ATTENTION, *QWEN_EXPERTS, *SHARED_EXPERT),
        ),
    ),
)
