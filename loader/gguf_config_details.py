"""What is special in the config of one architecture.

A function of `DETAILS` returns config entries that replace or join those that all architectures
share, and completes the sizes of axes and the options.

Source: llama.cpp, its `load_hparams` for defaults and its converters, at
https://github.com/ggml-org/llama.cpp/tree/a458664fc83b6513baea7adafcb0ef0626b006f8
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quantload.errors import FormatMismatch, UnsupportedVariant
from quantload.loader.gguf_facts import Facts, read_experts
from quantload.loader.gguf_gemma4 import gemma4
from quantload.loader.gguf_metadata import OTHER_SOURCE
from quantload.loader.gguf_rope import LONG_FACTORS

_SOFTMAX, _SIGMOID, _SOFTMAX_WEIGHT = 1, 2, 3  # `expert_gating_func`


def _qwen2_moe(facts: Facts) -> dict[str, Any]:
    config = _qwen3_moe(facts)
    gate = facts.tensors.get("blk.0.ffn_gate_shexp.weight")
    width = gate.shape[0] if gate is not None else None
    facts.sizes["shared"] = facts.metadata.count("expert_shared_feed_forward_length", width)
    facts.metadata.ignore("expert_shared_count")
    return config | {"shared_expert_intermediate_size": facts.sizes["shared"]}


def _qwen3_moe(facts: Facts) -> dict[str, Any]:
    count, used = read_experts(facts)
    facts.metadata.refuse_unless("expert_gating_func", _SOFTMAX, "another choice of experts")
    return {
        "num_experts": count,
        "num_experts_per_tok": used,
        "moe_intermediate_size": facts.sizes["moe"],
    }


def _mixtral(facts: Facts) -> dict[str, Any]:
    count, used = read_experts(facts)
    facts.metadata.refuse_unless("expert_gating_func", _SOFTMAX, "another choice of experts")
    facts.sizes["intermediate"] = facts.sizes["moe"]
    return {"num_local_experts": count, "num_experts_per_tok": used}


def _minimax(facts: Facts) -> dict[str, Any]:
    count, used = read_experts(facts)
    facts.metadata.refuse_unless("expert_gating_func", _SIGMOID, "another choice of experts")
    facts.sizes["intermediate"] = facts.sizes["moe"]
    rotated = facts.metadata.count("rope.dimension_count", facts.sizes["head"])
    return {"num_local_experts": count, "num_experts_per_tok": used, "rotary_dim": rotated}


def _gpt_oss(facts: Facts) -> dict[str, Any]:
    count, used = read_experts(facts)
    facts.metadata.refuse_unless("expert_gating_func", _SOFTMAX_WEIGHT, "another choice of experts")
    facts.sizes["intermediate"] = facts.sizes["moe"]
    rope = dict(facts.rope)
    if rope["rope_type"] == "yarn":
        # What the model was trained with; no file says so, all models have it.
        rope = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False} | rope
    kinds = ("sliding_attention", "full_attention")
    return {
        "num_local_experts": count,
        "num_experts_per_tok": used,
        "sliding_window": facts.metadata.count("attention.sliding_window"),
        "layer_types": [kinds[layer % 2] for layer in range(facts.sizes["layers"])],
        "rope_parameters": rope,
    }


def _gemma_scale(facts: Facts, layers_of_27b: int) -> int:
    """Return `query_pre_attn_scalar`, which no file says.

    It is 256 in all published models but those of 27B, which have the hidden size by head.
    """
    is_27b = facts.sizes["layers"] == layers_of_27b
    return facts.sizes["hidden"] // facts.sizes["heads"] if is_27b else 256


def _gemma2(facts: Facts) -> dict[str, Any]:
    kinds = ("sliding_attention", "full_attention")
    return {
        "sliding_window": facts.metadata.count("attention.sliding_window", 4096),
        "attn_logit_softcapping": facts.metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": facts.metadata.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _gemma_scale(facts, layers_of_27b=46),
        "layer_types": [kinds[layer % 2] for layer in range(facts.sizes["layers"])],
    }


def _gemma3(facts: Facts) -> dict[str, Any]:
    windowed = facts.metadata.has("attention.sliding_window")
    kinds = ["sliding_attention"] * 5 + ["full_attention"] if windowed else ["full_attention"]
    rope = dict(facts.rope)
    if not facts.metadata.has("rope.freq_base"):
        rope["rope_theta"] = 1e6
    local = facts.metadata.number("rope.freq_base_swa", 10000.0)
    capping = None
    if facts.metadata.has("final_logit_softcapping"):
        capping = facts.metadata.number("final_logit_softcapping")
    config: dict[str, Any] = {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": capping,
        "query_pre_attn_scalar": _gemma_scale(facts, layers_of_27b=62),
        "layer_types": [kinds[layer % len(kinds)] for layer in range(facts.sizes["layers"])],
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }
    if windowed:
        config["sliding_window"] = facts.metadata.count("attention.sliding_window")
    return config


def _stablelm(facts: Facts) -> dict[str, Any]:
    parallel = not facts.options["second_norm"]
    if facts.metadata.value("use_parallel_residual", parallel) != parallel:
        raise FormatMismatch(
            f"metadata key `{facts.metadata.full('use_parallel_residual')}` is `{not parallel}`, "
            f"but the layers have {'one norm' if parallel else 'two norms'}, "
            f"in `{facts.metadata.path}`"
        )
    return {"use_parallel_residual": parallel}


def _phi3(facts: Facts) -> dict[str, Any]:
    original = facts.metadata.count("rope.scaling.original_context_length", facts.sizes["context"])
    window = facts.metadata.count("attention.sliding_window", 0, least=0)
    if LONG_FACTORS not in facts.tensors:
        facts.metadata.ignore("rope.scaling.attn_factor")
    return {
        "original_max_position_embeddings": original,
        "sliding_window": window if window else None,
    }


def _falcon(facts: Facts) -> dict[str, Any]:
    heads, kv_heads = facts.sizes["heads"], facts.sizes["kv_heads"]
    is_new = facts.options["two_norms"] or 1 < kv_heads < heads
    config = {"new_decoder_architecture": is_new, "multi_query": kv_heads == 1}
    return config | ({"num_ln_in_parallel_attn": 1 + facts.options["two_norms"]} if is_new else {})


def _four_times_hidden(facts: Facts) -> dict[str, Any]:
    width, expected = facts.sizes["intermediate"], 4 * facts.sizes["hidden"]
    if width != expected:
        raise UnsupportedVariant(
            f"metadata key `{facts.metadata.full('feed_forward_length')}` is `{width}`, expected "
            f"`{expected}`, the only width that the architecture can have, "
            f"in `{facts.metadata.path}`"
        )
    return {}


def _mamba(facts: Facts) -> dict[str, Any]:
    facts.metadata.refuse_unless(
        "ssm.dt_b_c_rms", neutral=False, meaning="the architecture FalconMamba"
    )
    for key in ("feed_forward_length", "attention.head_count", "attention.head_count_kv"):
        facts.metadata.refuse_unless(key, 0, "a layer besides the state space")
    inner, state = facts.metadata.count("ssm.inner_size"), facts.metadata.count("ssm.state_size")
    time = facts.metadata.count("ssm.time_step_rank")
    facts.sizes.update({"inner": inner, "inner_twice": 2 * inner, "state": state, "time": time})
    facts.sizes.update(
        {
            "time_and_states": time + 2 * state,
            "kernel": facts.metadata.count("ssm.conv_kernel"),
        }
    )
    if inner % facts.sizes["hidden"]:
        raise UnsupportedVariant(
            f"metadata key `{facts.metadata.full('ssm.inner_size')}` is `{inner}`, expected a "
            f"multiple of the hidden size `{facts.sizes['hidden']}`, in `{facts.metadata.path}`",
            hint=OTHER_SOURCE,
        )
    return {"expand": inner // facts.sizes["hidden"]}


def _lfm2(facts: Facts) -> dict[str, Any]:
    kv_heads = facts.metadata.counts("attention.head_count_kv", facts.sizes["layers"])
    if len(set(kv_heads) - {0}) != 1:
        raise UnsupportedVariant(
            f"metadata key `{facts.metadata.full('attention.head_count_kv')}` is `{kv_heads}`, "
            f"expected one count and 0 in layers without attention, in `{facts.metadata.path}`"
        )
    facts.sizes["kernel"], facts.sizes["conv_in"] = (
        facts.metadata.count("shortconv.l_cache"),
        3 * facts.sizes["hidden"],
    )
    has_bias = any(name.endswith(".shortconv.in_proj.bias") for name in facts.tensors)
    facts.options["conv_bias"] = has_bias
    return {
        "layer_types": ["full_attention" if heads else "conv" for heads in kv_heads],
        "conv_bias": has_bias,
    }


def _t5(facts: Facts) -> dict[str, Any]:
    facts.sizes["buckets"] = facts.metadata.count("attention.relative_buckets_count")
    config: dict[str, Any] = {
        "feed_forward_proj": "gated-gelu" if facts.options["gated"] else "relu"
    }
    if facts.metadata.architecture == "t5":
        facts.sizes["decoder_layers"] = facts.metadata.count(
            "decoder_block_count", facts.sizes["layers"]
        )
        start = facts.metadata.count("decoder_start_token_id", 0, least=0)
        config["decoder_start_token_id"] = start
    else:
        facts.metadata.ignore("decoder_start_token_id", "decoder_block_count")
        config["tie_word_embeddings"] = True
    return config


def _qwen35(facts: Facts) -> dict[str, Any]:
    value_heads, key_heads = (
        facts.metadata.count("ssm.time_step_rank"),
        facts.metadata.count("ssm.group_count"),
    )
    key_head, values = (
        facts.metadata.count("ssm.state_size"),
        facts.metadata.count("ssm.inner_size"),
    )
    if value_heads % key_heads or values % value_heads:
        raise UnsupportedVariant(
            f"`{value_heads}` value heads of together `{values}` and `{key_heads}` key heads, "
            f"expected multiples, in `{facts.metadata.path}`"
        )
    facts.sizes.update(
        {
            "key_heads": key_heads,
            "value_heads": value_heads,
            "key_head": key_head,
            "value_head": values // value_heads,
            "values": values,
            "linear_qkv": 2 * key_head * key_heads + values,
            "kernel": facts.metadata.count("ssm.conv_kernel"),
            "q_and_gate": 2 * facts.sizes["q"],
        }
    )
    extra = facts.metadata.count("nextn_predict_layers", 0, least=0)
    facts.sizes["layers"] -= extra
    facts.sizes["prediction_layers"] = extra  # they follow, and transformers does not build them
    interval = facts.metadata.count("full_attention_interval", 4)
    kinds = ("linear_attention", "full_attention")
    sections = [n for n in facts.metadata.counts("rope.dimension_sections", 4) if n]
    rope = dict(facts.rope)
    part = facts.metadata.count("rope.dimension_count", facts.sizes["head"]) / facts.sizes["head"]
    return {
        "layer_types": [
            kinds[(layer + 1) % interval == 0] for layer in range(facts.sizes["layers"])
        ],
        "rope_parameters": rope
        | {
            "partial_rotary_factor": part,
            "mrope_section": sections,
            "mrope_interleaved": True,
        },
    }


def _qwen35_moe(facts: Facts) -> dict[str, Any]:
    config = _qwen35(facts)
    return config | _qwen2_moe(facts)


DETAILS: Mapping[str, Callable[[Facts], dict[str, Any]]] = {  # by `model_type`
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "qwen3_5_text": _qwen35,
    "qwen3_5_moe_text": _qwen35_moe,
    "minimax_m2": _minimax,
    "gpt_oss": _gpt_oss,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gemma4_text": gemma4,
    "stablelm": _stablelm,
    "phi3": _phi3,
    "falcon": _falcon,
    "bloom": _four_times_hidden,
    "mamba": _mamba,
    "lfm2": _lfm2,
    "t5": _t5,
    "umt5": _t5,
}
