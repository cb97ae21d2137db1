"""What a baseline keeps of config.json: the model's weights say nothing without it.

Keys that both have are held to each other as `config_check.py` does. A key that one lacks has the
default of transformers' class for the model type, which is asked for only then.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from quantload.accuracy.config_check import (
    ConfigDifference,
    find_differences,
    is_same,
    model_facts,
)

_ROPE = ("rope_theta", "rope_scaling", "rope_parameters")  # `find_differences` knows defaults
_COMPUTED = ("architectures", "layer_types")  # from others, where they are not written down
_TIED = "tie_word_embeddings"


def kept_facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a baseline keeps of a config.json, as JSON holds it."""
    text = json.dumps(model_facts(config), default=str)
    kept: dict[str, Any] = json.loads(text, parse_constant=str)  # infinities are no JSON
    return kept


def changed_facts(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a line for each key of a config that changes what the model computes.

    Args:
        before: From `kept_facts`.
        now: The same of what is judged.
    """
    if before == now:
        return []
    differences = list(find_differences(now, before))
    if not any("rope" in difference.key for difference in differences):
        differences += _new_rope(before, now)
    return [*map(str, differences), *_untied(before, now), *_alone(before, now)]


def _new_rope(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[ConfigDifference]:
    """Yield what was a default of RoPE and is written down now."""
    for other in find_differences(before, now):
        if "rope" in other.key:
            yield replace(other, found=other.expected, expected=other.found)


def _untied(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Of two checkpoints one may have a head of its own; of one that is a change."""
    if before.get(_TIED) is True and now.get(_TIED) is False:
        yield f"config: `{_TIED}` is `False`, expected `True`"


def _alone(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield what only one has, and is no default."""
    lone = [
        key
        for key in sorted(before.keys() ^ now.keys())
        if key not in _ROPE and key not in _COMPUTED
    ]
    if lone:
        config = {**before, **now}
        defaults = _defaults(config)
        for key in lone:
            value, default = config[key], defaults.get(key)
            if is_same(value, default) or (key not in defaults and not value):
                continue
            if key == "sliding_window" and config.get("use_sliding_window") is False:
                continue
            other = f"the default `{default}`" if key in defaults else "absent"
            if key in now:
                yield f"config: `{prefix}{key}` is `{value}`, expected {other}"
            else:
                yield f"config: `{prefix}{key}` is {other}, expected `{value}`"
    inner = before.get("text_config"), now.get("text_config")
    if isinstance(inner[0], Mapping) and isinstance(inner[1], Mapping):
        yield from _alone(inner[0], inner[1], "text_config.")


def _defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what transformers takes for keys that are missing; those it computes too."""
    from quantload.layers.meta_model import config_defaults  # transformers: seconds

    found = config_defaults(str(config.get("model_type")))
    own = {**found, **config}
    for key, of in (("head_dim", "hidden_size"), ("num_key_value_heads", None)):
        computed = _part(found, of)
        if key in found and (found[key] is None or found[key] == computed):
            found[key] = _part(own, of)
    return found


def _part(config: Mapping[str, Any], of: str | None) -> int | None:
    """Return the heads of a config, or what each has of a size."""
    heads, size = config.get("num_attention_heads"), config.get(of) if of else None
    if not isinstance(heads, int) or heads < 1:
        return None
    return heads if of is None else size // heads if isinstance(size, int) else None


__all__ = ["changed_facts", "kept_facts"]
