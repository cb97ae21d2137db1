"""Rows of a quantized weight, decoded some at a time, so that a large one is never whole in memory.

Possible where a format says which rows the elements of its tensors stand for (`Reader.blocks_of`).
Anything else is decoded whole when its first rows are asked for, and cut then.
"""

from __future__ import annotations

import math

import torch

from quantload.errors import QuantloadError
from quantload.loader.reading import Value
from quantload.loader.reading_codes import CodeReadings
from quantload.loader.row_reader import CHUNK_BYTES, RowReader, rows_of
from quantload.loader.source import Source
from quantload.quant.qtensor import QuantTensor

_CPU = torch.device("cpu")


class CodeRows:
    """Decodes rows of one weight on the CPU; used by one thread.

    Args:
        source: An open checkpoint.
        module: Whose weight; not one of experts in one tensor.
        reader: Reads its tensors.

    Attributes:
        is_apart: True if rows are decoded by themselves.
        is_quantized: True if they come as codes, False if its format makes floats of them.
        step: Rows at whose multiples it should be cut: blocks stay whole.

    Raises:
        QuantloadError: It cannot be decoded.
    """

    def __init__(self, source: Source, module: str, reader: RowReader) -> None:
        self._source, self._weight, self._reader = source, source.weights[module], reader
        self._readings = CodeReadings(source, _CPU)
        self._whole: Value | None = None
        rows, columns = self._weight.shape
        step = row_step(source, module)
        self.is_apart = step is not None
        first = self.rows(0, min(rows, rows_of(CHUNK_BYTES, columns, step or rows)))
        self.is_quantized = isinstance(first, QuantTensor)
        if step is None and isinstance(first, QuantTensor):
            step = first.block[0]
        self.step = step if step is not None and step < rows else 1

    def rows(self, start: int, stop: int) -> Value:
        """Return rows start..stop of the weight."""
        if self.is_apart and self._whole is None:
            try:
                return self._readings.decode_rows(self._weight, (start, stop), self._reader)
            except QuantloadError:  # all scales of some rows may be zero, those of all rows not
                pass
        if self._whole is None:
            self._whole = self._source.read_weight(self._weight.module)
        if isinstance(self._whole, QuantTensor):
            return self._whole.rows(start, stop)
        return self._whole[start:stop]


def row_step(source: Source, module: str) -> int | None:
    """Return at what multiples of rows a weight can be decoded in parts; None if it cannot."""
    blocks = CodeReadings(source, _CPU).blocks_of(source.weights[module])
    if blocks is None:
        return None
    return math.lcm(*(height for height, *_ in blocks.values() if height))


__all__ = ["CodeRows", "row_step"]
