"""Models of well-known shapes with random weights, built on the device: nothing is downloaded.

They are what `load` makes of a checkpoint of that shape: the same surgery, the same kernels. One
random weight is quantized for each shape, and each layer gets its codes rolled by another number of
rows, so that a model of any size is there in seconds; what is in memory beside it is one weight.
Texts mean nothing; times and bytes are those of the real model. (Which experts a token takes is
that of a random router: about even.)

Source of the shapes: config.json of meta-llama/Meta-Llama-3-8B and -70B, Qwen/Qwen3-8B and
Qwen/Qwen3-30B-A3B, and of deepseek-ai/DeepSeek-V3 for the width and number of experts of
deepseek-like.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from quantload.errors import ConfigError, listed
from quantload.layers.experts import FusedExperts
from quantload.layers.experts_layout import holds_experts
from quantload.layers.fast_paths import use_fast_paths
from quantload.layers.linear import QuantLinear
from quantload.layers.meta_model import TransformersModel, build_on_meta, output_head
from quantload.layers.preparation import prepare
from quantload.layers.siblings import is_plain_linear
from quantload.layers.surgery import finish
from quantload.quant.qtensor import QuantTensor
from quantload.quant.rtn import round_to_nearest
from quantload.quant.scheme import DENSE, Scheme

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
_QWEN3 = {
    "vocab_size": 151936,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def _size(hidden: int, intermediate: int, layers: int, heads: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "tiny": _LLAMA | _size(64, 96, 2, 4) | {"vocab_size": 256, "num_key_value_heads": 2},
    "llama-8b": _LLAMA | _size(4096, 14336, 32, 32),
    "llama-70b": _LLAMA | _size(8192, 28672, 80, 64),
    "qwen3-8b": _QWEN3
    | _size(4096, 12288, 36, 32)
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_key_value_heads": 8,
    },
    "qwen3-30b-a3b": _QWEN3
    | _size(2048, 6144, 48, 32)
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    "tiny-moe": _QWEN3
    | _size(64, 96, 2, 4)
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 256,
        "head_dim": 16,
        "num_key_value_heads": 2,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
}


@dataclass(frozen=True)
class _Stored:
    """What a checkpoint with one tensor for all experts of a block would say of it."""

    parameter_name: str


@runtime_checkable
class _Waiting(Protocol):
    """A layer of ours that takes tensors, see `Receiver` of the loader."""

    def awaits(self) -> dict[tuple[str, int], tuple[int, ...]]: ...

    def receive(self, leaf: str, slot: int, value: QuantTensor | Tensor) -> None: ...

    def finish(self, device: torch.device) -> None: ...


class _RandomWeights:
    """One random weight of each shape and scheme, handed out with its rows rolled."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self._device, self._dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(seed)
        self._weights: dict[object, QuantTensor] = {}
        self._given = 0

    def floats(self, shape: tuple[int, ...]) -> Tensor:
        """Return values of standard deviation 1 / sqrt(columns): sums stay near 1."""
        made = torch.empty(shape, dtype=self._dtype, device=self._device)
        return made.normal_(0.0, shape[-1] ** -0.5, generator=self._generator)

    def quantized(self, shape: tuple[int, int], scheme: Scheme) -> QuantTensor:
        """Return a quantized weight [N, K]."""
        assert scheme.weight is not None, "a scheme that quantizes"
        key = shape, scheme
        if key not in self._weights:
            self._weights[key] = round_to_nearest(self.floats(shape), scheme.weight)
        weight = self._weights[key]
        self._given += 1
        codes = weight.codes.view(torch.uint8).roll(self._given * 7 % shape[0], 0)
        return replace(weight, codes=codes.view(weight.codes.dtype))


def build_synthetic(
    name: str,
    scheme: Scheme,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    fuse: bool = True,
    layers: int | None = None,
    seed: int = 0,
) -> TransformersModel:
    """Build a model of a named shape with random weights.

    Args:
        name: A key of `CONFIGS`.
        scheme: Scheme of every linear layer and expert of the blocks; the output head, embeddings,
            norms and routers stay in full precision. `dense` quantizes nothing.
        device: Where it is built.
        dtype: dtype of activations and full-precision parameters.
        fuse: Run layers that read one input as one product.
        layers: Number of blocks; None is that of the shape.
        seed: Of the random numbers.

    Raises:
        ConfigError: There is no such shape, or the scheme does not fit a layer.
    """
    if name not in CONFIGS:
        names = listed(CONFIGS, limit=len(CONFIGS))
        raise ConfigError(f"no synthetic model `{name}`, expected one of {names}")
    config = dict(CONFIGS[name]) | ({} if layers is None else {"num_hidden_layers": layers})
    model = build_on_meta(config, Path("synthetic") / name, dtype=dtype)
    schemes = _schemes(model, scheme)
    weights = {path: _Stored(path) for path in schemes}
    prepared = prepare(model, schemes, weights, dtype=dtype, fuse=fuse)
    _fill(prepared.model, _RandomWeights(device, dtype, seed), device)
    finished = finish(prepared.model, device)
    use_fast_paths(finished, dtype=dtype, exact=True)
    return finished


def _schemes(model: TransformersModel, scheme: Scheme) -> dict[str, Scheme]:
    """Return the scheme of each linear layer and of each parameter of all experts of a block."""
    found: dict[str, Scheme] = {}
    if scheme.weight is None:
        return found
    head = output_head(model)
    for path, module in model.named_modules():
        if holds_experts(module):
            for leaf, parameter in module.named_parameters(recurse=False):
                if parameter.ndim == 3:
                    found[f"{path}.{leaf}"] = _fitted(scheme, parameter.shape[-1], path)
        elif is_plain_linear(module) and module is not head:
            found[path] = _fitted(scheme, module.in_features, path)
    return found


def _fitted(scheme: Scheme, columns: int, path: str) -> Scheme:
    fitted = scheme.fitted(columns)
    if fitted is None:
        raise ConfigError(f"scheme `{scheme}` does not fit the {columns} columns of `{path}`")
    return fitted


def _fill(model: nn.Module, weights: _RandomWeights, device: torch.device) -> None:
    """Give each layer and each parameter its values."""
    for module in model.modules():
        if isinstance(module, _Waiting):
            for (leaf, slot), shape in module.awaits().items():
                value = _value(module, leaf, slot, shape, weights)
                module.receive(leaf, slot, value)
            module.finish(device)
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is None or parameter.device.type != "meta":
                continue
            shape = tuple(parameter.shape)
            made = weights.floats(shape) if len(shape) > 1 else torch.ones(shape, device=device)
            module._parameters[leaf] = nn.Parameter(made.to(parameter.dtype), requires_grad=False)


def _value(
    module: _Waiting, leaf: str, slot: int, shape: tuple[int, ...], weights: _RandomWeights
) -> QuantTensor | Tensor:
    scheme = DENSE
    if isinstance(module, QuantLinear):
        scheme = module.schemes[slot]
    elif isinstance(module, FusedExperts):
        scheme = module.schemes.get((leaf, slot), DENSE)
    if len(shape) == 2 and scheme.weight is not None:
        return weights.quantized((shape[0], shape[1]), scheme)
    return weights.floats(shape)


__all__ = ["CONFIGS", "build_synthetic"]
