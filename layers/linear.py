"""`QuantLinear`: a linear layer that takes canonical weights and multiplies with the best kernel.

A layer is created empty. It says which tensors it waits for (`awaits`) and what of each this rank
holds (`region`), takes that (`receive`), and packs it for a kernel when all is there (`finish`).
Nothing of this hangs on parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from quantload.errors import ConfigError, ModelError, ShapeError
from quantload.layers.cut import Cut
from quantload.layers.inputs import (
    RoundedInput,
    ScaledInput,
    is_differentiable,
    rounds_input,
    with_gradient,
    with_static_input,
)
from quantload.quant.qtensor import QuantTensor
from quantload.quant.region import WHOLE, Region
from quantload.quant.scheme import InputScheme, Scheme
from quantload.quant.stacking import joined_rows, stack
from quantload.runtime.gemm import choose, usable_input
from quantload.runtime.rounded_gemm import RoundedGemm

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


class QuantLinear(nn.Module):
    """y = x' @ W^T + bias, x' the input as its scheme rounds it.

    Args:
        in_features: K, of what this rank holds.
        out_features: N of each slot, of what this rank holds; one slot unless the layer is a stack.
        bias: True if there is a bias.
        scheme: How weight and input are quantized; a stack of unlike members has one for each.
        dtype: dtype of x, bias and result.
        prefix: Dotted path in the model.
        cut: What that is of a larger layer; None holds all.
    """

    gemm: nn.Module
    bias: Tensor | None
    # takes the largest over the ranks that hold the other columns, where there are some
    exchange_max: Callable[[Tensor], Tensor] | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[int],
        *,
        bias: bool,
        scheme: Scheme | Sequence[Scheme],
        dtype: torch.dtype,
        prefix: str,
        cut: Cut | None = None,
    ) -> None:
        super().__init__()
        sizes = [out_features] if isinstance(out_features, int) else list(out_features)
        self.in_features, self.out_features, self.sizes = in_features, sum(sizes), sizes
        self.has_bias, self.dtype, self.prefix = bias, dtype, prefix
        self.cut = cut or Cut(in_features, tuple(sizes), (WHOLE,) * len(sizes))
        self.schemes = self._one_for_each(scheme)
        self.kernel = KernelReport("not loaded yet")
        self.gemm = nn.Identity()
        self.register_buffer("bias", None)
        self._received: dict[Key, QuantTensor | Tensor] = {}

    @property
    def scheme(self) -> Scheme:
        """How weight and input are quantized; of unlike members the first one's."""
        return self.schemes[0]

    def _one_for_each(self, scheme: Scheme | Sequence[Scheme]) -> tuple[Scheme, ...]:
        count = len(self.cut.sizes)
        schemes = (scheme,) * count if isinstance(scheme, Scheme) else tuple(scheme)
        if len(schemes) != count:
            raise ConfigError(
                f"{len(schemes)} schemes for the {count} tensors of module `{self.prefix}`, "
                "expected one for each"
            )
        return schemes

    def set_schemes(self, scheme: Scheme | Sequence[Scheme]) -> None:
        """Say how the layer is quantized, before its tensors come.

        Raises:
            ConfigError: There is not one for each tensor, or the layer is loaded already.
        """
        if not isinstance(self.gemm, nn.Identity):
            raise ConfigError(f"module `{self.prefix}` is loaded: its scheme is fixed")
        self.schemes = self._one_for_each(scheme)

    def extra_repr(self) -> str:
        """Describe the layer in the model's printout."""
        sizes = " + ".join(str(size) for size in self.sizes)
        return f"{self.in_features} -> {sizes}, {self.scheme}, {self.kernel.name}"

    # -- loading -------------------------------------------------------------------------------

    def awaits(self) -> dict[Key, tuple[int, ...]]:
        """Return the shape of each tensor of the whole layer, by leaf and slot."""
        shapes: dict[Key, tuple[int, ...]] = {}
        for slot, size in enumerate(self.cut.sizes):
            shapes["weight", slot] = (size, self.cut.in_features)
            if self.has_bias:
                shapes["bias", slot] = (size,)
        return shapes

    def region(self, leaf: str, slot: int) -> Region | None:
        """Return what of a tensor this rank holds; of a bias the rows of the weight."""
        region = self.cut.regions[slot]
        if leaf != "bias" or region is None:
            return region
        return WHOLE if region.rows is None else Region(rows=region.rows)

    def receive(self, leaf: str, slot: int, value: QuantTensor | Tensor) -> None:
        """Take the region of one tensor; a float weight is in the dtype of the layer.

        Raises:
            ShapeError: The tensor has another shape than the layer waits for.
        """
        region = self.region(leaf, slot)
        assert region is not None, f"{leaf} of slot {slot} of {self.prefix} is another rank's"
        expected = region.shape_of(self.awaits()[leaf, slot])
        if tuple(value.shape) != expected:
            raise ShapeError(
                f"`{leaf}` of slot {slot} has shape `{tuple(value.shape)}`, expected `{expected}`, "
                f"module `{self.prefix}`"
            )
        self._received[leaf, slot] = value

    def finish(self, device: torch.device) -> None:
        """Pack what was received for a kernel on `device` and let go of it."""
        held = [slot for slot, region in enumerate(self.cut.regions) if region is not None]
        weights = self._weights_received(held)
        biases = [self._received["bias", slot] for slot in held if self._holds_bias(slot)]
        if biases:
            self.bias = torch.cat([b for b in biases if isinstance(b, Tensor)]).to(device)
        self._received = {}
        self._pack(weights, device)

    def _weights_received(self, slots: list[int]) -> list[QuantTensor | Tensor]:
        return [self._received["weight", slot] for slot in slots]

    def _holds_bias(self, slot: int) -> bool:
        return self.has_bias and self.region("bias", slot) is not None

    def _pack(self, weights: list[QuantTensor | Tensor], device: torch.device) -> None:
        self.gemm = self._packed(weights, device, self.scheme)

    def _packed(
        self, weights: list[QuantTensor | Tensor], device: torch.device, scheme: Scheme
    ) -> nn.Module:
        """Stack the weights into one and pack it; `self.kernel` says how."""
        quantized = [w for w in weights if isinstance(w, QuantTensor)]
        if len(quantized) < len(weights):
            dense = [w.dequantize(self.dtype) if isinstance(w, QuantTensor) else w for w in weights]
            note = "" if scheme.weight is None else "decoded to full precision by its format"
            self.kernel = KernelReport("dense", note=note)
            return DenseLinear(joined_rows(dense))
        weight = stack(quantized)
        input, note = usable_input(scheme.input)
        static = input is not None and not input.dynamic
        if static and weight.input_scale is None:
            input, static = replace(input, dynamic=True), False  # type: ignore[type-var]
            note = "the checkpoint has no scale for its static input: quantized dynamically"
        bare = replace(weight, inner=None, input_scale=None, input_zero=None)
        taken = self._input_of_kernel(bare, weight, input, device) if static else input
        gemm = self._gemm(bare, taken, device, note)
        if static and input is not None:
            gemm = with_static_input(gemm, weight, input, device)
        if weight.inner is None:
            return gemm
        return ScaledInput(gemm, weight.inner.to(device), weight.evaluation.inner)

    def _input_of_kernel(
        self,
        bare: QuantTensor,
        weight: QuantTensor,
        input: InputScheme | None,
        device: torch.device,
    ) -> InputScheme | None:
        """Return a fixed rounding if a kernel multiplies with its codes; None: it is done before.

        Args:
            bare: The weight as kernels take it.
            weight: The weight with the scale of its input.
            input: A static scheme.
            device: Where the kernel runs.
        """
        assert input is not None, "what is static is a scheme"
        fixed = replace(input, symmetric=weight.input_zero is None)
        refusal = RoundedGemm().why_not(bare, fixed, device=device, dtype=self.dtype)
        return fixed if refusal is None else None

    def _gemm(
        self, weight: QuantTensor, input: InputScheme | None, device: torch.device, note: str
    ) -> nn.Module:
        """Pack a weight whose input is rounded dynamically, or not at all."""
        shared = None if input is None else self._shared_rounding(input)
        choice = choose(weight, input, device=device, dtype=self.dtype)
        # some kernels can themselves round as one process does
        can_exchange = self.exchange_max is not None and choice.kernel.exchanges_max
        if shared is not None and not can_exchange:
            choice, input = choose(weight, None, device=device, dtype=self.dtype), None
        gemm = choice.kernel.pack(weight, input, device=device, dtype=self.dtype)
        if shared is not None and can_exchange:
            gemm.exchange_max = self.exchange_max  # type: ignore[assignment]
        elif shared is not None:
            gemm = RoundedInput(gemm, shared)
        self.kernel = KernelReport(choice.kernel.name, choice.refused, note)
        return gemm

    def _shared_rounding(self, input: InputScheme) -> Callable[[Tensor], Tensor] | None:
        """Return what rounds x where other ranks hold its other columns; None: the kernel does."""
        del input
        return None

    # -- running -------------------------------------------------------------------------------

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., K] to [..., N].

        Raises:
            ModelError: x needs a gradient and is rounded.
        """
        return self._multiply(self.gemm, x, self.bias)

    def _multiply(self, gemm: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        if not (torch.is_grad_enabled() and x.requires_grad) or is_differentiable(gemm):
            return gemm(x, bias)  # type: ignore[no-any-return]
        if rounds_input(gemm):
            raise ModelError(
                f"`{self.prefix}` is for inference only: its kernel `{self.kernel.name}` has no "
                f"gradient for inputs of scheme `{self.scheme}`, found an input that needs one",
                hint="run it under `torch.no_grad()`",
            )
        return with_gradient(gemm, x, bias)

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
            fn = keeping_dtypes(fn)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


def keeping_dtypes(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return `fn`, but for its changes of dtype: FP8 codes and scales are floats to `.to`."""

    def move(tensor: Tensor) -> Tensor:
        probe = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
        return fn(tensor) if probe.dtype == tensor.dtype else tensor.to(probe.device)

    return move


__all__ = [
    "DenseLinear",
    "KernelReport",
    "Key",
    "QuantLinear",
    "is_differentiable",
    "keeping_dtypes",
]
