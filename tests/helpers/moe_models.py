"""Tiny models with experts, and checkpoints of them in memory that hold every expert by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from fake_source import FakeModel, fake_source
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from quantload.layers.experts_layout import ExpertsLayout, Projection, holds_experts, layout_of
from quantload.loader.source import Source
from quantload.quant.qtensor import QuantTensor
from quantload.quant.rtn import quantize_rtn
from quantload.quant.scheme import Scheme, parse_scheme
from quantload.quant.stacking import stack

IDS = torch.tensor([[1, 5, 9, 100, 7, 33, 2, 64], [1, 6, 9, 17, 120, 3, 2, 4]])
_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
# Four groups of two experts, of which the best two are asked; a shared expert; a dense first layer.
_GROUPED = {
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 64},
    "qwen3_moe": {"num_experts": 4, "norm_topk_prob": True},
    "deepseek_v3": {**_LATENT, **_GROUPED, "num_nextn_predict_layers": 1},
    "gpt_oss": {"num_local_experts": 4, "intermediate_size": 64, "swiglu_limit": 0.5},
    "glm4_moe": _GROUPED,
    "olmoe": {"num_experts": 4, "intermediate_size": 32},
}
# What original checkpoints call gate, up and down of an expert, and its block.
_NAMES = {"mixtral": ("block_sparse_moe.experts", ("w1", "w3", "w2"))}
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def moe_model(model_type: str) -> PreTrainedModel:
    """A random model in float32; biases, norms and corrections of routers are random too."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**_SIZES, **MODELS[model_type]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn_like(tensor) * (0.1 if tensor.ndim == 1 else 0.05))
    return model.eval()


@dataclass
class MoeCheckpoint(FakeModel):
    """A model and its checkpoint.

    `blocks` are parameters of all experts that are quantized as they lie: {name: experts}; their
    weights are [E * N, K].
    """

    blocks: dict[str, int] = field(default_factory=dict)

    @property
    def source(self) -> Source:
        source = fake_source(self.config, self.tensors, self.quantized)
        weights = dict(source.weights)
        for name, experts in self.blocks.items():
            rows, columns = weights[name].shape
            weights[name] = replace(
                weights[name],
                shape=(rows // experts, columns),
                parameter=name,
                experts=experts,
                is_transposed=True,
            )
        return replace(source, weights=weights)


def moe_checkpoint(model_type: str, scheme: str, *, only: str = "") -> MoeCheckpoint:
    """Linear layers but for head and routers, and every expert, are quantized by themselves.

    Only those with `only` in their names.

    The experts of gpt-oss, which have biases, lie in one parameter, whose rows alternate.
    """
    model = moe_model(model_type)
    parsed = parse_scheme(scheme)
    quantized: dict[str, tuple[Scheme, QuantTensor]] = {}
    config = {
        **model.config.to_dict(),
        "architectures": [type(model).__name__],
        "dtype": "float32",
    }
    blocks: dict[str, int] = {}
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for path, module in model.named_modules() if parsed.weight is not None else ():
        if only not in path:
            continue
        for name, place, parameter in _places(model_type, path, module):
            tensors.pop(parameter, None)
            assert parsed.weight is not None
            value = quantize_rtn(place.contiguous(), parsed.weight)
            if name == parameter:  # all experts together
                known = quantized.get(name)
                value = value if known is None else stack([known[1], value])
                blocks[name] = blocks.get(name, 0) + 1
            quantized[name] = (parsed, value)
            with torch.no_grad():
                place.copy_(value.dequantize()[-place.shape[0] :])
    return MoeCheckpoint(model, config, tensors, quantized, blocks)


def _places(model_type: str, path: str, module: nn.Module) -> Iterator[tuple[str, Tensor, str]]:
    """Yield (name in the checkpoint, weight [N, K] of the model, its parameter) of a module."""
    if isinstance(module, nn.Linear) and path != "lm_head":
        yield path, module.weight.detach(), f"{path}.weight"
    elif holds_experts(module):
        layout = layout_of(module)
        assert isinstance(layout, ExpertsLayout), layout
        block, names = _NAMES.get(model_type, ("mlp.experts", _PROJECTIONS))
        start = path.removesuffix("mlp.experts") + block
        for projection in layout.projections:
            parts = names[:2] if projection is layout.up else names[2:]
            together = f"{path}.{projection.leaf}"
            for expert in range(layout.experts):
                matrix = _matrix(module, projection, expert)
                if projection.has_bias:
                    yield together, matrix, together
                    continue
                for part, rows in zip(parts, matrix.split(projection.rows), strict=True):
                    yield f"{start}.{expert}.{part}", rows, together


def _matrix(module: nn.Module, projection: Projection, expert: int) -> Tensor:
    matrix = module.get_parameter(projection.leaf).detach()[expert]
    return matrix.t() if projection.has_input_first else matrix
