"""ModelOpt as it is written: read back bit for bit, and the bytes of ModelOpt's own export."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from truth import CHECKPOINTS
from written import (
    assert_reads_back,
    leaves_of,
    quantized,
    uneven_weight,
    written_config,
    written_tensors,
)

from quantload.errors import ConfigError
from quantload.loader.formats import open_source
from quantload.loader.formats.targets import target_named
from quantload.loader.open import open_checkpoint
from quantload.quant.qtensor import QuantTensor
from quantload.quant.scheme import parse_scheme

MODELOPT = target_named("modelopt")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ALGORITHMS = {
    "FP8": "FP8",
    "FP8_DYNAMIC": "FP8_PER_CHANNEL_PER_TOKEN",
    "FP8_BLOCK": "FP8_PB_WO",
    "MXFP8": "MXFP8",
    "NVFP4": "NVFP4",
    "NVFP4A16": "W4A16_NVFP4",
    "W4A16": "W4A16_AWQ",
    "W4A16:g64": "W4A16_AWQ",
    "W4A16:channel": "W4A16_AWQ",
    "W8A16:channel": "W8A16",
}
PRODUCED = {
    "nano-llama-FP8": "FP8",
    "nano-llama-FP8-kv": "FP8",
    "tiny-qwen2-FP8": "FP8",
    "nano-llama-FP8_PC_PT": "FP8_DYNAMIC",
    "nano-llama-FP8_PB_WO": "FP8_BLOCK",
    "nano-llama-MXFP8": "MXFP8",
    "nano-llama-NVFP4-kv-fp8": "NVFP4",
    "nano-llama-W4A16_NVFP4": "NVFP4A16",
    "nano-llama-INT4_AWQ": "W4A16",
}
LAYER = "model.layers.0.mlp"


def model_of(*schemes, dtype=torch.bfloat16, shape=(96, 256), kept=("lm_head",)):
    modules = {
        f"model.layers.{number}.mlp.down_proj": (
            uneven_weight(*shape, dtype=dtype, seed=number),
            parse_scheme(scheme),
        )
        for number, scheme in enumerate(schemes)
    }
    return modules | {name: (uneven_weight(*shape, dtype=dtype), None) for name in kept}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", ALGORITHMS)
def test_reads_back_bit_for_bit(scheme, dtype):
    assert_reads_back(MODELOPT, model_of(scheme, scheme, dtype=dtype))
    found = written_config(MODELOPT, model_of(scheme)).quantization_config
    assert found["quant_algo"] == ALGORITHMS[scheme]


def test_partial_blocks_read_back():
    modules = model_of("FP8_BLOCK", shape=(200, 300))
    found = assert_reads_back(MODELOPT, modules)
    assert {found.weights[m].shape for m, (_, s) in modules.items() if s} == {(200, 300)}


@pytest.mark.parametrize("name", PRODUCED)
def test_bytes_are_those_of_modelopt(name):
    folder = CHECKPOINTS / "nvidia-modelopt-0.47.0" / name
    if not folder.exists():
        pytest.skip(f"no real checkpoint {name}")
    source = open_source(open_checkpoint(folder))
    compared = 0
    for module, weight in source.weights.items():
        if not weight.is_quantized:
            continue
        tensor = source.read_weight(module)
        assert isinstance(tensor, QuantTensor)
        if "input_scale" in weight.leaves:
            scale = source.checkpoint.read(weight.leaves["input_scale"]).reshape(1)
            tensor = replace(tensor, input_scale=scale)
        scheme = parse_scheme(PRODUCED[name])
        if scheme.weight.granularity == "group":
            scheme = replace(scheme, weight=weight.scheme.weight)
        found = MODELOPT.encode(tensor, scheme, weight.shape)
        for leaf, stored in weight.leaves.items():
            if leaf == "pre_quant_scale":
                continue
            expected = source.checkpoint.read(stored)
            assert found[leaf].dtype == expected.dtype, stored
            assert found[leaf].numel() == expected.numel(), stored
            same = found[leaf].reshape(expected.shape).contiguous().flatten().view(torch.uint8)
            assert torch.equal(same, expected.contiguous().flatten().view(torch.uint8)), stored
            compared += 1
    assert compared >= 2 * 7


@pytest.mark.parametrize("name", ["nano-llama-FP8-kv", "nano-llama-NVFP4-kv-fp8"])
def test_config_is_that_of_modelopt(name):
    folder = CHECKPOINTS / "nvidia-modelopt-0.47.0" / name
    if not folder.exists():
        pytest.skip(f"no real checkpoint {name}")
    scheme = PRODUCED[name]
    modules = model_of(scheme, kept=("lm_head", "model.embed_tokens"))
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    written = written_config(MODELOPT, modules, cache_scheme=cache)
    flat = dict(written.quantization_config)
    nested = dict(written.files["hf_quant_config.json"])
    assert flat.pop("producer") == nested.pop("producer")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    beside = json.loads((folder / "hf_quant_config.json").read_text())
    assert config.pop("producer")["name"] == beside.pop("producer")["name"] == "modelopt"
    assert flat == config
    assert nested == beside


def test_scales_of_the_tensor_multiply():
    """compressed-tensors divides by its global scales; an input's is inverted, a weight's not."""
    scheme = parse_scheme("NVFP4")
    tensor = quantized(MODELOPT, uneven_weight(16, 64), scheme)
    assert tensor.evaluation.outer == "scale*"
    leaves = leaves_of(MODELOPT, tensor, scheme)
    assert float(leaves["weight_scale_2"]) == float(tensor.outer)
    assert tensor.evaluation.input == "/"
    assert float(leaves["input_scale"]) == pytest.approx(12.0 / 2688, rel=1e-6)


def test_mixed_precision_names_every_layer():
    modules = model_of("NVFP4A16", "FP8_DYNAMIC", "W4A16:g64")
    written = written_config(MODELOPT, modules)
    details = written.files["hf_quant_config.json"]["quantization"]
    assert details["quant_algo"] == "MIXED_PRECISION"
    assert details["quantized_layers"] == {
        "model.layers.0.mlp.down_proj": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        "model.layers.1.mlp.down_proj": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        "model.layers.2.mlp.down_proj": {
            "quant_algo": "W4A16_AWQ",
            "group_size": 64,
            "has_zero_point": False,
            "pre_quant_scale": False,
        },
    }
    groups = written.quantization_config["config_groups"]
    assert [group["targets"] for group in groups.values()] == [[m] for m in list(modules)[:3]]
    assert_reads_back(MODELOPT, modules)


@pytest.mark.parametrize("scheme", ["W4A16:g64", "NVFP4", "FP8", "FP8_BLOCK", "MXFP8"])
def test_parts_of_a_weight_make_the_whole(scheme):
    scheme = parse_scheme(scheme)
    weight = uneven_weight(256, 128)
    tensor = quantized(MODELOPT, weight, scheme)
    whole = leaves_of(MODELOPT, tensor, scheme)
    step = max(MODELOPT.row_step(scheme), 64)
    parts = [
        MODELOPT.encode(tensor.rows(start, start + step), scheme, tensor.shape)
        for start in range(0, 256, step)
    ]
    for leaf, expected in whole.items():
        if expected.ndim == 0:
            assert all(torch.equal(part[leaf], expected) for part in parts)
            continue
        joined = torch.cat([part[leaf].view(torch.uint8) for part in parts])
        assert torch.equal(joined, expected.view(torch.uint8)), leaf


@pytest.mark.parametrize(
    ("scheme", "shape", "reason"),
    [
        ("W8A8", (64, 128), "no algorithm"),
        ("W4A16_ASYM", (64, 128), "no algorithm"),
        ("MXFP4", (64, 128), "no algorithm"),
        ("W4AFP8", (64, 128), "no algorithm"),
        ("W8A16", (64, 128), "`W8A16:channel`"),
        ("W4A16", (63, 128), "63 output features"),
        ("W4A16", (64, 128), ""),
        ("dense", (3, 5), ""),
    ],
)
def test_obstacles(scheme, shape, reason):
    found = MODELOPT.obstacle(parse_scheme(scheme), shape)
    assert (reason in found) if reason else found == ""


def test_what_the_config_cannot_say_is_refused():
    with pytest.raises(ConfigError, match="quantized embeddings"):
        written_config(MODELOPT, model_of("FP8"), named=["model.embed_tokens"])
    cache = {"num_bits": 8, "type": "float", "strategy": "channel"}
    with pytest.raises(ConfigError, match="no name for a key-value cache of 8-bit float"):
        written_config(MODELOPT, model_of("FP8"), cache_scheme=cache)


def test_int4_lies_along_the_output_features():
    scheme = parse_scheme("W4A16:g64")
    modules = {f"{LAYER}.up_proj": (uneven_weight(4, 64), scheme)}
    tensors, made = written_tensors(MODELOPT, modules)
    stored, codes = tensors[f"{LAYER}.up_proj.weight"], made[f"{LAYER}.up_proj"].codes
    for row, column in [(0, 0), (1, 5), (2, 63), (3, 7)]:
        nibble = (int(stored[row // 2, column]) >> (4 * (row % 2))) & 15
        assert nibble == int(codes[row, column]) % 16
