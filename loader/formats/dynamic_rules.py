"""GPTQModel's `dynamic`: rules that leave modules out or change how they are quantized.

    {"<sign><regex>": {overrides}}

The expression is matched at the start of the module's name (`re.match`); the first rule that
matches decides. "-:" leaves the module out, "+:" or no sign overrides values of the config.

Source: GPTQModel 7.7.0, `quantization/config.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantload.errors import FormatMismatch
from quantload.loader.formats.agreement import ConfigSays
from quantload.loader.formats.config_values import WHERE, wrong_value
from quantload.loader.formats.exclusions import fused_name
from quantload.loader.formats.matching import names_of


@dataclass(frozen=True)
class Rule:
    """One entry of `dynamic`.

    Args:
        key: As it stands in the config.
        pattern: Its regular expression.
        overrides: What it changes; None leaves matching modules out.
    """

    key: str
    pattern: re.Pattern[str]
    overrides: Mapping[str, Any] | None

    def says_of(self, names: Sequence[str]) -> ConfigSays:
        """Return what the rule says of a module that it matches."""
        pattern = self.pattern.pattern
        bare = pattern.removeprefix("^").removesuffix("$")
        is_exact = any(bare in (name, re.escape(name)) for name in names)
        return ConfigSays(self.overrides is not None, f"dynamic: {self.key}", is_exact)


def first_rule(rules: Sequence[Rule], names: Sequence[str]) -> Rule | None:
    """Return the rule that decides on a module with these names; None if none does."""
    for rule in rules:  # plain loops: there are as many modules as a model has experts
        match = rule.pattern.match
        for name in names:
            if match(name):
                return rule
    return None


def matches_rule(key: str) -> Callable[[str], object]:
    """Return the test whether the rule of a key of `dynamic` matches a module.

    Or the layer that engines fuse it into, which rules for them name.
    """
    rules = parse_rules({key: {}}, "")

    def match(module: str) -> object:
        names = names_of(module)
        return first_rule(rules, names) or first_rule(rules, [*map(fused_name, names)])

    return match


def parse_rules(dynamic: object, checkpoint_name: str) -> tuple[Rule, ...]:
    """Read `dynamic`; values of overrides are not looked at.

    Raises:
        FormatMismatch: It is no object of rules, or an expression is none.
    """
    if not dynamic:
        return ()
    if not isinstance(dynamic, Mapping):
        raise wrong_value("dynamic", dynamic, "an object", checkpoint_name)
    rules = []
    for key, overrides in dynamic.items():
        is_left_out = key.startswith("-:")
        source = key[2:] if key.startswith(("-:", "+:")) else key
        try:
            pattern = re.compile(source)
        except re.error as error:
            raise FormatMismatch(
                f"`dynamic` has `{key}`, which is no regular expression: {error}, {WHERE} "
                f"`{checkpoint_name}`"
            ) from error
        if not is_left_out and not isinstance(overrides, Mapping):
            raise wrong_value(f"dynamic: {key}", overrides, "an object", checkpoint_name)
        rules.append(Rule(key, pattern, None if is_left_out else overrides))
    return tuple(rules)
