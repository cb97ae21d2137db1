"""The whole walk on a card: convert a model, load it fused with the Triton kernel, generate."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quantload import api
from quantload.quant.metrics import kl_divergence

pytestmark = pytest.mark.gpu

SCHEMES = [
    *("W4A16", "W4A16:g32", "W4A16:channel", "W4A16_ASYM", "W8A16"),
    *("W8A8", "FP8_DYNAMIC", "FP8_BLOCK"),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Random weights in the widths of SmolLM2, which are no multiples of 128 or of tiles."""
    folder = tmp_path_factory.mktemp("base") / "llama"
    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=3,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=1000,
        tie_word_embeddings=True,
    )
    torch.manual_seed(1)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def tokens(batch, length):
    return torch.randint(0, 1000, (batch, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, 17), (3, 50)])
@torch.no_grad()
def test_float32_logits_agree_with_the_reference_on_the_cpu(base, tmp_path, scheme, batch, length):
    folder = api.convert(base, tmp_path / "out", scheme).folder
    ids = tokens(batch, length)
    options = {"dtype": torch.float32, "exact": False}  # scales are bfloat16, kernels do not round
    expected = api.load(folder, device="cpu", fuse=False, **options)(ids).logits
    model = api.load(folder, device="cuda", **options)
    got = model(ids.cuda()).logits.cpu()
    kernels = {report.kernel for report in api.explain(model) if report.scheme != "dense"}
    assert kernels <= {"triton weight-only", "triton rounded inputs"}, kernels
    if "A16" in scheme:
        assert (got - expected).norm() / expected.norm() < 1e-4
    else:  # a code of the input that flips at a rounding boundary moves a result by a step
        assert kl_divergence(expected, got).mean() < 1e-3


@torch.no_grad()
def test_exact_values_in_a_wider_model_run_without_the_kernel(base, tmp_path):
    folder = api.convert(base, tmp_path / "out", "W4A16").folder
    ids = tokens(1, 17)
    expected = api.load(folder, device="cpu", dtype=torch.float32, fuse=False)(ids).logits
    model = api.load(folder, device="cuda", dtype=torch.float32)
    kernels = {report.kernel for report in api.explain(model) if report.scheme != "dense"}
    assert kernels == {"dequantize and multiply"}, kernels
    got = model(ids.cuda()).logits.cpu()
    assert (got - expected).norm() / expected.norm() < 1e-5


@pytest.mark.parametrize("scheme", ["W4A16", "FP8_BLOCK"])
@torch.no_grad()
def test_fused_and_unfused_agree_in_bfloat16(base, tmp_path, scheme):
    folder = api.convert(base, tmp_path / "out", scheme).folder
    ids = tokens(2, 20).cuda()
    fused = api.load(folder, device="cuda")
    apart = api.load(folder, device="cuda", fuse=False)
    assert kl_divergence(apart(ids).logits, fused(ids).logits).mean() < 1e-4
    stacks = {report.fused_into for report in api.explain(fused) if report.fused_into}
    assert len(stacks) == 6


@torch.no_grad()
def test_generation_and_memory(base, tmp_path):
    folder = api.convert(base, tmp_path / "out", "W4A16").folder
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = api.load(folder, device="cuda")
    used = torch.cuda.memory_allocated() - before
    written = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert used < 1.3 * written, (used, written)  # nothing is kept of the unfused members
    out = model.generate(tokens(2, 8).cuda(), max_new_tokens=16, min_new_tokens=16, do_sample=False)
    assert out.shape == (2, 24)
