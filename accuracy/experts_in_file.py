"""Experts of a block that are too large to be in memory at once: read some at a time.

In the place of the product of all experts stands one that, when it is called, reads the weights of
those experts that have tokens, packs them as a loaded model has them, multiplies, and lets go of
them before it reads the next ones. What it is called with and gives is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from quantload.layers.expert_linear import ExpertLinear, Groups
from quantload.layers.experts import FusedExperts
from quantload.layers.experts_grouped import choose_grouped
from quantload.layers.experts_layout import Projection
from quantload.quant.qtensor import QuantTensor
from quantload.quant.region import WHOLE, Region
from quantload.quant.scheme import DENSE, InputScheme

BLOCK_BYTES = 1 << 29  # experts of a block that are larger are not loaded as a whole
CHUNK_BYTES = 1 << 27  # of experts that are in memory at a time
Load = Callable[[nn.Module], None]
Key = tuple[str, int]


def bytes_of(experts: FusedExperts) -> int:
    """Return about how many bytes the experts of a block take when they are loaded."""
    total = 0
    for projection in experts.layout.projections:
        each = projection.rows * projection.columns
        for slot in range(experts.layout.experts * projection.parts):
            is_quantized = (projection.leaf, slot) in experts.schemes
            total += each * (1 if is_quantized else experts.dtype.itemsize)
    return total


def can_stay_in_file(experts: FusedExperts) -> bool:
    """True if nothing but their weights has to be loaded."""
    return experts.parallel.tp_size == 1 and not any(True for _ in experts.parameters())


def leave_experts_in_file(experts: FusedExperts, load: Load, device: torch.device) -> None:
    """Let the products of a block's experts read their weights.

    Args:
        experts: Not loaded.
        load: Loads what a module, which stands for them, waits for.
        device: Where they run.
    """
    for projection in experts.layout.projections:
        product = ExpertsInFile(experts, projection, load, device)
        experts.add_module(f"{projection.leaf}_experts", product)


class ExpertsInFile(nn.Module):
    """One weight of all experts of a block: forward(x [S, K], groups) gives [S, N].

    Args:
        experts: The block.
        projection: Which weight.
        load: As in `leave_experts_in_file`.
        device: Where they run.
    """

    def __init__(
        self, experts: FusedExperts, projection: Projection, load: Load, device: torch.device
    ) -> None:
        super().__init__()
        self.__dict__["block"] = experts  # not registered: it holds this one
        self.projection, self.load, self.device = projection, load, device
        each = projection.parts * projection.rows * projection.columns * experts.dtype.itemsize
        self.at_a_time = max(1, CHUNK_BYTES // each)

    @property
    def input(self) -> InputScheme | None:
        """How inputs of all experts are rounded; None if they are not, or not alike."""
        count = self.block.layout.experts * self.projection.parts
        slots = ((self.projection.leaf, slot) for slot in range(count))
        found = {self.block.schemes.get(key, DENSE).input for key in slots}
        return next(iter(found)) if len(found) == 1 else None

    @property
    def block(self) -> FusedExperts:
        """The experts that this is a product of."""
        experts: FusedExperts = self.__dict__["block"]
        return experts

    def forward(self, x: Tensor, groups: Groups) -> Tensor:
        """Map x [S, K], rows sorted by expert, to [S, N]; rows of no expert give zeros."""
        counts = groups.counts
        width = self.projection.parts * self.projection.rows
        y = x.new_zeros(x.shape[0], width)
        start = 0
        reached = [number for number, count in enumerate(counts) if count]
        for some in _chunks(reached, self.at_a_time):
            rows = [counts[number] for number in some]
            stop = start + sum(rows)
            ids = torch.repeat_interleave(torch.tensor(rows)).to(x.device)
            gemm = self._loaded(some)
            y[start:stop] = gemm(x[start:stop], Groups(ids, len(some), rows))
            start = stop
        return y

    def weight_values(self, dtype: torch.dtype) -> Tensor:
        """Return the weights [E, N, K], all of them."""
        every = range(self.block.layout.experts)
        values: Tensor = self._loaded(every).weight_values(dtype)  # type: ignore[operator]
        return values

    def _loaded(self, experts: Sequence[int]) -> nn.Module:
        waiting = _SomeExperts(self.block, self.projection, experts)
        self.load(waiting)
        return choose_grouped(waiting.packed).gemm


class _SomeExperts(nn.Module):
    """Waits for one weight of some experts of a block; the others are as if elsewhere."""

    def __init__(self, block: FusedExperts, projection: Projection, experts: Sequence[int]) -> None:
        super().__init__()
        self.__dict__["block"] = block
        self.dtype, self.projection, self.experts = block.dtype, projection, list(experts)
        self.packed: list[ExpertLinear] = []
        self._received: dict[Key, QuantTensor | Tensor] = {}

    def awaits(self) -> dict[Key, tuple[int, ...]]:
        """Return the shape of each tensor of the whole block, by leaf and slot."""
        awaited: dict[Key, tuple[int, ...]] = self.__dict__["block"].awaits()
        leaves = (self.projection.leaf, self.projection.bias_leaf)
        return {key: shape for key, shape in awaited.items() if key[0] in leaves}

    def has_input_first(self, leaf: str) -> bool:
        """Say whether the model's own parameter is [E, K, N] instead of [E, N, K]."""
        del leaf
        return self.projection.has_input_first

    def region(self, leaf: str, slot: int) -> Region | None:
        """Return all of a tensor of the experts in question, nothing of others."""
        del leaf
        return WHOLE if slot // self.projection.parts in self.experts else None

    def receive(self, leaf: str, slot: int, value: QuantTensor | Tensor) -> None:
        """Take one tensor."""
        self._received[leaf, slot] = value

    def finish(self, device: torch.device) -> None:
        """Pack each expert."""
        del device  # each tensor is where it belongs
        self.packed = [self._pack(expert) for expert in self.experts]
        self._received = {}

    def _pack(self, expert: int) -> ExpertLinear:
        block: FusedExperts = self.__dict__["block"]
        projection = self.projection
        slots = range(expert * projection.parts, (expert + 1) * projection.parts)
        leaves = {projection.leaf: "weight"}
        leaves |= {projection.bias_leaf: "bias"} if projection.has_bias else {}
        linear = ExpertLinear(
            [projection.rows] * projection.parts,
            projection.columns,
            bias=projection.has_bias,
            schemes=[block.schemes.get((projection.leaf, slot), DENSE) for slot in slots],
            dtype=self.dtype,
            prefix=f"{block.prefix}.{expert}.{projection.leaf}",
        )
        linear.fill(
            {
                (name, part): self._received.pop((leaf, slot))
                for leaf, name in leaves.items()
                for part, slot in enumerate(slots)
            }
        )
        return linear


def _chunks(numbers: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    yield from (numbers[start : start + size] for start in range(0, len(numbers), size))


__all__ = [
    "BLOCK_BYTES",
    "CHUNK_BYTES",
    "ExpertsInFile",
    "bytes_of",
    "can_stay_in_file",
    "leave_experts_in_file",
]
