"""A forward on the meta device leaves the model as it was."""

from __future__ import annotations

import json

import pytest
import tiny_checkpoints as tiny
import torch
from transformers import AutoModelForCausalLM

import quantload
from quantload import api

DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
LONG = {
    **{"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 32},
    **{"short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
}


@pytest.fixture(params=[DYNAMIC, LONG], ids=lambda rope: rope["rope_type"])
def source(tmp_path, request):
    """A model whose RoPE keeps frequencies, and the longest text so far, between forwards."""
    folder = tiny.llama(tmp_path / "source")
    config = json.loads((folder / "config.json").read_text())
    config |= {"rope_scaling": request.param, "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_rope_that_grows_with_the_text(source):
    """Short texts, then one beyond the first length, then a short one again."""
    model = quantload.load(source, device="cpu", dtype=torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    for length in (16, 80, 20):
        ids = torch.arange(length)[None] % 90
        with torch.no_grad():
            assert torch.equal(model(ids).logits, reference(ids).logits)


def test_a_comparison_of_such_models(source, tmp_path):
    output = api.convert(source, tmp_path / "out", "W4A16:g32").folder
    found = api.compare(source, output, sequences=[list(range(60)), [1, 2, 3]])
    assert found.not_run == ""
    assert 0 < float(found.end.kl.mean()) < 0.1
