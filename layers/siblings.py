"""Which linear layers read the same tensor: found by one forward of the model on the meta device.

q, k and v of an attention block, gate and up of an MLP: the model's code hands each of them the
same tensor object. A hook on every linear layer sees it, whatever the architecture's source looks
like. The forward allocates nothing and takes some milliseconds a layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantload.layers.meta_model import TransformersModel, dummy_inputs, without_attention
from quantload.mappers.facts import groups_from_names


@dataclass(frozen=True, kw_only=True)
class Siblings:
    """Linear layers that read the same input, by model name.

    Args:
        proven: Groups seen in a forward. Nothing writes to the shared input between the first and
            the last member.
        guessed: Groups that only their names suggest, of layers that the forward did not reach.
        failure: Why the forward could not be run; "" if it ran.
    """

    proven: tuple[tuple[str, ...], ...] = ()
    guessed: tuple[tuple[str, ...], ...] = ()
    failure: str = ""

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """All groups."""
        return self.proven + self.guessed


def is_plain_linear(module: nn.Module) -> bool:
    """True if the module computes what nn.Linear does; subclasses may have another forward."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def find_siblings(model: TransformersModel) -> Siblings:
    """Run the model once on the meta device and group the linear layers that read one tensor.

    Members of a group have the same parent module and at least two rows, and are called exactly
    once; they come in the order of their calls. Where the forward raises, names decide.
    """
    linears = {name: m for name, m in model.named_modules() if is_plain_linear(m)}
    try:
        calls = _record_calls(model, linears)
    except Exception as error:  # noqa: BLE001 - model code raises anything
        return Siblings(
            guessed=groups_from_names(_wide(linears, linears)),
            failure=f"{type(error).__name__}: {error}",
        )
    called = {name for names in calls for name in names}
    rest = [name for name in linears if name not in called]
    return Siblings(
        proven=tuple(_groups(calls, linears)), guessed=groups_from_names(_wide(rest, linears))
    )


def _wide(names: Iterable[str], linears: dict[str, nn.Module]) -> list[str]:
    """Leave out gates of one row: they gain nothing and would misalign a stack."""
    return [name for name in names if getattr(linears[name], "out_features", 0) > 1]


def _record_calls(model: TransformersModel, linears: dict[str, nn.Module]) -> list[list[str]]:
    """Return the names of the linears that read each input, by input, in order of calls."""
    inputs: list[Tensor] = []  # keeps every input alive, so that its id stays its own
    calls: dict[tuple[int, int], list[str]] = {}

    def note(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs["input"]
        inputs.append(x)
        # an in-place write between two calls raises the version: those two are no siblings
        calls.setdefault((id(x), x._version), []).append(name)

    handles = [
        linear.register_forward_pre_hook(
            lambda _, args, kwargs, name=name: note(name, args, kwargs), with_kwargs=True
        )
        for name, linear in linears.items()
    ]
    try:
        run_on_meta(model)
    finally:
        for handle in handles:
            handle.remove()
    return list(calls.values())


def run_on_meta(model: TransformersModel) -> None:
    """Run a model once without computing: whatever its parameters are on, nothing is allocated."""
    # bfloat16, since grouped matrix products on the meta device want it
    tensors = {
        name: torch.empty_like(
            tensor,
            device="meta",
            dtype=torch.bfloat16 if tensor.is_floating_point() else tensor.dtype,
        )
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    with torch.no_grad(), without_attention(model):
        torch.func.functional_call(
            model, tensors, kwargs={**dummy_inputs(model), "use_cache": False}
        )


def _groups(calls: list[list[str]], linears: dict[str, nn.Module]) -> list[tuple[str, ...]]:
    times = Counter(name for names in calls for name in names)
    groups = []
    for names in calls:
        by_parent: dict[str, list[str]] = {}
        for name in _wide(names, linears):
            if times[name] == 1:
                by_parent.setdefault(name.rpartition(".")[0], []).append(name)
        groups += [tuple(members) for members in by_parent.values() if len(members) > 1]
    return groups
