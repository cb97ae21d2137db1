"""Experts of gpt-oss one by one: equal to what compressed-tensors and transformers compute."""

import json

import pytest
import tiny_checkpoints as tiny
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from converting import opened, plan_of
from safetensors.torch import load_file
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import quantload
from quantload.accuracy.compare_weights import compare_weights
from quantload.accuracy.verify import verify_sources
from quantload.errors import FormatMismatch, MissingTensor
from quantload.loader.convert import run_plan
from quantload.loader.experts import split_experts
from quantload.loader.plan import PlanOptions
from quantload.mappers.expert_layouts import UNSERVED, layout_of, unserved_layout_of
from quantload.progress import Silent

E, H, INNER, LAYERS = 3, 32, 64, 2
BLOCK = "model.layers.{}.mlp.experts"
BIASES = ("gate_up_proj_bias", "down_proj_bias")


def mxfp4(rows, columns):
    blocks = torch.randint(0, 256, (E, rows, columns // 32, 16), dtype=torch.uint8)
    return blocks, torch.randint(118, 124, (E, rows, columns // 32), dtype=torch.uint8)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A gpt-oss with MXFP4 experts, whose matrices are not square."""
    folder = tmp_path_factory.mktemp("gpt-oss") / "source"
    config = GptOssConfig(
        hidden_size=H,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_local_experts=E,
        num_experts_per_tok=2,
        vocab_size=64,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for layer in range(LAYERS):
        block = BLOCK.format(layer)
        for name, rows, columns in (("gate_up_proj", 2 * INNER, H), ("down_proj", H, INNER)):
            del tensors[f"{block}.{name}"]
            blocks, scales = mxfp4(rows, columns)
            tensors |= {f"{block}.{name}_blocks": blocks, f"{block}.{name}_scales": scales}
            tensors[f"{block}.{name}_bias"] = torch.randn(E, rows).bfloat16()
    content = json.loads((folder / "config.json").read_text())
    content["quantization_config"] = {"quant_method": "mxfp4"}
    return tiny.write(folder, content, tensors)


@pytest.fixture(scope="module")
def apart(source, tmp_path_factory):
    """Its experts one by one."""
    plan = plan_of(source, "same", lossless=True)
    return run_plan(plan, tmp_path_factory.mktemp("gpt-oss") / "apart", Silent())


def contents(folder):
    return load_file(folder / "model.safetensors")


def rewritten(folder, output, changes):
    """A folder with other tensors; None leaves one out."""
    tensors = {**contents(folder), **changes}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return tiny.write(output, json.loads((folder / "config.json").read_text()), tensors)


def test_compressed_tensors_reads_what_transformers_reads_of_the_source(source, apart):
    stored, made = contents(source), contents(apart)
    config = json.loads((apart / "config.json").read_text())["quantization_config"]
    scheme = QuantizationScheme.model_validate(config["config_groups"]["group_0"])
    assert config["format"] == "mxfp4-pack-quantized"
    assert scheme.targets == ["Linear"]
    assert scheme.input_activations is None
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    for layer in range(LAYERS):
        block = BLOCK.format(layer)
        expected = {
            name: convert_moe_packed_tensors(
                stored[f"{block}.{name}_blocks"], stored[f"{block}.{name}_scales"]
            ).mT
            for name in ("gate_up_proj", "down_proj")
        }
        rows, back = (stored[f"{block}.{name}"] for name in BIASES)
        for expert in range(E):
            for name, parameter, cut, bias in (
                ("gate_proj", "gate_up_proj", slice(0, None, 2), rows),
                ("up_proj", "gate_up_proj", slice(1, None, 2), rows),
                ("down_proj", "down_proj", slice(None), back),
            ):
                module = f"{block}.{expert}.{name}"
                leaves = {
                    leaf: made.pop(f"{module}.{leaf}") for leaf in ("weight_packed", "weight_scale")
                }
                found = compressor.decompress(leaves, scheme)["weight"]
                assert torch.equal(found.float(), expected[parameter][expert][cut].float()), module
                assert torch.equal(made.pop(f"{module}.bias"), bias[expert][cut]), module
    rest = {name: tensor for name, tensor in stored.items() if ".experts." not in name}
    assert made.keys() == rest.keys()
    assert all(torch.equal(made[name], rest[name]) for name in rest)


def test_the_model_is_that_of_the_source(source, apart):
    one, two = (
        quantload.load(folder, device="cpu", dtype=torch.float32) for folder in (source, apart)
    )
    ids = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        assert torch.equal(one(ids).logits, two(ids).logits)


def test_dense_outputs_and_comparisons_are_equal(source, apart, tmp_path):
    made = []
    for number, folder in enumerate((source, apart)):
        plan = plan_of(folder, "dense", dtype=torch.float32)
        made.append(run_plan(plan, tmp_path / str(number), Silent()))
    one, two = map(contents, made)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert verify_sources(opened(apart), opened(source), Silent(), nearest=True).failures() == []
    compared = compare_weights(opened(source), opened(apart), Silent())
    assert compared.passed
    assert all(layer.weight.relative == 0 for layer in compared.layers)


def test_lossless_again_copies(apart, tmp_path):
    plan = plan_of(apart, "same", lossless=True)
    again = run_plan(plan, tmp_path / "again", Silent())
    assert (again / "config.json").read_bytes() == (apart / "config.json").read_bytes()
    one, two = contents(apart), contents(again)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert verify_sources(opened(again), opened(apart), Silent(), nearest=True).failures() == []


def test_it_is_told_and_only_lossless_conversions_do_it(source):
    (told,) = plan_of(source, "same", lossless=True).warnings
    assert told.startswith(f"{LAYERS * E * 3} modules of experts are written one by one, as llm-co")
    assert "no serving engine: vLLM 0.32 leaves out" in told
    plan = plan_of(source, "same")
    assert not any(row.keeps_values for row in plan.rows)
    assert "one by one, as" not in str(plan.warnings)
    assert not plan_of(source, "dense", lossless=True).source.weights.keys() & {
        f"{BLOCK.format(0)}.0.down_proj"
    }


def test_full_precision_experts_stay_in_their_parameter(apart, tmp_path):
    dense = run_plan(plan_of(apart, "dense"), tmp_path / "dense", Silent())
    plan = plan_of(dense, "same", lossless=True)
    assert f"{BLOCK.format(0)}.gate_up_proj" in {row.module for row in plan.rows}
    assert plan.warnings == ()


def test_single_experts_in_full_precision_are_joined(source, tmp_path):
    experts = split_experts(opened(run_plan(plan_of(source, "dense"), tmp_path / "d", Silent())))
    assert experts.kept  # none is taken apart unless asked
    whole = opened(tmp_path / "d")
    apart = split_experts(whole, unserved=True)
    config = {k: v for k, v in whole.checkpoint.config.items() if k != "quantization_config"}
    tensors = {f"{m}.weight": apart.source.read_dense(m) for m in apart.source.weights}
    tensors |= {name: apart.source.read_plain(name) for name in apart.source.plain}
    joined = opened(tiny.write(tmp_path / "apart", config, tensors))
    assert joined.weights.keys() >= {f"{BLOCK.format(1)}.gate_up_proj"}
    for name, tensor in contents(tmp_path / "d").items():
        if name.endswith(BIASES):
            assert torch.equal(joined.read_plain(name), tensor)
        elif ".experts." in name:
            assert torch.equal(joined.read_parameter(name), tensor)


@pytest.mark.parametrize(
    ("name", "change", "error", "match"),
    [
        ("1.up_proj.bias", None, MissingTensor, r"`.+\.1\.up_proj\.bias` is missing"),
        ("1.up_proj.bias", torch.zeros(3), FormatMismatch, r"up_proj\.bias` is .+ expected"),
        ("2.down_proj.bias", torch.zeros(H), FormatMismatch, r"float32.+expected `torch.bfloat16`"),
    ],
)
def test_experts_that_do_not_fit(apart, tmp_path, name, change, error, match):
    folder = rewritten(apart, tmp_path / "x", {f"{BLOCK.format(1)}.{name}": change})
    with pytest.raises(error, match=match):
        opened(folder)


def test_a_missing_expert_is_named(apart, tmp_path):
    module = f"{BLOCK.format(0)}.{E - 1}.gate_proj"
    leaves = dict.fromkeys((f"{module}.weight_packed", f"{module}.weight_scale"))
    with pytest.raises(MissingTensor, match=rf"`{module}` has no weight, expected .+ all {E} exp"):
        opened(rewritten(apart, tmp_path / "x", {**leaves, f"{module}.bias": None}))


def test_an_expert_in_another_scheme_is_named(apart, tmp_path):
    module = f"{BLOCK.format(0)}.1.down_proj"
    dense = {f"{module}.weight": torch.zeros(H, INNER).bfloat16()}
    leaves = dict.fromkeys((f"{module}.weight_packed", f"{module}.weight_scale"))
    with pytest.raises(FormatMismatch, match=rf"`{module}` is BF16 .+ expected one kind"):
        opened(rewritten(apart, tmp_path / "x", {**leaves, **dense}))


@pytest.mark.parametrize("engine", ["vllm", "sglang", "transformers"])
def test_doctor_says_that_no_engine_reads_it(source, apart, engine):
    def found(folder):
        return [f for f in quantload.doctor(folder, engine).errors if f.rule == "experts"]

    assert found(source) == []
    names = [finding.layer for finding in found(apart)]
    assert sorted(names) == sorted(
        f"{BLOCK.format(layer)}.{name}"
        for layer in range(LAYERS)
        for name in ("gate_up_proj", "down_proj")
    )


def test_layouts_that_no_engine_reads_are_apart():
    for kind in UNSERVED:
        assert layout_of({"model_type": kind}) is None
        assert unserved_layout_of({"model_type": kind}) is UNSERVED[kind]
    assert unserved_layout_of({"model_type": "qwen3_moe"}) is None


def test_options_reach_it(source, tmp_path):
    options = PlanOptions(lossless=True, layers="1")
    done = quantload.convert(source, tmp_path / "one", "same", options=options)
    assert done.report.failures() == []
    assert f"{BLOCK.format(0)}.0.up_proj.weight_packed" in contents(tmp_path / "one")
