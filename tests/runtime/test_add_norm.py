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
