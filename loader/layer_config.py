"""The config of a model with fewer layers: counts, lists with an entry a layer, numbers of layers.

Keys are those of transformers 5.24 and of checkpoints that bring their own code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quantload.errors import ConfigError

_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_NESTED = ("text_config", "thinker_config", "llm_config", "language_config")
# Lists with one entry a layer have names with one of these words, or are one of these sizes.
_LAYER_WORDS = ("layer", "types", "pattern", "freq", "ratios")
_LAYER_SIZES = ("intermediate_size", "num_attention_heads", "num_key_value_heads")
_NUMBERS = (  # lists of layer numbers
    *("mlp_only_layers", "moe_layers", "attn_layer_indices", "full_attn_idxs", "dense_layers"),
    *("cross_attention_layers", "full_attention_layers", "global_attn_layers"),
)
_FIRST = (  # how many of the first layers are of another kind, or the first that is
    *("first_k_dense_replace", "max_window_layers", "num_dense_layers", "moe_layer_start_index"),
    "first_k_dense_layers",
)
_LAST = ("num_kv_shared_layers",)  # how many of the last layers are of another kind
_PREDICTION = ("num_nextn_predict_layers",)  # layers of the same list, after the others
_PERIODS = {  # every how many layers another kind comes -> the list that counts instead
    "decoder_sparse_step": "",
    "interleave_moe_layer_step": "moe_layers",
    "full_attention_interval": "layer_types",
    "sliding_window_pattern": "layer_types",
    "_sliding_window_pattern": "layer_types",
    "global_attn_every_n_layers": "layer_types",
    "no_rope_layer_interval": "no_rope_layers",
    "attn_layer_period": "layers_block_type",
    "expert_layer_period": "",
    "moe_layer_freq": "",
    "moe_layer_interval": "",
}


def layer_count(config: Mapping[str, Any]) -> int | None:
    """Return how many decoder layers a config counts; None if it does not say."""
    for holder in (*_holders(config), config):
        for key in _COUNTS:
            if isinstance(holder.get(key), int):
                return int(holder[key])
    return None


def _holders(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for key in _NESTED:
        inner = config.get(key)
        if isinstance(inner, Mapping):
            yield from _holders(inner)
            yield inner


def reduced_config(config: Mapping[str, Any], kept: Sequence[int], count: int) -> dict[str, Any]:
    """Return the config of a model that has only some of the layers.

    Args:
        config: Content of config.json.
        kept: Numbers of the layers, ascending; they become 0, 1, ...
        count: How many layers there are.

    Raises:
        ConfigError: Kinds of layers come in turns that numbering anew would break.
    """
    changed = {key: _reduced(key, value, kept, count) for key, value in config.items()}
    for key in _NESTED:
        inner = config.get(key)
        if isinstance(inner, Mapping):
            changed[key] = reduced_config(inner, kept, count)
    for key, instead in _PERIODS.items():
        period = config.get(key)
        if isinstance(period, int) and period > 1 and not isinstance(config.get(instead), list):
            _check_turns(key, period, kept)
    return changed


def _reduced(key: str, value: Any, kept: Sequence[int], count: int) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return _reduced_number(key, value, kept, count)
    if key in _NUMBERS and isinstance(value, list):
        return [kept.index(number) for number in value if number in kept]
    if isinstance(value, list | str) and len(value) == count and _is_by_layer(key):
        chosen = [value[number] for number in kept]
        return "".join(chosen) if isinstance(value, str) else chosen
    return value


def _is_by_layer(key: str) -> bool:
    return key in _LAYER_SIZES or any(word in key for word in _LAYER_WORDS)


def _reduced_number(key: str, value: int, kept: Sequence[int], count: int) -> int:
    if key in _COUNTS and value == count:
        return len(kept)
    if key in _FIRST:
        return sum(number < value for number in kept)
    if key in _LAST:
        return sum(number >= count - value for number in kept)
    return 0 if key in _PREDICTION else value


def _check_turns(key: str, period: int, kept: Sequence[int]) -> None:
    moved = [old for new, old in enumerate(kept) if old % period != new % period]
    if moved:
        raise ConfigError(
            f"layer {moved[0]} would be layer {kept.index(moved[0])}, of another kind: the config "
            f"has `{key}` = `{period}`",
            hint="take the layers from 0 on, for example `--layers 0-1`",
        )
