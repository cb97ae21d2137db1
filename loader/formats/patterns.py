"""A list of names and globs in a quantization config, of which the first that matches decides.

An entry is the whole name of a module, or a glob whose `*` crosses dots; in some lists it may also
read `re:...`, a regular expression that matches at the start of the name. A module may have several
names, see `names_of`.

Names are looked up, and a glob is only tried where its longest literal piece is in the name: a list
may have hundreds of entries, a checkpoint 100,000 tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import translate

from quantload.errors import FormatMismatch

_WILD = re.compile(r"[*?]|\[[^\]]*\]")


@dataclass(frozen=True)
class Patterns:
    """Names and globs.

    Args:
        entries: As they stand in the config.
        with_regexes: True if entries that start with `re:` are regular expressions.

    Raises:
        FormatMismatch: One of these is no regular expression.
    """

    entries: tuple[str, ...]
    with_regexes: bool = False
    _names: Mapping[str, int] = field(init=False, repr=False)
    _others: Sequence[tuple[int, str, re.Pattern[str]]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        names: dict[str, int] = {}
        others = []
        for number, entry in enumerate(self.entries):
            if self.with_regexes and entry.startswith("re:"):
                others.append((number, "", _compiled(entry)))
            elif _WILD.search(entry):
                literal = max(_WILD.split(entry), key=len)
                others.append((number, literal, re.compile(translate(entry))))
            else:
                names.setdefault(entry, number)
        object.__setattr__(self, "_names", names)
        object.__setattr__(self, "_others", tuple(others))

    def first(self, names: Sequence[str]) -> str | None:
        """Return the first entry that matches one of the names of a module."""
        found = [self._names[name] for name in names if name in self._names]
        end = min(found, default=len(self.entries))
        together = "\n".join(names)
        for number, literal, pattern in self._others:
            if number > end:
                break
            if literal in together and any(pattern.match(name) for name in names):
                return self.entries[number]
        return self.entries[end] if found else None


def _compiled(entry: str) -> re.Pattern[str]:
    try:
        return re.compile(entry[3:])
    except re.error as error:
        raise FormatMismatch(
            f"`{entry}` in the quantization config is not a regular expression: {error}"
        ) from error
