"""All that two config.json say differently of what a model computes.

A key that one lacks has the default of transformers' class for the model type, which is asked for
only then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from quantload.accuracy.config_check import OF_ROPE, find_differences, is_same, model_facts
from quantload.accuracy.config_rope import rope_differences

_ELSEWHERE = (
    *OF_ROPE,  # see `config_rope.py`
    *("architectures", "layer_types"),  # computed from others where they are not written down
)


def config_differences(
    output: Mapping[str, Any], source: Mapping[str, Any], *, one_checkpoint: bool = False
) -> list[str]:
    """Return one line for everything that changes what the model computes.

    Args:
        output: config.json of what is judged; `text_config` inside counts too.
        source: config.json with the expected values.
        one_checkpoint: As for `lone_keys`.
    """
    both = (*find_differences(output, source), *rope_differences(output, source))
    return [*map(str, both), *lone_keys(output, source, one_checkpoint=one_checkpoint)]


def lone_keys(
    output: Mapping[str, Any], source: Mapping[str, Any], *, one_checkpoint: bool = False
) -> list[str]:
    """Return one line for every key that only one config has, if it says more than its default.

    Args:
        output: config.json of what is judged; `text_config` inside counts too.
        source: config.json with the expected values.
        one_checkpoint: Both are of one checkpoint, at two times. Then keys that its model type's
            class does not know count too, and a head of its own. Other tools add keys of theirs.
    """
    return list(_lone_keys(model_facts(output), model_facts(source), one_checkpoint, ""))


def _lone_keys(
    output: Mapping[str, Any], source: Mapping[str, Any], one_checkpoint: bool, prefix: str
) -> Iterator[str]:
    keys = sorted((output.keys() ^ source.keys()) - {*_ELSEWHERE})
    if keys:
        config = {**source, **output}
        defaults = _defaults(config)
        for key in keys:
            value, default = config[key], defaults.get(key)
            known = key in defaults
            if is_same(value, default) or (not known and not (value and one_checkpoint)):
                continue
            if key == "sliding_window" and config.get("use_sliding_window") is False:
                continue
            found = value if key in output else default
            if key == "tie_word_embeddings" and not found and not one_checkpoint:
                continue  # a head of its own is a weight, which is compared as such
            other = f"the default `{default}`" if known else "absent"
            if key in output:
                yield f"config: `{prefix}{key}` is `{value}`, expected {other}"
            else:
                yield f"config: `{prefix}{key}` is {other}, expected `{value}`"
    inner = output.get("text_config"), source.get("text_config")
    if isinstance(inner[0], Mapping) and isinstance(inner[1], Mapping):
        yield from _lone_keys(inner[0], inner[1], one_checkpoint, f"{prefix}text_config.")


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


__all__ = ["config_differences", "lone_keys"]
