"""The plan of a conversion: decided once, from headers, before any tensor is read.

For every module: what it is, what it becomes, which rule or reason decided; for every output
tensor: its dtype, shape, file and offset. Everything later only executes the plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quantload.loader.formats.target import Target
from quantload.loader.model_dtype import DTYPE_NAMES
from quantload.loader.output_files import OutputFile, OutputTensor, assign_files
from quantload.loader.plan_choice import agree_in_blocks, choose, kind_of
from quantload.loader.plan_config import output_config
from quantload.loader.plan_groups import settle_groups
from quantload.loader.plan_inputs import with_input_numbers
from quantload.loader.plan_options import PlanOptions
from quantload.loader.plan_row import PlanRow
from quantload.loader.plan_rows import kept_rows, plain_tensor, row_of
from quantload.loader.plan_same import refuse_loss
from quantload.loader.plan_warnings import (
    about_experts,
    about_input_scales,
    about_kept,
    about_partial_blocks,
    about_requantizing,
    about_transformers,
    about_unfit_widths,
    about_unlike_members,
)
from quantload.loader.source import Source
from quantload.mappers.facts import ModelFacts, expert_blocks, extra_layers, missing_layers
from quantload.quant.rules import QuantConfig


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
    def quantized_elements(self) -> int:
        """Number of weights that are quantized anew."""
        rows = (row for row in self.rows if row.scheme is not None and not row.keeps_values)
        return sum(math.prod(row.shape) for row in rows)

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
    chosen = choose(source, config, facts, options)
    source, facts = chosen.source, chosen.facts
    blocks = expert_blocks(chosen.of)
    choices = agree_in_blocks(chosen.of, blocks)
    in_blocks = {module for block in blocks for module in block}
    groups = (*(group for group in facts.groups if not in_blocks.issuperset(group)), *blocks)
    outcome = settle_groups(
        {module: choice.scheme for module, choice in choices.items()},
        {module: choice.reason for module, choice in choices.items()},
        [g for g in groups if not all(m in choices and choices[m].is_same for m in g)],
        options.on_split,
    )
    rows = tuple(row_of(choice, outcome, source, options) for choice in choices.values())
    rows, about_inputs = with_input_numbers(rows, facts.groups, options, source)
    rows += tuple(kept_rows(source, options, chosen.whole_experts))
    if options.lossless:
        refuse_loss(source, rows)
    done = {tensor.source for row in rows for tensor in row.outputs}
    plain = tuple(
        plain_tensor(entry, source, options)
        for entry in source.plain.values()
        if entry.name not in done
    )
    schemes = {row.module: row.scheme for row in rows if row.scheme is not None}
    new_config = output_config(
        source,
        schemes,
        target=options.target,
        kept=[row.module for row in rows if row.scheme is None and _is_linear(row, facts)],
        named=[module for module in schemes if kind_of(module, facts) != "linear"],
        facts=facts,
        untied=any(
            row.module in facts.tied and kind_of(row.module, facts) in ("head", "embedding")
            for row in rows
        ),
        dtypes={row.dtype for row in rows},
    )
    warnings = [*source.warnings, *outcome.warnings, *about_inputs]
    warnings += [
        f"rule `{rule}` decides nothing: other rules cover more" for rule in chosen.undecided
    ]
    warnings += [*about_requantizing(source, rows), *about_kept(source, config, rows)]
    if reason := missing_layers(source.checkpoint.config, source.checkpoint.tensors):
        warnings.append(f"the checkpoint is incomplete: {reason}")
    if reason := extra_layers(source.checkpoint.config, source.checkpoint.tensors):
        warnings.append(f"layers that no model loads: {reason}")
    if not schemes and config.default is not None and config.default.weight is not None:
        warnings.append(f"no module is quantized to {config.default}; the plan says why")
    warnings += [*about_input_scales(source, rows), *about_partial_blocks(rows)]
    warnings += [*about_unfit_widths(rows), *about_experts(config, rows, chosen.not_served)]
    warnings += [*about_unlike_members(rows, groups), *about_transformers(rows, facts)]
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


def _is_linear(row: PlanRow, facts: ModelFacts) -> bool:
    """True for what some reader takes for a linear layer.

    The routers of transformers 5 are none, those of vLLM are.
    """
    kinds = ("linear", "head", "other")
    return len(row.shape) == 2 and kind_of(row.module, facts) in kinds


__all__ = ["DTYPE_NAMES", "Plan", "PlanOptions", "PlanRow", "make_plan"]
