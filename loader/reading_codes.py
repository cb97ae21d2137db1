"""How quantized weights are read: those blocks of their tensors that this rank needs.

A format says which rows and columns the elements of its tensors stand for (`Reader.blocks_of`).
The blocks that rows and columns of a rank lie in are read and decoded as if they were a weight;
then the decoded weight is cut, exactly. Without such a statement a weight is read whole.

Letters: E experts, N output features, K input features.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantload.errors import QuantloadError
from quantload.loader.checkpoint import Checkpoint, TensorEntry
from quantload.loader.places import Job
from quantload.loader.portion import Span, portion_of
from quantload.loader.reading import Reading, Value, lies_in_file, owned
from quantload.loader.receivers import is_receiver
from quantload.loader.row_reader import RowReader
from quantload.loader.runs import Fetch
from quantload.loader.source import Block, Source, SourceWeight
from quantload.loader.source_view import slice_of
from quantload.quant.qtensor import QuantTensor
from quantload.quant.region import WHOLE, Region
from quantload.quant.stacking import stack


@dataclass(frozen=True)
class _Arrived(Checkpoint):
    """Tensors of one weight that are in memory."""

    values: Mapping[str, Tensor] = field(default_factory=dict, repr=False)

    def read(self, tensor_name: str) -> Tensor:
        """Return a tensor that has arrived."""
        return self.values[tensor_name]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows and columns of a quantized weight that are decoded at once.

    Args:
        weight: Describes the blocks that they lie in, as if they were a weight.
        fetches: Parts of its tensors by name, and the columns of each that are needed.
        rows: Rows of these blocks that are wanted; None is all.
        columns: The same for columns.
        flat: Names of tensors that lack their axis of experts.
    """

    weight: SourceWeight
    fetches: Mapping[str, tuple[Fetch, Span | None]]
    rows: Span | None
    columns: Span | None
    flat: frozenset[str] = frozenset()


class CodeReadings:
    """Plans what is read of quantized weights.

    Args:
        source: An open checkpoint.
        device: Where values are needed.
    """

    def __init__(self, source: Source, device: torch.device) -> None:
        self.source, self.device = source, device
        self._is_plain = type(source.checkpoint).read is Checkpoint.read

    def _can_stream(self, weight: SourceWeight) -> bool:
        tensors = self.source.checkpoint.tensors
        return (
            self._is_plain
            and getattr(self.source.reader, "decodes_leaves", False)
            and all(lies_in_file(tensors[name]) for name in weight.leaves.values())
        )

    def blocks_of(self, weight: SourceWeight) -> Mapping[str, Block] | None:
        """Return `Reader.blocks_of` of a matrix whose rows can be read; None if they cannot."""
        if not weight.is_quantized or not weight.is_matrix or not self._can_stream(weight):
            return None
        blocks = self.source.reader.blocks_of(weight)
        if blocks is None or any(b.has_inputs_first and b.rows for b in blocks.values()):
            return None  # rows of the weight are no rows of its tensors
        return blocks

    def decode_rows(self, weight: SourceWeight, rows: Span, reader: RowReader) -> Value:
        """Read and decode rows of a weight [N, K] at once.

        Args:
            weight: One that has `blocks_of`.
            rows: (start, stop).
            reader: Reads its tensors, into host memory.

        Raises:
            QuantloadError: They cannot be read, or, by themselves, not be decoded.
        """
        piece = self._piece(weight, self.source.reader.blocks_of(weight), rows, None)
        for fetch, _ in piece.fetches.values():
            memory, at = fetch.allocated().numpy().data, 0
            for part in fetch.portion.segments():  # whole rows lie in one piece
                entry = fetch.portion.entry
                reader.fill(entry, part.start - entry.start, memory[at : at + part.num_bytes])
                at += part.num_bytes
        return self._decoded_piece(piece)

    def of_weight(self, job: Job, module: nn.Module, region: Region) -> list[Reading] | None:
        """Return what is read of a weight [N, K]; None if its format has to read it by itself."""
        weight = job.weight
        assert weight is not None, "codes are those of a weight"
        if not self._can_stream(weight) or not (weight.is_matrix or is_receiver(module)):
            return None
        is_whole = job.target.cut is not None or job.target.join is not None
        is_whole |= not is_receiver(module) or not weight.is_matrix
        is_whole |= region.is_whole
        blocks = None if is_whole else self.source.reader.blocks_of(weight)
        if blocks is None:
            pieces = [self._piece(weight, None, None, None)]
            return [self._reading(pieces, partial(self._decoded, pieces))]
        pieces = self._pieces(weight, blocks, region)
        value = partial(self._decoded_or_cut, pieces, job, region)
        return [replace(self._reading(pieces, value), is_cut=True)]

    def _pieces(
        self,
        weight: SourceWeight,
        blocks: Mapping[str, Block],
        region: Region,
        expert: int | None = None,
    ) -> list[_Piece]:
        runs: Sequence[Span | None] = region.rows or (None,)
        return [self._piece(weight, blocks, rows, region.columns, expert) for rows in runs]

    def _reading(self, pieces: Sequence[_Piece], value: Callable[[], Value]) -> Reading:
        fetches = tuple(fetch for piece in pieces for fetch, _ in piece.fetches.values())
        return Reading(value, fetches, sum(fetch.portion.num_bytes for fetch in fetches))

    def _piece(
        self,
        weight: SourceWeight,
        blocks: Mapping[str, Block] | None,
        rows: Span | None,
        columns: Span | None,
        expert: int | None = None,
    ) -> _Piece:
        count, width = weight.shape
        sizes = blocks or dict.fromkeys(weight.leaves, Block(0, 0))
        down = _aligned(rows, [size.rows for size in sizes.values()], count)
        across = _aligned(columns, [size.columns for size in sizes.values()], width)
        fetches, flat = {}, set()
        for leaf, name in weight.leaves.items():
            size = sizes[leaf]
            entry = self.source.checkpoint.tensors[name]
            if expert is not None and size != Block(0, 0):
                entry = _flat_expert(entry, expert)
                flat.add(name)
            elif expert is not None and entry.shape and entry.shape[0] == weight.experts:
                entry = slice_of(entry, expert)
            first = None if down is None or not size.rows else _scaled(down, size.rows)
            second = None if across is None or not size.columns else _scaled(across, size.columns)
            if size.has_inputs_first:
                first, second = second, first
            portion, left = portion_of(entry, None if first is None else (first,), second)
            fetches[name] = Fetch(portion, self.device, is_kept=False), left
        top, bottom = down or (0, count)
        left_of, right_of = across or (0, width)
        return _Piece(
            replace(
                weight,
                shape=(bottom - top, right_of - left_of),
                experts=weight.experts if expert is None else 1,
            ),
            fetches,
            _within(rows, down),
            _within(columns, across),
            frozenset(flat),
        )

    def _decoded(self, pieces: Sequence[_Piece]) -> Value:
        values = [self._decoded_piece(piece) for piece in pieces]
        if len(values) == 1:
            return values[0]
        quantized = [value for value in values if isinstance(value, QuantTensor)]
        floats = [value for value in values if isinstance(value, Tensor)]
        return torch.cat(floats) if floats else stack(quantized)

    def _decoded_piece(self, piece: _Piece) -> Value:
        values, tensors = {}, {}
        for name, (fetch, columns) in piece.fetches.items():
            entry, stored = fetch.portion.as_entry(), fetch.take()
            stored = stored if columns is None else stored[:, slice(*columns)].contiguous()
            if name in piece.flat:  # the axis of experts again
                stored = stored[None]
                entry = replace(entry, shape=tuple(stored.shape))
            tensors[name], values[name] = entry, stored
        value = self._decode(piece.weight, tensors, values)
        if isinstance(value, QuantTensor):
            value = value if piece.columns is None else value.columns(*piece.columns)
            value = value if piece.rows is None else value.rows(*piece.rows)
            return value if value.shape == piece.weight.shape else owned(value)
        return Region(None if piece.rows is None else (piece.rows,), piece.columns).of(value)

    def _decode(
        self,
        weight: SourceWeight,
        tensors: Mapping[str, TensorEntry],
        values: Mapping[str, Tensor],
    ) -> Value:
        stored = self.source.checkpoint
        kept: dict[str, Any] = {f.name: getattr(stored, f.name) for f in fields(Checkpoint)}
        arrived = _Arrived(**(kept | {"tensors": tensors}), values=values)
        reader = copy.copy(self.source.reader)
        reader.checkpoint = arrived
        part = replace(
            self.source, checkpoint=arrived, reader=reader, weights={weight.module: weight}
        )
        return part.read_weight(weight.module)

    def _decoded_or_cut(self, pieces: Sequence[_Piece], job: Job, region: Region) -> Value:
        """Decode a part; if that alone looks broken, ask the whole weight."""
        try:
            return self._decoded(pieces)
        except QuantloadError:  # all scales of some rows may be zero, those of all rows not
            return owned(region.of(self.source.read_weight(job.name)).to(self.device))

    def of_experts(self, job: Job, regions: Sequence[Region | None]) -> list[Reading] | None:
        """Return what is read of a weight of E experts that can be decoded one by one."""
        weight, reader = job.weight, self.source.reader
        assert weight is not None, "codes are those of a weight"
        if not weight.experts or job.target.cut is not None or not self._can_stream(weight):
            return None
        if not reader.has_experts_apart:
            return None
        blocks = reader.blocks_of(weight)
        parts = len(regions) // weight.experts
        filled = [target.slot for target in job.targets()]
        found: list[Reading] = []
        for expert in range(weight.experts):
            slots = range(expert * parts, (expert + 1) * parts)
            held = [slot for slot in slots if regions[slot] is not None]
            if not held:
                continue
            if blocks is not None and any(regions[slot] != WHOLE for slot in slots):
                found += self._parts_of_expert(job, blocks, expert, {s: regions[s] for s in held})
                continue
            piece = self._piece(weight, None, None, None, expert)
            reading = self._reading([piece], partial(self._decoded, [piece]))
            whole = _Once(reading.value, len(held))
            for number, slot in enumerate(held):
                region = regions[slot]
                assert region is not None, "held"
                first = (slot - slots.start) * job.shape[0]
                span = (first, first + job.shape[0]) if parts > 1 else None
                found.append(
                    Reading(
                        partial(_slot_of, whole, span, region),
                        () if number else reading.fetches,
                        0 if number else reading.num_bytes,
                        slot=filled[slot],
                        is_cut=True,
                    )
                )
        return found

    def _parts_of_expert(
        self,
        job: Job,
        blocks: Mapping[str, Block],
        expert: int,
        regions: Mapping[int, Region | None],
    ) -> Iterator[Reading]:
        """Yield what is read of an expert for each slot of which a rank holds a region."""
        weight, height = job.weight, job.shape[0]
        assert weight is not None, "codes are those of a weight"
        rows, filled = weight.shape[0], [target.slot for target in job.targets()]
        for slot, region in regions.items():
            assert region is not None, "held"
            first = slot * height - expert * rows
            runs = [(first + a, first + b) for a, b in region.rows or ((0, height),)]
            pieces = self._pieces(weight, blocks, Region(tuple(runs), region.columns), expert)
            runs = [(expert * rows + a, expert * rows + b) for a, b in runs]
            value = partial(self._decoded_or_cut, pieces, job, Region(tuple(runs), region.columns))
            yield replace(self._reading(pieces, value), slot=filled[slot], is_cut=True)


def _flat_expert(entry: TensorEntry, expert: int) -> TensorEntry:
    """Return where the part of one expert lies: without its axis, those behind the next as one."""
    part = slice_of(entry, expert)
    _, count, *rest = part.shape
    return replace(part, shape=(count, math.prod(rest)) if rest else (count,))


class _Once:
    """A value that several slots take a part of; made by the first, let go of by the last."""

    def __init__(self, make: Callable[[], Value], times: int) -> None:
        self._make, self._left = make, times
        self._value: Value | None = None

    def get(self) -> Value:
        """Return it."""
        value = self._make() if self._value is None else self._value
        self._left -= 1
        self._value = value if self._left else None
        return value


def _slot_of(whole: _Once, span: Span | None, region: Region) -> Value:
    value = whole.get()
    if span is not None:
        value = value.rows(*span) if isinstance(value, QuantTensor) else value[slice(*span)]
    return value if span is None and region.is_whole else owned(region.of(value))


def _aligned(span: Span | None, sizes: Sequence[int], length: int) -> Span | None:
    """Return the blocks of all sizes that a span lies in; None if that is all."""
    steps = [size for size in sizes if size]
    if span is None or not steps:
        return None
    step = math.lcm(*steps)
    start, stop = span[0] // step * step, min(length, -(-span[1] // step) * step)
    return None if (start, stop) == (0, length) else (start, stop)


def _scaled(span: Span, size: int) -> Span:
    return span[0] // size, -(-span[1] // size)


def _within(wanted: Span | None, found: Span | None) -> Span | None:
    """Return where a span lies in what was read; None if it is all of the weight."""
    if wanted is None:
        return None
    start, _ = found or (0, 0)
    return wanted[0] - start, wanted[1] - start  # also if it is all: blocks end where it ends


__all__ = ["CodeReadings"]
