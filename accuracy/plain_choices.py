"""Choices of schemes that need no measurement: what a measured one has to beat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Group = tuple[str, ...]
_MATTERS = ("down_proj", "v_proj", "q_proj", "qkv_proj", "w2")  # llama.cpp: ffn_down and attn_v


@dataclass(frozen=True)
class Sizes:
    """How large a weight is.

    Args:
        elements: N * K, times the share of tokens that meet it if only those count.
        bits: Stored bits, scales included, times the same, by scheme.
    """

    elements: float
    bits: Mapping[str, float]


def bits_of(schemes: Mapping[str, str], sizes: Mapping[str, Sizes]) -> float:
    """Return the bits of all modules together."""
    return sum(sizes[module].bits[scheme] for module, scheme in schemes.items())


def uniform(sizes: Mapping[str, Sizes], budget: float) -> dict[str, str]:
    """Return the largest scheme that fits for all modules, or the smallest if none does."""
    names = next(iter(sizes.values())).bits
    total = {name: sum(row.bits[name] for row in sizes.values()) for name in names}
    smallest = min(total, key=lambda name: (total[name], name))
    fitting = [name for name in total if total[name] <= budget]
    chosen = max(fitting, key=lambda name: (total[name], name), default=smallest)
    return dict.fromkeys(sizes, chosen)


def in_order(
    groups: Sequence[Group], sizes: Mapping[str, Sizes], budget: float, order: Sequence[int]
) -> dict[str, str]:
    """Give each group the largest scheme that still fits, one group after the other.

    Args:
        groups: Modules that have one scheme.
        sizes: Of all modules.
        budget: Bits of all of them.
        order: Numbers of groups; all others keep the smallest scheme.
    """
    chosen = uniform(sizes, 0.0)
    left = budget - bits_of(chosen, sizes)
    for number in order:
        group = groups[number]
        for name in sorted(sizes[group[0]].bits, key=lambda name: -sizes[group[0]].bits[name]):
            more = sum(sizes[m].bits[name] - sizes[m].bits[chosen[m]] for m in group)
            if 0 < more <= left:
                left -= more
                chosen |= dict.fromkeys(group, name)
                break
    return chosen


def order_by_kind(groups: Sequence[Group]) -> list[int]:
    """Return q/k/v and down projections at both ends and in every third layer first.

    That is the rule of llama.cpp's K-quant recipes (`use_more_bits` in `llama-quant.cpp`), which
    gives `attn_v` and `ffn_down` more bits there; q and k go with v, and gate and up of experts
    with their down projection, as engines run them in one scheme.
    """
    return sorted(range(len(groups)), key=lambda number: (_class_of(groups, number), number))


def _class_of(groups: Sequence[Group], number: int) -> int:
    kinds = _kinds(groups[number])
    alike = [n for n, group in enumerate(groups) if _kinds(group) == kinds]
    depth, count = alike.index(number), len(alike)
    at_ends = depth < count // 8 or depth >= 7 * count // 8 or (depth - count // 8) % 3 == 2
    matters = any(kind in _MATTERS for kind in kinds)
    return 0 if matters and at_ends else 1 if matters else 2


def _kinds(group: Group) -> frozenset[str]:
    return frozenset(module.rpartition(".")[2] for module in group)


__all__ = ["Group", "Sizes", "bits_of", "in_order", "order_by_kind", "uniform"]
