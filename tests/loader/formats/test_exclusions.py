"""Lists of modules in full precision: names, ends, starts, patterns, fused names."""

import time

import pytest

from quantload.errors import FormatMismatch
from quantload.loader.formats.exclusions import Exclusions
from quantload.loader.formats.matching import matches_transformers


def excludes(entry, module):
    return bool(Exclusions({entry: "ignored_layers"}).entry_for(module))


@pytest.mark.parametrize(
    ("entry", "module"),
    [
        ("lm_head", "lm_head"),
        ("linear_attn.in_proj_qkv", "model.layers.0.linear_attn.in_proj_qkv"),
        ("gate", "model.layers.3.mlp.gate"),
        ("visual", "visual.blocks.0.attn.qkv"),
        ("model.layers.3.mlp.experts", "model.layers.3.mlp.experts.7.up_proj"),
        ("model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.k_proj"),
        ("model.layers.0.mlp.gate_up_proj", "model.layers.0.mlp.up_proj"),
        ("model.layers.0.block.w13", "model.layers.0.block.w3"),
        ("model.layers.*.self_attn", "model.layers.11.self_attn.q_proj"),
        (r"model\.layers\.\d+\.mlp\.gate", "model.layers.3.mlp.gate"),
        ("re:.*down_proj", "model.layers.0.mlp.down_proj"),
        ("*.mlp.gate", "model.layers.3.mlp.gate"),
        ("model.layers.0.mlp.gate", "model.language_model.layers.0.mlp.gate"),
        ("model.language_model.layers.0.mlp.gate", "model.layers.0.mlp.gate"),
        ("gate", "model.layers.0.mlp.my_gate"),  # as transformers has it
    ],
)
def test_entries_that_match(entry, module):
    assert Exclusions({entry: "key"}).entry_for(module) == f"key: {entry}"


@pytest.mark.parametrize(
    ("entry", "module"),
    [
        ("model.layers.3.mlp.gate", "model.layers.3.mlp.gate_proj"),
        ("model.layers.1", "model.layers.10.mlp.up_proj"),
        ("model.layers.0.self_attn.qkv_proj", "model.layers.1.self_attn.k_proj"),
        ("model.layers.0.mlp.gate_up_proj", "model.layers.0.mlp.down_proj"),
        ("mlp.gate", "model.layers.3.mlp.gate_proj"),
        ("lm_head", "model.lm_head_norm"),
        ("re:mlp", "model.layers.0.mlp"),
        ("", "model.layers.0.mlp"),
        (".", "model.layers.0.mlp"),
    ],
)
def test_entries_that_do_not_match(entry, module):
    assert not excludes(entry, module)


@pytest.mark.parametrize("entry", ["gate", "a.b", "a", "a.*", "b.c", r"a\.b", "x", "a.b.c", "c"])
@pytest.mark.parametrize("module", ["a.b.c", "a.bc", "a", "gate", "my_gate", "gate_proj", "b.c"])
def test_what_transformers_leaves_out_is_left_out(entry, module):
    assert not matches_transformers(entry, module) or excludes(entry, module)


def test_no_regular_expression():
    with pytest.raises(FormatMismatch, match=r"re:\(.*modules_to_not_convert"):
        Exclusions({"re:(": "modules_to_not_convert"})


def test_long_lists_are_looked_up():
    names = {
        f"model.layers.{i}.mlp.experts.{j}.w{k}": "k"
        for i in range(40)
        for j in range(50)
        for k in (1, 2)
    }
    found = Exclusions(names)
    before = time.process_time()
    for number in range(20_000):
        found.entry_for(f"model.layers.{number % 60}.mlp.experts.{number}.down_proj")
    assert time.process_time() - before < 3
