"""Rounding in one launch is `fake_quantize`, bit for bit; only zeros lose their sign."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from whole_weights import scheme_named

from quantload.quant.activation import fake_quantize

SCHEMES = ("FP8_DYNAMIC", "W8A8", "FP8_BLOCK", "MXFP8")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter casts NaN by numpy
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", SCHEMES)
def test_is_fake_quantization(name, dtype, kernel_device):
    from quantload.runtime.kernels.round_rows import round_rows, why_not

    scheme = scheme_named(name).input
    assert why_not(scheme, dtype, 200) is None
    x = (torch.randn(5, 400, device=kernel_device) * torch.logspace(-3, 3, 5)[:, None].to(
        kernel_device
    )).to(dtype)[:, :200]  # fmt: skip
    x[2] = 0
    found = round_rows(x, scheme)
    assert found.dtype == dtype
    assert torch.equal(found, fake_quantize(x, scheme))
    x[1, 7], x[3, 8] = torch.nan, torch.inf
    found = round_rows(x, scheme)
    assert not found[1, 7].isfinite()
    assert not found[3, 8].isfinite()
    assert found[0].isfinite().all()
    assert round_rows(x[:0], scheme).shape == (0, 200)


@pytest.mark.gpu
@pytest.mark.parametrize("features", [768, 2048, 7168])
@pytest.mark.parametrize("name", SCHEMES)
def test_is_fake_quantization_on_a_card(name, features):
    """Rows that a program loads in wide pieces."""
    from quantload.runtime.kernels.round_rows import round_rows

    scheme, x = scheme_named(name).input, torch.randn(64, features, device="cuda").bfloat16()
    assert torch.equal(round_rows(x, scheme), fake_quantize(x, scheme))


def test_says_why_not(kernel_device):
    from quantload.runtime.kernels.round_rows import why_not

    scheme = scheme_named("FP8_DYNAMIC").input
    assert "per token" in why_not(replace(scheme, granularity="tensor"), torch.bfloat16, 64)
    assert "symmetrically" in why_not(replace(scheme, symmetric=False), torch.bfloat16, 64)
    assert "more than" in why_not(scheme, torch.bfloat16, 1 << 15)
    assert "inputs are torch.float64" in why_not(scheme, torch.float64, 64)
