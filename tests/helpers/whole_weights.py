"""Whole weights in many schemes, and layers that take what each rank holds of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from quantload.quant.qtensor import QuantTensor
from quantload.quant.rtn import quantize_rtn
from quantload.quant.scheme import parse_scheme

CPU = torch.device("cpu")
# act-order is no preset: groups of 32 whose columns lie all over the weight
SCHEMES = ("dense", "W4A16:g32", "W4A16:g128", "act-order", "W4A16_ASYM:g32", "FP8_BLOCK", "NVFP4")


def scheme_named(name: str):
    return parse_scheme("W4A16:g32" if name == "act-order" else name)


def whole_weight(
    rows: int, columns: int, name: str, *, seed: int = 0, order: int = 0
) -> QuantTensor | Tensor:
    """A random weight [rows, columns] in a scheme; with act-order of the seed `order`."""
    generator = torch.Generator().manual_seed(seed)
    floats = torch.randn(rows, columns, generator=generator) * 0.05 * (1 + seed)
    scheme = scheme_named(name).weight
    if scheme is None:
        return floats
    if scheme.granularity != "block" and columns % (scheme.group_size or 1):
        wider = torch.nn.functional.pad(floats, (0, -columns % scheme.group_size))
        return quantize_rtn(wider, scheme).columns(0, columns)  # a partial last group
    quantized = quantize_rtn(floats, scheme)
    if name != "act-order":
        return quantized
    places = torch.randperm(columns, generator=torch.Generator().manual_seed(order))
    groups = torch.arange(columns) // quantized.block[1]
    return replace(quantized, group_of=groups[places].to(torch.int32))


def values(weight: QuantTensor | Tensor) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.dequantize(torch.float32)


def fill(layer, tensors: Mapping[tuple[str, int], QuantTensor | Tensor]):
    """Give a layer its region of each whole tensor, as a loader does; returns the layer."""
    assert {key: tuple(value.shape) for key, value in tensors.items()} == layer.awaits()
    for (leaf, slot), value in tensors.items():
        region = layer.region(leaf, slot)
        if region is not None:
            layer.receive(leaf, slot, region.of(value))
    layer.finish(CPU)
    return layer


def assert_close(found: Tensor, expected: Tensor, *, limit: float = 1e-5) -> None:
    """Relative error of the norm, in float32."""
    assert found.shape == expected.shape
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error < limit, f"relative error {error:.2e}"
