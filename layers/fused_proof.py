"""Proof that a layer taken apart computes what the layer computes.

The layer's own forward runs one token of each row over a cache with random content, at several
positions; then the fused step does. It is taken only if what both add to the residual stream agrees
to rounding (of an input to codes, where it is quantized), and if the fused one has put the same key
and value into its cache. Where the MLP is
any module (experts, whose router may choose another expert after a last bit), its input is
compared, and its own result stands for it on both sides.

The inputs' rows are small, so that what a layer adds is not lost in the sum's rounding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from quantload.layers.fused_cache import new_fused_cache, twice
from quantload.layers.fused_layer import Flow, FusedLayer, OwnMlp
from quantload.layers.fused_recognition import listened_to, parts_of
from quantload.layers.fused_recording import recording
from quantload.layers.linear import QuantLinear

_TOLERANCE = {torch.float32: 2e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
_ROUNDED = 0.12  # where inputs are rounded: a scale off by a last bit moves every code
_ROWS, _SIZE = 2, 0.05
_LENGTH = 80


@dataclass(frozen=True)
class Given:
    """What a layer is called with besides its input.

    Args:
        kwargs: As its model gave them.
        tables: Cosines and sines [L, R] of its rotary embedding, at least `_LENGTH` rows; [L, 0]
            where it has none.
    """

    kwargs: Mapping[str, Any]
    tables: tuple[Tensor, Tensor]


def cache_argument(forward: Callable[..., Any]) -> str:
    """Return the name under which a module of transformers takes its cache."""
    names = inspect.signature(forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def kept_by(cache: DynamicCache, index: int) -> tuple[Tensor, Tensor]:
    """Return the keys and values [B, KV, T, D] that a layer has put into a cache."""
    layer: Any = cache.layers[index]
    return layer.keys, layer.values


def proven(
    layer: nn.Module, fused: FusedLayer, given: Given, index: int, positions: Sequence[int]
) -> tuple[FusedLayer, bool] | str:
    """Return the fused layer, its rotary of the kind that agrees; or how it differs.

    Tables of half as many columns as rotary turns (gpt-oss) are doubled; the second result says so.

    Args:
        layer: The layer.
        fused: What it was taken apart into.
        given: What it is called with.
        index: Its number, under which it keeps keys and values.
        positions: Positions to try, below 80.
    """
    reason = ""
    columns = given.tables[0].shape[1]
    for interleaved, doubled in ((False, False), (False, True), (True, False)):
        if columns * (1 + doubled) > fused.rule.width:
            continue
        candidate = replace(fused, rule=replace(fused.rule, interleaved=interleaved))
        found = ""
        for place in positions:
            found = found or _difference(layer, candidate, given, index, place, doubled=doubled)
        if not found:
            return candidate, doubled
        reason = reason or found
    return reason or f"rotary tables of {columns} columns for heads of {fused.rule.width}"


def _difference(
    layer: nn.Module, fused: FusedLayer, given: Given, index: int, place: int, *, doubled: bool
) -> str:
    """Return how both differ for a token at `place`, "" if they do not."""
    seed = torch.Generator().manual_seed(index * 1000 + place)
    x = _input(layer, given, seed)
    shape = (_ROWS, fused.rule.kv_heads, place, fused.rule.width)
    past = [torch.randn(shape, generator=seed).to(x) for _ in range(2)]
    expected, mlp_input, mlp_output, kept = _own(layer, given, index, x, past)
    step = fused
    if isinstance(fused.mlp, OwnMlp):
        step = replace(fused, mlp=OwnMlp(_Stand(mlp_output)))
    tables = twice(given.tables) if doubled else given.tables
    found, keys, values = _fused(step, tables, x, past, place)
    limit = _ROUNDED if _rounds_inputs(layer) else _TOLERANCE[x.dtype]
    pairs = {"key": (keys, kept[0]), "value": (values, kept[1]), "result": (found, expected)}
    if isinstance(step.mlp, OwnMlp):
        stand = step.mlp.module
        assert isinstance(stand, _Stand), "put there above"
        pairs["MLP's input"] = (stand.given, mlp_input)
    for what, (one, other) in pairs.items():
        error = _relative(one, other)
        if not error <= limit:  # NaN is none
            return f"its {what} at position {place} differs by {error:.1e}, at most {limit:.0e}"
    return ""


def _rounds_inputs(layer: nn.Module) -> bool:
    quantized = (module for module in layer.modules() if isinstance(module, QuantLinear))
    return any(scheme.input is not None for module in quantized for scheme in module.schemes)


def _relative(found: Tensor, expected: Tensor) -> float:
    found, expected = found.float().flatten(), expected.float().flatten()
    if found.shape != expected.shape:
        return float("nan")
    size = float(expected.norm())
    return float((found - expected).norm()) / size if size else float(found.norm())


class _Stand(nn.Module):
    """Stands for an MLP: takes note of its input and returns what the MLP returned."""

    def __init__(self, result: Tensor) -> None:
        super().__init__()
        self.result = result
        self.given = result.new_empty(0)

    def forward(self, x: Tensor) -> Tensor:
        """Return the noted result."""
        self.given = x
        return self.result


def _input(layer: nn.Module, given: Given, seed: torch.Generator) -> Tensor:
    like = next(v for v in given.kwargs["hidden"] if isinstance(v, Tensor))
    x = torch.randn(_ROWS, 1, like.shape[-1], generator=seed) * _SIZE
    return x.to(like.device, like.dtype)


def _own(
    layer: nn.Module, given: Given, index: int, x: Tensor, past: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Run the layer: what it adds, input and output of its MLP, its new key and value."""
    cache, place = DynamicCache(), past[0].shape[2]
    if place:
        cache.update(past[0].clone(), past[1].clone(), index)
    kwargs = {key: value for key, value in given.kwargs.items() if key != "hidden"}
    for name in kwargs:
        if name in ("attention_mask", "cache_position"):
            kwargs[name] = None
        elif name == "position_ids":
            kwargs[name] = torch.full((_ROWS, 1), place, device=x.device)
        elif name == "position_embeddings":
            kwargs[name] = tuple(t[place][None, None].expand(_ROWS, 1, -1) for t in given.tables)
        elif name in ("cache", "past_key_values"):
            kwargs[name] = None
    kwargs |= {cache_argument(layer.forward): cache, "use_cache": True}
    with torch.no_grad(), recording(layer, listened_to(layer)) as record:
        result = layer(x, **kwargs)
    result = result[0] if isinstance(result, tuple) else result
    mlp = parts_of(layer, record).mlp
    assert mlp.x is not None, "an MLP is given rows"
    keys, values = kept_by(cache, index)
    kept = keys[:, :, -1], values[:, :, -1]
    return (result - x)[:, 0], mlp.x[:, 0], mlp.output.reshape(_ROWS, 1, -1), kept


def _fused(
    fused: FusedLayer,
    tables: tuple[Tensor, Tensor],
    x: Tensor,
    past: Sequence[Tensor],
    place: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the fused layer: what it adds, its new key and value."""
    from quantload.runtime.kernels.add_norm import add_norm

    cache = new_fused_cache(
        [fused.rule], [tables], _ROWS, _LENGTH, dtype=x.dtype, scales=[(1.0, 1.0)]
    )
    cache.write_prompts(0, slice(None), *past)
    kept = cache.layers[0]
    places = torch.full((_ROWS,), place, device=x.device)
    with torch.no_grad():
        flow = fused.step(Flow(x[:, 0]), places, kept)
        result = add_norm(flow.hidden, flow.delta, None, post=flow.post)[0]
    return result - x[:, 0], kept.keys[:, :, place], kept.values[:, :, place]


__all__ = ["Given", "cache_argument", "kept_by", "proven"]
