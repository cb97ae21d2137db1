"""How the configs of quantized checkpoints name modules: one function for each way of matching.

Patterns are never rewritten: a pattern is tested against every name that a module has.

    function                   producer and version whose rule it is
    matches_regex              compressed-tensors 0.20.1: `re:` and `re.match`
    matches_substring          AutoAWQ 0.2.9, GPTQ `modules_in_block_to_quantize`
    matches_suffix             short names of FP8 exporters, in whole components
    matches_glob               lists of FP8 and MX exporters
    matches_transformers       transformers 5.24.0 `should_convert_module`

Lists that may be long are looked up by `patterns.py` (ModelOpt, Quark), `exclusions.py` (FP8, MX)
and `dynamic_rules.py` (GPTQModel), with the same aliases.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from functools import cache

# Before the names of the base language model, longest first; and how those names start.
_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
_STACKS = ("layers.", "h.", "blocks.", "decoder.")
# Where a match of leading components may end: after a dot, before one, or at the end of the name.
COMPONENT_END = r"(?:(?<=\.)|(?=\.|$))"


def matches_regex(pattern: str, name: str) -> bool:
    """The pattern reads `re:...`, anchored at the start and open at the end (`re.match`)."""
    return pattern.startswith("re:") and _compiled(pattern[3:]).match(name) is not None


def matches_substring(pattern: str, name: str) -> bool:
    """The pattern is anywhere in the name, without regard to components."""
    return pattern in name


def matches_suffix(pattern: str, name: str) -> bool:
    """The pattern is the last components of the name, or all of it."""
    return name == pattern or name.endswith("." + pattern.lstrip("."))


def matches_glob(pattern: str, name: str) -> bool:
    """The pattern with `*`, `?` and `[...]` matches the whole name; `*` crosses dots."""
    return fnmatchcase(name, pattern)


def matches_transformers(pattern: str, name: str) -> bool:
    """The pattern is a regular expression for leading components, or the name ends with it as text.

    The match starts at the start of the name and stops before a dot, after one, or at the end:
    `layer.*` matches `layer.11.attn`, `mlp.gate` does not match `mlp.gate_proj`. The end of the
    name is compared without regard to components.
    """
    whole = _compiled(rf"(?:{pattern}){COMPONENT_END}")
    return name.endswith(pattern) or whole.match(name) is not None


@cache
def _compiled(regex: str) -> re.Pattern[str]:
    # NOTE: `re` keeps 512 patterns; a config with one for each module would compile them all anew
    return re.compile(regex)


def names_of(module: str) -> tuple[str, ...]:
    """Return the names that a config may use for a module: its own first, then its aliases.

    Tools differ in whether names start with `model.`, and in where `language_model.` stands:
    `model.language_model.layers.0`, `language_model.model.layers.0`, `model.layers.0`, `layers.0`.
    What is not in its blocks, such as `lm_head` or a vision tower, has no alias.
    """
    prefix = next((p for p in _PREFIXES if module.startswith(p)), "")
    inner = module[len(prefix) :]
    if not inner.startswith(_STACKS):
        return (module,)
    return tuple(dict.fromkeys((module, *(p + inner for p in _PREFIXES), inner)))
