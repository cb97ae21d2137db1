"""Tiny models, and checkpoints of them in memory: a `Source` without files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from quantload.loader.checkpoint import Checkpoint, TensorEntry
from quantload.loader.source import Source, SourceWeight
from quantload.quant.qtensor import QuantTensor
from quantload.quant.rtn import quantize_rtn
from quantload.quant.scheme import Scheme, parse_scheme

NOWHERE = Path("/nowhere")


@dataclass(frozen=True)
class FakeCheckpoint(Checkpoint):
    values: Mapping[str, Tensor] = field(default_factory=dict)

    def read(self, tensor_name: str) -> Tensor:
        return self.values[tensor_name]


@dataclass
class FakeReader:
    checkpoint: Checkpoint
    found: dict[str, SourceWeight]
    values: dict[str, QuantTensor | Tensor]
    widens_floats: bool = False
    cache_scheme: Mapping[str, Any] | None = None
    warnings: tuple[str, ...] = ()

    def weights(self) -> Mapping[str, SourceWeight]:
        return self.found

    def decode(self, weight: SourceWeight) -> QuantTensor | Tensor:
        return self.values[weight.module]


def fake_source(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    quantized: Mapping[str, tuple[Scheme, QuantTensor]] | None = None,
) -> Source:
    """A source of full-precision tensors by name and quantized weights by module."""
    weights: dict[str, SourceWeight] = {}
    values: dict[str, QuantTensor | Tensor] = {}
    entries: dict[str, TensorEntry] = {}
    plain: dict[str, TensorEntry] = {}
    for name, tensor in tensors.items():
        entries[name] = _entry(name, tensor)
        if tensor.ndim != 2 or not name.endswith(".weight"):
            plain[name] = entries[name]
            continue
        module = name.removesuffix(".weight")
        values[module] = tensor
        weights[module] = _weight(module, tensor.shape, None, tensor.dtype, {"weight": name})
    for module, (scheme, weight) in (quantized or {}).items():
        leaves = {leaf: f"{module}.weight_{leaf}" for leaf in weight.tensors()}
        for leaf, part in weight.tensors().items():
            entries[leaves[leaf]] = _entry(leaves[leaf], part)
        values[module] = weight
        weights[module] = _weight(module, weight.shape, scheme, torch.float32, leaves)
    checkpoint = FakeCheckpoint(
        name="fake", folder=NOWHERE, config=config, tensors=entries, values=dict(tensors)
    )
    return Source(checkpoint, "fake", FakeReader(checkpoint, weights, values), weights, plain)


def _entry(name: str, tensor: Tensor) -> TensorEntry:
    return TensorEntry(name, tensor.dtype, tuple(tensor.shape), NOWHERE, 0, tensor.nbytes)


def _weight(
    module: str,
    shape: tuple[int, ...],
    scheme: Scheme | None,
    dtype: torch.dtype,
    leaves: Mapping[str, str],
) -> SourceWeight:
    return SourceWeight(
        module=module,
        shape=(shape[0], shape[1]),
        scheme=scheme,
        encoding=str(scheme or dtype),
        dtype=dtype,
        leaves=leaves,
    )


def tiny_config(model_type: str, **options: Any) -> dict[str, Any]:
    """The config.json of a two-layer model of one of the usual shapes."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 128,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if model_type == "gpt2":
        sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128, "n_positions": 64}
        sizes |= {"bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(model_type, **(sizes | options))
    names = {"gpt2": "GPT2LMHeadModel", "gemma3_text": "Gemma3ForCausalLM"}
    architecture = names.get(model_type, f"{model_type.title()}ForCausalLM")
    return {**config.to_dict(), "architectures": [architecture], "dtype": "float32"}


def tiny_model(model_type: str, **options: Any) -> PreTrainedModel:
    """A random model; biases and norms are random too, so that a lost one shows."""
    torch.manual_seed(0)
    config = tiny_config(model_type, **options)
    config.pop("architectures")
    hf_config = AutoConfig.for_model(config.pop("model_type"), **config)
    model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.1 if parameter.ndim == 1 else 0.05))
    return model.eval()


@dataclass
class FakeModel:
    """A model, its checkpoint and what that holds.

    `model` computes with the dequantized weights.
    """

    model: PreTrainedModel
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    quantized: dict[str, tuple[Scheme, QuantTensor]]

    @property
    def source(self) -> Source:
        return fake_source(self.config, self.tensors, self.quantized)


def quantized_model(
    model_type: str, scheme: str | Mapping[str, str] = "W4A16:g32", **options: Any
) -> FakeModel:
    """Quantize the linear layers, but for the head; a mapping gives schemes by end of the name."""
    model = tiny_model(model_type, **options)
    quantized = {}
    for name, module in model.named_modules():
        text = scheme if isinstance(scheme, str) else _by_end(scheme, name)
        if not isinstance(module, (nn.Linear, Conv1D)) or name == "lm_head" or text is None:
            continue
        parsed = parse_scheme(text)
        transposed = isinstance(module, Conv1D)
        weight = module.weight.detach().t() if transposed else module.weight.detach()
        assert parsed.weight is not None
        quantized[name] = (parsed, quantize_rtn(weight.contiguous(), parsed.weight))
        values = quantized[name][1].dequantize()
        with torch.no_grad():
            module.weight.copy_(values.t() if transposed else values)
    tied = set(model.all_tied_weights_keys)
    tensors = {
        name: tensor.detach().clone()
        for name, tensor in model.state_dict().items()
        if name not in tied and name.removesuffix(".weight") not in quantized
    }
    return FakeModel(model, tiny_config(model_type, **options), tensors, quantized)


def _by_end(schemes: Mapping[str, str], name: str) -> str | None:
    return next((text for end, text in schemes.items() if name.endswith(end)), None)
