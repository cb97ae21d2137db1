"""Rows of a weight of a checkpoint, some at a time: a large one is never whole in memory.

Where its format says which rows the elements of its tensors stand for, they are read and decoded by
themselves; a matrix in full precision is read where it lies. Anything else (act-order that mixes
rows, pickled files, experts in one tensor that are quantized) is decoded whole when it is asked
for.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quantload.errors import QuantloadError
from quantload.loader.code_rows import row_step
from quantload.loader.reading_codes import CodeReadings
from quantload.loader.row_reader import RowReader, region_of
from quantload.loader.source import Source
from quantload.quant.qtensor import QuantTensor

Value = QuantTensor | Tensor
_CPU = torch.device("cpu")
_DECODED_WHOLE = 1 << 21  # elements below which rows are not worth being decoded by themselves


class StoredRows:
    """Rows of one weight on the CPU; used by one thread.

    Args:
        source: An open checkpoint.
        module: Whose weight.
        reader: Reads its tensors; rows of a weight in full precision are valid until the next are
            asked for.

    Attributes:
        weight: What the headers say of it.
        step: Rows at whose multiples it should be cut: blocks stay whole.
    """

    def __init__(self, source: Source, module: str, reader: RowReader) -> None:
        self._source, self._reader = source, reader
        self.weight = source.weights[module]
        self._region = region_of(self.weight, source)
        self._whole: Value | None = None
        self.step = 1
        if self._region is None:
            is_small = math.prod(self.weight.parameter_shape) <= _DECODED_WHOLE
            step = None if is_small else row_step(source, module)
            if step is None:
                self._whole = source.read_weight(module)
                step = self._whole.block[0] if isinstance(self._whole, QuantTensor) else 1
            self.step = step
            self._readings = CodeReadings(source, _CPU)

    @property
    def num_rows(self) -> int:
        """N; with experts those of all."""
        return self.weight.shape[0] * max(1, self.weight.experts)

    def rows(self, start: int, stop: int) -> Value:
        """Return rows start..stop: [stop - start, K]."""
        if self._region is not None:
            entry = self._source.checkpoint.tensors[self._region.tensor]
            return self._reader.read_rows(entry, self._region, start, stop)
        if self._whole is None:
            try:
                return self._readings.decode_rows(self.weight, (start, stop), self._reader)
            except QuantloadError:  # all scales of some rows may be zero, those of all rows not
                self._whole = self._source.read_weight(self.weight.module)
        return part_of(self._whole, start, stop)


class HeldRows:
    """The same of a weight that is in memory.

    Args:
        value: [N, K].
    """

    def __init__(self, value: Value) -> None:
        self._value = value
        self.step = value.block[0] if isinstance(value, QuantTensor) else 1
        self.num_rows = value.shape[0]

    def rows(self, start: int, stop: int) -> Value:
        """Return rows start..stop: [stop - start, K]."""
        return part_of(self._value, start, stop)


def part_of(value: Value, start: int, stop: int) -> Value:
    """Return rows of a weight that is in memory."""
    if (start, stop) == (0, value.shape[0]):
        return value
    return value.rows(start, stop) if isinstance(value, QuantTensor) else value[start:stop]


def dense(value: Value) -> Tensor:
    """Return what a weight decodes to."""
    return value if isinstance(value, Tensor) else value.dequantize()


__all__ = ["HeldRows", "StoredRows", "Value", "dense", "part_of"]
