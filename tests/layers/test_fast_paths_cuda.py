"""Fast paths of models on a card: by default the bits of the models' own code."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from quantload.layers.fast_paths import use_fast_paths

pytestmark = pytest.mark.gpu

IDS = torch.tensor([[1, 5, 9, 100, 7, 33, 2, 64], [1, 6, 9, 17, 120, 3, 2, 4]])
SIZES = {
    **{"hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 2, "head_dim": 32},
    **{"num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 128, "pad_token_id": 0},
}


def tiny(model_type: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.cuda().eval().requires_grad_(False)


def logits(model: nn.Module) -> Tensor:
    with torch.inference_mode():
        return model(IDS.cuda(), use_cache=False).logits


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "phi3", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_models_have_the_same_bits(model_type: str, dtype: torch.dtype) -> None:
    model = tiny(model_type, dtype)
    expected = logits(model)
    runs = {report.kind: report.runs for report in use_fast_paths(model, dtype=dtype)}
    assert runs == {"glu": "kernel", "rms norm": "kernel after torch's mean"}
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_all_kernels_are_near(dtype: torch.dtype) -> None:
    model = tiny("llama", dtype)
    expected = logits(model).float()
    reports = use_fast_paths(model, dtype=dtype, exact=False)
    assert {report.runs for report in reports} == {"kernel"}
    limit = 0.02 if dtype == torch.bfloat16 else 1e-5
    assert (logits(model).float() - expected).norm() <= limit * expected.norm()


def test_what_has_no_kernel_with_its_bits_keeps_its_forward() -> None:
    config = AutoConfig.for_model("llama", **SIZES, hidden_act="gelu")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda().eval()
    expected = logits(model)
    reports = [r for r in use_fast_paths(model, dtype=torch.bfloat16) if r.kind == "glu"]
    assert [(r.runs, r.reason) for r in reports] == [
        ("its own forward", "no kernel has its bits on this device")
    ] * 2
    assert torch.equal(logits(model), expected)
