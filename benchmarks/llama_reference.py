"""One step of a Llama model in float64, from quantized weights: what peers are held to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from gemm_cells import exact_product, quantized
from torch import Tensor

from quantload.quant.qtensor import QuantTensor

Weight = QuantTensor | Tensor


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of a Llama model.

    Args:
        hidden: H.
        inner: I, width of gate and of up.
        heads: Of queries.
        kv_heads: Of keys and values.
        head_dim: D.
        vocab: V.
        layers: Number of blocks.
        eps: Of the norms.
        theta: Base of the rotary frequencies.
    """

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    layers: int
    eps: float
    theta: float

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> LlamaShape:
        """Read a Llama's config.json.

        Raises:
            ValueError: It is of another model type, or scales its positions.
        """
        if config["model_type"] != "llama" or config.get("rope_scaling"):
            raise ValueError(f"plain llama only, found `{config['model_type']}`")
        heads = config["num_attention_heads"]
        return cls(
            hidden=config["hidden_size"],
            inner=config["intermediate_size"],
            heads=heads,
            kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab=config["vocab_size"],
            layers=config["num_hidden_layers"],
            eps=config["rms_norm_eps"],
            theta=config["rope_theta"],
        )

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """Name and [N, K] of the products of a block, in the order of a step."""
        both = self.heads + 2 * self.kv_heads
        return {
            "qkv": (both * self.head_dim, self.hidden),
            "o": (self.hidden, self.heads * self.head_dim),
            "gate_up": (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
        }


class RandomWeights:
    """Random weights of a format: one of each shape, its rows rolled for each layer.

    Args:
        shape: The model's.
        fmt: Format of the products of the blocks, a key of `gemm_cells.FORMATS`.
        device: Where they are.
    """

    def __init__(self, shape: LlamaShape, fmt: str, device: torch.device) -> None:
        self.shape, self._device = shape, device
        self._generator = torch.Generator(device).manual_seed(11)
        self.embedding = self._floats(shape.vocab, shape.hidden)
        self.head = self._floats(shape.vocab, shape.hidden)
        self._dense = {name: self._floats(*size) for name, size in shape.products.items()}
        self._weights: dict[str, Weight] = dict(self._dense)
        if fmt != "bf16":
            self._weights = {name: quantized(fmt, made) for name, made in self._dense.items()}

    def _floats(self, rows: int, columns: int) -> Tensor:
        made = torch.empty(rows, columns, dtype=torch.bfloat16, device=self._device)
        return made.normal_(0.0, columns**-0.5, generator=self._generator)

    def norm(self, number: int) -> Tensor:
        """Return factors [H] of a norm, near 1, by its number."""
        generator = torch.Generator(self._device).manual_seed(number)
        made = torch.randn(self.shape.hidden, generator=generator, device=self._device)
        return (1 + 0.1 * made).to(torch.bfloat16)

    def layer(self, number: int) -> dict[str, Weight]:
        """Return the weights of a block by name."""
        return {name: _rolled(weight, 7 * number) for name, weight in self._weights.items()}


def _rolled(weight: Weight, rows: int) -> Weight:
    if isinstance(weight, Tensor):
        return weight.roll(rows, 0)
    codes = weight.codes.view(torch.uint8).roll(rows, 0).view(weight.codes.dtype)
    return replace(weight, codes=codes)


def rotary_angles(shape: LlamaShape, positions: Tensor) -> Tensor:
    """Return angles [..., D / 2] float64 of positions [...]."""
    even = torch.arange(0, shape.head_dim, 2, dtype=torch.float64, device=positions.device)
    return positions.double()[..., None] * shape.theta ** (-even / shape.head_dim)


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Return x [B, heads, D] turned by angles [B, D / 2]; halves of a head belong together."""
    low, high = x.chunk(2, -1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def _norm(x: Tensor, factors: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * factors.double()


def exact_step(
    weights: RandomWeights,
    fmt: str,
    tokens: Tensor,
    keys: Sequence[Sequence[Tensor]],
    values: Sequence[Sequence[Tensor]],
    *,
    turns: bool = True,
) -> Tensor:
    """Return the logits [B, V] float64 after one more token of each row.

    Args:
        weights: Of the model.
        fmt: Their format; one with rounded inputs rounds them.
        tokens: [B] int64.
        keys: For each layer and row [n, Hkv, D], what the row has; the token goes to place n.
        values: The same.
        turns: False leaves the rotary embedding out: a wrong model, to see that the error of one
            is larger than the tolerance.
    """
    shape = weights.shape
    lengths = torch.tensor([len(of_row) for of_row in keys[0]], device=tokens.device)
    angles = rotary_angles(shape, lengths) * turns
    x = weights.embedding[tokens].double()
    for number in range(shape.layers):
        layer = weights.layer(number)
        read = _norm(x, weights.norm(2 * number), shape.eps)
        seen = _attended(
            shape, exact_product(fmt, layer["qkv"], read), angles, keys[number], values[number]
        )
        x = x + exact_product(fmt, layer["o"], seen)
        read = _norm(x, weights.norm(2 * number + 1), shape.eps)
        gate, up = exact_product(fmt, layer["gate_up"], read).chunk(2, -1)
        inner = torch.nn.functional.silu(gate) * up
        x = x + exact_product(fmt, layer["down"], inner)
    return _norm(x, weights.norm(2 * shape.layers), shape.eps) @ weights.head.double().T


def _attended(
    shape: LlamaShape,
    qkv: Tensor,
    angles: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
) -> Tensor:
    """Return what the heads see, [B, heads * D]."""
    parts = [shape.heads, shape.kv_heads, shape.kv_heads]
    q, k, v = qkv.unflatten(-1, (-1, shape.head_dim)).split(parts, 1)
    q, k = _rotated(q, angles), _rotated(k, angles)
    group = shape.heads // shape.kv_heads
    rows = []
    for row in range(len(qkv)):
        all_keys = torch.cat([keys[row].double(), k[row, None]]).repeat_interleave(group, 1)
        all_values = torch.cat([values[row].double(), v[row, None]]).repeat_interleave(group, 1)
        scores = torch.einsum("hd,nhd->hn", q[row], all_keys) * shape.head_dim**-0.5
        rows.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), all_values).flatten())
    return torch.stack(rows)


__all__ = ["LlamaShape", "RandomWeights", "exact_step", "rotary_angles"]
