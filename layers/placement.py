"""Hold the names of a checkpoint against the transformers model of its config."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantload.errors import ModelError
from quantload.mappers.facts import missing_layers
from quantload.mappers.mapper import Route
from quantload.mappers.placement import Placement


@dataclass(frozen=True, slots=True)
class FusedRows:
    """The part of a fused layer that a member of it is.

    Args:
        stack: Dotted path of the fused layer in the loaded model.
        slot: Position among its members.
        slots: How many it has.
        rows: First row of its weight that is the member's, and the one behind the last.
        shape: [N, K] of the whole.
        note: Why it does not run as one product; "" if nothing in the headers keeps it from that.
    """

    stack: str
    slot: int
    slots: int
    rows: tuple[int, int]
    shape: tuple[int, int]
    note: str = ""

    def __str__(self) -> str:
        text = (
            f"rows {self.rows[0]}..{self.rows[1]} of {self.stack} {self.shape[0]}x{self.shape[1]}, "
            f"slot {self.slot} of {self.slots}"
        )
        return f"{text}; not one product: {self.note}" if self.note else text


def fused_rows(model: nn.Module) -> dict[str, FusedRows]:
    """Return which part of a fused layer each member is, by its path.

    Args:
        model: One whose layers wait for tensors, or that is loaded.
    """
    from quantload.layers.stack import LinearStack, StackView

    found = {}
    for path, view in model.named_modules():
        if isinstance(view, StackView):
            stack: LinearStack = view.__dict__["stack"]
            sizes = stack.sizes
            start = sum(sizes[: view.slot])
            found[path] = FusedRows(
                stack=stack.prefix,
                slot=view.slot,
                slots=len(sizes),
                rows=(start, start + sizes[view.slot]),
                shape=(sum(sizes), stack.in_features),
                note=stack.why_unlike,
            )
    return found


def place_names(
    config: Mapping[str, Any],
    folder: Path,
    parameters: Iterable[str],
    *,
    trust_remote_code: bool = False,
) -> Placement:
    """Find tensors without a place in the model, and parameters without a tensor.

    Args:
        config: Content of config.json.
        folder: Folder of the checkpoint.
        parameters: Names of what it holds, as a checkpoint in full precision names it.
        trust_remote_code: Run model code that comes with the checkpoint.

    Returns:
        Empty, with a reason, for models that transformers cannot build.
    """
    from quantload.layers.checkpoint_names import mapper_of  # transformers: seconds
    from quantload.layers.meta_model import build_on_meta, tied_names

    names = list(parameters)
    if reason := missing_layers(config, names):
        return Placement(origin=reason)
    try:
        model = build_on_meta(
            config, folder, dtype=torch.bfloat16, trust_remote_code=trust_remote_code
        )
    except ModelError as error:
        return Placement(origin=error.message)
    mapper = mapper_of(model, names)
    found = {name: mapper.find(name) for name in names}
    filled = {target.name for name in names for target in mapper.targets(name)}
    for alias, owner in tied_names(model).items():
        if alias in filled or owner in filled:
            filled |= {alias, owner}
    base = f"{model.base_model_prefix}."
    return Placement(
        unplaced=tuple(
            name for name in names if found[name] is None and mapper.why_dropped(name) is None
        ),
        unfilled=tuple(
            name for name, _ in model.named_parameters(remove_duplicate=False) if name not in filled
        ),
        without_prefix=tuple(
            name for name, target in found.items() if target and target.name == f"{base}{name}"
        ),
    )


def routes_of(
    config: Mapping[str, Any],
    folder: Path,
    parameters: Iterable[str],
    names: Iterable[str],
    *,
    trust_remote_code: bool = False,
) -> list[Route]:
    """Return where tensors go in the transformers model of a config, and by which rules.

    Args:
        config: Content of config.json.
        folder: Folder of the checkpoint.
        parameters: Names of what it holds, as a checkpoint in full precision names it.
        names: The tensors that are asked about; they need not be in the checkpoint.
        trust_remote_code: Run model code that comes with the checkpoint.

    Raises:
        ModelError: transformers cannot build the model.
    """
    from quantload.layers.checkpoint_names import mapper_of  # transformers: seconds
    from quantload.layers.meta_model import build_on_meta

    model = build_on_meta(config, folder, dtype=torch.bfloat16, trust_remote_code=trust_remote_code)
    mapper = mapper_of(model, list(parameters))
    return [mapper.route(name) for name in names]


__all__ = ["FusedRows", "fused_rows", "place_names", "routes_of"]
