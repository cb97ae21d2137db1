"""One weight of all experts of a block: each expert's rows times its own matrix.

    y[s] = x[s] @ W[expert of s]^T + bias[expert of s]       rows sorted by expert

An ordered table of ways to do that, the first yes wins, as in `runtime/gemm.py`. A kernel that
multiplies quantized weights of all experts in one launch becomes a row before `OneByOne`.

Letters: E experts of this rank, S rows (tokens times experts of a token), N and K as ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol

import torch
from torch import Tensor, nn

from quantload.layers.inputs import RoundedInput
from quantload.layers.linear import DenseLinear, KernelReport, QuantLinear
from quantload.quant.qtensor import QuantTensor
from quantload.quant.scheme import InputScheme, Scheme
from quantload.quant.stacking import joined_rows, why_not_stackable

_ALIGNMENT = 16  # bytes: what torch wants of the rows of a grouped product


class Groups:
    """Which rows belong to which expert.

    Args:
        ids: [S] expert of each row, ascending; E for rows of no expert here.
        experts: E.
        counts: Rows of each expert, where the host knows them already.
    """

    def __init__(self, ids: Tensor, experts: int, counts: Sequence[int] | None = None) -> None:
        self.ids, self.experts = ids, experts
        self._counts = None if counts is None else list(counts)

    @property
    def counts(self) -> list[int]:
        """Rows of each expert: waits for the device, once."""
        if self._counts is None:
            ends = self.ends.tolist()
            self._counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        return self._counts

    @cached_property
    def ends(self) -> Tensor:
        """[E] int32: where the rows of each expert end."""
        numbers = torch.arange(self.experts, device=self.ids.device)
        return torch.searchsorted(self.ids, numbers, right=True).to(torch.int32)


Rounding = Callable[..., Tensor]  # (x, scheme=...) -> x', looking at what other ranks hold


class _Member(QuantLinear):
    """One product of an expert, whose input may be a part of a row."""

    rounding: Rounding | None = None

    def _shared_rounding(self, input: InputScheme) -> Callable[[Tensor], Tensor] | None:
        return None if self.rounding is None else partial(self.rounding, scheme=input)


class ExpertLinear(nn.Module):
    """One weight of one expert: gate and up as one product where that is exact.

    Args:
        sizes: N of each part.
        columns: K.
        bias: True if there is a bias.
        schemes: Scheme of each part.
        dtype: dtype of x, bias and result.
        prefix: Dotted path, for messages.
        rounding: Rounds an input whose other columns other ranks hold; None if there are none.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        columns: int,
        *,
        bias: bool,
        schemes: Sequence[Scheme],
        dtype: torch.dtype,
        prefix: str,
        rounding: Rounding | None = None,
    ) -> None:
        super().__init__()
        self.rounding = rounding
        self.sizes, self.columns, self.has_bias = list(sizes), columns, bias
        self.schemes, self.dtype, self.prefix = list(schemes), dtype, prefix
        self.why_separate = ""
        self.members = nn.ModuleList()

    def fill(self, values: Mapping[tuple[str, int], QuantTensor | Tensor]) -> None:
        """Pack weights (and biases), by leaf ("weight", "bias") and part, where they are."""
        parts = range(len(self.sizes))
        self.why_separate = self._why_separate([values["weight", part] for part in parts])
        runs = [[part] for part in parts] if self.why_separate else [list(parts)]
        for run in runs:
            linear = _Member(
                self.columns,
                [self.sizes[part] for part in run],
                bias=self.has_bias,
                scheme=self.schemes[run[0]],
                dtype=self.dtype,
                prefix=self.prefix,
            )
            linear.rounding = self.rounding
            for slot, part in enumerate(run):
                for leaf in ("weight", "bias") if self.has_bias else ("weight",):
                    linear.receive(leaf, slot, values[leaf, part])
            linear.finish(values["weight", 0].device)
            self.members.append(linear.eval())

    def _why_separate(self, weights: Sequence[QuantTensor | Tensor]) -> str:
        """Say why the parts cannot be one product; "" if they can."""
        quantized = [weight for weight in weights if isinstance(weight, QuantTensor)]
        if 0 < len(quantized) < len(weights):
            return "only some parts are quantized"
        if any(scheme != self.schemes[0] for scheme in self.schemes[1:]):
            return "schemes of its parts differ"
        return (why_not_stackable(quantized) or "") if quantized else ""

    @property
    def dense(self) -> QuantLinear | None:
        """The only product, if its weight is in full precision."""
        first = self.members[0]
        assert isinstance(first, QuantLinear), "members are made by `fill`"
        is_dense = len(self.members) == 1 and isinstance(first.gemm, DenseLinear)
        return first if is_dense else None

    def forward(self, x: Tensor) -> Tensor:
        """Map x [S, K] to [S, sum of sizes]."""
        if len(self.members) == 1:
            return self.members[0](x)  # type: ignore[no-any-return]
        return torch.cat([member(x) for member in self.members], dim=-1)

    def weight_values(self) -> Tensor:
        """Return the weight [sum of sizes, K] in `dtype`."""
        return torch.cat([member.weight for member in self.members])  # type: ignore[misc]


def round_once(experts: Sequence[ExpertLinear]) -> Callable[[Tensor], Tensor] | None:
    """Take one rounding out of all experts, to be done for the rows of all of them at once.

    Ranks then exchange what they know of their rows once, whatever experts are hit.

    Returns:
        The rounding; None if experts round otherwise each, or not at all: they then do it.
    """
    members = [member for expert in experts for member in expert.members]
    gemms = [member.gemm for member in members]
    roundings = [gemm.rounding for gemm in gemms if isinstance(gemm, RoundedInput)]
    schemes = [r.keywords["scheme"] for r in roundings if isinstance(r, partial)]
    if len(schemes) < len(members) or any(scheme != schemes[0] for scheme in schemes):
        return None
    if schemes[0].granularity == "tensor":  # of the rows of one expert
        return None
    for member, gemm in zip(members, gemms, strict=True):
        assert isinstance(gemm, RoundedInput), "each of them rounds"
        member.gemm = gemm.gemm
    return roundings[0]


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
    raise AssertionError(f"the last row serves everything, refused: {refused}")


def _reports(
    row: GroupedGemm, refused: list[tuple[str, str]], experts: Sequence[ExpertLinear]
) -> dict[tuple[str, KernelReport, str], int]:
    counts: Counter[tuple[str, KernelReport, str]] = Counter()
    for expert in experts:
        counts.update({_report(row, refused, expert, member) for member in expert.members})
    return counts


def _report(
    row: GroupedGemm, refused: list[tuple[str, str]], expert: ExpertLinear, member: nn.Module
) -> tuple[str, KernelReport, str]:
    assert isinstance(member, QuantLinear), "members are made by `fill`"
    kernel = member.kernel
    if not isinstance(row, OneByOne):
        kernel = KernelReport(row.name, tuple(refused), kernel.note)
    note = f"not fused: {expert.why_separate}" if expert.why_separate else kernel.note
    return str(member.scheme), kernel, note


# -- rows ------------------------------------------------------------------------------------------


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


GROUPED: tuple[GroupedGemm, ...] = (TorchGrouped(), OneByOne())


__all__ = [
    "GROUPED",
    "ExpertLinear",
    "GroupedChoice",
    "GroupedGemm",
    "Groups",
    "choose_grouped",
    "round_once",
]
