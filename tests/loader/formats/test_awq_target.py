"""AWQ as it is written: read back bit for bit, and the bytes of the tools that write it."""

from __future__ import annotations

import pytest
import torch
from truth import CHECKPOINTS
from written import assert_reads_back, uneven_weight, written_config, written_tensors

from quantload.errors import ConfigError
from quantload.loader.formats import open_source
from quantload.loader.formats.targets import target_named
from quantload.loader.open import open_checkpoint
from quantload.quant.scheme import parse_scheme

AWQ = target_named("awq")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SCHEMES = ["W4A16", "W4A16:channel", "W4A16_ASYM:g32", "W4A16_ASYM:channel"]
PRODUCED = [
    "autoawq-0.2.9/micro-llama-gemm-g64-skip",
    "autoawq-0.2.9/tiny-qwen2-gemm-g64",
    "gptqmodel-7.7.0/micro-llama-awq-gemm-g64",
    "gptqmodel-7.7.0/tiny-qwen3-moe-awq-gemm-g64",
    "auto-round-0.16.1/tiny-qwen2-auto_awq-W4A16-sym",
]
LAYER = "model.layers.1.mlp"


def model_of(scheme, *, dtype=torch.bfloat16, **kept):
    modules = {
        f"{LAYER}.{name}": (
            uneven_weight(40, 256, dtype=dtype, seed=seed),
            parse_scheme(scheme),
        )
        for seed, name in enumerate(("gate_proj", "down_proj"))
    }
    return modules | {f"{LAYER}.{n}": (uneven_weight(*shape), None) for n, shape in kept.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_reads_back_bit_for_bit(scheme, dtype):
    modules = model_of(scheme, dtype=dtype, up_proj=(40, 256))
    found = assert_reads_back(AWQ, modules)
    assert {m for m, w in found.weights.items() if not w.is_quantized} == {f"{LAYER}.up_proj"}


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
        found = AWQ.encode(source.read_weight(module), weight.scheme, weight.shape)
        for leaf, tensor in weight.leaves.items():
            assert torch.equal(found[leaf], source.checkpoint.read(tensor)), tensor
            compared += 1
    assert compared >= 3 * 7


def test_a_symmetric_weight_has_zero_points_of_8():
    tensors, _ = written_tensors(AWQ, model_of("W4A16:g64"))
    zeros = tensors[f"{LAYER}.down_proj.qzeros"].flatten()
    assert set((zeros.to(torch.int64) & 0xFFFFFFFF).tolist()) == {0x88888888}
    assert written_config(AWQ, model_of("W4A16")).quantization_config["zero_point"] is True


def test_config():
    written = written_config(AWQ, model_of("W4A16_ASYM:g64", up_proj=(8, 64)))
    assert written.quantization_config == {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 64,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": [f"{LAYER}.up_proj"],
    }
    assert written.files == {"quantize_config.json": written.quantization_config}
    assert written_config(AWQ, model_of("W4A16:channel")).quantization_config["group_size"] == -1


def test_one_group_size_for_the_model():
    modules = {
        **model_of("W4A16:g64"),
        "model.layers.2.mlp.up_proj": (None, parse_scheme("W4A16:g32")),
    }
    with pytest.raises(ConfigError, match=r"one group size .* 32 \(`model.layers.2.mlp.up_proj`\)"):
        written_config(AWQ, modules)


def test_a_kept_name_inside_of_a_quantized_one_is_refused():
    """Readers look for parts of names: `mlp.gate` would keep `mlp.gate_proj` too."""
    with pytest.raises(
        ConfigError, match=r"`model.layers.1.mlp.gate` .* `model.layers.1.mlp.gate_proj`"
    ):
        written_config(AWQ, model_of("W4A16", gate=(8, 256)))


@pytest.mark.parametrize(
    ("scheme", "rows", "reason"),
    [
        ("W8A16", 64, "it has 8 bits"),
        ("W4A8", 64, "its inputs are quantized"),
        ("FP8_BLOCK", 64, "its inputs are quantized"),
        ("MXFP4A16", 64, "its codes are e2m1"),
        ("W4A16", 12, "12 output features"),
        ("W4A16", 64, ""),
    ],
)
def test_obstacles(scheme, rows, reason):
    found = AWQ.obstacle(parse_scheme(scheme), (rows, 128))
    assert (reason in found) if reason else found == ""


def test_heads_and_caches_are_refused():
    with pytest.raises(ConfigError, match="embeddings and heads, found `lm_head`"):
        written_config(AWQ, model_of("W4A16"), named=["lm_head"])
    with pytest.raises(ConfigError, match="key-value cache"):
        written_config(AWQ, model_of("W4A16"), cache_scheme={"num_bits": 8, "type": "float"})
