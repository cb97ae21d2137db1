"""A checkpoint under other names, or in other pieces, than its files have.

A conversion may leave layers out and number the others anew, or take apart the experts that lie in
one parameter. What plans, writes and verifies then sees an ordinary `Source`; only the reader here
knows what each of its weights is in the files.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantload.loader.checkpoint import Checkpoint, TensorEntry, read_entry
from quantload.loader.source import Reader, Source, SourceWeight
from quantload.quant.qtensor import QuantTensor
from quantload.quant.stacking import take_rows

_BYTES_TO_DECODE = 8  # of an element, while fields become codes


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The rows of one expert's projection in a weight of E experts.

    Args:
        expert: Which of the experts, from 0.
        start: First of its rows.
        stop: End of its rows.
        step: From one of its rows to the next.
    """

    expert: int
    start: int
    stop: int
    step: int = 1


@dataclass(frozen=True, kw_only=True)
class SeenWeight:
    """A weight of a view.

    Args:
        weight: As the view describes it.
        original: As the reader of the files describes it; None if that takes the tensor for no
            weight.
        entry: Then, the tensor [E, K, N] that it is a part of; None if it lies in the files as a
            tensor of the view.
        piece: The part that it is; None for all of it.
    """

    weight: SourceWeight
    original: SourceWeight | None = None
    entry: TensorEntry | None = None
    piece: Piece | None = None


class ViewReader(Reader):
    """Reads the weights of a view with the reader of the files.

    Args:
        reader: Reader of the files.
        checkpoint: Tensors as the view names them.
        seen: Weights of the view, by module.
    """

    def __init__(
        self, reader: Reader, checkpoint: Checkpoint, seen: Mapping[str, SeenWeight]
    ) -> None:
        super().__init__(checkpoint)
        self.widens_floats = reader.widens_floats
        self.cache_scheme = reader.cache_scheme
        self.warnings = list(reader.warnings)
        self.entries = copy.copy(reader.entries)
        self._reader = reader
        self._seen = seen
        self._lock = threading.Lock()
        self._decoded: tuple[str, QuantTensor | Tensor] | None = None

    @property
    def largest_kept_bytes(self) -> int:
        """Memory of the largest weight that is decoded once for all of its pieces."""
        if self._reader.has_experts_apart:
            return 0
        wholes = {
            seen.original.module: seen.original
            for seen in self._seen.values()
            if seen.original is not None and seen.piece is not None
        }
        return max(map(self._bytes_of_whole, wholes.values()), default=0)

    def _bytes_of_whole(self, weight: SourceWeight) -> int:
        stored = [self._reader.checkpoint.tensors[name] for name in weight.leaves.values()]
        elements = math.prod(weight.parameter_shape)
        return sum(entry.num_bytes for entry in stored) + _BYTES_TO_DECODE * elements

    def weights(self) -> Mapping[str, SourceWeight]:
        """Return the weights of the view."""
        return {module: seen.weight for module, seen in self._seen.items()}

    def decode(self, weight: SourceWeight) -> QuantTensor | Tensor:
        """Read a weight [N, K] or [E * N, K]; see `Reader.decode`."""
        seen = self._seen[weight.module]
        if seen.original is not None and seen.piece is None:
            return self._reader.decode(seen.original)
        if seen.piece is None:
            return self.checkpoint.read(weight.leaves["weight"])
        if seen.original is None:
            assert seen.entry is not None, "a part is part of a weight or of a tensor"
            matrix = read_entry(slice_of(seen.entry, seen.piece.expert))[0].t()
            return matrix[seen.piece.start : seen.piece.stop : seen.piece.step].contiguous()
        return self._decode_piece(seen.original, seen.piece)

    def _decode_piece(self, original: SourceWeight, piece: Piece) -> QuantTensor | Tensor:
        """Read one expert alone where its tensors are slices, else all of them once."""
        if self._reader.has_experts_apart:
            whole = self._decode_expert(original, piece.expert)
            return _rows(whole, piece.start, piece.stop, piece.step)
        first = piece.expert * original.shape[0]
        with self._lock:  # threads that want other parts of it wait, instead of decoding it again
            if self._decoded is None or self._decoded[0] != original.module:
                self._decoded = None  # frees it
                self._decoded = original.module, self._reader.decode(original)
            whole = self._decoded[1]
            return _rows(whole, first + piece.start, first + piece.stop, piece.step)

    def _decode_expert(self, original: SourceWeight, expert: int) -> QuantTensor | Tensor:
        reader = copy.copy(self._reader)
        tensors = {}
        for name in original.leaves.values():
            entry = self._reader.checkpoint.tensors[name]
            of_each = len(entry.shape) > 0 and entry.shape[0] == original.experts
            tensors[name] = slice_of(entry, expert) if of_each else entry
        reader.checkpoint = replace(self._reader.checkpoint, tensors=tensors)
        return reader.decode(replace(original, experts=1))


def slice_of(entry: TensorEntry, index: int) -> TensorEntry:
    """Return where one part [1, ...] of a tensor [E, ...] lies."""
    if entry.loaded is not None:
        part = entry.loaded[index : index + 1]
        return replace(entry, shape=tuple(part.shape), num_bytes=part.nbytes, loaded=part)
    num_bytes = entry.num_bytes // entry.shape[0]
    return replace(
        entry,
        shape=(1, *entry.shape[1:]),
        start=entry.start + index * num_bytes,
        num_bytes=num_bytes,
    )


def rows_of(entry: TensorEntry, start: int, stop: int, *, name: str) -> TensorEntry:
    """Return where rows start..stop of a tensor [..., K] lie, as [rows, K] under a name."""
    columns = entry.shape[-1]
    shape = (stop - start, columns)
    if entry.loaded is not None:
        part = entry.loaded.reshape(-1, columns)[start:stop]
        return replace(entry, name=name, shape=shape, num_bytes=part.nbytes, loaded=part)
    row_bytes = columns * entry.dtype.itemsize
    return replace(
        entry,
        name=name,
        shape=shape,
        start=entry.start + start * row_bytes,
        num_bytes=(stop - start) * row_bytes,
    )


def _rows(value: QuantTensor | Tensor, start: int, stop: int, step: int) -> QuantTensor | Tensor:
    if isinstance(value, Tensor):
        return value[start:stop:step]
    return (
        value.rows(start, stop) if step == 1 else take_rows(value, torch.arange(start, stop, step))
    )


def renamed_weight(weight: SourceWeight, module: str, names: Mapping[str, str]) -> SourceWeight:
    """Return a weight as a view calls it.

    Args:
        weight: As its reader calls it.
        module: Name of its module in the view; a parameter of its own changes with it.
        names: Names of tensors in the view, by their name in the files.
    """
    leaves = {leaf: names.get(name, name) for leaf, name in weight.leaves.items()}
    parameter = weight.parameter
    if parameter == weight.module:
        parameter = module
    elif parameter.startswith(f"{weight.module}."):
        parameter = module + parameter.removeprefix(weight.module)
    elif parameter:
        parameter = names.get(parameter, parameter)
    return replace(weight, module=module, leaves=leaves, parameter=parameter)


def view_of(
    source: Source, tensors: Mapping[str, TensorEntry], seen: Mapping[str, SeenWeight]
) -> Source:
    """Return the source that shows these tensors and weights; what is no weight's is plain."""
    checkpoint = replace(source.checkpoint, tensors=tensors)
    weights = {module: found.weight for module, found in seen.items()}
    consumed = {name for weight in weights.values() for name in weight.leaves.values()}
    return replace(
        source,
        checkpoint=checkpoint,
        reader=ViewReader(source.reader, checkpoint, seen),
        weights=weights,
        plain={name: entry for name, entry in tensors.items() if name not in consumed},
    )
