"""Models whose q, k and v (or gate and up) lie in one weight on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from architecture_sweep import both, calls_of, products, relative
from tiny_architectures import inputs_of

import quantload

FUSED = {
    "phi3": ("self_attn.qkv_proj", "mlp.gate_up_proj"),
    "gpt_neox": ("attention.query_key_value",),
    "falcon": ("self_attention.query_key_value",),
    "bloom": ("self_attention.query_key_value",),
}


@pytest.mark.parametrize("model_type", FUSED)
@pytest.mark.filterwarnings("ignore")
def test_one_quantized_product_a_weight(model_type: str, tmp_path: Path) -> None:
    model, plain = both(model_type, tmp_path, "W4A16")
    inputs = inputs_of(plain)
    with torch.no_grad(), calls_of(model, products(model)) as calls:
        found = model(**inputs, use_cache=False).logits
    with torch.no_grad():
        expected = plain(**inputs, use_cache=False).logits
    assert relative(found, expected) < 1e-5
    told = {report.module: report for report in quantload.explain(model)}
    for layer in FUSED[model_type]:
        layers = [report for name, report in told.items() if name.endswith(layer)]
        assert len(layers) == 2
        assert all(report.scheme.startswith("W4A16") for report in layers)
    assert len(calls) == len({report.fused_into or name for name, report in told.items()})
