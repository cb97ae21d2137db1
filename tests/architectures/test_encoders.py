"""Encoders: masked language models, and bare models whose states are pooled to embeddings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from architecture_sweep import both, relative
from tiny_architectures import inputs_of

from quantload.layers.stack import LinearStack


@pytest.mark.parametrize(
    ("model_type", "class_name", "stacks"),
    [
        ("bert", "BertForMaskedLM", 2),
        ("bert", "BertModel", 2),
        ("modernbert", "ModernBertForMaskedLM", 0),  # fused on disk
        ("modernbert", "ModernBertModel", 0),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_states_equal_transformers(
    model_type: str, class_name: str, stacks: int, tmp_path: Path
) -> None:
    cls = getattr(transformers, class_name)
    model, plain = both(model_type, tmp_path, "W4A16", cls=cls)
    assert type(model) is cls
    inputs = inputs_of(plain)
    with torch.no_grad():
        found, expected = (m(**inputs, output_hidden_states=True) for m in (model, plain))
    assert relative(found.hidden_states[-1], expected.hidden_states[-1]) < 1e-5
    pooled = [out.hidden_states[-1].mean(1) for out in (found, expected)]
    assert torch.nn.functional.cosine_similarity(*pooled).min() > 1 - 1e-6
    if "MaskedLM" in class_name:
        assert relative(found.logits, expected.logits) < 1e-5
    assert sum(isinstance(m, LinearStack) for m in model.modules()) == stacks
