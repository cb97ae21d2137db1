"""The quantization config of torchao checkpoints, as transformers writes it.

    quant_type                        {"default": CONFIG}; in old files a name such as
                                      "int8_weight_only", with `quant_type_kwargs`
    CONFIG                            {"_type": class, "_version": n, "_data": {...}}
    FqnToConfig, ModuleFqnToConfig    CONFIGs by name, in `fqn_to_config`, `module_fqn_to_config`
    modules_to_not_convert            names, or null

Of the names in an `FqnToConfig`, the first of these that is there decides: the module's or the
parameter's own name; `re:...` that matches all of one of them; `_default`. A null leaves the module
out. An entry of `modules_to_not_convert` leaves out every module with these components in a row in
its name, before all else.

Source: torchao 0.18.0 `quantization/quant_api.py` (`_fqn_to_config_handler`), transformers 5.24.0
`utils/quantization_config.py` (`TorchAoConfig`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from quantload.errors import FormatMismatch, UnsupportedVariant
from quantload.loader.formats.agreement import ConfigSays
from quantload.loader.formats.config_values import wrong_value
from quantload.loader.formats.matching import names_of

_BY_NAME = ("FqnToConfig", "ModuleFqnToConfig")
_LEGACY = {
    "int4_weight_only": "Int4WeightOnlyConfig",
    "int8_weight_only": "Int8WeightOnlyConfig",
    "int8_dynamic_activation_int8_weight": "Int8DynamicActivationInt8WeightConfig",
    "float8_weight_only": "Float8WeightOnlyConfig",
}
_GROUP_KEYS = ("granularity", "weight_granularity", "group_size")


@dataclass(frozen=True)
class Rule:
    """How one config quantizes a weight.

    Args:
        kind: Name of the config's class: "Int8WeightOnlyConfig".
        data: Its attributes.
    """

    kind: str
    data: Mapping[str, Any]

    @property
    def is_symmetric(self) -> bool:
        """True unless the config asks for zero points of weights."""
        stated = self.data.get("weight_mapping_type", self.data.get("mapping_type"))
        name = stated.get("_data") if isinstance(stated, Mapping) else stated
        return name != "ASYMMETRIC"

    @property
    def group_size(self) -> int | None:
        """Columns that share a scale, if the config says so."""
        for key in _GROUP_KEYS:
            value = self.data.get(key)
            if isinstance(value, Mapping):
                inner = value.get("_data")
                value = inner.get("group_size") if isinstance(inner, Mapping) else None
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        return None


@dataclass(frozen=True)
class TorchaoConfig:
    """What the config says of modules.

    Args:
        exact: Rules by module or parameter name; None leaves the module out.
        patterns: Rules by regular expression, in order: (entry, expression, rule).
        default: Rule of all other linear layers; None if there is none.
        skipped: Entries of `modules_to_not_convert`.
    """

    exact: Mapping[str, Rule | None] = field(default_factory=dict)
    patterns: tuple[tuple[str, re.Pattern[str], Rule | None], ...] = ()
    default: Rule | None = None
    skipped: frozenset[str] = frozenset()

    def entries(self) -> list[str]:
        """Return everything that names modules, as "<key>: <entry>"; keys are left off names."""
        named = [*self.exact, *(entry for entry, _, _ in self.patterns)]
        skipped = [f"modules_to_not_convert: {entry}" for entry in sorted(self.skipped)]
        return [*skipped, *(f"fqn_to_config: {entry}" for entry in named)]

    def says(self, parameter: str) -> tuple[ConfigSays, Rule | None]:
        """Return what the config says of a parameter, and the rule that it gives it.

        Args:
            parameter: Full name: "model.layers.0.self_attn.q_proj.weight".
        """
        module = parameter.rpartition(".")[0]
        for run in _runs(module) if self.skipped else ():
            if run in self.skipped:
                return ConfigSays(False, f"modules_to_not_convert: {run}"), None
        names = names_of(module)
        for name in (*names, parameter):
            if name in self.exact:
                rule = self.exact[name]
                return ConfigSays(rule is not None, name, is_exact=True), rule
        for entry, pattern, rule in self.patterns:
            if any(pattern.fullmatch(name) for name in (*names, parameter)):
                return ConfigSays(rule is not None, entry), rule
        return ConfigSays(self.default is not None, "default"), self.default


def matches_entry(entry: str) -> Callable[[str], object]:
    """Return the test whether an entry of a config names a module, or its weight."""
    if entry.startswith("re:"):
        pattern = re.compile(entry[3:])
        return lambda module: any(
            pattern.fullmatch(name) for name in (*names_of(module), f"{module}.weight")
        )
    return lambda module: (
        f".{entry}." in f".{module}." or entry in (*names_of(module), f"{module}.weight")
    )


def _runs(module: str) -> Iterator[str]:
    """Yield every run of whole components of a name."""
    parts = module.split(".")
    for start in range(len(parts)):
        for stop in range(start + 1, len(parts) + 1):
            yield ".".join(parts[start:stop])


def parse_config(config: Mapping[str, Any], checkpoint_name: str) -> TorchaoConfig:
    """Read the quantization config.

    Args:
        config: The `quantization_config`.
        checkpoint_name: For messages.

    Raises:
        FormatMismatch: A value is missing, or of another type than it must be.
        UnsupportedVariant: The config is in a form that is not read.
    """
    skipped = config.get("modules_to_not_convert")
    if skipped is not None and not (
        isinstance(skipped, list) and all(isinstance(entry, str) for entry in skipped)
    ):
        raise wrong_value("modules_to_not_convert", skipped, "a list of names", checkpoint_name)
    entries = frozenset(entry.strip(".") for entry in skipped or ()) - {""}
    stated = config.get("quant_type")
    if isinstance(stated, str):
        return TorchaoConfig(default=_legacy(stated, config, checkpoint_name), skipped=entries)
    if not isinstance(stated, Mapping) or not stated:
        raise wrong_value("quant_type", stated, "an object", checkpoint_name)
    if set(stated) != {"default"}:
        raise UnsupportedVariant(
            f"`quant_type` has the keys {', '.join(f'`{key}`' for key in stated)}, expected only "
            f"`default`, in the quantization config of `{checkpoint_name}`"
        )
    top = _rule(stated["default"], "quant_type.default", checkpoint_name)
    if top.kind not in _BY_NAME:
        return TorchaoConfig(default=top, skipped=entries)
    exact, patterns = _by_name(top, checkpoint_name)
    default = exact.pop("_default", None)
    return TorchaoConfig(exact=exact, patterns=patterns, default=default, skipped=entries)


def _legacy(name: str, config: Mapping[str, Any], checkpoint_name: str) -> Rule:
    kind = _LEGACY.get(name)
    if kind is None:
        raise UnsupportedVariant(
            f"`quant_type` is `{name}`, expected an object or one of {', '.join(_LEGACY)}, in the "
            f"quantization config of `{checkpoint_name}`"
        )
    arguments = config.get("quant_type_kwargs") or {}
    if not isinstance(arguments, Mapping):
        raise wrong_value("quant_type_kwargs", arguments, "an object", checkpoint_name)
    return Rule(kind, arguments)


def _rule(value: object, key: str, checkpoint_name: str) -> Rule:
    kind = value.get("_type") if isinstance(value, Mapping) else None
    data = value.get("_data", {}) if isinstance(value, Mapping) else None
    if not isinstance(kind, str) or not isinstance(data, Mapping):
        expected = "an object with `_type` and `_data`"
        raise wrong_value(key, value, expected, checkpoint_name)
    return Rule(kind, data)


def _by_name(
    top: Rule, checkpoint_name: str
) -> tuple[dict[str, Rule | None], tuple[tuple[str, re.Pattern[str], Rule | None], ...]]:
    stated = top.data.get("fqn_to_config") or top.data.get("module_fqn_to_config")
    if not isinstance(stated, Mapping):
        raise wrong_value("fqn_to_config", stated, "an object", checkpoint_name)
    exact: dict[str, Rule | None] = {}
    patterns = []
    for name, value in stated.items():
        rule = None if value is None else _rule(value, f"fqn_to_config.{name}", checkpoint_name)
        if not name.startswith("re:"):
            exact[name] = rule
            continue
        try:
            patterns.append((name, re.compile(name[3:]), rule))
        except re.error as error:
            raise FormatMismatch(
                f"entry `{name}` of `fqn_to_config` is no regular expression: {error}, in the "
                f"quantization config of `{checkpoint_name}`"
            ) from error
    return exact, tuple(patterns)
