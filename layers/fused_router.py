"""Routers of experts in one launch, recognised by what they return.

A router is a module with one weight [E, H], and maybe a bias [E], that returns logits, weights and
experts of tokens. It is run on random tokens; it is one of the known ones if the kernel chooses the
same experts, but for such as have the same logits up to rounding, and gives them the same weights.

Letters: T tokens, H width, E experts, k experts of a token.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_TRIED = 32
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
_SAME = 0.7  # share of tokens, at least, with the very same experts: bfloat16 has many equal logits


@dataclass(frozen=True)
class RouterFormula:
    """What a router computes.

    Args:
        weight: Name of its parameter [E, H].
        bias: Name of its parameter [E], "" without.
        k: Experts of a token.
        normalized: Softmax over the chosen experts, not over all.
        in_float32: Weights are float32.
    """

    weight: str
    bias: str
    k: int
    normalized: bool
    in_float32: bool

    def run(self, module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits [T, E], weights and experts [T, k] of x [T, H]."""
        from quantload.runtime.kernels.router import route_to_experts

        weight = module._parameters[self.weight]
        assert weight is not None, "a recognised router has a weight"
        return route_to_experts(
            x,
            weight,
            module._parameters[self.bias] if self.bias else None,
            k=self.k,
            normalized=self.normalized,
            in_float32=self.in_float32,
        )


class FastRouter(nn.Module):
    """Stands for a router where few tokens come.

    Args:
        own: The router.
        formula: What it computes.
    """

    def __init__(self, own: nn.Module, formula: RouterFormula) -> None:
        super().__init__()
        self.own, self.formula = own, formula

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits, weights and experts of x [..., H]."""
        from quantload.runtime.kernels.router import MOST_TOKENS

        rows = x.reshape(-1, x.shape[-1])
        if len(rows) > MOST_TOKENS:
            return self.own(x)  # type: ignore[no-any-return]
        return self.formula.run(self.own, rows)


def with_fast_router(block: nn.Module, x: Tensor) -> nn.Module:
    """Return a block of experts that shares all with the given one, but routes in one launch.

    Args:
        block: Any module; without a router that is known it is returned as it is.
        x: [1, H], for dtype and device.
    """
    for name, child in block._modules.items():
        formula = None if child is None else recognise_router(child, x)
        if child is not None and formula is not None:
            fast = copy.copy(block)
            fast._modules = {**block._modules, name: FastRouter(child, formula)}
            return fast
    return block


def recognise_router(module: nn.Module, like: Tensor) -> RouterFormula | None:
    """Return what a router computes; None for one that is not known, and for other modules."""
    from quantload.runtime.kernels.router import MOST_EXPERTS

    named = {name: p for name, p in module._parameters.items() if p is not None}
    weights = [name for name, p in named.items() if p.ndim == 2 and p.shape[1] == like.shape[-1]]
    biases = [name for name, p in named.items() if p.ndim == 1]
    if len(weights) != 1 or len(named) != 1 + len(biases) or len(biases) > 1 or module._modules:
        return None
    weight = named[weights[0]]
    if len(weight) > MOST_EXPERTS or any(p.dtype != like.dtype for p in named.values()):
        return None
    seed = torch.Generator().manual_seed(0)
    x = torch.randn(_TRIED, like.shape[-1], generator=seed).to(like)
    try:
        with torch.no_grad():
            expected = module(x)
    except Exception:  # noqa: BLE001 - model code raises anything
        return None
    if not _is_routing(expected, len(weight)):
        return None
    k, in_float32 = expected[2].shape[1], expected[1].dtype != like.dtype
    for normalized in (True, False):
        bias = biases[0] if biases else ""
        formula = RouterFormula(weights[0], bias, k, normalized, in_float32)
        with torch.no_grad():
            if _agrees(formula.run(module, x), expected, _TOLERANCE[like.dtype]):
                return formula
    return None


def _is_routing(found: Any, experts: int) -> bool:  # noqa: ANN401 - of any module
    """True for logits [T, E], weights [T, k] in floats and experts [T, k] in int64."""
    if not (isinstance(found, tuple) and len(found) == 3):
        return False
    if not all(isinstance(part, Tensor) for part in found):
        return False
    logits, weights, chosen = found
    of_tokens = logits.shape == (_TRIED, experts) and chosen.shape == weights.shape
    floats = weights.dtype in (torch.float32, logits.dtype) and logits.is_floating_point()
    return bool(of_tokens and chosen.ndim == 2 and chosen.dtype == torch.int64 and floats)


def _agrees(
    found: tuple[Tensor, Tensor, Tensor], expected: tuple[Tensor, Tensor, Tensor], limit: float
) -> bool:
    logits, weights, experts = found
    size = float(expected[0].float().abs().max())
    if not float((logits.float() - expected[0].float()).abs().max()) <= limit * size:
        return False
    one, other = (logits.float().gather(1, chosen) for chosen in (experts, expected[2]))
    if not float((one - other).abs().max()) <= limit * size:
        return False
    same = (experts == expected[2]).all(dim=1)
    if float(same.float().mean()) < _SAME:
        return False
    difference = (weights.float() - expected[1].float())[same].abs().max()
    return bool(difference <= limit * float(expected[1].float().abs().max()))


__all__ = ["FastRouter", "RouterFormula", "recognise_router", "with_fast_router"]
