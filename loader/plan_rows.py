"""The rows of a plan: for each module the tensors that it becomes, and where its weight is read."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quantload.errors import ConfigError
from quantload.loader.checkpoint import TensorEntry
from quantload.loader.formats.compressed_tensors_lossless import lossless_layout
from quantload.loader.model_dtype import config_dtype
from quantload.loader.output_files import OutputTensor
from quantload.loader.plan_choice import Choice, is_dense
from quantload.loader.plan_groups import SplitOutcome
from quantload.loader.plan_options import PlanOptions
from quantload.loader.plan_row import PlanRow
from quantload.loader.row_reader import region_of
from quantload.loader.source import FLOAT_DTYPES, Source, SourceWeight
from quantload.quant import search
from quantload.quant.scheme import Scheme


def row_of(choice: Choice, outcome: SplitOutcome, source: Source, options: PlanOptions) -> PlanRow:
    """Return the row of a module, with the tensors that it becomes."""
    module, weight = choice.module, choice.weight
    scheme = outcome.schemes[module]
    keeps_values = choice.keeps_values and scheme == choice.scheme
    dtype = _working_dtype(weight, source, options, is_scale=not is_dense(scheme))
    if scheme is not None and options.observer == "search" and not keeps_values:
        _refuse_search(module, scheme)
    if scheme is None or scheme.weight is None:
        name = weight.parameter_name if module == weight.module else f"{module}.weight"
        tensors = [OutputTensor(name, dtype, weight.parameter_shape, weight.parameter_name)]
    else:
        leaves = (
            lossless_layout(weight, scheme, source.checkpoint.tensors)
            if keeps_values
            else options.target.layout(scheme, weight.shape, dtype)
        )
        tensors = [
            OutputTensor(f"{module}.{leaf}", spec.dtype, spec.shape, module)
            for leaf, spec in leaves.items()
        ]
    return PlanRow(
        module=module,
        shape=weight.parameter_shape,
        source=weight.encoding,
        scheme=scheme if scheme is not None and scheme.weight is not None else None,
        reason=outcome.reasons[module],
        dtype=dtype,
        read_from=weight.module,
        keeps_values=keeps_values,
        is_same=choice.is_same,
        outputs=tuple(tensors),
        source_bytes=_source_bytes(weight, source),
        region=region_of(weight, source),
    )


def _refuse_search(module: str, scheme: Scheme) -> None:
    reason = "" if scheme.weight is None else search.obstacle(scheme.weight)
    if reason:
        raise ConfigError(
            f"`{module}` cannot be quantized to {scheme} with the observer `search`: {reason}",
            hint="take the observer `minmax`, or a scheme with a scale for each row or group",
        )


def _source_bytes(weight: SourceWeight, source: Source) -> int:
    total = 0
    for name in weight.leaves.values():
        total += source.checkpoint.tensors[name].num_bytes
    return total // weight.sharers


def _working_dtype(
    weight: SourceWeight, source: Source, options: PlanOptions, *, is_scale: bool
) -> torch.dtype:
    """Return the dtype of the full-precision weight or of the scales.

    A plain weight keeps its stored dtype. A quantized one has no float dtype of its own: it takes
    that of the model's config.
    """
    if options.dtype is not None:
        return options.dtype
    if not weight.is_quantized and not source.reader.widens_floats:
        # no engine multiplies with scales in float64
        return torch.float32 if is_scale and weight.dtype == torch.float64 else weight.dtype
    return config_dtype(source.checkpoint.config) or weight.dtype


def kept_rows(
    source: Source, options: PlanOptions, whole_experts: Mapping[str, str]
) -> list[PlanRow]:
    """Return rows for tensors of two or more dimensions that no scheme reaches: none is silent."""
    rows = []
    for entry in source.plain.values():
        if len(entry.shape) < 2 or entry.dtype not in FLOAT_DTYPES:
            continue
        tensor = plain_tensor(entry, source, options)
        rows.append(
            PlanRow(
                module=entry.name,
                shape=entry.shape,
                source=str(entry.dtype).removeprefix("torch.").upper(),
                scheme=None,
                reason=_why_kept(entry, whole_experts),
                dtype=tensor.dtype,
                read_from=entry.name,
                outputs=(tensor,),
                source_bytes=entry.num_bytes,
            )
        )
    return rows


def plain_tensor(entry: TensorEntry, source: Source, options: PlanOptions) -> OutputTensor:
    """Return what becomes of a tensor that is no weight."""
    dtype = entry.dtype
    if dtype in FLOAT_DTYPES:
        if options.dtype is not None:
            dtype = options.dtype
        elif source.reader.widens_floats:
            dtype = config_dtype(source.checkpoint.config) or dtype
    return OutputTensor(entry.name, dtype, entry.shape, entry.name)


def _why_kept(entry: TensorEntry, whole_experts: Mapping[str, str]) -> str:
    if reason := whole_experts.get(entry.name):
        return f"kept: `{entry.name}` holds {entry.shape[0]} experts: {reason}"
    return f"kept: a tensor of {len(entry.shape)} dimensions, not the weight of a linear layer"
