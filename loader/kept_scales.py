"""The scales that a checkpoint has for a quantized key-value cache, in the order of its layers."""

from __future__ import annotations

import re

from quantload.errors import UnsupportedVariant, listed
from quantload.loader.source import Source
from quantload.mappers.cache_scales import cache_scale_of

_NUMBER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


def read_cache_scales(source: Source) -> tuple[list[float], list[float]] | None:
    """Return the multipliers of keys and of values, one a layer; None if the checkpoint has none.

    Raises:
        UnsupportedVariant: Layers lack one that others have, have several numbers or zero points.
    """
    found: dict[str, dict[int, float]] = {"k": {}, "v": {}}
    for name in source.checkpoint.tensors:
        scale = cache_scale_of(name)
        if scale is None or not {"k", "v"} & set(scale.of):
            continue
        number = _NUMBER.search(scale.attention)
        values = source.read_plain(name).float().flatten().tolist()
        if scale.kind == "zero_point" and not any(values):
            continue
        if scale.kind == "zero_point" or number is None or len(values) != 1:
            raise UnsupportedVariant(
                f"`{name}` holds {len(values)} numbers of the cache, expected one scale of a layer "
                f"and no zero point, in `{source.checkpoint.name}`",
                hint="keep keys and values in the model's dtype",
            )
        for which in {"k", "v"} & set(scale.of):
            found[which][int(number[1])] = values[0]
    if not found["k"] and not found["v"]:
        return None
    layers = max([*found["k"], *found["v"]]) + 1
    missing = [
        f"{which} of layer {number}"
        for which, have in found.items()
        for number in range(layers)
        if number not in have
    ]
    if missing:
        raise UnsupportedVariant(
            f"cache scales are missing: {listed(missing)}, in `{source.checkpoint.name}`",
            hint="keep keys and values in the model's dtype, or give scales",
        )
    keys, values = ([have[number] for number in range(layers)] for have in found.values())
    return keys, values


__all__ = ["read_cache_scales"]
