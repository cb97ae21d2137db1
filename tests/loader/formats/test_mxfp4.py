"""MXFP4 experts against a slow reference of the bytes, and gpt-oss as transformers reads it."""

import json

import numpy as np
import oracles
import pytest
import tiny_checkpoints
import torch
from faults import silent_faults
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from truth import CHECKPOINTS, Truth

import quantload
from quantload.errors import FormatMismatch, MissingTensor, NonFiniteWeight, QuantloadError
from quantload.loader.formats import open_source
from quantload.loader.open import open_checkpoint
from quantload.loader.plan import PlanOptions

P = "model.layers.0.mlp.experts.gate_up_proj"
CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
}
GPT_OSS = CHECKPOINTS / "transformers-quant-5.24.0" / "tiny-gpt-oss-mxfp4"


def stored(experts, rows, groups, *, seed=0):
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (experts, rows, groups, 16), dtype=np.uint8)
    exponents = rng.integers(100, 140, (experts, rows, groups), dtype=np.uint8)
    return {
        f"{P}_blocks": torch.from_numpy(blocks),
        f"{P}_scales": torch.from_numpy(exponents),
        f"{P}_bias": torch.ones(experts, rows, dtype=torch.bfloat16),
    }


def reference(tensors):
    """[E, K, N] in float64, byte by byte."""
    blocks, exponents = (tensors[P + ending].numpy() for ending in ("_blocks", "_scales"))
    experts, rows, groups, _ = blocks.shape
    values = oracles.e2m1_values()
    out = np.empty((experts, 32 * groups, rows))
    for e, n, g, i in np.ndindex(blocks.shape):
        factor = 2.0 ** (int(exponents[e, n, g]) - 127)
        out[e, 32 * g + 2 * i, n] = values[blocks[e, n, g, i] & 15] * factor
        out[e, 32 * g + 2 * i + 1, n] = values[blocks[e, n, g, i] >> 4] * factor
    return out


def write(folder, tensors, config=CONFIG):
    folder.mkdir(parents=True, exist_ok=True)
    content = {**tiny_checkpoints.config(), "quantization_config": config}
    (folder / "config.json").write_text(json.dumps(content))
    tensors = {name: part.contiguous().clone() for name, part in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def opened(folder):
    return open_source(open_checkpoint(folder))


@pytest.mark.parametrize(("experts", "rows", "groups"), [(1, 1, 1), (3, 10, 2), (2, 5, 5)])
def test_values(tmp_path, experts, rows, groups):
    tensors = stored(experts, rows, groups)
    source = opened(write(tmp_path, tensors))
    weight = source.weights[P]
    assert weight.parameter_name == weight.module == P
    assert (weight.experts, weight.shape) == (experts, (rows, 32 * groups))
    assert weight.parameter_shape == (experts, 32 * groups, rows)
    found = source.read_parameter(P)
    assert found.dtype == weight.dtype == torch.bfloat16
    assert np.array_equal(found.double().numpy(), reference(tensors))
    assert set(source.plain) == {f"{P}_bias"}
    assert (weight.scheme.weight.grid.name, weight.scheme.weight.scale) == ("e2m1", "e8m0")
    assert weight.scheme.input is None


def test_exponents_of_the_dtype_of_exponents(tmp_path):
    tensors = stored(2, 4, 1)
    expected = reference(tensors)
    tensors[f"{P}_scales"] = tensors[f"{P}_scales"].view(torch.float8_e8m0fnu)
    assert np.array_equal(opened(write(tmp_path, tensors)).read_parameter(P).double(), expected)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"_scales": None}, MissingTensor, f"{P}_scales"),
        ({"_blocks": None}, MissingTensor, f"{P}_blocks"),
        ({"_scales": torch.zeros(2, 4, 3, dtype=torch.uint8)}, FormatMismatch, r"\(2, 4, 3, 16\)"),
        ({"_scales": torch.ones(2, 4, 2)}, FormatMismatch, "float32"),
        ({"_blocks": torch.zeros(2, 4, 32, dtype=torch.uint8)}, FormatMismatch, r"\[E, N, K/32"),
        ({"_blocks": torch.zeros(2, 4, 2, 8, dtype=torch.uint8)}, FormatMismatch, "_blocks"),
        ({"": torch.zeros(2, 64, 4)}, FormatMismatch, "full precision"),
    ],
)
def test_files_that_do_not_fit(tmp_path, changes, error, match):
    parts = stored(2, 4, 2)
    for ending, part in changes.items():
        parts[P + ending] = part
    parts = {name: part for name, part in parts.items() if part is not None}
    with pytest.raises(error, match=match):
        opened(write(tmp_path, parts))


def test_exponent_255_is_nan(tmp_path):
    tensors = stored(2, 4, 2)
    tensors[f"{P}_scales"][1, 3, 0] = 255
    with pytest.raises(NonFiniteWeight, match=f"{P}_scales"):
        opened(write(tmp_path, tensors)).read_weight(P)


@pytest.mark.parametrize("value", ["lm_head", 3, [1], {"a": 1}, [None], True])
def test_lists_of_any_type_are_refused_by_name(tmp_path, value):
    config = {"quant_method": "mxfp4", "modules_to_not_convert": value}
    with pytest.raises(QuantloadError, match="modules_to_not_convert"):
        opened(write(tmp_path, stored(1, 2, 1), config))


def test_files_are_believed(tmp_path):
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.0.mlp.experts"]}
    source = opened(write(tmp_path, stored(1, 2, 1), config))
    assert source.weights[P].is_quantized
    assert P in source.warnings[0]


def test_no_fault_is_silent(tmp_path):
    folder = write(tmp_path / "sound", stored(2, 6, 2))
    assert silent_faults(folder, tmp_path) == {}


@pytest.mark.skipif(not GPT_OSS.is_dir(), reason="no folder shared/checkpoints")
def test_gpt_oss(tmp_path):
    truth = Truth(GPT_OSS)
    options = PlanOptions(dtype=torch.float32)
    quantload.convert(GPT_OSS, tmp_path / "dense", "dense", options=options)
    dense = load_file(tmp_path / "dense" / "model.safetensors")
    for key in truth.weights:
        assert not truth.difference(key, dense[key.partition("@")[0]]), key
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    model = quantload.load(GPT_OSS, device="cpu", dtype=torch.float32, quantize_inputs=False)
    with torch.no_grad():
        expected = plain(truth.tensors["input_ids"], use_cache=False).logits
        found = model(truth.tensors["input_ids"], use_cache=False).logits
    assert (found - expected).norm() <= 1e-4 * expected.norm()
    stored_logits = truth.tensors["logits"].float()
    assert (found - stored_logits).norm() <= 0.02 * stored_logits.norm()
