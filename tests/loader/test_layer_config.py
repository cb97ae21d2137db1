"""Configs of models with fewer layers."""

import pytest

from quantload.errors import ConfigError
from quantload.loader.layer_config import layer_count, reduced_config

KINDS = ["full", "slide", "slide", "full"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_hidden_layers": 4}, 4),
        ({"n_layer": 4}, 4),
        ({"num_hidden_layers": 2, "text_config": {"num_hidden_layers": 4}}, 4),
        ({"thinker_config": {"text_config": {"num_hidden_layers": 4}}}, 4),
        ({"hidden_size": 4}, None),
    ],
)
def test_how_many_layers_a_config_counts(config, expected):
    assert layer_count(config) == expected


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("num_hidden_layers", 4, 2),
        ("n_layer", 4, 2),
        ("layer_types", KINDS, ["slide", "full"]),
        ("mlp_layer_types", KINDS, ["slide", "full"]),
        ("no_rope_layers", [1, 0, 1, 0], [0, 0]),
        ("hybrid_override_pattern", "M*E-", "*-"),
        ("moe_layer_freq", [0, 1, 1, 0], [1, 0]),
        ("intermediate_size", [1, 2, 3, 4], [2, 4]),
        ("mlp_only_layers", [0, 1], [0]),
        ("moe_layers", [0, 1, 2, 3], [0, 1]),
        ("attn_layer_indices", [3], [1]),
        ("first_k_dense_replace", 2, 1),
        ("max_window_layers", 4, 2),
        ("num_kv_shared_layers", 2, 1),
        ("num_nextn_predict_layers", 1, 0),
        # what does not go by layers
        ("hidden_size", 4, 4),
        ("architectures", ["a", "b", "c", "d"], ["a", "b", "c", "d"]),
        ("eos_token_id", [1, 2, 3, 4], [1, 2, 3, 4]),
        ("layer_types", ["full"], ["full"]),
        ("tie_word_embeddings", True, True),
        ("first_k_dense_replace", None, None),
    ],
)
def test_each_key(key, value, expected):
    config = {"num_hidden_layers": 4, key: value}
    assert reduced_config(config, (1, 3), 4)[key] == expected
    nested = reduced_config({"text_config": config}, (1, 3), 4)
    assert nested["text_config"][key] == expected
    assert config[key] == value


@pytest.mark.parametrize(
    ("kept", "fits"), [((0, 1), True), ((1,), False), ((2, 3), True), ((0, 2), False)]
)
def test_kinds_that_come_in_turns(kept, fits):
    config = {"num_hidden_layers": 4, "decoder_sparse_step": 2}
    if fits:
        assert reduced_config(config, kept, 4)["decoder_sparse_step"] == 2
        return
    with pytest.raises(ConfigError, match="of another kind: the config has `decoder_sparse_step`"):
        reduced_config(config, kept, 4)


def test_a_list_counts_instead_of_turns():
    config = {"num_hidden_layers": 4, "full_attention_interval": 4, "layer_types": KINDS}
    assert reduced_config(config, (3,), 4)["layer_types"] == ["full"]
