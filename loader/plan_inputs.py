"""Numbers for the inputs of layers in a plan.

What a static scheme writes beside each weight, and by what the search for scales weighs errors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from quantload.errors import ConfigError, ShapeError, counted, listed
from quantload.loader.layer_selection import parse_layers
from quantload.loader.plan_options import PlanOptions
from quantload.loader.plan_row import PlanRow
from quantload.loader.source import Source
from quantload.loader.stats import InputAbsmax, InputStatistics, input_absmax_for

FROM_SOURCE = "the source"


def with_input_numbers(
    rows: Iterable[PlanRow],
    groups: Iterable[tuple[str, ...]],
    options: PlanOptions,
    source: Source,
) -> tuple[tuple[PlanRow, ...], list[str]]:
    """Return rows with what is known of their inputs, and what the user should know of that.

    Args:
        rows: Of a plan.
        groups: Fused groups, whose members see one input.
        options: Hold the statistics, and the observer.
        source: Its own numbers serve where the user gives none.

    Raises:
        ConfigError: A scheme needs a number that nobody gives; or statistics are of no module.
        ShapeError: A mean square is of other features than those of its module.
    """
    rows, stats = tuple(rows), options.stats or InputStatistics()
    _refuse_other_models(rows, stats)
    _refuse_new_numbers(source, stats)
    members_of = {module: group for group in groups for module in group}
    found = []
    for row in rows:
        absmax = None
        if row.scheme is not None and not row.keeps_values:
            members = members_of.get(row.module, ())
            absmax = _of_source(row, members, stats, source)
            absmax = absmax or input_absmax_for(row.scheme, row.module, stats, members=members)
        found.append(row if absmax is None else replace(row, input_absmax=absmax))
    warnings = _about_defaults(found)
    if options.observer == "search":
        found = [_weighed(row, stats) for row in found]
        warnings += _about_unweighed(found, stats)
    elif stats.mean_square and all(row.input_absmax is None for row in found):
        warnings.append(
            f"the mean squares of `{stats.file}` are not used: they are for `--observer search`"
        )
    return tuple(found), [*warnings, *_about_unused(found, stats, members_of)]


def _refuse_other_models(rows: Sequence[PlanRow], stats: InputStatistics) -> None:
    """Refuse statistics of which not one is of this model: no option is ignored silently."""
    named = {*stats.absmax, *stats.mean_square}
    if not named or not named.isdisjoint(row.module for row in rows):
        return
    expected = [row.module for row in rows if row.scheme is not None] or [r.module for r in rows]
    raise ConfigError(
        f"`{stats.file}` has statistics of no module of this model: found {listed(named)}, "
        f"expected {listed(expected)}",
        hint="statistics have the names of modules in the checkpoint; give those of this model",
    )


def _refuse_new_numbers(source: Source, stats: InputStatistics) -> None:
    """Refuse statistics of a whole model for a part of it whose layers have other numbers."""
    if stats.file is None or not source.layers:
        return
    layers = parse_layers(source.layers)
    if layers != tuple(range(len(layers))):
        raise ConfigError(
            f"`--layers {source.layers}` gives layers new numbers, and `{stats.file}` names them "
            "by their old ones",
            hint=f"take the first layers, for example `--layers 0-{len(layers) - 1}`",
        )


def _weighed(row: PlanRow, stats: InputStatistics) -> PlanRow:
    """Return a row with the mean square of its own inputs, if there is one."""
    mean_square = stats.mean_square.get(row.module)
    if row.scheme is None or row.keeps_values or mean_square is None:
        return row
    entry, columns = mean_square.entry, row.shape[-1]
    if entry.shape != (columns,):
        raise ShapeError(
            f"tensor `{entry.name}` has shape `{entry.shape}`, expected `({columns},)`: a number "
            f"for each column of `{row.module}.weight`, in `{entry.file}`",
            hint="give statistics of this model, under the names of its modules",
        )
    return row if mean_square.is_zero else replace(row, mean_square=mean_square)


def _about_unweighed(rows: Iterable[PlanRow], stats: InputStatistics) -> list[str]:
    """Tell of weights that are searched as if all inputs were alike, beside a file that knows."""
    if stats.file is None:
        return []
    searched = [row for row in rows if row.scheme is not None and not row.keeps_values]
    alike = [row.module for row in searched if row.mean_square is None]
    if not alike:
        return []
    return [
        f"{len(alike)} of {counted(len(searched), 'layer')} {'is' if len(alike) == 1 else 'are'} "
        f"searched with all columns alike, since `{stats.file}` has no input_mean_square above "
        f"zero of {'it' if len(alike) == 1 else 'them'}: {listed(alike)}"
    ]


def _of_source(
    row: PlanRow, members: tuple[str, ...], stats: InputStatistics, source: Source
) -> InputAbsmax | None:
    """Return what a quantized source says of an input; None if it or the user says otherwise."""
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
    rows: Sequence[PlanRow], stats: InputStatistics, members_of: dict[str, tuple[str, ...]]
) -> list[str]:
    """Tell of statistics that no layer takes: of another model, or under other names."""
    taken = {row.module for row in rows if row.input_absmax is not None}
    taken |= {name for module in taken for name in members_of.get(module, ())}
    taken |= {row.module for row in rows if row.mean_square is not None}
    # files of whole models know what is kept as it is, too
    taken |= {row.module for row in rows if row.scheme is None or row.keeps_values}
    # zeros are told with the layers that are searched without them
    zeros = {name for name, found in stats.mean_square.items() if found.is_zero}
    taken |= zeros.intersection(row.module for row in rows)
    unused = {*stats.absmax, *stats.mean_square} - taken
    found = [(len(unused), "entry", "entries", listed(unused))] if unused else []
    if stats.others:
        found.append((len(stats.others), "tensor", "tensors", listed(stats.others)))
    return [
        f"{counted(count, one, more)} of `{stats.file}` {'is' if count == 1 else 'are'} used by no "
        f"layer: {names}"
        for count, one, more, names in found
    ]
