"""State-space and other hybrids: quantized and fused like any, states left to transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from architecture_sweep import both, relative
from tiny_architectures import inputs_of
from torch import nn

from quantload.layers.stack import LinearStack, StackView

# type -> linear layers of a hybrid block that are quantized
HYBRIDS = {
    "mamba": ("mixer.in_proj", "mixer.out_proj"),
    "mamba2": ("mixer.in_proj", "mixer.out_proj"),
    "jamba": ("mamba.in_proj", "mamba.out_proj", "self_attn.q_proj"),
    "bamba": ("mamba.in_proj", "mamba.out_proj", "self_attn.q_proj"),
    "nemotron_h": ("mixer.in_proj", "mixer.out_proj", "mixer.q_proj"),
    "lfm2": ("conv.in_proj", "conv.out_proj", "self_attn.q_proj"),
    "qwen3_next": ("linear_attn.in_proj_qkvz", "linear_attn.out_proj", "self_attn.q_proj"),
    "minimax": ("self_attn.qkv_proj", "self_attn.out_proj", "self_attn.q_proj"),
    "zamba2": ("mamba.in_proj", "shared_transformer.self_attn.o_proj"),  # layers share weights
}
GROUPS = {  # fused, beside q, k and v
    "jamba": ("gate_proj", "up_proj"),
    "bamba": ("gate_proj", "up_proj"),
    "lfm2": ("w1", "w3"),
    "minimax": ("qkv_proj", "output_gate"),
}


def stacks_of(model: nn.Module) -> set[tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, StackView):
            found.setdefault(module.__dict__["stack"].prefix, []).append(name.rpartition(".")[2])
    return {tuple(members) for members in found.values()}


@pytest.mark.parametrize("model_type", HYBRIDS)
@pytest.mark.filterwarnings("ignore")
def test_forward_and_generate_equal_transformers(model_type: str, tmp_path: Path) -> None:
    model, plain = both(model_type, tmp_path, "W4A16")
    inputs = inputs_of(plain)
    with torch.no_grad():
        assert relative(model(**inputs).logits, plain(**inputs).logits) < 1e-5
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "use_cache": True}
    told = {"output_logits": True, "return_dict_in_generate": True}
    found, expected = (m.generate(**inputs, **options, **told) for m in (model, plain))
    assert torch.equal(found.sequences, expected.sequences)
    assert relative(torch.stack(found.logits), torch.stack(expected.logits)) < 1e-5
    quantized = {name for name, m in model.named_modules() if _is_quantized(m)}
    for layer in HYBRIDS[model_type]:
        assert any(name.endswith(layer) for name in quantized), layer
    if "self_attn.q_proj" in HYBRIDS[model_type] and model_type != "minimax":
        assert any(set(members) >= {"q_proj", "k_proj", "v_proj"} for members in stacks_of(model))
    if model_type in GROUPS:
        assert any(set(members) >= set(GROUPS[model_type]) for members in stacks_of(model))
    for name, parameter in plain.named_parameters():
        if name.endswith(("A_log", ".D", "dt_bias", "conv1d.weight", "conv.conv.weight")):
            assert torch.equal(model.get_parameter(name), parameter), name


def _is_quantized(module: nn.Module) -> bool:
    if isinstance(module, StackView):
        module = module.__dict__["stack"]
    if isinstance(module, LinearStack) and module.separate is not None:
        return True
    return getattr(getattr(module, "scheme", None), "weight", None) is not None
