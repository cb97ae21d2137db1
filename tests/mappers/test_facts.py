"""Facts guessed from names alone."""

import pytest

from quantload.mappers.facts import ModelFacts, facts_from_names, groups_from_names

LLAMA = [
    "model.embed_tokens",
    *(
        f"model.layers.{layer}.{part}"
        for layer in (0, 1)
        for part in (
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.o_proj",
            "mlp.gate_proj",
            "mlp.up_proj",
            "mlp.down_proj",
        )
    ),
]


def test_a_llama_with_a_tied_head():
    facts = facts_from_names(reversed(LLAMA), tied_head=True)
    assert facts.origin == "name table"
    assert facts.kinds == {
        name: "embedding" if name == "model.embed_tokens" else "linear" for name in LLAMA
    }
    assert facts.tied == {"lm_head": "model.embed_tokens"}
    assert facts.groups == (
        ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"),
        tuple(f"model.layers.0.self_attn.{part}_proj" for part in "qkv"),
        ("model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"),
        tuple(f"model.layers.1.self_attn.{part}_proj" for part in "qkv"),
    )


def test_a_head_that_is_stored_is_not_tied():
    facts = facts_from_names([*LLAMA, "lm_head"], tied_head=True)
    assert facts.kinds["lm_head"] == "head"
    assert facts.tied == {}


def test_a_head_that_is_not_tied():
    assert facts_from_names(LLAMA, tied_head=False).tied == {}


def test_nothing_to_tie_to():
    assert facts_from_names(["layers.0.w1"], tied_head=True).tied == {}


@pytest.mark.parametrize(
    ("names", "embedding"),
    [
        (["transformer.wpe", "transformer.wte"], "transformer.wte"),
        (
            ["bert.embeddings.position_embeddings", "bert.embeddings.word_embeddings"],
            "bert.embeddings.word_embeddings",
        ),
        (["decoder.embed_positions", "decoder.embed_tokens"], "decoder.embed_tokens"),
        (
            ["language_model.embed_tokens_per_layer", "language_model.embed_tokens"],
            "language_model.embed_tokens",
        ),
        (["backbone.embeddings"], "backbone.embeddings"),
        (["gpt_neox.embed_in"], "gpt_neox.embed_in"),
        (["tok_embeddings"], "tok_embeddings"),
    ],
)
def test_a_head_is_tied_to_the_embedding_of_tokens(names, embedding):
    facts = facts_from_names(names, tied_head=True)
    assert set(facts.kinds.values()) == {"embedding"}
    assert facts.tied == {"lm_head": embedding}


@pytest.mark.parametrize("head", ["lm_head", "embed_out", "output_layer", "model.lm_head"])
def test_heads(head):
    assert facts_from_names([head], tied_head=False).kinds == {head: "head"}


@pytest.mark.parametrize("name", ["embed_tokens_proj", "a.lm_head.dense", "wte.adapter"])
def test_only_the_last_component_tells_the_kind(name):
    assert facts_from_names([name], tied_head=False).kinds == {name: "linear"}


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        (["a.w1", "a.w2", "a.w3"], (("a.w1", "a.w3"),)),
        (["a.query", "a.key", "a.value"], (("a.query", "a.key", "a.value"),)),
        (["q_proj", "k_proj", "v_proj"], (("q_proj", "k_proj", "v_proj"),)),
        # where a member is missing, or under another parent, there is no group
        (["a.q_proj", "a.k_proj"], ()),
        (["a.q_proj", "a.k_proj", "b.v_proj"], ()),
        (["a.gate_proj", "b.up_proj"], ()),
        (["a.up_proj"], ()),
        (["a.xgate_proj", "a.up_proj"], ()),
        ([], ()),
    ],
)
def test_groups_of_siblings(names, groups):
    assert groups_from_names(names) == groups


def test_names_of_a_module_begin_with_the_one_in_the_checkpoint():
    facts = ModelFacts(kinds={}, aliases={"a": ("model.a", "x.a")})
    assert facts.names_of("a") == ("a", "model.a", "x.a")
    assert facts.names_of("b") == ("b",)
    assert facts.origin == "model probe"
