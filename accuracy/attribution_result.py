"""What causes the drift of a candidate, and what the numbers say in words."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from quantload.accuracy.attribution_units import By, Unit

ADDITIVE = (0.7, 1.4)  # ratios of the whole KL to the sum of the parts at which effects add
STANDS_OUT = 2.0  # times the median of its kind
MATTERS = 0.05  # share of the sum of all effects from which on what stands out is a suspect
CLEAR = 3.0  # standard errors between two units that are told apart


@dataclass(frozen=True, kw_only=True)
class KlMean:
    """A mean KL in nats a token.

    Args:
        mean: Over all positions; infinity where an output is no number.
        standard_error: Of the mean, positions taken as independent.
        tokens: Positions.
    """

    mean: float
    standard_error: float
    tokens: int


@dataclass(frozen=True, kw_only=True)
class UnitDrift:
    """What one unit does to the output.

    Args:
        unit: What is exchanged.
        kl: KL(reference || reference with this unit of the candidate), on all tokens if the unit is
            `refined`, else on those of the first pass.
        share: Part of the sum of all units' KL in the first pass.
        error: Median over tokens of the relative error of a module's output, on the inputs that the
            reference gives it: of the module of the unit that is furthest from what is usual for
            its kind; None where there is none to take.
        of_kind: That error over the median of those of the same module in other blocks with the
            same encoding; None where fewer than 4 others are.
        member: Path in the model of that module.
        refined: True if it was run on all tokens.
        noise: KL with noise of the same norm in place of the error; None if it was not run.
        put_back: KL(reference || candidate with this unit of the reference); None likewise.
    """

    unit: Unit
    kl: KlMean
    share: float
    error: float | None = None
    of_kind: float | None = None
    member: str = ""
    refined: bool = False
    noise: KlMean | None = None
    put_back: KlMean | None = None

    @property
    def stands_out(self) -> bool:
        """True if an output of it is off by twice as much as is usual for its kind, or more."""
        return self.of_kind is not None and self.of_kind >= STANDS_OUT

    @property
    def is_suspect(self) -> bool:
        """True if it stands out, and shows at the output: usual rounding does not explain it."""
        return self.stands_out and self.share >= MATTERS

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """What it is ranked by, the largest first: no number, then suspects, then KL."""
        return math.isinf(self.kl.mean), self.is_suspect, self.kl.mean

    @property
    def noise_ratio(self) -> float | None:
        """KL of the error over that of noise: above 1 its direction makes it worse."""
        return None if self.noise is None or not self.noise.mean else self.kl.mean / self.noise.mean


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """What causes the drift of a candidate.

    Args:
        units: Suspects, then the others, the largest KL first: those that ran on all tokens, then
            those that did not.
        by: What was exchanged at once.
        whole: KL(reference || candidate) on all tokens.
        whole_first: The same on the tokens of the first pass.
        sum_of_parts: Sum of the units' KL in the first pass.
        nothing: KL where nothing was exchanged; 0 unless the measurement is at fault.
        lead: By how many standard errors the first is ahead of the second; None if either is alone.
        equal: Checkpoint names of what is equal in both, and so was not exchanged.
        config: What the configs say differently of the model: no exchange of layers shows that.
        why_whole: Why the models were in memory as a whole; "" if they were not.
    """

    units: tuple[UnitDrift, ...]
    by: By
    whole: KlMean
    whole_first: KlMean
    sum_of_parts: float
    nothing: float = 0.0
    lead: float | None = None
    equal: tuple[str, ...] = field(default=(), repr=False)
    config: tuple[str, ...] = ()
    why_whole: str = ""

    @property
    def additivity(self) -> float:
        """KL of the whole over the sum of the parts; NaN where nothing has an effect."""
        return self.whole_first.mean / self.sum_of_parts if self.sum_of_parts else math.nan

    @property
    def standing_out(self) -> tuple[UnitDrift, ...]:
        """Units whose outputs are off by more than is usual for their kind, worst first."""
        found = [row for row in self.units if row.stands_out]
        return tuple(sorted(found, key=lambda row: -(row.of_kind or 0.0)))

    @property
    def verdict(self) -> str:
        """Whether effects add, in words."""
        ratio = self.additivity
        found = f"together they give {ratio:.2f} times the sum of the single exchanges"
        if not math.isfinite(ratio):
            return "single exchanges have no finite effect to add up"
        if ratio < ADDITIVE[0]:
            return f"{found}: effects do not add, they overlap or cancel; putting back tells more"
        if ratio > ADDITIVE[1]:
            return f"{found}: effects do not add, they build up; putting back tells more"
        return f"{found}: effects add, shares are of the drift"

    @property
    def leaders(self) -> str:
        """How clearly the first is ahead of the second, in words; "" if KL has not decided that."""
        if self.lead is None or self.units[0].is_suspect != self.units[1].is_suspect:
            return ""
        names = " and ".join(f"`{row.unit.name}`" for row in self.units[:2])
        if math.isnan(self.lead):
            return f"{names} cannot be told apart on one token"
        if not self.lead > CLEAR:
            return f"{names} cannot be told apart on these tokens ({self.lead:.1f} standard errors)"
        return f"{names}: the first is ahead by {self.lead:.1f} standard errors"

    def removed(self, row: UnitDrift) -> float | None:
        """Return which part of the drift goes away where a unit is put back; None if unknown."""
        if row.put_back is None or not self.whole.mean:
            return None
        return 1 - row.put_back.mean / self.whole.mean


__all__ = ["ADDITIVE", "CLEAR", "STANDS_OUT", "Attribution", "KlMean", "UnitDrift"]
