"""What the user should know about a plan: one function for each kind of warning."""

from __future__ import annotations

from collections.abc import Mapping

from quantload.errors import counted, listed
from quantload.loader.formats.compressed_tensors_arguments import PACKED, written_format
from quantload.loader.plan_row import PlanRow
from quantload.loader.source import Source, is_of_input
from quantload.mappers.facts import ModelFacts
from quantload.quant.rules import QuantConfig
from quantload.quant.scheme import Scheme

UNFIT = "kept: no group size"  # how the reason of such a row begins


def about_kept(source: Source, config: QuantConfig, rows: tuple[PlanRow, ...]) -> list[str]:
    """Warn of quantized weights that become full precision although nobody asked for `dense`."""
    if config.default is not None and config.default.weight is None:
        return []
    count = sum(
        row.scheme is None
        and row.read_from in source.weights
        and source.weights[row.read_from].is_quantized
        and "embedding" not in row.reason
        for row in rows
    )
    if not count:
        return []
    what = counted(
        count,
        "quantized module of the source becomes full precision: no scheme covers it",
        "quantized modules of the source become full precision: no scheme covers them",
    )
    return [what]


def about_unlike_members(
    rows: tuple[PlanRow, ...], groups: tuple[tuple[str, ...], ...]
) -> list[str]:
    """Warn of fused groups that keep the different schemes of the source."""
    schemes = {row.module: row.scheme for row in rows}
    unlike = [group for group in groups if len({schemes.get(m) for m in group if m in schemes}) > 1]
    if not unlike:
        return []
    return [
        f"{counted(len(unlike), 'fused group has', 'fused groups have')} members in different "
        "schemes, as in the source; engines that fuse them may not load that: "
        f"{listed(', '.join(group) for group in unlike)}"
    ]


def about_partial_blocks(rows: tuple[PlanRow, ...]) -> list[str]:
    """Warn of blocks that engines do not load."""
    partial = 0
    for row in rows:
        block = row.scheme.weight.block if row.scheme and row.scheme.weight else None
        partial += block is not None and any(
            size % step for size, step in zip(row.shape, block, strict=True)
        )
    if not partial:
        return []
    return [
        f"{counted(partial, 'module has', 'modules have')} widths that are no multiples of the "
        "block; vLLM does not load such FP8 blocks"
    ]


def about_unfit_widths(rows: tuple[PlanRow, ...]) -> list[str]:
    """Warn of modules that no group size of their scheme fits: they stay in full precision."""
    kept = [row.module for row in rows if row.scheme is None and row.reason.startswith(UNFIT)]
    if not kept:
        return []
    return [
        f"{counted(len(kept), 'module stays', 'modules stay')} in full precision, since no group "
        f"size divides {'its' if len(kept) == 1 else 'their'} columns: {listed(kept)}"
    ]


def about_experts(
    config: QuantConfig, rows: tuple[PlanRow, ...], whole: Mapping[str, str]
) -> list[str]:
    """Warn of experts that stay in full precision only because no engine reads them one by one.

    And of those that a lossless conversion writes so nevertheless: `whole` has their modules.
    """
    apart = [row for row in rows if row.scheme is not None and whole.get(row.module)]
    if apart:
        return [
            f"{counted(len(apart), 'module of experts is', 'modules of experts are')} written one "
            "by one, as llm-compressor writes them; quantload reads that, but no serving engine: "
            f"{whole[apart[0].module]}; serve the source as it is"
        ]
    if config.default is None or config.default.weight is None:
        return []
    kept = [row for row in rows if row.scheme is None and whole.get(_parameter(row))]
    if not kept:
        return []
    total = sum(row.source_bytes for row in rows)
    share = sum(row.source_bytes for row in kept) / (total or 1)
    return [
        counted(len(kept), "parameter of experts stays", "parameters of experts stay")
        + f" in full precision ({share:.0%} of the weights' bytes), since "
        f"{whole[_parameter(kept[0])]}: {listed(_parameter(row) for row in kept)}"
    ]


def _parameter(row: PlanRow) -> str:
    return row.outputs[0].name


def about_requantizing(source: Source, rows: tuple[PlanRow, ...]) -> list[str]:
    """Warn of quantized weights that are rounded again, to another scheme."""
    again = [
        row
        for row in rows
        if row.scheme is not None
        and not row.keeps_values
        and row.read_from in source.weights
        and source.weights[row.read_from].is_quantized
    ]
    if not again:
        return []
    kinds = ", ".join(sorted({row.source for row in again}))
    return [
        f"{counted(len(again), 'module of the source is', 'modules of the source are')} already "
        f"quantized ({kinds}); quantizing {'it' if len(again) == 1 else 'them'} again adds to "
        f"{'its' if len(again) == 1 else 'their'} error"
    ]


def about_input_scales(source: Source, rows: tuple[PlanRow, ...]) -> list[str]:
    """Warn of fixed input scales that are not written."""
    kept = {row.read_from for row in rows if row.keeps_values or row.input_absmax is not None}
    dropped = {
        name: None
        for module, weight in source.weights.items()
        if module not in kept
        for leaf, name in weight.leaves.items()
        if is_of_input(leaf)
    }
    if not dropped:
        return []
    return [
        counted(
            len(dropped),
            "tensor of fixed input scales is left out",
            "tensors of fixed input scales are left out",
        )
        + ", since the output quantizes inputs while the model runs, or not at all: "
        + listed(dropped)
    ]


def about_transformers(rows: tuple[PlanRow, ...], facts: ModelFacts) -> list[str]:
    """Warn of what transformers 5.24 does not load, or loads with other values."""
    written = [(row.module, row.scheme) for row in rows if row.scheme is not None]
    packed = [
        module
        for module, scheme in written
        if facts.kinds.get(module) == "embedding" and written_format(scheme) == PACKED
    ]
    experts = [
        module for module, scheme in written if ".experts." in module and _has_global_scale(scheme)
    ]
    warnings = []
    if packed:
        warnings.append(
            f"{counted(len(packed), 'embedding is', 'embeddings are')} packed, which transformers "
            "loads only with "
            f"`CompressedTensorsConfig(dequantize=True)`: {listed(packed)}"
        )
    if experts:
        warnings.append(
            f"{counted(len(experts), 'expert is', 'experts are')} NVFP4, of which transformers "
            f"5.24 ignores the global scales: it computes wrong values: {listed(experts)}"
        )
    return warnings


def _has_global_scale(scheme: Scheme) -> bool:
    return scheme.weight is not None and scheme.weight.scale == "e4m3"
