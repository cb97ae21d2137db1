"""Facts are told in checkpoint names; what cannot be probed is no error."""

from __future__ import annotations

import pytest
import tiny_checkpoints as tiny
import torch
from fake_source import NOWHERE, tiny_config, tiny_model

from quantload import api
from quantload.errors import FormatMismatch
from quantload.layers.facts import probe_facts
from quantload.layers.meta_model import build_on_meta
from quantload.loader.formats.compressed_tensors_target import CompressedTensorsTarget


def names_of(model_type: str) -> list[str]:
    model = tiny_model(model_type)
    tied = set(model.all_tied_weights_keys)
    return [name for name in model.state_dict() if name not in tied]


def test_llama() -> None:
    facts = probe_facts(tiny_config("llama"), NOWHERE, names_of("llama"))
    assert facts.origin == "model probe"
    assert facts.kinds["lm_head"] == "head"
    assert facts.kinds["model.embed_tokens"] == "embedding"
    assert facts.kinds["model.norm"] == "other"
    assert facts.kinds["model.layers.1.mlp.down_proj"] == "linear"
    assert len(facts.groups) == 4
    assert facts.tied == {}
    assert facts.aliases == {}


def test_names_without_base_prefix_are_aliased() -> None:
    names = [name.removeprefix("model.") for name in names_of("llama")]
    facts = probe_facts(tiny_config("llama"), NOWHERE, names)
    assert facts.groups[0] == tuple(f"layers.0.self_attn.{n}_proj" for n in "qkv")
    assert facts.aliases["embed_tokens"] == ("model.embed_tokens",)


def test_ties() -> None:
    names = names_of("gemma2")
    config = tiny_config("gemma2")
    assert probe_facts(config, NOWHERE, names).tied == {"lm_head": "model.embed_tokens"}
    both = [*names, "lm_head.weight"]
    assert probe_facts(config, NOWHERE, both).tied == {}


def test_transposed_linears_are_other() -> None:
    facts = probe_facts(tiny_config("gpt2"), NOWHERE, names_of("gpt2"))
    assert facts.kinds["transformer.h.0.attn.c_attn"] == "other"


def test_unknown_architecture_is_told_by_names() -> None:
    facts = probe_facts({"model_type": "hal9000"}, NOWHERE, names_of("llama"))
    assert facts.origin.startswith("name table (transformers")
    assert len(facts.groups) == 4


def test_experts_and_unknown_modules_are_told_by_names() -> None:
    extra = [f"mtp.experts.0.{name}_proj.weight" for name in ("gate", "up", "down")]
    facts = probe_facts(tiny_config("llama"), NOWHERE, [*names_of("llama"), *extra])
    assert ("mtp.experts.0.gate_proj", "mtp.experts.0.up_proj") in facts.groups
    assert facts.kinds["mtp.experts.0.down_proj"] == "linear"


def test_a_config_with_more_layers_than_the_files_is_not_built() -> None:
    config = tiny_config("llama") | {"num_hidden_layers": 10**9}  # building it would take forever
    facts = probe_facts(config, NOWHERE, names_of("llama"))
    expected = "the config counts 1000000000 layers, the files hold 2"
    assert facts.origin == f"name table ({expected})"
    assert len(facts.groups) == 4


def test_a_text_config_that_is_no_object() -> None:
    config = tiny_config("llama") | {"text_config": "x", "model_type": "unknown"}
    facts = probe_facts(config, NOWHERE, names_of("llama"))
    assert facts.origin.startswith("name table")


def test_small_projections_are_no_members_of_fused_groups() -> None:
    config = {
        **tiny_config("qwen3_next", layer_types=["linear_attention", "full_attention"]),
        "architectures": ["Qwen3NextForCausalLM"],
    }
    model = build_on_meta(config, NOWHERE, dtype=torch.float32)
    facts = probe_facts(config, NOWHERE, [name for name, _ in model.named_parameters()])
    assert facts.origin == "model probe"
    grouped = {name.rpartition(".")[2] for group in facts.groups for name in group}
    assert {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"} <= grouped
    assert "in_proj_ba" not in grouped


@pytest.mark.parametrize("is_open", [False, True])
def test_a_config_that_its_library_refuses_is_an_error_of_the_plan(tmp_path, monkeypatch, is_open):
    folder, seen = tiny.llama(tmp_path / "in"), []

    def check(target, config):
        seen.append(config["quant_method"])
        raise FormatMismatch("refused")

    monkeypatch.setattr(CompressedTensorsTarget, "check", check)
    with pytest.raises(FormatMismatch, match="refused"):
        api.plan(api.inspect(folder) if is_open else folder, "W4A16")
    assert seen == ["compressed-tensors"]
    assert "quantization_config" not in api.plan(folder, "dense").config
