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
