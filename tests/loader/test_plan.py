"""Plans: what becomes of each module and why, from headers alone."""

import json
from dataclasses import replace

import pytest
import tiny_checkpoints as tiny
import torch
from converting import converted, opened, plan_of, rows_of
from safetensors.torch import load_file

from quantload.errors import ConfigError, RuleSplitsStack, UnusedRule
from quantload.loader.checkpoint import Checkpoint
from quantload.loader.plan import make_plan
from quantload.mappers.facts import facts_from_names
from quantload.quant.rules import QuantConfig
from quantload.quant.scheme import parse_scheme

Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture
def folder(tmp_path):
    return tiny.llama(tmp_path / "source")


def test_every_module_has_a_reason(folder):
    rows = rows_of(plan_of(folder, "W4A16:g32", ["model.layers.1.=W8A16:g32", f"{DOWN}=keep"]))
    assert str(rows[Q].scheme) == "W4A16:g32"
    assert rows[Q].reason == "default scheme"
    assert rows["model.layers.1.mlp.up_proj"].reason == "rule `model.layers.1. = W8A16:g32`"
    assert rows[DOWN].scheme is None
    assert rows[DOWN].reason == f"rule `{DOWN} = keep`"
    assert rows["lm_head"].reason == "kept by default: output head"
    assert rows["model.embed_tokens"].reason == "kept by default: embedding"
    assert rows["lm_head"].scheme is None
    assert len(rows) == 2 + 2 * 7


def test_a_rule_for_the_whole_name_beats_a_default_keep(folder):
    rows = rows_of(plan_of(folder, None, ["lm_head=W8A16:g32"]))
    assert str(rows["lm_head"].scheme) == "W8A16:g32"
    assert [module for module, row in rows.items() if row.scheme] == ["lm_head"]


@pytest.mark.parametrize(
    ("columns", "expected", "reason"),
    [
        (576, "W4A16:g64", "default scheme; group 64, since 128 does not divide 576"),
        (1536, "W4A16", "default scheme"),
        (96, "W4A16:g32", "default scheme; group 32, since 128 does not divide 96"),
        (48, None, "kept: no group size of 128, 64 or 32 divides its 48 columns; default scheme"),
    ],
)
def test_group_sizes_are_fitted(tmp_path, columns, expected, reason):
    made = {"a.b.weight": torch.randn(8, columns).bfloat16()}
    plan = plan_of(tiny.write(tmp_path, {}, made), "W4A16")
    (row,) = plan.rows
    assert (str(row.scheme) if row.scheme else None) == expected
    assert row.reason == reason


@pytest.mark.parametrize(
    "scheme", ["W4A16:g32", "W4A16_ASYM:g32", "W8A16:g32", "W8A8", "FP8_DYNAMIC"]
)
@pytest.mark.parametrize("shard", [10**9, 40_000, 1])
def test_planned_bytes_are_written_bytes(tmp_path, folder, scheme, shard):
    plan = plan_of(folder, scheme, max_shard_bytes=shard)
    output = converted(folder, tmp_path / "out", scheme, max_shard_bytes=shard)
    sizes = {file.name: file.stat().st_size for file in output.glob("*.safetensors")}
    assert sizes == {file.name: file.num_bytes for file in plan.files}
    assert plan.output_bytes == sum(sizes.values())
    planned = {t.name: (t.dtype, t.shape) for file in plan.files for t in file.tensors.values()}
    written = {}
    for file in output.glob("*.safetensors"):
        written |= {name: (t.dtype, tuple(t.shape)) for name, t in load_file(file).items()}
    assert planned == written
    rows = rows_of(plan)
    assert rows[Q].output_bytes == sum(
        torch.zeros(shape, dtype=dtype).nbytes
        for name, (dtype, shape) in written.items()
        if name.startswith(Q + ".")
    )
    assert rows[Q].source_bytes == 64 * 64 * 2


def test_planning_reads_no_tensor_data(folder, monkeypatch):
    quantized = converted(folder, folder.with_name("quantized"), "W4A16:g32")
    for file in (folder / "model.safetensors", quantized / "model.safetensors"):
        raw = file.read_bytes()
        first = 8 + int.from_bytes(raw[:8], "little")
        if file.parent == folder:
            file.write_bytes(raw[:first] + b"\xff" * (len(raw) - first))  # NaN in every float
    read = Checkpoint.read

    def read_shapes_only(self, name):
        assert name.endswith("weight_shape"), name
        return read(self, name)

    monkeypatch.setattr(Checkpoint, "read", read_shapes_only)
    before = sorted(folder.parent.rglob("*"))
    assert plan_of(folder, "W4A16:g32").output_bytes == plan_of(quantized, "W4A16:g32").output_bytes
    assert sorted(folder.parent.rglob("*")) == before


# -- rules that do not fit -------------------------------------------------------------------------


def test_a_rule_that_matches_nothing(folder):
    with pytest.raises(UnusedRule) as caught:
        plan_of(folder, "W4A16:g32", ["model.layer.=W8A16", "lm_haed=keep"])
    assert str(caught.value) == (
        "2 rules match nothing: `lm_haed`, `model.layer.`\n\n"
        "hint: did you mean `lm_head`, `model.layers`?"
    )


def test_a_rule_that_decides_nothing_is_a_warning(folder):
    plan = plan_of(
        folder, None, ["model.=W4A16:g32", "model.layers.=W8A16:g32", "*.mlp.=W8A16:g32"]
    )
    assert plan.warnings == ()
    plan = plan_of(folder, None, ["model.layers.=W4A16:g32", "model.layers.=W8A16:g32"])
    assert plan.warnings == (
        "rule `model.layers. = W4A16:g32` decides nothing: other rules cover more",
    )


def test_rules_that_split_a_fused_group(folder):
    with pytest.raises(RuleSplitsStack) as caught:
        plan_of(folder, "W4A16:g32", [f"{Q}=W8A16:g32"])
    message = str(caught.value)
    assert (
        "rules split the fused group `model.layers.0.self_attn` (q_proj, k_proj, v_proj)" in message
    )
    assert f"{Q}: W8A16:g32 (rule `{Q} = W8A16:g32`)" in message
    assert "model.layers.0.self_attn.k_proj: W4A16:g32 (default scheme)" in message
    assert "hint: give all members one rule, or use `--on-split keep`" in message


@pytest.mark.parametrize(("on_split", "expected"), [("keep", None), ("promote", "W8A16:g32")])
def test_split_groups_are_settled(folder, on_split, expected):
    plan = plan_of(folder, "W4A16:g32", [f"{Q}=W8A16:g32"], on_split=on_split)
    rows = rows_of(plan)
    for name in ("q_proj", "k_proj", "v_proj"):
        scheme = rows[f"model.layers.0.self_attn.{name}"].scheme
        assert (str(scheme) if scheme else None) == expected
    assert str(rows["model.layers.1.self_attn.q_proj"].scheme) == "W4A16:g32"
    (warning,) = plan.warnings
    assert warning.startswith(
        "fused group `model.layers.0.self_attn` (q_proj, k_proj, v_proj) was split"
    )


def test_unknown_schemes(folder):
    with pytest.raises(ConfigError, match="W4A17"):
        plan_of(folder, "W4A17")


# -- ties ------------------------------------------------------------------------------------------


@pytest.fixture
def tied(tmp_path):
    return tiny.llama(tmp_path / "tied", tied=True)


def test_a_tied_head_stays_tied(tied):
    plan = plan_of(tied, "W4A16:g32")
    assert "lm_head" not in rows_of(plan)
    assert plan.config["tie_word_embeddings"] is True
    assert plan.config["quantization_config"]["ignore"] == ["lm_head"]


def test_a_rule_for_a_tied_head_unties_it(tied):
    plan = plan_of(tied, "W4A16:g32", ["lm_head=W8A16:g32"])
    row = rows_of(plan)["lm_head"]
    assert row.read_from == "model.embed_tokens"
    assert row.reason == "rule `lm_head = W8A16:g32`; untied from `model.embed_tokens`"
    assert [tensor.name for tensor in row.outputs] == [
        "lm_head.weight_packed",
        "lm_head.weight_scale",
        "lm_head.weight_shape",
    ]
    assert plan.config["tie_word_embeddings"] is False
    assert rows_of(plan)["model.embed_tokens"].scheme is None


def test_a_rule_for_the_embedding_of_a_tied_head_unties_it_too(tied, tmp_path):
    plan = plan_of(tied, None, ["model.embed_tokens=W8A16:g32"])
    rows = rows_of(plan)
    assert [tensor.name for tensor in rows["lm_head"].outputs] == ["lm_head.weight"]
    assert rows["lm_head"].reason.endswith("; untied from `model.embed_tokens`")
    assert plan.config["tie_word_embeddings"] is False
    config = plan.config["quantization_config"]
    assert config["config_groups"]["group_0"]["targets"] == ["Linear", "model.embed_tokens"]
    output = converted(tied, tmp_path / "out", None, ["model.embed_tokens=W8A16:g32"])
    assert torch.equal(
        opened(output).read_dense("lm_head"), opened(tied).read_dense("model.embed_tokens")
    )


def test_a_tied_head_that_is_stored_twice(tmp_path):
    content = tiny.config(layers=1, tied=True)
    made = tiny.tensors(content)
    made["lm_head.weight"] = made["model.embed_tokens.weight"].clone()
    plan = plan_of(tiny.write(tmp_path, content, made), "W4A16:g32")
    assert rows_of(plan)["lm_head"].scheme is None
    assert plan.config["tie_word_embeddings"] is True


# -- dtypes and configs ----------------------------------------------------------------------------


def test_stored_dtypes_are_kept(tmp_path):
    content = tiny.config(layers=1)
    plan = plan_of(tiny.write(tmp_path, content, tiny.mixed(tiny.tensors(content))), "W4A16:g32")
    rows, plain = rows_of(plan), {tensor.name: tensor.dtype for tensor in plan.plain}
    assert rows[DOWN].dtype == torch.float16
    assert rows[Q].dtype == torch.bfloat16
    assert plain["model.norm.weight"] == torch.float32
    assert plan.config["dtype"] == "bfloat16"


def test_one_dtype_for_everything(tmp_path):
    content = tiny.config(layers=1)
    folder = tiny.write(tmp_path, content, tiny.mixed(tiny.tensors(content)))
    plan = plan_of(folder, "dense", dtype=torch.float32)
    assert {row.dtype for row in plan.rows} | {tensor.dtype for tensor in plan.plain} == {
        torch.float32
    }
    assert plan.config["dtype"] == "float32"
    assert "quantization_config" not in plan.config


def test_the_config_is_that_of_the_source_but_for_what_changes(folder):
    content = json.loads((folder / "config.json").read_text())
    content |= {"unknown": {"a": [1, None]}, "eos_token_id": [2, 3], "rope_theta": 1e6}
    (folder / "config.json").write_text(json.dumps(content))
    plan = plan_of(folder, "FP8_DYNAMIC")
    assert {k: v for k, v in plan.config.items() if k != "quantization_config"} == content
    assert sorted(plan.config["quantization_config"]["ignore"]) == ["lm_head"]


def test_dimensions_that_no_scheme_reaches_are_rows(tmp_path):
    made = {
        "a.weight": torch.randn(8, 64),
        "e.gate_up_proj": torch.randn(2, 8, 64),
        "c.A": torch.ones(3),
    }
    plan = plan_of(tiny.write(tmp_path, {}, made), "W4A16:g32")
    rows = rows_of(plan)
    assert rows["e.gate_up_proj"].reason.startswith("kept: a tensor of 3 dimensions")
    assert [tensor.name for tensor in plan.plain] == ["c.A"]
    assert plan.config["quantization_config"]["ignore"] == []


def test_the_config_also_has_the_names_of_the_model(tmp_path):
    made = {k.removeprefix("model."): v for k, v in tiny.tensors(tiny.config(layers=1)).items()}
    source = opened(tiny.write(tmp_path, tiny.config(layers=1), made))
    modules = [name for name in source.weights if name != "lm_head"]
    facts = replace(
        facts_from_names(source.weights, tied_head=False),
        aliases={name: (f"model.{name}",) for name in modules},
    )
    config = QuantConfig.from_options("W4A16:g32", [f"{DOWN.removeprefix('model.')}=keep"])
    made = make_plan(source, config, facts).config["quantization_config"]
    assert sorted(made["ignore"]) == [DOWN.removeprefix("model."), "lm_head", DOWN]
    config = QuantConfig.from_options("W4A16:g32", ["layers.0.mlp.=W8A16:g32"])
    groups = make_plan(source, config, facts).config["quantization_config"]["config_groups"]
    targets = [target for group in groups.values() for target in group["targets"]]
    assert {Q, Q.removeprefix("model."), DOWN, DOWN.removeprefix("model.")} <= set(targets)
    assert len(targets) == len(set(targets)) == 14


def test_quantizing_again_is_a_warning(folder, tmp_path):
    quantized = converted(folder, tmp_path / "q", "W8A16:g32")
    plan = plan_of(quantized, "W4A16:g32")
    assert plan.warnings == (
        "14 modules of the source are already quantized (pack-quantized W8A16:g32); quantizing "
        "them again adds to their error",
    )
    assert plan_of(quantized, "dense").warnings == ()
    assert rows_of(plan)[Q].source == "pack-quantized W8A16:g32"


def test_input_scales_are_left_out_with_a_warning(folder, tmp_path):
    quantized = converted(folder, tmp_path / "q", "FP8_DYNAMIC")
    tensors = load_file(quantized / "model.safetensors")
    tensors[f"{Q}.input_scale"] = torch.ones(1)
    tiny.save_file(tensors, quantized / "model.safetensors")
    plan = plan_of(quantized, "dense")
    assert plan.warnings == (
        "1 tensor of fixed input scales is left out, since the output quantizes inputs "
        f"while the model runs, or not at all: `{Q}.input_scale`",
    )


def test_the_scheme_of_the_cache_goes_with_its_scales(folder, tmp_path):
    quantized = converted(folder, tmp_path / "q", "FP8_DYNAMIC")
    content = json.loads((quantized / "config.json").read_text())
    cache = {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": "tensor",
        "dynamic": False,
    }
    content["quantization_config"]["kv_cache_scheme"] = cache
    (quantized / "config.json").write_text(json.dumps(content))
    for scheme, layout in (("W4A16:g32", "pack-quantized"), ("dense", "dense")):
        config = plan_of(quantized, scheme).config["quantization_config"]
        assert (config["kv_cache_scheme"], config["format"]) == (cache, layout)


def test_scales_take_the_dtype_of_the_config(folder, tmp_path):
    quantized = converted(folder, tmp_path / "q", "W8A16:g32", dtype=torch.float32)
    content = json.loads((quantized / "config.json").read_text())
    assert content["dtype"] == "float32"
    content["dtype"] = "bfloat16"
    (quantized / "config.json").write_text(json.dumps(content))
    rows = rows_of(plan_of(quantized, "W8A16:g64"))
    assert rows[Q].dtype == torch.bfloat16
    assert rows["lm_head"].dtype == torch.float32  # as it is stored


def test_a_scheme_object_is_a_default(folder):
    rows = rows_of(plan_of(folder, parse_scheme("W8A8")))
    assert str(rows[Q].scheme) == "W8A8"


def test_partial_blocks_are_named(tmp_path):
    plan = plan_of(tiny.llama(tmp_path / "source"), "FP8_BLOCK")
    (warning,) = [text for text in plan.warnings if "block" in text]
    assert warning.startswith("14 modules have widths that are no multiples of the block")
    whole = plan_of(tiny.llama(tmp_path / "whole", hidden=128), "FP8_DYNAMIC")
    assert not [text for text in whole.warnings if "block" in text]


def test_a_scheme_that_reaches_nothing_is_a_warning(tmp_path):
    made = {"model.embed_tokens.weight": torch.randn(8, 64), "a.b.weight": torch.randn(8, 48)}
    plan = plan_of(tiny.write(tmp_path, {}, made), "W4A16")
    assert plan.warnings == (
        "no module is quantized to W4A16; the plan says why",
        "1 module stays in full precision, since no group size divides its columns: `a.b`",
    )
    assert plan_of(tmp_path, "dense").warnings == ()
    assert "quantization_config" not in plan.config


def test_a_group_size_that_was_asked_for_must_divide(tmp_path):
    made = {"a.b.weight": torch.randn(8, 96), "a.c.weight": torch.randn(8, 128)}
    folder = tiny.write(tmp_path, {}, made)
    with pytest.raises(ConfigError, match=r"width of `a.b`: 96 columns, group 64 \(default scheme"):
        plan_of(folder, "W4A16:g64")
    with pytest.raises(ConfigError, match=r"group 256 \(rule `a.c = W8A16:g256`\)"):
        plan_of(folder, "W4A16", ["a.c=W8A16:g256"])
    for asked in ("W4A16:g128", "w8a16 : g128"):  # as big as the preset's, but asked for
        with pytest.raises(ConfigError, match=r"width of `a.b`: 96 columns, group 128 \(default"):
            plan_of(folder, asked)
    with pytest.raises(ConfigError, match=r"group 128 \(default scheme"):
        plan_of(folder, "W4A16", group_size=128)
    with pytest.raises(ConfigError, match=r"group 128 \(rule `a.b = W4A16`\)"):
        plan_of(folder, "W8A8", ["a.b=W4A16:g128"])
    assert {str(row.scheme) for row in plan_of(folder, "W4A16").rows} == {"W4A16", "W4A16:g32"}
    plan = plan_of(folder, "W4A16:g64", ["a.b=keep"])
    assert {str(row.scheme) for row in plan.rows} == {"None", "W4A16:g64"}


def _experts(folder):
    made = {
        f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight": torch.randn(64, 64).bfloat16()
        for layer in range(2)
        for expert in range(3)
        for name in ("gate_proj", "up_proj", "down_proj")
    }
    return tiny.write(folder, {}, made)


@pytest.mark.parametrize(
    "rule",
    [
        "*.experts.0.=W8A16:g32",
        r"re:.*\.1\..*gate_proj=W8A16:g32",
        r"re:.*experts\..*down_proj=W8A16:g32",
    ],
)
def test_the_experts_of_a_block_have_one_scheme(tmp_path, rule):
    folder = _experts(tmp_path / "source")
    with pytest.raises(RuleSplitsStack, match=r"model\.layers\.0\.mlp\.experts"):
        plan_of(folder, "W4A16:g32", [rule])
    plan = plan_of(folder, "W4A16:g32", [rule], on_split="promote")
    assert {str(row.scheme) for row in plan.rows if ".layers.0." in row.module} == {"W8A16:g32"}


def test_gate_and_up_of_one_expert_are_one_fused_group(tmp_path):
    plan = plan_of(_experts(tmp_path), "W4A16:g32")
    block = "model.layers.1.mlp.experts"
    assert (f"{block}.2.gate_proj", f"{block}.2.up_proj") in plan.groups
    assert {len(group) for group in plan.groups} == {2}
    assert len(plan.groups) == 2 * 3


@pytest.mark.parametrize(
    ("inner", "expected", "reason"),
    [
        (64, "W4A16:g64", "default scheme; then W4A16:g64, like the rest of its block"),
        (48, None, "kept: like `a.experts.0.down_proj` of its block, which is kept: no group size"),
    ],
)
def test_the_narrowest_projection_decides_for_its_block(tmp_path, inner, expected, reason):
    made = {
        f"a.experts.0.{name}.weight": torch.randn(*shape).bfloat16()
        for name, shape in {
            "gate_proj": (inner, 128),
            "up_proj": (inner, 128),
            "down_proj": (128, inner),
        }.items()
    }
    plan = plan_of(tiny.write(tmp_path, {}, made), "W4A16")
    assert {str(row.scheme) if row.scheme else None for row in plan.rows} == {expected}
    assert rows_of(plan)["a.experts.0.up_proj"].reason.startswith(reason)


def test_a_pattern_that_covers_anything_does_not_reach_default_keeps(folder):
    for pattern in ("*.*", "re:.*", "model.*"):
        rows = rows_of(plan_of(folder, "W8A8", [f"{pattern}=W4A16:g32"]))
        assert rows["lm_head"].scheme is None
        assert rows["model.embed_tokens"].scheme is None


def test_incomplete_sources_are_warned_of(tmp_path):
    content = tiny.config(layers=2)
    made = tiny.tensors(content)
    folder = tiny.write(tmp_path / "source", content | {"num_hidden_layers": 3}, made)
    (warning,) = plan_of(folder, "W8A8").warnings
    expected = "the config counts 3 layers, the files hold 2"
    assert warning == f"the checkpoint is incomplete: {expected}"


def test_quantized_modules_that_become_full_precision_are_warned_of(tmp_path, folder):
    source = converted(folder, tmp_path / "out", "W4A16:g32")
    warnings = plan_of(source, None, ["model.layers.0.=keep"]).warnings
    assert "14 quantized modules of the source become full precision" in warnings[0]
    assert plan_of(source, "dense").warnings == ()


@pytest.mark.parametrize("shape", [(0, 128), (64, 0), (0, 0)])
def test_empty_weights_are_kept(tmp_path, shape):
    (row,) = plan_of(tiny.write(tmp_path, {}, {"a.x.weight": torch.zeros(shape)}), "W8A8").rows
    assert row.scheme is None
    assert row.reason == "kept: the weight is empty; default scheme"


def test_scales_of_float64_weights_are_float32(tmp_path):
    made = {"a.x.weight": torch.randn(8, 64, dtype=torch.float64), "weight": torch.zeros(2, 2)}
    plan = plan_of(tiny.write(tmp_path, {}, made), "W8A8")
    rows = rows_of(plan)
    assert {t.name: t.dtype for t in rows["a.x"].outputs}["a.x.weight_scale"] == torch.float32
    assert [t.name for t in rows["weight"].outputs] == ["weight"]  # a tensor without a module
