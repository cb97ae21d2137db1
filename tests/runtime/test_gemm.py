"""Every row of the kernel table agrees with dequantizing in float64, up to rounding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from quantload.errors import ModelError
from quantload.layers.linear import QuantLinear
from quantload.quant.activation import fake_quantize
from quantload.quant.grid import E2M1
from quantload.quant.qtensor import QuantTensor
from quantload.quant.rtn import quantize_rtn
from quantload.quant.scheme import InputScheme, parse_scheme
from quantload.runtime.gemm import (
    KERNELS,
    Reference,
    ReferenceLinear,
    TritonWeightOnly,
    choose,
    usable_input,
)

CPU = torch.device("cpu")
LIMITS = {torch.float32: 1e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}


def case(
    scheme: str, dtype: torch.dtype, n: int = 96, k: int = 128
) -> tuple[QuantTensor, InputScheme | None]:
    torch.manual_seed(0)
    parsed = parse_scheme(scheme)
    assert parsed.weight is not None
    return quantize_rtn(torch.randn(n, k).to(dtype), parsed.weight), parsed.input


def error(module: nn.Module, weight: QuantTensor, input: InputScheme | None, x: Tensor) -> float:
    x_used = x if input is None else fake_quantize(x, input)
    expected = x_used.double() @ weight.dequantize().double().t()
    return float((module(x).double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(
    "scheme",
    [
        "W4A16:g32",
        "W4A16_ASYM:g64",
        "W8A16:g32",
        "W8A16:channel",
        "W8A8",
        "FP8_DYNAMIC",
        "FP8_BLOCK",
    ],
)
def test_chosen_kernel_is_accurate(scheme: str, dtype: torch.dtype) -> None:
    weight, input = case(scheme, dtype)
    choice = choose(weight, input, device=CPU, dtype=dtype)
    module = choice.kernel.pack(weight, input, device=CPU, dtype=dtype)
    for shape in ((128,), (1, 128), (2, 5, 128)):
        x = torch.randn(*shape).to(dtype)
        assert module(x).shape == (*shape[:-1], 96)
        assert module(x).dtype == dtype
        assert error(module, weight, input, x) < LIMITS[dtype]
    assert torch.allclose(
        module.weight_values(torch.float32), weight.dequantize().float(), atol=0.02
    )


@pytest.mark.parametrize(
    ("scheme", "dtype", "name"),
    [
        ("W4A16:g32", torch.bfloat16, "torch int4 for CPU"),
        ("W4A16:g32", torch.float32, "dequantize and multiply"),
        ("W8A16:channel", torch.bfloat16, "torch int8 for CPU"),
        ("W8A16:g32", torch.bfloat16, "dequantize and multiply"),
        ("W8A8", torch.bfloat16, "torch int8 by int8 for CPU"),
        ("W8A8", torch.float32, "torch int8 by int8 for CPU"),
        ("FP8_DYNAMIC", torch.bfloat16, "dequantize and multiply"),
    ],
)
def test_choice(scheme: str, dtype: torch.dtype, name: str) -> None:
    weight, input = case(scheme, dtype)
    choice = choose(weight, input, device=CPU, dtype=dtype)
    assert choice.kernel.name == name
    assert [refused for refused, _ in choice.refused] == [
        kernel.name for kernel in KERNELS[: len(choice.refused)]
    ]
    assert all(reason for _, reason in choice.refused)


@pytest.mark.parametrize("scheme", ["W4A16:g32", "W8A16:channel", "W8A8", "W4A16_ASYM:g32"])
@pytest.mark.parametrize("kernel", KERNELS[1:-1], ids=lambda kernel: kernel.name)
def test_odd_shapes_are_right_or_refused(kernel: object, scheme: str) -> None:
    for n, k in ((96, 64), (33, 160), (16, 96), (1, 64), (7, 224)):
        weight, input = case(scheme, torch.bfloat16, n, k)
        if kernel.why_not(weight, input, device=CPU, dtype=torch.bfloat16) is None:  # type: ignore[attr-defined]
            module = kernel.pack(weight, input, device=CPU, dtype=torch.bfloat16)  # type: ignore[attr-defined]
            x = torch.randn(3, k).to(torch.bfloat16)
            assert error(module, weight, input, x) < LIMITS[torch.bfloat16]


def test_inexact_scales_are_refused() -> None:
    weight, _ = case("W4A16:g32", torch.float32)
    choice = choose(weight, None, device=CPU, dtype=torch.bfloat16)
    assert choice.kernel.name == "dequantize and multiply"
    assert any("not exact" in reason for _, reason in choice.refused)


@pytest.mark.parametrize("bits", ["W4A16:g32", "W4A16_ASYM:g32"])
def test_reference_is_bit_equal_to_linear_and_small(bits: str) -> None:
    weight, _ = case(bits, torch.float32)
    module = Reference().pack(weight, None, device=CPU, dtype=torch.float32)
    x, bias = torch.randn(3, 128), torch.randn(96)
    assert torch.equal(module(x, bias), nn.functional.linear(x, weight.dequantize(), bias))
    codes = sum(b.nbytes for name, b in module.named_buffers() if name.endswith("codes"))
    assert codes == 96 * 128 // 2


def test_chunks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantload.runtime.gemm._CHUNK_ELEMENTS", 32 * 256)
    for scheme in ("W4A16:g32", "FP8_BLOCK"):
        weight, _ = case(scheme, torch.float32, n=200, k=256)
        module = ReferenceLinear(weight, None)
        assert len(module.chunks) > 1
        x, bias = torch.randn(3, 256), torch.randn(200)
        expected = nn.functional.linear(x, weight.dequantize(), bias)
        assert torch.allclose(module(x, bias), expected, rtol=1e-5, atol=1e-4)
        assert torch.equal(module.weight_values(torch.float32), weight.dequantize())


def test_reference_moves_with_the_model() -> None:
    weight, _ = case("W4A16:g32", torch.float32)
    module = ReferenceLinear(weight, None).to("meta")
    assert {buffer.device.type for buffer in module.buffers()} == {"meta"}


def test_inputs_on_a_table_grid_stay_in_full_precision() -> None:
    _, input = case("W8A8", torch.float32)
    assert input is not None
    assert usable_input(input) == (input, "")
    used, note = usable_input(replace(input, grid=E2M1))
    assert used is None
    assert "rounding to e2m1 is not built" in note
    assert usable_input(None) == (None, "")


@pytest.mark.parametrize("scheme", ["W4A16:g32", "W8A8", "FP8_BLOCK"])
def test_triton_row(kernel_device: torch.device, scheme: str) -> None:
    weight, input = case(scheme, torch.float32)
    module = TritonWeightOnly().pack(weight, input, device=kernel_device, dtype=torch.float32)
    x = torch.randn(3, 128, device=kernel_device)
    assert error(module, weight.to(kernel_device), input, x) < 2e-3
    values = module.weight_values(torch.float32)
    assert torch.allclose(values, weight.to(kernel_device).dequantize(), rtol=2e-3, atol=1e-4)
    moved = module.to("meta")
    assert {part.device.type for part in moved.packed.tensors().values()} == {"meta"}
    assert {buffer.device.type for buffer in moved.buffers()} == {"meta"}


def test_triton_row_keeps_its_dtypes_in_a_layer(kernel_device: torch.device) -> None:
    weight, _ = case("FP8_DYNAMIC", torch.float32)
    scheme = parse_scheme("FP8_DYNAMIC")
    layer = QuantLinear(128, 96, bias=False, scheme=scheme, dtype=torch.float32, prefix="proj")
    layer.gemm = TritonWeightOnly().pack(weight, None, device=kernel_device, dtype=torch.float32)
    x = torch.randn(3, 128, device=kernel_device)
    expected, packed = layer(x), layer.gemm.packed
    layer.to(torch.float32)
    assert {name: part.dtype for name, part in layer.gemm.packed.tensors().items()} == {
        name: part.dtype for name, part in packed.tensors().items()
    }
    assert torch.equal(layer(x), expected)
    with pytest.raises(ModelError, match=r"packed for `torch\.float32`"):
        layer.half()
    layer.to("meta", torch.float32)
    assert {part.device.type for part in layer.gemm.packed.tensors().values()} == {"meta"}
    assert layer.gemm.packed.codes is layer.gemm.codes
