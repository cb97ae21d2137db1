"""The router in one launch, against its definition in torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor


def by_definition(logits: Tensor, k: int, *, normalized: bool) -> tuple[Tensor, Tensor]:
    values, experts = logits.double().topk(k, dim=-1)
    return values.softmax(-1) if normalized else logits.double().softmax(-1).gather(
        1, experts
    ), experts


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize(("rows", "count", "width", "k"), [(3, 12, 70, 4), (1, 32, 600, 1)])
def test_weights_and_experts_are_their_definition(
    normalized: bool, rows: int, count: int, width: int, k: int,
    kernel_device: torch.device,
) -> None:  # fmt: skip
    from quantload.runtime.kernels.router import route_to_experts

    x, weight = (torch.randn(n, width, device=kernel_device) for n in (rows, count))
    bias = torch.randn(count, device=kernel_device) if normalized else None
    logits, weights, experts = route_to_experts(
        x, weight * width**-0.5, bias, k=k, normalized=normalized
    )
    expected = x.double() @ (weight * width**-0.5).double().T
    expected = expected if bias is None else expected + bias.double()
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-5)
    wanted, chosen = by_definition(logits, k, normalized=normalized)
    assert torch.equal(experts, chosen)
    torch.testing.assert_close(weights.double(), wanted, rtol=1e-5, atol=1e-6)


def test_of_equal_experts_the_first(kernel_device: torch.device) -> None:
    from quantload.runtime.kernels.router import route_to_experts

    x, weight = torch.ones(2, 8, device=kernel_device), torch.zeros(6, 8, device=kernel_device)
    _, weights, experts = route_to_experts(x.half(), weight.half(), None, k=3, normalized=True)
    assert experts.tolist() == [[0, 1, 2]] * 2
    assert weights.dtype == torch.float16
    torch.testing.assert_close(weights.float(), torch.full_like(weights, 1 / 3).float())
