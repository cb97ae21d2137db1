"""Which kernel multiplies with a quantized weight: an ordered table of rows, the first yes wins.

    y = x' @ W^T + bias        W as `QuantTensor.dequantize` says, x' the input after its own scheme

A row says why it does not serve a weight, or packs the weight into a small module that holds only
buffers and maps x [..., K] to [..., N]. The last row serves everything: it dequantizes and
multiplies. The other rows agree with it up to rounding in the dtype of x, which tests measure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from quantload.quant.activation import fake_quantize
from quantload.quant.packing import pack_dense, unpack_dense
from quantload.quant.qtensor import QuantTensor
from quantload.quant.scheme import InputScheme
from quantload.runtime.byte_gemm import ByteGemm
from quantload.runtime.cpu_gemm import CpuInt4, CpuInt8, CpuInt8Inputs
from quantload.runtime.nibble_gemm import NibbleGemm
from quantload.runtime.nibble_rounded_gemm import NibbleRoundedGemm
from quantload.runtime.packed_linear import PackedLinear
from quantload.runtime.rounded_gemm import RoundedGemm

if TYPE_CHECKING:
    from quantload.runtime.kernels.weight_only_layout import PackedWeight

_CHUNK_ELEMENTS = 1 << 23  # of the dequantized weight: 32 MiB in float32


class GemmKernel(Protocol):
    """A row of the table."""

    @property
    def name(self) -> str:
        """Name for people."""

    @property
    def exchanges_max(self) -> bool:
        """True if its module has an attribute `exchange_max`.

        It takes the largest of each element over the processes that hold the other columns of a
        weight, so that scales of a rounded input are those of the whole input.
        """

    def why_not(
        self,
        weight: QuantTensor,
        input: InputScheme | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> str | None:
        """Say why the row does not serve this weight and input; None if it does."""

    def pack(
        self,
        weight: QuantTensor,
        input: InputScheme | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> nn.Module:
        """Return a module on `device`, of buffers only.

        Its forward(x, bias=None) maps [..., K] to [..., N]; weight_values(dtype) returns [N, K].
        An attribute `differentiable` that is True says that autograd gets the gradient of x;
        `layout` says for people how the weight lies in memory; kernels_for(tokens) returns the
        names of the device functions that a call with so many tokens launches for the product.

        Args:
            weight: [N, K], on any device.
            input: How x is quantized; None leaves it as it is.
            device: Where the module runs.
            dtype: dtype of x and of the result.
        """


@dataclass(frozen=True)
class Choice:
    """A kernel, and what spoke against those before it.

    Args:
        kernel: The row that serves.
        refused: (name, reason) of each row before it.
    """

    kernel: GemmKernel
    refused: tuple[tuple[str, str], ...]


def choose(
    weight: QuantTensor, input: InputScheme | None, *, device: torch.device, dtype: torch.dtype
) -> Choice:
    """Return the first row of the table that serves."""
    refused: list[tuple[str, str]] = []
    for kernel in KERNELS:
        reason = kernel.why_not(weight, input, device=device, dtype=dtype)
        if reason is None:
            return Choice(kernel, tuple(refused))
        refused.append((kernel.name, reason))
    raise AssertionError(f"the reference row serves everything, refused: {refused}")


def usable_input(scheme: InputScheme | None) -> tuple[InputScheme | None, str]:
    """Return the input scheme that runs in place of the given one, and what differs."""
    if scheme is None:
        return None, ""
    if scheme.grid.table is not None:
        return None, f"input stays in full precision: rounding to {scheme.grid.name} is not built"
    return scheme, ""


# -- rows -----------------------------------------------------------------------------------------


class TritonWeightOnly:
    """Our Triton kernel; an input scheme is applied to x before it."""

    name = "triton weight-only"
    exchanges_max = False

    def why_not(
        self,
        weight: QuantTensor,
        input: InputScheme | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> str | None:
        """Refuse other devices than CUDA, and what the kernel refuses."""
        if device.type != "cuda":
            return f"runs on CUDA, found `{device.type}`"
        try:
            from quantload.runtime.kernels import weight_only
        except ImportError as error:
            return f"cannot be imported: {error}"
        return weight_only.why_not(weight, device=device, dtype=dtype)

    def pack(
        self,
        weight: QuantTensor,
        input: InputScheme | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> nn.Module:
        """Pack on the device."""
        from quantload.runtime.kernels.weight_only_layout import pack as pack_weight_only

        return _TritonLinear(pack_weight_only(weight.to(device), device=device), input, dtype)


class _TritonLinear(PackedLinear):
    packed: PackedWeight

    def __init__(self, packed: PackedWeight, input: InputScheme | None, dtype: torch.dtype) -> None:
        super().__init__(packed)
        self.input, self.dtype = input, dtype

    @property
    def layout(self) -> str:
        """How the weight lies in memory, for people."""
        slices, _, columns = self.packed.codes.shape
        kind = "bytes of two codes" if self.packed.nibbles else "codes"
        return f"{slices} slices of {columns} {kind}"

    def kernels_for(self, tokens: int) -> tuple[str, ...]:
        """Return the names of the device functions that a product with so many tokens launches."""
        from quantload.runtime.kernels.weight_only import kernels_for

        return kernels_for(self.packed, tokens, self.dtype)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        from quantload.runtime.kernels.weight_only import weight_only_linear

        if self.input is not None:
            x = fake_quantize(x, self.input)
        return weight_only_linear(x, self.packed, bias)

    def weight_values(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [N, K], as the product with the unit matrix."""
        from quantload.runtime.kernels.weight_only import weight_only_linear

        unit = torch.eye(self.packed.in_features, dtype=dtype, device=self.packed.codes.device)
        return weight_only_linear(unit, self.packed).t()


class Reference:
    """Dequantizes and multiplies; large weights in chunks of rows, so that memory stays bounded."""

    name = "dequantize and multiply"
    exchanges_max = False

    def why_not(
        self,
        weight: QuantTensor,
        input: InputScheme | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> str | None:
        """Serve everything."""
        return None

    def pack(
        self,
        weight: QuantTensor,
        input: InputScheme | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> nn.Module:
        """Keep codes of up to 4 bits packed, whole bytes for the others."""
        return ReferenceLinear(weight.to(device), input)


class ReferenceLinear(nn.Module):
    """y = x' @ dequantize(W)^T + bias, chunk by chunk of output features.

    Args:
        weight: [N, K].
        input: How x is quantized, dynamically; None leaves it as it is.
    """

    def __init__(self, weight: QuantTensor, input: InputScheme | None) -> None:
        super().__init__()
        self.input = input
        rows, columns = weight.shape
        step = max(1, _CHUNK_ELEMENTS // columns)
        if weight.block[0] < rows:  # a cut between blocks repeats no scales
            step = max(1, step // weight.block[0]) * weight.block[0]
        self.chunks = nn.ModuleList(
            PackedRows(weight.rows(start, min(start + step, rows)))
            for start in range(0, rows, step)
        )

    @property
    def differentiable(self) -> bool:
        """True if x is not rounded: rounding has no useful gradient."""
        return self.input is None

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Map x [..., K] to [..., N]."""
        if self.input is not None:
            x = fake_quantize(x, self.input)
        if len(self.chunks) == 1:
            return nn.functional.linear(x, self.chunks[0](x.dtype), bias)
        parts, start = [], 0
        for chunk in self.chunks:
            weight = chunk(x.dtype)
            stop = start + weight.shape[0]
            parts.append(
                nn.functional.linear(x, weight, None if bias is None else bias[start:stop])
            )
            start = stop
        return torch.cat(parts, dim=-1)

    def weight_values(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [N, K]."""
        return torch.cat([chunk(dtype) for chunk in self.chunks])


class PackedRows(nn.Module):
    """A quantized weight whose codes are kept in as few bits as bytes can be cut into.

    Args:
        weight: [N, K].
    """

    codes: Tensor

    def __init__(self, weight: QuantTensor) -> None:
        super().__init__()
        parts = weight.tensors()
        codes = parts.pop("codes")
        self.field_bits = next(bits for bits in (2, 4, 8) if bits >= weight.grid.bits)
        self.columns = weight.shape[1]
        self.low = int(weight.grid.low) if codes.dtype == torch.int8 else 0
        if self.field_bits < 8:
            codes = pack_dense((codes - self.low).to(torch.uint8), self.field_bits)
        self.register_buffer("codes", codes)
        for name, part in parts.items():
            self.register_buffer(name, part.clone())  # not a view of a larger tensor
        self.part_names = tuple(parts)
        self.grid, self.block, self.evaluation = weight.grid, weight.block, weight.evaluation

    def forward(self, dtype: torch.dtype) -> Tensor:
        """Return the values [N, K] in `dtype`."""
        return self.unpacked().dequantize(dtype)

    def unpacked(self) -> QuantTensor:
        """Return the weight with one code an element."""
        codes = self.codes
        if self.field_bits < 8:
            codes = unpack_dense(codes, self.field_bits, self.columns)
            codes = codes.to(self.grid.storage) + self.low
        return QuantTensor(
            grid=self.grid,
            codes=codes,
            block=self.block,
            evaluation=self.evaluation,
            **{name: getattr(self, name) for name in self.part_names},
        )


KERNELS: tuple[GemmKernel, ...] = (
    RoundedGemm(),
    NibbleRoundedGemm(),
    NibbleGemm(),
    ByteGemm(),
    TritonWeightOnly(),
    CpuInt8Inputs(),
    CpuInt4(),
    CpuInt8(),
    Reference(),
)
