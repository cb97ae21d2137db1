"""The weight of a vocabulary: rows that are looked up by number, and a product with all of them.

An input embedding and a tied output head share one table. A quantized one stays quantized: a
lookup decodes the rows it is asked for, a product decodes some rows at a time. Where a model is
looked at once and let go, rows need not be in memory before a token asks for them: `ReadTable`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        return self.packed.codes.device

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


class ReadTable(nn.Module):
    """Rows [N, K] that are read when a token first asks for them, and kept from then on.

    Args:
        read: Yields the rows start..stop of the weight of each (start, stop), [stop - start, K] in
            host memory; valid until the next are asked for.
        shape: (N, K).
        device: Where rows are needed.
    """

    def __init__(
        self,
        read: Callable[[Sequence[tuple[int, int]]], Iterator[QuantTensor | Tensor]],
        shape: tuple[int, int],
        device: torch.device,
    ) -> None:
        super().__init__()
        self.read, self.shape, self.device = read, shape, device
        self._rows = torch.empty(0, shape[1])
        self._place = torch.full((shape[0],), -1, dtype=torch.int32)  # of a row among those kept

    @property
    def num_kept(self) -> int:
        """Rows that are in memory."""
        return self._rows.shape[0]

    def rows_at(self, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the rows of some numbers [...]: [..., K], as the whole weight has them."""
        wanted = numbers.detach().cpu().flatten()
        self._fetch(torch.unique(wanted))
        rows = self._rows[self._place[wanted].long()]
        return rows.to(self.device, dtype).reshape(*numbers.shape, self.shape[1])

    def _fetch(self, numbers: Tensor) -> None:
        """Read the rows of some numbers, ascending, that are not kept yet."""
        missing = numbers[self._place[numbers] < 0]
        if not missing.numel():
            return
        ends = torch.nonzero(missing.diff() > 1).flatten() + 1
        runs = [(int(run[0]), int(run[-1]) + 1) for run in torch.tensor_split(missing, ends)]
        kept = [self._rows] if self.num_kept else []
        first = self.num_kept
        self._rows = torch.cat([*kept, *map(_floats, self.read(runs))])
        self._place[missing] = torch.arange(first, self.num_kept, dtype=torch.int32)

    def weight_values(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [N, K]."""
        (rows,) = map(_floats, self.read([(0, self.shape[0])]))
        return rows.to(self.device, dtype)

    def equals(self, other: nn.Module) -> bool:
        """False unless it is this table: nothing is read to compare."""
        return other is self


def _floats(rows: QuantTensor | Tensor) -> Tensor:
    """Return rows of its own memory, as the producer of the weight has them."""
    return rows.dequantize() if isinstance(rows, QuantTensor) else rows.clone()


Table: TypeAlias = DenseTable | PackedTable | ReadTable


def table_of(weight: QuantTensor | Tensor, device: torch.device) -> Table:
    """Return the table of a weight [N, K] on a device."""
    if isinstance(weight, Tensor):
        return DenseTable(weight.to(device))
    return PackedTable(weight.to(device))


__all__ = ["DenseTable", "PackedTable", "ReadTable", "Table", "table_of"]
