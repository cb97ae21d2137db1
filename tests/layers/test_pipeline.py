"""Where models can be cut into stages, and what keeps others from it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fake_source import tiny_config
from torch import nn
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast

from quantload.errors import ModelError
from quantload.layers.meta_model import build_on_meta
from quantload.layers.pipeline import PipelineCut, find_cut
from quantload.layers.pipeline_stand_ins import Passed

NOWHERE = Path("/nowhere")


def meta_model(model_type: str = "llama", **options: object) -> nn.Module:
    return build_on_meta(tiny_config(model_type, **options), NOWHERE, dtype=torch.float32)


def cut_of(count: int) -> PipelineCut:
    return PipelineCut("layers", count, "embed", ("norm", "head"), "head", is_declared=True)


@pytest.mark.parametrize(
    ("count", "stages", "held"),
    [
        (4, 2, [range(2), range(2, 4)]),
        (5, 2, [range(3), range(3, 5)]),
        (7, 3, [range(3), range(3, 5), range(5, 7)]),
        (3, 3, [range(1), range(1, 2), range(2, 3)]),
    ],
)
def test_layers_are_spread_evenly_and_the_first_stages_have_one_more(count, stages, held):
    assert [cut_of(count).held_by(stage, stages) for stage in range(stages)] == held


def test_a_plain_decoder_is_cut_where_its_plan_says():
    cut = find_cut(meta_model(), 2)
    assert (cut.layers, cut.count, cut.embedding) == ("model.layers", 2, "model.embed_tokens")
    assert cut.after == ("model.norm", "lm_head")
    assert cut.is_declared


def test_a_model_without_a_plan_is_cut_at_its_layers_with_a_warning(caplog):
    cut = find_cut(meta_model("gpt2"), 2)
    assert (cut.layers, cut.embedding) == ("transformer.h", "transformer.wte")
    assert "has no plan for pipelines" in caplog.text


def positions_of(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[1], device=x.device).unsqueeze(0)


def with_forward(forward) -> nn.Module:
    model = meta_model()
    kind = type(model.model)
    model.model.__class__ = type("Odd", (kind,), {"forward": forward})
    return model


def test_a_model_that_reads_the_embedding_after_its_layers_is_refused():
    def forward(self, input_ids=None, **_):
        x = embedded = self.embed_tokens(input_ids)
        angles = self.rotary_emb(x, position_ids=positions_of(x))
        for layer in self.layers:
            x = layer(x, position_embeddings=angles)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x + embedded))

    with pytest.raises(ModelError, match="after the layers reads what comes from the embedding"):
        find_cut(with_forward(forward), 2)


def test_a_model_whose_layers_are_handed_more_than_hidden_states_is_refused():
    model = meta_model()
    original = type(model.model.layers[0]).forward

    def forward(self, hidden_states, extra=None, **kwargs):
        return original(self, hidden_states, **kwargs)

    for layer in model.model.layers:
        layer.__class__ = type("Extra", (type(layer),), {"forward": forward})

    def run(self, input_ids=None, **_):
        x = self.embed_tokens(input_ids)
        angles, embedded = self.rotary_emb(x, position_ids=positions_of(x)), x
        for layer in self.layers:
            x = layer(x, extra=embedded * 2, position_embeddings=angles)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x))

    model.model.__class__ = type("Odd", (type(model.model),), {"forward": run})
    with pytest.raises(ModelError, match=r"argument `extra` of `model\.layers\.0`"):
        find_cut(model, 2)


def test_too_few_layers_are_refused():
    with pytest.raises(ModelError, match="2 layers, expected at least one for each of 3 stages"):
        find_cut(meta_model(), 3)


def test_a_layer_of_another_stage_keeps_the_count_of_tokens():
    layer = Passed(nn.Module(), index=0, returned=1)
    cache, x = DynamicCache(), torch.randn(2, 5, 8)
    assert layer(x, past_key_values=cache)[0] is x
    assert cache.get_seq_length() == 5
    layer(x[:, :1], past_key_values=cache)
    assert cache.get_seq_length() == 6


def test_a_layer_of_another_stage_tells_what_is_in_it():
    layer = nn.Module()
    layer.output = nn.Module()
    layer.output.adapters = nn.ModuleDict({"en_XX": nn.Linear(2, 2)})
    layer.output.factor = 2.0
    passed = Passed(layer, index=0)
    assert list(passed.output.adapters.keys()) == ["en_XX"]
    assert passed.output.factor == 2.0
    assert not [*passed.parameters(), *passed.children(), *passed.output.parameters()]
    with pytest.raises(AttributeError, match="adapters"):
        passed.adapters  # noqa: B018 - that it is not there


def test_a_parameter_beside_the_layers_is_no_layer_after_them():
    model = meta_model()
    model.model.newline = nn.Parameter(torch.empty(64, device="meta"))
    assert find_cut(model, 2).after == ("model.norm", "lm_head")


def test_a_layer_with_two_attentions_has_two_places_in_a_cache():
    layer, cache, x = nn.Module(), DynamicCache(), torch.randn(2, 5, 8)
    layer.layer_idx, layer.parts = 1, nn.ModuleList([nn.Module(), nn.Module()])
    for number, part in enumerate(layer.parts):
        part.layer_idx = 2 + number
    Passed(layer, index=1)(x, layer_past=cache)
    assert [cache.get_seq_length(number) for number in range(4)] == [0, 0, 5, 5]


def test_a_state_that_is_no_cache_is_refused():
    with pytest.raises(ModelError, match="layer 0 is given no cache"):
        Passed(nn.Module(), index=0)(torch.randn(2, 5, 8), state=[torch.randn(2)], use_cache=True)


def test_code_between_layers_that_reads_the_embedding_is_refused():
    def forward(self, input_ids=None, **_):
        x = embedded = self.embed_tokens(input_ids)
        angles = self.rotary_emb(x, position_ids=positions_of(x))
        for layer in self.layers:
            x = layer(x + embedded, position_embeddings=angles)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x))

    with pytest.raises(ModelError, match="come from the embedding as well"):
        find_cut(with_forward(forward), 2)


def test_layers_that_read_another_embedding_are_refused():
    def forward(self, input_ids=None, **_):
        x = nn.functional.embedding(input_ids, self.other)
        angles = self.rotary_emb(x, position_ids=positions_of(x))
        for layer in self.layers:
            x = layer(x, position_embeddings=angles)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x))

    model = with_forward(forward)
    model.model.other = nn.Parameter(torch.empty(128, 64, device="meta"))
    with pytest.raises(ModelError, match=r"layers\.0` is given do not come from the embedding"):
        find_cut(model, 2)


def test_a_layer_that_reads_what_an_earlier_one_kept_is_refused():
    model, kept = meta_model(), []
    original = type(model.model.layers[0]).forward

    def forward(self, hidden_states, **kwargs):
        kept.append(hidden_states * 2)
        return original(self, hidden_states + kept[0], **kwargs)

    for layer in model.model.layers:
        layer.__class__ = type("Keeps", (type(layer),), {"forward": forward})
    with pytest.raises(ModelError, match="reads what comes from the embedding"):
        find_cut(model, 2)
