"""A peer of bench_decode.py: a bf16 Llama in plain torch, compiled, over a static cache.

What gpt-fast (github.com/pytorch-labs/gpt-fast) does, with one change: not the whole model is
compiled but one block, whose code all blocks share, and the head. (All 32 blocks in one graph took
more than two minutes to compile.) Products of one row become kernels that Inductor writes and tunes
(`coordinate_descent_tuning`, as in gpt-fast); those of more rows are cuBLAS's. Query heads that
share a head of keys are queries of it, so that the cache is never repeated. A step is captured in
one CUDA graph by `Slot`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from llama_reference import LlamaShape, rotary_angles
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from quantload.runtime.step_model import CacheScales, StepCache


@dataclass
class StaticKeys:
    """Keys and values of a batch, for each layer [B, Hkv, length, D]."""

    shape: LlamaShape
    batch: int
    length: int
    like: Tensor
    keys: list[Tensor] = field(init=False)
    values: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        size = self.batch, self.shape.kv_heads, self.length, self.shape.head_dim
        self.keys = [self.like.new_zeros(size) for _ in range(self.shape.layers)]
        self.values = [self.like.new_zeros(size) for _ in range(self.shape.layers)]

    @property
    def num_bytes(self) -> int:
        """See `StepCache`."""
        return sum(part.nbytes for part in (*self.keys, *self.values))

    def bytes_read(self, keys: int) -> int:
        """See `StepCache`."""
        return self.num_bytes * keys // self.length

    def reset(self) -> None:
        """See `StepCache`: places that are not written yet are masked."""


class CompiledLlama:
    """A plain Llama of transformers as a `StepModel` of compiled blocks.

    Args:
        model: Its weights are shared, those of q, k and v stacked.
        compiled: False runs the same code eagerly.
        options: Of Inductor, for steps of one row.

    Raises:
        ValueError: It is no plain Llama.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        compiled: bool = True,
        options: dict[str, Any] | None = None,
    ) -> None:
        config = model.config.to_dict()
        config.setdefault("rope_theta", (config.get("rope_parameters") or {}).get("rope_theta"))
        config["rope_scaling"] = None  # newer configs repeat the default rope here
        kind = getattr(model.model.rotary_emb, "rope_type", "default")
        if kind != "default":
            raise ValueError(f"plain rotary embedding only, found `{kind}`")
        self.shape = LlamaShape.of(config)
        self.device, self.vocab_size = model.device, self.shape.vocab
        self.why_not_captured, self.captures_prompts = "", False
        self._embedding = model.model.embed_tokens.weight
        self._layers = [_weights(layer) for layer in model.model.layers]
        self._ends = model.model.norm.weight, model.lm_head.weight
        self._options = options if options is not None else {"coordinate_descent_tuning": True}
        self._compiled = compiled
        self._parts: dict[int, tuple[Callable[..., Any], Callable[..., Tensor]]] = {}

    def new_cache(
        self,
        batch: int,
        length: int,
        dtype: torch.dtype | None = None,
        *,
        scales: CacheScales | None = None,
    ) -> StaticKeys:
        """See `StepModel`; in the dtype of the model."""
        return StaticKeys(self.shape, batch, length, self._embedding)

    def prefill(self, ids: Tensor, lengths: Tensor, cache: StepCache) -> Tensor:
        """See `StepModel`; eager."""
        positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        hidden = self._run(ids, positions, cache, partial(_block, self.shape))
        rows = torch.arange(len(ids), device=ids.device)
        return _head(self.shape, hidden[rows, lengths - 1], *self._ends)

    def step(self, tokens: Tensor, positions: Tensor, cache: StepCache) -> Tensor:
        """See `StepModel`."""
        block, head = self._of(cache.batch)
        hidden = self._run(tokens[:, None], positions[:, None], cache, block)
        return head(hidden[:, 0], *self._ends)

    def _of(self, batch: int) -> tuple[Callable[..., Any], Callable[..., Tensor]]:
        if batch not in self._parts:
            parts = partial(_block, self.shape), partial(_head, self.shape)
            if self._compiled:
                options = self._options if batch == 1 else {}
                compile_ = partial(torch.compile, fullgraph=True, dynamic=False, options=options)
                parts = compile_(parts[0]), compile_(parts[1])
            self._parts[batch] = parts
        return self._parts[batch]

    def _run(
        self, ids: Tensor, positions: Tensor, cache: StepCache, block: Callable[..., Tensor]
    ) -> Tensor:
        assert isinstance(cache, StaticKeys), "a cache of `new_cache`"
        hidden = functional.embedding(ids, self._embedding)
        angles = rotary_angles(self.shape, positions).float()
        turns = angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)
        places = torch.arange(cache.length, device=ids.device)
        mask = places <= positions[..., None]  # [B, T, length]
        for layer, keys, values in zip(self._layers, cache.keys, cache.values, strict=True):
            hidden = block(hidden, *turns, positions, mask, keys, values, *layer)
        return hidden


def _weights(layer: nn.Module) -> tuple[Tensor, ...]:
    attention, mlp = layer.self_attn, layer.mlp
    parts = [getattr(attention, name).weight for name in ("q_proj", "k_proj", "v_proj")]
    return (
        layer.input_layernorm.weight.detach(),
        torch.cat(parts).detach(),
        attention.o_proj.weight.detach(),
        layer.post_attention_layernorm.weight.detach(),
        mlp.gate_proj.weight.detach(),
        mlp.up_proj.weight.detach(),
        mlp.down_proj.weight.detach(),
    )


def _norm(x: Tensor, factors: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype) * factors


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [B, T, heads, D] turned; cos and sin are [B, T, D / 2]."""
    low, high = x.chunk(2, -1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def _block(  # noqa: PLR0913 - what a compiled graph reads are its arguments
    shape: LlamaShape,
    hidden: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    mask: Tensor,
    keys: Tensor,
    values: Tensor,
    *weights: Tensor,
) -> Tensor:
    first, qkv, out, second, gate, up, down = weights
    batch, tokens = positions.shape
    products = functional.linear(_norm(hidden, first, shape.eps), qkv)
    parts = [shape.heads, shape.kv_heads, shape.kv_heads]
    q, k, v = products.unflatten(-1, (-1, shape.head_dim)).split(parts, 2)
    q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
    rows = torch.arange(batch, device=hidden.device)[:, None]
    keys[rows, :, positions] = k
    values[rows, :, positions] = v
    group = shape.heads // shape.kv_heads
    # [B, Hkv, T * group, D]: the heads of a group are queries of its keys
    q = q.unflatten(2, (shape.kv_heads, group)).permute(0, 2, 1, 3, 4).flatten(2, 3)
    seen_by = mask.repeat_interleave(group, 1)[:, None]
    seen = functional.scaled_dot_product_attention(q, keys, values, attn_mask=seen_by)
    seen = seen.unflatten(2, (tokens, group)).permute(0, 2, 1, 3, 4).flatten(2)
    hidden = hidden + functional.linear(seen, out)
    read = _norm(hidden, second, shape.eps)
    inner = functional.silu(functional.linear(read, gate)) * functional.linear(read, up)
    return hidden + functional.linear(inner, down)


def _head(shape: LlamaShape, hidden: Tensor, factors: Tensor, head: Tensor) -> Tensor:
    return functional.linear(_norm(hidden, factors, shape.eps), head)


__all__ = ["CompiledLlama", "StaticKeys"]
