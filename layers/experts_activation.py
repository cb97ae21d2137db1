"""Which activation of experts a kernel can compute itself: recognised by name, proven by values.

Model code computes the inner values of an expert in many ways that are one of a few functions:

    min(act(min(gate, gate_limit)), act_limit) * (clamp(up, -up_limit, up_limit) + shift)

A guess is made from the numbers that the module holds, and tried on a grid of gates and ups that
reaches past all limits. What agrees nowhere stays the module's own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from quantload.layers.experts_layout import ExpertsLayout

if TYPE_CHECKING:
    from quantload.runtime.kernels.grouped_product import GatedActivation

__all__ = ["recognised_activation"]

_CLOSE = 1e-5
_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "relu": nn.functional.relu,
    "relu2": lambda x: nn.functional.relu(x).square(),
}
_LIMITS, _ALPHAS = ("limit", "swiglu_limit"), ("alpha", "swiglu_alpha")


def recognised_activation(
    activation: Callable[[Tensor], Tensor], layout: ExpertsLayout, original: nn.Module | None
) -> GatedActivation | None:
    """Return what the kernel computes for an activation, or None.

    Args:
        activation: Maps the product of `up` [S, 2I or I] to [S, I], rows of gate and up as the
            layout has them.
        layout: Of the experts.
        original: The module whose numbers it may use.
    """
    for guess in _guesses(layout, original):
        if _agrees(guess, activation, layout):
            return guess
    return None


def _numbers(original: nn.Module | None, names: tuple[str, ...]) -> list[float]:
    found = [getattr(original, name, None) for name in names]
    return [float(x) for x in found if isinstance(x, int | float) and not isinstance(x, bool)]


def _guesses(layout: ExpertsLayout, original: nn.Module | None) -> Iterator[GatedActivation]:
    from quantload.runtime.kernels.grouped_product import GatedActivation

    for name in _FUNCTIONS:
        yield GatedActivation(name=name)
    if not layout.is_gated:
        return
    limits, alphas = _numbers(original, _LIMITS), _numbers(original, _ALPHAS)
    for limit, name in itertools.product(limits, _FUNCTIONS):
        yield GatedActivation(name=name, gate_limit=limit, up_limit=limit)
        yield GatedActivation(name=name, act_limit=limit, up_limit=limit)
    for limit, alpha in itertools.product(limits, alphas):
        yield GatedActivation(name="silu", alpha=alpha, gate_limit=limit, up_limit=limit, shift=1.0)


def _agrees(
    guess: GatedActivation, activation: Callable[[Tensor], Tensor], layout: ExpertsLayout
) -> bool:
    reach = max([12.0, *(2 * x for x in (guess.gate_limit, guess.up_limit) if x < 1e4)])
    values = torch.linspace(-reach, reach, 241)
    gate = torch.stack([values.repeat_interleave(241), values.repeat(241)], dim=-1)  # I is 2
    up = gate.flip(-1)
    if not layout.is_gated:
        product = gate
    elif layout.up.parts == 2:
        product = torch.cat([gate, up], dim=-1)
    else:
        product = torch.stack([gate, up], dim=-1).flatten(-2)
    expected = computed(guess, gate, up if layout.is_gated else None)
    try:
        found = activation(product)
    except Exception:  # noqa: BLE001 - model code raises anything
        return False
    if found.shape != gate.shape:
        return False
    error = (found.double() - expected.double()).abs()
    return bool((error <= _CLOSE * (1 + expected.double().abs())).all())


def computed(guess: GatedActivation, gate: Tensor, up: Tensor | None) -> Tensor:
    """Compute an activation as its kernel does; without `up` that of no gate."""
    act = _FUNCTIONS[guess.name]
    gate = gate.clamp(max=guess.gate_limit)
    inner = gate * torch.sigmoid(guess.alpha * gate) if guess.name == "silu" else act(gate)
    inner = inner.clamp(max=guess.act_limit)
    if up is None:
        return inner
    return inner * (up.clamp(-guess.up_limit, guess.up_limit) + guess.shift)
