"""The config.json of an output: that of the source, with what changes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from quantload.loader.formats.target import Target, WrittenModules
from quantload.loader.model_dtype import config_dtype
from quantload.loader.source import Source
from quantload.mappers.dtype_names import check_dtypes, without_prefixes
from quantload.mappers.facts import ModelFacts
from quantload.quant.scheme import Scheme


@dataclass(frozen=True)
class OutputConfig:
    """The JSON files that describe an output.

    Args:
        config: config.json.
        files: Further ones that its format has, by name.
    """

    config: Mapping[str, Any]
    files: Mapping[str, Mapping[str, Any]]


def output_config(  # noqa: PLR0913 - what a config says, by name
    source: Source,
    schemes: Mapping[str, Scheme],
    *,
    target: Target,
    kept: Iterable[str],
    named: Collection[str],
    facts: ModelFacts,
    untied: bool,
    dtypes: set[torch.dtype],
) -> OutputConfig:
    """Return the config.json of an output: that of the source, but for what changes.

    Args:
        source: What is converted.
        schemes: Scheme of each quantized module.
        target: The format that is written.
        kept: Linear modules in full precision.
        named: Quantized modules that engines find by name only.
        facts: Names of the modules in the transformers model, and ties of the source.
        untied: True if one of them gets a weight of its own.
        dtypes: dtypes of full-precision weights and scales.
    """
    files: Mapping[str, Mapping[str, Any]] = {}
    check_dtypes(source.checkpoint.config)
    config = without_prefixes(source.checkpoint.config)  # engines take plain names alone
    cache_scheme = source.reader.cache_scheme
    for key in ("quantization_config", "compression_config"):
        config.pop(key, None)
    if isinstance(config.get("text_config"), Mapping):
        config["text_config"] = {
            k: v for k, v in config["text_config"].items() if k != "quantization_config"
        }
    if schemes or cache_scheme:
        ignored = [*kept, *(alias for alias in facts.tied if alias not in schemes)]
        written = target.config(
            WrittenModules(
                schemes=_under_all_names(schemes, facts),
                kept=_under_all_names(dict.fromkeys(ignored), facts),
                named=_under_all_names(dict.fromkeys(named), facts),
                cache_scheme=cache_scheme,
            )
        )
        config["quantization_config"] = written.quantization_config
        files = written.files
    if untied:
        _set_untied(config)
    if len(dtypes) == 1 and config_dtype(config) not in dtypes:
        _set_dtype(config, str(next(iter(dtypes))).removeprefix("torch."))
    return OutputConfig(config, files)


_Value = TypeVar("_Value")


def _under_all_names(values: Mapping[str, _Value], facts: ModelFacts) -> dict[str, _Value]:
    """Add what modules are called in the transformers model.

    transformers looks for those names in a config; other readers for those of the files.
    """
    named = dict(values)
    for module, value in values.items():
        for name in facts.names_of(module):
            named.setdefault(name, value)
    return named


def _set_untied(config: dict[str, Any]) -> None:
    config["tie_word_embeddings"] = False
    if (
        isinstance(config.get("text_config"), Mapping)
        and "tie_word_embeddings" in config["text_config"]
    ):
        config["text_config"] = {**config["text_config"], "tie_word_embeddings": False}


def _set_dtype(config: dict[str, Any], name: str) -> None:
    key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
    config[key] = name
    if isinstance(config.get("text_config"), Mapping):
        inner = dict(config["text_config"])
        for inner_key in ("dtype", "torch_dtype"):
            if inner_key in inner:
                inner[inner_key] = name
        config["text_config"] = inner
