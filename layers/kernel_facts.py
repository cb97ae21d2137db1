"""What a packed weight says of itself: its bytes, its layout, what a call launches and may take.

    limit us   max(weight bytes / read bandwidth, 2 M N K / rate of the input's dtype)
    share      limit us / us of a call, where such a call was measured on this card

Letters: M tokens, N output features, K input features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from quantload.quant.scheme import InputScheme
from quantload.runtime.launch_settings import card_limits, measured_us, trying


@dataclass(frozen=True)
class Call:
    """One call of a layer's product.

    Args:
        tokens: M.
        kernels: Names of the device functions it launches, as a profiler shows them; () if the
            kernel does not say.
        limit_us: The time in which the card reads the weight, or computes, whichever is longer;
            None if the card was not measured.
        expected_us: The time of such a call when it was tuned on such a card; None if it was not.
    """

    tokens: int
    kernels: tuple[str, ...] = ()
    limit_us: float | None = None
    expected_us: float | None = None

    @property
    def expected_share(self) -> float | None:
        """The expected share of the limit, 1 at the limit; None if it is not known."""
        if self.limit_us is None or self.expected_us is None:
            return None
        return self.limit_us / self.expected_us


def packed_in(gemm: nn.Module) -> nn.Module:
    """Return the packed weight inside of what prepares its input."""
    while isinstance(inner := getattr(gemm, "gemm", None), nn.Module):
        gemm = inner
    return gemm


def layout_of(gemm: nn.Module) -> str:
    """Return how a packed weight lies in memory, for people; "" if it does not say."""
    return str(getattr(packed_in(gemm), "layout", ""))


def weight_bytes(gemm: nn.Module) -> int:
    """Return the bytes of a packed weight on its device, scales and tables included."""
    return sum(buffer.nbytes for buffer in packed_in(gemm).buffers())


def launches_of(packed: nn.Module, tokens: int) -> tuple[str, ...]:
    """Return the names of the device functions of a call; () if the kernel does not say."""
    launches = getattr(packed, "kernels_for", None)
    return () if launches is None else tuple(launches(tokens))


def call_of(
    gemm: nn.Module, shape: tuple[int, int], input: InputScheme | None, tokens: int
) -> Call:
    """Say what a call of a packed weight launches, and how long it may take.

    Args:
        gemm: The packed weight, or what prepares its input.
        shape: (N, K).
        input: How the input is rounded.
        tokens: M.
    """
    packed = packed_in(gemm)
    buffer = next(packed.buffers(), None)
    if buffer is None:
        return Call(tokens)
    with trying() as trial:  # the kernel asks for the settings of such a call
        kernels = launches_of(packed, tokens)
    (n, k), device = shape, buffer.device
    asked = {name for name, *_ in trial.asked}
    expected = measured_us(asked.pop(), device, m=tokens, n=n, k=k) if len(asked) == 1 else None
    limit = _limit_us(weight_bytes(gemm), 2 * tokens * n * k, input, device)
    return Call(tokens, kernels, limit, expected)


def _limit_us(
    size: int, operations: int, input: InputScheme | None, device: torch.device
) -> float | None:
    limits = card_limits(device)
    if limits is None:
        return None
    dtype = "bf16"
    if input is not None and input.grid.bits == 8:
        dtype = "fp8" if input.grid.is_float8 else "int8"
    rate = limits.tflops.get(dtype)
    return max(size / limits.read_gb_s / 1e3, operations / rate / 1e6 if rate else 0.0)


__all__ = ["Call", "call_of", "launches_of", "layout_of", "packed_in", "weight_bytes"]
