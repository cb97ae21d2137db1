"""Public bug reports about names: ignore lists, targets, rules."""

import json

import constant_weights as constant
import pytest
import tiny_checkpoints as tiny
import torch
from click.testing import CliRunner
from constant_weights import ct_config, int4, plain
from converting import converted, plan_of
from fp8_files import opened, write
from int_packing import gptq_tensors, random_parts, values_of

from quantload.cli import main
from quantload.errors import UnusedRule
from quantload.loader.formats.bitsandbytes_config import parse_config as parse_bitsandbytes
from quantload.loader.formats.compressed_tensors_config import parse_config
from quantload.loader.formats.exclusions import Exclusions
from quantload.loader.formats.modelopt_config import parse_config as parse_modelopt

INT4 = constant.INT4_ARGUMENTS


def test_br002_re_prefix_substring(tmp_path):
    ignore = ["re:.*self_attn.*", "re:vision_tower.*"]
    ignore += [r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", "re:.*lm_head.*"]
    left_out = ["model.layers.0.self_attn.q_proj", "vision_tower.encoder.blocks.0.mlp.fc0"]
    left_out += ["model.layers.0.mlp.gate_up_proj", "lm_head"]
    quantized = ["model.vision_tower.x", "model.layers.0.mlp.gate"]
    quantized += ["model.layers.0.mlp.experts.3.down_proj"]
    config = parse_config(ct_config(INT4, ignore=ignore))
    assert all(config.ignored_by(name, ("Linear",)) for name in left_out)
    assert not any(config.ignored_by(name, ("Linear",)) for name in quantized)
    tensors = {name: t for module in left_out for name, t in plain(module).items()}
    for module in quantized:
        tensors |= int4(module, 64, 64)
    source = opened(write(tmp_path, tensors, ct_config(INT4, ignore=ignore)))
    assert {m for m, w in source.weights.items() if w.is_quantized} == set(quantized)
    assert not source.warnings


def test_br004_kv_proj_in_qkv_proj():
    config = {"load_in_4bit": True, "llm_int8_skip_modules": ["kv_proj", "vision_model"]}
    config = parse_bitsandbytes(config, "x")
    for name in ("resampler.kv_proj", "vision_model.encoder.layers.0.fc1"):
        assert config.skipped_by(name), name
    attention = "model.layers.0.self_attn"
    for name in (f"{attention}.qkv_proj", f"{attention}.k_proj", "my_vision_model.fc1"):
        assert not config.skipped_by(name), name


LAYERS = [f"model.language_model.layers.{n}.mlp.up_proj" for n in range(28)]
BR005 = pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("re:model.language_model.layers.1.*", {1, *range(10, 20)}),
        (r"re:model\.language_model\.layers\.1\..*", {1}),
    ],
    ids=["unescaped", "escaped"],
)


@BR005
def test_br005_unescaped_dot_in_a_rule(tmp_path, entry, expected):
    content = tiny.config(layers=28)
    tensors = {name: t for module in LAYERS for name, t in plain(module, 8, 32).items()}
    folder = tiny.write(tmp_path / "in", content, tensors)
    rows = plan_of(folder, "W4A16:g32", [f"{entry}=keep"]).rows
    kept = {int(row.module.split(".")[3]) for row in rows if row.scheme is None}
    assert kept == expected
    arguments = [str(folder), "x", "--scheme", "W4A16:g32", "--rule", f"{entry}=keep", "--plan"]
    shown = CliRunner().invoke(main, ["convert", *arguments]).stdout.splitlines()
    line = next(line.split() for line in shown if f"`{entry} = keep`" in line)
    assert line[1] == str(len(expected))


@BR005
def test_br005_unescaped_dot_in_a_config(tmp_path, entry, expected):
    tensors = {}
    for number, module in enumerate(LAYERS):
        tensors |= plain(module, 8, 32) if number in expected else int4(module, 8, 32)
    folder = write(tmp_path, tensors, ct_config(INT4, ignore=[entry]))
    source = opened(folder)
    dense = {int(m.split(".")[3]) for m, w in source.weights.items() if not w.is_quantized}
    assert dense == expected
    said = json.loads(CliRunner().invoke(main, ["inspect", str(folder), "--json"]).stdout)
    assert said["config_entries"] == {
        f"ignore: {entry}": len(expected),
        "group_0: Linear": 28 - len(expected),
    }
    shown = CliRunner().invoke(main, ["inspect", str(folder)]).stdout
    assert f"ignore: {entry}" in shown


HEAD = "language_model.lm_head"
BODY = "language_model.model.layers.0.mlp.up_proj"


def test_br006_lm_head_literal_nested_in_a_rule(tmp_path):
    content = tiny.config(layers=1)
    folder = tiny.write(tmp_path, content, {**plain(HEAD, seed=1), **plain(BODY, seed=2)})
    with pytest.raises(UnusedRule, match=r"1 rule matches nothing: `lm_head`"):
        plan_of(folder, "W4A16:g32", ["lm_head=keep"])
    plan = plan_of(folder, "W4A16:g32", ["re:.*lm_head=keep"])
    assert {row.module: row.scheme is None for row in plan.rows} == {HEAD: True, BODY: False}


def test_br006_lm_head_literal_nested_in_a_config(tmp_path):
    both = {**int4(HEAD, 64, 64), **int4(BODY, 64, 64)}
    source = opened(write(tmp_path / "a", both, ct_config(INT4, ignore=["lm_head"])))
    assert all(weight.is_quantized for weight in source.weights.values())
    assert [w for w in source.warnings if "`ignore: lm_head`" in w and "no module" in w]
    one = {**plain(HEAD), **int4(BODY, 64, 64)}
    source = opened(write(tmp_path / "b", one, ct_config(INT4, ignore=["re:.*lm_head"])))
    assert not source.warnings
    assert not source.weights[HEAD].is_quantized


def test_br008_wildcard_remap():
    vision = "vision_tower.vision_model.encoder.layers.0.mlp.fc1"
    gate = "model.layers.0.mlp.gate"
    globs = ["vision_tower*", "*.mlp.gate", "lm_head"]
    config = parse_modelopt({"quant_algo": "FP8", "exclude_modules": globs})
    for name in (vision, gate, "lm_head"):
        assert not config.of_module(name)[0].is_quantized, name
    for name in (f"{gate}_proj", "model.vision_tower.fc"):
        assert config.of_module(name)[0].is_quantized, name
    for entries in (["re:vision_tower.*"], globs):
        assert parse_config(ct_config(INT4, ignore=entries[:1])).ignored_by(
            vision, ("Linear",)
        ) or (entries is globs)
        assert Exclusions(dict.fromkeys(entries, "ignored_layers")).entry_for(vision)


def test_br008_wildcard_remap_of_files(tmp_path):
    """A list is compared with the names in the files, whatever the model calls its modules."""
    vision, block = "vision_tower.vision_model.encoder.layers.0.mlp.fc1", "model.layers.0.mlp.fc1"
    scale = torch.tensor(0.5)
    tensors = {**plain(vision), **constant.fp8(block, 64, 64, scale=scale)}
    config = {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
    config["ignore"] = ["vision_tower*"]
    tensors[f"{block}.weight_scale"] = torch.full((64,), 0.5)
    source = opened(write(tmp_path, tensors, config))
    assert torch.equal(source.read_dense(vision), tensors[f"{vision}.weight"])
    assert bool((source.read_dense(block) == 0.5).all())
    assert not source.warnings


def test_br009_bare_name_rename(tmp_path):
    """Entries meet the names in the files; no rename stands between the two."""
    skipped = ["W_down", "model.vision.layers.0.mlp.fc1", "lm_head"]
    bare, vision = "model.layers.0.input_layernorm.W_down", "model.vision.layers.0.mlp.fc1"
    entries = Exclusions(dict.fromkeys(skipped, "modules_to_not_convert"))
    assert entries.entry_for(bare) == "modules_to_not_convert: W_down"
    assert entries.entry_for(vision)
    assert not entries.entry_for("model.layers.0.mlp.down_proj")
    tensors = {**plain(bare, seed=1), **plain(vision, seed=2)}
    tensors |= constant.fp8("model.layers.0.mlp.down_proj", 64, 64, scale=torch.tensor(0.5))
    config = {"quant_method": "fp8", "modules_to_not_convert": skipped[:2]}
    source = opened(write(tmp_path, tensors, config))
    assert not source.warnings
    for module in (bare, vision):
        assert torch.equal(source.read_dense(module), tensors[f"{module}.weight"])


def _vision_language(folder):
    """A checkpoint with a tower beside a language model; returns the folder and its tensors."""
    tensors = {}
    for number in range(2):
        layer = f"model.language_model.layers.{number}"
        for part in ("self_attn.o_proj", "mlp.up_proj", "mlp.gate_proj"):
            tensors |= plain(f"{layer}.{part}", seed=len(tensors))
    for part in ("attn.qkv", "mlp.fc1"):
        tensors |= plain(f"model.visual.blocks.0.{part}", seed=len(tensors))
    return tiny.write(folder, tiny.config(layers=2), tensors), tensors


def test_br012_producer_writes_wrong_prefix(tmp_path):
    folder, tensors = _vision_language(tmp_path / "in")
    output = opened(converted(folder, tmp_path / "out", "W4A16:g32", [r"re:.*visual.*=keep"]))
    ignored = output.checkpoint.quantization_config["ignore"]
    assert set(ignored) == {name.removesuffix(".weight") for name in tensors if "visual" in name}
    assert set(ignored) <= set(output.weights)
    assert "model.layers.language_model" not in json.dumps(dict(output.checkpoint.config))


def test_br074_skip_list_not_written(tmp_path):
    """Read back with what was written alone: each layer is quantized, or the list names it."""
    folder, tensors = _vision_language(tmp_path / "in")
    output = opened(converted(folder, tmp_path / "out", "W4A16:g32", [r"re:.*visual.*=keep"]))
    ignored = set(output.checkpoint.quantization_config["ignore"])
    assert {f"{module}.weight" for module in output.weights} == set(tensors)
    assert not output.warnings
    assert {m for m, w in output.weights.items() if not w.is_quantized} == ignored
    for module in ignored:
        assert torch.equal(output.read_dense(module), tensors[f"{module}.weight"])


def test_br061_nested_names(tmp_path):
    folder, tensors = _vision_language(tmp_path / "in")
    converted(folder, tmp_path / "int4", "W4A16:g32")
    again = opened(converted(tmp_path / "int4", tmp_path / "bf16", "dense"))
    assert set(opened(tmp_path / "int4").weights) == set(opened(folder).weights)
    assert set(again.checkpoint.tensors) == set(tensors)


def test_br013_dynamic_negative_rule(tmp_path):
    dynamic = {
        r"-:.*\.(?:[1-9]|1[0-9]|2[0-1])\..*": {},
        r"+:.*\.0\.mlp\..*": {"bits": 8, "group_size": 64},
    }
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}
    config |= {"desc_act": False, "dynamic": dynamic}
    tensors, expected = {}, {}
    for number in range(22):
        for part in ("mlp.up_proj", "self_attn.q_proj"):
            module = f"model.layers.{number}.{part}"
            if number:
                tensors |= plain(module, 32, 64, seed=len(tensors))
                continue
            bits, group = (8, 64) if part.startswith("mlp") else (4, 32)
            fields, zeros, scales = random_parts(32, 64, 64 // group, bits)
            zeros = zeros.clip(1)
            leaves = gptq_tensors(fields, zeros, scales, bits=bits)
            groups = torch.arange(64) // group
            expected[module] = values_of(fields, zeros, scales, groups, torch.float16)
            tensors |= {f"{module}.{leaf}": tensor for leaf, tensor in leaves.items()}
    source = opened(write(tmp_path, tensors, config, dtype=torch.float16))
    assert {m for m, w in source.weights.items() if w.is_quantized} == set(expected)
    for module, values in expected.items():
        assert torch.equal(source.read_dense(module), values)
    for name in [name for name in tensors if name.endswith(".weight")]:
        assert torch.equal(source.read_dense(name.removesuffix(".weight")), tensors[name])
