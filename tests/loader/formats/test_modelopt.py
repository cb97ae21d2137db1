"""ModelOpt against its specification in NumPy, and against checkpoints that it wrote."""

import json

import numpy as np
import pytest
import tiny_checkpoints as tiny
import torch
from converting import converted, opened
from modelopt_encoder import encoded, flat, with_inner, with_low_rank, write
from safetensors.torch import load_file, save_file
from truth import CHECKPOINTS

import quantload
from quantload.errors import FormatMismatch
from quantload.quant.grid import E2M1, E4M3, INT4, INT8
from quantload.quant.qtensor import QuantTensor

MODULE = "model.layers.0.mlp.down_proj"
CASES = CHECKPOINTS.parent / "cases"
TOOL = CHECKPOINTS / "nvidia-modelopt-0.47.0"
ALGORITHMS = [
    # algorithm, N, K, group size
    ("FP8", 5, 7, 0),
    ("fp8", 64, 48, 0),
    ("FP8_PER_CHANNEL_PER_TOKEN", 5, 7, 0),
    ("FP8_PB_WO", 130, 257, 0),
    ("fp8_pb_wo", 256, 128, 0),
    ("FP8_BLOCK_SCALES", 64, 300, 0),
    ("MXFP8", 6, 96, 32),
    ("W8A8_SQ_PER_CHANNEL", 5, 7, 0),
    ("W8A16", 9, 33, 0),
    ("W4A16_AWQ", 6, 256, 128),
    ("W4A16_AWQ", 6, 192, 96),  # of two scales a row, where the config says groups of 128
    ("W4A8_AWQ", 10, 64, 64),
    ("NVFP4", 5, 48, 16),
    ("NVFP4_AWQ", 6, 16, 16),
    ("W4A16_NVFP4", 3, 80, 16),
    ("W4A8_NVFP4_FP8", 4, 96, 32),
    ("W4A8_NVFP4_FP8", 4, 96, 16),
    ("W4A8_MXFP4_FP8", 4, 96, 32),
    ("MXFP4", 5, 32, 32),
]


def same_bits(found, expected):
    assert found.dtype == torch.float32
    return np.array_equal(found.numpy(), expected)  # of zeros the sign means nothing


# -- decoding --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("algorithm", "rows", "columns", "group_size"), ALGORITHMS)
def test_decode(algorithm, rows, columns, group_size, tmp_path):
    made = encoded(algorithm, rows, columns, group_size=group_size)
    folder = write(tmp_path / "source", {MODULE: made}, flat(algorithm))
    weight = opened(folder).weights[MODULE]
    assert weight.shape == (rows, columns)
    assert weight.decided_by == "quant_algo"
    assert same_bits(opened(folder).read_dense(MODULE), made.values)


def test_the_group_size_of_the_config_and_the_one_that_modelopt_used(tmp_path):
    made = encoded("W4A16_AWQ", 6, 192, group_size=96)
    folder = write(tmp_path / "source", {MODULE: made}, flat("W4A16_AWQ", group_size=128))
    assert same_bits(opened(folder).read_dense(MODULE), made.values)


def test_a_group_size_in_the_side_file_only(tmp_path):
    made = encoded("W4A16_AWQ", 6, 64, group_size=32)
    details = {"quant_algo": "W4A16_AWQ", "group_size": 32}
    side_file = {"quantization": details}
    folder = write(tmp_path / "s", {MODULE: made}, flat("W4A16_AWQ"), side_file=side_file)
    assert same_bits(opened(folder).read_dense(MODULE), made.values)
    details["group_size"] = 64
    folder = write(tmp_path / "t", {MODULE: made}, flat("W4A16_AWQ"), side_file=side_file)
    with pytest.raises(FormatMismatch, match="fits no weight"):
        opened(folder)
    details["quant_algo"] = "NVFP4"
    folder = write(tmp_path / "u", {MODULE: made}, flat("W4A16_AWQ"), side_file=side_file)
    with pytest.raises(FormatMismatch, match="but `NVFP4` in"):
        opened(folder)


@pytest.mark.parametrize("algorithm", ["NVFP4_AWQ", "W4A16_AWQ", "W8A8_SQ_PER_CHANNEL", "FP8"])
def test_factors_of_the_input(algorithm, tmp_path):
    made = encoded(algorithm, 6, 32)
    inner = with_inner(made)
    weight = opened(write(tmp_path / "source", {MODULE: made}, flat(algorithm))).read_weight(MODULE)
    assert same_bits(weight.dequantize(), made.values * inner)
    assert weight.inner.dtype == torch.bfloat16


@pytest.mark.parametrize("leaf", ["weight_quantizer._svdquant_lora_", "svdquant_lora_"])
def test_a_low_rank_product_is_added(leaf, tmp_path):
    made = encoded("NVFP4_SVD", 6, 32)
    expected = with_low_rank(made)
    made.leaves = {
        name.replace("weight_quantizer._svdquant_lora_", leaf): tensor
        for name, tensor in made.leaves.items()
    }
    source = opened(write(tmp_path / "source", {MODULE: made}, flat("NVFP4_SVD")))
    found = source.read_weight(MODULE)
    assert isinstance(found, torch.Tensor)
    assert found.dtype == torch.float32
    assert np.allclose(found.numpy(), expected, rtol=1e-5, atol=1e-6)
    assert "plus a product of rank 4" in source.weights[MODULE].encoding
    assert source.weights[MODULE].is_quantized


def test_what_is_stored_is_kept(tmp_path):
    made = encoded("NVFP4", 6, 32)
    source = opened(write(tmp_path / "source", {MODULE: made}, flat("NVFP4")))
    weight = source.read_weight(MODULE)
    assert isinstance(weight, QuantTensor)
    assert weight.grid == E2M1
    assert weight.scale.dtype == torch.float8_e4m3fn
    assert torch.equal(weight.outer, made.leaves["weight_scale_2"].reshape(1, 1))
    assert torch.equal(weight.input_scale, made.leaves["input_scale"].reshape(1))


@pytest.mark.parametrize(
    ("algorithm", "grid", "inputs"),
    [
        ("FP8", E4M3, "e4m3 tensor static"),
        ("FP8_PER_CHANNEL_PER_TOKEN", E4M3, "e4m3 token dynamic"),
        ("FP8_PB_WO", E4M3, ""),
        ("NVFP4", E2M1, "e2m1 group dynamic"),
        ("W4A16_NVFP4", E2M1, ""),
        ("W4A16_AWQ", INT4, ""),
        ("W4A8_AWQ", INT4, "e4m3 tensor static"),
        ("W8A8_SQ_PER_CHANNEL", INT8, "int8 tensor static"),
        ("W8A16", INT8, ""),
        ("MXFP8", E4M3, "e4m3 group dynamic"),
    ],
)
def test_schemes(algorithm, grid, inputs, tmp_path):
    made = encoded(algorithm, 128, 128, group_size=16)
    scheme = opened(write(tmp_path / "s", {MODULE: made}, flat(algorithm))).weights[MODULE].scheme
    assert scheme.weight.grid == grid
    found = scheme.input
    text = found and f"{found.grid.name} {found.granularity} {'dynamic' if found.dynamic else ''}"
    assert (text or "").strip() == inputs.replace("static", "").strip()


def test_nvfp4_without_quantized_inputs(tmp_path):
    groups = {"group_0": {"weights": {"num_bits": 4, "group_size": 16}, "input_activations": None}}
    made = encoded("W4A16_NVFP4", 4, 32)
    folder = write(tmp_path / "source", {MODULE: made}, flat("NVFP4", config_groups=groups))
    source = opened(folder)
    assert source.weights[MODULE].scheme.input is None
    assert same_bits(source.read_dense(MODULE), made.values)


# -- which modules ---------------------------------------------------------------------------------


def test_the_nested_config_in_a_file_of_its_own(tmp_path):
    nested = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    made = encoded("FP8", 4, 8)
    folder = write(tmp_path / "source", {MODULE: made}, None, side_file=nested)
    assert same_bits(opened(folder).read_dense(MODULE), made.values)
    nested["producer"] = {"name": "another"}
    folder = write(tmp_path / "other", {MODULE: made}, None, side_file=nested)
    assert opened(folder).format_name == "modelopt"


def test_layers_of_mixed_precision(tmp_path):
    block = "model.language_model.layers.0"
    modules = {
        f"{block}.self_attn.q_proj": encoded("FP8", 4, 8),
        f"{block}.mlp.experts.0.up_proj": encoded("NVFP4", 4, 32),
        f"{block}.mlp.experts.1.up_proj": encoded("NVFP4", 4, 32, seed=1),
    }
    layers = {
        "language_model.model.layers.0.self_attn.q_proj": {"quant_algo": "fp8"},
        "model.layers.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
    }
    side_file = {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}}
    plain = {f"{block}.self_attn.o_proj.weight": torch.ones(8, 8)}
    folder = write(
        tmp_path / "s", modules, flat("mixed_precision"), side_file=side_file, plain=plain
    )
    source = opened(folder)
    for module, made in modules.items():
        assert same_bits(source.read_dense(module), made.values)
    assert not source.weights[f"{block}.self_attn.o_proj"].is_quantized
    assert source.weights[f"{block}.mlp.experts.0.up_proj"].decided_by == (
        "quantized_layers: model.layers.0.mlp.experts"
    )


def test_a_module_left_out_of_mixed_precision_but_quantized(tmp_path):
    modules = {"model.layers.0.a": encoded("FP8", 4, 8), "model.layers.0.b": encoded("FP8", 4, 8)}
    layers = {
        "model.layers.0.a": {"quant_algo": "FP8"},
        "model.layers.0.c": {"quant_algo": "NVFP4"},
    }
    config = flat("MIXED_PRECISION", quantized_layers=layers)
    source = opened(write(tmp_path / "source", modules, config))
    assert same_bits(source.read_dense("model.layers.0.b"), modules["model.layers.0.b"].values)
    assert "`model.layers.0.b`" in source.warnings[0]
    modules["model.layers.0.b"] = encoded("MXFP8", 4, 32)
    with pytest.raises(FormatMismatch, match=r"`model.layers.0.b` is quantized in the files"):
        opened(write(tmp_path / "other", modules, config))


@pytest.mark.parametrize("entry", ["lm_head", "lm_head*", "*_head", "model.layers.0.*"])
def test_excluded_but_quantized(entry, tmp_path):
    modules = {"lm_head": encoded("NVFP4", 4, 32), MODULE: encoded("NVFP4", 4, 32, seed=1)}
    config = flat("NVFP4", ignore=[entry])
    source = opened(write(tmp_path / "source", modules, config))
    for module, made in modules.items():
        assert same_bits(source.read_dense(module), made.values)
    assert "quantized in the files although the config leaves them out" in source.warnings[0]


def test_scales_of_the_cache(tmp_path):
    attention = "model.layers.0.self_attn"
    plain = {f"{attention}.{x}_proj.{x}_scale": torch.tensor(0.5) for x in "kv"}
    made = encoded("FP8", 4, 8)
    config = flat("FP8", kv_cache_scheme={"num_bits": 8, "type": "float", "dynamic": False})
    source = opened(write(tmp_path / "s", {f"{attention}.k_proj": made}, config, plain=plain))
    assert {f"{attention}.k_scale", f"{attention}.v_scale"} <= source.plain.keys()
    assert float(source.read_plain(f"{attention}.k_scale")) == 0.5
    assert source.reader.cache_scheme["num_bits"] == 8


# -- real checkpoints ------------------------------------------------------------------------------

needs_shared = pytest.mark.skipif(not TOOL.is_dir(), reason="no folder shared/checkpoints")
EXACT = ["nano-llama-FP8", "nano-llama-INT4_AWQ", "nano-llama-MXFP8", "nano-llama-NVFP4-kv-fp8"]
LOADED = [*EXACT, "nano-llama-NVFP4_SVDQUANT", "nano-llama-INT8_SQ", "micro-qwen3-moe-NVFP4"]


def logits(folder):
    ids = load_file(folder / "expected.safetensors")["input_ids"]
    model = quantload.load(folder, device="cpu", dtype=torch.float32, quantize_inputs=False)
    with torch.no_grad():
        return model(ids).logits.double()


def relative(found, expected):
    return float((found - expected.double()).norm() / expected.double().norm())


@needs_shared
@pytest.mark.parametrize("name", LOADED)
def test_logits(name):
    expected = load_file(TOOL / name / "expected.safetensors")
    assert relative(logits(TOOL / name), expected["logits"]) < 0.02


@needs_shared
@pytest.mark.parametrize("name", EXACT)
def test_logits_are_those_of_a_plain_model_with_the_expected_weights(name, tmp_path):
    expected = load_file(TOOL / name / "expected.safetensors")
    stored = load_file(TOOL / name / "model.safetensors")
    plain = {n: t for n, t in stored.items() if t.dtype == torch.bfloat16 and "scale" not in n}
    for key in (key for key in expected if key.endswith(".weight")):
        inner = stored.get(key.replace(".weight", ".pre_quant_scale"))
        plain[key] = expected[key].float() * (1 if inner is None else inner.float())
    content = json.loads((TOOL / name / "config.json").read_text())
    content.pop("quantization_config")
    tiny.write(tmp_path / "plain", content, {n: t.float() for n, t in plain.items()})
    save_file(expected, tmp_path / "plain" / "expected.safetensors")
    assert relative(logits(TOOL / name), logits(tmp_path / "plain")) < 1e-4


@needs_shared
@pytest.mark.parametrize("name", ["nano-llama-NVFP4_SVDQUANT", "nano-llama-INT4_AWQ"])
def test_conversion_to_full_precision(name, tmp_path):
    source = opened(TOOL / name)
    output = converted(TOOL / name, tmp_path / "out", "dense", dtype=torch.float32)
    written = load_file(output / "model.safetensors")
    for module in source.weights:
        assert torch.equal(written[f"{module}.weight"], source.read_dense(module, torch.float32))


@needs_shared
def test_br067_a_quantized_head_that_the_config_excludes():
    case = CASES / "BR067-lm-head-excluded-but-quantized"
    source = opened(case / "input")
    for name, values in load_file(case / "expected.safetensors").items():
        assert torch.equal(source.read_dense(name.removesuffix(".weight")), values), name
    assert any("lm_head" in warning for warning in source.warnings)
