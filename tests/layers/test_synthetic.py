"""Synthetic models are what `load` makes of a checkpoint of that shape."""

import pytest
import torch

from quantload.api_bench import synthetic
from quantload.errors import ConfigError, UnknownScheme
from quantload.layers.meta_model import build_on_meta
from quantload.layers.step_bytes import experts_share, weight_bytes
from quantload.layers.surgery import explain
from quantload.layers.synthetic import CONFIGS, build_synthetic
from quantload.quant.scheme import parse_scheme

CPU = torch.device("cpu")
BILLIONS = {"llama-8b": 8.03, "llama-70b": 70.55, "qwen3-8b": 8.19, "qwen3-30b-a3b": 30.53}


@pytest.mark.parametrize("name", BILLIONS)
def test_shapes_have_the_known_number_of_weights(name, tmp_path):
    model = build_on_meta(CONFIGS[name], tmp_path, dtype=torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(
        BILLIONS[name], abs=0.006
    )


@pytest.mark.parametrize("name", ["tiny", "tiny-moe"])
@pytest.mark.parametrize("scheme", ["W4A16:g32", "FP8_DYNAMIC", "dense"])
def test_every_layer_has_the_scheme_and_numbers_stay_near_one(name, scheme):
    model = build_synthetic(name, parse_scheme(scheme), device=CPU, dtype=torch.float32)
    found = {report.module: report.scheme for report in explain(model)}
    assert found.pop("lm_head") == "dense"
    assert set(found.values()) == {scheme}
    assert any("experts" in path for path in found) == (name == "tiny-moe")
    logits = model(torch.arange(24).reshape(2, 12)).logits
    assert 0.3 < float(logits.std()) < 3
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_layers_of_one_shape_differ():
    model = build_synthetic("tiny", parse_scheme("W8A16"), device=CPU, dtype=torch.float32)
    gates = [layer.mlp.gate_proj.weight for layer in model.model.layers]
    assert not torch.equal(*gates)


def test_the_same_seed_gives_the_same_model():
    ids = torch.arange(8)[None]
    first, second = (synthetic("tiny", "W4A16:g32", device="cpu")(ids).logits for _ in range(2))
    assert torch.equal(first, second)


def test_refusals():
    with pytest.raises(ConfigError, match="no synthetic model `gpt-5`, expected one of `llama-70b"):
        synthetic("gpt-5", device="cpu")
    with pytest.raises(UnknownScheme):
        synthetic("tiny", "W5A5", device="cpu")


# -- bytes of a step -------------------------------------------------------------------------------


def test_a_step_reads_all_but_the_embedding():
    model = build_synthetic("tiny", parse_scheme("dense"), device=CPU)
    every = sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
    assert weight_bytes(model, 1) == every - model.model.embed_tokens.weight.nbytes


def test_a_tied_head_is_read():
    plain = build_synthetic("tiny", parse_scheme("dense"), device=CPU)
    before = weight_bytes(plain, 1)
    plain.model.embed_tokens.weight = plain.lm_head.weight
    assert weight_bytes(plain, 1) == before


@pytest.mark.parametrize("scheme", ["dense", "W4A16:g32"])
def test_experts_count_by_how_many_are_taken(scheme):
    model = build_synthetic("tiny-moe", parse_scheme(scheme), device=CPU)
    assert experts_share(model, 1) == 2 / 8
    assert experts_share(model, 3) == pytest.approx(1 - 0.75**3)
    one, many = weight_bytes(model, 1), weight_bytes(model, 1000)
    experts = 2 * 8 * 3 * 32 * 64 * (2 if scheme == "dense" else 0.5)  # without scales
    assert experts * 0.75 <= many - one <= experts * 0.75 * 1.6
