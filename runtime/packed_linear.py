"""What the packed layers of our Triton rows share: buffers that follow the module, and dtypes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
from torch import Tensor, nn

from quantload.quant.qtensor import QuantTensor

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    class Packed(DataclassInstance, Protocol):
        """A frozen dataclass that holds a weight as a kernel reads it."""

        def tensors(self) -> Mapping[str, Tensor]:
            """Return the parts that are tensors, by field name."""


class PackedLinear(nn.Module):
    """A layer whose buffers are the tensors of a packed weight; `packed` follows where they move.

    Args:
        packed: [N, K], a frozen dataclass with `tensors()`.
    """

    packed: Any  # each row narrows it to the layout of its own

    def __init__(self, packed: Packed) -> None:
        super().__init__()
        self.packed = packed
        for name, part in packed.tensors().items():
            self.register_buffer(name, part)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        moved = {name: getattr(self, name) for name in self.packed.tensors()}
        self.packed = replace(self.packed, **moved)
        return self


def why_not_16_bit(weight: QuantTensor, dtype: torch.dtype) -> str | None:
    """Say why a kernel of 16-bit inputs and results cannot run in `dtype`, or None."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"inputs are {dtype}, the kernel takes bfloat16 and float16"
    if torch.finfo(weight.rounded_to).eps > torch.finfo(dtype).eps:
        return f"values are rounded to {weight.rounded_to}, which shows in {dtype}"
    return None


__all__ = ["PackedLinear", "why_not_16_bit"]
