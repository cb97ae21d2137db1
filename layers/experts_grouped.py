"""One weight of all experts of a block: each expert's rows times its own matrix.

    y[s] = x[s] @ W[expert of s]^T + bias[expert of s]       rows sorted by expert

An ordered table of ways to do that, the first yes wins, as in `runtime/gemm.py`.

Letters: E experts of this rank, S rows (tokens times experts of a token), N and K as ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from quantload.errors import ModelError
from quantload.layers.expert_linear import (
    ExpertLinear,
    Groups,
    Rounding,
    Shelf,
    round_once,
    shared_input,
)
from quantload.layers.linear import KernelReport, QuantLinear, keeping_dtypes
from quantload.quant.stacking import joined_rows
from quantload.runtime.grouped_gemm import GroupedLinear

_ALIGNMENT = 16  # bytes: what torch wants of the rows of a grouped product


class GroupedGemm(Protocol):
    """A row of the table."""

    @property
    def name(self) -> str:
        """Name for people."""

    def why_not(self, experts: Sequence[ExpertLinear]) -> str | None:
        """Say why the row does not serve these experts; None if it does."""

    def pack(self, experts: Sequence[ExpertLinear]) -> nn.Module:
        """Return a module whose forward(x [S, K], groups) gives [S, N].

        Its `weight_values(dtype)` returns [E, N, K]. Rows of no expert hold anything.
        """


@dataclass(frozen=True)
class GroupedChoice:
    """How all experts multiply.

    Args:
        gemm: forward(x [S, K], groups) gives [S, N].
        reports: How many experts run in each way: {(scheme, kernel, note): experts}.
    """

    gemm: nn.Module
    reports: Mapping[tuple[str, KernelReport, str], int]


def choose_grouped(experts: Sequence[ExpertLinear]) -> GroupedChoice:
    """Pack the experts by the first row of the table that serves them."""
    refused: list[tuple[str, str]] = []
    for row in GROUPED:
        reason = row.why_not(experts)
        if reason is None:
            return GroupedChoice(row.pack(experts), _reports(row, refused, experts))
        refused.append((row.name, reason))
        for expert in experts:
            expert.let_go(reason)
    raise AssertionError(f"the last row serves everything, refused: {refused}")


def _reports(
    row: GroupedGemm, refused: list[tuple[str, str]], experts: Sequence[ExpertLinear]
) -> dict[tuple[str, KernelReport, str], int]:
    counts: Counter[tuple[str, KernelReport, str]] = Counter()
    for expert in experts:
        if expert.is_held:
            kernel = KernelReport(row.name, tuple(refused), expert.note)
            counts[str(expert.schemes[0]), kernel, expert.note] += 1
        counts.update({_report(row, refused, expert, member) for member in expert.members})
    return counts


def _report(
    row: GroupedGemm, refused: list[tuple[str, str]], expert: ExpertLinear, member: nn.Module
) -> tuple[str, KernelReport, str]:
    assert isinstance(member, QuantLinear), "members are made by `fill`"
    kernel = member.kernel
    is_own = isinstance(row, OneByOne)  # then each product has a kernel of its own
    kernel = KernelReport(
        kernel.name if is_own else row.name,
        (*refused, *(kernel.refused if is_own else ())),
        kernel.note,
    )
    note = f"not fused: {expert.why_separate}" if expert.why_separate else kernel.note
    return str(member.scheme), kernel, note


# -- rows ------------------------------------------------------------------------------------------


class TritonGrouped:
    """Our Triton kernel: quantized weights of all experts in one launch, host and device apart."""

    name = "triton grouped"

    def why_not(self, experts: Sequence[ExpertLinear]) -> str | None:
        """Refuse experts that do not all lie on one shelf."""
        return next((expert.why_alone for expert in experts if not expert.is_held), None)

    def pack(self, experts: Sequence[ExpertLinear]) -> nn.Module:
        """Take the experts from the shelf."""
        first = experts[0]
        assert first.shelf is not None, "`why_not` looks for one"
        biases = [expert.bias for expert in experts]
        weight, input = first.shelf.finished([b for b in biases if b is not None] or None)
        return GroupedExperts(GroupedLinear(weight, shared_input(first, input)), first.prefix)


class GroupedExperts(nn.Module):
    """All experts in our Triton kernel.

    Args:
        gemm: Their weights.
        prefix: Dotted path of one of them, for messages.
    """

    def __init__(self, gemm: GroupedLinear, prefix: str) -> None:
        super().__init__()
        self.gemm, self.prefix = gemm, prefix

    def forward(self, x: Tensor, groups: Groups) -> Tensor:
        """Map x [S, K], rows sorted by expert, to [S, N]."""
        self.check_gradient(x)
        return self.gemm.product(x, self.gemm.route(groups.ids))

    def check_gradient(self, x: Tensor) -> None:
        """Refuse inputs that need a gradient.

        Raises:
            ModelError: x needs one.
        """
        if torch.is_grad_enabled() and x.requires_grad:
            raise ModelError(
                f"`{self.prefix}` is for inference only: its kernel `{TritonGrouped.name}` has no "
                "gradient, found an input that needs one",
                hint="run it under `torch.no_grad()`, or with `dtype=torch.float32`, whose kernels "
                "have one",
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GroupedExperts:
        """Move the weights, but keep the dtype of each of their parts."""
        changed = fn(torch.empty(0, dtype=torch.bfloat16)).dtype
        if changed != torch.bfloat16:
            raise ModelError(
                f"a quantized model cannot change its dtype: `{self.prefix}` is packed for "
                f"`{torch.bfloat16}`, found `{changed}`",
                hint=f"load the model again with `dtype={changed}`",
            )
        super()._apply(keeping_dtypes(fn), recurse)  # type: ignore[no-untyped-call]
        return self

    def weight_values(self, dtype: torch.dtype) -> Tensor:
        """Return the weights [E, N, K]."""
        return self.gemm.weight_values(dtype)


class TorchGrouped:
    """Full precision: one call of torch for all experts, which never waits for the device."""

    name = "torch grouped_mm"

    def why_not(self, experts: Sequence[ExpertLinear]) -> str | None:
        """Refuse quantized weights, and what torch's kernel does not take."""
        dense = [expert.dense for expert in experts]
        first = dense[0]
        if first is None or any(expert is None for expert in dense):
            return "wants experts in full precision"
        weight = first.weight
        if weight.device.type not in ("cpu", "cuda"):
            return f"runs on the CPU and on CUDA, found `{weight.device.type}`"
        if weight.device.type == "cuda" and torch.cuda.get_device_capability(weight.device) < (
            8,
            0,
        ):
            return "wants compute capability 8.0"
        if weight.dtype != torch.bfloat16:
            return f"wants bfloat16, found `{weight.dtype}`"
        sizes = (weight.shape[0], weight.shape[1])
        if any(size * weight.element_size() % _ALIGNMENT for size in sizes):
            return f"wants rows of a multiple of {_ALIGNMENT} bytes, found a weight of {sizes}"
        return None

    def pack(self, experts: Sequence[ExpertLinear]) -> nn.Module:
        """Stack the weights."""
        dense = [expert.dense for expert in experts]
        weights = [linear.weight for linear in dense if linear is not None]
        biases = [linear.bias for linear in dense if linear is not None and linear.bias is not None]
        stacked = joined_rows([weight.unsqueeze(0) for weight in weights])  # as they were loaded
        return _TorchGroupedLinear(stacked, torch.stack(biases) if biases else None)


class _TorchGroupedLinear(nn.Module):
    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor, groups: Groups) -> Tensor:
        y = nn.functional.grouped_mm(x, self.weight.transpose(-2, -1), offs=groups.ends)
        if self.bias is not None:
            y = y + self.bias[groups.ids.clamp(max=groups.experts - 1)]
        return y

    def weight_values(self, dtype: torch.dtype) -> Tensor:
        """Return the weights [E, N, K]."""
        return self.weight.to(dtype)


class OneByOne:
    """Each expert that has rows multiplies by itself, with the kernel that serves its weight."""

    name = "one by one"

    def why_not(self, experts: Sequence[ExpertLinear]) -> str | None:
        """Serve everything."""
        return None

    def pack(self, experts: Sequence[ExpertLinear]) -> nn.Module:
        """Keep the experts as they are."""
        return _OneByOneLinear(experts)


class _OneByOneLinear(nn.Module):
    def __init__(self, experts: Sequence[ExpertLinear]) -> None:
        super().__init__()
        self.experts = nn.ModuleList(experts)

    def forward(self, x: Tensor, groups: Groups) -> Tensor:
        counts = groups.counts
        rest = x.shape[0] - sum(counts)
        parts = [
            expert(rows)
            for expert, rows in zip(self.experts, torch.split(x, [*counts, rest]), strict=False)
            if rows.shape[0]
        ]
        first = self.experts[0]
        width = sum(first.sizes)  # type: ignore[arg-type]
        return torch.cat([*parts, x.new_zeros(rest, width)])

    def weight_values(self, dtype: torch.dtype) -> Tensor:
        """Return the weights [E, N, K]."""
        return torch.stack([expert.weight_values().to(dtype) for expert in self.experts])  # type: ignore[operator]


GROUPED: tuple[GroupedGemm, ...] = (TritonGrouped(), TorchGrouped(), OneByOne())


__all__ = [
    "GROUPED",
    "ExpertLinear",
    "GroupedChoice",
    "GroupedExperts",
    "GroupedGemm",
    "Groups",
    "Rounding",
    "Shelf",
    "choose_grouped",
    "round_once",
]
