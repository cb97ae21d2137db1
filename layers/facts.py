"""Facts about the modules of a checkpoint, from a probe of its transformers model.

The model is built without memory and run once on the meta device; what is found in model names is
told in checkpoint names. A model that cannot be built or probed is no error: then names decide, and
`origin` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from quantload.errors import ModelError
from quantload.layers.short_process import run_apart
from quantload.mappers.facts import (
    Kind,
    ModelFacts,
    facts_from_names,
    missing_layers,
    with_expert_groups,
)

if TYPE_CHECKING:
    from quantload.layers.meta_model import TransformersModel

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def probe_facts(
    config: Mapping[str, Any],
    folder: Path,
    parameters: Iterable[str],
    *,
    trust_remote_code: bool = False,
    meanwhile: Callable[[], None] | None = None,
) -> ModelFacts:
    """Return what is known about the modules of a checkpoint, in its names.

    Args:
        config: Content of config.json.
        folder: Folder of the checkpoint.
        parameters: Names of what it holds, as a checkpoint in full precision names it.
        trust_remote_code: Run model code that comes with the checkpoint.
        meanwhile: See `run_apart`.
    """
    names = list(parameters)
    return run_apart(
        lambda: _probe(config, folder, names, trust_remote_code=trust_remote_code),
        meanwhile=meanwhile,
    )


def _probe(
    config: Mapping[str, Any], folder: Path, names: list[str], *, trust_remote_code: bool
) -> ModelFacts:
    from quantload.layers.meta_model import build_on_meta  # transformers takes seconds to import

    by_name = facts_from_names(_weight_modules(names), tied_head=_ties_head(config))
    if missing_layers(config, names):
        return replace(by_name, origin=f"name table ({missing_layers(config, names)})")
    try:
        model = build_on_meta(
            config, folder, dtype=torch.bfloat16, trust_remote_code=trust_remote_code
        )
    except ModelError as error:
        return replace(by_name, origin=f"name table ({error.message})")
    return _facts(model, names, by_name)


def _facts(model: TransformersModel, names: list[str], by_name: ModelFacts) -> ModelFacts:
    from quantload.layers.siblings import find_siblings
    from quantload.layers.surgery import mapper_of

    siblings = find_siblings(model)
    mapper = mapper_of(model)
    in_checkpoint: dict[str, str] = {}  # model path -> checkpoint name
    held: dict[str, str] = {}  # the same of modules with a weight of their own
    for name in names:
        found = mapper.modules_of(name)
        if found is None:
            continue
        in_checkpoint.setdefault(found[1], found[0])
        if _is_weight(name):
            held[found[1]] = found[0]
    kinds = _kinds(model, in_checkpoint, by_name)
    groups = [
        tuple(in_checkpoint[path] for path in group)
        for group in siblings.groups
        if all(path in in_checkpoint for path in group)
    ]
    grouped = {name for group in groups for name in group}
    # experts that the model keeps in one tensor, layers that it does not have (prediction heads)
    unseen = set(by_name.kinds) - set(in_checkpoint.values())
    groups += [g for g in by_name.groups if unseen.issuperset(g) and not grouped.intersection(g)]
    failure = siblings.failure
    return ModelFacts(
        kinds=kinds,
        groups=with_expert_groups(groups, kinds),
        tied=_tied(model, held),
        aliases={name: (path,) for path, name in in_checkpoint.items() if path != name},
        origin=f"name table (the probe failed: {failure})" if failure else "model probe",
    )


def _kinds(
    model: TransformersModel, in_checkpoint: Mapping[str, str], by_name: ModelFacts
) -> dict[str, Kind]:
    from quantload.layers.meta_model import output_head

    head = output_head(model)
    kinds = {
        name: _kind_of(module, is_head=module is head)
        for path, name in in_checkpoint.items()
        if isinstance(getattr(module := model.get_submodule(path), "weight", None), torch.Tensor)
    }
    placed = set(in_checkpoint.values())
    return kinds | {name: kind for name, kind in by_name.kinds.items() if name not in placed}


def _kind_of(module: nn.Module, *, is_head: bool) -> Kind:
    if is_head:
        return "head"
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, nn.Embedding):
        return "embedding"
    return "convolution" if isinstance(module, _CONVOLUTIONS) else "other"


def _tied(model: TransformersModel, held: Mapping[str, str]) -> dict[str, str]:
    """Return tied modules that have no weight of their own in the checkpoint.

    Args:
        model: The probed model.
        held: Checkpoint names of modules that have one, by model path.
    """
    from quantload.layers.meta_model import tied_names

    tied = {}
    for alias, owner in tied_names(model).items():
        one, _, leaf = alias.rpartition(".")
        two = owner.rpartition(".")[0]
        if leaf == "weight" and one not in held and two in held:
            tied[one] = held[two]
        elif leaf == "weight" and two not in held and one in held:
            tied[two] = held[one]
    return tied


def _is_weight(name: str) -> bool:
    return name.endswith(".weight")


def _weight_modules(names: Iterable[str]) -> list[str]:
    return [name.rpartition(".")[0] for name in names if _is_weight(name)]


def _ties_head(config: Mapping[str, Any]) -> bool:
    text = config.get("text_config")
    inner = text.get("tie_word_embeddings") if isinstance(text, Mapping) else False
    return bool(config.get("tie_word_embeddings") or inner)
