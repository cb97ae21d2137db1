"""Experts of a model's own module in `FusedExperts`, proven to compute what the module computes.

The proof is a run: a copy of the module, shrunk to 3 experts of width 8 with random parameters and
the true activation, clamps and factors, and our layer with the same weights must agree on random
tokens to 2e-6 in float32, and in bfloat16 to its rounding and in the dtype of the result. What
cannot be shrunk, run or proven stays the model's own.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quantload.layers.experts import FusedExperts, Key, Mode
from quantload.layers.experts_layout import ExpertsLayout, Projection, layout_of
from quantload.quant.scheme import Scheme
from quantload.runtime.parallel import Parallel

_log = logging.getLogger("quantload")

_EXPERTS, _HIDDEN, _INNER, _TOKENS, _CHOICES = 3, 8, 16, 7, 2  # widths that grouped_mm takes
_LIMITS = {torch.float32: 2e-6, torch.bfloat16: 3e-2}
_SPREAD = 4.0  # of the products of `up`: reaches the clamps of gpt-oss at 7
_DOWN = 0.05  # brings results to the size of the tokens: nothing hides behind large values
_proven: dict[tuple[object, ...], str] = {}


def fused_experts(
    module: nn.Module,
    *,
    schemes: Mapping[Key, Scheme],
    dtype: torch.dtype,
    prefix: str,
    parallel: Parallel | None = None,
    mode: Mode | None = None,
) -> FusedExperts | str:
    """Return a layer that stands for a module that holds experts, or why there is none.

    Args:
        module: A module on the meta device.
        schemes: Scheme of each quantized weight, by leaf and slot.
        dtype: dtype of activations.
        prefix: Dotted path of the module.
        parallel: See `FusedExperts`.
        mode: See `FusedExperts`.
    """
    layout = layout_of(module)
    if isinstance(layout, str):
        return layout
    key = _key(module, layout)
    if key not in _proven:
        _proven[key] = _why_unproven(module)
    if _proven[key]:
        return _proven[key]
    return _stand_in(
        module, layout, schemes=schemes, dtype=dtype, prefix=prefix, parallel=parallel, mode=mode
    )


def _stand_in(module: nn.Module, layout: ExpertsLayout, **options: Any) -> FusedExperts:  # noqa: ANN401
    return FusedExperts(
        layout, activation=OwnActivation(module, layout), original=module, **options
    )


class OwnActivation:
    """The activation of a module of transformers, clamps and all.

    Args:
        module: The module.
        layout: Its layout.
    """

    def __init__(self, module: nn.Module, layout: ExpertsLayout) -> None:
        self._module, self._is_gated = module, layout.is_gated
        self._has_own = layout.is_gated and hasattr(type(module), "_apply_gate")

    def __call__(self, product: Tensor) -> Tensor:
        """Map the product of `up` [S, 2I or I] to [S, I]."""
        module: Any = self._module
        if self._has_own:
            return module._apply_gate(product)  # type: ignore[no-any-return]
        if not self._is_gated:
            return module.act_fn(product)  # type: ignore[no-any-return]
        gate, up = product.chunk(2, dim=-1)
        return module.act_fn(gate) * up  # type: ignore[no-any-return]


def _key(module: nn.Module, layout: ExpertsLayout) -> tuple[object, ...]:
    """What a proof hangs on: all but sizes and weights."""
    values = {n: v for n, v in vars(module).items() if type(v) in (int, float, bool, str)}
    children = tuple((name, repr(child)) for name, child in module.named_children())
    return type(module), layout, tuple(sorted(values.items())), children


# -- proving ---------------------------------------------------------------------------------------


def _why_unproven(module: nn.Module) -> str:
    """Run the module and our layer in small; say how they differ, "" if they do not."""
    try:
        for dtype, limit in _LIMITS.items():
            expected, found = _both(module, dtype)
            if expected.dtype != found.dtype or expected.shape != found.shape:
                return (
                    f"its forward gives `{expected.dtype}` of shape {tuple(expected.shape)}, ours "
                    f"`{found.dtype}` of shape {tuple(found.shape)}"
                )
            error = float((found.float() - expected.float()).norm() / expected.float().norm())
            if not error <= limit:
                return f"its forward differs from ours by {error:.1e} in {dtype}"
    except Exception as error:  # noqa: BLE001 - model code raises anything
        _log.debug("experts of %s", type(module).__name__, exc_info=True)
        return f"a small copy of it cannot be run: {type(error).__name__}: {error}"
    return ""


@torch.no_grad()
def _both(module: nn.Module, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the results of the module's own forward and of our layer."""
    generator = torch.Generator().manual_seed(0)
    small = _small(module, dtype, generator)
    layout = layout_of(small)
    assert isinstance(layout, ExpertsLayout), f"the layout of a copy: {layout}"
    ours = _stand_in(small, layout, schemes={}, dtype=dtype, prefix="")
    for projection in layout.projections:
        _fill(ours, small, projection)
    ours.finish(torch.device("cpu"))
    inputs = _inputs(layout, dtype, generator)
    forward = type(small).forward
    own = getattr(forward, "__wrapped__", forward)  # not what a config may put in its place
    return own(small, *(x.clone() for x in inputs)), ours(*inputs)


def _small(module: nn.Module, dtype: torch.dtype, generator: torch.Generator) -> nn.Module:
    """Copy a module with few experts, narrow, and with random parameters."""
    layout = layout_of(module)
    assert isinstance(layout, ExpertsLayout), f"a module of known layout: {layout}"
    small = copy.deepcopy(module)
    hidden, inner = layout.up.columns, layout.down.columns
    sizes = {2 * inner: 2 * _INNER, inner: _INNER, hidden: _HIDDEN}
    for name, value in vars(small).items():
        new = _small_number(name, value, layout)
        if new is not None:
            setattr(small, name, new)
    for name, parameter in list(module.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        shape = [sizes.get(length, length) for length in parameter.shape]
        if not owner:
            shape = _parameter_shape(layout, leaf)
        random = torch.randn(shape, generator=generator)
        if leaf == layout.down.leaf:
            random *= _DOWN
        random = random.to(dtype)
        small.get_submodule(owner)._parameters[leaf] = nn.Parameter(random, requires_grad=False)
    return small.eval()


def _small_number(name: str, value: object, layout: ExpertsLayout) -> int | None:
    """Return the new value of an attribute that is a size; None if it is none."""
    if type(value) is not int:
        return None
    if value == layout.experts and "expert" in name and "dim" not in name:
        return _EXPERTS
    if value == layout.down.columns and ("intermediate" in name or "expert_dim" in name):
        return _INNER
    return _HIDDEN if value == layout.up.columns and "hidden" in name else None


def _parameter_shape(layout: ExpertsLayout, leaf: str) -> list[int]:
    projection = layout.projection(leaf)
    is_up = projection is layout.up
    rows = (2 if layout.is_gated else 1) * _INNER if is_up else _HIDDEN
    columns = _HIDDEN if is_up else _INNER
    if layout.is_bias(leaf):
        return [_EXPERTS, rows]
    return [_EXPERTS, columns, rows] if projection.has_input_first else [_EXPERTS, rows, columns]


def _fill(ours: FusedExperts, small: nn.Module, projection: Projection) -> None:
    weight = small.get_parameter(projection.leaf).detach()
    if projection.has_input_first:
        weight = weight.transpose(1, 2)
    for slot, part in enumerate(weight.reshape(-1, projection.rows, projection.columns)):
        ours.receive(projection.leaf, slot, part.contiguous())
    if projection.has_bias:
        biases = small.get_parameter(projection.bias_leaf).detach()
        for slot, bias in enumerate(biases.reshape(-1, projection.rows)):
            ours.receive(projection.bias_leaf, slot, bias)


def _inputs(
    layout: ExpertsLayout, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Tensor, ...]:
    """Random tokens, and where routed their experts in any order and weights in float32."""
    spread = _SPREAD / _HIDDEN**0.5
    tokens = _TOKENS if layout.is_routed else _EXPERTS * _TOKENS
    x = (spread * torch.randn(tokens, _HIDDEN, generator=generator)).to(dtype)
    if not layout.is_routed:
        return (x,)
    index = torch.stack([torch.randperm(_EXPERTS, generator=generator) for _ in range(tokens)])
    return x, index[:, :_CHOICES], torch.rand(tokens, _CHOICES, generator=generator)


__all__ = ["OwnActivation", "fused_experts"]
