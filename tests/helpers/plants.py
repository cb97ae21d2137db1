"""Faults of a whole layer: what makes a model visibly worse, as faulty tools have done."""

from __future__ import annotations

import random
from collections.abc import Mapping

import torch
from breaks import (
    Break,
    Tensors,
    double_scale,
    exchange_scales,
    modules,
    shift_zero_point,
)
from torch import Tensor


def codes_of(tensors: Mapping[str, Tensor], module: str) -> Tensor:
    """Return the codes of a module, as they are stored."""
    leaves = (f"{module}.{leaf}" for leaf in ("weight_packed", "weight"))
    return next(tensors[name] for name in leaves if name in tensors)


def halve_scale(tensors: Tensors, rng: random.Random) -> set[str]:
    module = rng.choice(modules(tensors, "weight_scale"))
    scale = tensors[f"{module}.weight_scale"]
    tensors[f"{module}.weight_scale"] = (scale.float() / 2).to(scale.dtype)
    return {module}


def swap_all_nibbles(tensors: Tensors, rng: random.Random) -> set[str]:
    """The two codes of each byte, in the whole matrix: packed in the other order."""
    module = rng.choice(modules(tensors, "weight_packed"))
    raw = tensors[f"{module}.weight_packed"].view(torch.uint8)
    raw.copy_((raw >> 4) | (raw << 4))
    return {module}


def swap_halves(tensors: Tensors, rng: random.Random) -> set[str]:
    """The upper and the lower half of the codes' rows, as a wrong split leaves them."""
    module = rng.choice(modules(tensors, "weight_scale"))
    raw = codes_of(tensors, module).view(torch.uint8)
    middle = raw.shape[0] // 2
    raw.copy_(torch.cat([raw[-middle:], raw[middle : raw.shape[0] - middle], raw[:middle]]))
    return {module}


def scales_of_another_layer(tensors: Tensors, rng: random.Random) -> set[str]:
    """Scales of the same projection one block on, as a miscounted shard leaves them."""
    module = rng.choice(modules(tensors, "weight_scale"))
    start, number, rest = module.partition(".layers.")[0], *_numbered(module)
    other = f"{start}.layers.{number + 1}.{rest}.weight_scale"
    if other not in tensors:
        other = f"{start}.layers.0.{rest}.weight_scale"
    tensors[f"{module}.weight_scale"] = tensors[other].clone()
    return {module}


def _numbered(module: str) -> tuple[int, str]:
    number, _, rest = module.partition(".layers.")[2].partition(".")
    return int(number), rest


def zero_codes(tensors: Tensors, rng: random.Random) -> set[str]:
    """A layer that was lost: all of its codes are 0 (of 4 bits, that is the lowest one)."""
    module = rng.choice(modules(tensors, "weight_scale"))
    codes_of(tensors, module).view(torch.uint8).zero_()
    return {module}


def plants_of(tensors: Mapping[str, Tensor]) -> dict[str, Break]:
    """The faults that a checkpoint can suffer."""
    found: dict[str, Break] = {
        "scale doubled": double_scale,
        "scale halved": halve_scale,
        "halves of the rows swapped": swap_halves,
        "q and k scales exchanged": exchange_scales,
        "scales of the next block": scales_of_another_layer,
        "codes zeroed": zero_codes,
    }
    if modules(tensors, "weight_zero_point"):
        found["zero points off by one"] = shift_zero_point
    if modules(tensors, "weight_packed"):
        found["nibbles swapped"] = swap_all_nibbles
    return found
