"""A head of its own beside a reference whose head is its embedding."""

from __future__ import annotations

import json

import pytest
import tiny_checkpoints as tiny
import torch
from safetensors.torch import load_file

from quantload import api
from quantload.accuracy.tied_head import has_own_head, with_tied_head

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"


@pytest.fixture
def source(tmp_path):
    """A checkpoint that is tied."""
    return tiny.llama(tmp_path / "tied", tied=True)


def untied(source, folder, head=None):
    """The same with `tie_word_embeddings` false, and with a head or without."""
    config = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": False}
    held = load_file(source / "model.safetensors")
    if head is not None:
        held[f"{HEAD}.weight"] = head
    return tiny.write(folder, config, held)


def embedding(source):
    return load_file(source / "model.safetensors")[f"{EMBEDDING}.weight"]


def test_a_head_that_is_missing_fails_in_every_tier(tmp_path, source):
    other = untied(source, tmp_path / "untied")
    assert not has_own_head(api.inspect(other))
    line = "config: `tie_word_embeddings` is `False`, expected `True`"
    for tier in ("structure", "weights"):
        found = api.compare(source, other, tier=tier)
        assert found.config_differences == (line,)
        assert not found.passed
    assert line in api.verify(other, source).problems


def test_a_head_of_its_own_is_held_to_the_embedding(tmp_path, source):
    same = untied(source, tmp_path / "same", embedding(source).clone())
    found = api.compare(source, same)
    assert found.passed
    assert found.only_in_candidate == ()
    assert {row.module: row.weight.relative for row in found.layers}[HEAD] == 0.0
    other = untied(source, tmp_path / "other", torch.randn_like(embedding(source)))
    found = api.compare(source, other)
    assert not found.passed
    rows = {row.module: row.weight.relative for row in found.layers}
    assert rows[HEAD] > 0.5
    assert rows[EMBEDDING] == 0.0
    expected = torch.linalg.vector_norm(
        load_file(other / "model.safetensors")[f"{HEAD}.weight"].double()
        - embedding(source).double()
    ) / torch.linalg.vector_norm(embedding(source).double())
    assert rows[HEAD] == pytest.approx(float(expected), rel=1e-9)


def test_with_tokens_too(tmp_path, source):
    other = untied(source, tmp_path / "other", embedding(source) * 1.5)
    found = api.compare(source, other, sequences=[[1, 5, 9, 2, 7, 3, 3, 1]])
    assert not found.passed
    assert any(HEAD in failure for failure in found.failures)


def test_nothing_is_added_where_both_have_a_head_or_none(tmp_path, source):
    whole = api.inspect(tiny.llama(tmp_path / "whole"))
    tied = api.inspect(source)
    assert with_tied_head(whole, whole) is whole
    assert with_tied_head(tied, tied) is tied
