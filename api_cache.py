"""Scales of a key-value cache in FP8, as a checkpoint holds them."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from quantload.api_plan import inspect
from quantload.errors import UnsupportedVariant
from quantload.loader.kept_scales import read_cache_scales
from quantload.runtime.step_model import CacheScales

_log = logging.getLogger("quantload")


def cache_scales(source: str | Path, layers: int) -> CacheScales:
    """Return the scales that a checkpoint has for keys and values in FP8; ones where it has none.

    Args:
        source: A folder, a GGUF file or a hub id.
        layers: How many the model has.

    Raises:
        UnsupportedVariant: They are no scales of whole layers.
    """
    found = read_cache_scales(inspect(source))
    if found is None:
        _log.warning("`%s` has no scales for its key-value cache: taken as 1", source)
        return unit_scales(layers)
    if len(found[0]) != layers:
        raise UnsupportedVariant(
            f"cache scales of {len(found[0])} layers, expected {layers}, in `{source}`"
        )
    keys, values = found
    return CacheScales(torch.tensor(keys), torch.tensor(values))


def unit_scales(layers: int) -> CacheScales:
    """Return scales of 1, for values that FP8 holds as they are, up to 448."""
    return CacheScales(torch.ones(layers), torch.ones(layers))


__all__ = ["cache_scales", "unit_scales"]
