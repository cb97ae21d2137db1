"""Routers are recognised by what they return, and run as they did."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quantload.layers.fused_router import FastRouter, recognise_router, with_fast_router


class Router(nn.Module):
    def __init__(self, kind: str, device: torch.device) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.randn(12, 40, device=device) / 6, requires_grad=False)
        if kind == "last":
            self.bias = nn.Parameter(torch.randn(12, device=device), requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(x, self.weight, getattr(self, "bias", None))
        if self.kind == "last":
            values, experts = logits.topk(3)
            return logits, values.softmax(-1), experts
        if self.kind == "sigmoid":
            values, experts = logits.sigmoid().topk(3)
            return logits, values, experts
        values, experts = logits.softmax(-1).topk(3)
        if self.kind == "first":
            values = values / values.sum(-1, keepdim=True)
        return logits, values, experts


class Block(nn.Module):
    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.act, self.router = nn.SiLU(), router

    def forward(self, x: Tensor) -> Tensor:
        _, weights, experts = self.router(x)
        return self.act(weights * experts)


@pytest.mark.parametrize("kind", ["first", "last", "whole"])
def test_a_block_routes_as_before(kind: str, kernel_device: torch.device) -> None:
    block = Block(Router(kind, kernel_device))
    x = torch.randn(5, 40, device=kernel_device)
    fast = with_fast_router(block, x[:1])
    assert isinstance(fast.router, FastRouter)
    assert (fast.router.formula.normalized, fast.router.formula.k) == (kind != "whole", 3)
    assert isinstance(block.router, Router)  # the model stays as it was
    torch.testing.assert_close(fast(x), block(x), rtol=1e-5, atol=1e-6)
    many = torch.randn(70, 40, device=kernel_device)
    assert torch.equal(fast(many), block(many))


def test_other_modules_are_left_alone(kernel_device: torch.device) -> None:
    x = torch.randn(1, 40, device=kernel_device)
    assert recognise_router(Router("sigmoid", kernel_device), x) is None
    assert recognise_router(nn.Linear(40, 12, device=kernel_device), x) is None
    assert recognise_router(Router("first", kernel_device), x[:, :8]) is None
    block = Block(nn.Linear(40, 12, device=kernel_device))
    assert with_fast_router(block, x) is block
