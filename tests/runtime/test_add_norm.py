"""Residual sum and norm in one pass, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor


def by_definition(x: Tensor, weight: Tensor, eps: float, *, offset: bool) -> Tensor:
    x, w = x.double(), weight.double() + offset
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * w


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("late", "offset"), [(True, False), (False, True)])
@pytest.mark.parametrize("shape", [(1, 64), (3, 100), (0, 8)], ids=str)
def test_sum_and_norm_are_their_definition(
    dtype: torch.dtype, late: bool, offset: bool, shape: tuple[int, ...],
    kernel_device: torch.device,
) -> None:  # fmt: skip
    from quantload.runtime.kernels.add_norm import NormWeight, add_norm

    hidden, delta = (torch.randn(shape, device=kernel_device).to(dtype) for _ in range(2))
    first, post = (torch.randn(shape[1], device=kernel_device).to(dtype) for _ in range(2))
    norm = NormWeight(first, 1e-5, late=late, offset=offset)
    total, normed = add_norm(hidden, delta, norm)
    assert torch.equal(total, hidden + delta)
    unit = {torch.float32: 2e-6, torch.float16: 3e-3}[dtype]
    expected = by_definition(total, first, 1e-5, offset=offset)
    torch.testing.assert_close(normed.double(), expected, rtol=unit, atol=unit)
    behind = NormWeight(post, 1e-6, late=not late, offset=not offset)
    total, normed = add_norm(hidden, delta, None, post=behind)
    expected = hidden.double() + by_definition(delta, post, 1e-6, offset=not offset)
    torch.testing.assert_close(total.double(), expected, rtol=unit, atol=unit)
    assert normed is total


def test_without_a_sum_the_rows_stay_what_they_are(kernel_device: torch.device) -> None:
    from quantload.runtime.kernels.add_norm import NormWeight, add_norm

    wide = torch.randn(4, 96, device=kernel_device)
    hidden, weight = wide[:, :48], torch.randn(48, device=kernel_device)
    total, normed = add_norm(hidden, None, NormWeight(weight, 0.5, late=False, offset=False))
    assert total is hidden
    expected = by_definition(hidden, weight, 0.5, offset=False)
    torch.testing.assert_close(normed.double(), expected, rtol=2e-6, atol=2e-6)


def test_one_row_that_is_not_finite_spoils_no_other(kernel_device: torch.device) -> None:
    from quantload.runtime.kernels.add_norm import NormWeight, add_norm

    hidden = torch.randn(3, 32, device=kernel_device)
    hidden[1, 5] = float("nan")
    norm = NormWeight(torch.ones(32, device=kernel_device), 1e-5, late=True, offset=False)
    normed = add_norm(hidden, torch.zeros_like(hidden), norm)[1]
    assert normed[1].isnan().all()
    assert normed[[0, 2]].isfinite().all()


SCHEMES = {
    "token": {"granularity": "token"},
    "group": {"granularity": "group", "group_size": 32},
}


@pytest.mark.parametrize("grid", ["int8", "e4m3"])
@pytest.mark.parametrize("kind", SCHEMES)
def test_codes_are_those_of_the_norm(grid: str, kind: str, kernel_device: torch.device) -> None:
    from quantload.quant.grid import E4M3, INT8
    from quantload.quant.scheme import InputScheme
    from quantload.runtime.kernels.add_norm import Codes, NormWeight, add_norm, writes_codes
    from quantload.runtime.kernels.quantize_rows import quantize_rows

    scheme = InputScheme(grid={"int8": INT8, "e4m3": E4M3}[grid], **SCHEMES[kind])
    if not writes_codes(scheme, 96):
        assert (grid, kind) == ("int8", "group")
        return
    hidden, delta = (torch.randn(3, 96, device=kernel_device).half() for _ in range(2))
    norm = NormWeight(torch.randn(96, device=kernel_device).half(), 1e-5, late=True, offset=False)
    total, plain = add_norm(hidden, delta, norm)
    again, found = add_norm(hidden, delta, norm, codes=scheme)
    assert isinstance(found, Codes)
    assert isinstance(plain, Tensor)
    codes, scales = quantize_rows(plain, scheme)
    assert torch.equal(again, total)
    assert torch.equal(found.codes.view(torch.int8), codes.view(torch.int8))
    assert torch.equal(found.scales, scales)


def test_schemes_that_no_codes_are_written_for() -> None:
    from quantload.quant.grid import E4M3
    from quantload.quant.scheme import InputScheme
    from quantload.runtime.kernels.add_norm import writes_codes

    assert not writes_codes(None, 64)
    assert not writes_codes(InputScheme(grid=E4M3, granularity="token", dynamic=False), 64)
    assert not writes_codes(InputScheme(grid=E4M3, granularity="tensor"), 64)
    assert not writes_codes(InputScheme(grid=E4M3, granularity="group", group_size=128), 192)
