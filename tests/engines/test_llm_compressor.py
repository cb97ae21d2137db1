"""What `convert` writes equals, byte for byte, what llm-compressor writes for every preset scheme.

Opt-in: `pytest -m tools`, with QUANTLOAD_LLM_COMPRESSOR_PYTHON naming the interpreter of an
environment that holds llm-compressor (tried: 0.14.0.1 with compressed-tensors 0.19.0). One of its
processes quantizes a model to all schemes. Where bytes differ by design, the test says so:

* Sub-byte weights with quantized inputs: it writes int8 codes, we pack them. Codes are compared.
* Weights of -0.0 in e4m3: model_free_ptq keeps the sign, oneshot does not, since it adds a zero
  point of 0. We write what oneshot does.
* Global scales of inputs (NVFP4): it divides in the dtype of the model, we do so in float32.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from smollm2 import smollm2_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from truth import CHECKPOINTS

from quantload import api
from quantload.loader.plan import PlanOptions
from quantload.loader.stats import read_stats
from quantload.quant.qtensor import QuantTensor

pytestmark = [pytest.mark.tools, pytest.mark.slow]

PACKED = ["W4A16", "W8A16", "W3A16", "W2A16", "W5A16", "W6A16", "W7A16", "W4A16_ASYM"]
FLOAT = ["FP8_DYNAMIC", "FP8_BLOCK", "MXFP8", "MXFP8A16"]
SAME = [*PACKED, *FLOAT, "W8A8", "NVFP4A16", "MXFP4", "MXFP4A16"]
WITH_INPUT_SCALES = ["FP8", "NVFP4"]
UNPACKED = [
    *("W2A4", "W3A4", "W4A4", "W2A8", "W3A8", "W4A8", "W5A8", "W6A8"),
    "W4AFP8",
]
MODEL_FREE = [*SAME, *UNPACKED]
ONESHOT = [*SAME, *UNPACKED, *WITH_INPUT_SCALES]
OF_SMOLLM2 = [  # whose widths are no multiples of 128
    *("W4A16:g64", "W4A16_ASYM:g64", "W3A16:g64", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK"),
    *("NVFP4A16", "MXFP4", "MXFP8", "NVFP4", "FP8"),
]
FIRST_INPUTS = tuple(f"model.layers.0.self_attn.{name}_proj" for name in "qkv")
INPUT_SCALES = (".input_scale", ".input_global_scale")
MINUS_ZERO = 0x80  # of e4m3
WEIGHTS = "model.safetensors"


def save_llama(folder):
    """Weights with heavy tails, rows that differ in size, and zeros of both signs."""
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=256,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    torch.manual_seed(1)
    model = LlamaForCausalLM(config)
    for module in model.model.modules():
        if isinstance(module, torch.nn.Linear):
            shape = module.weight.shape
            weight = torch.distributions.StudentT(4.0).sample(shape) * 0.02
            weight *= 4.0 ** (2 * torch.rand(shape[0], 1) - 1)
            weight[torch.rand(shape) < 0.01] = 0.0
            weight[torch.rand(shape) < 0.01] = -0.0
            module.weight.data.copy_(weight)
    model.to(torch.bfloat16).save_pretrained(folder)


def by_llm_compressor(source, output, jobs):
    python = os.environ.get("QUANTLOAD_LLM_COMPRESSOR_PYTHON")
    if not python:
        pytest.skip("QUANTLOAD_LLM_COMPRESSOR_PYTHON does not name an interpreter")
    script = Path(__file__).parent / "llm_compressor_quantize.py"
    done = subprocess.run(
        [python, str(script), str(source), str(output), *jobs],
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    errors = {path.name: path.read_text()[-500:] for path in output.glob("*.error")}
    assert not errors, errors
    return output


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "llama"
    save_llama(folder)
    return folder


@pytest.fixture(scope="module")
def of_llama(llama, tmp_path_factory):
    jobs = [f"model_free={scheme}" for scheme in MODEL_FREE]
    jobs += [f"oneshot={scheme}" for scheme in ONESHOT]
    return by_llm_compressor(llama, tmp_path_factory.mktemp("theirs"), jobs)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """The first two layers of a real model."""
    folder = tmp_path_factory.mktemp("base") / "smollm2"
    options = PlanOptions(layers="0-1", dtype=torch.bfloat16)
    return api.convert(smollm2_file(), folder, "dense", options=options).folder


@pytest.fixture(scope="module")
def of_smollm2(smollm2, tmp_path_factory):
    jobs = [f"oneshot={scheme}" for scheme in OF_SMOLLM2]
    return by_llm_compressor(smollm2, tmp_path_factory.mktemp("theirs"), jobs)


def theirs(folder, job):
    return folder / re.sub(r"\W", "-", job)


def ours(source, folder, scheme, stats=None):
    name, _, size = scheme.partition(":g")
    options = PlanOptions(stats=read_stats(stats) if stats else None)
    done = api.convert(
        source,
        folder,
        name,
        group_size=int(size) if size else None,
        options=options,
        verify_output=False,
    )
    return done.folder


def tensors_of(folder):
    return load_file(folder / "model.safetensors")


def data(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_same_bytes(own, other):
    assert own.keys() == other.keys()
    for name, tensor in own.items():
        assert (tensor.dtype, tensor.shape) == (other[name].dtype, other[name].shape), name
        assert torch.equal(data(tensor), data(other[name])), name


def without_input_scales(tensors):
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(INPUT_SCALES)}


def assert_same_input_scales(own, other):
    """Those of all layers are there, with the same dtype; those of the first inputs are equal.

    Later inputs differ in the last bit between its forward pass and a plain one.
    """
    names = [name for name in other if name.endswith(INPUT_SCALES)]
    assert len(names) == 14
    assert set(names) == {name for name in own if name.endswith(INPUT_SCALES)}
    for name in names:
        assert (own[name].dtype, own[name].shape) == (other[name].dtype, other[name].shape), name
        torch.testing.assert_close(own[name], other[name], rtol=0.02, atol=0)
        if name.startswith(FIRST_INPUTS):
            # It divides in the dtype of the model; we do so in float32 what is stored in float32.
            expected, got = other[name].bfloat16(), own[name].bfloat16()
            assert torch.equal(got, expected), name


def assert_same_format(own, other):
    configs = [json.loads((f / "config.json").read_text()) for f in (own, other)]
    one, two = (config["quantization_config"] for config in configs)
    assert one["format"] == two["format"]
    groups = [list(config["config_groups"].values()) for config in (one, two)]
    assert [g["format"] for g in groups[0]] == [g["format"] for g in groups[1]]


def assert_same_codes(own, other):
    """Canonical codes and scales of every quantized module."""
    mine, its = api.inspect(own), api.inspect(other)
    modules = [module for module in mine.weights if "_proj" in module]
    assert len(modules) == 14
    for module in modules:
        one, two = mine.read_weight(module), its.read_weight(module)
        assert isinstance(one, QuantTensor)
        assert isinstance(two, QuantTensor)
        assert one.grid == two.grid, module
        assert torch.equal(one.codes, two.codes), module
        assert torch.equal(data(one.scale), data(two.scale)), module


@pytest.mark.parametrize("scheme", SAME)
def test_oneshot_writes_the_same_bytes(llama, of_llama, tmp_path, scheme):
    folder = ours(llama, tmp_path / "out", scheme)
    other = theirs(of_llama, f"oneshot={scheme}")
    assert_same_bytes(tensors_of(folder), tensors_of(other))
    assert_same_format(folder, other)


@pytest.mark.parametrize("scheme", WITH_INPUT_SCALES)
def test_oneshot_writes_the_same_bytes_given_maxima_of_inputs(llama, of_llama, tmp_path, scheme):
    folder = ours(llama, tmp_path / "out", scheme, of_llama / "stats.safetensors")
    other = theirs(of_llama, f"oneshot={scheme}")
    assert_same_format(folder, other)
    own, its = tensors_of(folder), tensors_of(other)
    assert_same_input_scales(own, its)
    assert_same_bytes(without_input_scales(own), without_input_scales(its))


@pytest.mark.parametrize("function", ["oneshot", "model_free"])
@pytest.mark.parametrize("scheme", UNPACKED)
def test_codes_are_the_same_where_it_does_not_pack(llama, of_llama, tmp_path, scheme, function):
    folder = ours(llama, tmp_path / "out", scheme)
    assert_same_codes(folder, theirs(of_llama, f"{function}={scheme}"))


@pytest.mark.parametrize("scheme", [scheme for scheme in SAME if scheme not in FLOAT])
def test_model_free_writes_the_same_bytes(llama, of_llama, tmp_path, scheme):
    folder = ours(llama, tmp_path / "out", scheme)
    other = theirs(of_llama, f"model_free={scheme}")
    assert_same_bytes(tensors_of(folder), tensors_of(other))
    assert_same_format(folder, other)


@pytest.mark.parametrize("scheme", FLOAT)
def test_model_free_keeps_the_sign_of_weights_that_are_minus_zero(
    llama, of_llama, tmp_path, scheme
):
    own = tensors_of(ours(llama, tmp_path / "out", scheme))
    other = tensors_of(theirs(of_llama, f"model_free={scheme}"))
    signed = 0
    for name, weight in tensors_of(llama).items():
        if name.endswith("proj.weight"):
            is_minus_zero = (weight == 0) & weight.signbit()
            codes = other[name].view(torch.uint8)
            assert (codes[is_minus_zero] == MINUS_ZERO).all(), name
            codes[is_minus_zero] = 0
            signed += int(is_minus_zero.sum())
    assert signed > 1000
    assert_same_bytes(own, other)


@pytest.mark.parametrize("scheme", OF_SMOLLM2)
def test_oneshot_writes_the_same_bytes_for_a_real_model(smollm2, of_smollm2, tmp_path, scheme):
    stats = of_smollm2 / "stats.safetensors" if scheme in WITH_INPUT_SCALES else None
    folder = ours(smollm2, tmp_path / "out", scheme, stats)
    own, its = tensors_of(folder), tensors_of(theirs(of_smollm2, f"oneshot={scheme}"))
    if stats:
        assert_same_input_scales(own, its)
    assert_same_bytes(without_input_scales(own), without_input_scales(its))


def test_it_reads_single_experts_of_gpt_oss(tmp_path):
    python = os.environ.get("QUANTLOAD_LLM_COMPRESSOR_PYTHON")
    source = CHECKPOINTS / "transformers-quant-5.24.0" / "tiny-gpt-oss-mxfp4"
    if not python or not source.is_dir():
        pytest.skip("no llm-compressor, or no shared checkpoints")
    apart = api.convert(source, tmp_path / "apart", "same", options=PlanOptions(lossless=True))
    script = Path(__file__).parent / "llm_compressor_experts.py"
    done = subprocess.run(
        [python, str(script), str(apart.folder), str(tmp_path / "theirs.safetensors")],
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    made, stored = load_file(tmp_path / "theirs.safetensors"), load_file(source / WEIGHTS)
    for layer in range(2):
        block = f"model.layers.{layer}.mlp.experts"
        whole = {
            name: convert_moe_packed_tensors(
                stored[f"{block}.{name}_blocks"], stored[f"{block}.{name}_scales"]
            ).mT
            for name in ("gate_up_proj", "down_proj")
        }
        for expert in range(4):
            for name, parameter, rows in (
                ("gate_proj", "gate_up_proj", slice(0, None, 2)),
                ("up_proj", "gate_up_proj", slice(1, None, 2)),
                ("down_proj", "down_proj", slice(None)),
            ):
                weight, bias = (made[f"{block}.{expert}.{name}.{x}"] for x in ("weight", "bias"))
                assert torch.equal(weight.float(), whole[parameter][expert][rows].float())
                assert torch.equal(bias, stored[f"{block}.{parameter}_bias"][expert][rows])
