"""Weights of a block that wait for their turn in the dtype in which they are stored.

A model that runs in float32 has its bfloat16 weights in memory as bfloat16; rows are widened, some
at a time, when an input meets them. Quantized weights that no kernel multiplies as codes are
decoded once for a block instead of once for each batch, where that takes no more than
`DECODED_BYTES`: in the dtype to which their producer rounds, so that nothing is lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quantload.layers.lazy_weight import lazy_weight
from quantload.layers.linear import QuantLinear
from quantload.layers.replacement import put
from quantload.loader.places import Job
from quantload.loader.source import FLOAT_DTYPES, Source
from quantload.quant.activation import fake_quantize
from quantload.quant.scheme import InputScheme
from quantload.runtime.gemm import PackedRows, ReferenceLinear

DECODED_BYTES = 1 << 29  # of a block
_CHUNK_ELEMENTS = 1 << 22  # that are widened at a time: 16 MiB in float32


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x @ weight^T + bias in the dtype of x, [..., N].

    Args:
        x: [..., K].
        weight: [N, K] in this or a narrower dtype.
        bias: [N] or None.
    """
    if weight.dtype == x.dtype:
        return nn.functional.linear(x, weight, bias)
    if torch.is_grad_enabled() and x.requires_grad:
        y: Tensor = _Widened.apply(x, weight)  # type: ignore[no-untyped-call]
        return y if bias is None else y + bias
    parts = list(_parts(weight))
    if len(parts) == 1:
        return nn.functional.linear(x, weight.to(x.dtype), bias)
    y = x.new_empty(*x.shape[:-1], weight.shape[0])
    for part in parts:
        some = None if bias is None else bias[part]
        y[..., part] = nn.functional.linear(x, weight[part].to(x.dtype), some)
    return y


def _parts(weight: Tensor) -> Iterator[slice]:
    step = max(1, _CHUNK_ELEMENTS // max(1, weight.shape[1]))
    yield from (slice(start, start + step) for start in range(0, weight.shape[0], step))


class _Widened(torch.autograd.Function):
    """The product without a bias, whose graph keeps the weight as it is held."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # noqa: ANN401 - torch's context
        ctx.held = weight
        return multiply(x.detach(), weight, None)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        held: Tensor = ctx.held
        parts = (gradient[..., part] @ held[part].to(gradient.dtype) for part in _parts(held))
        return sum(parts, start=gradient.new_zeros(*gradient.shape[:-1], held.shape[1])), None


class HeldLinear(nn.Linear):
    """y = x @ W^T + bias with W [N, K] in the dtype in which it is stored.

    It is an `nn.Linear` to code that asks, and its weight one in the dtype of the model.

    Args:
        original: On the meta device; its bias goes on.
        stored: dtype of the weight, no wider than that of the original.
    """

    def __init__(self, original: nn.Linear, stored: torch.dtype) -> None:
        nn.Module.__init__(self)  # not that of nn.Linear, which allocates the weight
        self.in_features, self.out_features = original.in_features, original.out_features
        self.dtype = original.weight.dtype
        self.register_parameter("bias", original.bias)
        # no parameter: a model takes its own dtype from the first of these
        self._buffers["weight"] = torch.empty(original.weight.shape, dtype=stored, device="meta")

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """W in the dtype of the model, when somebody computes with it."""
        held = self._held
        return lazy_weight(
            lambda: held.to(self.dtype), held.shape, dtype=self.dtype, device=held.device
        )

    @property
    def _held(self) -> Tensor:
        held = self._buffers["weight"]
        assert held is not None, "it is set when the layer is made"
        return held

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., K] to [..., N]."""
        return multiply(input, self._held, self.bias)


class HeldProduct(nn.Module):
    """A packed weight that was decoded: y = x' @ W^T + bias.

    Args:
        weight: [N, K] in the dtype to which its producer rounds.
        input: How x is quantized, dynamically; None leaves it as it is.
    """

    weight: Tensor

    def __init__(self, weight: Tensor, input: InputScheme | None) -> None:
        super().__init__()
        self.input = input
        self.register_buffer("weight", weight)

    @property
    def differentiable(self) -> bool:
        """True if x is not rounded."""
        return self.input is None

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Map x [..., K] to [..., N]."""
        if self.input is not None:
            x = fake_quantize(x, self.input)
        return multiply(x, self.weight, bias)

    def weight_values(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [N, K]."""
        return self.weight.to(dtype)


def hold_as_stored(layer: nn.Module, source: Source, jobs: Sequence[Job], path: str) -> None:
    """Let linear layers of a block keep their weights in the dtype of the checkpoint.

    Args:
        layer: On the meta device; changed in place.
        source: The checkpoint.
        jobs: Where its tensors go.
        path: Path of the layer in the model.
    """
    stored: dict[str, set[torch.dtype]] = {}
    for job in jobs:
        if job.target.leaf == "weight" and job.target.module.startswith(f"{path}."):
            stored.setdefault(job.target.module, set()).add(_dtype_of(job, source))
    for name, module in list(layer.named_modules()):
        dtypes = stored.get(f"{path}.{name}", set())
        if type(module) is not nn.Linear or len(dtypes) != 1:
            continue
        (dtype,) = dtypes
        if dtype in FLOAT_DTYPES and dtype.itemsize < module.weight.dtype.itemsize:
            put(layer, name, HeldLinear(module, dtype))


def _dtype_of(job: Job, source: Source) -> torch.dtype:
    if job.weight is not None:
        return torch.uint8 if job.weight.is_quantized else job.weight.dtype
    return source.plain[job.name].dtype


def hold_decoded(layer: nn.Module) -> None:
    """Decode the weights of a loaded block that would be decoded for every batch, if they fit."""
    found: list[tuple[nn.Module, ReferenceLinear]] = []
    for module in layer.modules():
        if isinstance(module, QuantLinear):
            holder, gemm = _innermost(module)
            if isinstance(gemm, ReferenceLinear):
                found.append((holder, gemm))
    if sum(_decoded_bytes(gemm) for _, gemm in found) > DECODED_BYTES:
        return
    for holder, gemm in found:
        weight = gemm.weight_values(_rounded_to(gemm))
        holder.gemm = HeldProduct(weight, gemm.input)


def _innermost(layer: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Return the packed weight of a layer, and the module that has it as `gemm`."""
    holder, gemm = layer, layer.get_submodule("gemm")
    while "gemm" in gemm._modules:
        holder, gemm = gemm, gemm.get_submodule("gemm")
    return holder, gemm


def _decoded_bytes(gemm: ReferenceLinear) -> int:
    return (
        sum(len(rows.codes) * rows.columns for rows in _rows_of(gemm)) * _rounded_to(gemm).itemsize
    )


def _rounded_to(gemm: ReferenceLinear) -> torch.dtype:
    """Return the dtype that holds the producer's values."""
    evaluation = _rows_of(gemm)[0].evaluation
    return evaluation.result or evaluation.dtype


def _rows_of(gemm: ReferenceLinear) -> list[PackedRows]:
    return [rows for rows in gemm.chunks if isinstance(rows, PackedRows)]


__all__ = [
    "DECODED_BYTES",
    "HeldLinear",
    "HeldProduct",
    "hold_as_stored",
    "hold_decoded",
    "multiply",
]
