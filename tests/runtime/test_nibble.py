"""The nibble kernels against a float64 oracle: in the interpreter, and (`-m gpu`) on the card."""

import pytest
import torch

from tests.runtime.nibble_cases import BF16, CASES, F16, F32, NF4, Case, allowed, make_weight

INTERPRETED_PLANS = {
    "decode": {"rows": 16, "tokens": 16, "stages": 1},
    "decode before": {"rows": 16, "tokens": 16, "stages": 1, "after": 0},
    "decode split": {"rows": 32, "tokens": 16, "stages": 1, "splits": 2, "swizzle": 2},
    "dense": {"path": 2},
    "parallel": {"path": 4, "rows": 16, "tokens": 16, "unroll": 2, "stages": 1},
    "gemv": {"path": 3, "rows": 16, "unroll": 2},
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
    assert y.shape == (m, n) and y.dtype == dtype
    worst = ((y.double() - exact).abs() / error).max().item()
    assert worst <= 1, f"{worst:.3g} times the allowed error"


@pytest.mark.parametrize("case", CASES)
def test_every_form_gives_the_product(nibble, kernel_device, case):
    check(nibble, make_weight(CASES[case], 20, 512), 3, F16, kernel_device,
          INTERPRETED_PLANS["decode split"], bias=True)  # fmt: skip


@pytest.mark.parametrize("plan", INTERPRETED_PLANS)
@pytest.mark.parametrize("case", ["int4-g128", "int4-g32-zero", "mxfp4"])
def test_every_kernel_gives_the_product(nibble, kernel_device, case, plan):
    check(nibble, make_weight(CASES[case], 40, 288), 17, BF16, kernel_device,
          INTERPRETED_PLANS[plan])  # fmt: skip
