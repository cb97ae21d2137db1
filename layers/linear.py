"""`QuantLinear`: a linear layer that takes canonical weights and multiplies with the best kernel.

A layer is created empty. It says which tensors it waits for, takes them whole (`receive`), and
packs them for a kernel when all are there (`finish`). Nothing of this hangs on parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from quantload.errors import ModelError, ShapeError
from quantload.quant.activation import fake_quantize_static
from quantload.quant.grid import Grid
from quantload.quant.qtensor import InnerUse, QuantTensor
from quantload.quant.region import WHOLE, Region
from quantload.quant.scheme import InputScheme, Scheme
from quantload.quant.stacking import stack
from quantload.runtime.gemm import choose, usable_input

Key = tuple[str, int]  # leaf and slot of a tensor that a layer waits for


@dataclass(frozen=True)
class KernelReport:
    """How a layer multiplies.

    Args:
        name: Name of the kernel.
        refused: (name, reason) of each kernel that was preferred but does not serve.
        note: What differs from the scheme, "" if nothing does.
    """

    name: str
    refused: tuple[tuple[str, str], ...] = ()
    note: str = ""


class DenseLinear(nn.Module):
    """y = x @ W^T + bias with a full-precision weight [N, K]."""

    differentiable = True
    weight: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Map x [..., K] to [..., N]."""
        return nn.functional.linear(x, self.weight, bias)

    def weight_values(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [N, K]."""
        return self.weight.to(dtype)


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


class QuantLinear(nn.Module):
    """y = x' @ W^T + bias, x' the input as its scheme rounds it.

    Args:
        in_features: K.
        out_features: N of each slot; one slot unless the layer is a stack.
        bias: True if there is a bias.
        scheme: How weight and input are quantized.
        dtype: dtype of x, bias and result.
        prefix: Dotted path in the model.
    """

    gemm: nn.Module
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[int],
        *,
        bias: bool,
        scheme: Scheme,
        dtype: torch.dtype,
        prefix: str,
    ) -> None:
        super().__init__()
        sizes = [out_features] if isinstance(out_features, int) else list(out_features)
        self.in_features, self.out_features, self.sizes = in_features, sum(sizes), sizes
        self.has_bias, self.scheme, self.dtype, self.prefix = bias, scheme, dtype, prefix
        self.kernel = KernelReport("not loaded yet")
        self.gemm = nn.Identity()
        self.register_buffer("bias", None)
        self._received: dict[Key, QuantTensor | Tensor] = {}

    def extra_repr(self) -> str:
        """Describe the layer in the model's printout."""
        sizes = " + ".join(str(size) for size in self.sizes)
        return f"{self.in_features} -> {sizes}, {self.scheme}, {self.kernel.name}"

    # -- loading -------------------------------------------------------------------------------

    def awaits(self) -> dict[Key, tuple[int, ...]]:
        """Return the shape of each tensor that the layer waits for, by leaf and slot."""
        shapes: dict[Key, tuple[int, ...]] = {}
        for slot, size in enumerate(self.sizes):
            shapes["weight", slot] = (size, self.in_features)
            if self.has_bias:
                shapes["bias", slot] = (size,)
        return shapes

    def region(self, leaf: str, slot: int) -> Region | None:
        """Return what of a tensor this rank holds: all of it."""
        del leaf, slot
        return WHOLE

    def receive(self, leaf: str, slot: int, value: QuantTensor | Tensor) -> None:
        """Take one tensor; a float weight is in the dtype of the layer.

        Raises:
            ShapeError: The tensor has another shape than the layer waits for.
        """
        expected = self.awaits()[leaf, slot]
        if tuple(value.shape) != expected:
            raise ShapeError(
                f"`{leaf}` of slot {slot} has shape `{tuple(value.shape)}`, expected `{expected}`, "
                f"module `{self.prefix}`"
            )
        self._received[leaf, slot] = value

    def finish(self, device: torch.device) -> None:
        """Pack what was received for a kernel on `device` and let go of it."""
        slots = range(len(self.sizes))
        weights = [self._received["weight", slot] for slot in slots]
        if self.has_bias:
            biases = [self._received["bias", slot] for slot in slots]
            self.bias = torch.cat([b for b in biases if isinstance(b, Tensor)]).to(device)
        self._received = {}
        self._pack(weights, device)

    def _pack(self, weights: list[QuantTensor | Tensor], device: torch.device) -> None:
        self.gemm = self._packed(weights, device)

    def _packed(self, weights: list[QuantTensor | Tensor], device: torch.device) -> nn.Module:
        """Stack the weights into one and pack it; `self.kernel` says how."""
        quantized = [w for w in weights if isinstance(w, QuantTensor)]
        if len(quantized) < len(weights):
            dense = [w.dequantize(self.dtype) if isinstance(w, QuantTensor) else w for w in weights]
            note = "" if self.scheme.weight is None else "decoded to full precision by its format"
            self.kernel = KernelReport("dense", note=note)
            return DenseLinear(dense[0] if len(dense) == 1 else torch.cat(dense))
        weight = stack(quantized)
        scheme, note = usable_input(self.scheme.input)
        static = scheme is not None and not scheme.dynamic
        if static and weight.input_scale is None:
            scheme, static = replace(scheme, dynamic=True), False  # type: ignore[type-var]
            note = "the checkpoint has no scale for its static input: quantized dynamically"
        bare = replace(weight, inner=None, input_scale=None, input_zero=None)
        inner_scheme = None if static else scheme
        choice = choose(bare, inner_scheme, device=device, dtype=self.dtype)
        self.kernel = KernelReport(choice.kernel.name, choice.refused, note)
        gemm = choice.kernel.pack(bare, inner_scheme, device=device, dtype=self.dtype)
        if static and scheme is not None:
            gemm = _with_static_input(gemm, weight, scheme, device)
        if weight.inner is None:
            return gemm
        return ScaledInput(gemm, weight.inner.to(device), weight.evaluation.inner)

    # -- running -------------------------------------------------------------------------------

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., K] to [..., N].

        Raises:
            ModelError: x needs a gradient and the kernel has none.
        """
        return self._multiply(self.gemm, x, self.bias)

    def _multiply(self, gemm: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        if torch.is_grad_enabled() and x.requires_grad and not is_differentiable(gemm):
            raise ModelError(
                f"`{self.prefix}` is for inference only: its kernel `{self.kernel.name}` has no "
                f"gradient for inputs of scheme `{self.scheme}`, found an input that needs one",
                hint="run it under `torch.no_grad()`",
            )
        return gemm(x, bias)  # type: ignore[no-any-return]

    @property
    def weight(self) -> Tensor:
        """The weight [N, K] in `dtype`, for model code that reads it; computed on each access."""
        return self.gemm.weight_values(self.dtype)  # type: ignore[operator, no-any-return]

    # -- moving --------------------------------------------------------------------------------

    def check_dtype(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Refuse a change of all tensors, as `.to` makes it, that would change `dtype`.

        Raises:
            ModelError: It would, and the weight is packed for `dtype`.
        """
        changed = fn(torch.empty(0, dtype=self.dtype)).dtype
        if changed != self.dtype and not self._is_dense:
            raise ModelError(
                f"a quantized model cannot change its dtype: `{self.prefix}` is packed for "
                f"`{self.dtype}`, found `{changed}`",
                hint=f"load the model again with `dtype={changed}`",
            )

    @property
    def _is_dense(self) -> bool:
        return isinstance(self.gemm, DenseLinear)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantLinear:
        """Move codes, scales and bias, but keep the dtype of each; a dense weight is cast."""
        self.check_dtype(fn)
        if self._is_dense:
            self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        else:
            fn = _keeping_dtypes(fn)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


def is_differentiable(gemm: nn.Module) -> bool:
    """True if autograd gets the gradient of the input through a packed weight."""
    return bool(getattr(gemm, "differentiable", False))


def _keeping_dtypes(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return `fn`, but for its changes of dtype: FP8 codes and scales are floats to `.to`."""

    def move(tensor: Tensor) -> Tensor:
        probe = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
        return fn(tensor) if probe.dtype == tensor.dtype else tensor.to(probe.device)

    return move


def _with_static_input(
    gemm: nn.Module, weight: QuantTensor, scheme: InputScheme, device: torch.device
) -> StaticInput:
    assert weight.input_scale is not None, "a static input has a scale"
    scale, zero = weight.input_scale.to(device), weight.input_zero
    if weight.evaluation.input == "/":
        scale = 1 / scale
    return StaticInput(gemm, scheme.grid, scale, None if zero is None else zero.to(device))
