"""How each value that a model needs is read: what of which stored tensors, and what is made of it.

A rank of a parallel model reads what it holds. Of a tensor in full precision that is any part; of a
quantized weight the blocks that its rows and columns lie in, if its format can decode these alone
(`Reader.blocks_of`). All else is read whole and cut in memory, exactly as well.

Letters: E experts, N output features, K input features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from quantload.loader.checkpoint import Checkpoint, TensorEntry
from quantload.loader.places import Job
from quantload.loader.portion import Span, composed, portion_of
from quantload.loader.reading import Reading, Value, lies_in_file
from quantload.loader.reading_codes import CodeReadings
from quantload.loader.receivers import is_experts_receiver, is_receiver
from quantload.loader.row_reader import region_of
from quantload.loader.runs import Fetch
from quantload.loader.source import Source
from quantload.loader.source_view import slice_of
from quantload.quant.region import WHOLE, Region


class Readings:
    """Plans what is read of a checkpoint.

    Args:
        source: An open checkpoint.
        device: Where values are needed.
    """

    def __init__(self, source: Source, device: torch.device) -> None:
        self.source, self.device = source, device
        self._codes = CodeReadings(source, device)
        self._is_plain = type(source.checkpoint).read is Checkpoint.read

    def of(self, job: Job, module: nn.Module, region: Region, dtype: torch.dtype) -> list[Reading]:
        """Return what is read for a job.

        Args:
            job: A tensor or weight and its place.
            module: The module of its place.
            region: What this rank holds of a parameter; receivers tell themselves.
            dtype: dtype of floats in its place.
        """
        leaf, slots = job.target.leaf, [target.slot for target in job.targets()]
        regions: list[Region | None] = [region]
        if is_receiver(module):
            regions = [module.region(leaf, slot) for slot in slots]
        if all(found is None for found in regions):
            return []
        entry = self._plain_entry(job)
        found: list[Reading] | None = None
        if job.slots > 1:
            if entry is not None and job.target.cut is None:
                found = self._of_slots(job, module, entry, regions, dtype)
            elif job.weight is not None:
                found = self._codes.of_experts(job, regions)
        elif entry is not None:
            found = self._of_floats(job, entry, regions[0] or WHOLE, dtype)
        elif job.weight is not None:
            found = self._codes.of_weight(job, module, regions[0] or WHOLE)
        if found is None and entry is not None:
            found = [self._dense(entry, None, None, dtype)]
        return found or [self._whole(job, module)]

    # -- full precision ------------------------------------------------------------------------

    def _plain_entry(self, job: Job) -> TensorEntry | None:
        """Return the tensor that holds the value as it is; None if it has to be decoded."""
        if job.weight is None:
            entry = self.source.checkpoint.tensors.get(job.name)
        else:
            is_float = job.weight.is_matrix and region_of(job.weight, self.source) is not None
            entry = self.source.checkpoint.tensors[job.weight.parameter_name] if is_float else None
        if entry is None or not self._is_plain or not lies_in_file(entry):
            return None
        return entry

    def _of_floats(
        self, job: Job, entry: TensorEntry, region: Region, dtype: torch.dtype
    ) -> list[Reading]:
        cut, target = job.target.cut, job.target
        is_easy = cut is None or (
            cut.axis == 0
            and cut.transposed == "never"
            and all(run.step == 1 for run in cut.rows or ())
        )
        if not is_easy or target.join is not None or target.piece is not None:
            return [self._dense(entry, None, None, dtype)]
        rows = composed(None if cut is None else cut.rows, region.rows)
        return [replace(self._dense(entry, rows, region.columns, dtype), is_cut=True)]

    def _dense(
        self,
        entry: TensorEntry,
        rows: Sequence[Span] | None,
        columns: Span | None,
        dtype: torch.dtype,
        *,
        is_transposed: bool = False,
    ) -> Reading:
        portion, left = portion_of(entry, rows, columns)
        is_straight = left is None and not is_transposed and entry.dtype == dtype
        fetch = Fetch(portion, self.device, is_kept=is_straight)
        return Reading(
            partial(_floats, fetch, left, is_transposed),
            (fetch,),
            portion.num_bytes,
            is_straight=is_straight,
        )

    def _of_slots(
        self,
        job: Job,
        module: nn.Module,
        entry: TensorEntry,
        regions: Sequence[Region | None],
        dtype: torch.dtype,
    ) -> list[Reading] | None:
        """Return what is read of a tensor [E, N, K], [E, K, N] or [E, N], slot by slot."""
        experts = entry.shape[0]
        parts = len(regions) // experts
        height = job.shape[0]
        input_first = (
            len(entry.shape) > 2
            and is_experts_receiver(module)
            and module.has_input_first(job.target.leaf)
        )
        found = []
        for number, (target, region) in enumerate(zip(job.targets(), regions, strict=True)):
            if region is None:
                continue
            expert, part = divmod(number, parts)
            one = slice_of(entry, expert)
            one = replace(one, shape=one.shape[1:])
            rows = region.rows or ((0, height),)
            rows = tuple((part * height + first, part * height + last) for first, last in rows)
            if input_first:
                if len(rows) > 1:
                    return None
                columns = None if region.columns is None else (region.columns,)
                reading = self._dense(one, columns, rows[0], dtype, is_transposed=True)
            else:
                reading = self._dense(one, rows, region.columns, dtype)
            found.append(replace(reading, slot=target.slot, is_cut=True))
        return found

    # -- all else ------------------------------------------------------------------------------

    def _whole(self, job: Job, module: nn.Module) -> Reading:
        names = [job.name] if job.weight is None else list(job.weight.leaves.values())
        tensors = self.source.checkpoint.tensors
        num_bytes = sum(tensors[name].num_bytes for name in names if name in tensors)
        return Reading(partial(self._read_now, job, module), num_bytes=num_bytes)

    def _read_now(self, job: Job, module: nn.Module) -> Value:
        if job.weight is None:
            value: Value = self.source.read_plain(job.name)
        elif job.weight.is_matrix or is_receiver(module):
            value = self.source.read_weight(job.name)
        else:
            value = self.source.read_parameter(job.name)
        return value.to(self.device) if isinstance(value, Tensor) else value


def _floats(fetch: Fetch, left: Span | None, is_transposed: bool) -> Tensor:
    value = fetch.take()
    if left is not None:
        value = value[:, slice(*left)]
    return (value.t() if is_transposed else value).contiguous()


__all__ = ["Readings"]
