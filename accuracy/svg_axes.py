"""Axes of charts: what they span, and where their ticks are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_FEWEST_POWERS = 3  # ticks of a logarithmic axis; with fewer, 2 and 5 times each have one too


@dataclass(frozen=True, kw_only=True)
class Axis:
    """What an axis spans.

    Args:
        label: Quantity and unit.
        low: Its lower end.
        high: Its upper end.
        ticks: (place, text), in order.
    """

    label: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]


def linear_axis(label: str, values: Sequence[float], *, count: int = 6, pad: bool = True) -> Axis:
    """Return an axis for some values; with `pad` it ends at ticks.

    Args:
        label: Quantity and unit.
        values: What is shown; what is not finite is passed over.
        count: About how many ticks.
        pad: Widen it to whole ticks.
    """
    found = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(found), max(found)
    if low == high:
        low, high = low - 0.5, high + 0.5
    step = _nice_step((high - low) / max(count, 1))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    if not pad:
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    ticks = [(at * step, f"{at * step:.{digits}f}") for at in range(first, last + 1)]
    if pad:
        low, high = first * step, last * step
    return Axis(label=label, low=low, high=high, ticks=ticks)


def _nice_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(n * power for n in (1.0, 2.0, 5.0, 10.0) if n * power >= step * (1 - 1e-9))


def log_axis(label: str, low: float, high: float, *, most: int = 8) -> Axis:
    """Return an axis of logarithms to base 10, with ticks at whole powers where there are some.

    Args:
        label: Quantity and unit.
        low: Logarithm of its lower end.
        high: Logarithm of its upper end.
        most: Ticks at most.
    """
    powers = range(math.floor(low), math.ceil(high) + 1)
    inside = [power for power in powers if low - 1e-9 <= power <= high + 1e-9]
    step = max(1, math.ceil(len(inside) / most))
    ticks = [(float(power), power_text(power)) for power in inside if power % step == 0]
    if len(inside) < _FEWEST_POWERS:
        between = [(power + math.log10(n), n * 10.0**power) for power in powers for n in (1, 2, 5)]
        ticks = [(at, f"{value:.3g}") for at, value in between if low <= at <= high]
    return Axis(label=label, low=low, high=high, ticks=ticks)


def power_text(power: int) -> str:
    """Return 10^power as people write it."""
    if -4 <= power <= 4:
        return f"{10.0**power:.{max(0, -power)}f}"
    return f"1e{power}"


__all__ = ["Axis", "linear_axis", "log_axis", "power_text"]
