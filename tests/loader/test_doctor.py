"""Every rule of `doctor`: a small checkpoint that obeys it, and the same broken in that one way."""

from __future__ import annotations

import json

import pytest
import served
import tiny_checkpoints as tiny
import tiny_gguf
import torch
from safetensors.torch import save_file

from quantload.errors import ConfigError, SourceNotFound
from quantload.loader.doctor import engine_named, examine
from quantload.loader.doctor_names import weights_are_called_weight
from quantload.loader.doctor_subject import Subject
from quantload.loader.formats import open_source
from quantload.loader.open import open_checkpoint
from quantload.mappers.facts import facts_from_names
from quantload.mappers.placement import Placement

ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"
SERVERS = ("vllm", "sglang")


def by_names(source):
    is_tied = bool(source.checkpoint.config.get("tie_word_embeddings"))
    return facts_from_names(source.weights, tied_head=is_tied)


def diagnosed(folder, engine="vllm", *, device="cuda", parts=1, placement=None):
    return examine(
        folder,
        engine_named(engine),
        facts_of=by_names,
        place=lambda _: placement or Placement(),
        device=device,
        parts=parts,
    )


def found(diagnosis, rule=None):
    """(level, rule, layer) of each finding, or of those of one rule."""
    return [
        (finding.level, finding.rule, finding.layer)
        for finding in diagnosis.findings
        if rule is None or finding.rule == rule
    ]


def only(diagnosis, rule):
    """The one finding of a rule, which has to be the only error."""
    assert [f.rule for f in diagnosis.errors] == [rule], diagnosis.findings
    return diagnosis.errors[0]


# -- checkpoints that obey -------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["vllm", "sglang", "transformers"])
@pytest.mark.parametrize("kind", ["W4A16", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16"])
def test_what_obeys_passes(tmp_path, kind, engine):
    folder = served.llama(tmp_path / "model", kind, hidden=256, intermediate=512)
    diagnosis = diagnosed(folder, engine)
    assert diagnosis.passed
    packages = [("warning", "package", "")] if engine == "transformers" else []
    assert found(diagnosis) == packages


@pytest.mark.parametrize("engine", ["vllm", "sglang", "transformers"])
def test_full_precision_passes(tmp_path, engine):
    folder = tiny.llama(tmp_path / "model")
    (folder / "tokenizer.json").write_text("{}")
    assert found(diagnosed(folder, engine)) == []


def test_every_finding_is_complete(tmp_path):
    folder = served.llama(tmp_path / "model", "W3A16", change=untie)
    for finding in diagnosed(folder, device="cpu").findings:
        assert finding.found
        assert finding.expected
        assert finding.source.startswith("vLLM 0.32.0, ")
    assert not diagnosed(folder, device="cpu").passed


def untie(content, made):
    content["tie_word_embeddings"] = False


# -- method, config --------------------------------------------------------------------------------


@pytest.mark.parametrize(("engine", "knows"), [("vllm", False), ("sglang", True)])
def test_method_has_to_be_known(tmp_path, engine, knows):
    """vLLM 0.32 has no bitsandbytes; SGLang has."""
    folder = tiny.llama(tmp_path / "model")
    content = json.loads((folder / "config.json").read_text())
    content["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(content))
    assert bool(found(diagnosed(folder, engine), "method")) is not knows


def test_unread_method_of_an_engine_is_not_checked(tmp_path):
    folder = tiny.llama(tmp_path / "model")
    content = json.loads((folder / "config.json").read_text())
    content["quantization_config"] = {"quant_method": "aqlm"}
    (folder / "config.json").write_text(json.dumps(content))
    diagnosis = diagnosed(folder, "transformers")
    assert diagnosis.passed
    assert ("warning", "not-checked", "") in found(diagnosis)
    assert only(diagnosed(folder), "method").found == "quant_method `aqlm`"


def test_deprecated_method(tmp_path):
    folder = fp8_llama(tmp_path / "model", {"quant_method": "fbgemm_fp8"})
    assert "allow-deprecated" in only(diagnosed(folder), "method").expected


def fp8_llama(folder, config, *, block=None):
    """A llama in the fp8 format of transformers, one scale a tensor or a block."""
    content = tiny.config(hidden=128, intermediate=256)
    made = tiny.tensors(content)
    for name in [n for n in made if n.split(".")[-2] in served.LAYERS]:
        rows, columns = made[name].shape
        made[name] = made[name].to(torch.float8_e4m3fn)
        if block:
            shape = rows // block, columns // block
            made[f"{name}_scale_inv"] = torch.full(shape, 0.01)
        else:
            made[f"{name}_scale"] = torch.full((rows, 1), 0.01)
    content["quantization_config"] = config
    tiny.write(folder, content, made)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.mark.parametrize("engine", SERVERS)
def test_field_without_default(tmp_path, engine):
    config = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    whole = fp8_llama(tmp_path / "whole", {**config, "activation_scheme": "dynamic"}, block=32)
    assert diagnosed(whole, engine).passed
    folder = fp8_llama(tmp_path / "model", config, block=32)
    assert "`activation_scheme`" in only(diagnosed(folder, engine), "config-field").found


def test_sparsity_was_removed(tmp_path):
    def change(content, made):
        sparsity = {"format": "dense", "targets": ["Linear"], "sparsity_structure": "2:4"}
        content["quantization_config"]["sparsity_config"] = sparsity

    diagnosis = diagnosed(served.llama(tmp_path / "model", change=change))
    assert ("error", "config-group", "") in found(diagnosis)


@pytest.mark.parametrize(("order", "loads"), [("static", True), ("group", False)])
def test_act_order(tmp_path, order, loads):
    def change(content, made):
        groups = content["quantization_config"]["config_groups"]
        groups["group_0"]["weights"] = {**groups["group_0"]["weights"], "actorder": order}
        if order == "group":
            for name in [n for n in made if n.endswith("weight_shape")]:
                columns = int(made[name][1])
                g_idx = torch.arange(columns, dtype=torch.int32) // 32
                made[name.replace("weight_shape", "weight_g_idx")] = g_idx

    diagnosis = diagnosed(served.llama(tmp_path / "model", change=change))
    assert diagnosis.passed is loads
    assert bool(found(diagnosis, "config-group")) is not loads


@pytest.mark.parametrize(
    ("engine", "device", "loads"),
    [("vllm", "cuda", True), ("vllm", "cpu", False), ("sglang", "cuda", False)],
)
def test_rotations(tmp_path, engine, device, loads):
    """quantload does not read them either: the tensors are not checked, the config is."""

    def change(content, made):
        content["quantization_config"]["transform_config"] = {
            "config_groups": {"R4": {"type": "hadamard", "apply": []}}
        }

    folder = served.llama(tmp_path / "model", change=change)
    diagnosis = diagnosed(folder, engine, device=device)
    assert diagnosis.passed is loads
    assert ("warning", "not-checked", "") in found(diagnosis)


@pytest.mark.parametrize(
    ("scheme", "loads"),
    [
        ({"type": "float", "num_bits": 8, "strategy": "tensor", "symmetric": True}, True),
        ({"type": "int", "num_bits": 8, "strategy": "tensor", "symmetric": True}, False),
        ({"type": "float", "num_bits": 8, "strategy": "tensor", "symmetric": False}, False),
    ],
)
def test_cache_scheme(tmp_path, scheme, loads):
    def change(content, made):
        content["quantization_config"]["kv_cache_scheme"] = {**scheme, "dynamic": False}

    diagnosis = diagnosed(served.llama(tmp_path / "model", change=change))
    assert bool(found(diagnosis, "cache")) is not loads


def with_config(folder, quantization):
    """A llama in full precision with a quantization config: only the config can be judged."""
    content = tiny.config()
    made = tiny.tensors(content)
    content["quantization_config"] = quantization
    return tiny.write(folder, content, made)


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}
_ROUND = {**_ROUND, "packing_format": "auto_round:auto_gptq", "data_type": "int"}


@pytest.mark.parametrize("engine", SERVERS)
@pytest.mark.parametrize(
    ("config", "change"),
    [
        (_GPTQ, {"bits": 3}),
        (_GPTQ, {"sym": False}),
        (_AWQ, {"bits": 8}),
        (_FP8, {"activation_scheme": "static"}),
        (_FP8, {"activation_scheme": "often"}),
        (_FP8, {"weight_block_size": [32]}),
        (_FP8, {"weight_scale_semantics": "inverse"}),
        (_ROUND, {"packing_format": "auto_round:gptqmodel"}),
        (_ROUND, {"data_type": "nv_fp"}),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, {"quant_algo": "W4A8_AWQ"}),
    ],
)
def test_values_of_the_config(tmp_path, engine, config, change):
    good = diagnosed(with_config(tmp_path / "good", config), engine)
    assert found(good, "config-value") == []
    bad = diagnosed(with_config(tmp_path / "bad", {**config, **change}), engine)
    assert found(bad, "config-value") == [("error", "config-value", "")]


def test_act_order_of_gptq_is_gone_from_vllm(tmp_path):
    folder = with_config(tmp_path / "model", {**_GPTQ, "desc_act": True})
    assert found(diagnosed(folder), "config-value") == [("error", "config-value", "")]
    assert found(diagnosed(folder, "sglang"), "config-value") == []


@pytest.mark.parametrize(
    "change",
    [
        {"sparsity_config": {"format": "dense", "targets": ["Linear"]}},
        {"transform_config": {"config_groups": {}}},
    ],
)
def test_what_transformers_does_not_parse(tmp_path, change):
    folder = served.llama(
        tmp_path / "model", change=lambda c, _: c["quantization_config"].update(change)
    )
    assert ("error", "config-value", "") in found(diagnosed(folder, "transformers"))


def test_gguf(tmp_path):
    """vLLM needs a plugin for it, transformers the name of the file."""
    gguf = tmp_path / "model.gguf"
    tiny_gguf.write_tiny_gguf(gguf, weight_type="Q4_0")
    assert only(diagnosed(gguf), "method").found == "quant_method `gguf`"
    assert found(diagnosed(gguf, "sglang"), "method") == []
    in_transformers = diagnosed(gguf, "transformers")
    assert in_transformers.passed
    assert {rule for _, rule, _ in found(in_transformers)} == {"container", "package"}


# -- layers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "device", "level"),
    [
        ("W4A16", "cuda", None),
        ("W4A16", "cpu", None),
        ("W8A16", "cuda", None),
        ("W8A16", "cpu", "error"),
        ("W3A16", "cuda", "warning"),
        ("W3A16", "cpu", "error"),
        ("NVFP4A16", "cuda", None),
        ("NVFP4A16", "cpu", "error"),
        ("W8A8", "cpu", None),
        ("FP8", "cuda", None),
        ("FP8", "cpu", "error"),  # the CPU build lacks the operator that joins fused members
        ("FP8_DYNAMIC", "cpu", None),
        ("FP8_BLOCK", "cpu", "error"),  # blocks of 32, not of 128
    ],
)
def test_a_kernel_has_to_exist(tmp_path, kind, device, level):
    diagnosis = diagnosed(served.llama(tmp_path / "model", kind), device=device)
    assert {finding[0] for finding in found(diagnosis, "kernel")} == ({level} if level else set())
    assert diagnosis.passed is (level != "error")


@pytest.mark.parametrize(
    ("engine", "intermediate", "loads"),
    [("sglang", 256, True), ("sglang", 288, False), ("vllm", 288, True)],
)
def test_kernels_ask_for_widths(tmp_path, engine, intermediate, loads):
    """SGLang's Marlin wants columns in multiples of 128; vLLM pads."""
    folder = served.llama(tmp_path / "model", "W4A16", intermediate=intermediate)
    diagnosis = diagnosed(folder, engine)
    assert diagnosis.passed is loads
    assert bool(found(diagnosis, "kernel")) is not loads


def test_sglang_runs_no_three_bits(tmp_path):
    diagnosis = diagnosed(served.llama(tmp_path / "model", "W3A16"), "sglang")
    assert {rule for _, rule, _ in found(diagnosis)} == {"scheme", "kernel"}


def changed(name, tensor):
    """A change that puts a tensor in the place of another; None takes it away."""

    def change(content, made):
        if tensor is None:
            del made[name]
        else:
            made[name] = tensor(made[name]) if callable(tensor) else tensor

    return change


def test_padded_packing_of_old_versions(tmp_path):
    """3-bit codes were padded to ten a word up to compressed-tensors 0.17: another width."""

    def change(content, made):
        content["quantization_config"]["version"] = "0.17.0"
        for name in [n for n in made if n.endswith("weight_packed")]:
            rows, columns = made[name].shape[0], made[name].shape[1] * 32 // 3
            made[name] = torch.zeros(rows, -(-columns // 10), dtype=torch.int32)

    folder = served.llama(tmp_path / "model", "W3A16", change=change)
    findings = found(diagnosed(folder), "tensor")
    assert len(findings) == 14
    assert {level for level, _, _ in findings} == {"error"}


def test_missing_scale(tmp_path):
    change = changed(f"{MLP}.down_proj.weight_scale", None)
    finding = only(diagnosed(served.llama(tmp_path / "model", change=change)), "checkpoint")
    assert f"{MLP}.down_proj" in finding.found


@pytest.mark.parametrize("engine", SERVERS)
def test_head_needs_a_target_of_its_own(tmp_path, engine):
    """Both engines give the head a class of its own, which `Linear` does not name."""

    def quantize_head(content, made, *, named):
        config = content["quantization_config"]
        config["ignore"] = []
        if named:
            config["config_groups"]["group_0"]["targets"] = ["Linear", "lm_head"]
        rows, columns = made.pop("lm_head.weight").shape
        generator = torch.Generator().manual_seed(2)
        for leaf, tensor in served.tensors_of("W4A16", rows, columns, generator).items():
            made[f"lm_head.{leaf}"] = tensor

    def write(name, *, named):
        return served.llama(
            tmp_path / name,
            change=lambda content, made: quantize_head(content, made, named=named),
            vocabulary=128,
        )

    assert only(diagnosed(write("unnamed", named=False), engine), "head").layer == "lm_head"
    assert diagnosed(write("named", named=True), engine).passed


@pytest.mark.parametrize(("engine", "loads"), [("vllm", True), ("sglang", False)])
def test_quantized_embedding(tmp_path, engine, loads):
    def change(content, made):
        targets = content["quantization_config"]["config_groups"]["group_0"]["targets"]
        content["quantization_config"]["config_groups"]["group_0"]["targets"] = [
            *targets,
            "Embedding",
        ]
        rows, columns = made.pop("model.embed_tokens.weight").shape
        generator = torch.Generator().manual_seed(2)
        for leaf, tensor in served.tensors_of("W4A16", rows, columns, generator).items():
            made[f"model.embed_tokens.{leaf}"] = tensor

    diagnosis = diagnosed(served.llama(tmp_path / "model", change=change, vocabulary=128), engine)
    assert bool(found(diagnosis, "embedding")) is not loads


@pytest.mark.parametrize(("rows", "loads"), [(128, True), (160, True), (272, False)])
def test_partial_blocks_and_transformers(tmp_path, rows, loads):
    """Less than one block is a block; 272 rows are 8 blocks of 32 and a half."""
    folder = served.llama(tmp_path / "model", "FP8_BLOCK", intermediate=rows)
    assert diagnosed(folder, "transformers").passed is loads


def test_fp8_scales_and_transformers(tmp_path):
    config = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    blocks = fp8_llama(tmp_path / "blocks", {**config, "weight_block_size": [32, 32]}, block=32)
    assert diagnosed(blocks, "transformers").passed
    rows = fp8_llama(tmp_path / "rows", config)
    findings = found(diagnosed(rows, "transformers"), "transformers-layer")
    assert len(findings) == 14


def test_plain_head_and_transformers(tmp_path):
    """There a head is a Linear like others."""

    def change(content, made):
        content["quantization_config"]["ignore"] = []

    folder = served.llama(tmp_path / "model", change=change)
    finding = only(diagnosed(folder, "transformers"), "transformers-layer")
    assert finding.expected == "`lm_head` in `ignore`"
    assert diagnosed(folder).passed


def test_bytes_of_codes_are_no_scales(tmp_path):
    """255 is NaN as a scale of MX formats, and two codes as a byte of a weight."""
    for leaf, expected in (("weight_packed", []), ("weight_scale", [("error", "scale")])):

        def change(content, made, leaf=leaf):
            as_mxfp4(content, made)
            made[f"{MLP}.down_proj.{leaf}"].fill_(255)

        folder = served.llama(tmp_path / leaf, "NVFP4A16", change=change)
        assert [f[:2] for f in found(diagnosed(folder), "scale")] == expected


def as_mxfp4(content, made):
    config = content["quantization_config"]
    config["format"] = "mxfp4-pack-quantized"
    group = config["config_groups"]["group_0"]
    weights = {**group["weights"], "strategy": "group", "group_size": 32}
    group |= {"format": "mxfp4-pack-quantized", "weights": weights}
    for name in [n for n in made if n.endswith("weight_packed")]:
        module, (rows, half) = name.removesuffix(".weight_packed"), made[name].shape
        del made[f"{module}.weight_global_scale"]
        made[f"{module}.weight_scale"] = torch.full((rows, half // 16), 120, dtype=torch.uint8)


def test_packed_zero_points_and_transformers(tmp_path):
    folder = served.llama(tmp_path / "model", "W4A16_ASYM")
    assert diagnosed(folder).passed
    assert len(found(diagnosed(folder, "transformers"), "transformers-layer")) == 14


def experts(content, made):
    """Turn the MLP of each layer into two experts."""
    for name in [n for n in made if ".mlp." in n]:
        tensor = made.pop(name)
        for number in range(2):
            made[name.replace(".mlp.", f".mlp.experts.{number}.")] = tensor


@pytest.mark.parametrize(
    ("kind", "engine", "device", "rule"),
    [
        ("W4A16", "transformers", "cuda", None),
        ("W8A8", "transformers", "cuda", "transformers-layer"),
        ("NVFP4A16", "transformers", "cuda", "transformers-layer"),
        ("FP8_DYNAMIC", "transformers", "cuda", None),
        ("W4A16", "vllm", "cuda", None),
        ("W4A16", "vllm", "cpu", None),
        ("FP8_DYNAMIC", "vllm", "cuda", None),
        ("FP8_DYNAMIC", "vllm", "cpu", "kernel"),
    ],
)
def test_experts(tmp_path, kind, engine, device, rule):
    folder = served.llama(tmp_path / "model", kind, change=experts)
    errors = diagnosed(folder, engine, device=device).errors
    assert {finding.rule for finding in errors} == ({rule} if rule else set())
    assert all(".experts." in finding.layer for finding in errors)


def test_experts_have_one_scheme(tmp_path):
    module = f"{MLP}.experts.1.down_proj"

    def change(content, made):
        experts(content, made)
        keep(module)(content, made)

    finding = only(diagnosed(served.llama(tmp_path / "model", change=change)), "fused-scheme")
    assert f"full precision: `{module}`" in finding.found


# -- fused -----------------------------------------------------------------------------------------


def keep(module):
    """A change that leaves one layer in full precision, and says so in the config."""

    def change(content, made):
        rows, columns = made[f"{module}.weight_shape"].tolist()
        for name in [n for n in made if n.startswith(f"{module}.")]:
            del made[name]
        made[f"{module}.weight"] = torch.randn(rows, columns).to(torch.bfloat16)
        content["quantization_config"]["ignore"].append(module)

    return change


@pytest.mark.parametrize("module", [f"{ATTENTION}.k_proj", f"{MLP}.up_proj"])
def test_fused_members_have_one_scheme(tmp_path, module):
    folder = served.llama(tmp_path / "model", change=keep(module))
    for engine in SERVERS:
        finding = only(diagnosed(folder, engine), "fused-scheme")
        assert finding.layer in (f"{ATTENTION}.q_proj", f"{MLP}.gate_proj")
        assert "full precision" in finding.found
    assert diagnosed(folder, "transformers").passed


def test_config_leaves_out_what_is_quantized(tmp_path):
    """The files say 4 bits, the config full precision: engines believe the config."""

    def change(content, made):
        content["quantization_config"]["ignore"].append(f"{MLP}.down_proj")

    folder = served.llama(tmp_path / "model", change=change)
    for engine in ("vllm", "sglang", "transformers"):
        diagnosis = diagnosed(folder, engine)
        assert only(diagnosis, "left-out").layer == f"{MLP}.down_proj"
        assert found(diagnosis, "reading") == [("warning", "reading", "")]


def test_a_layer_on_its_own_may_be_kept(tmp_path):
    folder = served.llama(tmp_path / "model", change=keep(f"{MLP}.down_proj"))
    assert all(diagnosed(folder, engine).passed for engine in SERVERS)


def test_fused_global_scales_are_equal(tmp_path):
    change = changed(f"{ATTENTION}.v_proj.weight_global_scale", torch.tensor([3.0]))
    finding = only(
        diagnosed(served.llama(tmp_path / "model", "NVFP4A16", change=change)), "fused-scale"
    )
    assert finding.layer == f"{ATTENTION}.q_proj"
    assert "v_proj 3" in finding.found


def test_fused_scales_of_tensors(tmp_path):
    """The engine rounds again to the largest: it loads, less exactly."""
    change = changed(f"{MLP}.up_proj.weight_scale", torch.tensor([0.02]))
    diagnosis = diagnosed(served.llama(tmp_path / "model", "FP8", change=change))
    assert found(diagnosis) == [("warning", "fused-scale", f"{MLP}.gate_proj")]
    assert found(diagnosed(served.llama(tmp_path / "equal", "FP8"))) == []


def test_fused_input_scales(tmp_path):
    change = changed(f"{MLP}.up_proj.input_scale", torch.tensor([0.25]))
    diagnosis = diagnosed(served.llama(tmp_path / "model", "FP8", change=change))
    assert found(diagnosis) == [("warning", "fused-scale", f"{MLP}.gate_proj")]


# -- devices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "parts", "loads"),
    [
        ("vllm", 1, True),
        ("vllm", 2, True),
        ("vllm", 4, True),  # 2 key-value heads, each on two devices
        ("vllm", 3, False),
        ("transformers", 2, True),
        ("transformers", 4, False),
    ],
)
def test_heads_divide(tmp_path, engine, parts, loads):
    folder = served.llama(tmp_path / "model", "W8A8", intermediate=384)
    diagnosis = diagnosed(folder, engine, parts=parts)
    assert diagnosis.passed is loads
    assert bool(found(diagnosis, "parallel")) is not loads


@pytest.mark.parametrize(("intermediate", "parts", "loads"), [(256, 4, True), (320, 4, False)])
def test_groups_are_not_cut(tmp_path, intermediate, parts, loads):
    """320 columns in 4 parts of 80: no whole groups of 32."""
    folder = served.llama(tmp_path / "model", intermediate=intermediate)
    diagnosis = diagnosed(folder, parts=parts)
    cut = [layer for _, _, layer in found(diagnosis, "parallel")]
    assert cut == ([] if loads else [f"{MLP}.down_proj", "model.layers.1.mlp.down_proj"])


@pytest.mark.parametrize(
    ("engine", "hidden", "parts", "loads"),
    [
        ("vllm", 128, 1, True),
        ("vllm", 128, 2, True),
        ("vllm", 128, 4, True),  # a key-value head of 32 rows is held by two devices
        ("vllm", 96, 1, False),  # 48 rows of keys
        ("sglang", 96, 1, False),
    ],
)
def test_blocks_fit(tmp_path, engine, hidden, parts, loads):
    folder = served.llama(tmp_path / "model", "FP8_BLOCK", hidden=hidden)
    diagnosis = diagnosed(folder, engine, parts=parts)
    assert bool(found(diagnosis, "block")) is not loads
    assert diagnosis.passed is loads


def test_only_the_last_member_may_end_inside_a_block(tmp_path):
    """gate and up of 272 rows: up may end inside a block of 32, gate may not."""
    folder = served.llama(tmp_path / "model", "FP8_BLOCK", intermediate=272)
    blocks = [layer for _, _, layer in found(diagnosed(folder), "block")]
    assert blocks == [f"{MLP}.gate_proj", "model.layers.1.mlp.gate_proj"]
    assert len(found(diagnosed(folder, "sglang"), "block")) == 4


# -- scales ----------------------------------------------------------------------------------------


def with_value(value):
    def change(tensor):
        tensor = tensor.clone()
        tensor.reshape(-1)[0] = value
        return tensor

    return change


@pytest.mark.parametrize(
    ("kind", "leaf", "value", "sound"),
    [
        ("W8A8", "weight_scale", float("nan"), False),
        ("W8A8", "weight_scale", float("inf"), False),
        ("W8A8", "weight_scale", -0.01, True),  # signed scales of integers are used
        ("W8A8", "weight_scale", 0.01, True),
        ("FP8", "weight_scale", -0.01, False),
        ("FP8", "input_scale", 0.0, False),
        ("NVFP4A16", "weight_global_scale", 0.0, False),
    ],
)
def test_scales(tmp_path, kind, leaf, value, sound):
    change = changed(f"{MLP}.down_proj.{leaf}", with_value(value))
    diagnosis = diagnosed(served.llama(tmp_path / "model", kind, change=change))
    expected = [] if sound else [("error", "scale", f"{MLP}.down_proj")]
    assert found(diagnosis, "scale") == expected


# -- files and names -------------------------------------------------------------------------------


def test_other_safetensors_files(tmp_path):
    folder = served.llama(tmp_path / "model")
    save_file({"logits": torch.zeros(1)}, folder / "expected.safetensors")
    assert "`expected.safetensors`" in only(diagnosed(folder), "files").found
    assert diagnosed(folder, "transformers").passed


def test_pickles_have_the_usual_names(tmp_path):
    content = tiny.config()
    for name, loads in (("pytorch_model.bin", True), ("qmodel.pt", False)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(content))
        torch.save(tiny.tensors(content), folder / name)
        assert bool(found(diagnosed(folder), "container")) is not loads


def test_tokenizer(tmp_path):
    folder = served.llama(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    assert found(diagnosed(folder)) == [("warning", "tokenizer", "")]


@pytest.mark.parametrize(
    ("engine", "level"), [("vllm", "warning"), ("sglang", "error"), ("transformers", None)]
)
def test_architectures(tmp_path, engine, level):
    folder = served.llama(tmp_path / "model", change=lambda c, _: c.pop("architectures"))
    expected = [(level, "config-field", "")] if level else []
    assert found(diagnosed(folder, engine), "config-field") == expected


@pytest.mark.parametrize(("engine", "wants"), [("vllm", True), ("sglang", False)])
def test_fields_of_a_model(tmp_path, engine, wants):
    folder = served.llama(tmp_path / "model", change=lambda c, _: c.update(model_type="lfm2"))
    assert bool(found(diagnosed(folder, engine), "model-field")) is wants
    whole = {"model_type": "lfm2", "conv_dim": 128}
    folder = served.llama(tmp_path / "whole", change=lambda c, _: c.update(whole))
    assert found(diagnosed(folder, engine), "model-field") == []


def test_cpu_kernel_takes_no_fixed_input_scales(tmp_path):
    def change(content, made):
        group = content["quantization_config"]["config_groups"]["group_0"]
        tensor = {"type": "float", "num_bits": 8, "strategy": "tensor", "symmetric": True}
        group["input_activations"] = {**tensor, "dynamic": False}
        for name in [n for n in made if n.endswith("_proj.weight")]:
            made[name.replace(".weight", ".input_scale")] = torch.tensor([0.5])

    folder = served.llama(tmp_path / "model", "FP8_DYNAMIC", change=change)
    assert diagnosed(folder).passed
    assert {rule for _, rule, _ in found(diagnosed(folder, device="cpu"))} == {"kernel"}


def test_dtype_of_the_model(tmp_path):
    folder = served.llama(tmp_path / "model", change=lambda c, _: c.update(dtype="float32"))
    assert found(diagnosed(folder)) == [("warning", "dtype", "")]


def test_quantization_config_beside(tmp_path):
    """transformers looks into config.json only."""
    folder = served.llama(tmp_path / "model")
    content = json.loads((folder / "config.json").read_text())
    (folder / "quantization_config.json").write_text(json.dumps(content.pop("quantization_config")))
    (folder / "config.json").write_text(json.dumps(content))
    rules = [finding.rule for finding in diagnosed(folder, "transformers").errors]
    assert rules == ["config-field"]


def test_tied_head_is_plain(tmp_path):
    def change(content, made):
        content["quantization_config"]["ignore"] = []
        content["quantization_config"]["config_groups"]["group_0"]["targets"].append("lm_head")
        content["tie_word_embeddings"] = True
        rows, columns = made.pop("lm_head.weight").shape
        generator = torch.Generator().manual_seed(2)
        for leaf, tensor in served.tensors_of("W4A16", rows, columns, generator).items():
            made[f"lm_head.{leaf}"] = tensor

    folder = served.llama(tmp_path / "model", change=change, vocabulary=128)
    assert only(diagnosed(folder), "head-tied").layer == "lm_head"


@pytest.mark.parametrize(
    ("engine", "level"), [("vllm", "error"), ("sglang", "warning"), ("transformers", "warning")]
)
def test_tensors_without_a_place(tmp_path, engine, level):
    folder = served.llama(tmp_path / "model")
    placement = Placement(unplaced=("model.extra",))
    diagnosis = diagnosed(folder, engine, placement=placement)
    assert found(diagnosis, "unexpected") == [(level, "unexpected", "model.extra")]


def test_parameters_without_a_tensor(tmp_path):
    folder = served.llama(tmp_path / "model")
    placement = Placement(unfilled=("model.norm.weight",))
    assert only(diagnosed(folder, placement=placement), "missing").layer == "model.norm"


def test_names_without_the_prefix(tmp_path):
    folder = served.llama(tmp_path / "model")
    placement = Placement(without_prefix=("layers.0.self_attn.q_proj.weight",))
    assert "`model.layers.0" in only(diagnosed(folder, placement=placement), "prefix").expected
    assert diagnosed(folder, "transformers", placement=placement).passed


def test_weight_in_full_precision_under_another_name(tmp_path):
    """Quark's awq mode calls every weight `qweight`; engines want `weight`."""
    checkpoint = open_checkpoint(tiny.llama(tmp_path / "model"))
    source = open_source(checkpoint)
    renamed = checkpoint.renamed({"lm_head.weight": "lm_head.qweight"})
    engine, facts = engine_named("vllm"), by_names(source)

    def layers(stored):
        subject = Subject(stored, source, facts, Placement(), engine, "cuda", 1)
        return [finding.layer for finding in weights_are_called_weight(subject)]

    assert layers(checkpoint) == []
    assert layers(renamed) == ["lm_head"]


# -- usage -----------------------------------------------------------------------------------------


def test_wrong_usage(tmp_path):
    folder = served.llama(tmp_path / "model")
    with pytest.raises(ConfigError, match="unknown engine: `tgi`"):
        engine_named("tgi")
    with pytest.raises(ConfigError, match="expected at least 1"):
        diagnosed(folder, parts=0)
    with pytest.raises(ConfigError, match="kernels of SGLang on `cpu` are not known"):
        diagnosed(folder, "sglang", device="cpu")
    with pytest.raises(SourceNotFound, match="no such folder"):
        diagnosed(tmp_path / "nothing")
