"""Experts on a card, against transformers' own module on the CPU, and recorded in a CUDA graph."""

from __future__ import annotations

import pytest
import torch
from experts_modules import CPU, E, inputs_of, layer_of, module_of, put, weights_of
from whole_weights import assert_close

from quantload.layers.experts_layout import layout_of

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def on_card(layer, tensors, dtype=torch.float32):
    for (leaf, slot), value in tensors.items():
        is_float = isinstance(value, torch.Tensor)
        layer.receive(leaf, slot, value.to(CUDA, dtype) if is_float else value.to(CUDA))
    layer.finish(CUDA)
    return layer.to(CUDA)


@pytest.mark.parametrize("scheme", ["dense", "W4A16:g32", "act-order", "FP8_BLOCK", "NVFP4"])
@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss", "nemotron_h", "llama4", "muse_spark"])
@torch.no_grad()
def test_equals_the_module_of_transformers(model_type, scheme):
    module = module_of(model_type)
    layout = layout_of(module)
    tensors = weights_of(layout, scheme)
    inputs = inputs_of(layout)
    expected = put(module, layout, tensors)(*inputs)
    ours = on_card(layer_of(module, scheme), tensors)
    found = ours(*(x.to(CUDA) for x in inputs))
    assert_close(found.to(CPU), expected, limit=1e-4)
    assert torch.equal(ours(*(x.to(CUDA) for x in inputs)), found)


@torch.no_grad()
def test_full_precision_is_recorded_in_a_cuda_graph():
    """Nothing waits for the device: other tokens, routed otherwise, run in the same graph."""
    module = module_of("mixtral")
    layout = layout_of(module)
    tensors = weights_of(layout, "dense")
    module = put(module, layout, tensors).to(torch.bfloat16)
    ours = on_card(layer_of(module, dtype=torch.bfloat16), tensors, torch.bfloat16)
    x, index, weights = (tensor.to(CUDA) for tensor in inputs_of(layout))
    x = x.bfloat16()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        ours(x, index, weights)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = ours(x, index, weights)
    for seed in (5, 6):
        other = inputs_of(layout, seed=seed)
        index.copy_((other[1] + seed) % E)
        x.copy_(other[0])
        weights.copy_(other[2])
        graph.replay()
        expected = module(*(tensor.to(CPU) for tensor in (x, index, weights)))
        assert_close(found.to(CPU), expected, limit=2e-2)


# -- all experts in our Triton kernel --------------------------------------------------------------

GROUPED = ("W4A16:g32", "W4A16_ASYM:g32", "MXFP4", "NVFP4", "FP8_BLOCK", "FP8_DYNAMIC", "W8A8")


def in_bfloat16(model_type, scheme):
    """A module of transformers in float64 on the card, and our layer in bfloat16."""
    module = module_of(model_type)
    layout = layout_of(module)
    tensors = weights_of(layout, scheme)
    ours = on_card(layer_of(module, scheme, dtype=torch.bfloat16), tensors, torch.bfloat16)
    floats = {
        key: value.bfloat16().float() if isinstance(value, torch.Tensor) else value
        for key, value in tensors.items()
    }
    return put(module, layout, floats).double().to(CUDA), ours


def names_of(ours):
    return {kernel.name for c in ours.choices.values() for _, kernel, _ in c.reports}


@pytest.mark.parametrize("scheme", GROUPED)
@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss", "nemotron_h", "muse_spark"])
@torch.no_grad()
def test_grouped_equals_the_module_of_transformers(model_type, scheme):
    expected_of, ours = in_bfloat16(model_type, scheme)
    assert names_of(ours) == {"triton grouped"}
    for tokens in (1, 9, 300):
        x, index, weights = (t.to(CUDA) for t in inputs_of(ours.layout, tokens=tokens))
        x = x.bfloat16()
        found = ours(x, index, weights)
        assert found.dtype == torch.bfloat16
        expected = expected_of(x.double(), index, weights.double())
        assert_close(found.double(), expected, limit=2e-2 if scheme == "NVFP4" else 8e-3)
        assert torch.equal(ours(x, index, weights), found)
        wide = torch.randn(tokens, 2 * x.shape[1], device=CUDA).bfloat16()
        wide[:, : x.shape[1]] = x
        assert torch.equal(ours(wide[:, : x.shape[1]], index, weights), found)


@pytest.mark.parametrize("tokens", [2, 200])
@torch.no_grad()
def test_nan_stays_with_its_token(tokens):
    _, ours = in_bfloat16("mixtral", "W4A16:g32")
    x, index, weights = (t.to(CUDA) for t in inputs_of(ours.layout, tokens=tokens))
    x = x.bfloat16()
    clean = ours(x, index, weights)
    x[0, 3], x[1, 5] = float("nan"), float("inf")
    found = ours(x, index, weights)
    assert not found[:2].isfinite().all(dim=1).any()
    assert torch.equal(found[2:], clean[2:])


@pytest.mark.parametrize("tokens", [9, 200])
@torch.no_grad()
def test_grouped_is_recorded_in_a_cuda_graph(tokens):
    """Other tokens, routed otherwise, also to no expert at all, run in the same graph."""
    expected_of, ours = in_bfloat16("gpt_oss", "W4A16:g32")
    x, index, weights = (t.to(CUDA) for t in inputs_of(ours.layout, tokens=tokens))
    x = x.bfloat16()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        ours(x, index, weights)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = ours(x, index, weights)
    for seed in (5, 6):
        other = inputs_of(ours.layout, tokens=tokens, seed=seed)
        index.copy_((other[1] + seed) % E)
        x.copy_(other[0])
        weights.copy_(other[2])
        graph.replay()
        expected = expected_of(x.double(), index, weights.double())
        assert_close(found.double(), expected, limit=8e-3)
    index.fill_(E)
    graph.replay()
    assert not found.any()


@torch.no_grad()
def test_grouped_compiles_whole():
    _, ours = in_bfloat16("mixtral", "W4A16:g32")
    x, index, weights = (t.to(CUDA) for t in inputs_of(ours.layout, tokens=5))
    compiled = torch.compile(ours, fullgraph=True)
    assert torch.equal(compiled(x.bfloat16(), index, weights), ours(x.bfloat16(), index, weights))


@pytest.mark.parametrize("scheme", ["W4A16:g32", "FP8_DYNAMIC", "FP8_BLOCK"])
@torch.no_grad()
def test_grouped_launches_what_it_says(scheme):
    module = module_of("mixtral")
    tensors = weights_of(layout_of(module), scheme)
    layer = layer_of(module, scheme, inputs=True, dtype=torch.bfloat16)
    ours = on_card(layer, tensors, torch.bfloat16)
    assert names_of(ours) == {"triton grouped"}
    for tokens in (1, 9, 300):
        x, index, weights = (t.to(CUDA) for t in inputs_of(ours.layout, tokens=tokens))
        x, weights = x.bfloat16(), weights.contiguous()
        ours(x, index, weights)
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities, acc_events=True) as record:
            ours(x, index, weights)
            torch.cuda.synchronize()
        events = [e for e in record.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        launched = tuple(e.name for e in sorted(events, key=lambda e: e.time_range.start))
        assert launched == ours.kernels_for(tokens, index.shape[1])
