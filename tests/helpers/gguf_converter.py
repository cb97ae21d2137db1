"""Write a transformers model as GGUF in the way of llama.cpp's converters.

An oracle for the reader: tensors are called by `gguf.TensorNameMap`, and every change of values and
every metadata key is written out anew, after `conversion/*.py` of
https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

import copy
import re
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from tiny_gguf import add_value, permuted

NORM_SHIFTED = ("gemma", "gemma2", "gemma3", "nemotron", "qwen35", "qwen35moe")
ALWAYS_FLOAT32 = ("norm", "conv.", "conv1d", "ssm_a", "_inp", "rel_b", ".bias", "position_embd")
STACKED = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight|(.*_layernorm)\.norms\.(\d+)\.weight")


def hub_tensors(model) -> dict[str, torch.Tensor]:
    """Return the tensors of a model as `save_pretrained` names and shapes them."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return {
            name: tensor
            for file in sorted(Path(folder).glob("*.safetensors"))
            for name, tensor in load_file(file).items()
        }


def write_as_gguf(
    model,
    path: Path,
    architecture: str,
    *,
    weight_type: str = "F32",
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
) -> None:
    """Write a model.

    Args:
        model: A transformers model.
        path: File to write.
        architecture: `general.architecture`.
        weight_type: GGML type of matrices whose rows are whole blocks.
        metadata: Keys under the architecture that replace or join the usual ones.
        extra: Further tensors, by GGUF name.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_token_list([f"<{number}>" for number in range(config.vocab_size)])
    for key, value in (metadata_of(config, architecture) | (metadata or {})).items():
        add_value(writer, f"{architecture}.{key}", value)
    kind = gguf.GGMLQuantizationType[weight_type]
    size, _ = gguf.GGML_QUANT_SIZES[kind]
    for name, values in (gguf_tensors(model, architecture) | (extra or {})).items():
        quantized = values.ndim >= 2 and values.shape[-1] % size == 0
        quantized &= not any(part in name for part in ALWAYS_FLOAT32)
        used = kind if quantized else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(values, used), raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_tensors(model, architecture: str) -> dict[str, np.ndarray]:
    """Return the tensors of a model by GGUF name, float32."""
    config = model.config
    layers = max(config.num_hidden_layers, getattr(config, "num_decoder_layers", None) or 0)
    number = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(number, layers)
    found: dict[str, np.ndarray] = {}
    for name, tensor in stacked(hub_tensors(model)).items():
        values = tensor.float().numpy()
        for changed_name, changed in changed_tensors(name, values, config, architecture):
            gguf_name = names.get_name(changed_name, try_suffixes=(".weight", ".bias"))
            layer = re.search(r"layers\.(\d+)\.router", changed_name)
            if layer and changed_name.endswith("scale"):  # named by hand in the converter
                stem = "ffn_down_exps" if "per_expert" in changed_name else "ffn_gate_inp"
                gguf_name = f"blk.{layer[1]}.{stem}.scale"
            assert gguf_name is not None, changed_name
            found[gguf_name] = np.ascontiguousarray(changed.squeeze())
    if architecture == "gemma4":
        part = config.rope_parameters["full_attention"]["partial_rotary_factor"]
        head = config.per_layer_config[config.layer_types.index("full_attention")].head_dim
        turning = int(head * part / 2)
        factors = [1.0] * turning + [1e30] * (head // 2 - turning)
        found["rope_freqs.weight"] = np.array(factors, np.float32)
    return found


def stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stack the matrices of experts, and the norms of StableLM's heads."""
    result: dict[str, Any] = {}
    for name, tensor in tensors.items():
        match = STACKED.fullmatch(name)
        if match is None:
            result[name] = tensor
            continue
        module, number, leaf = match.groups()[:3] if match[1] else (*match.groups()[3:], "")
        leaf = f".{leaf}" if leaf else ""
        result.setdefault(f"{module}{leaf}.weight", {})[int(number)] = tensor
    return {
        name: torch.stack([value[n] for n in sorted(value)]) if isinstance(value, dict) else value
        for name, value in result.items()
    }


def changed_tensors(name, values, config, architecture):
    """Return what a converter makes of one tensor: pairs of a name and values."""
    if architecture == "llama" and re.search(r"\.[qk]_proj\.", name):
        heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
        values = permuted(values, heads)
    if architecture in NORM_SHIFTED and name.endswith("norm.weight") and "linear_attn" not in name:
        values = values + np.float32(1)
    if name.endswith("A_log"):
        values = -np.exp(values)
    if ("conv1d" in name and values.ndim == 3) or ".conv.conv." in name:
        values = values.squeeze(1)
    if architecture == "gpt2" and re.search(r"\.c_(attn|proj|fc)\.weight", name):
        values = values.T
    if architecture in ("bloom", "falcon") and "query_key_value" in name:
        values = ungrouped(values, config, architecture)
    if architecture == "gpt-oss":
        return gpt_oss_tensors(name, values)
    if architecture.startswith("qwen35"):
        return [qwen35_tensor(name, values, config)]
    if architecture == "gemma4":
        return [gemma4_tensor(name, values)]
    name = name.removeprefix("transformer.") if architecture == "bloom" else name
    return [(name.replace("e_score_correction_bias", "e_score_correction.bias"), values)]


def ungrouped(values, config, architecture):
    heads = config.n_head if architecture == "bloom" else config.num_attention_heads
    groups = heads if architecture == "bloom" else config.num_kv_heads
    if architecture == "falcon" and config.multi_query and not config.new_decoder_architecture:
        groups = 1
    head = config.hidden_size // heads
    grouped = values.reshape(groups, heads // groups + 2, head, *values.shape[1:])
    parts = (grouped[:, :-2], grouped[:, -2:-1], grouped[:, -1:])
    return np.concatenate([part.reshape(-1, *values.shape[1:]) for part in parts])


def gpt_oss_tensors(name, values):
    if name.endswith("sinks"):
        return [(f"{name}.weight", values)]
    for end, leaf in (("_proj_bias", ".bias"), ("_proj", ".weight")):
        if ".experts." in name and name.endswith(end):
            stem = name.removesuffix(end.removeprefix("_proj"))
            if leaf == ".weight":
                values = values.swapaxes(1, 2)
            if "gate_up_proj" not in name:
                return [(stem + leaf, values)]
            gate, up = (stem.replace("gate_up", part) + leaf for part in ("gate", "up"))
            return [(gate, values[:, ::2]), (up, values[:, 1::2])]
    return [(name, values)]


def gemma4_tensor(name, values):
    if name.endswith(("layer_scalar", ".experts.gate_up_proj", ".experts.down_proj")):
        name += ".weight"
    return name, values


def qwen35_tensor(name, values, config):
    keys, count = config.linear_num_key_heads, config.linear_num_value_heads
    first = 2 * config.linear_key_head_dim * keys

    def tiled(rows):
        grouped = rows.reshape(keys, count // keys, -1, *rows.shape[1:])
        return grouped.swapaxes(0, 1).reshape(rows.shape)

    if "in_proj_qkv" in name or "conv1d" in name:
        values = np.concatenate((values[:first], tiled(values[first:])))
    elif re.search(r"in_proj_[zab]\.|A_log|dt_bias", name):
        values = tiled(values)
    elif "linear_attn.out_proj" in name:
        values = tiled(values.T).T
    return name.replace(".dt_bias", ".dt_proj.bias"), values


def metadata_of(config, architecture: str) -> dict[str, Any]:
    """Return metadata keys below the architecture, as the converter writes them."""

    if architecture == "gemma4":  # sizes of most layers; `_gemma4` has those that differ
        config = copy.deepcopy(config)
        config.allow_global_per_layer_attribute_access = True

    def first(*names):
        return next((v for n in names if (v := getattr(config, n, None)) is not None), None)

    hidden = first("hidden_size", "n_embd", "d_model")
    heads = first("num_attention_heads", "n_head", "num_heads")
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    values: dict[str, Any] = {
        "block_count": first("num_hidden_layers", "n_layer", "num_layers"),
        "context_length": first("max_position_embeddings", "n_positions") or 512,
        "embedding_length": hidden,
        "feed_forward_length": first("intermediate_size", "n_inner", "ffn_hidden_size", "d_ff")
        or 4 * hidden,
        "attention.head_count": heads,
        "attention.head_count_kv": first("num_key_value_heads", "num_kv_heads"),
        "vocab_size": config.vocab_size,
        "rope.freq_base": rope.get("rope_theta"),
        "expert_count": first("num_local_experts", "num_experts"),
        "expert_used_count": getattr(config, "num_experts_per_tok", None),
        "attention.layer_norm_rms_epsilon": first("rms_norm_eps"),
        "attention.layer_norm_epsilon": first(
            "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"
        ),
    }
    if (head := getattr(config, "head_dim", None)) is not None and architecture != "lfm2":
        values |= {"attention.key_length": head, "attention.value_length": head}
    if rope.get("rope_type") in ("linear", "yarn"):
        values |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope.get("rope_type") == "yarn":
        original = rope["original_max_position_embeddings"]
        values["rope.scaling.original_context_length"] = original
        values["rope.scaling.yarn_beta_fast"] = rope["beta_fast"]
        values["rope.scaling.yarn_beta_slow"] = rope["beta_slow"]
    special = SPECIAL.get(architecture)
    return values | (special(config, values, rope) if special else {})


def _partial(config, values, rope):
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {"rope.dimension_count": int(rope["partial_rotary_factor"] * head)}


def _moe(config, values, rope):
    return {"expert_feed_forward_length": config.moe_intermediate_size}


def _shared_moe(config, values, rope):
    width = config.shared_expert_intermediate_size
    return _moe(config, values, rope) | {"expert_shared_feed_forward_length": width}


def _gemma2(config, values, rope):
    return {
        "attn_logit_softcapping": config.attn_logit_softcapping,
        "final_logit_softcapping": config.final_logit_softcapping,
        "attention.sliding_window": config.sliding_window,
        "rope.freq_base": None,
    }


def _gemma3(config, values, rope):
    local = config.rope_parameters["sliding_attention"]["rope_theta"]
    return {"attention.sliding_window": config.sliding_window, "rope.freq_base_swa": local}


def _gemma4(config, values, rope):
    kinds = [kind == "sliding_attention" for kind in config.layer_types]
    full = config.per_layer_config[kinds.index(False)]
    kv_heads = getattr(full, "num_key_value_heads", config.num_key_value_heads)
    first_shared = len(kinds) - config.num_kv_shared_layers
    wide = config.use_double_wide_mlp
    return {
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input or 0,
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": kinds,
        "attention.key_length": full.head_dim,
        "attention.value_length": full.head_dim,
        "attention.key_length_swa": config.head_dim,
        "attention.value_length_swa": config.head_dim,
        "attention.head_count_kv": [config.num_key_value_heads if k else kv_heads for k in kinds],
        "feed_forward_length": [
            config.intermediate_size * (1 + (wide and layer >= first_shared))
            for layer in range(len(kinds))
        ],
        "rope.dimension_count": full.head_dim,
        "rope.dimension_count_swa": config.head_dim,
        "rope.freq_base_swa": config.rope_parameters["sliding_attention"]["rope_theta"],
        "expert_count": config.num_experts,
        "expert_used_count": config.top_k_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "final_logit_softcapping": config.final_logit_softcapping,
    }


def _gpt_oss(config, values, rope):
    return {
        "attention.sliding_window": config.sliding_window,
        "expert_feed_forward_length": config.intermediate_size,
    }


def _minimax(config, values, rope):
    return _partial(config, values, rope) | {
        "expert_feed_forward_length": config.intermediate_size,
        "expert_gating_func": 2,
    }


def _nemotron(config, values, rope):
    return _partial(config, values, rope) | {
        "rope.scaling.type": "none",
        "attention.layer_norm_epsilon": config.norm_eps,
    }


def _stablelm(config, values, rope):
    return _partial(config, values, rope) | {"use_parallel_residual": config.use_parallel_residual}


def _phi3(config, values, rope):
    return _partial(config, values, rope) | {
        "attention.sliding_window": config.sliding_window or 0,
        "rope.scaling.original_context_length": config.original_max_position_embeddings,
    }


def _falcon(config, values, rope):
    multi = config.multi_query and not config.new_decoder_architecture
    return {
        "tensor_data_layout": "jploski",
        "attention.head_count_kv": 1 if multi else config.num_kv_heads,
        "rope.freq_base": None,
    }


def _mamba(config, values, rope):
    return {
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
        "attention.layer_norm_epsilon": None,
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.inner_size": config.intermediate_size,
        "ssm.state_size": config.state_size,
        "ssm.time_step_rank": config.time_step_rank,
        "ssm.dt_b_c_rms": False,
    }


def _lfm2(config, values, rope):
    kinds = config.layer_types
    return {
        "attention.head_count_kv": [
            config.num_key_value_heads if kind == "full_attention" else 0 for kind in kinds
        ],
        "shortconv.l_cache": config.conv_L_cache,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
    }


def _t5(config, values, rope):
    return {
        "attention.key_length": config.d_kv,
        "attention.value_length": config.d_kv,
        "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
        "attention.relative_buckets_count": config.relative_attention_num_buckets,
        "decoder_start_token_id": 0,
        "decoder_block_count": config.num_decoder_layers,
    }


def _qwen35(config, values, rope):
    return _partial(config, values, rope) | {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
        "full_attention_interval": 2,
        "rope.dimension_sections": [*rope["mrope_section"], 0],
    }


SPECIAL = {
    "qwen2moe": _shared_moe,
    "qwen3moe": _moe,
    "qwen35": _qwen35,
    "qwen35moe": lambda *args: _qwen35(*args) | _shared_moe(*args),
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "gpt-oss": _gpt_oss,
    "minimax-m2": _minimax,
    "nemotron": _nemotron,
    "stablelm": _stablelm,
    "phi3": _phi3,
    "falcon": _falcon,
    "mamba": _mamba,
    "lfm2": _lfm2,
    "t5": _t5,
    "t5encoder": lambda *args: _t5(*args) | {"decoder_block_count": None},
}
