"""`FusedExperts` with all experts in our Triton kernel, by Triton's interpreter, in float32.

What runs on a card, in bfloat16, is in `tests/layers/test_experts_cuda.py`.
"""

from __future__ import annotations

import copy

import pytest
import torch
from experts_modules import E, H, K, inputs_of, layer_of, module_of, put, weights_of
from whole_weights import assert_close, fill, scheme_named

from quantload.layers import expert_linear
from quantload.layers.expert_linear import Groups
from quantload.layers.experts_layout import layout_of
from quantload.quant.activation import fake_quantize
from quantload.runtime.grouped_gemm import why_not_device, why_not_dtype
from quantload.runtime.parallel import Parallel

OURS = {"triton grouped"}


@pytest.fixture
def interpreted(kernel_device, monkeypatch):
    """Let the kernel serve on the CPU, in large tiles: the interpreter is slow for each program."""
    if kernel_device.type == "cuda":
        pytest.skip("the card has tests of its own")
    from quantload.runtime.kernels import grouped_product

    rule = {"rows": 64, "warps": 1, "stages": 1, "after": 1}
    monkeypatch.setattr(grouped_product, "_rule", lambda block, pairs, is_wide: rule)
    monkeypatch.setattr(expert_linear, "why_not_device", lambda device: None)
    monkeypatch.setattr(expert_linear, "why_not_dtype", lambda dtype: None)


def both(model_type, schemes, **options):
    """A module of transformers and our layer with the same weights."""
    module = module_of(model_type)
    layout = layout_of(module)
    tensors = weights_of(layout, schemes)
    ours = fill(layer_of(module, schemes, **options), tensors)
    return put(module, layout, tensors), ours


def kernels_of(ours):
    """Names of the kernels of all experts."""
    return {name.name for choice in ours.choices.values() for _, name, _ in choice.reports}


@pytest.mark.parametrize(
    ("model_type", "scheme"),
    [("mixtral", "W4A16:g32"), ("gpt_oss", "MXFP4"), ("nemotron_h", "W4A16_ASYM:g32")],
)
@torch.no_grad()
def test_equals_the_module_of_transformers(model_type, scheme, interpreted):
    """Gate before up; alternating, clamped and with biases; without a gate."""
    module, ours = both(model_type, scheme)
    inputs = inputs_of(ours.layout, tokens=2)
    assert kernels_of(ours) == OURS
    assert ours._inside is not None
    assert_close(ours(*inputs), module(*inputs))
    stored = getattr(ours, ours.layout.up.leaf)
    assert_close(stored, module.get_parameter(ours.layout.up.leaf), limit=1e-6)


@torch.no_grad()
def test_activations_that_are_not_ours_and_norms_run_between_products(interpreted):
    module, ours = both("muse_spark", "W4A16:g32")
    inputs = inputs_of(ours.layout, tokens=2)
    assert kernels_of(ours) == OURS
    assert_close(ours(*inputs), module(*inputs))


@torch.no_grad()
def test_watched_inputs_are_those_of_each_product(interpreted):
    """Who hooks a product sees rows sorted by expert, as with other kernels."""
    _, ours = both("mixtral", "W4A16:g32")
    inputs = inputs_of(ours.layout, tokens=2)
    expected, seen = ours(*inputs), []

    def see(_, args):
        seen.append((args[0].shape, sum(args[1].counts)))

    ours.get_submodule("down_proj_experts").register_forward_pre_hook(see)
    assert_close(ours(*inputs), expected)
    assert seen == [((2 * K, 96), 2 * K)]


@torch.no_grad()
def test_tokens_of_no_expert_give_zeros(interpreted):
    module, ours = both("mixtral", "W4A16:g32")
    x, index, weights = inputs_of(ours.layout, tokens=2)
    index[0] = E  # what transformers calls masked
    index[1, 0] = E
    found = ours(x, index, weights)
    assert_close(found, module(x, index, weights))
    assert not found[0].any()
    assert ours(*inputs_of(ours.layout, tokens=0)).shape == (0, H)


@torch.no_grad()
def test_rows_of_each_expert_and_copies(interpreted):
    """Rows sorted by the caller; what is not of this rank's experts holds anything."""
    _, ours = both("mixtral", "W4A16:g32")
    product = copy.deepcopy(ours.get_submodule("down_proj_experts"))
    x = torch.randn(4, 96)
    ids = torch.tensor([0, 2, 2, E])
    found = product(x, Groups(ids, E))
    weights = product.weight_values(torch.float32)
    assert_close(found[:3], torch.einsum("sk,snk->sn", x[:3], weights[ids[:3]]))
    assert product.gemm.layout.startswith("int16 words of 4 slices")
    assert product.gemm.kernels_for(4) == ("grouped_kernel",)
    assert product.gemm.kernels_for(4000) == ("_route_kernel", "grouped_kernel")
    assert ours.kernels_for(2, K) == ("grouped_kernel", "grouped_token_kernel")
    assert ours.kernels_for(400, K) == (
        "_route_kernel", "grouped_kernel", "grouped_kernel", "_weighted_sum_kernel",
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["tensor", "expert"])
@torch.no_grad()
def test_ranks_share_a_block(mode, interpreted, monkeypatch):
    """Ranks run one after the other: threads would meet in the interpreter."""
    module = module_of("mixtral")
    layout = layout_of(module)
    tensors = weights_of(layout, "W4A16:g32")
    inputs = inputs_of(layout, tokens=2)
    expected = put(module, layout, tensors)(*inputs)
    monkeypatch.setattr(Parallel, "all_reduce", lambda _, x: x)
    found = 0
    for rank in range(3):
        parallel = Parallel(tp_rank=rank, tp_size=3)
        made = layer_of(module_of("mixtral"), "W4A16:g32", parallel=parallel, mode=mode)
        ours = fill(made, tensors)
        assert kernels_of(ours) == OURS
        found = found + ours(*inputs)
    assert_close(found, expected)


@torch.no_grad()
def test_inputs_of_each_product_are_rounded(interpreted, monkeypatch):
    module, ours = both("mixtral", "FP8_DYNAMIC", inputs=True)
    inputs = inputs_of(ours.layout, tokens=2)
    rounded = scheme_named("FP8_DYNAMIC").input
    linear = torch.nn.functional.linear
    monkeypatch.setattr(
        torch.nn.functional, "linear", lambda x, w: linear(fake_quantize(x, rounded), w)
    )
    expected = module(*inputs)
    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    assert kernels_of(ours) == OURS
    assert_close(ours(*inputs), expected, limit=2e-5)


@torch.no_grad()
def test_unlike_experts_are_taken_apart_again(interpreted):
    """The last expert has another scheme: those that lay together multiply one by one, exactly."""
    schemes = {
        **{("gate_up_proj", slot): "W4A16:g32" for slot in range(2 * E)},
        **{("down_proj", slot): "W4A16:g32" for slot in range(E - 2)},
        ("down_proj", E - 2): "NVFP4",
        ("down_proj", E - 1): "W4A16:g32",
    }
    module, ours = both("mixtral", schemes)
    inputs = inputs_of(ours.layout, tokens=3)
    assert_close(ours(*inputs), module(*inputs))
    reports = [kernel for _, kernel, _ in ours.choices["down_proj"].reports]
    refused = {kernel.refused[0] for kernel in reports}
    assert refused == {("triton grouped", "experts are quantized in different ways")}
    assert {kernel.name for _, kernel, _ in ours.choices["gate_up_proj"].reports} == OURS


@pytest.mark.parametrize(
    ("scheme", "reason"),
    [
        ("act-order", "columns are in act-order"),
        ("dense", "wants quantized weights"),
    ],
)
def test_says_why_not(scheme, reason, interpreted):
    _, ours = both("mixtral", scheme)
    reports = [kernel for _, kernel, _ in ours.choices["down_proj"].reports]
    assert {kernel.refused[0] for kernel in reports} == {("triton grouped", reason)}


def test_refuses_other_devices_and_dtypes():
    assert why_not_device(torch.device("cpu")) == "runs on CUDA, found `cpu`"
    assert why_not_dtype(torch.float32) == "wants bfloat16, found `torch.float32`"
    assert why_not_dtype(torch.bfloat16) is None
