"""One weight of one expert: packed for a kernel of its own, or held together with those of others.

Letters: E experts of this rank, S rows (tokens times experts of a token), N and K as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from quantload.layers.inputs import RoundedInput
from quantload.layers.linear import DenseLinear, QuantLinear
from quantload.quant.qtensor import QuantTensor
from quantload.quant.scheme import InputScheme, Scheme
from quantload.quant.stacking import stack, why_not_stackable
from quantload.runtime.gemm import usable_input
from quantload.runtime.grouped_gemm import new_stack, rounding_of, why_not_device, why_not_dtype

if TYPE_CHECKING:
    from quantload.runtime.kernels.grouped_layout import ExpertStack, GroupedWeight, Rows


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


class Shelf:
    """Takes the quantized weights of the experts of a block into one tensor, while they come.

    Args:
        experts: E.
        rows: How rows of gate and up are ordered, see `new_stack`.
        dtype: dtype of inputs.
    """

    def __init__(self, experts: int, rows: Rows, dtype: torch.dtype) -> None:
        self.experts, self.rows, self.dtype = experts, rows, dtype
        self._stack: ExpertStack | None = None
        self._input: InputScheme | None = None
        self._refused = ""

    def why_not(self, place: int, weight: QuantTensor, input: InputScheme | None) -> str | None:
        """Take one expert; say why not, or None. The first that is not taken ends it for all."""
        if not self._refused:
            self._refused = self._why_not(place, weight, input) or ""
        return self._refused or None

    def _why_not(self, place: int, weight: QuantTensor, input: InputScheme | None) -> str | None:
        reason = why_not_device(weight.device) or why_not_dtype(self.dtype)
        if reason is not None:
            return reason
        if input is not None and not input.dynamic:
            return "inputs have a fixed scale, one for each expert"
        if input is not None and input.granularity == "tensor":
            return "inputs of an expert share a scale"
        if input is not None and input.needs_scale:
            return "inputs have a global scale"
        if self._stack is None:
            self._stack, self._input = new_stack(self.experts, self.rows, self.dtype), input
        if input != self._input:
            return "inputs of experts are rounded in different ways"
        return self._stack.add(place, weight)

    def taken_out(self, place: int) -> QuantTensor:
        """Return an expert as it was taken."""
        assert self._stack is not None, "it was taken"
        return self._stack.taken_out(place)

    def finished(self, biases: list[Tensor] | None) -> tuple[GroupedWeight, InputScheme | None]:
        """Return the weight of all experts, with biases [N] of each or None, and the input's."""
        assert self._stack is not None, "all were taken"
        return self._stack.finished(biases), self._input


class ExpertLinear(nn.Module):
    """One weight of one expert: gate and up as one product where that is exact.

    The weight lies on a shelf, with those of the other experts, or is packed into products of its
    own, `members`. Experts are used only when all are where they stay, see `choose_grouped`.

    Args:
        sizes: N of each part.
        columns: K.
        bias: True if there is a bias.
        schemes: Scheme of each part.
        dtype: dtype of x, bias and result.
        prefix: Dotted path, for messages.
        rounding: Rounds an input whose other columns other ranks hold; None if there are none.
        shelf: Where experts come together; None for none.
        place: Number of this one on the shelf.
    """

    def __init__(  # noqa: PLR0913 - a keyword for each fact
        self,
        sizes: Sequence[int],
        columns: int,
        *,
        bias: bool,
        schemes: Sequence[Scheme],
        dtype: torch.dtype,
        prefix: str,
        rounding: Rounding | None = None,
        shelf: Shelf | None = None,
        place: int = 0,
    ) -> None:
        super().__init__()
        self.rounding = rounding
        self.place, self.note, self.why_alone = place, "", "" if shelf else "was packed alone"
        self.is_held = False  # on the shelf
        self.shelf = shelf
        self._biases: list[Tensor] = []
        self.sizes, self.columns, self.has_bias = list(sizes), columns, bias
        self.schemes, self.dtype, self.prefix = list(schemes), dtype, prefix
        self.why_separate = ""
        self.members = nn.ModuleList()

    def fill(self, values: Mapping[tuple[str, int], QuantTensor | Tensor]) -> None:
        """Take weights (and biases), by leaf ("weight", "bias") and part, where they are."""
        parts = range(len(self.sizes))
        weights = [values["weight", part] for part in parts]
        self.why_separate = self._why_separate(weights)
        if self.shelf is not None:
            self.why_alone = self._why_alone(weights)
            self.is_held = not self.why_alone
        if self.is_held:
            self._biases = [self._bias(values, part) for part in parts if self.has_bias]
        else:
            self._pack(values)

    @property
    def bias(self) -> Tensor | None:
        """[N] of an expert on the shelf, or None."""
        return torch.cat(self._biases) if self._biases else None

    def _bias(self, values: Mapping[tuple[str, int], QuantTensor | Tensor], part: int) -> Tensor:
        bias = values["bias", part]
        assert isinstance(bias, Tensor), "biases are floats"
        return bias

    def _why_alone(self, weights: Sequence[QuantTensor | Tensor]) -> str:
        """Put the weight on the shelf; say why not, "" if it is there."""
        quantized = [weight for weight in weights if isinstance(weight, QuantTensor)]
        if not quantized:
            return "wants quantized weights"
        if self.why_separate:
            return f"gate and up are no one product: {self.why_separate}"
        weight = stack(quantized)
        input, self.note = usable_input(self.schemes[0].input)
        assert self.shelf is not None, "asked for a shelf"
        return self.shelf.why_not(self.place, weight, input) or ""

    def let_go(self, reason: str) -> None:
        """Pack the weight into products of its own, if it is on the shelf."""
        if not self.is_held:
            return
        assert self.shelf is not None, "held there"
        weight, start = self.shelf.taken_out(self.place), 0
        values: dict[tuple[str, int], QuantTensor | Tensor] = {}
        for part, size in enumerate(self.sizes):
            values["weight", part] = weight.rows(start, start + size)
            if self._biases:
                values["bias", part] = self._biases[part]
            start += size
        self.is_held, self.why_alone, self._biases = False, reason, []
        self._pack(values)

    def _pack(self, values: Mapping[tuple[str, int], QuantTensor | Tensor]) -> None:
        parts = range(len(self.sizes))
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
        if self.is_held:
            return None
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


def shared_input(
    expert: ExpertLinear, input: InputScheme | None
) -> Callable[[Tensor], Tensor] | None:
    """Return what rounds rows of all experts that are on the shelf, or None."""
    if input is None:
        return None
    if expert.rounding is not None:
        return partial(expert.rounding, scheme=input)
    return rounding_of(input, expert.dtype, expert.columns)


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
    if (
        not members
        or len(schemes) < len(members)
        or any(scheme != schemes[0] for scheme in schemes)
    ):
        return None
    if schemes[0].granularity == "tensor":  # of the rows of one expert
        return None
    for member, gemm in zip(members, gemms, strict=True):
        assert isinstance(gemm, RoundedInput), "each of them rounds"
        member.gemm = gemm.gemm
    return roundings[0]


__all__ = ["ExpertLinear", "Groups", "Rounding", "Shelf", "round_once", "shared_input"]
