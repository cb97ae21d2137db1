"""How the configs of quantized checkpoints name modules. Each way has one function, used by name.

Patterns are never rewritten: a pattern is tested against every name that a module has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable


def matches_exact(pattern: str, name: str) -> bool:
    """The pattern is the module's whole dotted name."""
    return pattern == name


def matches_regex(pattern: str, name: str) -> bool:
    """The pattern reads `re:...`, anchored at the start and open at the end (`re.match`)."""
    return pattern.startswith("re:") and re.match(pattern[3:], name) is not None


def matches_class(pattern: str, class_names: Iterable[str]) -> bool:
    """The pattern is the name of one of the module's classes."""
    return pattern in class_names
