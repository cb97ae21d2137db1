"""Fused linear layers without rewriting a model's forward.

`LinearStack` holds the rows of q, k and v (or gate and up) in one weight; each member is replaced
by a `StackView` without storage. The first view that sees an input runs one GEMM for all, the
others take their slice of the result:

    same input?   the same object, not written to since (its version), slice not handed out yet
    otherwise     compute again: slower, never wrong

Versions cannot be read on inference tensors and in compiled code. There the result is shared only
where a probe of the model has shown that nothing writes to the input between the members.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quantload.layers.linear import QuantLinear
from quantload.quant.qtensor import QuantTensor, why_not_stackable
from quantload.quant.scheme import Scheme

_UNREADABLE = -1


class LinearStack(QuantLinear):
    """The members of a fused layer in one weight [sum of N_i, K].

    Args:
        in_features: K.
        out_features: N of each member.
        bias: True if every member has a bias, False if none has.
        scheme: Scheme of every member.
        dtype: dtype of x, bias and result.
        prefix: Dotted path in the model.
        proven: True if a probe showed that nothing writes to the input between the members.
    """

    def __init__(
        self,
        in_features: int,
        out_features: Sequence[int],
        *,
        bias: bool,
        scheme: Scheme,
        dtype: torch.dtype,
        prefix: str,
        proven: bool = False,
    ) -> None:
        super().__init__(
            in_features, out_features, bias=bias, scheme=scheme, dtype=dtype, prefix=prefix
        )
        self.proven = proven
        self.separate: nn.ModuleList | None = None  # one GEMM a member, where one for all cannot be
        self.why_separate = ""
        self._input: Tensor | None = None  # a strong reference: an id is only unique while it lives
        self._version = _UNREADABLE
        self._parts: list[Tensor | None] = []

    def _pack(self, weights: list[QuantTensor | Tensor], device: torch.device) -> None:
        quantized = [weight for weight in weights if isinstance(weight, QuantTensor)]
        self.why_separate = why_not_stackable(quantized) or "" if quantized else ""
        if not self.why_separate:
            super()._pack(weights, device)
            return
        self.separate = nn.ModuleList(self._packed([weight], device) for weight in weights)

    @property
    def weight(self) -> Tensor:
        """The stacked weight [N, K] in `dtype`; computed on each access."""
        if self.separate is None:
            return super().weight
        return torch.cat([gemm.weight_values(self.dtype) for gemm in self.separate])  # type: ignore[operator]

    def clear(self) -> None:
        """Let go of the last input and of what was not taken from its result."""
        self._input, self._parts = None, []

    def take(self, x: Tensor, slot: int) -> Tensor:
        """Return the result of one member, [..., N_slot]; computes all members if need be."""
        if self.separate is not None:
            bias = None if self.bias is None else torch.split(self.bias, self.sizes)[slot]
            return self.separate[slot](x, bias)  # type: ignore[no-any-return]
        version = _version(x)
        known = self._input is x and self._version == version and self._parts[slot] is not None
        if not known or (version == _UNREADABLE and not self.proven):
            self._parts = list(torch.split(self.forward(x), self.sizes, dim=-1))
            self._input, self._version = x, version
        part = self._parts[slot]
        assert part is not None, f"slice {slot} of `{self.prefix}` was just computed"
        self._parts[slot] = None  # two callers must not get one buffer
        if all(other is None for other in self._parts):
            self.clear()
        return part


def _version(x: Tensor) -> int:
    """Return how often x was written to, or `_UNREADABLE`."""
    # is_compiling comes first: is_inference cannot be compiled
    return _UNREADABLE if torch.compiler.is_compiling() or x.is_inference() else x._version


class StackView(nn.Module):
    """Stands for one member of a stack; holds no storage.

    Args:
        stack: The stack, registered once on the parent of its members.
        slot: Position in the stack.
    """

    def __init__(self, stack: LinearStack, slot: int) -> None:
        super().__init__()
        self.__dict__["stack"] = stack  # not registered: the parent has it
        self.slot = slot
        self.in_features, self.out_features = stack.in_features, stack.sizes[slot]

    def extra_repr(self) -> str:
        """Describe the view in the model's printout."""
        return f"slot {self.slot} of {self._stack.prefix.rpartition('.')[2]}"

    @property
    def _stack(self) -> LinearStack:
        stack: LinearStack = self.__dict__["stack"]
        return stack

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., K] to [..., N of the member]."""
        return self._stack.take(x, self.slot)

    @property
    def weight(self) -> Tensor:
        """The weight [N, K] of the member; computed on each access."""
        return torch.split(self._stack.weight, self._stack.sizes)[self.slot]

    @property
    def bias(self) -> Tensor | None:
        """The bias [N] of the member, if it has one."""
        bias = self._stack.bias
        return None if bias is None else torch.split(bias, self._stack.sizes)[self.slot]


def clear_after(parent: nn.Module, stack: LinearStack) -> None:
    """Let the stack forget its input when its parent's forward ends, also by an exception."""

    def clear(*_: Any) -> None:  # noqa: ANN401 - the hook protocol
        stack.clear()

    parent.register_forward_hook(clear, always_call=True)


__all__ = ["LinearStack", "StackView", "clear_after"]
