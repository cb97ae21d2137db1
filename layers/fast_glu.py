"""Gated linear units in fewer passes, recognised by what they compute.

A module with linear layers is run on random tensors, with stand-ins in place of its linear layers:
they take note of what they are given and return noise. It is a gated linear unit if

    gate and up are given the module's own input, each once       or one layer that holds both
    down is given the bits of act(gate) * up, for an act that the module has, or a usual one
    what down returns is what the module returns

What then runs is one product for gate and up where they are one weight, and the same two
operations, the second in place; on CUDA one kernel. The module's own forward remains for everything
else: other arguments, training, compiled code.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quantload.layers.stack import LinearStack, StackView
from quantload.layers.swapped_class import Swapped, swap_class

Activation = Callable[[Tensor], Tensor]

_USUAL: dict[str, Activation] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
_KERNELS = ("silu", "gelu", "gelu_tanh", "relu")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SCALES = (1e-2, 1.0, 8.0, 100.0, 200.0)  # of rows: a bound on values shows in the last


@dataclass(frozen=True)
class GluFormula:
    """What a gated linear unit computes: down(act(gate) * up).

    Args:
        gate: Name of the layer that makes the gate.
        up: Name of the layer that makes the other factor; that of `gate` if one layer makes both.
        down: Name of the layer that takes the product.
        act: Name of the module's attribute that is the activation, or of a usual one.
        is_own: `act` is an attribute of the module.
        gate_first: Of a layer that makes both, the first half is the gate.
        known: Name of the usual activation with the same values, "" if none has.
        kernel: dtypes for which the CUDA kernel is used.
    """

    gate: str
    up: str
    down: str
    act: str
    is_own: bool
    gate_first: bool = True
    known: str = ""
    kernel: frozenset[torch.dtype] = frozenset()

    def __str__(self) -> str:
        """Say it for people: `down_proj(act_fn(gate_proj) * up_proj)`."""
        if self.gate != self.up:
            return f"{self.down}({self.act}({self.gate}) * {self.up})"
        halves = ("[:I]", "[I:]") if self.gate_first else ("[I:]", "[:I]")
        return f"{self.down}({self.act}({self.gate}{halves[0]}) * {self.up}{halves[1]})"

    def factors(self, module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return gate and up [..., I] of x [..., K]."""
        gate, up = module._modules[self.gate], module._modules[self.up]
        assert gate is not None, "a recognised unit has its layers"
        assert up is not None, "a recognised unit has its layers"
        if self.gate == self.up:
            first, second = gate(x).chunk(2, dim=-1)
            return (first, second) if self.gate_first else (second, first)
        if isinstance(gate, StackView) and isinstance(up, StackView):
            stack: LinearStack = gate.__dict__["stack"]
            both = stack is up.__dict__["stack"] and len(stack.sizes) == 2
            if both and stack.separate is None and not (_has_hooks(gate) or _has_hooks(up)):
                parts = stack.parts(x)  # nobody else takes of this product: no memo needed
                return parts[gate.slot], parts[up.slot]
        return gate(x), up(x)

    def product(self, module: nn.Module, gate: Tensor, up: Tensor) -> Tensor:
        """Return act(gate) * up, [..., I]."""
        if gate.is_cuda and gate.dtype in self.kernel and gate.dtype == up.dtype:
            from quantload.runtime.kernels.glu import glu

            watched = self.is_own and _has_hooks(getattr(module, self.act))
            if not (gate.requires_grad or up.requires_grad or watched):
                return glu(gate, up, self.known)
        activated = self.activation(module)(gate)
        fresh = activated is not gate and activated is not up
        alike = activated.dtype == up.dtype and activated.shape == up.shape
        if fresh and alike and not (activated.requires_grad or up.requires_grad):
            return activated.mul_(up)
        return activated * up

    def activation(self, module: nn.Module) -> Activation:
        """Return the activation of a module."""
        if not self.is_own:
            return _USUAL[self.act]
        own: Activation = getattr(module, self.act)
        return own


def _has_hooks(module: object) -> bool:
    """True if somebody wants to see the calls of a module."""
    return isinstance(module, nn.Module) and bool(
        module._forward_hooks or module._forward_pre_hooks
    )


class FastGlu(Swapped):
    """The forward of a recognised gated linear unit."""

    def forward(self, *args: Tensor, **kwargs: object) -> Tensor:
        """Map x [..., K] to [..., K]."""
        formula: GluFormula = self.__dict__["fast_glu"]
        plain = len(args) == 1 and not kwargs and not self.training
        if not plain or torch.compiler.is_compiling():  # the compiler fuses by itself
            return super().forward(*args, **kwargs)  # type: ignore[no-any-return]
        product = formula.product(self, *formula.factors(self, args[0]))
        down = self._modules[formula.down]
        assert down is not None, "a recognised unit has its layers"
        return down(product)  # type: ignore[no-any-return]


def swap_glu(module: nn.Module, formula: GluFormula) -> None:
    """Let a gated linear unit run by its formula."""
    module.__dict__["fast_glu"] = formula
    swap_class(module, FastGlu)


# -- recognition -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """One call of a stand-in."""

    layer: str
    x: Tensor
    y: Tensor


class _StandIn(nn.Module):
    """Stands for a linear layer: returns noise of the right width."""

    def __init__(self, name: str, width: int, calls: list[_Call], seed: torch.Generator) -> None:
        super().__init__()
        self.name, self.width, self.calls, self.seed = name, width, calls, seed
        self.out_features = width

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., N] of noise, rows of many sizes."""
        y = torch.randn(*x.shape[:-1], self.width, generator=self.seed)
        y = (y * torch.tensor(_SCALES)[:, None]).to(x.dtype)
        self.calls.append(_Call(self.name, x, y))
        return y


def is_linear(module: nn.Module | None) -> bool:
    """True for linear layers of any class: torch's, ours, views of stacks."""
    sizes = (getattr(module, "in_features", None), getattr(module, "out_features", None))
    return all(isinstance(size, int) for size in sizes)


def recognise_glu(module: nn.Module) -> GluFormula | str | None:
    """Return the formula of a gated linear unit; why it has none; or None for anything else.

    Anything else: a module with other than two or three linear layers, with parameters besides
    these, or that is not called with one tensor.
    """
    layers = _called_layers(module)
    others = [c for name, c in module._modules.items() if c is not None and not is_linear(c)]
    plain = not module._parameters and not any(list(child.parameters()) for child in others)
    if len(layers) not in (2, 3) or not plain or not _has_forward(module):
        return None
    formula: GluFormula | None = None
    for dtype in _DTYPES:
        calls: list[_Call] = []
        try:
            x, result = _run(module, layers, calls, dtype)
        except TypeError:
            return None  # it wants more than one tensor: no MLP
        except Exception as error:  # noqa: BLE001 - model code raises anything
            return f"its forward could not be run alone: {type(error).__name__}: {error}"
        found = _read(module, x, result, calls)
        if not isinstance(found, GluFormula):
            return found
        if formula is not None and formula != found:
            return f"its data flow changes with the dtype: {formula} in float32, {found} in {dtype}"
        formula = found
    assert formula is not None, "there are dtypes"
    return formula


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _called_layers(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the linear layers of a module, without stacks that its views stand for."""
    found = {name: child for name, child in module._modules.items() if is_linear(child)}
    stacks = {id(c.__dict__["stack"]) for c in found.values() if isinstance(c, StackView)}
    return {name: child for name, child in found.items() if id(child) not in stacks}


def _run(
    module: nn.Module, layers: dict[str, nn.Module | None], calls: list[_Call], dtype: torch.dtype
) -> tuple[Tensor, object]:
    seed = torch.Generator().manual_seed(0)
    alone = copy.copy(module)
    alone._modules = {
        name: _StandIn(name, _width(layers[name]), calls, seed) if name in layers else child
        for name, child in module._modules.items()
    }
    first = next(iter(layers.values()))
    assert first is not None, "a linear layer"
    x = torch.randn(1, len(_SCALES), int(first.in_features), generator=seed).to(dtype)  # type: ignore[arg-type]
    with torch.no_grad():
        return x, type(module).forward(alone, x)


def _width(layer: nn.Module | None) -> int:
    assert layer is not None, "a linear layer"
    return int(layer.out_features)  # type: ignore[arg-type]


def _read(
    module: nn.Module, x: Tensor, result: object, calls: list[_Call]
) -> GluFormula | str | None:
    """Find act(gate) * up in what the stand-ins saw; None where nothing can be gated."""
    if len(calls) not in (2, 3) or len({call.layer for call in calls}) != len(calls):
        return f"its forward calls {len(calls)} linear layers, expected gate, up and down once each"
    *sources, down = calls
    if down.x is x or (len(sources) == 1 and down.x.shape == sources[0].y.shape):
        return None  # q, k and v; or two layers in a row
    if any(call.x is not x for call in sources):
        return f"`{sources[-1].layer}` is not given the module's input as it is"
    if not isinstance(result, Tensor) or not torch.equal(result, down.y):
        return f"it returns something else than what `{down.layer}` returns"
    for gate, up, names, first in _assignments(sources):
        for act, is_own, function in _activations(module):
            if _equals(function, gate, up, down.x):
                known = _known(function)
                return GluFormula(*names, down.layer, act, is_own, gate_first=first, known=known)
    return f"what `{down.layer}` is given is not act(gate) * up for an activation that is known"


def _assignments(
    sources: list[_Call],
) -> Iterator[tuple[Tensor, Tensor, tuple[str, str], bool]]:
    """Yield gate, up, the names of their layers, and whether the gate is the first half."""
    if len(sources) == 2:
        one, two = sources
        yield one.y, two.y, (one.layer, two.layer), True
        yield two.y, one.y, (two.layer, one.layer), True
    elif sources[0].y.shape[-1] % 2 == 0:
        name = sources[0].layer
        first, second = sources[0].y.chunk(2, dim=-1)
        yield first, second, (name, name), True
        yield second, first, (name, name), False


def _activations(module: nn.Module) -> Iterator[tuple[str, bool, Activation]]:
    """Yield name, whether it is the module's own, and the function: its own ones first."""
    for name, child in module._modules.items():
        if child is not None and not is_linear(child) and not list(child.parameters()):
            yield name, True, child
    for name, value in module.__dict__.items():
        if callable(value) and not name.startswith("_"):
            yield name, True, value
    for name, function in _USUAL.items():
        yield name, False, function


def _equals(function: Activation, gate: Tensor, up: Tensor, product: Tensor) -> bool:
    if product.shape != gate.shape or product.dtype != gate.dtype:
        return False
    try:
        with torch.no_grad():
            return torch.equal(function(gate) * up, product)
    except Exception:  # noqa: BLE001 - any callable of the module
        return False


def _known(function: Activation) -> str:
    """Return the name of the usual activation with the bits of `function`, if a kernel has it."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    every = bits.view(torch.bfloat16)
    every = every[every.isfinite()]
    for name in _KERNELS:
        if torch.equal(_USUAL[name](every), function(every)):
            return name
    return ""


__all__ = ["GluFormula", "is_linear", "recognise_glu", "swap_glu"]
