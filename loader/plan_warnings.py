"""What the user should know about a plan: one function for each kind of warning."""

from __future__ import annotations

from quantload.errors import listed
from quantload.loader.formats.compressed_tensors_arguments import PACKED, written_format
from quantload.loader.plan_row import PlanRow
from quantload.loader.source import Source
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
    return [f"{count} quantized modules of the source become full precision: no scheme covers them"]


def about_unlike_members(
    rows: tuple[PlanRow, ...], groups: tuple[tuple[str, ...], ...]
) -> list[str]:
    """Warn of fused groups that keep the different schemes of the source."""
    schemes = {row.module: row.scheme for row in rows}
    unlike = [group for group in groups if len({schemes.get(m) for m in group if m in schemes}) > 1]
    if not unlike:
        return []
    return [
        f"{len(unlike)} fused groups have members in different schemes, as in the source; engines "
        f"that fuse them may not load that: {listed(', '.join(group) for group in unlike)}"
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
        f"{partial} modules have widths that are no multiples of the block; vLLM does not load "
        "such FP8 blocks"
    ]


def about_unfit_widths(rows: tuple[PlanRow, ...]) -> list[str]:
    """Warn of modules that no group size of their scheme fits: they stay in full precision."""
    kept = [row.module for row in rows if row.scheme is None and row.reason.startswith(UNFIT)]
    if not kept:
        return []
    return [
        f"{len(kept)} modules stay in full precision, since no group size divides their columns: "
        f"{listed(kept)}"
    ]


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
        f"{len(again)} modules of the source are already quantized ({kinds}); quantizing them "
        "again adds to their error"
    ]


def about_input_scales(source: Source, rows: tuple[PlanRow, ...]) -> list[str]:
    """Warn of fixed input scales that are not written."""
    kept = {row.read_from for row in rows if row.keeps_values}
    dropped = [
        name
        for module, weight in source.weights.items()
        if module not in kept
        for leaf, name in weight.leaves.items()
        if "input" in leaf or "activation" in leaf
    ]
    if not dropped:
        return []
    return [
        f"{len(dropped)} tensors of fixed input scales are left out, since the output "
        f"quantizes inputs while the model runs, or not at all: {listed(dropped)}"
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
            f"{len(packed)} embeddings are packed, which transformers loads only with "
            f"`CompressedTensorsConfig(dequantize=True)`: {listed(packed)}"
        )
    if experts:
        warnings.append(
            f"{len(experts)} experts are NVFP4, of which transformers 5.24 ignores the global "
            f"scales: it computes wrong values: {listed(experts)}"
        )
    return warnings


def _has_global_scale(scheme: Scheme) -> bool:
    return scheme.weight is not None and scheme.weight.scale == "e4m3"
