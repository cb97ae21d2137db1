"""Agreement of two models at their output: next-token distributions over all positions.

KL            KL(reference || candidate) of each position, in nats
top-1         share of positions where both put the same token first
loss          cross-entropy of the token that comes next in the sequence; its change is the
              change of the logarithm of perplexity
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from quantload.quant.metrics import kl_of_logarithms

_KL_ELEMENTS = 1 << 21  # of distributions that are held in float64 at a time: 16 MiB
_FEWEST_BEYOND = 2  # positions above a quantile, for its standard error to mean anything
CONFIDENCE = (0.0, 0.25, 0.5, 0.75, 0.9)  # lower ends of the reference's largest probability


class KLOfPart(NamedTuple):
    """The mean KL of positions at which the reference is about as sure.

    Args:
        low: Lower end of its largest probability.
        positions: How many.
        mean: Mean KL in nats; NaN without positions.
        standard_error: Of the mean; NaN for fewer than two.
    """

    low: float
    positions: int
    mean: float
    standard_error: float


@dataclass(frozen=True, kw_only=True)
class EndMetrics:
    """Agreement of the next-token distributions, over all positions of all sequences.

    Args:
        kl: [T] float64, KL(reference || candidate) of each position, nats.
        same_top1: [T] bool, True where both put the same token first.
        confidence: [T] float64, the reference's largest probability; None if nobody kept it.
        loss_change: [P] float64, by how much the cross-entropy of the next token grew, for each
            position that has one; None if nobody kept it.
        reference_loss: Mean cross-entropy of the reference in nats; NaN if nobody kept it.
    """

    kl: Tensor
    same_top1: Tensor
    confidence: Tensor | None = None
    loss_change: Tensor | None = None
    reference_loss: float = math.nan

    @property
    def num_tokens(self) -> int:
        """Number of positions."""
        return self.kl.numel()

    @property
    def kl_mean(self) -> float:
        """Mean KL in nats per token."""
        return float(self.kl.mean())

    @property
    def kl_standard_error(self) -> float:
        """Standard error of the mean KL, positions taken as independent."""
        return standard_error(self.kl)

    def kl_quantile(self, fraction: float) -> float:
        """KL that this fraction of the positions stays below."""
        return float(torch.quantile(self.kl, fraction))

    def kl_quantile_standard_error(self, fraction: float) -> float:
        """Standard error of `kl_quantile`, from order statistics; NaN where they do not reach.

        Half the distance of the values whose ranks are one binomial standard error below and above
        (Woodruff 1952, "Confidence intervals for medians and other position measures").
        """
        count = self.num_tokens
        spread = math.sqrt(fraction * (1 - fraction) / count)
        low, high = fraction - spread, fraction + spread
        if count < _FEWEST_BEYOND / min(fraction, 1 - fraction) or low < 0 or high > 1:
            return math.nan
        return (self.kl_quantile(high) - self.kl_quantile(low)) / 2

    @property
    def top1(self) -> float:
        """Share of positions where both put the same token first."""
        return float(self.same_top1.to(torch.float64).mean())

    @property
    def top1_standard_error(self) -> float:
        """Binomial standard error of `top1`."""
        return math.sqrt(self.top1 * (1 - self.top1) / self.num_tokens)

    @property
    def loss_mean_change(self) -> float:
        """Mean growth of the next token's cross-entropy, that of ln perplexity; NaN if unknown."""
        if self.loss_change is None or not self.loss_change.numel():
            return math.nan
        return float(self.loss_change.mean())

    @property
    def loss_standard_error(self) -> float:
        """Standard error of `loss_mean_change`, paired by position."""
        return math.nan if self.loss_change is None else standard_error(self.loss_change)

    def by_confidence(self) -> list[KLOfPart]:
        """Return the mean KL of positions by the reference's largest probability."""
        if self.confidence is None:
            return []
        found = []
        for low, high in zip(CONFIDENCE, (*CONFIDENCE[1:], math.inf), strict=True):
            inside = (self.confidence >= low) & (self.confidence < high)
            count = int(inside.sum())
            mean = float(self.kl[inside].mean()) if count else math.nan
            found.append(KLOfPart(low, count, mean, standard_error(self.kl[inside])))
        return found


def standard_error(values: Tensor) -> float:
    """Return the standard error of a mean of independent values; NaN for fewer than two."""
    count = values.numel()
    return float(values.std()) / math.sqrt(count) if count > 1 else math.nan


@dataclass
class EndSums:
    """Collects the agreement sequence by sequence."""

    kl: list[Tensor] = field(default_factory=list)
    same: list[Tensor] = field(default_factory=list)
    confidence: list[Tensor] = field(default_factory=list)
    losses: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def add(self, reference: Tensor, candidate: Tensor, ids: Tensor | Sequence[int]) -> None:
        """Add the logits [T, V] of one sequence of T token ids."""
        self.add_part(reference, candidate, torch.as_tensor(ids)[1:])

    def add_part(self, reference: Tensor, candidate: Tensor, following: Tensor) -> None:
        """Add the logits [T, V] of T tokens of a sequence, in order.

        Args:
            reference: Of the reference.
            candidate: Of the candidate.
            following: [T] ids, of each token the next one; one less where the sequence ends.
        """
        following = following.to(reference.device)
        count, step = reference.shape[0], max(1, _KL_ELEMENTS // reference.shape[-1])
        # made before the large tensors: kept between them, they would hold the heap apart
        kl, confidence = (torch.empty(count, dtype=torch.float64) for _ in range(2))
        same = torch.empty(count, dtype=torch.bool)
        losses = [torch.empty(len(following), dtype=torch.float64) for _ in range(2)]
        for start in range(0, count, step):
            part = slice(start, start + step)
            one, other = reference[part], candidate[part]
            log_p, log_q = (torch.log_softmax(x.double(), dim=-1) for x in (one, other))
            kl[part] = kl_of_logarithms(log_p, log_q).cpu()
            same[part] = (one.argmax(-1) == other.argmax(-1)).cpu()
            confidence[part] = log_p.amax(-1).exp().cpu()
            labels = following[part, None]
            for of_side, log in zip(losses, (log_p, log_q), strict=True):
                of_side[part] = -log[: len(labels)].gather(1, labels)[:, 0].cpu()
        self.kl.append(kl)
        self.same.append(same)
        self.confidence.append(confidence)
        self.losses.append((losses[0], losses[1]))

    def metrics(self) -> EndMetrics | None:
        """Return the agreement over all sequences; None if there was none."""
        if not self.kl:
            return None
        losses = torch.cat([one for one, _ in self.losses])
        others = torch.cat([other for _, other in self.losses])
        return EndMetrics(
            kl=torch.cat(self.kl),
            same_top1=torch.cat(self.same),
            confidence=torch.cat(self.confidence),
            loss_change=others - losses,
            reference_loss=float(losses.mean()) if losses.numel() else math.nan,
        )


__all__ = ["EndMetrics", "EndSums", "KLOfPart", "standard_error"]
