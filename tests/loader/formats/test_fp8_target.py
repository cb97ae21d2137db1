"""`fp8` as it is written: read back bit for bit, and the bytes of transformers and DeepSeek."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from truth import CHECKPOINTS
from written import assert_reads_back, leaves_of, quantized, uneven_weight, written_config

from quantload.errors import ConfigError
from quantload.loader.formats import open_source
from quantload.loader.formats.targets import target_named
from quantload.loader.open import open_checkpoint
from quantload.quant.scheme import parse_scheme

FP8 = target_named("fp8")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
PRODUCED = [
    "transformers-quant-5.24.0/tiny-llama-fp8-block128",
    "transformers-quant-5.24.0/odd-llama-fp8-block128-partial",
    "transformers-quant-5.24.0/micro-llama-fp8-block64-skip",
]
LAYER = "model.layers.3.self_attn"


def model_of(scheme, *, dtype=torch.bfloat16, shape=(200, 300), kept=()):
    weight = uneven_weight(*shape, dtype=dtype)
    modules = {f"{LAYER}.{name}": (weight, parse_scheme(scheme)) for name in ("q_proj", "o_proj")}
    return modules | dict.fromkeys(kept, (weight, None))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(200, 300), (128, 128), (256, 384), (5, 7)])
@pytest.mark.parametrize("scheme", ["FP8_BLOCK", "FP8"])
def test_reads_back_bit_for_bit(scheme, shape, dtype):
    modules = model_of(scheme, dtype=dtype, shape=shape, kept=["lm_head", f"{LAYER}.k_proj"])
    source = assert_reads_back(FP8, modules, dtype=str(dtype).removeprefix("torch."))
    assert source.weights[f"{LAYER}.q_proj"].scheme == parse_scheme(scheme)


@pytest.mark.parametrize("name", PRODUCED)
def test_bytes_are_those_of_the_tools(name):
    folder = CHECKPOINTS / name
    if not folder.exists():
        pytest.skip(f"no real checkpoint {name}")
    source = open_source(open_checkpoint(folder))
    compared = 0
    for module, weight in source.weights.items():
        if not weight.is_quantized:
            continue
        assert FP8.obstacle(weight.scheme, weight.shape) == ""
        found = leaves_of(FP8, source.read_weight(module), weight.scheme)
        for leaf, tensor in weight.leaves.items():
            stored = source.checkpoint.read(tensor)
            assert torch.equal(found[leaf].view(torch.uint8), stored.view(torch.uint8)), tensor
            compared += 1
    assert compared >= 2 * 7


def test_config_of_blocks():
    written = written_config(FP8, model_of("FP8_BLOCK", kept=["lm_head"]))
    assert written.files == {}
    assert written.quantization_config == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }


def test_config_of_tensors():
    found = written_config(FP8, model_of("FP8")).quantization_config
    assert (found["activation_scheme"], found["weight_block_size"]) == ("static", None)


def test_one_scale_for_the_tensor_has_the_names_of_vllm():
    scheme = parse_scheme("FP8")
    leaves = leaves_of(FP8, quantized(FP8, uneven_weight(16, 32), scheme), scheme)
    assert {n: (t.dtype, t.ndim) for n, t in leaves.items() if n != "weight"} == {
        "weight_scale": (torch.float32, 0),
        "input_scale": (torch.float32, 0),
    }
    assert float(leaves["input_scale"]) == pytest.approx(12.0 / 448, rel=1e-7)


@pytest.mark.parametrize("shape", [(300, 200), (256, 128)])
def test_parts_of_a_weight_make_the_whole(shape):
    scheme = parse_scheme("FP8_BLOCK")
    weight = uneven_weight(*shape)
    whole = leaves_of(FP8, FP8.quantize(weight, scheme.weight), scheme)
    step = FP8.row_step(scheme)
    assert step == 128
    parts = [
        FP8.encode(FP8.quantize(rows, scheme.weight), scheme, shape) for rows in weight.split(step)
    ]
    for leaf, tensor in whole.items():
        assert torch.equal(
            torch.cat([p[leaf].view(torch.uint8) for p in parts]), tensor.view(torch.uint8)
        )


@pytest.mark.parametrize(
    ("scheme", "reason"),
    [
        ("FP8_DYNAMIC", "one scale a row"),
        ("W8A8", "its codes are int8"),
        ("MXFP8", "with scales of floats"),
        ("FP8_BLOCK", ""),
        ("FP8", ""),
    ],
)
def test_obstacles(scheme, reason):
    found = FP8.obstacle(parse_scheme(scheme), (64, 128))
    assert (reason in found) if reason else found == ""


def test_inputs_that_the_config_does_not_say_are_obstacles():
    block, tensor = parse_scheme("FP8_BLOCK"), parse_scheme("FP8")
    assert "not quantized to e4m3" in FP8.obstacle(replace(block, input=None), (64, 64))
    other = replace(block, input=replace(block.input, group_size=64))
    assert "groups of a block" in FP8.obstacle(other, (64, 64))
    dynamic = replace(tensor, input=replace(tensor.input, dynamic=True))
    assert "no fixed scale" in FP8.obstacle(dynamic, (64, 64))


def test_what_the_config_cannot_say_is_refused():
    both = {**model_of("FP8_BLOCK"), "model.layers.4.o_proj": (None, parse_scheme("FP8"))}
    with pytest.raises(ConfigError, match="one kind of scales"):
        written_config(FP8, both)
    with pytest.raises(ConfigError, match="heads, found `lm_head`"):
        written_config(FP8, model_of("FP8_BLOCK"), named=["lm_head"])
