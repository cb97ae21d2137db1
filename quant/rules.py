r"""Prefix-matched rules: which scheme each module gets.

A rule is PATTERN = SCHEME. A pattern is compared with the module's dotted name in whole components,
so `model.layers.1` covers `model.layers.1.mlp` and not `model.layers.10.mlp`:

    model.layers.0.             a prefix; the trailing dot is optional
    *.self_attn.                a leading * stands for any start, also an empty one
    model.layers.*.mlp.         an inner * stands for one component
    re:.*experts\..*down_proj    a regular expression for the whole name (fullmatch)
    *                           every module; same as the default scheme

The pattern that covers the most components of the name decides, on a tie the later one; `re:`
covers the whole name. SCHEME is the name of a scheme or `keep` (full precision).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType

from quantload.arguments import as_texts, check_counts, check_type, plain
from quantload.errors import ConfigError, UnusedRule, listed
from quantload.quant.scheme import DENSE, Scheme, parse_scheme

KEEP = "keep"
_A_SCHEME = "the name of a scheme, a `Scheme`, or None to keep what no rule covers"
_NAMES = "`quantload schemes` lists them"
_NO_MODULE = "#"  # no module is called so


@dataclass(frozen=True)
class Rule:
    """One line of a rule set.

    Args:
        pattern: See the top of this file.
        scheme: What matching modules get; None keeps them as they are.
    """

    pattern: str
    scheme: Scheme | None

    def __str__(self) -> str:
        return f"{self.pattern} = {KEEP if self.scheme is None else self.scheme}"

    def covered(self, name: str) -> int | None:
        """Return how many leading components of `name` are covered; None if it does not match."""
        components = name.split(".")
        if self.pattern.startswith("re:"):
            return len(components) if re.fullmatch(self.pattern[3:], name) else None
        wanted = self.pattern.rstrip(".").split(".")
        if wanted == ["*"]:
            return 0
        if wanted[0] != "*":
            return len(wanted) if _same(wanted, components[: len(wanted)]) else None
        tail = wanted[1:]
        for start in range(len(components) - len(tail), -1, -1):  # the longest cover first
            if _same(tail, components[start : start + len(tail)]):
                return start + len(tail)
        return None

    def names_whole(self, name: str) -> bool:
        """True if the pattern covers the whole name, and not whatever the last component is."""
        parent, dot, _ = name.rpartition(".")
        sibling = f"{parent}{dot}{_NO_MODULE}"
        count = len(name.split("."))
        return self.covered(name) == count and self.covered(sibling) != count


def _same(wanted: Sequence[str], components: Sequence[str]) -> bool:
    return len(wanted) == len(components) and all(
        w in ("*", c) for w, c in zip(wanted, components, strict=True)
    )


def parse_rule(pattern: str, scheme: str, *, group_size: int | None = None) -> Rule:
    """Return the rule for a pattern and the name of a scheme, or `keep`.

    Raises:
        ConfigError: The pattern is empty, has an empty component or is not a regular expression.
        UnknownScheme: There is no such scheme.
    """
    pattern = pattern.strip()
    if pattern.startswith("re:"):
        try:
            re.compile(pattern[3:])
        except re.error as error:
            raise ConfigError(f"rule `{pattern}` is not a regular expression: {error}") from error
    elif "" in pattern.rstrip(".").split(".") or pattern.endswith(".."):
        raise ConfigError(
            f"rule `{pattern}` has an empty component, expected a dotted module name",
            hint="for example `model.layers.0.` or `*.self_attn.`",
        )
    elif any("*" in part and part != "*" for part in pattern.split(".")):
        raise ConfigError(
            f"rule `{pattern}` has a `*` inside a component, expected a whole component",
            hint="for parts of a component write a regular expression: `re:...`",
        )
    if scheme.strip().lower() == KEEP:
        if group_size is not None:
            raise ConfigError(f"rule `{pattern} = keep` takes no group size, found `{group_size}`")
        return Rule(pattern, None)
    return Rule(pattern, parse_scheme(scheme, group_size=group_size))


@dataclass(frozen=True)
class QuantConfig:
    """An ordered set of rules and the scheme of everything that no rule covers.

    Args:
        default: Scheme of modules without a rule; None keeps them.
        rules: In the order in which they were written.
    """

    default: Scheme | None
    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        hint = "`QuantConfig.from_options` takes names"
        check_type("default", self.default, (Scheme, NoneType), expected="a `Scheme`", hint=hint)
        for rule in self.rules:
            check_type("rules", rule, Rule, expected="rules from `parse_rule`", hint=hint)

    @property
    def asks_for_codes(self) -> bool:
        """True if the default or a rule asks for a quantized weight, also for one that is there."""
        schemes = (self.default, *(rule.scheme for rule in self.rules))
        return any(scheme is not None and scheme != DENSE for scheme in schemes)

    @classmethod
    def from_options(
        cls,
        scheme: str | Scheme | None,
        rules: Mapping[str, object] | Iterable[str] = (),
        *,
        group_size: int | None = None,
    ) -> QuantConfig:
        """Build from what a user writes.

        Args:
            scheme: Default scheme, or None to keep what no rule covers.
            rules: {"model.layers.0.": "W8A16"}, values may be {"scheme": ..., "group_size": ...};
                or a list of "PATTERN=SCHEME".
            group_size: Group size of the default scheme.

        Raises:
            ConfigError: A rule is not of this form; UnknownScheme for an unknown scheme.
        """
        check_type("scheme", scheme, (str, Scheme, NoneType), expected=_A_SCHEME, hint=_NAMES)
        if group_size is not None:
            (group_size,) = check_counts(1, group_size=group_size)
        pairs: Iterable[tuple[str, object]] = (
            rules.items()
            if isinstance(rules, Mapping)
            else map(_split, as_texts("rules", rules, example="lm_head=keep"))
        )
        default = scheme if isinstance(scheme, Scheme) else None
        if isinstance(scheme, str) and scheme.strip().lower() != KEEP:
            default = parse_scheme(scheme, group_size=group_size)
        elif group_size is not None:
            raise ConfigError(
                f"a group size needs the name of a scheme: found `group_size = {group_size}` and "
                f"`{KEEP if scheme is None else scheme}`"
            )
        return cls(default, tuple(_rule(pattern, value) for pattern, value in pairs))


def _split(text: str) -> tuple[str, str]:
    pattern, equals, scheme = text.rpartition("=")
    if not equals or not pattern.strip() or not scheme.strip():
        raise ConfigError(
            f"not a rule: `{text}`, expected `PATTERN=SCHEME`",
            hint="for example `model.layers.0.=W8A16` or `lm_head=keep`",
        )
    return pattern, scheme


def _rule(pattern: str, value: object) -> Rule:
    check_type("rules", pattern, str, expected="patterns of module names, and schemes")
    if isinstance(value, str):
        return parse_rule(pattern, value)
    if isinstance(value, Mapping):
        unknown = set(value) - {"scheme", "group_size"}
        size = plain(value.get("group_size"))
        scheme = value.get("scheme")
        if not unknown and isinstance(scheme, str) and (size is None or type(size) is int):
            return parse_rule(pattern, scheme, group_size=size)
    raise ConfigError(
        f"rule `{pattern}` has the value `{value}`, expected a scheme name or "
        "`{ scheme = NAME, group_size = NUMBER }`"
    )


@dataclass(frozen=True, slots=True)
class Decision:
    """What the rules say of one module.

    Args:
        scheme: The scheme; None is keep.
        rule: The rule that decided; None if it was the default.
        covers_whole_name: True if that rule covers every component of the module's name, and names
            the last one: a pattern that covers any name in its place, such as `*.*`, does not.
    """

    scheme: Scheme | None
    rule: Rule | None = None
    covers_whole_name: bool = False


@dataclass(frozen=True)
class Resolution:
    """The decisions for a set of modules.

    Args:
        decisions: By module name.
        undecided: Rules that match modules but decide none, since others cover more.
    """

    decisions: Mapping[str, Decision]
    undecided: tuple[Rule, ...] = field(default=())


def resolve(config: QuantConfig, modules: Mapping[str, Sequence[str]]) -> Resolution:
    """Decide every module.

    Args:
        config: Rules and default.
        modules: For each module its names: the one in the checkpoint, then its aliases. A rule
            matches if it matches any of them.

    Raises:
        UnusedRule: Rules match no module at all; the message suggests near names.
    """
    matched: set[int] = set()
    deciding: set[int] = set()
    decisions = {}
    of_default = Decision(config.default)  # one for all, of which there may be 100,000
    for module, names in modules.items():
        best: tuple[int, int] | None = None
        for index, rule in enumerate(config.rules):
            counts = [count for name in names if (count := rule.covered(name)) is not None]
            if counts:
                matched.add(index)
                best = max(best or (-1, -1), (max(counts), index))
        if best is None:
            decisions[module] = of_default
            continue
        deciding.add(best[1])
        rule = config.rules[best[1]]
        whole = any(rule.names_whole(name) for name in names)
        decisions[module] = Decision(rule.scheme, rule, whole)
    unused = [rule for i, rule in enumerate(config.rules) if i not in matched]
    if unused:
        raise _unused(unused, [name for names in modules.values() for name in names])
    undecided = tuple(r for i, r in enumerate(config.rules) if i in matched - deciding)
    return Resolution(decisions, undecided)


def _unused(unused: Sequence[Rule], modules: Iterable[str]) -> UnusedRule:
    count = "1 rule matches" if len(unused) == 1 else f"{len(unused)} rules match"
    near = _nearest(unused, modules)
    hint = f"did you mean {listed(near)}?" if near else "`quantload inspect` lists the module names"
    return UnusedRule(f"{count} nothing: {listed(rule.pattern for rule in unused)}", hint=hint)


def _nearest(rules: Iterable[Rule], modules: Iterable[str]) -> list[str]:
    """For each rule the nearest pattern that matches something, if any is near."""
    names = [name.split(".") for name in set(modules)]
    near = set()
    for rule in rules:
        pattern = rule.pattern.removeprefix("re:").rstrip(".")
        anywhere = pattern.startswith("*.")
        plain = pattern.removeprefix("*.")
        candidates = _runs(names, plain.count(".") + 1) if anywhere else _prefixes(names)
        found = difflib.get_close_matches(plain, candidates, n=1, cutoff=0.6)
        near |= {f"*.{match}" if anywhere else match for match in found}
    return sorted(near)


def _prefixes(names: Iterable[Sequence[str]]) -> set[str]:
    return {".".join(parts[:end]) for parts in names for end in range(1, len(parts) + 1)}


def _runs(names: Iterable[Sequence[str]], length: int) -> set[str]:
    """Every run of `length` neighbouring components."""
    return {
        ".".join(parts[start : start + length])
        for parts in names
        for start in range(len(parts) - length + 1)
    }
