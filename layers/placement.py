"""Hold the names of a checkpoint against the transformers model of its config."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from quantload.errors import ModelError
from quantload.mappers.facts import missing_layers
from quantload.mappers.placement import Placement


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
    from quantload.layers.meta_model import build_on_meta, tied_names  # transformers: seconds
    from quantload.layers.surgery import mapper_of

    names = list(parameters)
    if reason := missing_layers(config, names):
        return Placement(origin=reason)
    try:
        model = build_on_meta(
            config, folder, dtype=torch.bfloat16, trust_remote_code=trust_remote_code
        )
    except ModelError as error:
        return Placement(origin=error.message)
    mapper = mapper_of(model)
    found = {name: mapper.find(name) for name in names}
    filled = {target.name for target in found.values() if target is not None}
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


__all__ = ["place_names"]
