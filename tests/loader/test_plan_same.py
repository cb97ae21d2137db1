"""`--scheme same` and `--lossless`: quantized weights keep their values, or are refused by name."""

import json

import pytest
import tiny_checkpoints as tiny
import torch
from converting import converted, opened, plan_of
from safetensors.torch import load_file
from truth import CHECKPOINTS

from quantload.accuracy.verify import verify_sources
from quantload.errors import NotLossless
from quantload.loader.convert import run_plan
from quantload.progress import Silent

# What is kept code for code, by tool and folder: the scheme in which it is written.
KEPT = {
    "gptqmodel-7.7.0/micro-llama-w3g32": "W3A16:g32",
    "gptqmodel-7.7.0/micro-llama-w4g64-asym-gptq_v2": "W4A16_ASYM:g64",
    "gptqmodel-7.7.0/micro-llama-w8-perchannel-asym-descact-v2": "int8:channel",
    "autoawq-0.2.9/tiny-qwen2-gemm-g64": "W4A16_ASYM:g64",
    "auto-round-0.16.1/nano-llama-auto_round-W3A16-g32": "W3A16:g32",
    "auto-round-0.16.1/nano-llama-auto_round-NVFP4": "NVFP4",
    "auto-round-0.16.1/nano-llama-fp8-FP8_BLOCK": "FP8_BLOCK",
    "amd-quark-0.13/nano-llama-UINT4-asym-g32-order": "W4A16_ASYM:g32",
    "amd-quark-0.13/nano-llama-FP8": "FP8",
    "amd-quark-0.13/micro-qwen3-moe-MXFP4": "MXFP4",
    "nvidia-modelopt-0.47.0/nano-llama-FP8": "FP8",
    "nvidia-modelopt-0.47.0/nano-llama-NVFP4-kv-fp8": "NVFP4",
    "nvidia-modelopt-0.47.0/nano-llama-MXFP8": "MXFP8",
    "transformers-quant-5.24.0/odd-llama-fp8-block128-partial": "FP8_BLOCK",
    "transformers-quant-5.24.0/micro-llama-mxfp8-1x32-u8": "MXFP8",
    "transformers-quant-5.24.0/tiny-gpt-oss-mxfp4": "MXFP4A16",
    "torchao-0.18.0/micro-llama-int8da": "W8A8",
    "optimum-quanto-0.2.7/micro-llama-qint8": "W8A16:channel",
    "gguf-0.19.0/micro-llama-Q4_0": "W4A16:g32",
    "llmcompressor-0.14.0.1/nano-llama-W8A8-static-asym-act": "int8, input int8:channel",
}
# What cannot be, and words of the reason.
LOST = {
    "bitsandbytes-0.50.2/micro-llama-nf4": "no weights on the grid `nf4`",
    "bitsandbytes-0.50.2/micro-llama-int8": "divided",
    "gptqmodel-7.7.0/micro-llama-w3g64-asym-descact": "ordered by activation",
    "gptqmodel-7.7.0/micro-llama-fp8-row": "divisors",
    "gguf-0.19.0/micro-llama-Q4_1": "offsets in units of a weight",
    "gguf-0.19.0/nano256-Q4_K": "levels",
    "nvidia-modelopt-0.47.0/nano-llama-INT4_AWQ": "factors",
    "nvidia-modelopt-0.47.0/nano-llama-NVFP4_SVDQUANT": "rank 32",
    "hqq-0.2.8.post1/micro-llama-hqq-w4g64": "zero points are floats",
    "torchao-0.18.0/tiny-qwen2-int4wo-plain-bin": "offsets in units of a weight",
    "transformers-quant-5.24.0/tiny-gpt-oss-mxfp4": "holds 4 experts: vLLM 0.32 leaves out",
}
TRIED = ("hqq-w4g64", "gpt-oss-mxfp4")  # by `--lossless`
needs_checkpoints = pytest.mark.skipif(
    not CHECKPOINTS.is_dir(), reason="no folder shared/checkpoints"
)


def folder_of(name):
    return CHECKPOINTS / name


def schemes(plan):
    return {str(row.scheme) for row in plan.rows if row.keeps_values}


@needs_checkpoints
@pytest.mark.parametrize("name", KEPT)
def test_values_are_kept(name, tmp_path):
    source = opened(folder_of(name))
    plan = plan_of(folder_of(name), "same", lossless=True)
    assert KEPT[name] in schemes(plan)
    assert len(schemes(plan)) == 1
    output = opened(run_plan(plan, tmp_path / "out", Silent()))
    quantized = [module for module, w in source.weights.items() if w.is_quantized]
    assert quantized
    for module in quantized:
        assert output.weights[module].is_quantized
        theirs, ours = source.read_dense(module), output.read_dense(module)
        narrow = min(theirs.dtype, ours.dtype, key=lambda dtype: dtype.itemsize)
        assert torch.equal(theirs.to(narrow), ours.to(narrow)), module
    assert verify_sources(output, source, Silent(), nearest=True).failures() == []


@needs_checkpoints
@pytest.mark.parametrize("name", LOST)
def test_what_cannot_keep_its_values_becomes_full_precision(name, tmp_path):
    source = opened(folder_of(name))
    plan = plan_of(folder_of(name), "same")
    lost = [r for r in plan.rows if r.read_from in source.weights and not r.keeps_values]
    lost = [r for r in lost if source.weights[r.read_from].is_quantized]
    assert lost
    assert all(LOST[name] in row.reason for row in lost)
    output = opened(run_plan(plan, tmp_path / "out", Silent()))
    assert verify_sources(output, source, Silent(), nearest=True).failures() == []


@needs_checkpoints
@pytest.mark.parametrize("name", [n for n in LOST if not n.endswith(TRIED)])
def test_lossless_refuses_and_names_the_layer(name):
    with pytest.raises(NotLossless, match=r"modules would change their values: .+; `.+`: .+"):
        plan_of(folder_of(name), "same", lossless=True)


@needs_checkpoints
def test_lossless_tries_float_zero_points_and_names_the_layer(tmp_path):
    folder = folder_of("hqq-0.2.8.post1/micro-llama-hqq-w4g64")
    plan = plan_of(folder, "same", lossless=True)
    with pytest.raises(NotLossless, match=r"has a zero point of .+, expected numbers of the grid"):
        run_plan(plan, tmp_path / "out", Silent())
    assert not (tmp_path / "out").exists()


def test_lossless_refuses_to_quantize(tmp_path):
    folder = tiny.llama(tmp_path / "model")
    with pytest.raises(NotLossless, match="it would be quantized to W4A16") as caught:
        plan_of(folder, "W4A16:g32", lossless=True)
    assert "leave out `--lossless`" in caught.value.hint


def test_full_precision_stays_the_same(tmp_path):
    folder = tiny.llama(tmp_path / "model")
    plan = plan_of(folder, "same", lossless=True)
    assert {row.reason for row in plan.rows if len(row.shape) == 2} == {
        "default scheme: full precision in the source"
    }
    with pytest.raises(NotLossless, match=r"computed in `torch\.\w+`, which `torch\.float16`"):
        plan_of(folder, "same", lossless=True, dtype=torch.float16)


@pytest.mark.parametrize(("shift", "is_held"), [(0.0, True), (0.0001, False)])
def test_lossless_looks_at_what_is_no_matrix(tmp_path, shift, is_held):
    folder = tiny.llama(tmp_path / "model", dtype=torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float() + shift
    tiny.save_file(tensors, folder / "model.safetensors")
    plan = plan_of(folder, "same", lossless=True, dtype=torch.bfloat16)
    if is_held:
        run_plan(plan, tmp_path / "out", Silent())
        return
    with pytest.raises(NotLossless, match=r"values of `model\.norm\.weight` would") as caught:
        run_plan(plan, tmp_path / "out", Silent())
    assert "--dtype float32" in caught.value.hint
    assert not (tmp_path / "out").exists()


def test_a_weight_in_the_wanted_scheme_is_copied(tmp_path):
    folder = tiny.llama(tmp_path / "model")
    first = converted(folder, tmp_path / "first", "W4A16:g32")
    again = plan_of(first, "W4A16:g32", lossless=True)
    assert again.warnings == ()  # nothing is quantized again
    second = run_plan(again, tmp_path / "second", Silent())
    for name in ("model.safetensors", "config.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    other = plan_of(first, "W4A16:g64")
    assert not any(row.keeps_values for row in other.rows)
    config = json.loads((second / "config.json").read_text())
    assert config["quantization_config"]["format"] == "pack-quantized"


@needs_checkpoints
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("gguf-0.19.0/tiny-gemma3-Q8_0", "1 embedding is packed, which transformers loads only"),
        ("nvidia-modelopt-0.47.0/micro-qwen3-moe-NVFP4", "12 experts are NVFP4, of which transf"),
        ("nvidia-modelopt-0.47.0/nano-llama-NVFP4-kv-fp8", ""),
        ("llmcompressor-0.14.0.1/tiny-gemma3-FP8_DYNAMIC-embed-lmhead", ""),
    ],
)
def test_what_transformers_does_not_load_is_told(name, told):
    warnings = [w for w in plan_of(folder_of(name), "same").warnings if "transformers" in w]
    assert [w[: len(told)] for w in warnings] == [told][: bool(told)]
