"""The architectures that are read from GGUF: what each tensor is called, its shape and its changes.

One row of `ARCHITECTURES` an architecture, one `Row` a kind of tensor. A row names its axes; their
sizes follow from the metadata (`gguf_config.py`): a file has exactly these tensors or is refused.

    when    "" always; an option, "not " and an option; a type of layer; "first" for layer 0
    bias    the same, for a bias beside the weight; "always"
    change  what a converter did to the values, undone by `gguf_restore.py`

Source: the converters of llama.cpp, at
https://github.com/ggml-org/llama.cpp/tree/a458664fc83b6513baea7adafcb0ef0626b006f8
and the names that transformers 5.24 saves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

EMBEDDING, HEAD = "token_embd.weight", "output.weight"


@dataclass(frozen=True)
class Row:
    """A kind of tensor.

    Args:
        gguf: GGUF name within its block; two, if transformers joins them into one parameter.
        hf: Hugging Face name within its block. "{e}" makes one tensor of each entry of the first
            axis.
        axes: Names or numbers of the sizes, slowest first. GGUF leaves axes of 1 out.
        when: When the tensor is there.
        bias: When there is a bias, of the first axis, beside it.
        change: What the converter did, see `gguf_restore.py`.
        suffix: Ends of the GGUF name and of the Hugging Face name.
    """

    gguf: str
    hf: str
    axes: str
    when: str = ""
    bias: str = "never"
    change: str = ""
    suffix: tuple[str, str] = (".weight", ".weight")


@dataclass(frozen=True)
class Block:
    """Layers of one kind: "{n}" in the prefixes is the number of the layer."""

    gguf: str
    hf: str
    rows: tuple[Row, ...]
    count: str = "layers"


KEYS = MappingProxyType(
    {
        "hidden": "hidden_size",
        "intermediate": "intermediate_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "head": "head_dim",
        "context": "max_position_embeddings",
        "eps": "rms_norm_eps",
    }
)


@dataclass(frozen=True)
class Architecture:
    """What the files of an architecture hold, and the config they amount to.

    Args:
        hf_class: Model class in transformers.
        model_type: `model_type` of its config.
        outer: Tensors outside of layers.
        blocks: Kinds of layers.
        keys: Config key of each size; sizes without one have none.
        constants: Config entries that hold for all models, or that llama.cpp assumes.
        options: GGUF tensor that shows an option. Options with the name of a config key go there.
        config_options: Options that are config keys.
        rotary: How much of a head is rotated.
    """

    hf_class: str
    model_type: str
    outer: tuple[Row, ...]
    blocks: tuple[Block, ...]
    keys: Mapping[str, str] = field(default_factory=lambda: KEYS)
    constants: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    config_options: tuple[str, ...] = ()
    rotary: Literal["all", "part", "none", "by layer"] = "all"


def keys_without(*names: str, **changed: str) -> dict[str, str]:
    """Return the config keys of llama without some sizes, and with other keys for some."""
    return {key: value for key, value in (KEYS | changed).items() if key not in names}


def outer(*, norm_bias: str = "never", norm_change: str = "") -> tuple[Row, ...]:
    """Return the rows outside of layers: embedding, last norm, head."""
    return (
        Row("token_embd", "model.embed_tokens", "vocab hidden"),
        Row("output_norm", "model.norm", "hidden", bias=norm_bias, change=norm_change),
        Row("output", "lm_head", "vocab hidden", when="untied"),
    )


def norms(*, bias: str = "never", change: str = "", second: str = "ffn_norm") -> tuple[Row, ...]:
    """Return the norms before attention and before the feed-forward layer."""
    return (
        Row("attn_norm", "input_layernorm", "hidden", bias=bias, change=change),
        Row(second, "post_attention_layernorm", "hidden", bias=bias, change=change),
    )


def attention(
    *, bias: str = "never", out_bias: str = "never", interleaved: bool = False
) -> tuple[Row, ...]:
    """Return the four projections of attention."""
    q_change, k_change = ("interleaved_q", "interleaved_k") if interleaved else ("", "")
    return (
        Row("attn_q", "self_attn.q_proj", "q hidden", bias=bias, change=q_change),
        Row("attn_k", "self_attn.k_proj", "kv hidden", bias=bias, change=k_change),
        Row("attn_v", "self_attn.v_proj", "kv hidden", bias=bias),
        Row("attn_output", "self_attn.o_proj", "hidden q", bias=out_bias),
    )


def head_norms(*, change: str = "") -> tuple[Row, ...]:
    """Return the norms of each head of q and of k."""
    return (
        Row("attn_q_norm", "self_attn.q_norm", "head", change=change),
        Row("attn_k_norm", "self_attn.k_norm", "head", change=change),
    )


def gated_mlp(*, bias: str = "never") -> tuple[Row, ...]:
    """Return a feed-forward layer with a gate."""
    return (
        Row("ffn_gate", "mlp.gate_proj", "intermediate hidden", bias=bias),
        Row("ffn_up", "mlp.up_proj", "intermediate hidden", bias=bias),
        Row("ffn_down", "mlp.down_proj", "hidden intermediate", bias=bias),
    )


def mlp(up: str, down: str, *, bias: str) -> tuple[Row, ...]:
    """Return a feed-forward layer without a gate."""
    return (
        Row("ffn_up", up, "intermediate hidden", bias=bias),
        Row("ffn_down", down, "hidden intermediate", bias=bias),
    )


def experts(module: str, gate: str, up: str, down: str, router: str) -> tuple[Row, ...]:
    """Return a router and its experts."""
    return (
        Row("ffn_gate_inp", router, "experts hidden"),
        Row("ffn_gate_exps", f"{module}.{{e}}.{gate}", "experts moe hidden"),
        Row("ffn_up_exps", f"{module}.{{e}}.{up}", "experts moe hidden"),
        Row("ffn_down_exps", f"{module}.{{e}}.{down}", "experts hidden moe"),
    )


QWEN_EXPERTS = experts("mlp.experts", "gate_proj", "up_proj", "down_proj", "mlp.gate")
MIXTRAL_EXPERTS = experts(
    "block_sparse_moe.experts", "w1", "w3", "w2", router="block_sparse_moe.gate"
)
SHARED_EXPERT = (
    Row("ffn_gate_inp_shexp", "mlp.shared_expert_gate", "1 hidden"),
    Row("ffn_gate_shexp", "mlp.shared_expert.gate_proj", "shared hidden"),
    Row("ffn_up_shexp", "mlp.shared_expert.up_proj", "shared hidden"),
    Row("ffn_down_shexp", "mlp.shared_expert.down_proj", "hidden shared"),
)


def decoder(*rows: Row) -> tuple[Block, ...]:
    """Return layers that are called as those of llama."""
    return (Block("blk.{n}.", "model.layers.{n}.", rows),)


SILU = MappingProxyType({"hidden_act": "silu"})
UNTIED = MappingProxyType({"untied": HEAD})
ATTENTION_BIAS = MappingProxyType(UNTIED | {"attention_bias": "blk.0.attn_q.bias"})
BOTH_BIASES = MappingProxyType(ATTENTION_BIAS | {"mlp_bias": "blk.0.ffn_gate.bias"})
