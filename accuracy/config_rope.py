"""RoPE in two config.json: in whichever spelling, and with what is not written down.

transformers 4 writes `rope_theta` and `rope_scaling`, 5 writes `rope_parameters`. Its class for the
model type knows the defaults and is asked for them, but only where the files differ in anything
that RoPE depends on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from quantload.accuracy.config_check import OF_ROPE, ROPE, ConfigDifference, is_same

_USUAL_THETA = 10000.0  # of most models whose config does not say it
_USUAL = {"rope_theta": _USUAL_THETA, "rope_type": "default"}
_LENGTHS = ("max_position_embeddings", "original_max_position_embeddings")
_BY_LENGTH = ("dynamic", "longrope")  # kinds that compute with the greatest length
# of the functions in transformers 5's modeling_rope_utils.py
_DEFAULTS = {"beta_fast": 32, "beta_slow": 1, "truncate": True, "partial_rotary_factor": 1.0}


def rope_differences(
    output: Mapping[str, Any], source: Mapping[str, Any]
) -> Iterator[ConfigDifference]:
    """Yield what two configs say differently of RoPE.

    Args:
        output: config.json of what is judged; what `text_config` says counts too.
        source: config.json with the expected values.
    """
    if _written(output) == _written(source):
        return
    ropes = _rope(output), _rope(source)
    if ropes == (None, None):
        return
    found, expected = (_USUAL if rope is None else rope for rope in ropes)
    kinds = [key for key in found.keys() & expected.keys() if key.endswith("rope_type")]
    of_one_kind = all(found[key] == expected[key] for key in kinds)
    for key in sorted(found.keys() | expected.keys()):
        one, other = _value(found, key), _value(expected, key)
        both = key in found and key in expected
        if not is_same(one, other) and (both or of_one_kind):
            yield ConfigDifference(key, one, other, of="RoPE")


def _written(config: Mapping[str, Any]) -> dict[str, Any]:
    inner = config.get("text_config")
    layers = (config, inner) if isinstance(inner, Mapping) else (config,)
    return {f"{i}.{key}": c[key] for i, c in enumerate(layers) for key in OF_ROPE if key in c}


def _value(rope: Mapping[str, Any], key: str) -> object:
    """A value, or what is computed with where it is not given."""
    if rope.get(key) is not None:
        return rope[key]
    layer, _, name = key.rpartition(".")
    beside = f"{layer}." if layer else ""
    if name == "attention_factor" and rope.get(f"{beside}rope_type") == "yarn":
        factor = rope.get(f"{beside}factor") or 1.0
        return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return _DEFAULTS.get(name)


def _rope(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """What is computed with, `key` or `layer_type.key`; None without RoPE."""
    from quantload.layers.config_class import effective_rope  # transformers: seconds

    held = effective_rope(config)
    if held is None:
        inner = config.get("text_config")
        held = _as_written(inner if isinstance(inner, Mapping) else config)
    return None if held is None else _flat(held)


def _flat(rope: Mapping[str, Any]) -> dict[str, Any]:
    layers = {name: value for name, value in rope.items() if isinstance(value, Mapping)}
    if layers:
        return {f"{n}.{key}": v for n, layer in layers.items() for key, v in _flat(layer).items()}
    found = {key: value for key, value in rope.items() if key != "type"}
    found["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    if found["rope_type"] not in _BY_LENGTH:
        found.pop("max_position_embeddings", None)
    return found


def _as_written(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a config of a type that transformers does not know says, in one spelling."""
    if not any(config.get(key) for key in ROPE):
        return None
    found: dict[str, Any] = {"rope_theta": _USUAL_THETA}
    found |= config.get("rope_scaling") or {}
    found |= {key: config[key] for key in (*_LENGTHS, "rope_theta") if config.get(key) is not None}
    return found | dict(config.get("rope_parameters") or {})


__all__ = ["rope_differences"]
