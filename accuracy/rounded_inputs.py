"""What a layer makes of its input before its weight meets it: the input as its scheme rounds it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quantload.accuracy.experts_in_file import ExpertsInFile
from quantload.accuracy.vocabulary_in_file import HeadInFile
from quantload.layers.experts_grouped import Groups
from quantload.layers.inputs import RoundedInput, ScaledInput, StaticCodes, StaticInput
from quantload.layers.linear import QuantLinear
from quantload.quant.activation import fake_quantize, fake_quantize_static
from quantload.quant.scheme import InputScheme


def rounded_input(layer: nn.Module, x: Tensor) -> Tensor | None:
    """Return x [..., K] as a layer rounds it, in its own dtype; None if it does not.

    Factors of columns that a layer applies before it rounds are taken out again, so that the
    result can meet a weight without them.
    """
    if isinstance(layer, HeadInFile):  # packs some rows at a time
        return _dynamic(x, layer.scheme.input)
    return _through(layer.gemm, x) if isinstance(layer, QuantLinear) else None


def _through(gemm: nn.Module, x: Tensor) -> Tensor | None:
    if isinstance(gemm, ScaledInput):
        factor = gemm.factor.to(x.dtype)
        scaled = x * factor if gemm.use == "*" else x / factor
        found = _through(gemm.gemm, scaled)
        if found is None:
            return None
        back = found / factor if gemm.use == "*" else found * factor
        return torch.where(factor == 0, x, back)
    if isinstance(gemm, StaticInput):
        return fake_quantize_static(x, gemm.grid, gemm.scale, gemm.zero)
    if isinstance(gemm, StaticCodes):
        return fake_quantize_static(x, gemm.input.grid, gemm.scale, gemm.zero)
    if isinstance(gemm, RoundedInput):
        return gemm.rounding(x)
    scheme = getattr(gemm, "input", None)
    return _dynamic(x, scheme if isinstance(scheme, InputScheme) else None)


def _dynamic(x: Tensor, scheme: InputScheme | None) -> Tensor | None:
    is_known = scheme is not None and scheme.dynamic and not scheme.needs_scale
    if scheme is None or not is_known or scheme.grid.table is not None:
        return None  # rounding to a table is not built: inputs stay as they are
    return fake_quantize(x, scheme)


def rounded_rows(product: nn.Module, rows: Tensor, groups: Groups) -> Tensor | None:
    """Return the rows of experts as the product of all of them rounds them; None if it does not.

    Args:
        product: Multiplies rows with the weights of their experts, one by one.
        rows: [S, K], sorted by expert.
        groups: Which rows are whose.
    """
    counts = groups.counts
    parts = torch.split(rows, [*counts, rows.shape[0] - sum(counts)])
    if isinstance(product, ExpertsInFile):
        own = [_dynamic(part, product.input) for part in parts]
        return torch.cat([x for x in own if x is not None]) if own[0] is not None else None
    experts = getattr(product, "experts", None)
    if not isinstance(experts, nn.ModuleList):
        return None
    rounded: list[Tensor] = []
    for expert, part in zip(experts, parts, strict=False):
        members = list(expert.get_submodule("members").children())
        found = [rounded_input(member, part) if part.shape[0] else part for member in members]
        first = found[0]
        if first is None or any(x is None or not torch.equal(first, x) for x in found[1:]):
            return None
        rounded.append(first)
    return torch.cat([*rounded, parts[-1]])


__all__ = ["rounded_input", "rounded_rows"]
