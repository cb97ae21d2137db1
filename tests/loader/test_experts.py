"""Experts that lie in one parameter: taken apart, quantized one by one, and loaded again."""

import json
from functools import cache

import pytest
import tiny_checkpoints as tiny
import torch
from converting import converted, opened, plan_of, rows_of
from fake_source import tiny_config
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from quantload import api
from quantload.accuracy.verify import verify_sources
from quantload.errors import RuleSplitsStack
from quantload.loader.convert import run_plan
from quantload.loader.experts import split_experts
from quantload.loader.plan import PlanOptions
from quantload.progress import Silent

E, H, INNER = 4, 64, 32
IDS = torch.arange(1, 17)[None]
_SIZES = {
    "moe_intermediate_size": INNER,
    "num_experts": E,
    "num_local_experts": E,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
_INNER = {"mixtral": {"intermediate_size": INNER}, "llama4_text": {"intermediate_size": INNER}}
_NAMES = {
    "qwen3_moe": ("mlp.experts", "mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ("mlp.experts", "block_sparse_moe.experts", ("w1", "w3", "w2")),
    "llama4_text": (
        "feed_forward.experts",
        "feed_forward.experts",
        ("gate_proj", "up_proj", "down_proj"),
    ),
}


@cache
def model_of(model_type):
    """A random model of two layers whose experts lie in one parameter."""
    torch.manual_seed(0)
    options = {**_SIZES, **_INNER.get(model_type, {}), "intermediate_size_mlp": 96}
    config = tiny_config(model_type, **options)
    config.pop("architectures")
    hf_config = AutoConfig.for_model(config.pop("model_type"), **config)
    model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def saved(model_type, folder, *, original=False):
    """The model on disk, in transformers' own layout or in that of the original checkpoints."""
    model_of(model_type).save_pretrained(folder, save_original_format=original)
    return folder


def _contents(folder):
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("scheme", ["W4A16:g32", "FP8_DYNAMIC", "W8A8"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_one_parameter_becomes_what_single_experts_become(tmp_path, model_type, scheme):
    fused = converted(saved(model_type, tmp_path / "fused"), tmp_path / "a", scheme)
    single = converted(saved(model_type, tmp_path / "s", original=True), tmp_path / "b", scheme)
    assert f"{_NAMES[model_type][0]}.gate_up_proj" in " ".join(_contents(tmp_path / "fused"))
    assert _contents(fused).keys() == _contents(single).keys()
    for name, tensor in _contents(single).items():
        assert torch.equal(
            tensor.view(torch.uint8) if tensor.ndim else tensor,
            _contents(fused)[name].view(torch.uint8) if tensor.ndim else _contents(fused)[name],
        ), name
    one, two = (json.loads((out / "config.json").read_text()) for out in (fused, single))
    ignored = [set(config["quantization_config"].pop("ignore")) for config in (one, two)]
    assert one["quantization_config"] == two["quantization_config"]
    assert ignored[1] <= ignored[0]  # which has the names in the model too


@pytest.mark.parametrize("model_type", list(_NAMES))
def test_the_output_computes_with_its_dequantized_weights(tmp_path, model_type):
    folder = saved(model_type, tmp_path / "source")
    done = api.convert(folder, tmp_path / "out", "W4A16:g32")
    assert done.report is not None
    assert done.report.failures() == []
    assert api.verify(tmp_path / "out", folder, nearest=True).failures() == []
    reference = model_of(model_type).float()
    output = opened(tmp_path / "out")
    of_model, written, (gate, up, down) = _NAMES[model_type]
    seen = 0
    with torch.no_grad():
        for name, module in reference.named_modules():
            if name.endswith(of_model):
                block = name.removesuffix(of_model) + written
                first = model_type == "llama4_text"  # input features
                for e in range(E):
                    parts = [output.read_dense(f"{block}.{e}.{part}") for part in (gate, up)]
                    rows, back = torch.cat(parts), output.read_dense(f"{block}.{e}.{down}")
                    module.gate_up_proj[e] = rows.t() if first else rows
                    module.down_proj[e] = back.t() if first else back
                    seen += 1
            elif name in output.weights:
                module.weight.copy_(output.read_dense(name).float())
        expected = reference(IDS).logits
        loaded = api.load(tmp_path / "out", device="cpu", dtype=torch.float32)
        found = loaded(IDS).logits
    model_of.cache_clear()
    assert seen == 2 * E
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_rows_of_experts_are_read_where_they_lie(tmp_path):
    plan = plan_of(saved("qwen3_moe", tmp_path / "source"), "W4A16:g32")
    stored = _contents(tmp_path / "source")["model.layers.1.mlp.experts.gate_up_proj"]
    row = rows_of(plan)["model.layers.1.mlp.experts.2.up_proj"]
    assert row.region is not None
    assert (row.region.rows, row.region.columns, row.region.row_stride) == (INNER, H, H)
    assert row.source_bytes == INNER * H * 2
    entry = plan.source.checkpoint.tensors[row.region.tensor]
    data = (tmp_path / "source" / "model.safetensors").read_bytes()[entry.start :][
        : entry.num_bytes
    ]
    values = torch.frombuffer(bytearray(data), dtype=torch.bfloat16).reshape(INNER, H)
    assert torch.equal(values, stored[2, INNER:])
    assert torch.equal(plan.source.read_dense(row.module), values)
    read = sum(row.source_bytes for row in plan.rows) + sum(t.num_bytes for t in plan.plain)
    assert read == sum(tensor.nbytes for tensor in _contents(tmp_path / "source").values())


def test_experts_of_input_features_first_are_cut_out(tmp_path):
    folder = saved("llama4_text", tmp_path / "source")
    plan = plan_of(folder, "W4A16:g32")
    block = "model.layers.0.feed_forward.experts"
    stored = _contents(folder)
    row = rows_of(plan)[f"{block}.1.up_proj"]
    assert row.region is None
    assert torch.equal(
        plan.source.read_dense(row.module), stored[f"{block}.gate_up_proj"][1, :, INNER:].t()
    )
    assert torch.equal(
        plan.source.read_dense(f"{block}.3.down_proj"), stored[f"{block}.down_proj"][3].t()
    )


# -- quantized experts in one parameter ------------------------------------------------------------


def _fp8_experts(folder, scale_shape):
    """A Qwen3-MoE whose experts are e4m3 with one scale for blocks of 32 x 32, or for each."""
    saved("qwen3_moe", folder)
    content, made = json.loads((folder / "config.json").read_text()), _contents(folder)
    for name in [name for name in made if ".experts." in name]:
        experts, rows, columns = made[name].shape
        shape = {"block": (experts, rows // 32, columns // 32), "expert": (experts, 1, 1)}
        made[f"{name}_scale_inv"] = torch.rand(shape[scale_shape]) * 0.01 + 0.001
        made[name] = (torch.randn(experts, rows, columns) * 50).to(torch.float8_e4m3fn)
    config = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    config |= {"weight_block_size": [32, 32]} if scale_shape == "block" else {}
    kept = [name.removesuffix(".weight") for name in made if name.endswith(".weight")]
    content["quantization_config"] = {**config, "modules_to_not_convert": kept}
    (folder / "config.json").write_text(json.dumps(content))
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("scales", ["block", "expert"])
def test_fp8_experts_become_int4_without_a_copy(tmp_path, scales):
    folder = _fp8_experts(tmp_path / "source", scales)
    made = _contents(folder)
    plan = plan_of(folder, "W4A16:g32")
    parameter = "model.layers.0.mlp.experts.gate_up_proj"
    size = 32 if scales == "block" else 2 * INNER
    scale = made[f"{parameter}_scale_inv"]
    if scales == "block":
        scale = scale.repeat_interleave(size, dim=1).repeat_interleave(32, dim=2)
    dense = made[parameter].float() * scale
    for expert in range(E):
        for part, name in enumerate(("gate_proj", "up_proj")):
            found = plan.source.read_dense(f"model.layers.0.mlp.experts.{expert}.{name}")
            rows = dense[expert, part * INNER : (part + 1) * INNER]
            torch.testing.assert_close(found.float(), rows, rtol=2**-8, atol=0)
    output = opened(run_plan(plan, tmp_path / "out", Silent()))
    assert verify_sources(output, opened(folder), Silent(), nearest=True).failures() == []
    experts = [m for m, w in output.weights.items() if ".experts." in m and w.is_quantized]
    assert len(experts) == 2 * E * 3
    assert sum(row.source_bytes for row in plan.rows if ".experts." in row.module) == sum(
        tensor.nbytes for name, tensor in made.items() if ".experts." in name
    )


def test_fp8_experts_keep_their_codes(tmp_path):
    folder = _fp8_experts(tmp_path / "source", "block")
    plan = plan_of(folder, "same", lossless=True)
    output = opened(run_plan(plan, tmp_path / "out", Silent()))
    codes = _contents(folder)["model.layers.1.mlp.experts.down_proj"]
    found = _contents(tmp_path / "out")["model.layers.1.mlp.experts.3.down_proj.weight"]
    assert torch.equal(found.view(torch.uint8), codes[3].view(torch.uint8))
    assert all(w.is_quantized for m, w in output.weights.items() if ".experts." in m)


# -- rules, and what stays whole -------------------------------------------------------------------


def test_rules_reach_experts_by_either_name(tmp_path):
    folder = saved("qwen3_moe", tmp_path / "source")
    block = "model.layers.0.mlp.experts"
    for rule in (f"{block}.=FP8_DYNAMIC", r"re:.*layers\.0\..*experts\.\d+\..*=FP8_DYNAMIC"):
        rows = rows_of(plan_of(folder, "W4A16:g32", [rule]))
        assert str(rows[f"{block}.0.up_proj"].scheme) == "FP8_DYNAMIC"
        assert str(rows["model.layers.1.mlp.experts.0.up_proj"].scheme) == "W4A16:g32"
    both = [f"{block}.{name}=FP8_DYNAMIC" for name in ("gate_up_proj", "down_proj")]
    rows = rows_of(plan_of(folder, "W4A16:g32", both))
    assert str(rows[f"{block}.3.down_proj"].scheme) == "FP8_DYNAMIC"
    with pytest.raises(RuleSplitsStack, match=r"model\.layers\.0\.mlp\.experts"):
        plan_of(folder, "W4A16:g32", both[:1])


@pytest.mark.parametrize("rules", [["*.mlp.experts.=keep"], ["*.experts.gate_up_proj=keep"] * 1])
def test_experts_that_nobody_quantizes_stay_in_one_parameter(tmp_path, rules):
    folder = saved("qwen3_moe", tmp_path / "source")
    on_split = "error" if len(rules[0]) < 21 else "keep"
    plan = plan_of(folder, "W4A16:g32", rules, on_split=on_split)
    kept = [row for row in plan.rows if "experts" in row.module]
    if on_split == "error":
        assert [row.shape for row in kept][:2] == [(E, H, INNER), (E, 2 * INNER, H)]
        assert kept[0].reason.startswith("kept: `model.layers.0.mlp.experts.down_proj` holds 4 ex")
        assert "rule `*.mlp.experts. = keep`" in kept[0].reason
    assert all(row.scheme is None for row in kept)
    output = opened(run_plan(plan, tmp_path / "out", Silent()))
    assert verify_sources(output, opened(folder), Silent(), nearest=True).failures() == []


def test_one_block_of_experts_may_stay_in_full_precision(tmp_path):
    folder = saved("mixtral", tmp_path / "source")
    plan = plan_of(folder, "W4A16:g32", ["model.layers.1.=keep"])
    output = run_plan(plan, tmp_path / "out", Silent())
    assert verify_sources(opened(output), opened(folder), Silent(), nearest=True).failures() == []
    names = set(_contents(output))
    assert "model.layers.1.block_sparse_moe.experts.0.w1.weight" in names
    assert "model.layers.0.block_sparse_moe.gate.weight" in names
    assert not any(".mlp." in name for name in names)
    loaded = api.load(output, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        assert loaded(IDS).logits.isfinite().all()


@pytest.mark.parametrize(
    ("content", "shape", "reason"),
    [
        ({"model_type": "gpt_oss"}, (E, H, 2 * INNER), "vLLM 0.32 leaves out the tensors of its"),
        ({"model_type": "dbrx"}, (E, H, 2 * INNER), "vLLM 0.32 reads its experts only in one"),
        ({"model_type": "nobody"}, (E, H, 2 * INNER), "no layout of single experts is known"),
        ({"model_type": "qwen3_moe"}, (E, H, 96), "does not tell rows from columns"),
        ({"model_type": "qwen3_moe"}, (E, 2 * INNER + 1, H), "its 65 rows are not those of gate_"),
        ({"model_type": "qwen3_vl_moe_text"}, (E, H, H), "does not tell rows from columns"),
    ],
)
def test_what_no_engine_reads_one_by_one_stays_whole(tmp_path, content, shape, reason):
    name = "model.layers.0.mlp.experts.gate_up_proj"
    made = {name: torch.randn(shape).bfloat16(), "a.b.weight": torch.randn(8, 64).bfloat16()}
    folder = tiny.write(tmp_path / "source", {**content, "hidden_size": H}, made)
    plan = plan_of(folder, "W4A16:g32")
    row = rows_of(plan)[name]
    assert row.scheme is None
    assert reason in row.reason
    (warning,) = plan.warnings
    assert warning.startswith("1 parameter of experts stays in full precision (")
    assert reason in warning
    assert name in warning
    assert split_experts(opened(folder)).source.weights.keys() == opened(folder).weights.keys()


def test_experts_with_biases_stay_whole(tmp_path):
    folder = saved("qwen3_moe", tmp_path / "source")
    made = _contents(folder)
    made["model.layers.0.mlp.experts.gate_up_proj_bias"] = torch.zeros(E, 2 * INNER).bfloat16()
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    kept = split_experts(opened(folder)).kept
    assert kept == {
        "model.layers.0.mlp.experts.gate_up_proj": "its experts have biases, which no engine reads "
        "one by one",
        "model.layers.0.mlp.experts.down_proj": "another parameter of its block stays whole",
    }


@pytest.mark.parametrize("is_transposed", [False, True])
def test_qwen3_vl_is_told_by_its_shape(tmp_path, is_transposed):
    block = "model.language_model.layers.0.mlp.experts"
    rows, back = torch.randn(E, 2 * INNER, H // 4), torch.randn(E, H // 4, INNER)
    turned = (rows.mT.contiguous(), back.mT.contiguous()) if is_transposed else (rows, back)
    made = dict(zip((f"{block}.gate_up_proj", f"{block}.down_proj"), turned, strict=True))
    text = {"model_type": "qwen3_vl_moe_text", "hidden_size": H // 4}
    folder = tiny.write(tmp_path, {"model_type": "qwen3_vl_moe", "text_config": text}, made)
    source = split_experts(opened(folder)).source
    assert torch.equal(source.read_dense(f"{block}.2.up_proj"), rows[2, INNER:])
    assert torch.equal(source.read_dense(f"{block}.1.down_proj"), back[1])


def test_options_of_the_command_reach_experts(tmp_path):
    folder = saved("qwen3_moe", tmp_path / "source")
    plan = api.plan(folder, "W4A16:g32", options=PlanOptions(dtype=torch.float32))
    row = rows_of(plan)["model.layers.0.mlp.experts.0.up_proj"]
    assert row.dtype == torch.float32
    assert plan.groups_origin == "model probe"


@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_routers_are_listed_as_not_quantized(tmp_path, model_type, original):
    """transformers 5 has no linear layer there, vLLM has: it would look for a packed weight."""
    plan = api.plan(saved(model_type, tmp_path / "source", original=original), "W4A16:g32")
    ignored = set(plan.config["quantization_config"]["ignore"])
    block = _NAMES[model_type][1].removesuffix(".experts")
    assert {f"model.layers.{layer}.{block}.gate" for layer in range(2)} <= ignored
    assert "lm_head" in ignored
    assert not any("experts" in name or "norm" in name or "embed" in name for name in ignored)


def test_experts_are_compared_one_by_one(tmp_path):
    folder = saved("mixtral", tmp_path / "source")
    output = converted(folder, tmp_path / "out", "W8A16:g32")
    for pair in ((folder, output), (output, folder)):
        layers = {layer.module: layer for layer in api.compare(*pair).layers}
        experts = [layer for module, layer in layers.items() if ".experts." in module]
        assert len(experts) == 2 * E * 3
        assert all(0 < layer.weight.relative < 0.01 for layer in experts)
        assert "model.layers.0.block_sparse_moe.gate" in layers
