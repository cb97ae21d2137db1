"""The row of the kernel table for weights of one byte: integers of 5 to 8 bits, and FP8."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from quantload.quant.activation import fake_quantize
from quantload.quant.qtensor import QuantTensor
from quantload.quant.scheme import InputScheme
from quantload.runtime.packed_linear import PackedLinear, why_not_16_bit

if TYPE_CHECKING:
    from quantload.runtime.kernels.byte_layout import PackedBytes


class ByteGemm:
    """Our Triton kernel for weights of one byte; an input scheme is applied to x before it."""

    name = "triton byte"
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
            from quantload.runtime.kernels.byte_layout import why_not_packed
        except ImportError as error:
            return f"cannot be imported: {error}"
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 0):
            return f"needs compute capability 8.0, found {capability[0]}.{capability[1]}"
        return why_not_16_bit(weight, dtype) or why_not_packed(weight)

    def pack(
        self,
        weight: QuantTensor,
        input: InputScheme | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> nn.Module:
        """Pack on the device."""
        from quantload.runtime.kernels.byte_layout import pack
        from quantload.runtime.kernels.split_locks import prepare

        prepare(device)
        return ByteLinear(pack(weight, device=device), input)


class ByteLinear(PackedLinear):
    """y = x' @ W^T + bias with a weight of one byte an element.

    Args:
        packed: [N, K].
        input: How x is rounded before the product; None leaves it as it is.
    """

    packed: PackedBytes

    def __init__(self, packed: PackedBytes, input: InputScheme | None) -> None:
        super().__init__(packed)
        self.input = input

    @property
    def layout(self) -> str:
        """How the weight lies in memory, for people."""
        return self.packed.layout

    def kernels_for(self, tokens: int) -> tuple[str, ...]:
        """Return the device functions that a call with `tokens` tokens launches.

        "cuBLAS" stands for the one that cuBLAS chooses.
        """
        from quantload.runtime.kernels.byte_settings import functions_for

        return functions_for(self.packed, tokens)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Map x [..., K] to [..., N]."""
        from quantload.runtime.kernels.byte_linear import byte_linear

        if self.input is not None:
            x = fake_quantize(x, self.input)
        return byte_linear(x, self.packed, bias)

    def weight_values(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [N, K]."""
        return self.packed.dequantize(dtype)
