"""Which linear layers read the same tensor: found by one forward of the model on the meta device.

q, k and v of an attention block, gate and up of an MLP: the model's code hands each of them the
same tensor object. A hook on every linear layer sees it, whatever the architecture's source looks
like. The forward allocates nothing and takes some milliseconds a layer.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quantload.layers.meta_forward import run_mixed, run_on_meta
from quantload.layers.meta_model import TransformersModel, dummy_inputs, without_attention
from quantload.layers.quick_meta import QuickMeta
from quantload.mappers.facts import groups_from_names

Group = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Siblings:
    """Linear layers that read the same input, by model name.

    Args:
        proven: Groups of one parent module, seen in a forward. Nothing writes to the shared input
            between the first and the last member.
        guessed: Groups that only their names suggest, of layers that the forward did not reach.
        wider: Groups across modules, seen as well: q, k, v, gate and up where attention and MLP
            read one tensor. Each holds whole groups of `proven`, or single layers beside them.
        scopes: Module in whose forward all members of a group are called, where that is not the
            parent of all.
        failure: Why the forward could not be run to its end; "" if it ran.
    """

    proven: tuple[Group, ...] = ()
    guessed: tuple[Group, ...] = ()
    wider: tuple[Group, ...] = ()
    scopes: Mapping[Group, str] = field(default_factory=dict)
    failure: str = ""

    @property
    def groups(self) -> tuple[Group, ...]:
        """Groups of one parent each: what serving engines fuse."""
        return self.proven + self.guessed

    @property
    def widest(self) -> tuple[Group, ...]:
        """Groups as large as they come: what one product can compute."""
        inside = {name for group in self.wider for name in group}
        return self.wider + tuple(g for g in self.groups if inside.isdisjoint(g))

    def is_proven(self, group: Group) -> bool:
        """True if a forward has shown that the members read one tensor, unchanged."""
        return group in self.proven or group in self.wider

    def scope_of(self, group: Group) -> str:
        """Return the module in whose forward all members are called."""
        return self.scopes.get(group, group[0].rpartition(".")[0])


@dataclass
class _Recording:
    """Calls of one forward.

    Args:
        inputs: Keeps every input alive, so that its id stays its own.
        calls: Inputs of each linear layer in order, by id and version.
        entered: Modules whose forward ran.
    """

    inputs: list[Tensor] = field(default_factory=list)
    calls: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    entered: set[str] = field(default_factory=set)

    def note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note a call of a linear layer; a write to its input since raises the version."""
        x = args[0] if args else kwargs["input"]
        self.inputs.append(x)
        self.calls.setdefault(name, []).append((id(x), x._version))


def is_plain_linear(module: nn.Module) -> bool:
    """True if the module computes what nn.Linear does; subclasses may have another forward."""
    return isinstance(module, nn.Linear) and _multiplies_only(type(module))  # type: ignore[arg-type]  # torch types it so


@functools.cache
def _multiplies_only(kind: type[nn.Linear]) -> bool:
    """True for nn.Linear, and for a subclass whose forward is tried and found to do the same.

    Falcon's writes the product out. A subclass with attributes of its own is never tried.
    """
    if kind.forward is nn.Linear.forward:
        return True
    if kind.__init__ is not nn.Linear.__init__:
        return False
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 5, generator=generator)
    for bias in (True, False):
        linear = kind(5, 4, bias=bias)
        for parameter in linear.parameters():
            parameter.data.normal_(generator=generator)
        try:
            with torch.no_grad():
                found = linear(x)
        except Exception:  # noqa: BLE001 - it wants something else than one tensor
            return False
        expected = nn.functional.linear(x, linear.weight, linear.bias)
        if found.shape != expected.shape or not torch.allclose(found, expected, atol=1e-5):
            return False
    return True


def find_siblings(model: TransformersModel) -> Siblings:
    """Run the model once on the meta device and group the linear layers that read one tensor.

    Members of a group have at least two rows and read the same tensors, call by call; they come in
    the order of their calls. Layers that the forward does not reach are grouped by their names.
    """
    linears = {name: m for name, m in model.named_modules() if is_plain_linear(m)}
    recording, failure = _record(model, linears)
    proven, wider, scopes = _groups(recording, linears)
    rest = [name for name in linears if name not in recording.calls]
    return Siblings(
        proven=tuple(proven),
        guessed=groups_from_names(_wide(rest, linears)),
        wider=tuple(wider),
        scopes=scopes,
        failure=failure,
    )


def _wide(names: Iterable[str], linears: dict[str, nn.Module]) -> list[str]:
    """Leave out gates of one row: they gain nothing and would misalign a stack."""
    return [name for name in names if getattr(linears[name], "out_features", 0) > 1]


def _record(model: TransformersModel, linears: dict[str, nn.Module]) -> tuple[_Recording, str]:
    """Run the model as cheaply as its code allows; return what was seen and why it ended early.

    What was seen before an error stays true.
    """
    best, failure = _Recording(), ""
    for masks, run in ((False, run_on_meta), (True, run_mixed), (False, run_mixed)):
        recording = _Recording()
        try:
            hooks, quick = _Hooks(model, linears, recording), QuickMeta()  # type: ignore[no-untyped-call]
            with quick, hooks, without_attention(model, masks=masks):
                run(model, {**dummy_inputs(model), "use_cache": False})
        except Exception as error:  # noqa: BLE001 - model code raises anything
            if not failure or len(recording.calls) > len(best.calls):
                best, failure = recording, f"{type(error).__name__}: {error}"
        else:
            return recording, ""
    return best, failure


class _Hooks:
    """Hooks on every module, taken away again."""

    def __init__(
        self, model: nn.Module, linears: dict[str, nn.Module], recording: _Recording
    ) -> None:
        self.model, self.linears, self.recording = model, linears, recording

    def __enter__(self) -> None:
        note, entered = self.recording.note, self.recording.entered
        self.handles = [
            module.register_forward_pre_hook(lambda *_, name=name: entered.add(name))
            for name, module in self.model.named_modules()
        ]
        self.handles += [
            linear.register_forward_pre_hook(
                lambda _, args, kwargs, name=name: note(name, args, kwargs), with_kwargs=True
            )
            for name, linear in self.linears.items()
        ]

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()


def _groups(
    recording: _Recording, linears: dict[str, nn.Module]
) -> tuple[list[Group], list[Group], dict[Group, str]]:
    """Return groups of one parent, groups across modules, and scopes that are no parents."""
    alike: dict[tuple[tuple[int, int], ...], list[str]] = {}
    for name in _wide(recording.calls, linears):
        alike.setdefault(tuple(recording.calls[name]), []).append(name)
    proven: list[Group] = []
    wider: list[Group] = []
    scopes: dict[Group, str] = {}
    for names in alike.values():
        by_parent: dict[str, list[str]] = {}
        for name in names:
            by_parent.setdefault(name.rpartition(".")[0], []).append(name)
        for parent, members in by_parent.items():
            scope = _entered(parent, recording.entered)
            if len(members) > 1 and scope is not None:
                proven.append(tuple(members))
                if scope != parent:
                    scopes[tuple(members)] = scope
        common = _common(list(by_parent))
        if len(by_parent) > 1 and common in recording.entered and common:
            wider.append(tuple(names))
            scopes[tuple(names)] = common
    return proven, wider, scopes


def _entered(path: str, entered: set[str]) -> str | None:
    """Return the nearest module from `path` upwards whose forward ran, as a list's never does."""
    while path not in entered:
        if not path:
            return None
        path = path.rpartition(".")[0]
    return path


def _common(paths: list[str]) -> str:
    """Return the path of the nearest module that holds all of these."""
    parts = [path.split(".") for path in paths]
    shared = 0
    while all(len(p) > shared for p in parts) and len({p[shared] for p in parts}) == 1:
        shared += 1
    return ".".join(parts[0][:shared])
