"""Errors of outputs: of layers, of blocks and of the whole model, from sums that add up."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantload.quant.metrics import ErrorSums, error_sums

FEWEST_TOKENS = 32  # that say something of an expert


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
        if not reference.numel():
            return
        self.sums += error_sums(candidate, reference)
        found, wanted = (x.reshape(-1, x.shape[-1]).double() for x in (candidate, reference))
        noise = (found - wanted).square().sum(dim=1)
        signal = wanted.square().sum(dim=1)
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
