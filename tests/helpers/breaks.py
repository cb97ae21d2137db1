"""Ways to break one layer of a compressed-tensors checkpoint, as faulty tools have done."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
Break = Callable[[Tensors, random.Random], set[str]]  # breaks in place, names what it broke


def modules(tensors: Mapping[str, Tensor], leaf: str) -> list[str]:
    return sorted(name.removesuffix(f".{leaf}") for name in tensors if name.endswith(f".{leaf}"))


def codes_leaf(tensors: Mapping[str, Tensor]) -> str:
    scaled = modules(tensors, "weight_scale")[0]
    return next(leaf for leaf in ("weight_packed", "weight") if f"{scaled}.{leaf}" in tensors)


def double_scale(tensors: Tensors, rng: random.Random) -> set[str]:
    module = rng.choice(modules(tensors, "weight_scale"))
    scale = tensors[f"{module}.weight_scale"]
    tensors[f"{module}.weight_scale"] = (scale.float() * 2).to(scale.dtype)
    return {module}


def shift_zero_point(tensors: Tensors, rng: random.Random) -> set[str]:
    """One more in every field of 4 bits; a field of 15 becomes 0, as it does in faulty packers."""
    module = rng.choice(modules(tensors, "weight_zero_point"))
    packed = tensors[f"{module}.weight_zero_point"]
    fields = (packed.unsqueeze(-1) >> torch.arange(0, 32, 4, dtype=torch.int32)) & 15
    fields = (fields + 1) & 15
    shifted = (fields.to(torch.int64) << torch.arange(0, 32, 4)).sum(-1)
    tensors[f"{module}.weight_zero_point"] = _int32(shifted)
    return {module}


def swap_rows(tensors: Tensors, rng: random.Random) -> set[str]:
    leaf = codes_leaf(tensors)
    module = rng.choice(modules(tensors, "weight_scale"))
    raw = tensors[f"{module}.{leaf}"].view(torch.uint8)
    one, other = rng.sample(range(raw.shape[0]), 2)
    raw[[one, other]] = raw[[other, one]]
    return {module}


def zero_expert(tensors: Tensors, rng: random.Random) -> set[str]:
    """Codes (and zero points) that stand for 0; scales of zero are refused when they are read."""
    module = rng.choice([m for m in modules(tensors, "weight_scale") if ".experts." in m])
    for leaf in (codes_leaf(tensors), "weight_zero_point"):
        if (held := tensors.get(f"{module}.{leaf}")) is not None:
            middle = 0x88 if held.dtype == torch.int32 else 0  # fields of 4 bits are code + 8
            held.view(torch.uint8).fill_(middle)
    return {module}


def exchange_scales(tensors: Tensors, rng: random.Random) -> set[str]:
    """Scales of q and k, of as many rows as both have."""
    query = rng.choice([m for m in modules(tensors, "weight_scale") if m.endswith("q_proj")])
    key = query.replace("q_proj", "k_proj")
    one, other = (tensors[f"{module}.weight_scale"] for module in (query, key))
    rows = min(one.shape[0], other.shape[0])
    kept = one[:rows].clone()
    one[:rows] = other[:rows]
    other[:rows] = kept
    return {query, key}


def swap_nibbles(tensors: Tensors, rng: random.Random) -> set[str]:
    """The two codes of each byte, in one group of one row."""
    module = rng.choice(modules(tensors, "weight_packed"))
    raw = tensors[f"{module}.weight_packed"].view(torch.uint8)
    groups = tensors[f"{module}.weight_scale"].shape[1]
    width = raw.shape[1] // groups
    row, group = rng.randrange(raw.shape[0]), rng.randrange(groups)
    part = raw[row, group * width : (group + 1) * width]
    part.copy_((part >> 4) | (part << 4))
    return {module}


def breaks_of(tensors: Mapping[str, Tensor]) -> dict[str, Break]:
    """The breaks that a checkpoint can suffer."""
    found: dict[str, Break] = {
        "scale doubled": double_scale,
        "rows swapped": swap_rows,
        "q and k scales exchanged": exchange_scales,
    }
    if modules(tensors, "weight_zero_point"):
        found["zero points off by one"] = shift_zero_point
    if modules(tensors, "weight_packed"):
        found["nibbles of one group swapped"] = swap_nibbles
    if any(".experts." in name for name in tensors):
        found["an expert zeroed"] = zero_expert
    return found


def broken(folder: Path, original: Path, how: Break, rng: random.Random) -> set[str]:
    """Write a broken copy of a checkpoint of one file; returns the modules that are broken."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_bytes((original / "config.json").read_bytes())
    tensors = load_file(original / "model.safetensors")
    named = how(tensors, rng)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return named


def _int32(values: Tensor) -> Tensor:
    return torch.where(values >= 1 << 31, values - (1 << 32), values).to(torch.int32)
