"""Execute a plan: read, decode, quantize, encode, write, one module at a time."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch import Tensor

from quantload.errors import NonFiniteWeight, NotLossless, OutputError
from quantload.loader.checkpoint import files_kept_open
from quantload.loader.formats.compressed_tensors_lossless import encode_lossless
from quantload.loader.output_files import Leaf
from quantload.loader.plan import Plan, PlanRow
from quantload.loader.side_files import copy_side_files
from quantload.loader.writer import CheckpointWriter
from quantload.progress import Progress
from quantload.quant.qtensor import QuantTensor
from quantload.quant.rtn import as_blocks, quantize_rtn

_log = logging.getLogger("quantload")


@files_kept_open()
def run_plan(plan: Plan, folder: Path, progress: Progress) -> Path:
    """Write the checkpoint of a plan into a new folder.

    Memory: the largest weight in full precision, a few times.

    Args:
        plan: From `make_plan`.
        folder: Must not exist yet, or be empty; appears under its name only when it is complete.
        progress: Advances by bytes of the source.

    Raises:
        OutputError: The folder is taken, or cannot be written.
        NonFiniteWeight: A weight to be quantized is not finite.
        NotLossless: The plan is lossless, and a value would change.
    """
    _check_not_the_source(plan, folder)
    total = sum(row.source_bytes for row in plan.rows)
    with CheckpointWriter(folder, plan.files) as writer:
        progress.start("convert", total=total, unit="B")
        for row in plan.rows:
            for name, tensor in _convert(plan, row).items():
                writer.write(name, tensor)
            progress.advance(row.source_bytes, note=row.module)
        for output in plan.plain:
            tensor = plan.source.read_plain(output.source)
            cast = _cast(tensor, output.dtype, output.name)
            if plan.lossless:
                _refuse_rounding(tensor, cast, output.name)
            writer.write(output.name, cast)
        progress.finish()
        copy_side_files(plan.source.checkpoint, writer.staging)
        for name, content in {"config.json": plan.config, **plan.config_files}.items():
            writer.write_json(name, content)
        return writer.finish()


def _check_not_the_source(plan: Plan, folder: Path) -> None:
    source = plan.source.checkpoint.folder.resolve()
    target = folder.resolve()
    if target == source:
        raise OutputError(f"output folder `{folder}` is the source", hint="give a new name")
    if source in target.parents and plan.source.checkpoint.gguf_file is None:
        raise OutputError(
            f"output folder `{folder}` is inside the source `{source}`",
            hint="give a folder outside of it",
        )


@torch.no_grad()
def _convert(plan: Plan, row: PlanRow) -> dict[str, Tensor]:
    if row.scheme is None:
        return {row.outputs[0].name: _read_dense(plan, row)}
    assert row.scheme.weight is not None, "rows without a weight scheme have no scheme"
    if row.keeps_values:
        return _keep_values(plan, row)
    weight = _read(plan, row)
    try:
        quantized = quantize_rtn(_cast(weight, row.dtype, row.module), row.scheme.weight)
    except NonFiniteWeight as error:
        raise NonFiniteWeight(
            f"weight of `{row.module}` cannot be quantized: {error.message}",
            hint=f"keep it with the rule `{row.module} = keep`, or repair the source",
        ) from error
    _tell_lost_groups(weight, quantized, row.module)
    leaves = plan.target.encode(quantized, row.scheme, quantized.shape)
    return {f"{row.module}.{leaf}": part for leaf, part in leaves.items()}


def _tell_lost_groups(weight: Tensor, quantized: QuantTensor, module: str) -> None:
    """Say how many groups are zeros only because the dtype of the scales has no scale for them.

    Args:
        weight: [N, K], what was quantized, in the dtype of the source.
        quantized: What became of it.
        module: For the message.
    """
    eps = torch.finfo(quantized.scale.dtype).eps
    stands_in = quantized.scale == eps  # for a scale of zero, see `quant/rtn.py`
    if not bool(stands_in.any()):
        return
    largest = as_blocks(weight.abs(), quantized.block).amax(dim=(1, 3))
    lost = int((stands_in & (largest > 0) & (largest < eps / 2)).sum())
    if lost:
        _log.warning(
            "%d group%s of `%s` become zeros: their scale is below what `%s` holds",
            lost,
            "s" if lost > 1 else "",
            module,
            quantized.scale.dtype,
        )


def _keep_values(plan: Plan, row: PlanRow) -> dict[str, Tensor]:
    """Encode what the source holds, code for code."""
    assert row.scheme is not None, "only quantized weights keep their codes"
    weight = plan.source.read_weight(row.read_from)
    planned = {o.name.removeprefix(f"{row.module}."): Leaf(o.dtype, o.shape) for o in row.outputs}
    try:
        if not isinstance(weight, QuantTensor):
            raise NotLossless("its format decodes it to floats")
        leaves = encode_lossless(weight, row.scheme, planned)
    except NotLossless as error:
        raise NotLossless(
            f"`{row.module}` ({row.source}) cannot be written as {row.scheme} with the same "
            f"values: {error.message}",
            hint=f"dequantize it with the rule `{row.module} = dense`",
        ) from error
    return {f"{row.module}.{leaf}": part for leaf, part in leaves.items()}


def _read_dense(plan: Plan, row: PlanRow) -> Tensor:
    return _cast(_read(plan, row), row.dtype, row.module)


def _read(plan: Plan, row: PlanRow) -> Tensor:
    if row.read_from not in plan.source.weights:
        return plan.source.read_plain(row.read_from)
    if row.scheme is None:
        return plan.source.read_parameter(row.read_from)
    return plan.source.read_dense(row.read_from)


def _cast(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    if tensor.dtype == dtype:
        return tensor
    cast = tensor.to(dtype)
    if not _may_overflow(tensor.dtype, dtype):
        return cast
    is_lost = tensor.isfinite() & ~cast.isfinite()
    lost = int(is_lost.sum())
    if lost:
        largest = float(tensor[is_lost].abs().max())
        raise NonFiniteWeight(
            f"{lost} values of `{name}` do not fit into `{dtype}`, the source has "
            f"`{tensor.dtype}`, largest `{largest:.4g}`",
            hint="use bfloat16 or float32" if dtype == torch.float16 else "use float32",
        )
    return cast


def _refuse_rounding(tensor: Tensor, cast: Tensor, name: str) -> None:
    """Refuse a cast that changes values; headers cannot tell, since a wide dtype may hold few bits.

    Raises:
        NotLossless: It does.
    """
    back = cast.to(tensor.dtype)
    changed = int(((back != tensor) & ~(back.isnan() & tensor.isnan())).sum())
    if changed:
        raise NotLossless(
            f"{changed} of {tensor.numel()} values of `{name}` would change: `{tensor.dtype}` does "
            f"not fit into `{cast.dtype}`",
            hint=f"use `--dtype {str(tensor.dtype).removeprefix('torch.')}`, or leave out "
            "`--lossless`",
        )


def _may_overflow(source: torch.dtype, target: torch.dtype) -> bool:
    """True if `source` has finite values that round to infinity in `target`."""
    if not (source.is_floating_point and target.is_floating_point):
        return False
    return torch.finfo(source).max > torch.finfo(target).max
