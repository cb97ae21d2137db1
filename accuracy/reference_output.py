"""KL of many models against one reference, whose distributions are computed once."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quantload.errors import NotComparable
from quantload.quant.metrics import kl_divergence

_KL_TOKENS = 64  # tokens whose distributions are in work at a time


class ReferenceOutput:
    """The next-token distributions of the reference, against which others are held.

    KL(p || q) = log sum_v p(v) exp(d(v)) - sum_v p(v) d(v), d the difference of the logits: one
    pass in float32, of which the relative error is below 1e-4 for KL from 1e-6 nats on, and which
    is exactly 0 for equal logits. Where that is no number, float64 decides.

    Args:
        logits: [B, T, V].

    Raises:
        NotComparable: They are not finite.
    """

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits.flatten(0, -2).float()
        if bool(self._logits.isnan().any()) or bool(self._logits.isposinf().any()):
            raise NotComparable("logits of the reference are not finite")
        self._p = self._logits.softmax(dim=-1)

    @property
    def vocabulary(self) -> int:
        """V."""
        return self._logits.shape[-1]

    def kl(self, logits: Tensor) -> Tensor:
        """Return KL(reference || candidate) of each position, [B * T] float64 on the CPU.

        Args:
            logits: [B, T, V] of the candidate.

        Raises:
            NotComparable: The vocabulary is another one.
        """
        rows = logits.flatten(0, -2).float()
        if rows.shape != self._logits.shape:
            raise NotComparable(
                f"vocabularies differ: {self.vocabulary} logits against {rows.shape[-1]}"
            )
        parts = (torch.split(x, _KL_TOKENS) for x in (self._logits, self._p, rows))
        return torch.cat([_kl(*part) for part in zip(*parts, strict=True)]).cpu()


def _kl(reference: Tensor, p: Tensor, candidate: Tensor) -> Tensor:
    d = candidate - reference
    d -= torch.linalg.vecdot(p, d)[:, None]  # a shift of all logits changes nothing, rounds less
    rest = torch.linalg.vecdot(p, d).double()
    found = torch.log1p(torch.linalg.vecdot(p, d.expm1_()).double()) - rest
    wrong = ~found.isfinite()
    if bool(wrong.any()):
        found[wrong] = kl_divergence(reference[wrong], candidate[wrong]).nan_to_num(nan=math.inf)
    return torch.clamp(found, min=0.0)


__all__ = ["ReferenceOutput"]
