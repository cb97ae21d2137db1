"""Compare what two config.json say about the model that they describe.

Every key that both have counts, unless it only says how weights are held, who wrote the file, how
the model is trained, or how its texts are generated. What only one has is for `config_defaults.py`,
and RoPE for `config_rope.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# Without effect on what the model computes of given tokens, in one dtype.
_BOOKKEEPING = frozenset(
    {
        *("quantization_config", "compression_config", "torch_dtype", "dtype", "auto_map"),
        *("transformers_version", "name_or_path", "use_cache", "initializer_range"),
        *("attention_dropout", "hidden_dropout", "embd_pdrop", "resid_pdrop", "attn_pdrop"),
        *("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "layerdrop"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
        *("router_aux_loss_coef", "router_jitter_noise", "pretraining_tp", "torchscript"),
        *("id2label", "label2id", "problem_type", "finetuning_task", "task_specific_params"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "tokenizer_class"),
        *("max_length", "num_labels", "chunk_size_feed_forward"),
        *("use_return_dict", "decoder_start_token_id"),
    }
)
ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
OF_ROPE = (  # what it is computed from, see `config_rope.py`
    *(*ROPE, "partial_rotary_factor"),
    *("max_position_embeddings", "original_max_position_embeddings"),
)
# transformers writes null for a default that it computes, and for a window that is off.
_NULL_IS_ABSENT = ("head_dim", "num_key_value_heads", "architectures")


@dataclass(frozen=True)
class ConfigDifference:
    """A key of config.json that two checkpoints have with different values.

    Args:
        key: With `text_config.` before it if it is inside.
        found: Its value in what is judged.
        expected: Its value in the other.
        of: What it says something of; "" for the model.
    """

    key: str
    found: object
    expected: object
    of: str = ""

    def __str__(self) -> str:
        of = f" of {self.of}" if self.of else ""
        return f"config: `{self.key}`{of} is `{self.found}`, expected `{self.expected}`"


def find_differences(
    output: Mapping[str, Any],
    source: Mapping[str, Any],
    keys: tuple[str, ...] | None = None,
    *,
    own_head: bool = True,
) -> Iterator[ConfigDifference]:
    """Yield every key that both have, with different values.

    Args:
        output: config.json of what is judged; `text_config` inside counts too.
        source: config.json with the expected values.
        keys: Keys to compare; None is all that change what the model computes, but those of RoPE.
        own_head: What is judged has a head of its own, whose weight is compared as such.
    """
    yield from _differences(output, source, keys, "", own_head)
    inner = output.get("text_config"), source.get("text_config")
    if isinstance(inner[0], Mapping) and isinstance(inner[1], Mapping):
        yield from _differences(inner[0], inner[1], keys, "text_config.", own_head)


def model_facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a config.json that change what the model computes, `text_config` too."""
    found = {k: v for k, v in config.items() if k not in _BOOKKEEPING and not k.startswith("_")}
    inner = found.get("text_config")
    return found | {"text_config": model_facts(inner)} if isinstance(inner, Mapping) else found


def _differences(
    output: Mapping[str, Any],
    source: Mapping[str, Any],
    keys: tuple[str, ...] | None,
    prefix: str,
    own_head: bool,
) -> Iterator[ConfigDifference]:
    for key in _of_the_model(source) if keys is None else keys:
        if key not in output or key not in source:
            continue
        found, expected = output[key], source[key]
        if key in _NULL_IS_ABSENT and (found is None or expected is None):
            continue
        if key == "sliding_window":
            found, expected = _window(output), _window(source)
        if key == "tie_word_embeddings" and not found and own_head:
            continue
        if not is_same(found, expected):
            yield ConfigDifference(f"{prefix}{key}", found, expected)


def _of_the_model(config: Mapping[str, Any]) -> Iterable[str]:
    """The keys that say what the model computes, but those of RoPE."""
    passed_over = {*OF_ROPE, "text_config"}
    return (
        key
        for key in config
        if key not in passed_over and key not in _BOOKKEEPING and not key.startswith("_")
    )


def _window(config: Mapping[str, Any]) -> object:
    """The sliding window; None if it is off."""
    return None if config.get("use_sliding_window") is False else config["sliding_window"]


def is_same(one: object, other: object) -> bool:
    """Return whether two values of a config mean the same."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return all(
            is_same(one[key], other[key]) for key in one.keys() & other.keys() - _BOOKKEEPING
        )
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-6)  # some containers hold them in float32
    return one == other
