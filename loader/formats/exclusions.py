"""Lists of modules that a quantizer left in full precision, as FP8 and MX configs write them.

An entry leaves a module out if, for one of the module's names,

    it is the name
    it is its last components                   `linear_attn.in_proj_qkv`, `gate`
    it is its first components                  `visual`, `model.layers.3.mlp.experts`
    transformers' rule says so                  a regular expression, see `matches_transformers`
    it reads `re:...` and matches (`re.match`)
    it is no regular expression, but a glob that matches

A module has its own name, its aliases (`names_of`), and the name of the fused layer that engines
make of it: `qkv_proj` for `q_proj`.

Plain entries are looked up in sets: a list may have thousands, a checkpoint 100,000 tensors.

Source: `should_convert_module` of transformers 5.24.0, `is_layer_skipped` of vLLM 0.33.0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from quantload.errors import FormatMismatch
from quantload.loader.formats.matching import COMPONENT_END, matches_glob, names_of

_PLAIN = re.compile(r"[\w.-]*")
_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "w1": "w13",
    "w3": "w13",
    "q_a_proj": "fused_qkv_a_proj",
    "kv_a_proj_with_mqa": "fused_qkv_a_proj",
}


@dataclass(frozen=True)
class Exclusions:
    """The entries of one or several lists.

    Args:
        entries: Entry -> key of the config that holds it.

    Raises:
        FormatMismatch: An entry `re:...` is no regular expression.
    """

    entries: Mapping[str, str]
    _plain: Mapping[str, str] = field(init=False, repr=False)
    _lengths: tuple[int, ...] = field(init=False, repr=False)
    _patterns: tuple[tuple[str, re.Pattern[str] | None], ...] = field(init=False, repr=False)
    _last_components: frozenset[str] = field(init=False, repr=False)
    _near: _Near = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        plain = {entry.strip("."): entry for entry in self.entries if _PLAIN.fullmatch(entry)}
        plain.pop("", None)
        others = (entry for entry in self.entries if not _PLAIN.fullmatch(entry))
        object.__setattr__(self, "_plain", plain)
        object.__setattr__(self, "_lengths", tuple(sorted({len(entry) for entry in plain})))
        object.__setattr__(self, "_patterns", tuple((e, self._compiled(e)) for e in others))
        lasts = frozenset(entry.rpartition(".")[2] for entry in plain)
        object.__setattr__(self, "_last_components", lasts)
        object.__setattr__(self, "_near", _Near())

    def _compiled(self, entry: str) -> re.Pattern[str] | None:
        """Compile an entry as what it is; None for a glob."""
        try:
            if entry.startswith("re:"):
                return re.compile(entry[3:])
            return re.compile(rf"(?:{entry}){COMPONENT_END}")
        except re.error as error:
            if not entry.startswith("re:"):
                return None
            raise FormatMismatch(
                f"entry `{entry}` of `{self.entries[entry]}` is no regular expression: {error}"
            ) from error

    def entry_for(self, module: str) -> str:
        """Return the entry that leaves a module out, as "key: entry"; "" if there is none."""
        for name in _own_names(module):
            entry = self._at_end(name) or self._at_start(name)
            if entry is not None:
                return f"{self.entries[entry]}: {entry}"
        return ""

    def _at_end(self, name: str) -> str | None:
        for length in self._lengths:
            # Text at the end of a name counts for transformers without regard to components.
            if length <= len(name) and name[-length:] in self._plain:
                return self._plain[name[-length:]]
        return None

    def _at_start(self, name: str) -> str | None:
        """Return the entry that matches the start of one of the names of a module."""
        parent, dot, last = name.rpartition(".")
        near = self._near
        if parent != near.parent:
            near.fill(parent, self._starts(parent))
        if near.is_in_stack and not self._patterns and last not in self._last_components:
            return near.entry  # no entry is one of the whole names
        spelled = near.found if near.is_in_stack else self._starts(name)
        for start, entry in spelled:
            whole = f"{start}{dot}{last}" if near.is_in_stack else start
            entry = entry or self._plain.get(whole)
            if entry is not None:
                return entry
            for pattern_entry, pattern in self._patterns:
                if _is_match(pattern_entry, pattern, whole):
                    return pattern_entry
        return None

    def _starts(self, name: str) -> list[tuple[str, str | None]]:
        """Return every name of a module, with the plain entry that is its first components."""
        return [(spelled, self._start_of(spelled)) for spelled in names_of(name)]

    def _start_of(self, name: str) -> str | None:
        for length in self._lengths:
            if name[length : length + 1] in (".", "") and name[:length] in self._plain:
                return self._plain[name[:length]]
        return None


@dataclass(slots=True)
class _Near:
    """What was found for the parent of the last module, which most modules share with the next.

    Args:
        parent: Its name; None before the first.
        found: Every name of it, with the plain entry that is its first components.
        entry: The first such entry.
        is_in_stack: True if the names of a module are those of its parent, and its last component.
    """

    parent: str | None = None
    found: Sequence[tuple[str, str | None]] = ()
    entry: str | None = None
    is_in_stack: bool = False

    def fill(self, parent: str, found: Sequence[tuple[str, str | None]]) -> None:
        """Take another parent."""
        self.parent, self.found = parent, found
        self.entry = next((entry for _, entry in found if entry is not None), None)
        self.is_in_stack = len(found) > 1


def matches_excluded(entry: str) -> Callable[[str], object]:
    """Return the test whether an entry of such a list leaves a module out."""
    return Exclusions({entry: ""}).entry_for


def _is_match(entry: str, pattern: re.Pattern[str] | None, name: str) -> bool:
    if pattern is None:
        return matches_glob(entry, name)
    return pattern.match(name) is not None or name.endswith(entry)


def fused_name(module: str) -> str:
    """Return the layer that engines fuse a module into; "" if they fuse it into none."""
    parent, dot, last = module.rpartition(".")
    fused = _FUSED.get(last)
    return f"{parent}{dot}{fused}" if fused else ""


def _own_names(module: str) -> tuple[str, ...]:
    """Return a module's name, and that of the layer that engines fuse it into."""
    fused = fused_name(module)
    return (module, fused) if fused else (module,)
