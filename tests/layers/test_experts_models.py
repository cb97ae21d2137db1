"""Models with experts, loaded: logits are those of transformers on the dequantized weights."""

from __future__ import annotations

import itertools
import logging
import threading
from dataclasses import replace

import pytest
import torch
from moe_models import IDS, MODELS, moe_checkpoint
from thread_ranks import in_ranks
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from whole_weights import assert_close

from quantload.api import explain, load_model
from quantload.layers import experts_proof
from quantload.layers.experts import FusedExperts
from quantload.layers.experts_layout import holds_experts
from quantload.quant.stacking import stack

CPU = torch.device("cpu")
ONE_AT_A_TIME = threading.Lock()  # building a model patches torch
SCHEMES = ("dense", "W4A16:g32", "FP8_DYNAMIC", "NVFP4A16")


def load(fake, **options):
    return load_model(fake.source, device=CPU, quantize_inputs=False, **options)


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


@pytest.mark.parametrize(
    ("model_type", "scheme"),
    [*itertools.product(MODELS, SCHEMES), ("gpt_oss", "MXFP4A16"), ("qwen3_moe", "MXFP4A16")],
)
def test_logits_are_those_of_the_dequantized_model(model_type, scheme):
    fake = moe_checkpoint(model_type, scheme)
    model = load(fake)
    assert_close(logits(model), logits(fake.model))
    ours = [m for m in model.modules() if isinstance(m, FusedExperts)]
    own = [m for m in model.modules() if holds_experts(m)]
    blocks = 1 if "first_k_dense_replace" in MODELS[model_type] else 2
    assert (len(ours), len(own)) == ((0, blocks) if scheme == "dense" else (blocks, 0))


@pytest.mark.parametrize("model_type", ["mixtral", "deepseek_v3"])
def test_generate_gives_the_same_tokens(model_type):
    fake = moe_checkpoint(model_type, "W4A16:g32")
    options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
    assert torch.equal(load(fake).generate(IDS, **options), fake.model.generate(IDS, **options))


@pytest.mark.parametrize(
    ("model_type", "scheme"),
    [("qwen3_moe", "dense"), ("deepseek_v3", "W4A16:g32"), ("gpt_oss", "FP8_DYNAMIC")],
)
def test_ranks_hold_whole_experts(model_type, scheme):
    """Expert parallel, with inputs rounded: the rest of the model is cut as ever."""
    source = moe_checkpoint(model_type, scheme).source
    alone = load_model(source, device=CPU)
    expected, whole = logits(alone), _bytes(alone)

    def work(parallel):
        with ONE_AT_A_TIME:
            shared = replace(parallel, expert_parallel=True)
            model = load_model(source, device=CPU, parallel=shared)
        blocks = [m for m in model.modules() if isinstance(m, FusedExperts)]
        assert blocks
        assert all(len(block.experts) * 2 == block.layout.experts for block in blocks)
        return model(IDS, use_cache=False).logits, _bytes(model)

    for found, held in in_ranks(2, work):
        assert_close(found, expected)
        assert held < 0.75 * whole


@pytest.mark.parametrize("scheme", ["W4A16:g32", "FP8_BLOCK", "NVFP4A16"])
def test_gate_and_up_of_an_expert_in_one_weight(scheme):
    fake = moe_checkpoint("qwen3_moe", scheme)
    for name in [name for name in fake.quantized if ".experts." in name]:
        if name.endswith(".gate_proj"):
            start = name.removesuffix("gate_proj")
            (used, gate), (_, up) = (
                fake.quantized.pop(start + part) for part in ("gate_proj", "up_proj")
            )
            fake.quantized[f"{start}gate_up_proj"] = used, stack([gate, up])
    model = load(fake)
    assert_close(logits(model), logits(fake.model))
    assert {r.scheme for r in explain(model) if r.experts} == {str(replace(used, input=None))}


def _bytes(model: nn.Module) -> int:
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


def test_blocks_of_unlike_schemes():
    """One block quantized, the other not: each runs in its way, and explain says how."""
    fake = moe_checkpoint("qwen3_moe", "W4A16:g32", only="layers.1.")
    model = load(fake)
    assert_close(logits(model), logits(fake.model))
    reports = {report.module: report for report in explain(model) if report.experts}
    assert {
        (module, report.scheme, report.kernel, report.experts) for module, report in reports.items()
    } == {
        ("model.layers.0.mlp.experts.gate_up_proj", "dense", "transformers", 4),
        ("model.layers.0.mlp.experts.down_proj", "dense", "transformers", 4),
        ("model.layers.1.mlp.experts.gate_up_proj", "W4A16:g32", "dequantize and multiply", 4),
        ("model.layers.1.mlp.experts.down_proj", "W4A16:g32", "dequantize and multiply", 4),
    }
    assert not any(report.note for report in reports.values())
    inside = [report.module for report in explain(model) if ".experts." in report.module]
    assert len(inside) == len(reports)  # experts are told together


def test_holds_as_many_bytes_as_the_weights_have():
    fake = moe_checkpoint("mixtral", "W4A16:g32")
    model = load(fake)
    held = _bytes(model)
    dense = sum(tensor.nbytes for tensor in fake.tensors.values())
    packed = sum(w.codes.numel() // 2 + w.scale.nbytes for _, w in fake.quantized.values())
    tables = sum(b.nbytes for n, b in model.named_buffers() if "inv_freq" in n)
    assert held == dense + packed + tables


def test_unproven_blocks_stay_and_are_told(monkeypatch, caplog):
    """A module whose forward is another gets dequantized weights."""
    plain = MixtralExperts.forward

    def with_a_residual(self, hidden_states, top_k_index, top_k_weights):
        return hidden_states + plain(self, hidden_states, top_k_index, top_k_weights)

    monkeypatch.setattr(MixtralExperts, "forward", with_a_residual)
    monkeypatch.setattr(experts_proof, "_proven", {})
    fake = moe_checkpoint("mixtral", "W4A16:g32")
    with caplog.at_level(logging.WARNING, "quantload"):
        model = load(fake)
    assert_close(logits(model), logits(fake.model))
    assert not any(isinstance(module, FusedExperts) for module in model.modules())
    notes = {report.note for report in explain(model) if report.experts}
    why = "dequantized, since its block stays that of the model: its forward differs from ours by"
    assert len(notes) == 1
    assert notes.pop().startswith(why)
    assert why in caplog.text

    def work(parallel):
        with ONE_AT_A_TIME:
            model = load(fake, parallel=parallel)
        return logits(model), {report.note for report in explain(model) if report.experts}

    (found, notes), _ = in_ranks(2, work)
    assert_close(found, logits(fake.model))
    assert notes.pop().startswith(f"dequantized and held whole by every rank{why[11:]}")


def test_prediction_layers_are_left_out_and_told(caplog):
    fake = moe_checkpoint("deepseek_v3", "W4A16:g32")
    extra = {
        name.replace("layers.1.", "layers.2."): tensor
        for name, tensor in fake.tensors.items()
        if "layers.1." in name
    }
    extra["model.layers.2.eh_proj.weight"] = torch.ones(64, 128)
    twins = {n.replace("layers.1.", "layers.2."): w for n, w in fake.quantized.items()}
    expected = logits(load(fake))
    fake.tensors |= extra
    fake.quantized |= twins
    with caplog.at_level(logging.INFO, "quantload"):
        assert torch.equal(logits(load(fake)), expected)
    assert "multi-token prediction layer, which the model does not have (`model.layers.2." in (
        caplog.text
    )
