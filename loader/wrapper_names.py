"""What wrappers of a model leave in the names of its tensors, and the names without it.

    torch.compile                   `_orig_mod`, before the names of whatever was compiled
    FSDP, activation checkpoints    `_fsdp_wrapped_module`, `_checkpoint_wrapped_module`, likewise
    DistributedDataParallel         `module` before all names; DataParallel and DeepSpeed, too

Components of the first three are no names of anything else, and are taken off wherever they stand.
`module` is a word that models use: it is taken off in front of all names, and only where what
follows begins as names of transformers' models do, or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from quantload.errors import CheckpointError, counted, listed
from quantload.loader.weight_files import Weights

_ANYWHERE = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_IN_FRONT = "module."
_ROOTS = frozenset(
    ("model", "transformer", "backbone", "language_model", "gpt_neox", "decoder", "encoder", "bert",
     "roberta", "rwkv", "biogpt", "lm_head", "embed_out")
)  # fmt: skip
"""First components of names in models of transformers."""
_UNWRAP = "save the model itself: `model.module`, or `model._orig_mod`, in place of its wrapper"


@dataclass(frozen=True)
class Wrappers:
    """What is taken off names.

    Args:
        found: The components, in the order of this file's table.
        is_in_front: How many `module` stand in front of all names.
    """

    found: tuple[str, ...] = ()
    is_in_front: int = 0

    @property
    def shown(self) -> str:
        """The components, as they could stand in a name; "" if there are none."""
        return "".join(f"{part}." for part in (*self.found, *["module"] * self.is_in_front))

    def taken_off(self, name: str) -> str:
        """Return a name without them; any other text as it is."""
        if any(component in name for component in self.found):
            name = ".".join(part for part in name.split(".") if part not in self.found)
        for _ in range(self.is_in_front):
            name = name.removeprefix(_IN_FRONT)
        return name


def find_wrappers(names: Iterable[str]) -> Wrappers:
    """Return what wrappers have left in the names of all tensors of a checkpoint."""
    names = list(names)
    found = {p for name in names for p in _ANYWHERE if p in name and p in name.split(".")}
    wrappers = Wrappers(tuple(part for part in _ANYWHERE if part in found))
    plain = [wrappers.taken_off(name) for name in names]
    depth = 0
    while plain and all(name.startswith(_IN_FRONT) for name in plain):
        depth += 1
        plain = [name.removeprefix(_IN_FRONT) for name in plain]
    is_known = any(name.split(".", 1)[0] in _ROOTS for name in plain)
    return replace(wrappers, is_in_front=depth if is_known else 0)


def without_wrappers(weights: Weights, folder: str) -> tuple[Weights, Wrappers]:
    """Return the tensors of a folder under the names that they have in the model itself.

    Args:
        weights: What was read; its warnings say what was taken off, and what was not.
        folder: For messages.

    Raises:
        CheckpointError: Two tensors would have one name.
    """
    wrappers = find_wrappers(weights.tensors)
    if not wrappers.shown:
        return replace(weights, warnings=[*weights.warnings, *_about_some(weights)]), wrappers
    names = {name: wrappers.taken_off(name) for name in weights.tensors}
    if len(set(names.values())) < len(names):
        twice = sorted(name for name, new in names.items() if new != name and new in names)
        raise CheckpointError(
            f"tensors are there with and without `{wrappers.shown}` in their names: "
            f"{listed(twice or names)}, in `{folder}`",
            hint=f"it is what a wrapper of the model leaves there; {_UNWRAP}",
        )
    taken = (
        f"`{wrappers.shown}` taken off the names of "
        f"{counted(sum(name != new for name, new in names.items()), 'tensor')}: the model was "
        f"saved inside of a wrapper (torch.compile, DistributedDataParallel or another)"
    )
    unwrapped = Weights(
        tensors={new: replace(weights.tensors[name], name=new) for name, new in names.items()},
        texts={
            file: {wrappers.taken_off(key): text for key, text in texts.items()}
            for file, texts in weights.texts.items()
        },
        warnings=[*weights.warnings, taken],
    )
    unwrapped.warnings += _about_some(unwrapped)
    return unwrapped, wrappers


def names_in_config(value: Any, take_off: Callable[[str], str]) -> Any:  # noqa: ANN401 - JSON
    """Return a quantization config that names modules as its tensors are named now."""
    if isinstance(value, Mapping):
        return {take_off(str(key)): names_in_config(part, take_off) for key, part in value.items()}
    if isinstance(value, list):
        return [names_in_config(part, take_off) for part in value]
    return take_off(value) if isinstance(value, str) else value


def about_wrapped(names: Iterable[str], taken_off: str = "") -> list[str]:
    """Return a hint for names that the model does not have, if a wrapper may have left some.

    Args:
        names: As they were read.
        taken_off: What was taken off the names of the checkpoint.
    """
    if taken_off:
        return [
            f"`{taken_off}` was taken off all names, as what a wrapper of the model leaves there"
        ]
    wrapped = any("module" in name.split(".") for name in names)
    return [f"`module` is what a wrapper of the model leaves in names: {_UNWRAP}"] * wrapped


def _about_some(weights: Weights) -> list[str]:
    """Tell of `module.` in front of names that keep it, since it may be a name of the model's."""
    some = [name for name in weights.tensors if name.startswith(_IN_FRONT)]
    if not some:
        return []
    others = "since others have not"
    if len(some) == len(weights.tensors):
        others = "since what follows is no name of a model of transformers"
    return [
        f"{len(some)} of {len(weights.tensors)} tensors have names that begin with `{_IN_FRONT}`, "
        f"as wrappers leave them; {others}, they keep them: {listed(some, limit=2)}"
    ]


__all__ = ["Wrappers", "about_wrapped", "find_wrappers", "names_in_config", "without_wrappers"]
