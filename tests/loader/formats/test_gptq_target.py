"""GPTQ as it is written: read back bit for bit, and the bytes of the tools that write it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from truth import CHECKPOINTS
from written import (
    MODULES,
    assert_reads_back,
    leaves_of,
    read_back,
    uneven_weight,
    written_config,
    written_tensors,
)

from quantload.errors import ConfigError
from quantload.loader.formats import open_source
from quantload.loader.formats.gptq_layout import encode_gptq
from quantload.loader.formats.targets import target_named
from quantload.loader.open import open_checkpoint
from quantload.quant.scheme import parse_scheme

GPTQ = target_named("gptq")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SCHEMES = [
    *("W4A16", "W4A16:g32", "W4A16:channel", "W8A16:g64", "W8A16:channel", "W3A16:g32"),
    *("W3A16:channel", "W2A16:g32", "W4A16_ASYM:g32", "W4A16_ASYM:channel"),
]
PRODUCED = [
    "gptqmodel-7.7.0/micro-llama-w2g32",
    "gptqmodel-7.7.0/micro-llama-w3g32",
    "gptqmodel-7.7.0/micro-llama-w3g64-asym-descact",
    "gptqmodel-7.7.0/micro-llama-w4g32-descact-static",
    "gptqmodel-7.7.0/micro-llama-w4g64-asym-gptq_v2",
    "gptqmodel-7.7.0/micro-llama-w4g64-dynamic",
    "gptqmodel-7.7.0/micro-llama-w4g64-lmhead",
    "gptqmodel-7.7.0/micro-llama-w8-perchannel-asym-descact-v2",
    "gptqmodel-7.7.0/micro-llama-w8g64",
    "gptqmodel-7.7.0/odd-llama-w4g64",
    "gptqmodel-7.7.0/tiny-qwen3-moe-w4g64",
    "auto-round-0.16.1/nano-llama-auto_gptq-W2A16-asym-g32",
    "auto-round-0.16.1/nano-llama-auto_gptq-W8A16",
]


def model_of(*schemes, dtype=torch.bfloat16, shape=(64, 256)):
    """{module: (weight, scheme)}; None keeps a layer in full precision."""
    return {
        f"model.layers.{number}.mlp.down_proj": (
            uneven_weight(*shape, dtype=dtype, seed=number),
            parse_scheme(scheme) if scheme else None,
        )
        for number, scheme in enumerate(schemes)
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_reads_back_bit_for_bit(scheme, dtype):
    source = assert_reads_back(GPTQ, model_of(scheme, scheme, dtype=dtype))
    assert {str(w.scheme.weight) for w in source.weights.values()} == {
        str(parse_scheme(scheme).weight)
    }


@pytest.mark.parametrize("name", PRODUCED)
def test_bytes_are_those_of_the_tools(name):
    """Decoded and encoded again: act-order, both versions and borrowing zero points included."""
    folder = CHECKPOINTS / name
    if not folder.exists():
        pytest.skip(f"no real checkpoint {name}")
    source = open_source(open_checkpoint(folder))
    compared = 0
    for module, weight in source.weights.items():
        if not weight.is_quantized:
            continue
        found = encode_gptq(source.read_weight(module), source.reader._layouts[module])
        for leaf, tensor in weight.leaves.items():
            assert torch.equal(found[leaf], source.checkpoint.read(tensor)), tensor
            assert found[leaf].dtype == source.checkpoint.tensors[tensor].dtype
            compared += 1
    assert compared >= 4 * 7


def test_symmetric_models_are_version_1_and_others_version_2():
    symmetric = written_config(GPTQ, model_of("W4A16")).quantization_config
    asymmetric = written_config(GPTQ, model_of("W4A16_ASYM")).quantization_config
    assert (symmetric["checkpoint_format"], symmetric["sym"]) == ("gptq", True)
    assert (asymmetric["checkpoint_format"], asymmetric["sym"]) == ("gptq_v2", False)
    tensors, _ = written_tensors(GPTQ, model_of("W4A16:g32"))
    zeros = tensors["model.layers.0.mlp.down_proj.qzeros"]
    assert set(zeros.flatten().tolist()) == {0x77777777}  # 8 - 1


def test_a_group_without_negative_values_has_zero_point_0():
    modules = model_of("W4A16_ASYM:g32")
    ((module, (weight, scheme)),) = modules.items()
    modules[module] = (weight.abs(), scheme)
    source = assert_reads_back(GPTQ, modules)
    assert int(source.read_weight(module).zero.max()) == -8  # signed


def test_config_names_what_differs():
    modules = model_of("W4A16:g64", "W4A16:g64", "W8A16:g32", "W4A16:channel", None)
    config = written_config(GPTQ, modules).quantization_config
    assert {k: config[k] for k in ("bits", "group_size", "sym", "desc_act", "lm_head")} == {
        "bits": 4,
        "group_size": 64,
        "sym": True,
        "desc_act": False,
        "lm_head": False,
    }
    assert config["dynamic"] == {
        r"+:^model\.layers\.2\.mlp\.down_proj$": {"bits": 8, "group_size": 32},
        r"+:^model\.layers\.3\.mlp\.down_proj$": {"group_size": -1},
        r"-:^model\.layers\.4\.mlp\.down_proj$": {},
    }
    assert_reads_back(GPTQ, modules)


def test_quantize_config_repeats_config_json():
    written = written_config(GPTQ, model_of("W4A16"))
    assert written.files == {"quantize_config.json": written.quantization_config}
    assert json.loads(json.dumps(written.quantization_config)) == written.quantization_config
    assert "dynamic" not in written.quantization_config


@pytest.mark.parametrize("last", ["W8A16:g64", None])
def test_fused_layers_are_named_where_all_parts_agree(last):
    """vLLM looks for `gate_up_proj`; a rule for one part would say nothing, or the wrong thing."""
    weight = uneven_weight(64, 128)
    modules = model_of("W4A16:g64", "W4A16:g64", "W4A16:g64")
    scheme = parse_scheme(last) if last else None
    for part in ("gate_proj", "up_proj"):
        modules[f"model.layers.0.mlp.{part}"] = (weight, scheme)
        modules[f"model.layers.1.mlp.{part}"] = (weight, parse_scheme("W4A16:g64"))
    modules["model.layers.2.mlp.gate_proj"] = (weight, scheme)
    modules["model.layers.2.mlp.up_proj"] = (weight, parse_scheme("W4A16:g64"))
    rules = written_config(GPTQ, modules).quantization_config["dynamic"]
    fused = [key for key in rules if "gate_up_proj" in key]
    assert fused == [("+:" if last else "-:") + r"^model\.layers\.0\.mlp\.gate_up_proj$"]
    assert_reads_back(GPTQ, modules)


def test_a_quantized_head_is_said():
    modules = {**model_of("W4A16:g64"), "lm_head": (uneven_weight(64, 128), None)}
    kept = written_config(GPTQ, modules).quantization_config
    assert (kept["lm_head"], "dynamic" in kept) == (False, False)
    modules["lm_head"] = (modules["lm_head"][0], parse_scheme("W8A16:g64"))
    assert written_config(GPTQ, modules, named=["lm_head"]).quantization_config["lm_head"] is True
    assert_reads_back(GPTQ, modules, named=["lm_head"])


@pytest.mark.parametrize(
    ("scheme", "shape", "reason"),
    [
        ("W8A8", (64, 128), "its inputs are quantized"),
        ("NVFP4A16", (64, 128), "its codes are e2m1"),
        ("FP8_DYNAMIC", (64, 128), "its inputs are quantized"),
        ("W5A16:g32", (64, 128), "it has 5 bits"),
        ("W4A16:g32", (48, 128), "48 x 128, expected multiples of 32"),
        ("W4A16:channel", (64, 100), "64 x 100, expected multiples of 32"),
        ("W4A16:g32", (64, 128), ""),
        ("dense", (3, 5), ""),
    ],
)
def test_obstacles(scheme, shape, reason):
    found = GPTQ.obstacle(parse_scheme(scheme), shape)
    assert (reason in found) if reason else found == ""


def test_blocks_and_tensors_are_obstacles():
    scheme = parse_scheme("W4A16:channel")
    scheme = replace(scheme, weight=replace(scheme.weight, granularity="tensor"))
    assert "one scale a tensor" in GPTQ.obstacle(scheme, (64, 64))


def test_what_the_config_cannot_say_is_refused():
    modules = model_of("W4A16", "W4A16_ASYM")
    with pytest.raises(ConfigError, match="by two conventions"):
        written_config(GPTQ, modules)
    embedded = {**model_of("W4A16"), "model.embed_tokens": (None, parse_scheme("W8A16"))}
    with pytest.raises(ConfigError, match=r"quantized embeddings, found `model\.embed_tokens`"):
        written_config(GPTQ, embedded, named=["model.embed_tokens"])
    cache = {"num_bits": 8, "type": "float"}
    with pytest.raises(ConfigError, match="key-value cache"):
        written_config(GPTQ, model_of("W4A16"), cache_scheme=cache)


def test_a_weight_is_encoded_as_a_whole():
    scheme = parse_scheme("W4A16:g32")
    assert GPTQ.row_step(scheme) is None
    weight = uneven_weight(64, 128)
    assert set(leaves_of(GPTQ, GPTQ.quantize(weight, scheme.weight), scheme)) == {
        *("qweight", "qzeros", "scales", "g_idx")
    }


def test_the_names_of_both_modules_are_found():
    source, _ = read_back(
        GPTQ, {m: (uneven_weight(64, 64), parse_scheme("W4A16:g32")) for m in MODULES}
    )
    assert set(source.weights) == set(MODULES)
