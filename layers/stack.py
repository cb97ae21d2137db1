"""Fused linear layers without rewriting a model's forward.

`LinearStack` holds the rows of q, k and v (or gate and up) in one weight; each member is replaced
by a `StackView` without storage. The first view that sees an input runs one GEMM for all, the
others take their slice of the result:

    shared      within one call of the parent, in one thread: the same object, not written to since
                (its version), the same autograd mode, and the slice not handed out yet
    otherwise   computed again, for all members: slower

Versions cannot be read on inference tensors and in compiled code. There the result is shared only
where a probe of the model has shown that nothing writes to the input between the members. A write
that torch does not count, as `x.data.mul_(2)` under no_grad, between two members in their parent's
forward is not seen: the second member then gets the result of the old values.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantload.layers.cut import Cut
from quantload.layers.linear import QuantLinear
from quantload.quant.qtensor import QuantTensor
from quantload.quant.scheme import Scheme
from quantload.quant.stacking import why_not_stackable

_UNREADABLE = -1
_COMPILED = 0  # stands for the thread in compiled code; never the id of one


@dataclass(frozen=True)
class _Memo:
    """What a stack has computed and not handed out yet.

    Args:
        x: The input; a strong reference, since an id is only unique while the object lives.
        state: State of x and of autograd in which it was computed.
        parts: Results by slot, [..., N of the slot].
    """

    x: Tensor
    state: tuple[int, bool, bool, bool]
    parts: dict[int, Tensor]


class LinearStack(QuantLinear):
    """The members of a fused layer in one weight [sum of N_i, K].

    Args:
        in_features: K.
        out_features: N of each member, of what this rank holds.
        bias: True if every member has a bias, False if none has.
        scheme: Scheme of every member, or one for each; unlike members run one by one.
        dtype: dtype of x, bias and result.
        prefix: Dotted path in the model.
        proven: True if a probe showed that nothing writes to the input between the members.
        cut: See `QuantLinear`; its tensors are the members, or one that is fused on disk.
    """

    def __init__(  # noqa: PLR0913 - as `QuantLinear`, and what a probe showed
        self,
        in_features: int,
        out_features: Sequence[int],
        *,
        bias: bool,
        scheme: Scheme | Sequence[Scheme],
        dtype: torch.dtype,
        prefix: str,
        proven: bool = False,
        cut: Cut | None = None,
    ) -> None:
        super().__init__(
            in_features, out_features, bias=bias, scheme=scheme, dtype=dtype, prefix=prefix, cut=cut
        )
        self.proven = proven
        self.separate: nn.ModuleList | None = None  # one GEMM a member, where one for all cannot be
        self.why_separate = ""
        # One entry for each thread in the parent's forward; no thread touches that of another, and
        # getting, setting and popping one key of a dict cannot be interrupted.
        self._memos: dict[int, _Memo | None] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return what is copied and pickled: without the memos, which belong to running calls."""
        return {**self.__dict__, "_memos": {}}

    @property
    def part_sizes(self) -> list[int]:
        """Features of the result of each member."""
        return self.sizes

    def _pack(self, weights: list[QuantTensor | Tensor], device: torch.device) -> None:
        self.why_separate = self._why_not_one(weights)
        if not self.why_separate:
            super()._pack(weights, device)
            return
        self.separate = nn.ModuleList(
            self._packed([weight], device, scheme)
            for weight, scheme in zip(weights, self.schemes, strict=True)
        )

    @property
    def why_unlike(self) -> str:
        """Why the schemes of the members keep them from being one weight; "" if they do not."""
        first = self.schemes[0]
        unlike = [s for s in self.schemes if (s.weight, s.input) != (first.weight, first.input)]
        return f"schemes differ: {first} and {unlike[0]}" if unlike else ""

    def _why_not_one(self, weights: list[QuantTensor | Tensor]) -> str:
        """Say why the members cannot be one weight; "" if they can."""
        if self.why_unlike:
            return self.why_unlike
        quantized = [weight for weight in weights if isinstance(weight, QuantTensor)]
        return why_not_stackable(quantized) or "" if quantized else ""

    @property
    def weight(self) -> Tensor:
        """The stacked weight [N, K] in `dtype`; computed on each access."""
        if self.separate is None:
            return super().weight
        return torch.cat([gemm.weight_values(self.dtype) for gemm in self.separate])  # type: ignore[operator]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LinearStack:
        self._memos.clear()  # results of the weight before it was moved
        super()._apply(fn, recurse)
        return self

    # -- running -------------------------------------------------------------------------------

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., K] to the results of all members, [..., N]."""
        if self.separate is None:
            return super().forward(x)
        return torch.cat([self._alone(x, slot) for slot in range(len(self.sizes))], dim=-1)

    def parts(self, x: Tensor) -> list[Tensor]:
        """Return the results of all members, [..., N_i] each; they may share memory."""
        return list(torch.split(self.forward(x), self.sizes, dim=-1))

    def part(self, x: Tensor, slot: int) -> Tensor:
        """Return the result of one member that runs on its own, [..., N_slot]."""
        return self._alone(x, slot)

    def _alone(self, x: Tensor, slot: int) -> Tensor:
        assert self.separate is not None, f"members of {self.prefix} run together"
        bias = None if self.bias is None else torch.split(self.bias, self.sizes)[slot]
        return self._multiply(self.separate[slot], x, bias)

    def begin(self, *_: object) -> None:
        """Share results from now on in this thread; a forward pre-hook of the parent."""
        self._memos[_thread()] = None

    def end(self, *_: object) -> None:
        """Stop sharing and let go of input and results; a forward hook of the parent."""
        self._memos.pop(_thread(), None)

    def take(self, x: Tensor, slot: int) -> Tensor:
        """Return the result of one member, [..., N_slot]; computes all members if need be."""
        if self.separate is not None:
            return self.part(x, slot)
        thread, state = _thread(), _state(x)
        may_share = thread in self._memos and (self.proven or state[0] != _UNREADABLE)
        memo = self._memos.get(thread) if may_share else None
        if memo is not None and memo.x is x and memo.state == state and slot in memo.parts:
            part = memo.parts.pop(slot)  # two callers must not get one buffer
            if not memo.parts:
                self._memos[thread] = None
            return part
        parts = dict(enumerate(self.parts(x)))
        part = parts.pop(slot)
        if may_share:
            self._memos[thread] = _Memo(x, state, parts)
        return part


def _thread() -> int:
    """Return the id of the running thread; compiled code cannot ask, and is traced in one."""
    return _COMPILED if torch.compiler.is_compiling() else threading.get_ident()


def _state(x: Tensor) -> tuple[int, bool, bool, bool]:
    """Return version, grad mode, inference mode and whether x needs a gradient."""
    compiling = torch.compiler.is_compiling()  # asked first: the rest cannot be compiled
    unreadable = compiling or x.is_inference()
    return (
        _UNREADABLE if unreadable else x._version,
        torch.is_grad_enabled(),
        not compiling and torch.is_inference_mode_enabled(),
        x.requires_grad,
    )


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
        self.in_features, self.out_features = stack.in_features, stack.part_sizes[slot]

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


def share_within(parent: nn.Module, stack: LinearStack) -> None:
    """Let the stack share results while its parent's forward runs, until it ends or fails."""
    # bound methods: copies and pickles of the parent hold those of the copied stack
    parent.register_forward_pre_hook(stack.begin)
    parent.register_forward_hook(stack.end, always_call=True)


__all__ = ["LinearStack", "StackView", "share_within"]
