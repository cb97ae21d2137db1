"""What happens to an input before a packed weight meets it: factors of columns, roundings.

Each is a module around the packed weight, with its interface: forward(x, bias=None) maps [..., K]
to [..., N], weight_values(dtype) returns [N, K].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from quantload.quant.activation import fake_quantize_static
from quantload.quant.grid import Grid
from quantload.quant.qtensor import InnerUse, QuantTensor
from quantload.quant.scheme import InputScheme


class ScaledInput(nn.Module):
    """y = gemm(x * factor), or x / factor: the columns' factors of a weight, applied to its input.

    Args:
        gemm: Multiplies with the weight without its factors.
        factor: [K].
        use: "*" or "/".
    """

    factor: Tensor

    def __init__(self, gemm: nn.Module, factor: Tensor, use: InnerUse) -> None:
        super().__init__()
        self.gemm, self.use = gemm, use
        self.register_buffer("factor", factor)

    @property
    def differentiable(self) -> bool:
        """True if the product with the weight is."""
        return is_differentiable(self.gemm)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Map x [..., K] to [..., N]."""
        return self.gemm(self._scaled(x), bias)  # type: ignore[no-any-return]

    def weight_values(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [N, K], factors included."""
        return self._scaled(self.gemm.weight_values(dtype))  # type: ignore[operator]

    def _scaled(self, x: Tensor) -> Tensor:
        factor = self.factor.to(x.dtype)
        return x * factor if self.use == "*" else x / factor


class StaticInput(nn.Module):
    """y = gemm(x'), x' rounded with the fixed scale that the checkpoint holds.

    Args:
        gemm: Multiplies with the weight; takes x as it is.
        grid: Number grid of the input's codes.
        scale: [1], a multiplier.
        zero: [1] or None.
    """

    differentiable = False
    scale: Tensor
    zero: Tensor | None

    def __init__(self, gemm: nn.Module, grid: Grid, scale: Tensor, zero: Tensor | None) -> None:
        super().__init__()
        self.gemm, self.grid = gemm, grid
        self.register_buffer("scale", scale)
        self.register_buffer("zero", zero)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Map x [..., K] to [..., N]."""
        x = fake_quantize_static(x, self.grid, self.scale, self.zero)
        return self.gemm(x, bias)  # type: ignore[no-any-return]

    def weight_values(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [N, K]."""
        return self.gemm.weight_values(dtype)  # type: ignore[operator, no-any-return]


class StaticCodes(nn.Module):
    """y = gemm(codes of x), for a kernel that multiplies with the codes of an input.

    Args:
        gemm: Has `forward_rounded`, as `runtime.rounded_gemm.RoundedLinear`.
        input: A static scheme a tensor.
        scale: [1], a multiplier.
        zero: [1] or None.
    """

    differentiable = False
    scale: Tensor
    zero: Tensor | None
    scales: Tensor

    def __init__(
        self, gemm: nn.Module, input: InputScheme, scale: Tensor, zero: Tensor | None
    ) -> None:
        super().__init__()
        self.gemm, self.input = gemm, input
        self.register_buffer("scale", scale)
        self.register_buffer("zero", zero)
        scales = scale.float() if zero is None else torch.stack([scale.float(), zero.float()], 1)
        self.register_buffer("scales", scales)  # [1], with a zero point [1, 2]

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Map x [..., K] to [..., N]."""
        y = self.forward_rounded(*self.round_input(x), bias)
        return y.reshape(*x.shape[:-1], y.shape[-1]).to(x.dtype)

    def round_input(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes [M, K] of x [..., K] and the scale that all share."""
        from quantload.runtime.kernels.quantize_rows import quantize_static

        rows = x.detach().reshape(-1, x.shape[-1])
        return quantize_static(rows, self.input, self.scale, self.zero), self.scales

    def forward_rounded(self, codes: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return [M, N] for codes [M, K]."""
        return self.gemm.forward_rounded(codes, scales, bias)  # type: ignore[operator, no-any-return]

    def weight_values(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [N, K]."""
        return self.gemm.weight_values(dtype)  # type: ignore[operator, no-any-return]


class RoundedInput(nn.Module):
    """y = gemm(x'), x' rounded before the kernel sees it.

    Args:
        gemm: Multiplies with the weight; takes x as it is.
        rounding: Maps x [..., K] to x'.
    """

    differentiable = False

    def __init__(self, gemm: nn.Module, rounding: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gemm, self.rounding = gemm, rounding

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Map x [..., K] to [..., N]."""
        return self.gemm(self.rounding(x), bias)  # type: ignore[no-any-return]

    def weight_values(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [N, K]."""
        return self.gemm.weight_values(dtype)  # type: ignore[operator, no-any-return]


def is_differentiable(gemm: nn.Module) -> bool:
    """True if autograd gets the gradient of the input through a packed weight."""
    return bool(getattr(gemm, "differentiable", False))


def rounds_input(gemm: nn.Module) -> bool:
    """True if a packed weight meets rounded inputs: there is no useful gradient of these."""
    if isinstance(gemm, ScaledInput):
        return rounds_input(gemm.gemm)
    is_rounding = isinstance(gemm, StaticInput | StaticCodes | RoundedInput)
    return is_rounding or getattr(gemm, "input", None) is not None


def with_gradient(gemm: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
    """Map x [..., K] to [..., N] by a kernel without a gradient of its own.

    The gradient of x is that of the values of the weight, dX = dY @ W, in the dtype of x; W is
    unpacked on the way back. The kernel must not round inputs.
    """
    assert not rounds_input(gemm), "rounding has no gradient"
    return _ByValues.apply(x, bias, gemm)  # type: ignore[no-any-return, no-untyped-call]


class _ByValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, gemm: nn.Module) -> Tensor:  # noqa: ANN401 - torch's own
        ctx.gemm = gemm
        return gemm(x, bias)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # noqa: ANN401
        needs_x, needs_bias, _ = ctx.needs_input_grad
        dx = dy @ ctx.gemm.weight_values(dy.dtype) if needs_x else None
        return dx, dy.reshape(-1, dy.shape[-1]).sum(0) if needs_bias else None, None


def with_static_input(
    gemm: nn.Module, weight: QuantTensor, scheme: InputScheme, device: torch.device
) -> StaticInput | StaticCodes:
    """Round the input of a packed weight with the fixed scale that came with the weight.

    Kernels that take codes of an input get them; others get what the codes stand for.
    """
    assert weight.input_scale is not None, "a static input has a scale"
    scale, zero = weight.input_scale.to(device), weight.input_zero
    if weight.evaluation.input == "/":
        scale = 1 / scale
    zero = None if zero is None else zero.to(device)
    if hasattr(gemm, "forward_rounded"):
        return StaticCodes(gemm, scheme, scale, zero)
    return StaticInput(gemm, scheme.grid, scale, zero)


__all__ = [
    "RoundedInput",
    "ScaledInput",
    "StaticCodes",
    "StaticInput",
    "is_differentiable",
    "rounds_input",
    "with_gradient",
    "with_static_input",
]
