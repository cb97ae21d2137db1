"""Gradients through quantized layers: right, or refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from quantload.errors import ModelError
from quantload.layers.linear import QuantLinear
from quantload.layers.stack import LinearStack
from quantload.quant.rtn import quantize_rtn
from quantload.quant.scheme import parse_scheme

CPU = torch.device("cpu")


def layer(scheme: str, dtype: torch.dtype) -> QuantLinear:
    torch.manual_seed(0)
    parsed = parse_scheme(scheme)
    made = QuantLinear(128, 32, bias=True, scheme=parsed, dtype=dtype, prefix="block.proj")
    weight = torch.randn(32, 128).to(dtype)
    quantized = weight if parsed.weight is None else quantize_rtn(weight, parsed.weight)
    made.receive("weight", 0, quantized)
    made.receive("bias", 0, torch.randn(32).to(dtype))
    made.finish(CPU)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", ["W4A16:g32", "W8A16:channel"])
def test_gradients_of_inputs_in_full_precision(scheme: str, dtype: torch.dtype) -> None:
    """In bfloat16 kernels without a gradient of their own serve."""
    made = layer(scheme, dtype)
    assert ("for CPU" in made.kernel.name) == (dtype == torch.bfloat16)
    x = torch.randn(2, 3, 128).to(dtype).requires_grad_()
    dy = torch.randn(2, 3, made.out_features).to(dtype)
    y = made(x)
    with torch.no_grad():
        assert torch.equal(made(x), y)
    y.backward(dy)
    assert x.grad is not None
    assert x.grad.dtype == dtype
    assert torch.allclose(x.grad, dy @ made.weight, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [
        ("W8A8", torch.float32),
        ("FP8_DYNAMIC", torch.float32),
        ("FP8_BLOCK", torch.float32),
        ("W8A8", torch.bfloat16),
    ],
)
def test_gradients_that_would_be_lost_are_refused(scheme: str, dtype: torch.dtype) -> None:
    made = layer(scheme, dtype)
    x = torch.randn(3, 128).to(dtype)
    expected = made(x)
    x.requires_grad_()
    with pytest.raises(ModelError, match=r"`block\.proj` is for inference only") as caught:
        made(x)
    assert made.kernel.name in caught.value.message
    assert "torch.no_grad()" in caught.value.hint
    with torch.no_grad():
        assert torch.equal(made(x), expected)


def test_members_that_run_alone_refuse_too() -> None:
    parsed = parse_scheme("W8A8")
    assert parsed.weight is not None
    stack = LinearStack(
        128, [32, 32], bias=False, scheme=parsed, dtype=torch.float32, prefix="block.stack"
    )
    weight = quantize_rtn(torch.randn(32, 128), parsed.weight)
    for slot in (0, 1):
        stack.receive("weight", slot, weight)
    stack.finish(CPU)
    stack.separate = nn.ModuleList([stack.gemm, stack.gemm])
    with pytest.raises(ModelError, match="for inference only"):
        stack.take(torch.randn(3, 128, requires_grad=True), 1)


# -- what a checkpoint says of inputs --------------------------------------------------------------


@pytest.mark.parametrize("use", ["*", "/"])
def test_factors_of_columns_are_applied_to_the_input(use: str) -> None:
    parsed = parse_scheme("W4A16:g32")
    assert parsed.weight is not None
    weight = quantize_rtn(torch.randn(32, 128), parsed.weight)
    factor = torch.rand(128) + 0.5
    scaled = replace(weight, inner=factor, evaluation=replace(weight.evaluation, inner=use))
    made = QuantLinear(128, 32, bias=False, scheme=parsed, dtype=torch.float32, prefix="p")
    made.receive("weight", 0, scaled)
    made.finish(CPU)
    x = torch.randn(3, 128)
    values = weight.dequantize() * factor if use == "*" else weight.dequantize() / factor
    assert torch.allclose(made(x), x @ values.T, atol=1e-4)
    assert torch.allclose(made.weight, values, atol=1e-6)
    assert torch.equal(scaled.dequantize(), values)


def test_gradients_meet_the_factors_of_columns_too() -> None:
    parsed = parse_scheme("W4A16:g32")
    assert parsed.weight is not None
    weight = quantize_rtn(torch.randn(32, 128).bfloat16(), parsed.weight)
    made = QuantLinear(128, 32, bias=False, scheme=parsed, dtype=torch.bfloat16, prefix="p")
    made.receive("weight", 0, replace(weight, inner=(torch.rand(128) + 0.5).bfloat16()))
    made.finish(CPU)
    x = torch.randn(3, 128).bfloat16().requires_grad_()
    made(x).sum().backward()
    assert x.grad is not None
    expected = made.weight.double().sum(0).expand(3, -1)
    assert (x.grad.double() - expected).norm() < 0.01 * expected.norm()  # bfloat16 values, twice


@pytest.mark.parametrize("use", ["*", "/"])
def test_static_inputs_are_rounded_with_the_stored_scale(use: str) -> None:
    parsed = parse_scheme("FP8_DYNAMIC")
    assert parsed.weight is not None
    assert parsed.input is not None
    static = replace(parsed, input=replace(parsed.input, dynamic=False, granularity="tensor"))
    weight = quantize_rtn(torch.randn(32, 128), parsed.weight)
    scale = torch.tensor([0.013])
    stored = replace(
        weight,
        input_scale=scale if use == "*" else 1 / scale,
        evaluation=replace(weight.evaluation, input=use),
    )
    made = QuantLinear(128, 32, bias=False, scheme=static, dtype=torch.float32, prefix="p")
    made.receive("weight", 0, stored)
    made.finish(CPU)
    x = torch.randn(3, 128) * 3
    rounded = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    assert torch.allclose(made(x), rounded @ weight.dequantize().T, atol=1e-3)
    assert made.kernel.note == ""


def test_members_with_different_input_scales_run_apart() -> None:
    parsed = parse_scheme("FP8_DYNAMIC")
    assert parsed.weight is not None
    assert parsed.input is not None
    static = replace(parsed, input=replace(parsed.input, dynamic=False, granularity="tensor"))
    made = LinearStack(
        128, [32, 32], bias=False, scheme=static, dtype=torch.float32, prefix="block.stack"
    )
    for slot in (0, 1):
        weight = quantize_rtn(torch.randn(32, 128), parsed.weight)
        made.receive("weight", slot, replace(weight, input_scale=torch.tensor([0.01 + slot])))
    made.finish(CPU)
    assert made.why_separate == "scales of their inputs differ"
