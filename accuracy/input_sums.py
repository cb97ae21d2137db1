"""What is summed up of the inputs of a linear layer: exact, mergeable, however tokens are batched.

Letters: S tokens, K input features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_CHUNK = 1 << 20  # elements that are held in float64 at a time


@dataclass(frozen=True, kw_only=True)
class InputSums:
    """Sums over the inputs of one layer.

    Args:
        count: S, how many tokens reached it.
        squares: [K] float64, sum of x^2 of each input feature.
        low: [K] float32, smallest x of each input feature.
        high: [K] float32, largest x of each input feature.
    """

    count: int
    squares: Tensor
    low: Tensor
    high: Tensor

    @classmethod
    def of(cls, x: Tensor) -> InputSums:
        """Sum up inputs x [..., K] of any float dtype, at least one token."""
        rows = x.detach().reshape(-1, x.shape[-1])
        squares = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
        for part in torch.split(rows, max(1, _CHUNK // rows.shape[1])):
            squares += part.to(torch.float64).square().sum(dim=0)  # the input is the model's
        return cls(
            count=rows.shape[0],
            squares=squares,
            low=rows.amin(dim=0).float(),
            high=rows.amax(dim=0).float(),
        )

    def __add__(self, other: InputSums) -> InputSums:
        """Return the sums over the tokens of both."""
        return InputSums(
            count=self.count + other.count,
            squares=self.squares + other.squares,
            low=torch.minimum(self.low, other.low),
            high=torch.maximum(self.high, other.high),
        )

    @property
    def mean_square(self) -> Tensor:
        """E[x^2] of each input feature, [K] float64."""
        return self.squares / self.count

    @property
    def absmax(self) -> float:
        """The largest |x|."""
        return float(torch.maximum(self.high, -self.low).max())

    @property
    def is_finite(self) -> bool:
        """True if every input was a number."""
        return bool(self.squares.isfinite().all())

    def equals(self, other: InputSums) -> bool:
        """True if both are sums over the same inputs."""
        return self.count == other.count and all(
            torch.equal(one, two)
            for one, two in (
                (self.squares, other.squares),
                (self.low, other.low),
                (self.high, other.high),
            )
        )


__all__ = ["InputSums"]
