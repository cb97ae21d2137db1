"""What the commands share: options, sizes and rules as text, warnings on stderr."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from quantload.errors import ConfigError, listed

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def parse_size(text: str) -> int:
    """Return the bytes of a size such as "5GB", "500MiB" or "1000000".

    Raises:
        ConfigError: Not a size.
    """
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d+)?)\s*([KMGT]i?)?B?\s*", text, re.IGNORECASE)
    unit = (match[2] or "").capitalize() if match else ""
    factor = {**_UNITS, **_BINARY}.get(unit)
    if match is None or factor is None or not int(float(match[1]) * factor):
        raise ConfigError(f"not a size: `{text}`, expected for example `5GB` or `500MiB`")
    return int(float(match[1]) * factor)


# What is about one run, not about what is written.
_ONLY_ON_THE_COMMAND_LINE = {
    *("config", "rule", "scheme", "plan", "json", "quiet", "all", "push"),
    *("workers", "memory", "device"),
}


def read_rules(config: Path | None, rules: tuple[str, ...]) -> tuple[str | None, list[str]]:
    """Read `--config` and append `--rule`s, which come later and so win ties.

    Returns:
        The default scheme of the file, if it has one, and all rules as PATTERN=SCHEME.

    Raises:
        ConfigError: The file is not TOML of the expected form.
    """
    if config is None:
        return None, list(rules)
    content = _read_toml(config)
    scheme, table = content.get("scheme"), content.get("rules", {})
    if not isinstance(table, dict) or not isinstance(scheme, str | None):
        raise ConfigError(
            f"`{config}` has the keys {listed(content)}, expected the name of a `scheme` and a "
            "table `[rules]`"
        )
    return scheme, [*_rule_texts(table), *rules]


def file_settings(config: Path | None) -> dict[str, object]:
    """Return the options that `--config` sets and the command line does not.

    A key of the file is the name of an option with underscores: `group_size = 64`.

    Raises:
        ConfigError: A key is no option of the command, or its value is of another kind.
    """
    if config is None:
        return {}
    context = click.get_current_context()
    options = {
        name.removeprefix("--").replace("-", "_"): option
        for option in context.command.params
        if isinstance(option, click.Option)
        for name in option.opts
        if name.startswith("--")
    }
    content = {k: v for k, v in _read_toml(config).items() if k not in ("scheme", "rules")}
    allowed = options.keys() - _ONLY_ON_THE_COMMAND_LINE
    if unknown := sorted(set(content) - allowed):
        raise ConfigError(
            f"`{config}` has the key {listed(unknown)}, expected `scheme`, a table `[rules]` and "
            f"options of the command: {listed(sorted(allowed), limit=30)}"
        )
    settings: dict[str, object] = {}
    for key, value in content.items():
        option = options[key]
        assert option.name is not None, "every option has a name"
        if context.get_parameter_source(option.name) == click.core.ParameterSource.COMMANDLINE:
            continue
        try:
            settings[option.name] = option.type_cast_value(context, value)
        except click.BadParameter as error:
            raise ConfigError(f"`{key}` in `{config}` is `{value}`: {error.message}") from error
    return settings


def _read_toml(config: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(config.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:  # ValueError: TOML or UTF-8
        raise ConfigError(f"cannot read rules from `{config}`: {error}") from error


def _rule_texts(table: Mapping[str, object]) -> list[str]:
    texts = []
    for pattern, value in table.items():
        if isinstance(value, Mapping) and set(value) == {"scheme", "group_size"}:
            value = f"{value['scheme']}:g{value['group_size']}"
        elif isinstance(value, Mapping) and set(value) == {"scheme"}:
            value = value["scheme"]
        if not isinstance(value, str):
            raise ConfigError(
                f"rule `{pattern}` has the value `{value}`, expected a scheme name or "
                "`{ scheme = NAME, group_size = NUMBER }`"
            )
        texts.append(f"{pattern}={value}")
    return texts


_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
SCHEME: _Decorator = click.option(
    "--scheme", help="Scheme of every layer that no rule covers, for example W4A16."
)
RULE: _Decorator = click.option(
    "--rule", "rules", multiple=True, metavar="PATTERN=SCHEME", help="May be repeated."
)
JSON: _Decorator = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
QUIET: _Decorator = click.option("--quiet", "-q", is_flag=True, help="Show no progress bars.")
EVERY: _Decorator = click.option("--all", "every", is_flag=True, help="One row for each module.")
TRUST: _Decorator = click.option(
    "--trust-remote-code", is_flag=True, help="Run modelling code that comes with the checkpoint."
)


CHECK_TP: _Decorator = click.option(
    "--check-tp",
    type=click.IntRange(min=1),
    metavar="N",
    help="Name the layers of which a split over N devices cuts a group.",
)

MODEL: _Decorator = click.option(
    "--model",
    "model",
    is_flag=True,
    help="Say instead how the model runs: class, shard, scheme and bytes of each module.",
)
TP: _Decorator = click.option(
    "--tp", type=int, default=1, show_default=True, help="With --model: ranks that share layers."
)
PP: _Decorator = click.option(
    "--pp", type=int, default=1, show_default=True, help="With --model: stages of a pipeline."
)
EXPLAIN: _Decorator = click.option(
    "--explain",
    "explain",
    multiple=True,
    metavar="NAME",
    help="Say where the tensor NAME goes in the model of SOURCE, rule by rule; repeatable.",
)


def warn(warnings: Iterable[str]) -> None:
    """Print warnings to stderr."""
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)
