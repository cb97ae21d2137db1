"""The row of the kernel table for W4A8: weights of up to four bits, int8 or e4m3 inputs a token."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from quantload.quant.qtensor import QuantTensor
from quantload.quant.scheme import InputScheme
from quantload.runtime.packed_linear import PackedLinear, why_not_16_bit

if TYPE_CHECKING:
    from quantload.runtime.kernels.nibble_rounded_layout import PackedForBytes


class NibbleRoundedGemm:
    """Our Triton kernel for weights of up to four bits and inputs that are rounded to bytes."""

    name = "triton nibble, rounded input"
    exchanges_max = True

    def why_not(
        self,
        weight: QuantTensor,
        input: InputScheme | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> str | None:
        """Refuse other inputs than int8 and e4m3 with a scale a token, and what has no layout."""
        if device.type != "cuda":
            return f"runs on CUDA, found `{device.type}`"
        if input is None:
            return "takes inputs that are rounded, found none"
        try:
            from quantload.runtime.kernels.nibble_rounded_layout import why_not_packed
        except ImportError as error:
            return f"cannot be imported: {error}"
        return (
            _why_not_input(input)
            or _why_not_card(input, torch.cuda.get_device_capability(device))
            or why_not_16_bit(weight, dtype)
            or why_not_packed(weight, floats=input.grid.is_float8)
        )

    def pack(
        self,
        weight: QuantTensor,
        input: InputScheme | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> nn.Module:
        """Pack on the device."""
        from quantload.runtime.kernels.nibble_rounded_layout import pack
        from quantload.runtime.kernels.split_locks import prepare

        assert input is not None, "refused by `why_not`"
        prepare(device)
        packed = pack(weight, floats=input.grid.is_float8, device=device)
        return NibbleRoundedLinear(packed, input, dtype)


def _why_not_input(input: InputScheme) -> str | None:
    if input.grid.name not in ("int8", "e4m3"):
        return f"takes int8 and e4m3 inputs, found {input.grid.name}"
    if input.granularity != "token" or not input.symmetric or not input.dynamic:
        return f"takes symmetric inputs with a dynamic scale a token, found {input.in_words}"
    if input.scale != "float":
        return f"takes inputs whose scales are floats, found {input.scale}"
    return None


def _why_not_card(input: InputScheme, capability: tuple[int, int]) -> str | None:
    needed = (8, 9) if input.grid.is_float8 else (8, 0)
    if capability >= needed:
        return None
    return (
        f"{input.grid.name} inputs need compute capability {needed[0]}.{needed[1]}, "
        f"found {capability[0]}.{capability[1]}"
    )


class NibbleRoundedLinear(PackedLinear):
    """y = x' @ W^T + bias, x' the input rounded to bytes with a scale a token.

    Args:
        packed: [N, K].
        input: How x is rounded.
        dtype: Of x and of the result.
    """

    packed: PackedForBytes
    # takes the largest over the processes that hold the other columns, where there are some
    exchange_max: Callable[[Tensor], Tensor] | None = None

    def __init__(self, packed: PackedForBytes, input: InputScheme, dtype: torch.dtype) -> None:
        super().__init__(packed)
        self.input, self.dtype = input, dtype

    @property
    def layout(self) -> str:
        """How the weight lies in memory, for people."""
        return self.packed.layout

    def kernels_for(self, tokens: int) -> tuple[str, ...]:
        """Return the device functions that a call with `tokens` tokens launches.

        "cuBLAS" stands for the one that cuBLAS chooses.
        """
        from quantload.runtime.kernels.nibble_rounded_settings import functions_for

        return ("quantize_tokens", *functions_for(self.packed, tokens)) if tokens else ()

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Map x [..., K] to [..., N]."""
        tokens = x.reshape(-1, x.shape[-1])
        y = self.forward_rounded(*self.round_input(tokens), bias)
        return y.reshape(*x.shape[:-1], self.packed.out_features)

    def round_input(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes [M, K] and scales [M, 1] float32 of x [M, K]."""
        from quantload.runtime.kernels.quantize_rows import quantize_rows, rows_reach

        reach = None
        if self.exchange_max is not None:
            reach = self.exchange_max(rows_reach(x))
        return quantize_rows(x, self.input, reach=reach)

    def forward_rounded(self, codes: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply an input that was rounded already.

        Args:
            codes: [M, K] int8 or float8_e4m3fn, contiguous.
            scales: [M, 1] float32.
            bias: [N], or None.

        Returns:
            [M, N].
        """
        from quantload.runtime.kernels.nibble_rounded import nibble_rounded_linear

        return nibble_rounded_linear(codes, scales, self.packed, bias, dtype=self.dtype)

    def weight_values(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [N, K]."""
        return self.packed.dequantize(dtype)
