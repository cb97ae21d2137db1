"""Where bytes go: every stored byte once, held against what the files hold."""

import json
from dataclasses import replace

import fp8_files
import pytest
import tiny_checkpoints as tiny
import torch
from converting import converted, opened, plan_of
from safetensors import safe_open
from safetensors.torch import load_file
from truth import CHECKPOINTS

from quantload.errors import QuantloadError
from quantload.loader.layer_selection import select_layers
from quantload.loader.plan import make_plan
from quantload.loader.tally import INPUT_SCALES, USES, scheme_rows, tally, without_numbers
from quantload.mappers.facts import facts_from_names
from quantload.quant.rules import QuantConfig

WEIGHTS = "model.safetensors"
TOOLS = sorted(folder.name for folder in CHECKPOINTS.glob("*/")) if CHECKPOINTS.is_dir() else []
UNREAD = ("aqlm", "sinq")  # tools whose formats are not read


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


def _sources(tool):
    for folder in sorted((CHECKPOINTS / tool).glob("*/")):
        path = next(iter(sorted(folder.glob("*.gguf"))), folder)
        try:
            yield path, opened(path)
        except QuantloadError:
            continue  # a format that is not read


def _bytes_by_safetensors(source):
    """Bytes of the tensors in the files, counted by the safetensors library."""
    total = 0
    for file in {entry.file for entry in source.checkpoint.tensors.values()}:
        with safe_open(file, framework="pt") as content:
            total += sum(content.get_tensor(name).nbytes for name in content.offset_keys())
    return total


@pytest.mark.parametrize("tool", TOOLS)
def test_real_checkpoints_add_up(tool):
    seen = 0
    for path, source in _sources(tool):
        total = sum(entry.num_bytes for entry in source.checkpoint.tensors.values())
        if path.name in ("micro-qwen3-moe-FP8", "nano-llama-FP8_BLOCK", "tiny-llama"):
            assert _bytes_by_safetensors(source) == total
        for scheme in ("W4A16:g32", "dense"):
            found = tally(plan_of(path, scheme))
            assert sum(found.of(use) for use in USES) == found.total == total, (path, found)
            assert found.of("quantized") == 0 or scheme != "dense"
            seen += 1
    assert seen or tool.startswith(UNREAD)


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
    assert sizes(found, "dropped") == {INPUT_SCALES: 4}
    assert found.total == stored(folder)


def test_fixed_input_scales_beside_codes_that_are_kept(tmp_path):
    folder = converted(tiny.llama(tmp_path / "source"), tmp_path / "fp8", "FP8_DYNAMIC")
    made = load_file(folder / WEIGHTS)
    made["model.layers.0.self_attn.q_proj.input_scale"] = torch.ones(1)
    tiny.save_file(made, folder / WEIGHTS)
    for scheme in ("same", "W4A16:g32"):  # the scheme of the source has inputs without a number
        assert sizes(tally(plan_of(folder, scheme)), "dropped") == {INPUT_SCALES: 4}


def test_a_tensor_of_many_experts_is_shared_out(tmp_path):
    block, made = "model.layers.0.mlp.experts", {}
    for name, shape in {"gate_up_proj": (3, 64, 96), "down_proj": (3, 96, 32)}.items():
        made[f"{block}.{name}"] = fp8_files.codes(shape)
        made[f"{block}.{name}_scale_inv"] = fp8_files.scales((3, 1, 1), torch.float32)
    sizes_of = {"model_type": "qwen3_moe", "hidden_size": 96, "moe_intermediate_size": 32}
    folder = fp8_files.write(tmp_path, made, fp8_files.FP8, **sizes_of)
    plan = plan_of(folder, "W4A16:g32")
    rows = [
        replace(row, scheme=None) if row.module == f"{block}.0.down_proj" else row
        for row in plan.rows
    ]
    found = tally(replace(plan, rows=tuple(rows)))
    share = 96 * 32 + 4  # codes and scale of one expert
    assert sizes(found, "quantized") == {"to W4A16:g32": stored(folder) - share}
    assert found.of("decoded") == share
    assert sum(count for _, count in found.reasons.values()) == len(made)


def test_a_tensor_that_a_plan_forgets_is_an_error(tmp_path):
    plan = plan_of(tiny.llama(tmp_path), "W8A8")
    with pytest.raises(AssertionError, match="the plan says nothing of"):
        tally(replace(plan, rows=plan.rows[1:]))


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
