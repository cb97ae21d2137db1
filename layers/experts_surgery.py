"""Replace the experts of a meta model by ours, from outside, block by block.

A block with a quantized expert, or of a model that several processes share, becomes `FusedExperts`
if that is proven to compute the same. Any other block stays the model's own: its experts are then
in full precision, whatever the checkpoint has, and the report says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from quantload.layers.experts import FusedExperts, Key, Mode
from quantload.layers.experts_layout import holds_experts, layout_of
from quantload.layers.experts_proof import fused_experts
from quantload.mappers.mapper import WeightMapper
from quantload.mappers.targets import Target
from quantload.quant.scheme import Scheme
from quantload.runtime.parallel import Parallel

_NOTE = "note_on_experts"  # attribute of a module that stays although it should not
_TIED = "its weights are those of another block as well"
OWN = "transformers"


class CheckpointWeight(Protocol):
    """What a checkpoint says of a weight."""

    @property
    def parameter_name(self) -> str:
        """Name of the parameter in full precision."""


@dataclass(frozen=True, kw_only=True)
class ExpertsReport:
    """How experts of a loaded block run, as far as they run alike.

    Args:
        module: Dotted path of their parameter in the model.
        experts: How many.
        scheme: How their weights and inputs are quantized.
        kernel: Name of the kernel.
        refused: (kernel, reason) of the kernels before it in the table.
        note: What differs from the scheme, "" if nothing does.
    """

    module: str
    experts: int
    scheme: str
    kernel: str
    refused: tuple[tuple[str, str], ...] = ()
    note: str = ""


def _schemes_of_experts(
    model: nn.Module,
    mapper: WeightMapper,
    schemes: Mapping[str, Scheme],
    weights: Mapping[str, CheckpointWeight],
) -> dict[str, dict[Key, Scheme]]:
    """Return {path of a block's experts: {(leaf, slot): scheme}} of its quantized weights."""
    found: dict[str, dict[Key, Scheme]] = {}
    for name, scheme in schemes.items():
        for target in mapper.targets(weights[name].parameter_name):
            module = model.get_submodule(target.module)
            if holds_experts(module):
                keys = _slots(module, target)
                found.setdefault(target.module, {}).update(dict.fromkeys(keys, scheme))
    return found


def _slots(module: nn.Module, target: Target) -> list[Key]:
    """Return the slots of a block's experts that a tensor fills: one, or those of all experts."""
    if target.piece is not None:
        return [(target.leaf, target.piece.expert * target.piece.parts + target.piece.part)]
    layout = layout_of(module)
    if isinstance(layout, str):
        return [(target.leaf, 0)]
    count = layout.experts * layout.projection(target.leaf).parts
    return [(target.leaf, slot) for slot in range(count)]


def replace_experts(
    model: nn.Module,
    mapper: WeightMapper,
    schemes: Mapping[str, Scheme],
    weights: Mapping[str, CheckpointWeight],
    *,
    dtype: torch.dtype,
    parallel: Parallel | None = None,
    mode: Mode | None = None,
) -> dict[str, str]:
    """Put our experts into the model.

    Args:
        model: A model on the meta device.
        mapper: Knows the names of this model, as it is built.
        schemes: Scheme of each quantized module, by its name in the checkpoint; a parameter of all
            experts gives its scheme to each of them.
        weights: The modules of the checkpoint by name.
        dtype: dtype of activations.
        parallel: This process among those that share the model.
        mode: What each of them holds of a block, see `FusedExperts`.

    Returns:
        Why blocks stay the model's own that should not: {path: reason}.
    """
    of_blocks = _schemes_of_experts(model, mapper, schemes, weights)
    is_shared = parallel is not None and parallel.tp_size > 1
    blocks = [path for path, module in model.named_modules() if holds_experts(module)]
    tied = set(_tied_blocks(model, blocks)) - of_blocks.keys()
    refused: dict[str, str] = {}
    for path in blocks:
        if path not in of_blocks and not is_shared:
            continue
        module = model.get_submodule(path)
        ours: FusedExperts | str = _TIED
        if path not in tied:
            ours = fused_experts(
                module,
                schemes=of_blocks.get(path, {}),
                dtype=dtype,
                prefix=path,
                parallel=parallel,
                mode=mode,
            )
        if isinstance(ours, str):
            refused[path] = ours
            parts = ["dequantized"] if path in of_blocks else []
            parts += ["held whole by every rank"] if is_shared else []
            note = f"{' and '.join(parts)}, since its block stays that of the model: {ours}"
            setattr(module, _NOTE, note)
            continue
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, ours.eval())
    return refused


def _tied_blocks(model: nn.Module, blocks: Iterable[str]) -> Iterator[str]:
    """Yield blocks with a weight that is another block's as well; full precision keeps it one."""
    users = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    for path in blocks:
        parameters = model.get_submodule(path).parameters(recurse=False)
        if any(users[id(parameter)] > 1 for parameter in parameters):
            yield path


def note_on(module: nn.Module) -> str:
    """Return why a block stays the model's own although it should not; "" if all is well."""
    return str(getattr(module, _NOTE, ""))


def explain_experts(path: str, module: nn.Module) -> list[ExpertsReport]:
    """Return how the experts of a block of a loaded model run; none if the module holds none."""
    if isinstance(module, FusedExperts):
        return list(_of_ours(path, module))
    if not holds_experts(module):
        return []
    note = note_on(module)
    parameters = module.named_parameters(recurse=False)
    return [
        ExpertsReport(
            module=f"{path}.{leaf}",
            experts=parameter.shape[0],
            scheme="dense",
            kernel=OWN,
            note=note,
        )
        for leaf, parameter in parameters
        if parameter.ndim == 3
    ]


def _of_ours(path: str, module: FusedExperts) -> Iterator[ExpertsReport]:
    for leaf, choice in module.choices.items():
        for (scheme, kernel, note), experts in choice.reports.items():
            yield ExpertsReport(
                module=f"{path}.{leaf}",
                experts=experts,
                scheme=scheme,
                kernel=kernel.name,
                refused=kernel.refused,
                note=note,
            )


__all__ = ["ExpertsReport", "explain_experts", "note_on", "replace_experts"]
