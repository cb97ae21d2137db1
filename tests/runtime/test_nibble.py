"""The nibble kernels against a float64 oracle: in the interpreter, and (`-m gpu`) on the card."""

import pytest
import torch

from quantload.errors import ShapeError
from quantload.quant.grid import INT4, int_grid, uint_grid
from tests.runtime.nibble_cases import BF16, CASES, F16, F32, Case, allowed, make_weight

INTERPRETED_PLANS = {
    "decode": {"rows": 16, "tokens": 16, "stages": 1},
    "decode before": {"rows": 16, "tokens": 16, "stages": 1, "after": 0},
    "decode split": {"rows": 32, "tokens": 16, "stages": 1, "splits": 2, "swizzle": 2},
    "dense": {"path": 2},
    "parallel": {"path": 4, "rows": 16, "tokens": 16, "unroll": 2, "stages": 1},
    "gemv": {"path": 3, "rows": 8, "unroll": 1},
}


@pytest.fixture
def nibble(kernel_device):
    from quantload.runtime.kernels import nibble

    return nibble


def product(nibble, weight, x, settings, bias=None):
    from quantload.runtime.kernels.nibble_plan import Plan
    from quantload.runtime.kernels.nibble_weight import pack, why_not_form

    assert why_not_form(weight) is None
    packed = pack(weight, dtype=x.dtype, device=x.device)
    plan = Plan.from_settings(settings)
    return nibble.run(x, packed, bias, plan)


def check(nibble, weight, m, dtype, device, settings, *, bias=False):
    weight = weight.to(device)
    n, k = weight.shape
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(device, dtype)
    offset = torch.randn(n).to(device, dtype) if bias else None
    y = product(nibble, weight, x, settings, offset)
    rounds = settings.get("path") == 2 or settings.get("after") == 0
    exact, error = allowed(x, weight, rounds_values=rounds)
    if offset is not None:
        exact = exact + offset.double()
        error = error + 2 * exact.abs() * torch.finfo(dtype).eps
    assert y.shape == (m, n)
    assert y.dtype == dtype
    worst = ((y.double() - exact).abs() / error).max().item()
    assert worst <= 1, f"{worst:.3g} times the allowed error"


# every form of a part once; all cases run on the card, in test_nibble_cuda
FORMS = (
    "int4-g128-act-order",
    "int4-g32-zero",
    "int4-channel",
    "uint4-g64-offset",
    "uint2-g32-offset-outer-values",
    "mxfp4",
    "nvfp4",
    "nf4-g64",
)


@pytest.mark.parametrize("case", FORMS)
def test_every_form_gives_the_product(nibble, kernel_device, case):
    check(nibble, make_weight(CASES[case], 20, 512), 3, F16, kernel_device,
          INTERPRETED_PLANS["decode split"], bias=True)  # fmt: skip


@pytest.mark.parametrize("plan", ["decode split", "dense", "parallel"])
@pytest.mark.parametrize("case", ["mxfp4", "nvfp4"])
def test_scales_that_meet_values_while_these_are_unpacked(nibble, kernel_device, case, plan):
    from quantload.runtime.kernels.nibble_weight import pack

    weight = make_weight(CASES[case], 20, 800)
    assert pack(weight, dtype=BF16, device=weight.codes.device).form == "fp4_16"
    check(nibble, weight, 17, BF16, kernel_device, INTERPRETED_PLANS[plan], bias=True)


@pytest.mark.parametrize("plan", INTERPRETED_PLANS)
def test_every_kernel_gives_the_product(nibble, kernel_device, plan):
    tokens = 1 if plan == "gemv" else 17  # a program for each, and slow here
    check(nibble, make_weight(CASES["int4-g128"], 20, 288), tokens, BF16, kernel_device,
          INTERPRETED_PLANS[plan])  # fmt: skip


def test_a_custom_op_serves_any_leading_dimensions_and_no_tokens(nibble, kernel_device):
    from quantload.runtime.kernels.nibble_weight import pack

    weight = make_weight(CASES["int4-g64"], 16, 256)
    packed = pack(weight.to(kernel_device), dtype=F16, device=kernel_device)
    x = torch.randn(2, 1, 256).to(kernel_device, F16)
    y = nibble.nibble_linear(x, packed)
    assert y.shape == (2, 1, 16)
    exact, error = allowed(x.flatten(0, 1), weight.to(kernel_device), rounds_values=False)
    assert ((y.flatten(0, 1).double() - exact).abs() <= error).all()
    assert nibble.nibble_linear(x[:0], packed).shape == (0, 1, 16)
    with pytest.raises(ShapeError, match="`255` features, the weight expects `256`"):
        nibble.nibble_linear(x[..., 1:], packed)


@pytest.mark.parametrize("case", ["int4-g32-zero-act-order", "mxfp4", "int4-channel-zero"])
def test_the_values_of_a_packed_weight_are_those_of_the_weight(nibble, kernel_device, case):
    from quantload.runtime.kernels.nibble_weight import pack

    weight = make_weight(CASES[case], 6, 160)
    packed = pack(weight, dtype=BF16, device=kernel_device)
    values = nibble.weight_values(packed, F32)
    torch.testing.assert_close(values.cpu(), weight.dequantize(F32), rtol=1e-6, atol=0)


def test_gradients_of_inputs_and_biases_by_the_values_of_the_weight(nibble, kernel_device):
    from quantload.layers.inputs import with_gradient
    from quantload.runtime.kernels.nibble_weight import pack
    from quantload.runtime.nibble_gemm import NibbleLinear

    weight = make_weight(CASES["int4-g128-act-order"], 20, 512)
    gemm = NibbleLinear(pack(weight, dtype=BF16, device=kernel_device), None)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 512, generator=generator).to(kernel_device, BF16).requires_grad_()
    bias = torch.randn(20, generator=generator).to(kernel_device, BF16).requires_grad_()
    dy = torch.randn(2, 3, 20, generator=generator).to(kernel_device, BF16)
    y = with_gradient(gemm, x, bias)
    assert torch.equal(y, gemm(x.detach(), bias.detach()))
    y.backward(dy)
    expected = dy.double().cpu() @ weight.dequantize(F32).double()
    assert ((x.grad.double().cpu() - expected).norm() / expected.norm()) < 0.01
    assert torch.equal(bias.grad, dy.flatten(0, 1).sum(0))


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Case(INT4, 24), "groups of 24 columns"),
        (Case(int_grid(5), 32), "more than 4 bits"),
        (Case(uint_grid(4), 16, offset=F32), "groups of 16 columns with float32 scales"),
    ],
)
def test_what_has_no_layout_is_refused_with_the_reason(case, reason):
    from quantload.runtime.kernels.nibble_weight import why_not_form

    assert reason in why_not_form(make_weight(case, 8, 96))


def test_scales_that_are_no_plain_bytes_are_kept_wider(kernel_device):
    from quantload.runtime.kernels.nibble_weight import pack

    weight = make_weight(CASES["nvfp4"], 4, 64)
    assert pack(weight, dtype=F16, device=torch.device("cpu")).kind == "e4m3"
    weight.scale.view(torch.uint8)[1, 2] = 127  # NaN
    packed = pack(weight, dtype=BF16, device=torch.device("cpu"))
    assert packed.kind == "bf16"
