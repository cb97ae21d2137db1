"""The config.json of an output: that of the source, with what changes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from quantload.loader.formats.compressed_tensors_config import build_config, validate_config
from quantload.loader.model_dtype import config_dtype
from quantload.loader.source import Source
from quantload.quant.scheme import Scheme


def output_config(
    source: Source,
    schemes: Mapping[str, Scheme],
    *,
    kept: Iterable[str],
    named: Collection[str],
    tied: Mapping[str, str],
    untied: bool,
    dtypes: set[torch.dtype],
) -> dict[str, Any]:
    """Return the config.json of an output: that of the source, but for what changes.

    Args:
        source: What is converted.
        schemes: Scheme of each quantized module.
        kept: Linear modules in full precision.
        named: Quantized modules that engines find by name only.
        tied: Modules whose weight is another module's in the source.
        untied: True if one of them gets a weight of its own.
        dtypes: dtypes of full-precision weights and scales.

    Raises:
        FormatMismatch: compressed-tensors refuses the generated config.
    """
    config = dict(source.checkpoint.config)
    cache_scheme = source.reader.cache_scheme
    for key in ("quantization_config", "compression_config"):
        config.pop(key, None)
    if isinstance(config.get("text_config"), Mapping):
        config["text_config"] = {
            k: v for k, v in config["text_config"].items() if k != "quantization_config"
        }
    if schemes or cache_scheme:
        ignored = dict.fromkeys([*kept, *(alias for alias in tied if alias not in schemes)])
        config["quantization_config"] = build_config(
            schemes, ignored, named=named, cache_scheme=cache_scheme
        )
        validate_config(config["quantization_config"])
    if untied:
        _set_untied(config)
    if len(dtypes) == 1 and config_dtype(config) not in dtypes:
        _set_dtype(config, str(next(iter(dtypes))).removeprefix("torch."))
    return config


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
