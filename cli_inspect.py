"""What `quantload inspect` shows: each module's format, scheme, bits, and which entry decided."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from quantload.cli_output import (
    console,
    make_table,
    named_rows,
    print_json,
    shape_text,
    size,
)
from quantload.errors import QuantloadError
from quantload.loader.checkpoint import TensorEntry
from quantload.loader.source import Source
from quantload.mappers.mapper import Route

if TYPE_CHECKING:
    from quantload.layers.placement import FusedRows


def inspect_json(source: Source) -> dict[str, Any]:
    """Return what a checkpoint holds, for machines."""
    modules = [
        {
            "module": weight.module,
            "shape": list(weight.parameter_shape),
            "format": source.format_name if weight.is_quantized else "dense",
            "encoding": weight.encoding,
            "scheme": str(weight.scheme) if weight.scheme else None,
            "bits_per_weight": round(_bits(source, weight.module), 4),
            "bytes": _bytes(source, weight.module),
            "decided_by": weight.decided_by,
            "headers": {
                leaf: [name, *_header(source.checkpoint.tensors[name])]
                for leaf, name in weight.leaves.items()
            },
        }
        for weight in source.weights.values()
    ]
    return {
        "quantload_inspect": 1,
        "source": source.checkpoint.name,
        "format": source.format_name,
        "architectures": source.checkpoint.config.get("architectures"),
        "modules": modules,
        "plain": {
            entry.name: [str(entry.dtype)[6:], list(entry.shape)] for entry in source.plain.values()
        },
        "weight_bytes": sum(entry.num_bytes for entry in source.checkpoint.tensors.values()),
        "config_entries": dict(source.reader.entries),
        "warnings": list(source.warnings),
    }


def _header(entry: TensorEntry) -> tuple[str, list[int]]:
    """Return dtype (or GGUF type) and shape of a tensor."""
    return entry.block_type or str(entry.dtype).removeprefix("torch."), list(entry.shape)


def _bytes(source: Source, module: str) -> int:
    names = source.weights[module].leaves.values()
    return sum(source.checkpoint.tensors[name].num_bytes for name in names)


def _bits(source: Source, module: str) -> float:
    elements = math.prod(source.weights[module].parameter_shape)
    return 8 * _bytes(source, module) / max(1, elements)


def show_inspect(source: Source, *, every: bool = False) -> None:
    """Print what a checkpoint holds, as a table."""
    named = source.checkpoint.config.get("architectures")
    architectures = ", ".join(map(str, named)) if isinstance(named, list) and named else "?"
    table = make_table(
        f"{source.checkpoint.name}: {architectures}, format {source.format_name}",
        [
            *[("module", False), ("n", True), ("shape", False), ("holds", False)],
            *[("bits/weight", True), ("bytes each", True), ("decided by", False)],
        ],
    )
    rows = [
        (
            weight.module,
            (
                shape_text(weight.parameter_shape),
                weight.encoding,
                f"{_bits(source, weight.module):.2f}",
                str(_bytes(source, weight.module)),
                weight.decided_by.replace(weight.module, "exact name"),
            ),
        )
        for weight in source.weights.values()
    ]
    for cells in named_rows(rows, every):
        table.add_row(*cells)
    out = console()
    out.print(table)
    _show_entries(source, every=every)
    total = sum(entry.num_bytes for entry in source.checkpoint.tensors.values())
    out.print(f"{len(source.plain)} other tensors; {total} bytes ({size(total)}) of tensors in all")


def _show_entries(source: Source, *, every: bool) -> None:
    """Print on how many modules each entry of the config decides; single names only if `every`."""
    entries, left = source.reader.entries, 0
    for entry, count in entries.items():
        if every or count > 1 or not re.fullmatch(r"[\w.-]*", entry.partition(": ")[2]):
            console().print(f"{count:6} modules by `{entry}`")
        else:
            left += 1
    if left:
        console().print(f"{left:6} modules by their names")


def show_routes(
    source: Source, names: Sequence[str], *, as_json: bool, trust_remote_code: bool = False
) -> None:
    """Print where tensors go in the model of a checkpoint, rule by rule.

    Raises:
        ModelError: transformers cannot build the model.
    """
    from quantload.layers.placement import routes_of  # transformers: seconds

    checkpoint = source.checkpoint
    held = [weight.parameter_name for weight in source.weights.values()]
    routes = routes_of(
        checkpoint.config,
        checkpoint.folder,
        (*held, *source.plain),
        names,
        trust_remote_code=trust_remote_code,
    )
    fused, unknown = _fused(source, trust_remote_code=trust_remote_code)
    if as_json:
        listed = [_route_json(route, source, fused) for route in routes]
        print_json({"quantload_routes": 1, "routes": listed, "fused_unknown": unknown})
        return
    out = console()
    for route in routes:
        out.print(f"{route.name}: {_stored(route.name, source)}", markup=False, highlight=False)
        for step in route.steps:
            out.print(f"    {step}", markup=False, highlight=False)
        end = ", ".join(str(target) for target in route.targets)
        reason = f"{'left out' if route.is_dropped else 'nowhere'}: {route.reason}"
        out.print(f"    = {end or reason}", markup=False, highlight=False)
        for target in route.targets:
            if target.module in fused:
                out.print(f"    loaded as {fused[target.module]}", markup=False, highlight=False)
    if unknown:
        out.print(f"fused layers are not known: {unknown}", markup=False, highlight=False)


def _fused(source: Source, *, trust_remote_code: bool) -> tuple[Mapping[str, FusedRows], str]:
    """Return the members of fused layers by path; or why they are not known."""
    from quantload.api_load import fused_rows

    try:
        return fused_rows(source, trust_remote_code=trust_remote_code), ""
    except QuantloadError as error:  # a checkpoint that cannot be loaded has ways all the same
        return {}, error.message


def _stored(name: str, source: Source) -> str:
    """Say what the checkpoint holds under a name."""
    tensors = source.checkpoint.tensors
    owner = next((w for w in source.weights.values() if name in w.leaves.values()), None)
    if name in tensors:
        dtype, shape = _header(tensors[name])
        said = f"{dtype} {shape_text(tuple(shape))}"
        return said if owner is None else f"{said}, of the {owner.encoding} weight {owner.module}"
    return "not in the checkpoint"


def _route_json(route: Route, source: Source, fused: Mapping[str, FusedRows]) -> dict[str, Any]:
    return {
        "name": route.name,
        "in_checkpoint": route.name in source.checkpoint.tensors,
        "steps": list(route.steps),
        "targets": [
            {
                "module": t.module,
                "leaf": t.leaf,
                "slot": t.slot,
                "text": str(t),
                "fused": asdict(fused[t.module]) if t.module in fused else None,
            }
            for t in route.targets
        ],
        "reason": route.reason,
        "left_out": route.is_dropped,
    }
