"""Numbers for the inputs of layers in a plan: what a static scheme writes beside each weight."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from quantload.errors import counted, listed
from quantload.loader.plan_row import PlanRow
from quantload.loader.source import Source
from quantload.loader.stats import InputAbsmax, InputStatistics, input_absmax_for

FROM_SOURCE = "the source"


def with_input_numbers(
    rows: Iterable[PlanRow],
    groups: Iterable[tuple[str, ...]],
    stats: InputStatistics | None,
    source: Source,
) -> tuple[tuple[PlanRow, ...], list[str]]:
    """Return rows with the largest |x| of their inputs, and what the user should know of them.

    Args:
        rows: Of a plan.
        groups: Fused groups, whose members see one input.
        stats: What is known of inputs.
        source: Its own numbers serve where the user gives none.

    Raises:
        ConfigError: A scheme needs a number that nobody gives.
    """
    members_of = {module: group for group in groups for module in group}
    found = []
    for row in rows:
        absmax = None
        if row.scheme is not None and not row.keeps_values:
            members = members_of.get(row.module, ())
            absmax = _of_source(row, members, stats, source)
            absmax = absmax or input_absmax_for(row.scheme, row.module, stats, members=members)
        found.append(row if absmax is None else replace(row, input_absmax=absmax))
    return tuple(found), [*_about_defaults(found), *_about_unused(found, stats, members_of)]


def _of_source(
    row: PlanRow, members: tuple[str, ...], stats: InputStatistics | None, source: Source
) -> InputAbsmax | None:
    """Return what a quantized source says of an input; None if it or the user says otherwise."""
    stats = stats or InputStatistics()
    modules = [name for name in (row.read_from, *members) if name in source.weights]
    is_given = stats.stated is not None or any(name in stats.absmax for name in modules)
    if row.scheme is None or row.scheme.input is None or not row.scheme.input.needs_scale:
        return None
    known = [] if is_given else [source.read_input_absmax(name) for name in modules]
    values = [value for value in known if value is not None]
    if not values or not math.isfinite(max(values)) or min(values) <= 0:
        return None
    return InputAbsmax(max(values), FROM_SOURCE)


def _about_defaults(rows: Iterable[PlanRow]) -> list[str]:
    absmax = [row.input_absmax for row in rows if row.input_absmax is not None]
    defaults = [number for number in absmax if number.is_default]
    if not defaults:
        return []
    return [
        f"the inputs of {counted(len(defaults), 'layer')} are covered up to "
        f"{defaults[0].value:g}, a default without data: larger ones are clipped; "
        "`--stats FILE` or `--input-absmax X` say better"
    ]


def _about_unused(
    rows: Iterable[PlanRow], stats: InputStatistics | None, members_of: dict[str, tuple[str, ...]]
) -> list[str]:
    """Tell of statistics that no layer takes: of another model, or under other names."""
    if stats is None or not stats.absmax:
        return []
    taken = {row.module for row in rows if row.input_absmax is not None}
    taken |= {name for module in taken for name in members_of.get(module, ())}
    unused = [name for name in stats.absmax if name not in taken]
    if not unused:
        return []
    return [
        f"{counted(len(unused), 'entry', 'entries')} of `{stats.file}` "
        f"{'is' if len(unused) == 1 else 'are'} used by no layer: {listed(unused)}"
    ]
