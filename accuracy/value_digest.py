"""Digests of values: equal for equal numbers, however a checkpoint packs them."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from quantload.quant.qtensor import QuantTensor

_DIGITS = 16


def value_digest(value: QuantTensor | Tensor) -> str:
    """Return 16 hexadecimal digits of the sha256 of a weight's dtypes, shapes and numbers.

    Of a quantized weight its codes, scales and how they are evaluated count: two that decode to
    the same numbers from other scales differ.
    """
    found = hashlib.sha256()
    if isinstance(value, Tensor):
        _add(found, "tensor", value)
        return found.hexdigest()[:_DIGITS]
    found.update(f"{value.grid.name} {value.block} {value.evaluation}\n".encode())
    for name, part in sorted(value.tensors().items()):
        _add(found, name, part)
    return found.hexdigest()[:_DIGITS]


def _add(found: hashlib._Hash, name: str, tensor: Tensor) -> None:
    found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    found.update(raw.numpy().data)


__all__ = ["value_digest"]
