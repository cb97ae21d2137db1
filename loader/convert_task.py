"""Carry out one task of a conversion: read, decode, quantize, encode, write.

A plain weight is read, quantized and written in chunks of rows that stay in the cache: what is
never held as a whole costs no memory, and no time to fill it. The bytes are those of the weight
quantized at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantload.loader.casting import cast, refuse_rounding
from quantload.loader.checkpoint import TensorEntry
from quantload.loader.checksum import WORD
from quantload.loader.encoded_rows import encoded_rows
from quantload.loader.output_files import OutputTensor
from quantload.loader.plan import Plan, PlanRow
from quantload.loader.portion import Span
from quantload.loader.row_reader import CHUNK_BYTES
from quantload.loader.tasks import Task, is_copied
from quantload.loader.weight_rows import WeightRows
from quantload.loader.writer import OutputFiles


@dataclass
class TaskRunner:
    """Does tasks in one thread; its buffer and open files go from one task to the next.

    Args:
        weights: Weights of the plan that is carried out.
        files: Where the output goes.
    """

    weights: WeightRows
    files: OutputFiles
    _checksum: int = 0
    _num_bytes: int = 0

    @property
    def plan(self) -> Plan:
        """What is carried out."""
        return self.weights.plan

    @torch.no_grad()
    def run(self, task: Task) -> int:
        """Do a task.

        Returns:
            The checksum of all bytes that it wrote.

        Raises:
            NonFiniteWeight: A weight to be quantized is not finite.
            NotLossless: The plan is lossless, and a value would change.
            OutputError, CheckpointError: A file cannot be written or read.
        """
        self._checksum = self._num_bytes = 0
        if task.copied is not None:
            self._copy(task.copied, task.span)
        shared = self.weights.shared_range(task.rows) if task.rows else None
        for row in task.rows:
            self._convert(row, shared, task.span)
        self.weights.shrink()
        planned = sum(stop - start for _, start, stop in task.written)
        assert self._num_bytes == planned, (
            f"{self._num_bytes} bytes of `{task.outputs[0].name}` and what belongs to it were "
            f"written, planned were {planned}"
        )
        return self._checksum & WORD

    # -- tensors that stay in full precision ---------------------------------------------------

    def _copy(self, output: OutputTensor, span: Span | None) -> None:
        entry = self.plan.source.checkpoint.tensors[output.source]
        if entry.is_contiguous and entry.dtype == output.dtype:
            self._copy_bytes(entry, output, span, first=0)
            return
        tensor = self.plan.source.read_plain(output.source)
        narrowed = cast(tensor, output.dtype, output.name)
        if self.plan.lossless:
            refuse_rounding(tensor, narrowed, output.name)
        self._write(output.name, narrowed)

    def _copy_bytes(
        self, entry: TensorEntry, output: OutputTensor, span: Span | None, *, first: int
    ) -> None:
        """Copy a span of an output, or all, which is what lies from a byte of a tensor on."""
        done, stop = span or (0, output.num_bytes)
        reader = self.weights.reader
        most = CHUNK_BYTES if reader.device.type == "cpu" else reader.bounce.piece_bytes
        while done < stop:
            many = min(most, stop - done)
            piece = reader.read(entry, first + done, many)
            self._checksum += self.files.write_bytes(output.name, piece.numpy().data, start=done)
            self._num_bytes += many
            done += many

    def _keep(self, row: PlanRow, span: Span | None) -> None:
        (output,) = row.outputs
        if row.region is None:
            self._write(output.name, self.weights.read_whole(row))
            return
        entry = self.plan.source.checkpoint.tensors[row.region.tensor]
        if is_copied(self.plan, row):
            self._copy_bytes(entry, output, span, first=row.region.first * entry.dtype.itemsize)
            return
        for start, rows in self.weights.rows(row, step=1):
            self._write(output.name, rows, first_row=start)

    def _write(self, name: str, tensor: Tensor, *, first_row: int = 0) -> None:
        self._checksum += self.files.write(
            name, tensor, first_row=first_row, bounce=self.weights.reader.bounce
        )
        self._num_bytes += tensor.nbytes

    # -- weights that are quantized ------------------------------------------------------------

    def _convert(self, row: PlanRow, shared: Tensor | None, span: Span | None) -> None:
        if row.scheme is None:
            self._keep(row, span)
            return
        for leaf, part, first_row in encoded_rows(self.weights, row, shared):
            self._write(f"{row.module}.{leaf}", part, first_row=first_row)
