"""Compare what two config.json say about the structure of the model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

_STRUCTURE = (
    *("architectures", "model_type", "num_hidden_layers", "hidden_size", "intermediate_size"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "hidden_act"),
    *("rms_norm_eps", "sliding_window", "rope_theta", "rope_parameters", "rope_scaling"),
)
# transformers writes null for a default that it computes, and for a window that is off.
_NULL_IS_ABSENT = ("head_dim", "num_key_value_heads", "sliding_window", "architectures")


def config_differences(
    output: Mapping[str, Any], source: Mapping[str, Any], keys: tuple[str, ...] = _STRUCTURE
) -> list[str]:
    """Return one line for every key that both have, with different values.

    Args:
        output: config.json of what is judged; `text_config` inside counts too.
        source: config.json with the expected values.
        keys: Keys to compare.
    """
    lines = list(_differences(output, source, keys, ""))
    inner = output.get("text_config"), source.get("text_config")
    if isinstance(inner[0], Mapping) and isinstance(inner[1], Mapping):
        lines += _differences(inner[0], inner[1], keys, "text_config.")
    return lines


def _differences(
    output: Mapping[str, Any], source: Mapping[str, Any], keys: tuple[str, ...], prefix: str
) -> Iterator[str]:
    for key in keys:
        if key not in output or key not in source:
            continue
        found, expected = output[key], source[key]
        if key in _NULL_IS_ABSENT and (found is None or expected is None):
            continue
        if not _is_same(found, expected):
            yield f"config: `{prefix}{key}` is `{found}`, expected `{expected}`"


def _is_same(one: object, other: object) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return all(_is_same(one[key], other[key]) for key in one.keys() & other.keys())
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6)  # some containers hold them in float32
    return one == other
