"""Facts about the modules of a checkpoint, from a probe of its transformers model.

The model is built without memory and run once on the meta device; what is found in model names is
told in checkpoint names. A model that cannot be built or probed is no error: then names decide, and
`origin` says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from quantload.errors import ModelError
from quantload.layers.short_process import Ask, begin_apart, warm_copy
from quantload.mappers.default_keeps import reason_to_keep
from quantload.mappers.facts import (
    Kind,
    ModelFacts,
    facts_from_names,
    missing_layers,
    with_expert_groups,
)

if TYPE_CHECKING:
    from quantload.layers.meta_model import TransformersModel
    from quantload.mappers.mapper import WeightMapper

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """What the model of a checkpoint shows, in checkpoint names.

    Args:
        kinds: Kind of each module that owns a weight.
        placed: Every module with a tensor that has its place in the model.
        groups: Linear layers that read the same input.
        tied: See `ModelFacts`.
        aliases: See `ModelFacts`.
        failure: Why the model could not be run; "" if it ran.
    """

    kinds: dict[str, Kind]
    placed: frozenset[str]
    groups: list[tuple[str, ...]]
    tied: dict[str, str]
    aliases: dict[str, tuple[str, ...]]
    failure: str


def probe_facts(
    config: Mapping[str, Any],
    folder: Path,
    parameters: Iterable[str],
    *,
    trust_remote_code: bool = False,
    meanwhile: Callable[[], None] | None = None,
    ask: Ask | None = None,
) -> ModelFacts:
    """Return what is known about the modules of a checkpoint, in its names.

    Args:
        config: Content of config.json.
        folder: Folder of the checkpoint.
        parameters: Names of what it holds, as a checkpoint in full precision names it.
        trust_remote_code: Run model code that comes with the checkpoint.
        meanwhile: What will be needed later, such as an import; is done beside the probe.
        ask: Asks a copy of this process that is ready for it, from `ready_to_probe`.
    """
    names = list(parameters)
    missing = missing_layers(config, names)
    seen: Callable[[], _Seen | str]
    if missing:
        seen = lambda: missing  # noqa: E731 - as short as it is
    elif ask is not None:
        seen = ask(_probe, dict(config), folder, names, trust_remote_code)
    else:
        seen = begin_apart(lambda: _probe(config, folder, names, trust_remote_code))
    by_name = facts_from_names(_weight_modules(names), tied_head=_ties_head(config))
    if meanwhile is not None:
        meanwhile()
    return _joined(by_name, seen())


def ready_to_probe() -> AbstractContextManager[Ask]:
    """Start a copy of this process that imports the model code while a checkpoint is opened."""
    return warm_copy(_import_model_code)


def _import_model_code() -> None:
    import quantload.layers.meta_model
    import quantload.layers.surgery  # noqa: F401


def _probe(
    config: Mapping[str, Any], folder: Path, names: list[str], trust_remote_code: bool
) -> _Seen | str:
    """Return what the model shows, or why there is none."""
    from quantload.layers.meta_model import build_on_meta  # transformers takes seconds to import
    from quantload.layers.siblings import find_siblings
    from quantload.layers.surgery import mapper_of

    try:
        model = build_on_meta(
            config, folder, dtype=torch.bfloat16, trust_remote_code=trust_remote_code
        )
    except ModelError as error:
        return error.message
    siblings = find_siblings(model)
    in_checkpoint: dict[str, str] = {}  # model path -> checkpoint name
    held: dict[str, str] = {}  # the same of modules with a weight of their own
    for name, module, path in _places(mapper_of(model, names), model, names):
        in_checkpoint.setdefault(path, module)
        if _is_weight(name):
            held[path] = module
    return _Seen(
        kinds=_kinds(model, in_checkpoint),
        placed=frozenset(in_checkpoint.values()),
        groups=list(_fused(siblings.groups, in_checkpoint)),
        tied=_tied(model, held),
        aliases={name: (path,) for path, name in in_checkpoint.items() if path != name},
        failure=siblings.failure,
    )


def _fused(
    groups: Iterable[tuple[str, ...]], in_checkpoint: Mapping[str, str]
) -> Iterator[tuple[str, ...]]:
    """Yield what engines fuse of layers that read one input: no router or small projection."""
    for group in groups:
        if all(path in in_checkpoint for path in group):
            names = [in_checkpoint[path] for path in group]
            members = tuple(name for name in names if reason_to_keep(name, "linear") is None)
            if len(members) > 1:
                yield members


def _places(
    mapper: WeightMapper, model: TransformersModel, names: Iterable[str]
) -> Iterator[tuple[str, str, str]]:
    """Yield (name, module in the checkpoint, module in the model) of tensors with such a module.

    Where the model keeps all experts in one parameter, no single expert has a module: one that has
    none then stands for its like, since a checkpoint may have a hundred thousand of them.
    """
    has_modules = any(_EXPERT.search(path) for path, _ in model.named_modules())
    nowhere: set[str] = set()
    for name in names:
        kind = _EXPERT.sub(".experts.", name, count=1) if ".experts." in name else name
        if kind in nowhere:
            continue
        found = mapper.modules_of(name)
        if found is not None:
            yield (name, *found)
        elif kind != name and not has_modules:
            nowhere.add(kind)


def _joined(by_name: ModelFacts, seen: _Seen | str) -> ModelFacts:
    """Join what names say with what a model shows, or with the reason why there is none."""
    if isinstance(seen, str):
        return replace(by_name, origin=f"name table ({seen})")
    kinds = seen.kinds | {m: kind for m, kind in by_name.kinds.items() if m not in seen.placed}
    grouped = {name for group in seen.groups for name in group}
    # experts that the model keeps in one tensor, layers that it does not have (prediction heads)
    unseen = by_name.kinds.keys() - seen.placed
    groups = [
        *seen.groups,
        *(g for g in by_name.groups if unseen.issuperset(g) and grouped.isdisjoint(g)),
    ]
    failure = seen.failure
    return ModelFacts(
        kinds=kinds,
        groups=with_expert_groups(groups, kinds),
        tied=seen.tied,
        aliases=seen.aliases,
        origin=f"name table (the probe failed: {failure})" if failure else "model probe",
    )


def _kinds(model: TransformersModel, in_checkpoint: Mapping[str, str]) -> dict[str, Kind]:
    from quantload.layers.meta_model import output_head

    head = output_head(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    return {
        name: _kind_of(modules[path], is_head=modules[path] is head)
        for path, name in in_checkpoint.items()
        if isinstance(getattr(modules[path], "weight", None), torch.Tensor)
    }


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
