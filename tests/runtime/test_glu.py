"""The kernel of gated linear units: against float64 in the interpreter, bit for bit on the card."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

NAMES = ("silu", "gelu", "gelu_tanh", "relu")
DEFINITIONS = {
    "silu": lambda x: x / (1 + (-x).exp()),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: (
        0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    ),
    "relu": lambda x: x.clamp(min=0),
}


def by_definition(gate: Tensor, up: Tensor, name: str) -> Tensor:
    return DEFINITIONS[name](gate.double()) * up.double()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(3, 70), (2, 2, 1500), (1,), (0, 8)], ids=str)
def test_products_are_their_definition(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], kernel_device: torch.device
) -> None:
    from quantload.runtime.kernels.glu import glu

    gate, up = (torch.randn(shape, device=kernel_device).mul(3).to(dtype) for _ in range(2))
    found, expected = glu(gate, up, name), by_definition(gate, up, name)
    assert found.dtype == dtype
    assert found.shape == shape
    assert found.is_contiguous()
    unit = {torch.float32: 2.0**-20, torch.float16: 2.0**-9}[dtype]
    assert ((found.double() - expected).abs() <= unit * (expected.abs() + up.abs())).all()


def test_halves_of_one_product_are_read_where_they_are(kernel_device: torch.device) -> None:
    from quantload.runtime.kernels.glu import glu

    both = torch.randn(2, 3, 100, device=kernel_device)
    gate, up = both.chunk(2, dim=-1)
    before = both.clone()
    assert torch.equal(glu(gate, up, "silu"), glu(gate.clone(), up.clone(), "silu"))
    odd = torch.randn(4, 6, 50, device=kernel_device).transpose(0, 1)
    assert torch.equal(glu(odd, odd, "relu"), glu(odd.contiguous(), odd.contiguous(), "relu"))
    assert torch.equal(both, before)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of NaN in the interpreter
def test_one_wrong_input_is_found(
    kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantload.runtime.kernels import glu as module

    def is_exact(at_three: float) -> bool:
        def own(x: Tensor) -> Tensor:
            positive = torch.where(x <= 0, torch.zeros((), dtype=x.dtype, device=x.device), x)
            return torch.where(x == 3, torch.full_like(x, at_three), positive)

        monkeypatch.setattr(module, "ACTIVATIONS", {"relu": own})
        module.is_exact.cache_clear()
        return module.is_exact("relu", torch.float16, kernel_device)

    assert is_exact(3.0)
    assert not is_exact(3.002)
    module.is_exact.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["silu", "gelu_tanh", "relu"])
def test_every_input_has_the_bits_of_torch(
    name: str, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    from quantload.runtime.kernels.glu import ACTIVATIONS, glu, is_exact

    assert is_exact(name, dtype, kernel_device)
    gate, up = (torch.randn(300, 5000, device=kernel_device).mul(4).to(dtype) for _ in range(2))
    assert torch.equal(glu(gate, up, name), ACTIVATIONS[name](gate) * up)


@pytest.mark.parametrize("width", [96, 160])
def test_codes_are_those_of_the_product(width: int, kernel_device: torch.device) -> None:
    from quantload.quant.grid import E4M3
    from quantload.quant.scheme import InputScheme
    from quantload.runtime.kernels.glu import glu, glu_codes
    from quantload.runtime.kernels.quantize_rows import quantize_rows

    scheme = InputScheme(grid=E4M3, granularity="token")
    both = torch.randn(3, 2 * width, device=kernel_device).half()
    gate, up = both.chunk(2, dim=-1)
    found = glu_codes(gate, up, "silu", scheme)
    codes, scales = quantize_rows(glu(gate, up, "silu"), scheme)
    assert torch.equal(found.codes.view(torch.int8), codes.view(torch.int8))
    assert torch.equal(found.scales, scales)
