"""Which scheme each group of layers gets under a budget of bits: a knapsack with several choices.

Every group has options, each with its size and what it costs in accuracy; the sum of costs shall be
small and the sum of sizes at most the budget. Dynamic programming finds the best mix; where sizes
have no large common divisor they are rounded up for it, so that another one is tried beside it:
each group's options on the lower convex hull are climbed in order of accuracy gained a bit, over
all groups, while they fit (the Lagrangian solution), and what is left of the budget is spent on the
single best changes that fit. Equal inputs give equal results.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantload.errors import ConfigError

_UNITS = 1 << 16  # into which dynamic programming cuts the bits to be shared out


@dataclass(frozen=True, kw_only=True)
class Option:
    """What one group may become.

    Args:
        scheme: Name of the scheme.
        bits: Stored bits of the whole group, scales included.
        cost: What it costs in accuracy; costs of groups add up.
    """

    scheme: str
    bits: float
    cost: float


def allocate(groups: Mapping[str, Sequence[Option]], budget: float) -> dict[str, Option]:
    """Choose an option for each group.

    Args:
        groups: Options of each group; at least one.
        budget: Most bits of all groups together.

    Returns:
        The chosen options, by group.

    Raises:
        ConfigError: The smallest options together exceed the budget.
    """
    hulls = {name: _hull(options) for name, options in groups.items()}
    level = dict.fromkeys(hulls, 0)
    left = budget - sum(hull[0].bits for hull in hulls.values())
    if left < 0:
        raise ConfigError(
            f"the budget is {budget:.0f} bits, the smallest schemes take {budget - left:.0f}",
            hint="allow more bits, or a smaller scheme",
        )
    for _, name, number in sorted(_steps(hulls)):
        hull = hulls[name]
        more = hull[number].bits - hull[number - 1].bits
        if level[name] == number - 1 and more <= left:
            level[name], left = number, left - more
    chosen = {name: hulls[name][number] for name, number in level.items()}
    found = (_spend(chosen, groups, left), _optimum(groups, budget))
    return min(found, key=lambda mix: sum(option.cost for option in mix.values()))


def budget_curve(groups: Mapping[str, Sequence[Option]]) -> list[tuple[float, float]]:
    """Return (bits, cost) of every step from the smallest options of all groups to the best.

    These are the budgets that are spent to the last bit; between two of them `allocate` gives the
    cost of the smaller, or less.

    Args:
        groups: Options of each group; at least one.
    """
    hulls = {name: _hull(options) for name, options in groups.items()}
    bits = sum(hull[0].bits for hull in hulls.values())
    cost = sum(hull[0].cost for hull in hulls.values())
    curve = [(bits, cost)]
    for _, name, number in sorted(_steps(hulls)):
        bits += hulls[name][number].bits - hulls[name][number - 1].bits
        cost += hulls[name][number].cost - hulls[name][number - 1].cost
        curve.append((bits, cost))
    return curve


def _hull(options: Sequence[Option]) -> list[Option]:
    """Return the options on the lower convex hull of cost over bits, smallest first."""
    hull: list[Option] = []
    for option in sorted(options, key=lambda o: (o.bits, o.cost, o.scheme)):
        if hull and option.cost >= hull[-1].cost:
            continue
        while len(hull) > 1 and _slope(hull[-2], option) >= _slope(hull[-2], hull[-1]):
            hull.pop()
        if hull and hull[-1].bits == option.bits:
            hull.pop()
        hull.append(option)
    return hull


def _slope(small: Option, large: Option) -> float:
    """Accuracy gained for a bit."""
    return (small.cost - large.cost) / max(large.bits - small.bits, 1e-30)


def _steps(hulls: Mapping[str, Sequence[Option]]) -> list[tuple[float, str, int]]:
    """Return (negated gain for a bit, group, level that is reached) of each step of each hull."""
    return [
        (-_slope(hull[number - 1], hull[number]), name, number)
        for name, hull in hulls.items()
        for number in range(1, len(hull))
    ]


def _spend(
    chosen: dict[str, Option], groups: Mapping[str, Sequence[Option]], left: float
) -> dict[str, Option]:
    """Make the change that gains most and fits, as long as there is one."""
    while True:
        changes = [
            (option.cost - chosen[name].cost, name, option)
            for name, options in groups.items()
            for option in options
            if option.cost < chosen[name].cost and option.bits - chosen[name].bits <= left
        ]
        if not changes:
            return chosen
        _, name, option = min(changes, key=lambda change: (change[0], change[1], change[2].scheme))
        left -= option.bits - chosen[name].bits
        chosen[name] = option


def _optimum(groups: Mapping[str, Sequence[Option]], budget: float) -> dict[str, Option]:
    """Solve the multiple-choice knapsack by dynamic programming over bits above the smallest.

    Exact where the sizes have a common divisor of 1/65,536 of what is to be shared out or more;
    else sizes are rounded up to that.
    """
    ordered = {n: sorted(options, key=lambda o: (o.bits, o.cost)) for n, options in groups.items()}
    extra = {n: [math.ceil(o.bits - held[0].bits) for o in held] for n, held in ordered.items()}
    free = math.floor(budget - sum(held[0].bits for held in ordered.values()))
    free = min(free, sum(sizes[-1] for sizes in extra.values()))
    unit = max(math.gcd(*(size for sizes in extra.values() for size in sizes)), free // _UNITS, 1)
    least = torch.zeros(free // unit + 1, dtype=torch.float64)  # cost of what takes [u] units
    taken: dict[str, Tensor] = {}
    for name, options in ordered.items():
        costs = torch.full((len(options), len(least)), math.inf, dtype=torch.float64)
        for number, option in enumerate(options):
            units = -(-extra[name][number] // unit)
            if units < len(least):
                costs[number, units:] = least[: len(least) - units] + option.cost
        least, taken[name] = costs.min(dim=0)
    left, chosen = len(least) - 1, {}
    for name in reversed(ordered):
        number = int(taken[name][left])
        chosen[name] = ordered[name][number]
        left -= -(-extra[name][number] // unit)
    return {name: chosen[name] for name in groups}


__all__ = ["Option", "allocate", "budget_curve"]
