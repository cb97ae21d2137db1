"""Llama, written from quantload's layers: the example of docs/writing-a-model.md.

It loads any Llama checkpoint that quantload reads, quantized or not, on one process or several:

    import quantload
    import llama  # registers the class

    model = quantload.load("meta-llama/Llama-3.2-1B")
    hidden = model(input_ids, positions)         # tokens and positions [T] of all sequences
    logits = model.compute_logits(hidden[-1:])   # [1, V]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import quantload
from quantload import NameRules, Parallel
from quantload.layers.attend import attend
from quantload.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from quantload.layers.parallel_linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs of features (i, i + D / 2) of x [T, heads, D] by angles [T, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]


class LlamaAttention(nn.Module):
    """Attention with fewer heads of keys and values than of queries."""

    def __init__(self, config: Any, *, parallel: Parallel, prefix: str) -> None:  # noqa: ANN401
        super().__init__()
        self.head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            self.head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
            bias=config.attention_bias,
            parallel=parallel,
            prefix=f"{prefix}.qkv_proj",
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * self.head_dim,
            config.hidden_size,
            bias=config.attention_bias,
            parallel=parallel,
            prefix=f"{prefix}.o_proj",
        )

    def forward(
        self, positions: Tensor, hidden_states: Tensor, angles: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Map [T, hidden] to [T, hidden]; `angles` are cosines and sines [T, D]."""
        parts = self.qkv_proj(hidden_states).split(self.qkv_proj.part_sizes, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        mixed = attend(rotate(q, *angles), rotate(k, *angles), v, positions=positions)
        return self.o_proj(mixed.flatten(-2))  # type: ignore[no-any-return]


class LlamaMLP(nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, config: Any, *, parallel: Parallel, prefix: str) -> None:  # noqa: ANN401
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size,
            [config.intermediate_size] * 2,
            bias=config.mlp_bias,
            parallel=parallel,
            prefix=f"{prefix}.gate_up_proj",
        )
        self.down_proj = RowParallelLinear(
            config.intermediate_size,
            config.hidden_size,
            bias=config.mlp_bias,
            parallel=parallel,
            prefix=f"{prefix}.down_proj",
        )
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map [T, hidden] to [T, hidden]."""
        gate, up = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
        return self.down_proj(self.act_fn(gate) * up)  # type: ignore[no-any-return]


class LlamaDecoderLayer(nn.Module):
    """One block."""

    def __init__(self, config: Any, *, parallel: Parallel, prefix: str) -> None:  # noqa: ANN401
        super().__init__()
        self.self_attn = LlamaAttention(config, parallel=parallel, prefix=f"{prefix}.self_attn")
        self.mlp = LlamaMLP(config, parallel=parallel, prefix=f"{prefix}.mlp")
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, positions: Tensor, hidden_states: Tensor, angles: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Map [T, hidden] to [T, hidden]."""
        x = self.input_layernorm(hidden_states)
        x = hidden_states + self.self_attn(positions, x, angles)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class LlamaModel(nn.Module):
    """Embedding, blocks and the last norm."""

    def __init__(self, config: Any, *, parallel: Parallel, prefix: str) -> None:  # noqa: ANN401
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            parallel=parallel,
            prefix=f"{prefix}.embed_tokens",
        )
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(config, parallel=parallel, prefix=f"{prefix}.layers.{number}")
            for number in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config)  # transformers' knows all variants

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """Map rows [T, hidden] of the embedding to hidden states [T, hidden]."""
        cos, sin = self.rotary_emb(hidden_states, positions[None])
        for layer in self.layers:
            hidden_states = layer(positions, hidden_states, (cos[0], sin[0]))
        return self.norm(hidden_states)  # type: ignore[no-any-return]


@quantload.register_model("LlamaForCausalLM")
class LlamaForCausalLM(nn.Module):
    """The whole model.

    Args:
        config: transformers' `LlamaConfig`.
        parallel: This process among those that share layers.
        prefix: Dotted path of the model, "" if it is no part of another.
    """

    # checkpoints hold q, k, v and gate, up apart; here they are slots of one layer
    name_rules = NameRules(
        stacked={
            "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
        }
    )

    base_model_prefix = "model"  # base models are saved without it

    def __init__(self, config: Any, *, parallel: Parallel, prefix: str = "") -> None:  # noqa: ANN401
        super().__init__()
        start = f"{prefix}." if prefix else ""
        self.model = LlamaModel(config, parallel=parallel, prefix=f"{start}model")
        self.lm_head = ParallelLMHead(
            config.vocab_size, config.hidden_size, parallel=parallel, prefix=f"{start}lm_head"
        )
        if config.tie_word_embeddings:
            self.lm_head.tie_weights(self.model.embed_tokens)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Map tokens [T] to rows [T, hidden]."""
        return self.model.embed_tokens(input_ids)  # type: ignore[no-any-return]

    def forward(
        self, input_ids: Tensor, positions: Tensor, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        """Return hidden states [T, hidden].

        Args:
            input_ids: [T] tokens of all sequences, one after the other.
            positions: [T] position of each in its sequence, from 0.
            inputs_embeds: [T, hidden] in place of the rows of `input_ids`.
        """
        rows = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        return self.model(positions, rows)  # type: ignore[no-any-return]

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Map hidden states [T, hidden] to logits [T, vocabulary], in every process."""
        return self.lm_head(hidden_states)  # type: ignore[no-any-return]

    def load_weights(self, source: Any, **options: Any) -> None:  # noqa: ANN401
        """Fill the model; a model that needs nothing special can leave this method out."""
        quantload.load_weights(self, source, **options)
