"""Errors of outputs: of layers, of blocks and of the whole model, from sums that add up."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantload.quant.metrics import ErrorSums

FEWEST_TOKENS = 32  # that say something of an expert
_ELEMENTS = 1 << 19  # that are cast to float64 at a time: 4 MiB, which stays in the cache


@dataclass
class OutputErrors:
    """Errors of one output over all its tokens; grows while batches come.

    Args:
        sums: Over all tokens.
        of_tokens: Relative error of each token, [T] float32 a batch.
    """

    sums: ErrorSums = field(default_factory=ErrorSums)
    of_tokens: list[Tensor] = field(default_factory=list)

    def add(self, candidate: Tensor, reference: Tensor) -> None:
        """Add the outputs [..., N] of some tokens."""
        found, wanted = (x.reshape(-1, x.shape[-1]) for x in (candidate, reference))
        step = max(1, _ELEMENTS // max(1, wanted.shape[-1]))
        for one, other in zip(torch.split(found, step), torch.split(wanted, step), strict=True):
            if other.numel():
                self._add(one, other)

    def _add(self, found: Tensor, wanted: Tensor) -> None:
        values = wanted.to(torch.float64, copy=True)
        difference = found.to(torch.float64, copy=True).sub_(values)
        low, high = torch.aminmax(difference)
        noise = difference.square_().sum(dim=1)
        signal = values.square_().sum(dim=1)
        total = float(noise.sum())
        self.sums += ErrorSums(
            noise=total,
            signal=float(signal.sum()),
            max_abs=float(torch.maximum(high, -low)),
            count=wanted.numel(),
            num_nonfinite=0 if math.isfinite(total) else int((~found.isfinite()).sum()),
        )
        ratio = (noise / signal).sqrt()
        ratio = ratio.masked_fill((noise == 0) & (signal == 0), 0.0)  # nothing was lost
        self.of_tokens.append(ratio.float().cpu())

    @property
    def num_tokens(self) -> int:
        """Tokens that were seen."""
        return sum(part.numel() for part in self.of_tokens)

    @property
    def median(self) -> float:
        """Median over the tokens of the relative error of each."""
        return float(torch.cat(self.of_tokens).median())


__all__ = ["FEWEST_TOKENS", "OutputErrors"]
