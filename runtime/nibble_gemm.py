"""The row of the kernel table for weights of up to four bits: integers, FP4, 16-entry tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from quantload.quant.activation import fake_quantize
from quantload.quant.qtensor import QuantTensor
from quantload.quant.scheme import InputScheme
from quantload.runtime.packed_linear import PackedLinear, why_not_16_bit

if TYPE_CHECKING:
    from quantload.runtime.kernels.nibble_weight import NibbleWeight


class NibbleGemm:
    """Our Triton kernels for weights of up to four bits; an input scheme is applied before them."""

    name = "triton nibble"
    exchanges_max = False

    def why_not(
        self,
        weight: QuantTensor,
        input: InputScheme | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> str | None:
        """Refuse other devices than CUDA from compute capability 8.0, and what has no layout."""
        if device.type != "cuda":
            return f"runs on CUDA, found `{device.type}`"
        try:
            from quantload.runtime.kernels.nibble_weight import why_not_form
        except ImportError as error:
            return f"cannot be imported: {error}"
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 0):
            return f"needs compute capability 8.0, found {capability[0]}.{capability[1]}"
        return why_not_16_bit(weight, dtype) or why_not_form(weight)

    def pack(
        self,
        weight: QuantTensor,
        input: InputScheme | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> nn.Module:
        """Pack on the device."""
        from quantload.runtime.kernels.nibble_weight import pack
        from quantload.runtime.kernels.split_locks import prepare

        prepare(device)
        return NibbleLinear(pack(weight, dtype=dtype, device=device), input)


class NibbleLinear(PackedLinear):
    """y = x' @ W^T + bias with a weight of up to four bits an element.

    Args:
        packed: [N, K].
        input: How x is rounded before the product; None leaves it as it is.
    """

    packed: NibbleWeight

    def __init__(self, packed: NibbleWeight, input: InputScheme | None) -> None:
        super().__init__(packed)
        self.input = input

    @property
    def layout(self) -> str:
        """How the weight lies in memory, for people."""
        blocks, _, columns = self.packed.words.shape
        order = ", columns sorted by group" if self.packed.columns is not None else ""
        return f"{blocks} blocks of words of 4 slices of {columns} columns{order}"

    def kernels_for(self, tokens: int) -> tuple[str, ...]:
        """Return the device functions that a call with `tokens` tokens launches.

        "cuBLAS" stands for the one that cuBLAS chooses.
        """
        from quantload.runtime.kernels.nibble import kernels_for

        return kernels_for(self.packed, tokens)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Map x [..., K] to [..., N]."""
        from quantload.runtime.kernels.nibble import nibble_linear

        if self.input is not None:
            x = fake_quantize(x, self.input)
        return nibble_linear(x, self.packed, bias)

    def weight_values(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [N, K]."""
        from quantload.runtime.kernels.nibble import weight_values

        return weight_values(self.packed, dtype)
