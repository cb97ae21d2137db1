"""Public bug reports about missing, tied, quantized and expert tensors."""

import constant_weights as constant
import modelopt_encoder
import numpy as np
import pytest
import tiny_checkpoints as tiny
import torch
from constant_weights import FP8_CHANNEL, INT4_ARGUMENTS, ct_config, fp8, int4, plain
from converting import converted
from fp8_files import opened, write

import quantload
from quantload.errors import FormatMismatch, MissingTensor, UnsupportedVariant

LAYER = "model.layers.0"
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def test_br060_asym_expert_zero_points(tmp_path):
    tensors = {}
    for expert in range(2):
        for part in ("gate_proj", "up_proj", "down_proj"):
            module = f"{LAYER}.mlp.experts.{expert}.{part}"
            tensors |= int4(module, 64, 64, code=3, zero=-2, scale=0.5)
    config = ct_config({**INT4_ARGUMENTS, "symmetric": False}, layout="pack-quantized")
    source = opened(write(tmp_path, tensors, config))
    assert len(source.weights) == 6
    assert not source.plain
    for module in source.weights:
        assert (source.read_dense(module) == 2.5).all()


def test_br056_expert_scales_transposed(tmp_path):
    name = f"{LAYER}.mlp.experts.gate_up_proj"
    scale = torch.tensor([2.0**-row for row in range(8)]).reshape(1, 8, 1).repeat(2, 1, 1)
    tensors = {name: constant.fp8_codes(2, 8, 4), f"{name}_scale": scale}
    source = opened(write(tmp_path, tensors, FP8))
    expected = scale.expand(2, 8, 4)
    assert torch.equal(source.read_parameter(name).float(), expected)
    weight = source.read_weight(name)
    for expert in range(2):
        start = 8 * expert
        for rank in range(2):
            cuts = [(start + 2 * rank, start + 2 * rank + 2)]
            cuts.append((cuts[0][0] + 4, cuts[0][1] + 4))
            part = torch.cat([weight.rows(*cut).dequantize().float() for cut in cuts])
            rows = [row - start for cut in cuts for row in range(*cut)]
            assert rows == ([0, 1, 4, 5], [2, 3, 6, 7])[rank]
            assert torch.equal(part, expected[expert, rows])


def test_br062_expert_without_input_scale(tmp_path):
    modules = [f"{LAYER}.mlp.experts.{expert}.gate_proj" for expert in range(2)]
    tensors = {}
    for module in modules:
        tensors |= fp8(module, 16, 16, scale=torch.tensor(0.5))
    tensors[f"{modules[0]}.input_scale"] = torch.tensor(0.25)
    static = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    configs = [
        {"quant_method": "fp8", "activation_scheme": "static"},
        ct_config(constant.FP8_TENSOR, input_activations=static),
    ]
    for number, config in enumerate(configs):
        folder = write(tmp_path / str(number), tensors, config)
        with pytest.raises((MissingTensor, FormatMismatch), match=r"experts\.1\.gate_proj"):
            opened(folder)
    more = f"{LAYER}.mlp.experts.2.gate_proj"
    tensors |= fp8(more, 16, 16, scale=torch.tensor(0.5))
    tensors[f"{more}.input_scale"] = torch.tensor(0.125)
    config = {"quant_method": "modelopt", "quant_algo": "FP8"}
    folder = write(tmp_path / "modelopt", tensors, config)
    source = opened(folder)
    assert [warning for warning in source.warnings if f"`{modules[1]}`" in warning]
    assert source.read_weight(modules[1]).input_scale.tolist() == [0.25]
    out = opened(converted(folder, tmp_path / "out", "same", lossless=True))
    assert out.checkpoint.read(f"{modules[1]}.input_scale").item() == 0.25


def test_br072_missing_scale_defaulted(tmp_path):
    q, k = f"{LAYER}.self_attn.q_proj", f"{LAYER}.self_attn.k_proj"
    configs = [ct_config(FP8_CHANNEL), FP8, {"quant_method": "modelopt", "quant_algo": "FP8"}]
    for number, config in enumerate(configs):
        folder = write(tmp_path / f"{number}q", {**fp8(q, 16, 16), **plain(k)}, config)
        with pytest.raises((MissingTensor, UnsupportedVariant), match=rf"{q}\.weight_scale"):
            opened(folder)
        source = opened(write(tmp_path / f"{number}k", plain(k), config))
        assert not source.weights[k].is_quantized


def test_br073_quantized_but_not_targeted(tmp_path):
    down = f"{LAYER}.mlp.down_proj"
    tensors = {**plain("lm_head"), **fp8(down, 16, 16, scale=torch.full((16, 1), 0.5))}
    config = ct_config(FP8_CHANNEL, ignore=["lm_head", "re:.*down_proj"])
    source = opened(write(tmp_path, tensors, config))
    assert (source.read_dense(down) == 0.5).all()
    assert [warning for warning in source.warnings if down in warning]


def test_br068_quantized_embeddings(tmp_path):
    content = tiny.config(hidden=64, vocabulary=32, layers=1)
    tensors = tiny.tensors(content)
    del tensors["model.embed_tokens.weight"]
    codes = np.random.default_rng(0).integers(-8, 8, (32, 64))
    scale = torch.rand(32, 1).bfloat16()
    words = np.zeros((32, 8), dtype=np.uint32)
    for column in range(64):
        words[:, column // 8] |= (codes[:, column] + 8).astype(np.uint32) << (4 * (column % 8))
    leaves = {"weight_packed": torch.from_numpy(words.view(np.int32)), "weight_scale": scale}
    leaves["weight_shape"] = torch.tensor([32, 64])
    tensors |= {f"model.embed_tokens.{leaf}": part for leaf, part in leaves.items()}
    arguments = {"num_bits": 4, "type": "int", "strategy": "channel"}
    config = ct_config(arguments, layout="pack-quantized", targets=["model.embed_tokens"])
    content["quantization_config"] = config
    model = quantload.load(tiny.write(tmp_path, content, tensors), device="cpu")
    ids = torch.tensor([0, 31, 31])
    expected = torch.from_numpy(codes).bfloat16() * scale
    assert torch.equal(model.get_input_embeddings()(ids), expected[ids])


def test_br063_tied_quantized_body(tmp_path):
    content = tiny.config(hidden=64, vocabulary=32, layers=1, tied=True)
    tensors = tiny.tensors(content)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        module, (rows, columns) = name.removesuffix(".weight"), tensors.pop(name).shape
        made = modelopt_encoder.encoded("NVFP4", rows, columns)
        tensors |= {f"{module}.{leaf}": part for leaf, part in made.leaves.items()}
    content["quantization_config"] = modelopt_encoder.flat("NVFP4")
    model = quantload.load(tiny.write(tmp_path, content, tensors), device="cpu")
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert head.data_ptr() == embedding.data_ptr()
    assert torch.equal(head, tensors["model.embed_tokens.weight"])
