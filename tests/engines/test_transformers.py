"""Plain transformers (with compressed-tensors) loads what `convert` writes, and agrees."""

from __future__ import annotations

import shutil
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig
from versions import needs_new_transformers

from quantload import api
from quantload.quant.metrics import kl_divergence

WEIGHT_ONLY = ["W4A16", "W4A16:g32", "W8A16", "dense"]
WITH_INPUTS = ["W8A8", "FP8_DYNAMIC", "FP8_BLOCK"]


@pytest.fixture(scope="module")
def converted(base_model, tmp_path_factory):
    """Convert once for each scheme."""
    made = {}

    def get(scheme):
        if scheme not in made:
            folder = tmp_path_factory.mktemp("out") / scheme.replace(":", "-")
            assert api.convert(base_model, folder, scheme).report.passed
            made[scheme] = folder
        return made[scheme]

    return get


def in_transformers(folder, *, dtype=torch.float32, **arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the other library, while it loads
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **arguments)
    return loaded if isinstance(loaded, tuple) else loaded.eval()


def dequantized_in_transformers(folder, *, dtype=torch.float32):
    """transformers 5.24 with compressed-tensors 0.20.1 loads packed zero points only this way: else
    it expects them unpacked, also in checkpoints that llm-compressor wrote."""
    config = CompressedTensorsConfig(dequantize=True)
    return in_transformers(folder, dtype=dtype, quantization_config=config)


def unrounded(folder, **options):
    """The model in float32, evaluated as transformers does: with scales cast to float32."""
    return api.load(folder, device="cpu", dtype=torch.float32, exact=False, **options)


def tokens():
    return torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("scheme", WEIGHT_ONLY)
@torch.no_grad()
def test_weight_only_logits_agree(converted, scheme):
    folder = converted(scheme)
    ids = tokens()
    expected = in_transformers(folder)(ids, use_cache=False).logits
    got = unrounded(folder)(ids, use_cache=False).logits
    assert (got - expected).norm() / expected.norm() < 1e-5


@needs_new_transformers  # older ones cast scales to float32 first
@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM", "W8A16"])
@torch.no_grad()
def test_rounded_logits_agree(converted, scheme):
    """Dequantized by compressed-tensors, weights are rounded to the dtype of their scales."""
    folder = converted(scheme)
    expected = dequantized_in_transformers(folder)(tokens(), use_cache=False).logits
    got = api.load(folder, device="cpu", dtype=torch.float32)(tokens(), use_cache=False).logits
    assert (got - expected).norm() / expected.norm() < 1e-5


@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM", "W8A16"])
@torch.no_grad()
def test_dequantized_output_has_the_bits_of_transformers(converted, tmp_path, scheme):
    """`convert --scheme dense` of an output equals what transformers dequantizes, bit for bit."""
    api.convert(converted(scheme), tmp_path / "dense", "dense")
    expected = dequantized_in_transformers(converted(scheme), dtype=torch.bfloat16).state_dict()
    got = in_transformers(tmp_path / "dense", dtype=torch.bfloat16).state_dict()
    for name, weight in got.items():
        assert torch.equal(weight, expected[name]), name


@needs_new_transformers  # FP8_BLOCK fails with compressed-tensors 0.17
@pytest.mark.parametrize("scheme", WITH_INPUTS)
@torch.no_grad()
def test_each_linear_layer_agrees_on_the_same_input(converted, scheme):
    """A code that flips at a rounding boundary changes the result by a step; nothing else may."""
    folder = converted(scheme)
    theirs = in_transformers(folder)
    ours = dict(unrounded(folder, fuse=False).named_modules())
    checked = []

    def hook_for(name):
        def hook(module, inputs, output):
            got = ours[name](inputs[0])
            error = (got - output).abs().amax(dim=-1) / output.abs().amax(dim=-1)
            agreeing = (error < 1e-5).double().mean()
            checked.append((name, float(agreeing), float(error.max())))

        return hook

    for name, module in theirs.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_hook(hook_for(name))
    theirs(tokens(), use_cache=False)
    assert len(checked) == 14
    for name, agreeing, worst in checked:
        assert agreeing >= 0.95, (name, agreeing)  # tokens without any flipped code
        assert worst < 0.02, (name, worst)


@needs_new_transformers  # FP8_BLOCK fails with compressed-tensors 0.17
@pytest.mark.parametrize("scheme", WITH_INPUTS)
@torch.no_grad()
def test_end_to_end_divergence_is_small(converted, scheme):
    folder = converted(scheme)
    ids = tokens()
    expected = in_transformers(folder)(ids, use_cache=False).logits
    got = unrounded(folder)(ids, use_cache=False).logits
    assert kl_divergence(expected, got).mean() < 1e-5


def test_head_that_a_rule_quantizes(base_model, tmp_path):
    folder = tmp_path / "out"
    api.convert(base_model, folder, "W4A16", rules=["lm_head=W8A16"])
    ids = tokens()
    with torch.no_grad():
        expected = in_transformers(folder)(ids, use_cache=False).logits
        got = unrounded(folder)(ids, use_cache=False).logits
    assert (got - expected).norm() / expected.norm() < 1e-5


@torch.no_grad()
def test_names_of_the_files_that_are_not_those_of_the_model(base_model, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(base_model, source)
    (file,) = source.glob("*.safetensors")
    tensors = {k.removeprefix("model."): v for k, v in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    rules = ["layers.0.=W8A16:g32", "layers.1.mlp.=keep"]
    done = api.convert(source, tmp_path / "out", "W4A16:g32", rules=rules)
    assert done.report.passed
    assert api.inspect(tmp_path / "out").warnings == ()
    model, report = in_transformers(tmp_path / "out", output_loading_info=True)
    assert not any(report.values())
    ours = unrounded(tmp_path / "out")
    theirs = model(tokens()).logits
    torch.testing.assert_close(ours(tokens()).logits, theirs, rtol=1e-4, atol=1e-4)
