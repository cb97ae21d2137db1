"""The output of a plan as an open checkpoint, without writing it: quantize while loading.

Headers and config are those that a conversion would write, and the format reads them as it reads
the written files. What differs is where the bytes come from: the first tensor of a module that is
asked for has its weight read from the source, quantized and encoded, by the functions that the
conversion uses. So every code and every scale is that of the written output, by construction, in
any format that is written.

Of the weights in full precision some rows at a time are in memory; of those that have to be decoded
first, one. What is ready but not yet asked for are members of a fused group that share a scale.
"""

from __future__ import annotations

import json
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from quantload.loader.casting import cast
from quantload.loader.checkpoint import Checkpoint, MadeEntry, TensorEntry
from quantload.loader.encoded_rows import encoded_rows
from quantload.loader.formats import open_source
from quantload.loader.open import natural_order
from quantload.loader.output_files import OutputTensor
from quantload.loader.plan import Plan, PlanRow
from quantload.loader.row_reader import RowReader
from quantload.loader.source import Source
from quantload.loader.tasks import sharing
from quantload.loader.weight_rows import WeightRows
from quantload.quant import compiled

_log = logging.getLogger("quantload")


def quantized_view(plan: Plan, *, device: torch.device | str = "cpu") -> Source:
    """Return what a plan would write, as a source that computes it when it is read.

    Args:
        plan: From `make_plan`.
        device: Where weights are quantized, and where their tensors are then; those that stay in
            full precision are read into host memory. The bytes are the same on all devices.

    Raises:
        QuantloadError: As opening the written output would.
    """
    place = torch.device(device)
    if place.type == "cpu":
        compiled.expect(plan.quantized_elements)
    told = set(plan.source.warnings)
    for warning in plan.warnings:
        if warning not in told:
            _log.warning("%s", warning)
    config = json.loads(json.dumps(plan.config))  # as it would be read back
    tensors = _entries(plan, _Quantizer(plan, place))
    source = plan.source.checkpoint
    checkpoint = Checkpoint(
        name=source.name,
        folder=source.folder,
        config=config,
        tensors={name: tensors[name] for name in sorted(tensors, key=natural_order)},
        quantization_config=config.get("quantization_config"),
        warnings=plan.warnings,
    )
    return replace(open_source(checkpoint), dropped=plan.source.dropped, layers=plan.source.layers)


# -- headers ---------------------------------------------------------------------------------------


def _entries(plan: Plan, quantizer: _Quantizer) -> dict[str, TensorEntry]:
    """Return the tensors of an output, by name."""
    tensors: dict[str, TensorEntry] = {}
    for row in plan.rows:
        for output in row.outputs:
            if row.scheme is None:
                made = _made(plan, output, partial(quantizer.read_whole, row))
                tensors[output.name] = _as_stored(plan, row, output) or made
            elif output.name == f"{row.module}.weight_shape":
                # read to open the checkpoint, when nothing may be quantized yet
                shape = partial(torch.tensor, row.shape, dtype=output.dtype)
                tensors[output.name] = _made(plan, output, shape)
            else:
                tensors[output.name] = _made(plan, output, partial(quantizer.take, row, output))
    for output in plan.plain:
        entry = _stored(plan, output)
        tensors[output.name] = entry or _made(plan, output, partial(_copied, plan, output))
    return tensors


def _as_stored(plan: Plan, row: PlanRow, output: OutputTensor) -> TensorEntry | None:
    """Return where a weight in full precision lies in the source; None if it has to be made."""
    if row.read_from not in plan.source.weights:
        return _stored(plan, output)
    if row.region is None or row.region.row_stride != row.region.columns:
        return None
    entry = plan.source.checkpoint.tensors[row.region.tensor]
    if entry.dtype != output.dtype:
        return None
    return replace(
        entry,
        name=output.name,
        shape=output.shape,
        start=entry.start + row.region.first * entry.dtype.itemsize,
        num_bytes=output.num_bytes,
    )


def _stored(plan: Plan, output: OutputTensor) -> TensorEntry | None:
    """Return where a tensor that is copied lies in the source; None if its bytes change."""
    entry = plan.source.checkpoint.tensors[output.source]
    is_same = entry.is_contiguous and entry.dtype == output.dtype
    return replace(entry, name=output.name) if is_same else None


def _copied(plan: Plan, output: OutputTensor) -> Tensor:
    return cast(plan.source.read_plain(output.source), output.dtype, output.name)


def _made(plan: Plan, output: OutputTensor, read: Callable[[], Tensor]) -> MadeEntry:
    return MadeEntry(
        name=output.name,
        dtype=output.dtype,
        shape=output.shape,
        file=plan.source.checkpoint.folder,
        start=0,
        num_bytes=output.num_bytes,
        make=lambda _: read(),
    )


# -- values ----------------------------------------------------------------------------------------


class _Quantizer:
    """Quantizes the modules of a plan when their tensors are asked for.

    Tensors of a module are let go of when those of another are asked for. Members of its fused
    group that were quantized with it wait for their turn.

    Args:
        plan: What is carried out.
        device: Where weights are quantized.
    """

    def __init__(self, plan: Plan, device: torch.device) -> None:
        reader = RowReader(device)
        weakref.finalize(self, reader.close)
        self._weights = WeightRows(plan, reader)
        self._together = {row.module: rows for rows in sharing(plan) for row in rows}
        self._waiting: dict[str, dict[str, Tensor]] = {}
        self._current: tuple[str, dict[str, Tensor]] = "", {}
        self._lock = threading.Lock()

    @torch.no_grad()
    def take(self, row: PlanRow, output: OutputTensor) -> Tensor:
        """Return a tensor of a quantized weight, in memory of its own."""
        with self._lock:
            if self._current[0] != row.module:
                self._current = "", {}  # frees it
                if row.module not in self._waiting:
                    self._quantize(self._together[row.module])
                self._current = row.module, self._waiting.pop(row.module)
            return self._current[1][output.name].clone()

    def _quantize(self, rows: Sequence[PlanRow]) -> None:
        shared = self._weights.shared_range(rows)
        for row in rows:
            self._waiting[row.module] = self._leaves(row, shared)
        self._weights.shrink()

    def _leaves(self, row: PlanRow, shared: Tensor | None) -> dict[str, Tensor]:
        device = self._weights.reader.device
        leaves = {
            output.name: torch.empty(output.shape, dtype=output.dtype, device=device)
            for output in row.outputs
        }
        left = {name: tensor.numel() for name, tensor in leaves.items()}
        for leaf, part, first_row in encoded_rows(self._weights, row, shared):
            name = f"{row.module}.{leaf}"
            whole = leaves[name]
            assert part.dtype == whole.dtype, f"`{name}` is {part.dtype}, not {whole.dtype}"
            place = whole[first_row : first_row + part.shape[0]] if part.ndim else whole
            place.copy_(part)
            left[name] -= part.numel()
        assert not any(left.values()), f"elements of `{row.module}` are missing: {left}"
        return leaves

    def read_whole(self, row: PlanRow) -> Tensor:
        """Read a weight in full precision."""
        with self._lock:
            return self._weights.read_whole(row)
