"""Digests of values: equal for equal numbers, however a checkpoint packs them."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from quantload.quant.qtensor import QuantTensor

_DIGITS = 16
_CHUNK = 1 << 22  # elements that are cast at a time
_NARROW = (torch.bfloat16, torch.float16)


def value_digest(value: QuantTensor | Tensor) -> str:
    """Return 16 hexadecimal digits of the sha256 of a weight's shapes and numbers.

    Float tensors of equal numbers have one digest in whatever dtype: that of the narrowest dtype
    that holds them all. Of a quantized weight its codes, scales, their dtypes and how they are
    evaluated count: two that decode to the same numbers from other scales differ.
    """
    found = hashlib.sha256()
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        dtype = _narrowest(flat)
        found.update(f"tensor {dtype} {tuple(value.shape)}\n".encode())
        for part in torch.split(flat, _CHUNK):
            _add_raw(found, part.to(dtype))
        return found.hexdigest()[:_DIGITS]
    found.update(f"{value.grid.name} {value.block} {value.evaluation}\n".encode())
    for name, part in sorted(value.tensors().items()):
        found.update(f"{name} {part.dtype} {tuple(part.shape)}\n".encode())
        _add_raw(found, part.detach().cpu().contiguous().reshape(-1))
    return found.hexdigest()[:_DIGITS]


def _narrowest(flat: Tensor) -> torch.dtype:
    """Return the first dtype that holds every number, signs of zeros too; NaN is in none."""
    own: torch.dtype = flat.dtype
    if own not in (torch.float16, torch.float32, torch.float64):
        return own
    wider = (torch.float32,) if own == torch.float64 else ()
    narrower: tuple[torch.dtype, ...] = (*_NARROW, *wider)
    for dtype in narrower:
        if dtype != own and all(
            torch.equal(part.to(dtype).to(part.dtype), part) for part in torch.split(flat, _CHUNK)
        ):
            return dtype
    return own


def _add_raw(found: hashlib._Hash, flat: Tensor) -> None:
    found.update(flat.view(torch.uint8).numpy().data)


__all__ = ["value_digest"]
