"""`FusedExperts` against transformers' own module that holds the dequantized weights."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from experts_modules import (
    CPU,
    INNER,
    MODULES,
    E,
    H,
    K,
    class_of,
    inputs_of,
    layer_of,
    module_of,
    put,
    weights_of,
)
from thread_ranks import in_ranks
from torch import nn
from whole_weights import assert_close, fill, scheme_named

from quantload.errors import ConfigError, ModelError, ShapeError
from quantload.layers.experts import FusedExperts
from quantload.layers.experts_grouped import ExpertLinear, Groups
from quantload.layers.experts_layout import ExpertsLayout, layout_of
from quantload.layers.linear import QuantLinear
from quantload.quant.activation import fake_quantize
from quantload.quant.qtensor import QuantTensor
from quantload.quant.region import Region
from quantload.runtime.parallel import Parallel

SCHEMES = ("dense", "W4A16:g32", "act-order", "W4A16_ASYM:g32", "FP8_BLOCK", "NVFP4")


def both(model_type, schemes, **options):
    """A module of transformers and our layer with the same weights."""
    module = module_of(model_type)
    layout = layout_of(module)
    tensors = weights_of(layout, schemes)
    ours = fill(layer_of(module, schemes, **options), tensors)
    return put(module, layout, tensors), ours


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("model_type", MODULES)
@torch.no_grad()
def test_equals_the_module_of_transformers(model_type, scheme):
    module, ours = both(model_type, scheme)
    inputs = inputs_of(ours.layout)
    assert_close(ours(*inputs), module(*inputs))
    stored = getattr(ours, ours.layout.up.leaf)
    assert_close(stored, module.get_parameter(ours.layout.up.leaf), limit=1e-6)


@torch.no_grad()
def test_experts_of_unlike_schemes():
    """Gate of one expert apart from its up, one expert in another scheme, one in none."""
    schemes = {
        **{("gate_up_proj", slot): "W4A16:g32" for slot in range(4)},
        ("gate_up_proj", 4): "FP8_BLOCK",
        ("gate_up_proj", 5): "W4A16:g32",
        ("gate_up_proj", 7): "W4A16:g32",
        ("down_proj", 1): "NVFP4",
    }
    module, ours = both("mixtral", schemes)
    inputs = inputs_of(ours.layout)
    assert_close(ours(*inputs), module(*inputs))
    reports = ours.choices["gate_up_proj"].reports
    notes = {(scheme, note): count for (scheme, _, note), count in reports.items()}
    apart = "not fused: only some parts are quantized"
    assert notes == {
        ("W4A16:g32", ""): 2,
        ("W4A16:g32", "not fused: schemes of its parts differ"): 1,
        ("FP8_BLOCK:block", "not fused: schemes of its parts differ"): 1,
        ("dense", apart): 1,
        ("W4A16:g32", apart): 1,
    }
    assert sum(ours.choices["down_proj"].reports.values()) == E


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss", "nemotron_h"])
@torch.no_grad()
def test_gate_and_up_are_one_product(model_type):
    _, ours = both(model_type, "W4A16:g32")
    calls = []
    for module in ours.modules():
        if isinstance(module, QuantLinear):
            module.register_forward_hook(lambda m, *_: calls.append(m.prefix))
    ours(*inputs_of(ours.layout))
    hit = list(range(E - 1))
    up, down = ours.layout.up.leaf, ours.layout.down.leaf
    assert calls == [f"block.experts.{e}.{leaf}" for leaf in (up, down) for e in hit]


@torch.no_grad()
def test_tokens_of_no_expert_give_zeros():
    module, ours = both("mixtral", "W4A16:g32")
    x, index, weights = inputs_of(ours.layout)
    index[0] = E  # what transformers calls masked
    index[1, 0] = E
    assert_close(ours(x, index, weights), module(x, index, weights))
    assert not ours(x, index, weights)[0].any()
    nothing = ours(*inputs_of(ours.layout, tokens=0))
    assert nothing.shape == (0, H)


@torch.no_grad()
def test_one_expert_twice_for_a_token_counts_twice():
    module, ours = both("mixtral", "dense")
    x, index, weights = inputs_of(ours.layout)
    index[:] = 1
    assert_close(ours(x, index, weights), module(x, index, weights))


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "W8A8", "FP8_BLOCK"])
@torch.no_grad()
def test_inputs_of_each_product_are_rounded(scheme, monkeypatch):
    """The oracle rounds what each product of the module's own forward reads."""
    module, ours = both("mixtral", scheme, inputs=True)
    inputs = inputs_of(ours.layout)
    rounded = scheme_named(scheme).input
    plain, linear = module(*inputs), nn.functional.linear
    monkeypatch.setattr(nn.functional, "linear", lambda x, w: linear(fake_quantize(x, rounded), w))
    expected = module(*inputs)
    monkeypatch.setattr(nn.functional, "linear", linear)
    found = ours(*inputs)
    assert_close(found, expected, limit=2e-5)
    assert (found - plain).norm() > 1e-3 * plain.norm()


@torch.no_grad()
def test_bfloat16_in_one_call_for_all_experts(monkeypatch):
    """Full precision runs by torch's grouped product, and nothing asks how many rows there are."""
    module = module_of("gpt_oss")
    layout = layout_of(module)
    tensors = weights_of(layout, "dense")
    ours = layer_of(module, dtype=torch.bfloat16)
    fill(ours, {key: value.bfloat16() for key, value in tensors.items()})
    put(module, layout, tensors).to(torch.bfloat16)
    x, index, weights = inputs_of(layout)
    index[0, 0] = E - 1
    monkeypatch.delattr(Groups, "counts")
    found = ours(x.bfloat16(), index, weights)
    assert found.dtype == torch.bfloat16
    assert_close(found, module(x.bfloat16(), index, weights), limit=1e-2)
    assert {kernel.name for _, kernel, _ in ours.choices["down_proj"].reports} == {
        "torch grouped_mm"
    }
    index[:] = E
    assert not ours(x.bfloat16(), index, weights).any()


def test_keeps_weights_as_small_as_they_are():
    _, ours = both("mixtral", "W4A16:g32")
    held = sum(buffer.nbytes for buffer in ours.buffers()) + sum(
        parameter.nbytes for parameter in ours.parameters()
    )
    weights = 3 * E * H * INNER
    scales = weights // 32 * 4
    assert held == weights // 2 + scales


@torch.no_grad()
def test_copies_and_other_devices():
    module, ours = both("muse_spark", "W4A16:g32")
    inputs = inputs_of(ours.layout)
    expected = module(*inputs)
    twin = copy.deepcopy(ours)
    del ours
    assert_close(twin(*inputs), expected)
    assert twin(*(x.to("meta") for x in inputs)).device.type == "meta"
    assert twin.num_experts == E
    assert twin.post_expert_norm is twin.get_submodule("post_expert_norm")
    with pytest.raises(AttributeError, match="no_such"):
        _ = twin.no_such


@torch.no_grad()
def test_arguments_go_by_the_names_of_the_module():
    module, ours = both("gpt_oss", "dense")
    x, index, weights = inputs_of(ours.layout)
    named = {"router_indices": index, "routing_weights": weights}
    assert_close(ours(x, **named), module(x, **named))


# -- ranks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["tensor", "expert"])
@pytest.mark.parametrize("scheme", ["dense", "W4A16:g32", "act-order", "FP8_BLOCK"])
@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss", "nemotron_h", "llama4", "muse_spark"])
def test_ranks_share_a_block(model_type, scheme, mode):
    module = module_of(model_type)
    layout = layout_of(module)
    tensors = weights_of(layout, scheme)
    layers = [module_of(model_type) for _ in range(4)]
    expected = put(module, layout, tensors)(*inputs_of(layout))
    sizes = []

    def work(parallel):
        made = layer_of(layers[parallel.tp_rank], scheme, parallel=parallel, mode=mode)
        ours = fill(made, tensors)
        sizes.append(sum(buffer.nbytes for buffer in ours.buffers()))
        return ours(*inputs_of(layout))

    for found in in_ranks(4, work):
        assert_close(found, expected)
    alone = fill(layer_of(module_of(model_type), scheme), tensors)
    whole = sum(buffer.nbytes for buffer in alone.buffers())
    # scales are repeated where a cut runs through a block; act-order keeps all of them
    limit = {"dense": 1.15, "W4A16:g32": 1.3, "FP8_BLOCK": 1.3, "act-order": 2.5}[scheme]
    assert whole <= sum(sizes) <= limit * whole


@pytest.mark.parametrize("ranks", [3, 5])
def test_widths_that_do_not_divide(ranks):
    module = module_of("gpt_oss")  # rows of gate and up alternate
    layout = layout_of(module)
    tensors = weights_of(layout, "W4A16:g32")
    layers = [module_of("gpt_oss") for _ in range(ranks)]
    expected = put(module, layout, tensors)(*inputs_of(layout))

    def work(parallel):
        ours = fill(layer_of(layers[parallel.tp_rank], "W4A16:g32", parallel=parallel), tensors)
        return ours(*inputs_of(layout))

    for found in in_ranks(ranks, work):
        assert_close(found, expected)


@pytest.mark.parametrize("granularity", ["token", "group", "tensor"])
def test_inputs_are_rounded_as_on_one_process(granularity):
    scheme = scheme_named("W8A8")
    size = 64 if granularity == "group" else None  # 96 / 4 cuts groups
    scheme = replace(scheme, input=replace(scheme.input, granularity=granularity, group_size=size))
    module = module_of("mixtral")
    layout = layout_of(module)
    tensors = weights_of(layout, "W8A8")
    layers = [module_of("mixtral") for _ in range(5)]

    def made(number, parallel):
        ours = layer_of(layers[number], "W8A8", parallel=parallel)
        ours.schemes = dict.fromkeys(ours.schemes, scheme)
        return fill(ours, tensors)

    expected = made(4, Parallel())(*inputs_of(layout))

    def work(parallel):
        ours = made(parallel.tp_rank, parallel)
        return ours(*inputs_of(layout)), ours.round_down is not None

    for found, is_once in in_ranks(4, work):
        assert_close(found, expected, limit=2e-5)
        assert is_once is (granularity != "tensor")


def test_regions():
    parallel = Parallel(tp_rank=1, tp_size=2)
    ours = layer_of(module_of("gpt_oss"), parallel=parallel)
    assert ours.awaits()["gate_up_proj", 3] == (2 * INNER, H)
    assert ours.region("gate_up_proj", 3) == Region(rows=((INNER, 2 * INNER),))
    assert ours.region("gate_up_proj_bias", 3) == Region(rows=((INNER, 2 * INNER),))
    assert ours.region("down_proj", 0) == Region(columns=(INNER // 2, INNER))
    assert ours.elsewhere() == {("down_proj_bias", e) for e in range(E)}  # added by the first rank
    assert ours.has_input_first("down_proj_bias")
    ours = layer_of(module_of("mixtral"), parallel=replace(parallel, expert_parallel=True))
    assert ours.mode == "expert"
    assert ours.elsewhere() == {
        *(("gate_up_proj", slot) for slot in range(4)),
        *(("down_proj", slot) for slot in range(2)),
    }


# -- refusals --------------------------------------------------------------------------------------


def test_refuses_more_ranks_than_parts():
    parallel = Parallel(tp_size=E + 1)
    with pytest.raises(ConfigError, match=f"{E} experts of `block.experts` cannot be shared by"):
        layer_of(module_of("mixtral"), parallel=parallel, mode="expert")


def test_refuses_a_wrong_shape_and_a_run_before_loading():
    ours = layer_of(module_of("mixtral"))
    with pytest.raises(ShapeError, match=r"`down_proj` of slot 1 has shape `\(3, 4\)`, expected"):
        ours.receive("down_proj", 1, torch.zeros(3, 4))
    with pytest.raises(ModelError, match=r"experts of `block.experts` were never loaded"):
        ours(*inputs_of(ours.layout))


def test_written_by_hand():
    """Without a module of transformers: the usual activation, and names by position."""
    layout = ExpertsLayout.gated(experts=E, hidden=H, intermediate=INNER, bias=True)
    ours = FusedExperts(layout, dtype=torch.float32, prefix="mlp.experts")
    tensors = weights_of(layout, "dense")
    fill(ours, tensors)
    x, index, weights = inputs_of(layout)
    expected = torch.zeros(len(x), H)
    for token in range(len(x)):
        for choice in range(K):
            e = int(index[token, choice])
            gate, up = (
                tensors["gate_up_proj", 2 * e + part] @ x[token]
                + tensors["gate_up_proj_bias", 2 * e + part]
                for part in (0, 1)
            )
            inner = gate * gate.sigmoid() * up
            result = tensors["down_proj", e] @ inner + tensors["down_proj_bias", e]
            expected[token] += weights[token, choice] * result
    assert_close(ours(x, index, weights), expected)


def test_products_of_an_expert():
    expert = ExpertLinear(
        [4, 4], 8, bias=False, schemes=[scheme_named("dense")] * 2, dtype=torch.float32, prefix="e"
    )
    gate, up = torch.randn(4, 8), torch.randn(4, 8)
    expert.fill({("weight", 0): gate, ("weight", 1): up})
    x = torch.randn(3, 8)
    assert_close(expert(x), torch.cat([x @ gate.T, x @ up.T], -1))
    assert torch.equal(expert.weight_values(), torch.cat([gate, up]))
    assert not any(isinstance(value, QuantTensor) for value in vars(expert).values())


def test_modules_are_of_this_transformers():
    assert all(issubclass(class_of(name), nn.Module) for name in MODULES)
    assert torch.device("cpu") == CPU
