"""Building a model takes no memory for its parameters, and computes its buffers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_source import NOWHERE, tiny_config, tiny_model
from transformers import GenerationConfig, LlamaForCausalLM

from quantload.errors import ModelError
from quantload.layers.meta_model import build_on_meta, tied_names


def test_parameters_are_on_meta_and_buffers_computed() -> None:
    model = build_on_meta(tiny_config("llama"), NOWHERE, dtype=torch.bfloat16)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    expected = dict(tiny_model("llama").named_buffers())
    found = dict(model.named_buffers())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_terabyte_model_is_built() -> None:
    config = tiny_config("llama") | {"hidden_size": 1 << 16, "intermediate_size": 1 << 20}
    config |= {"num_attention_heads": 512, "head_dim": 128, "vocab_size": 1 << 18}
    model = build_on_meta(config, NOWHERE, dtype=torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) > 1 << 38


def test_patches_are_undone() -> None:
    before = torch.nn.Module.register_parameter
    build_on_meta(tiny_config("llama"), NOWHERE, dtype=torch.float32)
    assert torch.nn.Module.register_parameter is before
    assert torch.nn.Linear(2, 2).weight.device.type == "cpu"


def test_ties_are_one_parameter() -> None:
    model = build_on_meta(tiny_config("gemma2"), NOWHERE, dtype=torch.float32)
    assert tied_names(model) == {"lm_head.weight": "model.embed_tokens.weight"}
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_unknown_architecture() -> None:
    config = {"model_type": "hal9000", "architectures": ["HalForCausalLM"]}
    with pytest.raises(ModelError, match="does not know model_type `hal9000`") as caught:
        build_on_meta(config, NOWHERE, dtype=torch.float32)
    assert "trust_remote_code" in str(caught.value)


def test_architecture_of_another_library_falls_back_to_the_config_class() -> None:
    config = tiny_config("llama") | {"architectures": ["LlamaForSomethingElse"]}
    model = build_on_meta(config, NOWHERE, dtype=torch.float32)
    assert type(model).__name__ == "LlamaForCausalLM"


def test_architectures_that_are_no_list() -> None:
    config = tiny_config("llama") | {"architectures": 5}
    with pytest.raises(ModelError, match="does not know architectures `5`"):
        build_on_meta(config, NOWHERE, dtype=torch.float32)


def test_an_error_of_torch_comes_without_its_stack() -> None:
    config = tiny_config("llama") | {"vocab_size": 10**30}
    with pytest.raises(ModelError, match="cannot build") as caught:
        build_on_meta(config, NOWHERE, dtype=torch.float32)
    assert "frame #" not in str(caught.value)


def test_broken_config_is_named() -> None:
    config = tiny_config("llama") | {"hidden_size": "large"}
    with pytest.raises(ModelError, match="hidden_size"):
        build_on_meta(config, NOWHERE, dtype=torch.float32)


def test_generation_config_comes_from_the_folder(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_k": 7}))
    model = build_on_meta(tiny_config("llama"), tmp_path, dtype=torch.float32)
    assert model.generation_config.top_k == 7


def test_quantization_config_is_ignored() -> None:
    config = tiny_config("llama") | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    model = build_on_meta(config, NOWHERE, dtype=torch.float32)
    assert not hasattr(model.config, "quantization_config")


def test_infinite_numbers_in_a_config() -> None:
    config = tiny_config("llama") | {"rms_norm_eps": {"__float__": "Infinity"}}
    model = build_on_meta(config, NOWHERE, dtype=torch.float32)
    assert model.config.rms_norm_eps == float("inf")


def test_the_model_type_decides_against_another_architecture(caplog: Any) -> None:
    """As transformers' Auto classes do: a Mistral of a config of Llama could not run."""
    config = tiny_config("llama") | {"architectures": ["MistralForCausalLM"]}
    model = build_on_meta(config, NOWHERE, dtype=torch.float32)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert "`MistralForCausalLM` of architectures does not go with model_type" in caplog.text


def test_a_model_type_that_is_no_text() -> None:
    with pytest.raises(ModelError, match="does not know model_type"):
        build_on_meta(tiny_config("llama") | {"model_type": []}, NOWHERE, dtype=torch.float32)


def test_generation_config_is_of_the_class_of_the_model(tmp_path: Path, monkeypatch: Any) -> None:
    class Own(GenerationConfig):
        pass

    monkeypatch.setattr(LlamaForCausalLM, "generation_config_class", Own, raising=False)
    (tmp_path / "generation_config.json").write_text(json.dumps({"max_new_tokens": 7}))
    config = tiny_config("llama") | {"architectures": ["LlamaForCausalLM"]}
    model = build_on_meta(config, tmp_path, dtype=torch.float32)
    assert isinstance(model.generation_config, Own)
    assert model.generation_config.max_new_tokens == 7
