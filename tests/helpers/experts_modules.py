"""Modules of transformers that hold experts, small, and our layers with the same weights."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from whole_weights import CPU, scheme_named, whole_weight

from quantload.layers.experts import FusedExperts
from quantload.layers.experts_layout import ExpertsLayout, Projection, layout_of
from quantload.layers.experts_proof import fused_experts
from quantload.quant.qtensor import QuantTensor

E, H, INNER, K = 4, 64, 96, 2
Values = Mapping[tuple[str, int], QuantTensor | Tensor]

# Each way to hold and call experts once: gated, clamped, alternating rows, input first, biases,
# without a gate, tokens sorted by the caller, a norm behind each expert.
MODULES = {
    "mixtral": "MixtralExperts",
    "deepseek_v4": "DeepseekV4Experts",
    "gpt_oss": "GptOssExperts",
    "openai_privacy_filter": "OpenAIPrivacyFilterExperts",
    "aria": "AriaExperts",
    "nemotron_h": "NemotronHExperts",
    "llama4": "Llama4TextExperts",
    "step3p7": "Step3p7Experts",
    "muse_spark": "MuseSparkExperts",
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def class_of(model_type: str) -> type[nn.Module]:
    name = f"transformers.models.{model_type}"
    if importlib.util.find_spec(name) is None:  # of a later version
        pytest.skip(f"this transformers has no `{model_type}`")
    module = importlib.import_module(f"{name}.modeling_{model_type}")
    found: type[nn.Module] = getattr(module, MODULES[model_type])
    return found


def config_of() -> SimpleNamespace:
    """A config with every name that a module asks for."""
    acts = dict.fromkeys(("hidden_act", "mlp_hidden_act"), "silu")
    sizes: dict[str, Any] = dict.fromkeys(_EXPERTS, E)
    return SimpleNamespace(
        **sizes,
        **acts,
        hidden_size=H,
        moe_hidden_size=H,
        moe_latent_size=None,
        intermediate_size=INNER,
        moe_intermediate_size=INNER,
        swiglu_limit=0.5,
        swiglu_alpha=1.702,
        post_norm_eps=1e-6,
        _experts_implementation="eager",
    )


def module_of(model_type: str, make: Callable[[Any], nn.Module] | None = None) -> nn.Module:
    """A module with random parameters in float32."""
    torch.manual_seed(0)
    module = (make or class_of(model_type))(config_of())
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    return module.eval().requires_grad_(False)


def on_meta(module: nn.Module) -> nn.Module:
    return module.to("meta")


def name_of(schemes: Mapping[tuple[str, int], str] | str, leaf: str, slot: int) -> str:
    if isinstance(schemes, str):
        return schemes
    return schemes.get((leaf, slot), "dense")


def weights_of(
    layout: ExpertsLayout, schemes: Mapping[tuple[str, int], str] | str
) -> dict[tuple[str, int], QuantTensor | Tensor]:
    """A random weight (and bias) for each slot, each in its scheme."""
    found: dict[tuple[str, int], QuantTensor | Tensor] = {}
    for number, projection in enumerate(layout.projections):
        for slot in range(layout.experts * projection.parts):
            seed = 1 + (7 * number + slot) % 5
            name = name_of(schemes, projection.leaf, slot)
            found[projection.leaf, slot] = whole_weight(
                projection.rows, projection.columns, name, seed=seed
            )
            if projection.has_bias:
                generator = torch.Generator().manual_seed(100 + seed)
                bias = torch.randn(projection.rows, generator=generator)
                found[projection.bias_leaf, slot] = bias
    return found


def put(module: nn.Module, layout: ExpertsLayout, values: Values) -> nn.Module:
    """Write dequantized weights into the parameters of a module, as transformers lays them out."""
    with torch.no_grad():
        for projection in layout.projections:
            for slot in range(layout.experts * projection.parts):
                _put_slot(module, projection, slot, values)
    return module


def _put_slot(module: nn.Module, projection: Projection, slot: int, values: Values) -> None:
    expert, part = divmod(slot, projection.parts)
    weight = values[projection.leaf, slot]
    floats = weight if isinstance(weight, Tensor) else weight.dequantize(torch.float32)
    place = module.get_parameter(projection.leaf)[expert]
    place = place.t() if projection.has_input_first else place
    place[part * projection.rows : (part + 1) * projection.rows] = floats
    if projection.has_bias:
        rows = slice(part * projection.rows, (part + 1) * projection.rows)
        bias = values[projection.bias_leaf, slot]
        assert isinstance(bias, Tensor)
        module.get_parameter(projection.bias_leaf)[expert, rows] = bias


def layer_of(
    module: nn.Module,
    schemes: Mapping[tuple[str, int], str] | str = "dense",
    *,
    inputs: bool = False,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> FusedExperts:
    """Our layer for a module, not loaded yet."""
    layout = layout_of(module)
    assert isinstance(layout, ExpertsLayout), layout
    named = {
        (p.leaf, slot): scheme_named(name_of(schemes, p.leaf, slot))
        for p in layout.projections
        for slot in range(layout.experts * p.parts)
    }
    if not inputs:
        named = {key: replace(scheme, input=None) for key, scheme in named.items()}
    found = fused_experts(module, schemes=named, dtype=dtype, prefix="block.experts", **options)
    assert isinstance(found, FusedExperts), found
    return found


def inputs_of(layout: ExpertsLayout, tokens: int = 9, seed: int = 3) -> tuple[Tensor, ...]:
    """Tokens, and where they are routed their experts and weights; the last expert gets none."""
    generator = torch.Generator().manual_seed(seed)
    if not layout.is_routed:
        return (torch.randn(E * tokens, H, generator=generator),)
    order = [torch.randperm(E - 1, generator=generator)[:K] for _ in range(tokens)]
    weights = torch.rand(tokens, K, generator=generator)
    index = torch.stack(order) if order else torch.zeros(0, K, dtype=torch.long)
    return torch.randn(tokens, H, generator=generator), index, weights


__all__ = [
    "CPU",
    "INNER",
    "MODULES",
    "E",
    "H",
    "K",
    "class_of",
    "config_of",
    "inputs_of",
    "layer_of",
    "module_of",
    "on_meta",
    "put",
    "weights_of",
]
