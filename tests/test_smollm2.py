"""The main job on a real model: SmolLM2-135M-Instruct, from its GGUF file."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import unpack_from_int32
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams
from smollm2 import smollm2_file

import quantload
from quantload import api
from quantload.quant.qtensor import QuantTensor

SCHEMES = ["W4A16", "W4A16_ASYM", "W8A16", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK"]


@pytest.fixture(scope="module")
def source():
    return api.inspect(smollm2_file())


def minmax(weight, arguments):
    """What the memoryless minmax observer of llm-compressor sees, per strategy."""
    if arguments.strategy == "group":
        blocks = weight.unflatten(1, (-1, arguments.group_size))
        return blocks.amin(-1), blocks.amax(-1)
    if arguments.strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    rows, columns = arguments.block_structure
    padded = torch.nn.functional.pad(
        weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows)
    )
    blocks = padded.reshape(-1, rows, padded.shape[1] // columns, columns)
    return blocks.amin((1, 3)), blocks.amax((1, 3))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_layer_is_bit_equal_to_compressed_tensors(source, tmp_path, scheme):
    done = api.convert(source, tmp_path / "out", scheme, verify_output=True)
    assert done.report.passed, done.report.failures()[:5]
    output = api.inspect(done.folder)
    arguments = preset_name_to_scheme(scheme, ["Linear"]).weights
    checked = 0
    for row in done.plan.rows:
        if row.scheme is None:
            continue
        weight = source.read_dense(row.module, torch.bfloat16)
        if arguments.strategy == "group":
            arguments.group_size = 128 if weight.shape[1] % 128 == 0 else 64
        scale, zero = calculate_qparams(*minmax(weight, arguments), arguments)
        codes = quantize(weight, scale, zero, arguments, dtype=arguments.pytorch_dtype())
        got = output.read_weight(row.module)
        assert isinstance(got, QuantTensor)
        assert torch.equal(got.codes.view(torch.int8), codes.view(torch.int8)), row.module
        assert torch.equal(got.scale, scale), row.module
        if got.zero is not None:
            assert torch.equal(got.zero, zero.to(torch.int8)), row.module
        checked += 1
    assert checked == 210


def test_packed_words_are_what_compressed_tensors_unpacks(source, tmp_path):
    done = api.convert(source, tmp_path / "out", "W4A16", verify_output=False)
    checkpoint = api.inspect(done.folder).checkpoint
    module = "model.layers.3.mlp.up_proj"
    words = checkpoint.read(f"{module}.weight_packed")
    shape = torch.Size(checkpoint.read(f"{module}.weight_shape").tolist())
    codes = api.inspect(done.folder).read_weight(module).codes
    assert torch.equal(unpack_from_int32(words, 4, shape), codes)


def test_the_quantized_model_still_knows_the_capital_of_france(source, tmp_path):
    done = api.convert(source, tmp_path / "out", "W8A16")
    model = api.load(done.folder, device="cpu")
    tokenizer = api.load_tokenizer(done.folder)
    prompt = "The capital of France is"
    (found,) = quantload.generate(model, prompt, tokenizer=tokenizer, max_new_tokens=4)
    assert "Paris" in found.text
    fused = {report.fused_into for report in api.explain(model) if report.fused_into}
    assert len(fused) == 60  # one GEMM for q/k/v and one for gate/up in each of 30 layers


def test_plan_counts_the_bytes_that_are_written(source, tmp_path):
    done = api.convert(source, tmp_path / "out", "W4A16", rules=["model.layers.0.=W8A16"])
    written = sum(f.stat().st_size for f in done.folder.glob("*.safetensors"))
    assert written == done.plan.output_bytes
