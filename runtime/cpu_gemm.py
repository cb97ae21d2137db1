"""Rows of the kernel table that run on the CPU with kernels of torch.

Measured with torch 2.13 on AVX512 against a product in float64 (relative error of the norm):

    int4, int8 weight-only   bfloat16 2e-3 (dequantize and multiply: 3e-3), float32 4e-7
    int8 weight and input    exact integer sums, then two factors

In float32 and float16 the weight-only kernels are correct too, but several times slower than
dequantizing for more than one token, so that these rows serve bfloat16 only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from quantload.quant.activation import token_codes
from quantload.quant.qtensor import QuantTensor
from quantload.quant.scheme import InputScheme

_INT4_GROUPS = (32, 64, 128, 256)


class CpuInt4:
    """Group-wise 4-bit weight, full precision input.

    The kernel computes (code - 8) * scale + offset with both in the dtype of x; a zero point
    becomes offset = (8 - zero) * scale for codes 0..15.
    """

    name = "torch int4 for CPU"
    exchanges_max = False

    def why_not(
        self,
        weight: QuantTensor,
        input: InputScheme | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> str | None:
        """Refuse shapes and groups that the kernel does not know, and inexact scales."""
        if device.type != "cpu":
            return f"runs on the CPU, found `{device.type}`"
        if not weight.grid.is_integer or weight.grid.bits != 4:
            return f"wants 4-bit integers, found `{weight.grid.name}`"
        if input is not None:
            return "the input is quantized"
        if weight.shape[0] % 16:
            return f"wants output features in multiples of 16, found {weight.shape[0]}"
        if weight.group_of is not None or weight.block[0] != 1:
            return "wants plain groups of columns in each row"
        if weight.block[1] not in _INT4_GROUPS or weight.shape[1] % weight.block[1]:
            return f"wants groups of 32, 64, 128 or 256, found {weight.block[1]}"
        return _why_not_exact(weight, dtype) or self._why_offset_not_exact(weight, dtype)

    def _why_offset_not_exact(self, weight: QuantTensor, dtype: torch.dtype) -> str | None:
        exact = _int4_offset(weight, torch.float32)
        if torch.equal(exact.to(dtype).float(), exact):
            return None
        return f"zero points are not exact as offsets in `{dtype}`"

    def pack(
        self,
        weight: QuantTensor,
        input: InputScheme | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> nn.Module:
        """Pack into torch's layout."""
        return _CpuInt4Linear(weight.to(device), dtype)


class _CpuInt4Linear(nn.Module):
    codes: Tensor
    scale_and_offset: Tensor

    def __init__(self, weight: QuantTensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.group_size = weight.block[1]
        self.features = weight.shape
        fields = (weight.codes.to(torch.int32) - int(weight.grid.low)).contiguous()
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(fields, 1)
        self.register_buffer("codes", packed)
        pair = torch.stack([weight.scale.to(dtype), _int4_offset(weight, dtype)], dim=-1)
        pair = pair.transpose(0, 1).contiguous()  # G, N, 2
        self.register_buffer("scale_and_offset", pair)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(
            rows, self.codes, self.group_size, self.scale_and_offset
        )
        return _finished(y, x, bias)

    def weight_values(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [N, K], as the product with the unit matrix."""
        unit = torch.eye(self.features[1], dtype=self.scale_and_offset.dtype)
        return self.forward(unit).t().to(dtype)


def _int4_offset(weight: QuantTensor, dtype: torch.dtype) -> Tensor:
    """[N, G] what the kernel adds: the zero point, counted from the code 8 of 0..15."""
    middle = 8 + weight.grid.low  # the value of the field 8
    scale = weight.scale.to(dtype)
    if weight.offset is not None:
        return weight.offset.to(dtype) + middle * scale
    zero = torch.zeros_like(scale) if weight.zero is None else weight.zero.to(dtype)
    return (middle - zero) * scale


class CpuInt8:
    """8-bit weight with one scale a row, full precision input."""

    name = "torch int8 for CPU"
    exchanges_max = False

    def why_not(
        self,
        weight: QuantTensor,
        input: InputScheme | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> str | None:
        """Refuse what is not int8 with one scale a row, and inexact scales."""
        if input is not None:
            return "the input is quantized"
        reason = _why_not_int8_rows(weight, device)
        if reason is not None:
            return reason
        if weight.shape[1] % 64:  # NOTE: the kernel reads past the end of rows of other widths
            return f"wants input features in multiples of 64, found {weight.shape[1]}"
        return _why_not_exact(weight, dtype)

    def pack(
        self,
        weight: QuantTensor,
        input: InputScheme | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> nn.Module:
        """Keep the codes as they are."""
        return _CpuInt8Linear(weight.to(device), dtype)


class _CpuInt8Linear(nn.Module):
    codes: Tensor
    scale: Tensor

    def __init__(self, weight: QuantTensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("codes", weight.codes.contiguous())
        self.register_buffer("scale", _row_scale(weight).to(dtype))

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return _finished(torch.ops.aten._weight_int8pack_mm(rows, self.codes, self.scale), x, bias)

    def weight_values(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [N, K]."""
        return self.codes.to(dtype) * self.scale.to(dtype)[:, None]


class CpuInt8Inputs:
    """8-bit weight with one scale a row, input quantized to 8 bits per token.

    y = (codes_x @ codes_w^T) * scale_x * scale_w, the sum exact in int32, the factors in float32.
    """

    name = "torch int8 by int8 for CPU"
    exchanges_max = True

    def why_not(
        self,
        weight: QuantTensor,
        input: InputScheme | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> str | None:
        """Refuse what is not int8 on both sides."""
        if input is None:
            return "the input is not quantized"
        if input.granularity != "token" or input.grid.name != "int8" or not input.dynamic:
            found = f"`{input.grid.name}` a {input.granularity}"
            return f"wants int8 inputs with a scale a token, found {found}"
        if not input.symmetric:
            return "wants inputs without zero points"
        return _why_not_int8_rows(weight, device)

    def pack(
        self,
        weight: QuantTensor,
        input: InputScheme | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> nn.Module:
        """Keep the codes as they are."""
        assert input is not None, "this row was not asked whether it serves"
        return _CpuInt8InputsLinear(weight.to(device), input)


class _CpuInt8InputsLinear(nn.Module):
    codes: Tensor
    scale: Tensor
    # set where other processes hold the other columns: see `token_codes`
    exchange_max: Callable[[Tensor], Tensor] | None

    def __init__(self, weight: QuantTensor, input: InputScheme) -> None:
        super().__init__()
        self.input, self.exchange_max = input, None
        self.register_buffer("codes", weight.codes.contiguous())
        self.register_buffer("scale", _row_scale(weight).float())

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        codes, scale = token_codes(rows, self.input, exchange_max=self.exchange_max)
        sums = torch._int_mm(codes, self.codes.t())
        return _finished((sums.float() * scale.float() * self.scale).to(x.dtype), x, bias)

    def weight_values(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [N, K]."""
        return (self.codes.float() * self.scale[:, None]).to(dtype)


def _row_scale(weight: QuantTensor) -> Tensor:
    """[N] scale of each row."""
    return weight.scale.expand(weight.shape[0], 1).flatten()


def _why_not_int8_rows(weight: QuantTensor, device: torch.device) -> str | None:
    if device.type != "cpu":
        return f"runs on the CPU, found `{device.type}`"
    if weight.grid.name != "int8":
        return f"wants int8 weights, found `{weight.grid.name}`"
    if weight.zero is not None or weight.offset is not None or weight.outer is not None:
        return "wants symmetric weights without a second scale"
    if weight.evaluation.values == "/":
        return "wants scales that are multipliers"
    if weight.scale.shape[1] != 1 or weight.scale.shape[0] not in (1, weight.shape[0]):
        return "wants one scale a row"
    return None


def _why_not_exact(weight: QuantTensor, dtype: torch.dtype) -> str | None:
    """Refuse where the kernel's arithmetic is not the tensor's own up to rounding in `dtype`."""
    if dtype != torch.bfloat16:
        return f"torch's kernel is slow in `{dtype}`"
    if weight.outer is not None:
        return "wants a weight without a second scale"
    if weight.evaluation.values == "/":
        return "wants scales that are multipliers"
    if weight.scale.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"wants float scales, found `{weight.scale.dtype}`"
    if not torch.equal(weight.scale.to(dtype).to(weight.scale.dtype), weight.scale):
        return f"scales in `{weight.scale.dtype}` are not exact in `{dtype}`"
    return None


def _finished(y: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    y = y.reshape(*x.shape[:-1], y.shape[-1])
    return y if bias is None else y + bias
