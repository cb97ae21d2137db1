"""Where bytes go: every stored tensor once, held against what the files hold."""

import json

import pytest
import tiny_checkpoints as tiny
import torch
from converting import converted, opened, plan_of
from safetensors.torch import load_file

from quantload.loader.layer_selection import select_layers
from quantload.loader.plan import make_plan
from quantload.loader.tally import USES, scheme_rows, tally, without_numbers
from quantload.mappers.facts import facts_from_names
from quantload.quant.rules import QuantConfig

WEIGHTS = "model.safetensors"


def stored(folder):
    """Bytes of the data of a safetensors file, from its size and header length."""
    content = (folder / WEIGHTS).read_bytes()
    return len(content) - 8 - int.from_bytes(content[:8], "little")


def sizes(found, use):
    return {reason: size for (kind, reason), (size, _) in found.reasons.items() if kind == use}


@pytest.mark.parametrize("scheme", ["W4A16", "FP8_DYNAMIC", "dense", None])
def test_it_adds_up(tmp_path, scheme):
    folder = tiny.llama(tmp_path)
    found = tally(plan_of(folder, scheme))
    assert sum(found.of(use) for use in USES) == found.total == stored(folder)
    assert sum(count for _, count in found.reasons.values()) == len(load_file(folder / WEIGHTS))


def test_quantized_and_copied(tmp_path):
    found = tally(plan_of(tiny.llama(tmp_path), "W4A16:g32", ["model.layers.1.=keep"]))
    layer = (64 * 64 * 2 + 32 * 64 * 2 + 3 * 64 * 128) * 2
    assert sizes(found, "quantized") == {"to W4A16:g32": layer}
    assert sizes(found, "copied") == {
        "kept by default: embedding": 96 * 64 * 2,
        "kept by default: output head": 96 * 64 * 2,
        "rule `model.layers.1. = keep`": layer,
        "norms, biases and other small tensors": 5 * 64 * 2,
    }
    assert found.of("decoded") == found.of("dropped") == 0


def test_a_quantized_source(tmp_path):
    source = converted(tiny.llama(tmp_path / "a"), tmp_path / "b", "W8A8")
    kept = tally(plan_of(source, "W8A8"))
    weights = sum(
        t.nbytes for name, t in load_file(source / WEIGHTS).items() if "proj.weight" in name
    )
    assert sizes(kept, "copied")["same values, as W8A8"] == weights
    assert kept.of("quantized") == kept.of("decoded") == 0
    decoded = tally(plan_of(source, "dense"))
    assert decoded.of("decoded") == weights
    assert tally(plan_of(source, "W4A16:g32")).of("quantized") == weights
    assert kept.total == decoded.total == stored(source)


def test_a_tied_head_counts_once(tmp_path):
    folder = tiny.llama(tmp_path, tied=True)
    found = tally(plan_of(folder, "W8A8", ["lm_head=W8A8"]))
    assert found.total == stored(folder)
    embedding = 96 * 64 * 2
    layers = 2 * (64 * 64 * 2 + 32 * 64 * 2 + 3 * 64 * 128) * 2
    assert found.of("quantized") == layers + embedding
    assert found.of("copied") == 5 * 64 * 2


def test_fixed_input_scales_are_dropped(tmp_path):
    folder = tiny.llama(tmp_path, layers=1)
    made = load_file(folder / WEIGHTS)
    name = "model.layers.0.self_attn.q_proj"
    weight = made.pop(f"{name}.weight").float()
    made[f"{name}.weight"] = weight.to(torch.float8_e4m3fn)
    made[f"{name}.weight_scale"] = torch.tensor(1.0)
    made[f"{name}.input_scale"] = torch.tensor(1.0)
    tiny.save_file(made, folder / WEIGHTS)
    config = json.loads((folder / "config.json").read_text())
    others = ["re:(?!.*q_proj).*"]
    quantization = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": others}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    if not opened(folder).weights[name].is_quantized:
        pytest.fail("the checkpoint was meant to be quantized")
    found = tally(plan_of(folder, "W8A8"))
    assert sizes(found, "dropped") == {"fixed input scale of the source's own scheme": 4}
    assert found.total == stored(folder)


def test_layers_that_are_left_out(tmp_path):
    folder = tiny.llama(tmp_path)
    source = select_layers(opened(folder), "1")
    facts = facts_from_names(source.weights, tied_head=False)
    found = tally(make_plan(source, QuantConfig.from_options("W8A8"), facts))
    norms, layer = 2 * 64 * 2, (64 * 64 * 2 + 32 * 64 * 2 + 3 * 64 * 128) * 2
    assert sizes(found, "dropped") == {"--layers 1": norms + layer}
    assert found.total == stored(folder)


def test_rows_of_schemes(tmp_path):
    plan = plan_of(tiny.llama(tmp_path), "W4A16:g32", ["lm_head=W8A8"])
    rows = {name: cells for name, *cells in scheme_rows(plan)}
    assert rows["W8A8"] == [1, 96 * 64, 96 * 64 + 96 * 2]
    assert rows["bfloat16"] == [1, 96 * 64 + 5 * 64, (96 * 64 + 5 * 64) * 2]
    total = sum(t.num_bytes for file in plan.files for t in file.tensors.values())
    assert sum(size for _, _, size in rows.values()) == total
    assert list(rows) == sorted(rows, key=lambda name: -rows[name][1])


def test_one_reason_for_all_layers():
    assert without_numbers("kept: `a.layers.10.experts.3.up` holds 4") == (
        "kept: `a.layers.*.experts.*.up` holds 4"
    )
    assert without_numbers("group 64, since 128 does not divide 576") == (
        "group 64, since 128 does not divide 576"
    )
