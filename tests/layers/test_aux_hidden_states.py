"""Auxiliary hidden states against `output_hidden_states` of transformers."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from fake_source import quantized_model
from thread_grid import grid, together
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
    pipeline,
)

from quantload.api import load_model
from quantload.errors import ConfigError, ModelError
from quantload.layers.aux_hidden_states import decoder_layers, offer_aux_hidden_states

CPU = torch.device("cpu")
IDS = torch.tensor([[1, 5, 9, 33, 7, 13, 2, 50], [1, 6, 9, 17, 20, 3, 2, 4]])
LAYERS = 4


def load(model_type: str = "llama", **options: Any) -> nn.Module:
    fake = quantized_model(model_type, {}, num_hidden_layers=LAYERS)
    return load_model(fake.source, device=CPU, **options)


def run(model: nn.Module, **inputs: Any) -> Any:
    with torch.no_grad():
        return model(IDS, **inputs)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen3", "phi3"])
def test_states_are_those_of_transformers(model_type: str) -> None:
    model = load(model_type)
    expected = run(model, output_hidden_states=True)
    model.set_aux_hidden_state_layers((2, LAYERS // 2, LAYERS - 3, 0, LAYERS))
    output = run(model)
    found = output.aux_hidden_states
    assert torch.equal(output.logits, expected.logits)
    assert [state.shape for state in found] == [(2, 8, 64)] * 4
    for number, state in zip((0, 1, 2), found, strict=False):
        assert torch.equal(state, expected.hidden_states[number])
    with torch.no_grad():  # the last entry of transformers is normed
        assert torch.equal(model.model.norm(found[3]), expected.hidden_states[LAYERS])


SIZES = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
VISION = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2}
OTHERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "bert": (AutoModel, {**SIZES, "num_attention_heads": 4}),
    "gpt2": (AutoModelForCausalLM, {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 64}),
    "mamba": (AutoModelForCausalLM, {**SIZES, "state_size": 4}),
    "qwen2_vl": (
        AutoModelForImageTextToText,
        {"text_config": {**SIZES, **HEADS, "rope_parameters": ROPE}, "vision_config": VISION},
    ),
}


@pytest.mark.parametrize("model_type", OTHERS)
def test_other_kinds_of_models(model_type: str) -> None:
    auto, options = OTHERS[model_type]
    model = auto.from_config(AutoConfig.for_model(model_type, **options)).eval()
    offer_aux_hidden_states(model)
    expected = run(model, output_hidden_states=True).hidden_states
    first = 1 if model_type == "mamba" else 0  # of the states that transformers returns
    model.set_aux_hidden_state_layers([2, 1])
    one, two = run(model).aux_hidden_states
    assert torch.equal(one, expected[1 - first])
    assert torch.equal(two, expected[2 - first])


def test_a_layer_may_write_to_what_it_is_given() -> None:
    model = load()
    expected = run(model, output_hidden_states=True).hidden_states[2].clone()
    model.set_aux_hidden_state_layers((2,))
    model.model.layers[2].register_forward_hook(lambda _, args, __: args[0].zero_())
    assert torch.equal(run(model).aux_hidden_states[0], expected)


def test_outputs_of_every_kind() -> None:
    model = load()
    plain = run(model, return_dict=False)
    model.set_aux_hidden_state_layers((1, 3))
    output = run(model)
    states = output["aux_hidden_states"]
    assert list(output)[-1] == "aux_hidden_states"
    as_tuple = run(model, return_dict=False)
    assert len(as_tuple) == len(plain) + 1
    for found in (as_tuple[-1], output.to_tuple()[-1]):
        assert all(torch.equal(a, b) for a, b in zip(found, states, strict=True))


def test_states_are_chosen_anew_and_none() -> None:
    model = load()
    before = run(model)
    model.set_aux_hidden_state_layers((1, 2))
    model.set_aux_hidden_state_layers((3, 3))
    assert len(run(model).aux_hidden_states) == 1
    model.set_aux_hidden_state_layers(())
    after = run(model)
    assert list(after) == list(before)
    assert not hasattr(after, "aux_hidden_states")
    assert not any(m._forward_pre_hooks for m in (model, *model.model.layers))
    assert "generate" not in vars(model)


def test_generation_hands_out_the_states_of_each_step() -> None:
    model = load()
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    tokens = model.generate(IDS, **options)
    model.set_aux_hidden_state_layers((1, LAYERS))
    assert torch.equal(model.generate(IDS, **options), tokens)
    output = model.generate(IDS, **options, return_dict_in_generate=True)
    assert torch.equal(output.sequences, tokens)
    shapes = [[tuple(state.shape) for state in step] for step in output.aux_hidden_states]
    assert shapes == [[(2, 8, 64)] * 2, [(2, 1, 64)] * 2, [(2, 1, 64)] * 2]
    with torch.no_grad():
        whole = model(tokens[:, :-1]).aux_hidden_states
    for slot in (0, 1):
        parts = torch.cat([step[slot] for step in output.aux_hidden_states], dim=1)
        assert torch.allclose(parts, whole[slot], atol=1e-5)
    assert not model.__dict__["generate"].recorder.steps


def test_a_pipeline_of_transformers_runs() -> None:
    words = {f"w{number}": number for number in range(128)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, "w0")))
    tokenizer.backend_tokenizer.pre_tokenizer = Whitespace()
    options = {"max_new_tokens": 2, "do_sample": False, "return_full_text": False}
    model = load()
    expected = pipeline("text-generation", model, tokenizer=tokenizer)("w5 w9", **options)
    model.set_aux_hidden_state_layers((1,))
    found = pipeline("text-generation", model, tokenizer=tokenizer)("w5 w9", **options)
    assert found == expected
    assert len(found[0]["generated_text"].split()) == 2


def test_compiled_models_return_them() -> None:
    fake = quantized_model("llama", {}, num_hidden_layers=1)
    model = load_model(fake.source, device=CPU)
    model.set_aux_hidden_state_layers((0, 1))
    expected = run(model, use_cache=False)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = run(compiled, use_cache=False)
    for one, two in zip(found.aux_hidden_states, expected.aux_hidden_states, strict=True):
        assert torch.allclose(one, two, atol=1e-6)


def pickled(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("clone", [copy.deepcopy, pickled])
def test_copies_have_states_of_their_own(clone: Any) -> None:
    model = load()
    model.set_aux_hidden_state_layers((1, 2))
    expected = run(model).aux_hidden_states
    twin = clone(model)
    model.set_aux_hidden_state_layers(())
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.zero_()
    assert all(map(torch.equal, run(twin).aux_hidden_states, expected))
    output = twin.generate(IDS, max_new_tokens=1, return_dict_in_generate=True)
    assert all(map(torch.equal, output.aux_hidden_states[0], expected))
    twin.set_aux_hidden_state_layers((2,))
    assert torch.equal(run(twin).aux_hidden_states[0], expected[1])


def test_stages_return_the_states_of_all() -> None:
    whole = load()
    whole.set_aux_hidden_state_layers(range(LAYERS + 1))
    expected = run(whole).aux_hidden_states

    ranks = grid(1, 2)
    models = [load(parallel=rank) for rank in ranks]
    for model in models:
        model.set_aux_hidden_state_layers(range(LAYERS + 1))
    for states in together(ranks, lambda rank: run(models[rank.rank]).aux_hidden_states):
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(states, expected, strict=True))


@pytest.mark.parametrize("number", [-1, LAYERS + 1, 1.0, True])
def test_numbers_out_of_range_are_refused_and_change_nothing(number: Any) -> None:
    model = load()
    model.set_aux_hidden_state_layers((2,))
    with pytest.raises(ConfigError, match=f"of layer `{number}`, expected numbers from 0 to 4"):
        model.set_aux_hidden_state_layers((1, number))
    assert len(run(model).aux_hidden_states) == 1


def test_a_forward_that_does_not_come_to_a_layer_is_an_error() -> None:
    model = load()
    model.set_aux_hidden_state_layers((3,))
    model.model.layers = model.model.layers[:2]
    model.model.config.num_hidden_layers = 2
    with pytest.raises(ModelError, match="did not come to layer 3") as caught:
        run(model)
    assert "set_aux_hidden_state_layers(())" in caught.value.hint


def test_a_forward_that_fails_leaves_nothing() -> None:
    model = load()
    model.set_aux_hidden_state_layers((1,))
    recorder = model.__dict__["generate"].recorder
    with pytest.raises(ValueError, match="exactly one"):
        run(model, inputs_embeds=torch.zeros(2, 8, 64))
    assert recorder.running == {}
    assert len(run(model).aux_hidden_states) == 1


def test_layers_that_cannot_be_told_are_an_error() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = AutoConfig.for_model("albert", **sizes, embedding_size=16, num_hidden_layers=3)
    model = AutoModel.from_config(config)
    with pytest.raises(ModelError, match="found 0 lists of 3 modules, expected one"):
        decoder_layers(model)
