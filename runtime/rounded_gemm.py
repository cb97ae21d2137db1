"""The row of the kernel table for weights and inputs that are both int8 or both e4m3."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from quantload.errors import ConfigError, ShapeError
from quantload.quant.grid import INT8
from quantload.quant.qtensor import QuantTensor
from quantload.quant.scales import minmax_scale
from quantload.quant.scheme import InputScheme
from quantload.runtime.packed_linear import PackedLinear

if TYPE_CHECKING:
    from quantload.runtime.kernels.rounded_weight import PackedRounded


class RoundedGemm:
    """Our kernels for 8 bits on both sides: the codes are multiplied, the scales follow."""

    name = "triton rounded inputs"
    exchanges_max = True

    def why_not(
        self,
        weight: QuantTensor,
        input: InputScheme | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> str | None:
        """Refuse inputs that stay as they are, and what the kernels refuse."""
        if input is None:
            return "the input is not quantized"
        if device.type != "cuda":
            return f"runs on CUDA, found `{device.type}`"
        try:
            from quantload.runtime.kernels.rounded import why_not
        except ImportError as error:
            return f"cannot be imported: {error}"
        return why_not(weight, input, device=device, dtype=dtype)

    def pack(
        self,
        weight: QuantTensor,
        input: InputScheme | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> nn.Module:
        """Pack on the device."""
        from quantload.runtime.kernels.rounded import pack
        from quantload.runtime.kernels.split_locks import prepare

        assert input is not None, "this row was not asked whether it serves"
        prepare(device)
        return RoundedLinear(pack(weight, input, device=device), input, dtype)


class RoundedLinear(PackedLinear):
    """y = x' @ W^T + bias, the codes of both multiplied.

    Args:
        packed: [N, K].
        input: How x is quantized. A fixed scale is not part of the module: `forward_rounded` takes
            it with the codes.
        dtype: dtype of the result.
    """

    packed: PackedRounded
    differentiable = False
    # set where other processes hold the other columns: takes the largest over them
    exchange_max: Callable[[Tensor], Tensor] | None

    def __init__(self, packed: PackedRounded, input: InputScheme, dtype: torch.dtype) -> None:
        super().__init__(packed)
        self.input, self.dtype, self.exchange_max = input, dtype, None

    @property
    def layout(self) -> str:
        """How the weight lies in memory, for people."""
        return self.packed.layout

    def kernels_for(self, tokens: int) -> tuple[str, ...]:
        """Return the device functions that a call with `tokens` tokens launches.

        "cuBLAS" stands for the one that cuBLAS chooses. Inputs that share a scale with other
        tokens or processes launch some of torch besides.
        """
        from quantload.runtime.kernels.rounded import kernels_for

        return kernels_for(self.packed, self.input, tokens, self.dtype)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Map x [..., K] to [..., N].

        Raises:
            ConfigError: The scheme is static: `StaticInput` holds the scale.
            ShapeError: x is not K wide.
        """
        k = self.packed.codes.shape[1]
        if x.shape[-1] != k:
            raise ShapeError(f"input has `{x.shape[-1]}` features, the weight expects `{k}`")
        if self.exchange_max is None and self.input.dynamic:
            from quantload.runtime.kernels.rounded import rounded_linear

            return rounded_linear(x, self.packed, self.input, bias)
        y = self.forward_rounded(*self.round_input(x), bias)
        return y.reshape(*x.shape[:-1], y.shape[-1]).to(x.dtype)

    def round_input(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes [M, K] and float32 scales of x [..., K], see `quantize_rows`.

        Raises:
            ConfigError: The scheme is static.
        """
        from quantload.runtime.kernels.quantize_rows import quantize_rows, rows_reach

        rows = x.reshape(-1, x.shape[-1])
        if not self.input.dynamic:
            raise ConfigError("the scale of a static input comes with its codes")
        if self.exchange_max is None or self.input.granularity == "group" or not len(rows):
            return quantize_rows(rows, self.input)  # no group lies in two processes
        if not self.input.symmetric:
            return _codes_with_zeros(rows, self.exchange_max)
        reach = rows_reach(rows)
        if self.input.granularity == "tensor":
            reach = reach.amax(dim=0, keepdim=True)
        return quantize_rows(rows, self.input, reach=self.exchange_max(reach))

    def forward_rounded(self, codes: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return [M, N] for codes [M, K] and scales, as `round_input` makes them.

        A scale that all tokens share may also come as [1], with a zero point as [1, 2].

        Raises:
            ShapeError: Codes or scales do not fit the weight.
        """
        from quantload.runtime.kernels.rounded import multiply_rounded

        return multiply_rounded(codes, scales, self.packed, bias, dtype=self.dtype)

    def weight_values(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [N, K]."""
        return self.packed.values().to(dtype)


def _codes_with_zeros(
    rows: Tensor, exchange_max: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Codes [M, K], scales and zero points [M, 2] of rows whose other columns are elsewhere."""
    ends = torch.stack([-rows.amin(dim=1), rows.amax(dim=1)]).clamp(min=0)
    ends = exchange_max(ends)
    if torch.compiler.is_compiling():
        return _codes_within_operation(rows, ends)  # type: ignore[no-any-return]
    return _codes_within(rows, ends)


def _codes_within(rows: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, scales and zero points of rows [M, K] by what -x and x reach anywhere, [2, M]."""
    low, high = ends[..., None]
    scale, zero = minmax_scale(-low, high, INT8, symmetric=False)
    assert zero is not None, "an asymmetric scale has a zero point"
    codes = INT8.round(rows / scale + zero.to(rows.dtype))
    return codes, torch.cat([scale.float(), zero.float()], dim=1)


# one operation, as the roundings of `quant.activation`
@torch.library.custom_op("quantload::codes_with_zeros_within", mutates_args=())
def _codes_within_operation(rows: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    return _codes_within(rows, ends)


@_codes_within_operation.register_fake
def _(rows: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    codes = torch.empty_like(rows, dtype=torch.int8, memory_format=torch.contiguous_format)
    return codes, rows.new_empty(len(rows), 2, dtype=torch.float32)
