"""Limits that users set: `layer.sqnr<15` fails a comparison in which some layer stays below 15 dB.

A limit is the condition of failure: the name of a statistic, `<` or `>`, and a number, or one in
percent. Limits of users take the place of those on the size of errors that `compare.py` has. What
makes numbers worthless, or shows damage, fails a comparison whatever its limits: values that are
not finite, tensors that are missing, layers that stand out among their like.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from quantload.accuracy.compare import TIERS, Exceeded, LayerComparison, ModelComparison, Tier
from quantload.accuracy.end_metrics import EndMetrics
from quantload.errors import ConfigError, listed

_Values = Callable[[ModelComparison], Iterator[tuple[str, float]]]
_NUMBER = r"[-+]?[0-9.]+(?:e[-+]?[0-9]+)?"
_LIMIT = re.compile(rf"\s*([a-z][a-z0-9_.]*)\s*([<>])\s*({_NUMBER})\s*(%?)\s*", re.IGNORECASE)
_TOKENS = "give tokens: `--data FILE`, `--token-ids FILE`, or `--generated`"


@dataclass(frozen=True, kw_only=True)
class Statistic:
    """Something that a limit can be set for.

    Args:
        name: What users call it.
        about: What it is, with its unit.
        fails: "<" if small values are bad, ">" if large ones are.
        tier: The lowest tier that measures it.
        values: Yields (where, value) of a comparison; NaN fails every limit.
    """

    name: str
    about: str
    fails: str
    tier: Tier
    values: _Values


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A limit of a user.

    Args:
        statistic: What is limited.
        value: Values beyond it fail.
        text: As the user wrote it.
    """

    statistic: Statistic
    value: float
    text: str

    def exceeded(self, comparison: ModelComparison) -> list[Exceeded]:
        """Return where a comparison is beyond the limit, the worst first.

        Raises:
            ConfigError: The statistic was not measured.
        """
        found = list(self.statistic.values(comparison))
        if not found and self.statistic.tier in ("end", "layers"):
            raise ConfigError(
                f"`{self.text}` cannot be checked: no `{self.statistic.name}` was measured"
            )
        sign = 1 if self.statistic.fails == "<" else -1
        beyond = [
            Exceeded(limit=self.text, where=where, value=value)
            for where, value in found
            if not sign * value >= sign * self.value  # NaN is beyond any limit
        ]
        return sorted(
            beyond, key=lambda one: -math.inf if math.isnan(one.value) else sign * one.value
        )


# -- what there is ---------------------------------------------------------------------------------


def _of_rows(value: Callable[[LayerComparison], float | None]) -> _Values:
    def values(comparison: ModelComparison) -> Iterator[tuple[str, float]]:
        for row in comparison.layers:
            found = value(row)
            if found is not None:
                yield row.module, found

    return values


def _of_outputs(value: Callable[[LayerComparison], float | None]) -> _Values:
    """The same without experts that too few tokens reached for a number."""

    def values(comparison: ModelComparison) -> Iterator[tuple[str, float]]:
        few = {*comparison.few, *comparison.unseen}
        for row in comparison.layers:
            found = None if row.output is None or row.module in few else value(row)
            if found is not None:
                yield row.module, found

    return values


def _part(held: str, name: str) -> Callable[[LayerComparison], float | None]:
    """Return what gives a number of the weight, the output or the rounding of a row."""

    def value(row: LayerComparison) -> float | None:
        found = getattr(row, held)
        return None if found is None else float(getattr(found, name))

    return value


def _bias(row: LayerComparison) -> float | None:
    return None if row.rounding is None else abs(row.rounding.bias)


def _layer_sqnr(comparison: ModelComparison) -> Iterator[tuple[str, float]]:
    few = {*comparison.few, *comparison.unseen}
    for row in comparison.layers:
        sums = row.weight if row.output is None or row.module in few else row.output
        if sums is not None:
            yield row.module, sums.sqnr_db


def _mean_sqnr(comparison: ModelComparison) -> Iterator[tuple[str, float]]:
    values = [
        row.weight.sqnr_db
        for row in comparison.layers
        if row.weight is not None and row.differs and not row.is_plain
    ]
    yield "mean over the weights that differ", sum(values) / len(values) if values else math.inf


def _of_end(value: Callable[[EndMetrics], float]) -> _Values:
    def values(comparison: ModelComparison) -> Iterator[tuple[str, float]]:
        if comparison.end is not None:
            yield "", value(comparison.end)

    return values


def _bits(comparison: ModelComparison) -> Iterator[tuple[str, float]]:
    if comparison.structure is not None:
        yield "", comparison.structure.bits


def _all() -> Iterator[Statistic]:
    def statistic(name: str, fails: str, tier: Tier, values: _Values, about: str) -> Statistic:
        return Statistic(name=name, fails=fails, tier=tier, values=values, about=about)

    rows, outputs, end = _of_rows, _of_outputs, _of_end
    yield statistic("bits", ">", "structure", _bits, "stored bits of a weight, with scales")
    yield statistic(
        "layer.sqnr", "<", "weights", _layer_sqnr, "dB, of isolated outputs or else of weights"
    )
    yield statistic("weight.sqnr", "<", "weights", rows(_part("weight", "sqnr_db")), "dB")
    yield statistic("weight.sqnr_mean", "<", "weights", _mean_sqnr, "dB, mean over the weights")
    yield statistic("weight.relative", ">", "weights", rows(_part("weight", "relative")), "error")
    yield statistic(
        "weight.worst_row", ">", "weights", rows(lambda r: r.worst_row_error), "relative error"
    )
    yield statistic("weight.steps", ">", "weights", rows(_part("rounding", "max_steps")), "steps")
    yield statistic("weight.bias", ">", "weights", rows(_bias), "steps")
    yield statistic(
        "weight.rails",
        ">",
        "weights",
        rows(_part("rounding", "rail_share")),
        "share",
    )
    yield statistic("output.sqnr", "<", "layers", outputs(_part("output", "sqnr_db")), "dB")
    yield statistic(
        "output.median",
        ">",
        "layers",
        outputs(lambda r: r.output_median),
        "error, median of tokens",
    )
    yield statistic(
        "block.injected",
        ">",
        "end",
        lambda c: ((b.path, b.injected_median) for b in c.blocks),
        "error, median of tokens",
    )
    yield statistic(
        "block.propagated",
        ">",
        "end",
        lambda c: ((b.path, b.propagated_median) for b in c.blocks),
        "error, median of tokens",
    )
    yield statistic(
        "router.overlap",
        "<",
        "end",
        lambda c: ((path, router.share) for path, router in c.routers.items()),
        "share of the reference's choices of experts",
    )
    yield statistic("kl.mean", ">", "end", end(lambda e: e.kl_mean), "nats a token")
    for name, fraction in (("median", 0.5), ("p99", 0.99), ("p999", 0.999), ("max", 1.0)):
        of_end = end(lambda e, fraction=fraction: e.kl_quantile(fraction))  # type: ignore[misc]
        yield statistic(f"kl.{name}", ">", "end", of_end, "nats a token")
    yield statistic("top1", "<", "end", end(lambda e: e.top1), "share of tokens")
    yield statistic(
        "ln_perplexity", ">", "end", end(lambda e: e.loss_mean_change), "growth, nats a token"
    )


STATISTICS = {statistic.name: statistic for statistic in _all()}


# -- reading and applying --------------------------------------------------------------------------


def parse_limit(text: str) -> Limit:
    """Read a limit such as `layer.sqnr<15`, `kl.mean > 0.05` or `top1<95%`.

    Raises:
        ConfigError: It is not of this form, the statistic is unknown, or the limit would fail what
            is good.
    """
    found = _LIMIT.fullmatch(text)
    try:
        value = float(found[3]) if found else math.nan
    except ValueError:
        value = math.nan
    if found is None or not math.isfinite(value):
        raise ConfigError(
            f"not a limit: `{text}`, expected a statistic, `<` or `>`, and a number",
            hint="for example `layer.sqnr<15` or `kl.mean>0.05`",
        )
    name, sign = found[1].lower(), found[2]
    statistic = STATISTICS.get(name)
    if statistic is None:
        raise ConfigError(
            f"there is no statistic `{name}`, in the limit `{text}`; expected one of "
            f"{listed(STATISTICS, limit=len(STATISTICS))}"
        )
    if sign != statistic.fails:
        raise ConfigError(
            f"`{text}` would fail what is good, expected `{name}{statistic.fails}NUMBER`",
            hint="a limit is the condition of failure",
        )
    if found[4]:
        value /= 100
    return Limit(statistic=statistic, value=value, text=text.strip())


def with_limits(comparison: ModelComparison, limits: Sequence[Limit]) -> ModelComparison:
    """Return a comparison that is held to limits of a user instead of the built-in ones.

    Where the models could not be run, limits of what running shows say nothing.

    Raises:
        ConfigError: A statistic was not measured.
    """
    if not limits:
        return comparison
    layers = tuple(
        replace(row, weight_limit=math.inf, output_limit=math.inf) for row in comparison.layers
    )
    exceeded = tuple(
        found
        for limit in limits
        if not comparison.not_run or limit.statistic.tier not in ("end", "layers")
        for found in limit.exceeded(comparison)
    )
    return replace(
        comparison, layers=layers, limits=tuple(limit.text for limit in limits), exceeded=exceeded
    )


def checked_tier(tier: Tier | None, limits: Iterable[Limit], *, has_tokens: bool) -> Tier:
    """Return what is to be measured.

    Args:
        tier: What the user asked for; None is all that can be measured.
        limits: What has to be measured.
        has_tokens: True if there is something to run.

    Raises:
        ConfigError: There are no tokens and they are needed, or a limit needs a higher tier.
    """
    asked: Tier = tier or ("end" if has_tokens else "weights")
    if asked not in TIERS:
        raise ConfigError(f"there is no tier `{asked}`, expected one of {listed(TIERS)}")
    if asked in ("layers", "end") and not has_tokens:
        raise ConfigError(f"tier `{asked}` runs the models, and there are no tokens", hint=_TOKENS)
    for limit in limits:
        needed = limit.statistic.tier
        if TIERS.index(needed) > TIERS.index(asked):
            raise ConfigError(
                f"the limit `{limit.text}` needs tier `{needed}`, only `{asked}` is measured",
                hint=_TOKENS if tier is None else f"leave out `{tier}`, or this limit",
            )
    return asked


__all__ = ["STATISTICS", "Limit", "Statistic", "checked_tier", "parse_limit", "with_limits"]
