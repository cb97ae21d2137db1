"""The plan of a conversion: decided once, from headers, before any tensor is read.

For every module: what it is, what it becomes, which rule or reason decided; for every output
tensor: its dtype, shape, file and offset. Everything later only executes the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from quantload.loader.checkpoint import TensorEntry
from quantload.loader.formats.compressed_tensors_lossless import lossless_layout
from quantload.loader.formats.target import Target
from quantload.loader.formats.targets import COMPRESSED_TENSORS
from quantload.loader.model_dtype import DTYPE_NAMES, config_dtype
from quantload.loader.output_files import OutputFile, OutputTensor, assign_files
from quantload.loader.plan_config import output_config
from quantload.loader.plan_fit import fit, refuse_same, refuse_unwritable
from quantload.loader.plan_groups import OnSplit, SplitOutcome, settle_groups
from quantload.loader.plan_row import PlanRow, SourceRegion
from quantload.loader.plan_same import is_in_scheme, refuse_loss, same_scheme
from quantload.loader.plan_warnings import (
    about_input_scales,
    about_kept,
    about_partial_blocks,
    about_requantizing,
    about_transformers,
    about_unfit_widths,
    about_unlike_members,
)
from quantload.loader.source import FLOAT_DTYPES, Source, SourceWeight
from quantload.mappers.default_keeps import reason_to_keep
from quantload.mappers.facts import Kind, ModelFacts, missing_layers
from quantload.quant.rules import QuantConfig, resolve
from quantload.quant.scheme import SAME, Scheme

DEFAULT_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of a plan.

    Args:
        dtype: dtype of everything in full precision, and of scales; None keeps what is stored.
        on_split: What to do when rules split a fused group: "error", "keep" or "promote".
        max_shard_bytes: Largest size of one output file's data.
        lossless: Refuse whatever would change a value.
        target: The format that is written.
    """

    dtype: torch.dtype | None = None
    on_split: OnSplit = "error"
    max_shard_bytes: int = DEFAULT_SHARD_BYTES
    lossless: bool = False
    target: Target = COMPRESSED_TENSORS


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A whole conversion.

    Args:
        source: What is converted.
        rows: Decisions, one a module with a weight of two or more dimensions.
        plain: All other tensors, copied (or cast to `dtype`).
        files: Output files with every tensor's place.
        config: config.json that will be written.
        config_files: Further JSON files that the format has, by name.
        target: The format that is written.
        groups: Fused groups, and where they come from.
        groups_origin: "model probe" or "name table".
        lossless: Refuse a tensor that does not come out with equal values.
        asked: The rules and the default scheme that it was made from.
        options: The options that it was made from.
        trust_remote_code: Modelling code of the checkpoint was asked for its groups.
        warnings: What the user should know.
    """

    source: Source
    rows: tuple[PlanRow, ...]
    plain: tuple[OutputTensor, ...]
    files: tuple[OutputFile, ...]
    config: Mapping[str, Any]
    config_files: Mapping[str, Mapping[str, Any]]
    target: Target
    groups: tuple[tuple[str, ...], ...]
    groups_origin: str
    lossless: bool
    asked: QuantConfig
    options: PlanOptions
    trust_remote_code: bool = False
    warnings: tuple[str, ...] = field(default=())

    @property
    def output_bytes(self) -> int:
        """Exact bytes of all weight files together, headers included."""
        return sum(file.num_bytes for file in self.files)


def make_plan(
    source: Source, config: QuantConfig, facts: ModelFacts, options: PlanOptions | None = None
) -> Plan:
    """Decide everything about a conversion.

    Args:
        source: An open checkpoint.
        config: The user's rules and default scheme.
        facts: Kinds of modules, fused groups and ties.
        options: dtype, shard size, treatment of split groups.

    Raises:
        ConfigError: Rules do not fit the model; UnusedRule and RuleSplitsStack are kinds of it.
    """
    options = options or PlanOptions()
    choices, undecided = _choose(source, config, facts, options)
    outcome = settle_groups(
        {module: choice.scheme for module, choice in choices.items()},
        {module: choice.reason for module, choice in choices.items()},
        [g for g in facts.groups if not all(m in choices and choices[m].is_same for m in g)],
        options.on_split,
    )
    rows = tuple(_row(choice, outcome, source, options) for choice in choices.values())
    rows += tuple(_kept_rows(source, options))
    if options.lossless:
        refuse_loss(source, rows)
    done = {tensor.source for row in rows for tensor in row.outputs}
    plain = tuple(
        _plain_tensor(entry, source, options)
        for entry in source.plain.values()
        if entry.name not in done
    )
    schemes = {row.module: row.scheme for row in rows if row.scheme is not None}
    new_config = output_config(
        source,
        schemes,
        target=options.target,
        kept=[row.module for row in rows if row.scheme is None and _is_linear(row, facts)],
        named=[module for module in schemes if _kind_of(module, facts) != "linear"],
        facts=facts,
        untied=any(row.module in facts.tied for row in rows),
        dtypes={row.dtype for row in rows},
    )
    warnings = [*source.warnings, *outcome.warnings]
    warnings += [f"rule `{rule}` decides nothing: other rules cover more" for rule in undecided]
    warnings += [*about_requantizing(source, rows), *about_kept(source, config, rows)]
    if reason := missing_layers(source.checkpoint.config, source.checkpoint.tensors):
        warnings.append(f"the checkpoint is incomplete: {reason}")
    if not schemes and config.default is not None and config.default.weight is not None:
        warnings.append(f"no module is quantized to {config.default}; the plan says why")
    warnings += [*about_input_scales(source, rows), *about_partial_blocks(rows)]
    warnings += about_unfit_widths(rows)
    warnings += [*about_unlike_members(rows, facts.groups), *about_transformers(rows, facts)]
    return Plan(
        source=source,
        rows=rows,
        plain=plain,
        files=assign_files(
            [*(row.outputs for row in rows), *((tensor,) for tensor in plain)],
            max_bytes=options.max_shard_bytes,
        ),
        config=new_config.config,
        config_files=new_config.files,
        target=options.target,
        groups=facts.groups,
        groups_origin=facts.origin,
        lossless=options.lossless,
        asked=config,
        options=options,
        warnings=tuple(warnings),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Choice:
    """What rules and defaults say of one module, before fused groups are settled."""

    module: str
    weight: SourceWeight
    scheme: Scheme | None
    reason: str
    keeps_values: bool = False
    is_same: bool = False


def _choose(
    source: Source, config: QuantConfig, facts: ModelFacts, options: PlanOptions
) -> tuple[dict[str, _Choice], tuple[object, ...]]:
    weights = dict(source.weights)
    aliases = {
        alias: owner
        for alias, owner in facts.tied.items()
        if owner in weights and alias not in weights
    }
    weights |= {alias: weights[owner] for alias, owner in aliases.items()}
    resolution = resolve(config, {module: facts.names_of(module) for module in weights})
    choices = {}
    for module, weight in weights.items():
        decision = resolution.decisions[module]
        scheme = decision.scheme
        reason = f"rule `{decision.rule}`" if decision.rule else "default scheme"
        keeps_values = False
        if scheme == SAME:
            refuse_same(options.target)
            scheme, same_reason = same_scheme(weight, try_all=options.lossless)
            reason, keeps_values = f"{reason}: {same_reason}", scheme is not None
        elif scheme is not None and scheme.weight is not None:
            kept = reason_to_keep(module, _kind_of(module, facts))
            if kept is not None and not decision.covers_whole_name:
                scheme, reason = None, f"kept by default: {kept}"
            else:
                scheme, reason = fit(scheme, weight, reason)
                refuse_unwritable(options.target, scheme, weight)
                keeps_values = (
                    scheme is not None
                    and options.target.keeps_values
                    and is_in_scheme(weight, scheme)
                )
                reason += "; it is in this scheme already" if keeps_values else ""
        choices[module] = _Choice(
            module=module,
            weight=weight,
            scheme=scheme,
            reason=reason,
            keeps_values=keeps_values,
            is_same=decision.scheme == SAME,
        )
    for alias, owner in aliases.items():
        are_dense = _is_dense(choices[alias].scheme) and _is_dense(choices[owner].scheme)
        if are_dense or choices[alias].is_same:
            del choices[alias]  # stays tied: nothing of its own is written
        else:
            reason = f"{choices[alias].reason}; untied from `{owner}`"
            choices[alias] = replace(choices[alias], reason=reason)
    return choices, resolution.undecided


def _is_dense(scheme: Scheme | None) -> bool:
    return scheme is None or scheme.weight is None


def _kind(module: str, facts: ModelFacts) -> Kind:
    if module in facts.tied:
        return "embedding" if facts.kinds.get(facts.tied[module]) == "head" else "head"
    return "linear"


def _row(choice: _Choice, outcome: SplitOutcome, source: Source, options: PlanOptions) -> PlanRow:
    module, weight = choice.module, choice.weight
    scheme = outcome.schemes[module]
    keeps_values = choice.keeps_values and scheme == choice.scheme
    dtype = _working_dtype(weight, source, options, is_scale=not _is_dense(scheme))
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
        region=_region(weight, source),
    )


def _region(weight: SourceWeight, source: Source) -> SourceRegion | None:
    """Return where a plain matrix lies; None if it has to be decoded or put in order."""
    entry = source.checkpoint.tensors.get(weight.parameter_name)
    if entry is None or not entry.is_contiguous or source.reader.widens_floats:
        return None
    if weight.is_quantized or entry.shape != weight.shape or entry.dtype not in FLOAT_DTYPES:
        return None
    rows, columns = weight.shape
    return SourceRegion(tensor=entry.name, first=0, rows=rows, columns=columns, row_stride=columns)


def _source_bytes(weight: SourceWeight, source: Source) -> int:
    return sum(source.checkpoint.tensors[name].num_bytes for name in weight.leaves.values())


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


def _kept_rows(source: Source, options: PlanOptions) -> list[PlanRow]:
    """Return rows for tensors of two or more dimensions that no scheme reaches: none is silent."""
    rows = []
    for entry in source.plain.values():
        if len(entry.shape) < 2 or entry.dtype not in FLOAT_DTYPES:
            continue
        tensor = _plain_tensor(entry, source, options)
        rows.append(
            PlanRow(
                module=entry.name,
                shape=entry.shape,
                source=str(entry.dtype).removeprefix("torch.").upper(),
                scheme=None,
                reason=f"kept: a tensor of {len(entry.shape)} dimensions, not the weight of a "
                "linear layer",
                dtype=tensor.dtype,
                read_from=entry.name,
                outputs=(tensor,),
                source_bytes=entry.num_bytes,
            )
        )
    return rows


def _plain_tensor(entry: TensorEntry, source: Source, options: PlanOptions) -> OutputTensor:
    dtype = entry.dtype
    if dtype in FLOAT_DTYPES:
        if options.dtype is not None:
            dtype = options.dtype
        elif source.reader.widens_floats:
            dtype = config_dtype(source.checkpoint.config) or dtype
    return OutputTensor(entry.name, dtype, entry.shape, entry.name)


def _kind_of(module: str, facts: ModelFacts) -> Kind:
    return facts.kinds.get(module, _kind(module, facts))


def _is_linear(row: PlanRow, facts: ModelFacts) -> bool:
    return len(row.shape) == 2 and _kind_of(row.module, facts) in ("linear", "head")


__all__ = ["DTYPE_NAMES", "Plan", "PlanOptions", "PlanRow", "make_plan"]
