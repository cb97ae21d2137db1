"""Fused groups in a plan: serving engines need the members of q/k/v or gate/up in one scheme."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from quantload.errors import RuleSplitsStack
from quantload.quant.scheme import Scheme

OnSplit = Literal["error", "keep", "promote"]


@dataclass(frozen=True)
class SplitOutcome:
    """Schemes and reasons after every fused group has one scheme.

    Args:
        schemes: By module; None is full precision.
        reasons: By module.
        warnings: One for each group that was changed.
    """

    schemes: Mapping[str, Scheme | None]
    reasons: Mapping[str, str]
    warnings: tuple[str, ...]


def settle_groups(
    schemes: Mapping[str, Scheme | None],
    reasons: Mapping[str, str],
    groups: Iterable[tuple[str, ...]],
    on_split: OnSplit,
) -> SplitOutcome:
    """Make the members of each fused group equal.

    Args:
        schemes: Scheme of each module; None is full precision.
        reasons: Why.
        groups: Members of each fused group.
        on_split: "error"; "keep" leaves the whole group in full precision; "promote" gives all
            members the most precise scheme among them.

    Raises:
        RuleSplitsStack: Members differ and `on_split` is "error".
    """
    settled, why = dict(schemes), dict(reasons)
    warnings = []
    for group in groups:
        members = [member for member in group if member in schemes]
        found = {schemes[member] for member in members}
        if len(found) < 2:
            continue
        if on_split == "error":
            raise _split_error(members, schemes, reasons)
        chosen = None if on_split == "keep" else max(found, key=precision)
        name = "full precision" if chosen is None else str(chosen)
        for member in members:
            if schemes[member] != chosen:
                why[member] += f"; then {name}, like the other members of its fused group"
            settled[member] = chosen
        warnings.append(
            f"fused group {_names(members)} was split by the rules; all members now: {name}"
        )
    return SplitOutcome(settled, why, tuple(warnings))


def precision(scheme: Scheme | None) -> tuple[int, int, int]:
    """Order schemes by precision: full, by bits, inputs not quantized, small groups."""
    if scheme is None or scheme.weight is None:
        return 99, 0, 0
    return (
        scheme.weight.grid.bits,
        scheme.input is None,
        -(scheme.weight.group_size or 1 << 30),
    )


def _split_error(
    members: list[str], schemes: Mapping[str, Scheme | None], reasons: Mapping[str, str]
) -> RuleSplitsStack:
    lines = "".join(
        f"\n  {member}: {schemes[member] or 'keep'} ({reasons[member]})" for member in members
    )
    return RuleSplitsStack(
        f"rules split the fused group {_names(members)}, expected one scheme for all:{lines}",
        hint="give all members one rule, or use `--on-split keep` or `--on-split promote`",
    )


def _names(members: list[str]) -> str:
    parent = members[0].rpartition(".")[0]
    return f"`{parent}` ({', '.join(member.rpartition('.')[2] for member in members)})"
