"""The only definitions of error in the project.

    relative error   ||candidate - reference|| / ||reference||      (L2 over all elements)
    SQNR             -20 log10(relative error), in dB
    KL               sum_v p(v) (log p(v) - log q(v)), in nats per token; p reference, q candidate

Both norms are kept as sums of squares in float64, so the results of parts add up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_CHUNK = 1 << 22  # elements that are cast to float64 at a time: 32 MiB


@dataclass(frozen=True)
class ErrorSums:
    """Sums from which the relative error follows; add two to merge them.

    Args:
        noise: Sum of squared differences.
        signal: Sum of squared reference values.
        max_abs: Largest absolute difference.
        count: Number of elements.
        num_nonfinite: Elements of the candidate that are not finite.
    """

    noise: float = 0.0
    signal: float = 0.0
    max_abs: float = 0.0
    count: int = 0
    num_nonfinite: int = 0

    def __add__(self, other: ErrorSums) -> ErrorSums:
        return ErrorSums(
            noise=self.noise + other.noise,
            signal=self.signal + other.signal,
            max_abs=_largest(self.max_abs, other.max_abs),
            count=self.count + other.count,
            num_nonfinite=self.num_nonfinite + other.num_nonfinite,
        )

    @property
    def relative(self) -> float:
        """Relative L2 error; infinity where a zero reference was not met exactly."""
        if self.num_nonfinite:
            return math.nan
        if self.signal == 0.0:
            return 0.0 if self.noise == 0.0 else math.inf
        return math.sqrt(self.noise / self.signal)

    @property
    def sqnr_db(self) -> float:
        """Signal to quantization noise ratio in dB; infinity for an exact match."""
        relative = self.relative
        if relative == 0.0:
            return math.inf
        return -20.0 * math.log10(relative) if math.isfinite(relative) else -math.inf


def _largest(one: float, other: float) -> float:
    return math.nan if math.isnan(one) or math.isnan(other) else max(one, other)


def error_sums(candidate: Tensor, reference: Tensor) -> ErrorSums:
    """Compare two tensors of one shape, any float dtype, in float64.

    Returns:
        The sums; `num_nonfinite` counts elements of `candidate` only.
    """
    assert candidate.shape == reference.shape, f"{candidate.shape} against {reference.shape}"
    total = ErrorSums()
    pairs = candidate.reshape(-1), reference.reshape(-1)
    for start in range(0, candidate.numel(), _CHUNK):
        found, wanted = (flat[start : start + _CHUNK].to(torch.float64) for flat in pairs)
        difference = found - wanted
        total += ErrorSums(
            noise=float(difference.square().sum()),
            signal=float(wanted.square().sum()),
            max_abs=float(difference.abs().max()),
            count=difference.numel(),
            num_nonfinite=int((~found.isfinite()).sum()),
        )
    return total


def kl_divergence(reference: Tensor, candidate: Tensor) -> Tensor:
    """KL(reference || candidate) of each token.

    Args:
        reference: [..., V] logits; -inf for what cannot occur.
        candidate: [..., V] logits.

    Returns:
        [...] float64, nats; infinity where the candidate rules out what the reference does not.
    """
    log_p = torch.log_softmax(reference.to(torch.float64), dim=-1)
    log_q = torch.log_softmax(candidate.to(torch.float64), dim=-1)
    return kl_of_logarithms(log_p, log_q)


def kl_of_logarithms(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) of distributions given by their logarithms, [..., V] float64: [...] float64."""
    terms = log_p.exp() * (log_p - log_q)
    return terms.masked_fill(log_p == -math.inf, 0.0).sum(dim=-1)  # p log p is 0 at p = 0
