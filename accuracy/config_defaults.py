"""All that two config.json say differently of what a model computes.

A key that one lacks has the default of transformers' class for the model type, which is asked for
only then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from quantload.accuracy.config_check import OF_ROPE, find_differences, is_same, model_facts
from quantload.accuracy.config_rope import rope_differences

_ELSEWHERE = (
    *OF_ROPE,  # see `config_rope.py`
    *("architectures", "layer_types"),  # computed from others where they are not written down
)


def config_differences(
    output: Mapping[str, Any],
    source: Mapping[str, Any],
    *,
    own_head: bool = True,
    one_checkpoint: bool = False,
) -> list[str]:
    """Return one line for everything that changes what the model computes.

    Args:
        output: config.json of what is judged; `text_config` inside counts too.
        source: config.json with the expected values.
        own_head: What is judged has a head of its own, whose weight is compared as such.
        one_checkpoint: Both are of one checkpoint, at two times. Then keys that its model type's
            class does not know count too. Other tools add keys of theirs.
    """
    both = (
        *find_differences(output, source, own_head=own_head),
        *rope_differences(output, source),
    )
    facts = model_facts(output), model_facts(source)
    return [*map(str, both), *_lone_keys(*facts, _Rules(own_head, one_checkpoint), "")]


class _Rules(NamedTuple):
    own_head: bool
    one_checkpoint: bool


def _lone_keys(
    output: Mapping[str, Any],
    source: Mapping[str, Any],
    rules: _Rules,
    prefix: str,
    within: _Section | None = None,
) -> Iterator[str]:
    keys = sorted((output.keys() ^ source.keys()) - {*_ELSEWHERE})
    if keys:
        config = {**source, **output}
        defaults = _defaults(config, within)
        for key in keys:
            value, default = config[key], defaults.get(key)
            known = key in defaults
            if is_same(value, default) or (not known and not (value and rules.one_checkpoint)):
                continue
            if key == "sliding_window" and config.get("use_sliding_window") is False:
                continue
            found = value if key in output else default
            if key == "tie_word_embeddings" and not found and rules.own_head:
                continue
            other = f"the default `{default}`" if known else "absent"
            if key in output:
                yield f"config: `{prefix}{key}` is `{value}`, expected {other}"
            else:
                yield f"config: `{prefix}{key}` is {other}, expected `{value}`"
    for key in sorted((output.keys() & source.keys()) - {*_ELSEWHERE}):
        inner = output[key], source[key]
        if isinstance(inner[0], Mapping) and isinstance(inner[1], Mapping):
            facts = model_facts(inner[0]), model_facts(inner[1])
            section = _Section(str(source.get("model_type")), key)
            yield from _lone_keys(*facts, rules, f"{prefix}{key}.", section)


class _Section(NamedTuple):
    """A part of a config, such as `vision_config`, that need not say its own model type."""

    model_type: str
    key: str


def _defaults(config: Mapping[str, Any], within: _Section | None) -> dict[str, Any]:
    """Return what transformers takes for keys that are missing; those it computes too."""
    from quantload.layers.config_class import config_defaults  # transformers: seconds

    found = config_defaults(str(config.get("model_type")))
    if not found and within is not None:
        outer = config_defaults(within.model_type).get(within.key)
        found = dict(outer) if isinstance(outer, Mapping) else {}
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


__all__ = ["config_differences"]
