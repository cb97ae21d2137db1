"""`NameRules`: how checkpoint names become the names of a model, as its author writes it down.

    stage        a rule fires if             what it does
    1 renamings  the callable changes it     whatever it does
    2 regex      the pattern is found        every occurrence is replaced
    3 substring  the text is contained       the first occurrence is replaced
    4 stacked    a whole module path fits    member -> (stack, slot); what follows stays as it is
    5 prefix     the name starts so          the start is replaced
    6 suffix     the name ends so            the end is replaced

Stages run in this order, and every rule of a stage that fires, in the order in which it is written,
on what the rules before it have made of the name: rules chain. `None` instead of a replacement
drops the tensor at once. Only one stacked rule fires: the one with the longest member path.

The order is that of vLLM's `WeightsMapper`, so that its rules can be taken over as they are. The
stacked stage differs in what it takes for a fit: member paths are compared component by component
(`gate_proj` never means `gate_proj_2`), and the leaf behind it may have dots of its own. Scales of
a key-value cache that lie in a member are left to the attention, see `mappers/cache_scales.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import TypeVar

from quantload.arguments import as_texts, check_type
from quantload.errors import ConfigError
from quantload.mappers.cache_scales import cache_scale_of

Rule = Mapping[str, str | None]
Replacement = str | Callable[[re.Match[str]], str]
K = TypeVar("K")
V = TypeVar("V")
PatternRule = Mapping[str | re.Pattern[str], Replacement | None]


@dataclass(frozen=True, slots=True)
class Renaming:
    """A rule that is code.

    Args:
        label: What it is, for people: "renaming `^transformer` -> `model`".
        rename: Returns the new name; the same if the rule does not apply; None to drop the tensor.
    """

    label: str
    rename: Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class Renamed:
    """What rules make of a name.

    Args:
        name: The new name; None if the tensor is dropped.
        slot: Position in the stack that the new name means; None if no stacked rule fired.
        steps: Each rule that fired, and the name after it.
    """

    name: str | None
    slot: int | None = None
    steps: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class NameRules:
    """Rules that turn checkpoint names into names of a model; see the top of this file.

    A class attribute of a model that is written by hand:

        name_rules = NameRules(
            prefix={"transformer.": "model."},
            stacked={"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")},
        )

    `a | b` has the rules of both; those of `b` replace rules of `a` with the same key.

    Args:
        renamings: Rules that are code.
        regex: {pattern: replacement}, as `re.sub` takes them: compiled ones and functions, too.
        substring: {text: replacement}.
        stacked: {path of the stack: paths of its members, by slot}: whole components, no leaf.
        prefix: {start: replacement}.
        suffix: {end: replacement}.

    Raises:
        ConfigError: A pattern is none, a text is empty, or a member is in two stacks.
    """

    renamings: Sequence[Renaming] = ()
    regex: PatternRule = field(default_factory=dict)
    substring: Rule = field(default_factory=dict)
    stacked: Mapping[str, Sequence[str]] = field(default_factory=dict)
    prefix: Rule = field(default_factory=dict)
    suffix: Rule = field(default_factory=dict)
    _patterns: tuple[tuple[re.Pattern[str], Replacement | None], ...] = field(
        init=False, repr=False, compare=False, default=()
    )
    _members: Mapping[str, tuple[str, int]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        for stage in ("regex", "substring", "prefix", "suffix"):
            rules = getattr(self, stage)
            _check_rules(stage, rules)
            if "" in rules:
                raise ConfigError(f"{stage} rule with an empty text, expected a part of a name")
        _check_renamings(self.renamings)
        _check_stacks(self.stacked)
        compiled = []
        for pattern, replacement in self.regex.items():
            try:
                compiled.append((re.compile(pattern), replacement))
                if isinstance(replacement, str):  # is one, too
                    compiled[-1][0].sub(replacement, "")
            except (re.error, IndexError) as error:
                raise ConfigError(f"regex rule `{pattern}` is no pattern: {error}") from error
        object.__setattr__(self, "_patterns", tuple(compiled))
        object.__setattr__(self, "_members", _members(self.stacked))

    def __or__(self, other: NameRules) -> NameRules:
        if not isinstance(other, NameRules):
            return NotImplemented
        return NameRules(
            renamings=(*self.renamings, *other.renamings),
            regex={**self.regex, **other.regex},
            substring={**self.substring, **other.substring},
            stacked={**self.stacked, **other.stacked},
            prefix={**self.prefix, **other.prefix},
            suffix={**self.suffix, **other.suffix},
        )

    def for_modules(self) -> NameRules:
        """Return the rules for the modules that a quantization config lists.

        Members of stacks keep their names there, and nothing is dropped: a list that names `q_proj`
        must not come to mean the whole stack.
        """
        return replace(
            self,
            regex=_without_drops(self.regex),
            substring=_without_drops(self.substring),
            stacked={},
            prefix=_without_drops(self.prefix),
            suffix=_without_drops(self.suffix),
        )

    def apply(self, name: str) -> Renamed:
        """Return what the rules make of a name."""
        now: str | None = name
        slot: int | None = None
        steps: list[str] = []
        for label, new, at in self._fired(name):
            now = new
            slot = slot if at is None else at
            steps.append(f"{label} -> {'dropped' if new is None else new}")
            if new is None:
                break
        return Renamed(now, slot, tuple(steps))

    def _fired(self, name: str) -> Iterator[tuple[str, str | None, int | None]]:
        """Yield each rule that fires: (label, new name or None, slot)."""
        for label, rename in self._rules():
            new = rename(name)
            if new != name:
                yield label, new, None
            if new is None:
                return
            name = new
        member = self._member_in(name)
        if member is not None:
            start, path, (stack, slot) = member
            name = name[:start] + stack + name[start + len(path) :]
            yield f"stacked `{path}`, slot {slot} of `{stack}`", name, slot
        for label, rename in self._ends():
            new = rename(name)
            if new != name:
                yield label, new, None
            if new is None:
                return
            name = new

    def _rules(self) -> Iterator[tuple[str, Callable[[str], str | None]]]:
        for renaming in self.renamings:
            yield renaming.label, renaming.rename
        for pattern, by in self._patterns:
            yield f"regex {_text(pattern.pattern, by)}", _substitution(pattern, by)
        for text, by in self.substring.items():
            yield f"substring {_text(text, by)}", _replacement(text, by)

    def _ends(self) -> Iterator[tuple[str, Callable[[str], str | None]]]:
        for start, by in self.prefix.items():
            yield f"prefix {_text(start, by)}", _new_start(start, by)
        for end, by in self.suffix.items():
            yield f"suffix {_text(end, by)}", _new_end(end, by)

    def _member_in(self, name: str) -> tuple[int, str, tuple[str, int]] | None:
        """Find the longest member path in a name, as whole components before a leaf.

        Returns:
            (where it starts, the path, (stack, slot)); of equal paths the last.
        """
        if not self._members or cache_scale_of(name) is not None:
            return None
        found = [
            (len(path), start, path) for path in self._members for start in _places(path, name)
        ]
        if not found:
            return None
        _, start, path = max(found)
        return start, path, self._members[path]


def _check_rules(stage: str, rules: object) -> None:
    """Refuse what is no table of texts; a list would count as rules without replacements."""
    hint = f'for example `{stage}={{"old": "new"}}`; None in place of the new text drops the tensor'
    check_type(stage, rules, Mapping, expected="a table of texts and replacements", hint=hint)
    assert isinstance(rules, Mapping), "checked above"
    for old, new in rules.items():
        text = old.pattern if stage == "regex" and isinstance(old, re.Pattern) else old
        check_type(stage, text, str, expected="texts as keys", hint=hint)
        if not (stage == "regex" and callable(new)):
            expected = "a text or None"
            check_type(f"{stage}[{old!r}]", new, (str, NoneType), expected=expected, hint=hint)


def _check_renamings(renamings: object) -> None:
    several = renamings if isinstance(renamings, list | tuple) else [renamings]
    for renaming in several:
        check_type("renamings", renaming, Renaming, expected="a list of `Renaming`")


def _check_stacks(stacked: object) -> None:
    hint = 'for example `stacked={"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}`'
    check_type("stacked", stacked, Mapping, expected="a table of stacks and members", hint=hint)
    assert isinstance(stacked, Mapping), "checked above"
    for stack, paths in stacked.items():
        check_type("stacked", stack, str, expected="paths of stacks as keys", hint=hint)
        members = as_texts(f"stacked[{stack!r}]", paths, example="mlp.gate_proj")
        if not stack or not members or not all(members):
            raise ConfigError(
                f"stack `{stack}` has the members {members}, expected paths", hint=hint
            )


def _members(stacked: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, int]]:
    members: dict[str, tuple[str, int]] = {}
    for stack, paths in stacked.items():
        for slot, path in enumerate(paths):
            if path in members:
                raise ConfigError(
                    f"`{path}` is a member of two stacks, `{members[path][0]}` and `{stack}`",
                    hint="write more of its path, so that the two differ",
                )
            members[path] = stack, slot
    return members


def _without_drops(rules: Mapping[K, V | None]) -> dict[K, V]:
    return {old: new for old, new in rules.items() if new is not None}


def _places(path: str, name: str) -> Iterator[int]:
    """Yield where a module path lies in a name as whole components, with a leaf behind it."""
    start = name.find(path)
    while start >= 0:
        if (not start or name[start - 1] == ".") and name[start + len(path) :].startswith("."):
            yield start
        start = name.find(path, start + 1)


def _text(old: str, new: Replacement | None) -> str:
    by = new if new is None or isinstance(new, str) else getattr(new, "__name__", "a function")
    return f"`{old}`" if by is None else f"`{old}` by `{by}`"


def _substitution(pattern: re.Pattern[str], by: Replacement | None) -> Callable[[str], str | None]:
    def rename(name: str) -> str | None:
        if by is None:
            return None if pattern.search(name) else name
        return pattern.sub(by, name)

    return rename


def _replacement(text: str, by: str | None) -> Callable[[str], str | None]:
    def rename(name: str) -> str | None:
        if text not in name:
            return name
        return None if by is None else name.replace(text, by, 1)

    return rename


def _new_start(start: str, by: str | None) -> Callable[[str], str | None]:
    def rename(name: str) -> str | None:
        if not name.startswith(start):
            return name
        return None if by is None else by + name[len(start) :]

    return rename


def _new_end(end: str, by: str | None) -> Callable[[str], str | None]:
    def rename(name: str) -> str | None:
        if not name.endswith(end):
            return name
        return None if by is None else name[: -len(end)] + by

    return rename


__all__ = ["NameRules", "Renamed", "Renaming"]
