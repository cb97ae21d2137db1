"""Weights of all experts of a block in one module: products of rows with their experts' weights.

    y[p] = x[row of p] @ W[expert of p]^T + bias[expert of p]      p a pair of a token and an expert

Routing, products and the sum over a token's experts are a few launches in a row that never wait for
the host, so that a CUDA graph records them, whatever the routing will be.

Letters: E experts held here, S pairs, T tokens, k experts of a token, N and K as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from quantload.errors import ShapeError
from quantload.quant.activation import fake_quantize
from quantload.quant.scheme import InputScheme

if TYPE_CHECKING:
    from quantload.runtime.kernels.grouped_layout import ExpertStack, GroupedWeight, Rows
    from quantload.runtime.kernels.grouped_product import GatedActivation, Routing

__all__ = ["GroupedLinear", "new_stack", "rounding_of", "why_not_device", "why_not_dtype"]


def why_not_device(device: torch.device) -> str | None:
    """Say why the kernels do not run on a device, or None."""
    if device.type != "cuda":
        return f"runs on CUDA, found `{device.type}`"
    try:
        from quantload.runtime.kernels import grouped_product  # noqa: F401
    except ImportError as error:
        return f"cannot be imported: {error}"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"wants compute capability 8.0, found {capability[0]}.{capability[1]}"
    return None


def why_not_dtype(dtype: torch.dtype) -> str | None:
    """Say why the kernels do not take inputs of a dtype, or None."""
    return None if dtype == torch.bfloat16 else f"wants bfloat16, found `{dtype}`"


def new_stack(experts: int, rows: Rows, dtype: torch.dtype) -> ExpertStack:
    """Return an empty stack for the weights of experts.

    Args:
        experts: E.
        rows: How rows of gate and up are ordered: "plain" if there is no gate, "halves" for gate
            before up, "alternate" for gate, up, gate, up, ...
        dtype: dtype of inputs.
    """
    from quantload.runtime.kernels.grouped_layout import ExpertStack

    return ExpertStack(experts, rows, dtype)


def rounding_of(
    scheme: InputScheme, dtype: torch.dtype, features: int
) -> Callable[[Tensor], Tensor]:
    """Return what rounds rows of an input: one launch, where a kernel does it.

    Args:
        scheme: Dynamic, each row by itself.
        dtype: dtype of the rows.
        features: K.
    """
    from quantload.runtime.kernels.round_rows import round_rows, why_not

    serves = why_not(scheme, dtype, features) is None
    if scheme.grid.is_float8 and torch.cuda.is_available():
        serves &= torch.cuda.get_device_capability() >= (8, 9)  # older cards have no FP8
    return partial(round_rows if serves else fake_quantize, scheme=scheme)


class GroupedLinear(nn.Module):
    """The quantized weights of all experts.

    Args:
        weight: W of all experts.
        round_input: Maps rows x [..., K] to what their scheme makes of them, each row by itself;
            None leaves them.
    """

    def __init__(
        self, weight: GroupedWeight, round_input: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        self._weight, self.round_input = weight, round_input
        for name, part in weight.tensors().items():
            self.register_buffer(name, part)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GroupedLinear:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        moved = {name: getattr(self, name) for name in self._weight.tensors()}
        self._weight = self._weight.with_tensors(moved)
        return self

    @property
    def experts(self) -> int:
        """E."""
        return self._weight.experts

    @property
    def layout(self) -> str:
        """How the codes lie, for people."""
        columns, slots = self._weight.words.shape[-1], self._weight.slots
        return f"int16 words of {slots} slices of {columns} columns, all experts in one tensor"

    def kernels_for(self, tokens: int, *, choices: int = 0) -> tuple[str, ...]:
        """Return the device functions that a product of `tokens` pairs launches.

        Args:
            tokens: S.
            choices: Pairs of a token, where `summed` adds their results up after another product;
                0 for a product that routes by itself.
        """
        from quantload.runtime.kernels import grouped_product, grouped_sum, round_rows

        names: tuple[str, ...] = ()
        if self.round_input is not None:
            names = round_rows.kernel_names(self.round_input)
        if choices:
            return (*names, *grouped_sum.kernel_names(self._weight, tokens, choices))
        routes, product = grouped_product.kernel_names(tokens)
        return (*routes, *names, *product)

    def route(self, index: Tensor, *, first: int = 0) -> Routing:
        """Route pairs for this product, and for those of the same experts after it.

        Args:
            index: [...] integers, the expert of each pair.
            first: Number of the first expert here.
        """
        from quantload.runtime.kernels.grouped_product import routing

        return routing(self._weight, index, first=first)

    def product(
        self,
        x: Tensor,
        routing: Routing,
        *,
        choices: int = 1,
        activation: GatedActivation | None = None,
    ) -> Tensor:
        """Multiply, see `grouped_product`; x is rounded as its scheme says.

        Raises:
            ShapeError: x is not K wide.
        """
        from quantload.runtime.kernels.grouped_product import grouped_product

        if x.shape[-1] != self._weight.in_features:
            raise ShapeError(
                f"input has `{x.shape[-1]}` features, the experts expect "
                f"`{self._weight.in_features}`"
            )
        if self.round_input is not None:
            x = self.round_input(x)
        return grouped_product(x, self._weight, routing, choices=choices, activation=activation)

    def summed(self, x: Tensor, routing: Routing, weights: Tensor, *, dtype: torch.dtype) -> Tensor:
        """Multiply and sum the results of each token's experts up, see `grouped_sum`."""
        from quantload.runtime.kernels.grouped_sum import grouped_sum

        if self.round_input is not None:
            x = self.round_input(x)
        return grouped_sum(x, self._weight, routing, weights, dtype=dtype)

    def weight_values(self, dtype: torch.dtype) -> Tensor:
        """Return the weights [E, N, K]."""
        return self._weight.values(dtype)
