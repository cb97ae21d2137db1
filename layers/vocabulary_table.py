"""The weight of a vocabulary: rows that are looked up by number, and a product with all of them.

An input embedding and a tied output head share one table. A quantized one stays quantized: a
lookup decodes the rows it is asked for, a product decodes some rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from quantload.layers.linear import DenseLinear, keeping_dtypes
from quantload.quant.packing import unpack_dense
from quantload.quant.qtensor import QuantTensor
from quantload.runtime.gemm import PackedRows

_CHUNK_ELEMENTS = 1 << 23  # decoded at a time in a product: 32 MiB in float32


class DenseTable(DenseLinear):
    """Rows [N, K] in full precision.

    Args:
        weight: [N, K].
    """

    def rows_at(self, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the rows of some numbers [...]: [..., K]."""
        return nn.functional.embedding(numbers, self.weight).to(dtype)

    def equals(self, other: nn.Module) -> bool:
        """True if another table holds the same values."""
        return isinstance(other, DenseTable) and torch.equal(self.weight, other.weight)


class PackedTable(nn.Module):
    """Rows [N, K] of a quantized weight, with their scales.

    Args:
        weight: [N, K].
    """

    differentiable = True

    def __init__(self, weight: QuantTensor) -> None:
        super().__init__()
        self.shape = weight.shape
        self.packed = PackedRows(weight)

    def rows_at(self, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the rows of some numbers [...]: [..., K], as the whole weight has them."""
        rows, packed = numbers.flatten(), self.packed
        codes = packed.codes[rows]
        if packed.field_bits < 8:
            codes = unpack_dense(codes, packed.field_bits, packed.columns)
            codes = codes.to(packed.grid.storage) + packed.low
        parts: dict[str, Any] = {name: getattr(packed, name) for name in packed.part_names}
        for name in ("scale", "zero", "offset"):
            if name in parts:
                parts[name] = parts[name][rows // packed.block[0]]
        if "outer" in parts and parts["outer"].shape[0] != 1:
            parts["outer"] = parts["outer"][rows]
        weight = QuantTensor(
            grid=packed.grid,
            codes=codes,
            block=(1, packed.block[1]),
            evaluation=packed.evaluation,
            **parts,
        )
        return weight.dequantize(dtype).reshape(*numbers.shape, packed.columns)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Map x [..., K] to [..., N]."""
        step = max(1, _CHUNK_ELEMENTS // self.shape[1])
        numbers = torch.arange(self.shape[0], device=x.device)
        parts = [
            nn.functional.linear(x, self.rows_at(some, x.dtype))
            for some in torch.split(numbers, step)
        ]
        y = torch.cat(parts, dim=-1)
        return y if bias is None else y + bias

    def weight_values(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [N, K]."""
        return self.packed(dtype)  # type: ignore[no-any-return]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedTable:
        """Move codes and scales, but keep the dtype of each."""
        super()._apply(keeping_dtypes(fn), recurse)  # type: ignore[no-untyped-call]
        return self

    def equals(self, other: nn.Module) -> bool:
        """True if another table holds the same codes and scales."""
        if not isinstance(other, PackedTable):
            return False
        one, two = self.packed.unpacked(), other.packed.unpacked()
        parts = one.tensors(), two.tensors()
        return (
            (one.grid, one.block, one.evaluation) == (two.grid, two.block, two.evaluation)
            and parts[0].keys() == parts[1].keys()
            and all(torch.equal(part, parts[1][name]) for name, part in parts[0].items())
        )


Table: TypeAlias = DenseTable | PackedTable


def table_of(weight: QuantTensor | Tensor, device: torch.device) -> Table:
    """Return the table of a weight [N, K] on a device."""
    if isinstance(weight, Tensor):
        return DenseTable(weight.to(device))
    return PackedTable(weight.to(device))


__all__ = ["DenseTable", "PackedTable", "Table", "table_of"]
