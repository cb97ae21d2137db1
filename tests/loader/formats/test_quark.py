"""AMD Quark against its specification in NumPy, and against checkpoints that it wrote."""

import json

import numpy as np
import pytest
import tiny_checkpoints as tiny
import torch
from converting import converted, opened
from faults import silent_faults
from quark_encoder import config, encoded, layer, nvfp4, rounded, spec, write
from safetensors.torch import load_file
from truth import CHECKPOINTS

import quantload
from quantload.errors import (
    FormatMismatch,
    MissingTensor,
    NonFiniteWeight,
    QuantloadError,
    UnsupportedVariant,
)

MODULE = "model.layers.0.mlp.down_proj"
TOOL = CHECKPOINTS / "amd-quark-0.13"
MXFP4 = spec("fp4", "per_group", group_size=32, scale_format="e8m0")
FP8 = spec("fp8_e4m3", "per_tensor", symmetric=True)
INT4 = spec("int4", "per_group", group_size=16, symmetric=True)
UINT4 = spec("uint4", "per_group", group_size=16, symmetric=False)
SPECS = [
    # specification, N, K
    (FP8, 5, 7),
    (spec("fp8_e4m3", "per_channel", symmetric=True), 5, 7),
    (spec("fp8_e4m3", "per_channel", symmetric=True), 1, 7),
    (spec("fp8_e4m3", "per_group", group_size=16, symmetric=True), 6, 48),
    (spec("fp8_e4m3", "per_block", block_size=[4, 8], symmetric=True), 6, 20),
    (spec("fp8_e4m3", "per_block", block_size=[128, 128]), 130, 140),
    (spec("fp8_e4m3", "per_group", group_size=32, scale_format="e8m0"), 6, 96),
    (spec("fp8_e5m2", "per_tensor"), 4, 6),
    (spec("int8", "per_tensor", symmetric=True), 5, 7),
    (spec("int8", "per_channel", symmetric=False), 5, 7),
    (spec("int8", "per_group", group_size=16, symmetric=True), 5, 32),
    (spec("uint8", "per_channel", symmetric=False), 5, 7),
    (spec("uint8", "per_group", group_size=16, symmetric=False), 32, 32),
    (INT4, 24, 48),
    (INT4, 11, 32),  # the last word of a row is not full
    (UINT4, 24, 48),
    (UINT4, 3, 16),
    (spec("int4", "per_group", group_size=16, symmetric=False), 9, 32),
    (spec("int4", "per_channel", symmetric=True), 8, 48),
    (spec("uint4", "per_channel", symmetric=False), 13, 16),
    (MXFP4, 6, 96),
    (spec("fp4", "per_group", group_size=16), 6, 48),
    (spec("fp6_e2m3", "per_group", group_size=32, scale_format="e8m0"), 6, 96),
    (spec("fp6_e3m2", "per_group", group_size=32, scale_format="e8m0"), 5, 32),
]


def name_of(value):
    return f"{value['dtype']}-{value['qscheme']}" if isinstance(value, dict) else str(value)


def values_of(folder, module=MODULE):
    return opened(folder).read_dense(module).float().numpy()


# -- decoding --------------------------------------------------------------------------------------


@pytest.mark.parametrize("pack_method", ["order", "reorder"])
@pytest.mark.parametrize(("weight", "rows", "columns"), SPECS, ids=name_of)
def test_decode(weight, rows, columns, pack_method, tmp_path):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if weight["scale_format"] == "e8m0" and dtype != torch.bfloat16:
            continue
        made = encoded(weight, rows, columns, pack_method=pack_method, dtype=dtype)
        folder = tmp_path / str(dtype)
        write(folder, {MODULE: made}, config(weight, pack_method=pack_method))
        source = opened(folder)
        assert source.weights[MODULE].shape == (rows, columns)
        assert source.weights[MODULE].dtype == dtype
        found = source.read_dense(MODULE)
        assert found.dtype == dtype
        assert np.array_equal(found.float().numpy(), made.values)


def test_nvfp4(tmp_path):
    levels = [
        [
            spec("fp4", "per_group", group_size=16, is_dynamic=is_input),
            spec("fp8_e4m3", "per_tensor"),
        ]
        for is_input in (False, True)
    ]
    made = nvfp4(6, 48)
    made.leaves["input_scale_2"] = torch.tensor(0.25)
    source = opened(write(tmp_path / "source", {MODULE: made}, config(*levels)))
    weight = source.read_weight(MODULE)
    assert np.array_equal(weight.dequantize().numpy(), made.values)
    assert weight.dequantize().dtype == torch.float32
    assert weight.input_scale.tolist() == [0.25]
    assert source.weights[MODULE].scheme.input.scale == "e4m3"


def test_one_group_a_row(tmp_path):
    weight = spec("int4", "per_group", group_size=32, symmetric=True)
    made = encoded(weight, 16, 32)
    folder = write(tmp_path / "source", {MODULE: made}, config({**weight, "group_size": -1}))
    assert np.array_equal(values_of(folder), made.values)


def test_symmetric_weights_need_no_zero_point(tmp_path):
    made = encoded(INT4, 16, 32)
    del made.leaves["weight_zero_point"]
    assert np.array_equal(
        values_of(write(tmp_path / "s", {MODULE: made}, config(INT4))), made.values
    )


def test_leaves_of_older_exports(tmp_path):
    made = encoded(UINT4, 16, 32)
    made.leaves["input_scale"] = torch.ones(1)
    old = {"weight_scale": "weight_quantizer.scale", "input_scale": "input_quantizer.scale"}
    old["weight_zero_point"] = "weight_quantizer.zero_point"
    made.leaves = {old.get(leaf, leaf): tensor for leaf, tensor in made.leaves.items()}
    source = opened(write(tmp_path / "source", {MODULE: made}, config(UINT4)))
    assert np.array_equal(source.read_dense(MODULE).float().numpy(), made.values)
    assert f"{MODULE}.input_scale" in source.weights[MODULE].leaves.values()


def test_rounding_of_the_reference():
    values = np.float32([1.0, 1.00390625, 1.01171875, -1.00390626, 3e38])
    expected = torch.from_numpy(values).bfloat16().float().numpy()
    assert np.array_equal(rounded(values, torch.bfloat16), expected)


# -- which modules ---------------------------------------------------------------------------------


def test_the_config_of_a_module(tmp_path):
    block = "model.language_model.layers.0"
    modules = {
        f"{block}.self_attn.q_proj": encoded(FP8, 8, 16),
        f"{block}.mlp.up_proj": encoded(MXFP4, 8, 32),
        f"{block}.mlp.down_proj": encoded(INT4, 8, 16),
        "model.embed_tokens": encoded(UINT4, 8, 16),
    }
    quantization = config(
        FP8,
        layer_quant_config={
            "model.layers.0.mlp.down_proj": layer(INT4),
            "*.mlp.*": layer(MXFP4),
            "*.down_proj": layer(None),
        },
        layer_type_quant_config={"<class 'torch.nn.modules.sparse.Embedding'>": layer(UINT4)},
        exclude=["lm_head", r"re:model\.visual\.", "*.gate"],
    )
    plain = {f"{block}.mlp.gate.weight": torch.ones(4, 8)}
    source = opened(write(tmp_path / "source", modules, quantization, plain=plain))
    for module, made in modules.items():
        assert np.array_equal(source.read_dense(module).float().numpy(), made.values), module
    decided = {module: source.weights[module].decided_by for module in modules}
    assert decided == {
        f"{block}.self_attn.q_proj": "global_quant_config",
        f"{block}.mlp.up_proj": "layer_quant_config: *.mlp.*",
        f"{block}.mlp.down_proj": "layer_quant_config: model.layers.0.mlp.down_proj",
        "model.embed_tokens": "layer_type_quant_config: Embedding",
    }
    (told,) = source.warnings
    assert r"match no module: `exclude: re:model\.visual\.`, in" in told


def test_excluded_but_quantized(tmp_path):
    modules = {"lm_head": encoded(FP8, 4, 8)}
    source = opened(write(tmp_path / "source", modules, config(FP8)))
    assert np.array_equal(source.read_dense("lm_head").float().numpy(), modules["lm_head"].values)
    assert "`lm_head`" in source.warnings[0]


def test_a_named_module_in_full_precision(tmp_path):
    plain = {f"{MODULE}.weight": torch.ones(4, 8)}
    quantization = config(None, layer_quant_config={MODULE: layer(FP8)})
    with pytest.raises(FormatMismatch, match=f"names modules that are not quantized.*`{MODULE}`"):
        opened(write(tmp_path / "source", {}, quantization, plain=plain))


def test_scales_of_the_cache(tmp_path):
    attention = "model.layers.0.self_attn"
    cached = layer(FP8, output_tensors=FP8)
    quantization = config(
        FP8,
        export={"kv_cache_group": ["*k_proj", "*v_proj"], "pack_method": "order"},
        layer_quant_config={"*k_proj": cached, "*v_proj": cached, "*q_proj": cached},
    )
    plain = {f"{attention}.{x}_proj.output_scale": torch.tensor(0.5) for x in "kvq"}
    modules = {f"{attention}.k_proj": encoded(FP8, 4, 8)}
    source = opened(write(tmp_path / "source", modules, quantization, plain=plain))
    assert {f"{attention}.{x}_scale" for x in "kvq"} <= source.plain.keys()
    assert source.reader.cache_scheme["type"] == "float"


# -- faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weight", "smaller"),
    [
        (FP8, ("truncate weight", "narrow weight", "transpose weight")),
        (spec("int8", "per_channel", symmetric=False), ("narrow weight",)),
        (INT4, ("narrow weight_scale",)),  # 23 rows fill as many words as 24
        (UINT4, ("narrow weight_scale",)),
        (MXFP4, ()),
    ],
    ids=name_of,
)
def test_no_fault_goes_unnoticed(weight, smaller, tmp_path):
    made = encoded(weight, 24, 64)
    folder = write(tmp_path / "source", {MODULE: made}, config(weight))
    found = [fault.split() for fault in silent_faults(folder, tmp_path)]
    # A layer of another shape, sound in itself, does not fit its model.
    assert {f"{kind} {name.rpartition('.')[2]}" for kind, name, *_ in found} == set(smaller)


def test_messages(tmp_path):
    def problem(error, match, change, weight=UINT4):
        made = encoded(UINT4, 16, 32)
        change(made.leaves)
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        with pytest.raises(error, match=match):
            opened(write(folder, {MODULE: made}, config(weight))).read_dense(MODULE)

    problem(
        MissingTensor, r"`.*weight_zero_point` is missing", lambda m: m.pop("weight_zero_point")
    )
    problem(MissingTensor, r"`.*\.weight` is missing", lambda m: m.pop("weight"))
    problem(FormatMismatch, "not all zero, but the config says", lambda m: None, INT4)
    problem(FormatMismatch, "is `torch.int32`, expected `torch.float8_e4m3fn`", lambda m: None, FP8)
    problem(FormatMismatch, "does not say how", lambda m: None, None)
    problem(
        FormatMismatch,
        "which does not fit",
        lambda m: None,
        spec("uint4", "per_group", group_size=32, symmetric=False),
    )
    problem(
        NonFiniteWeight,
        r"weight_scale` holds NaN or infinity",
        lambda m: m["weight_scale"].fill_(float("nan")),
    )
    problem(
        UnsupportedVariant,
        r"tensors that are not read: `.*input_rotation`",
        lambda m: m.update(input_rotation=torch.ones(2, 2)),
    )
    problem(
        FormatMismatch,
        "does not belong to a weight in `uint4`",
        lambda m: m.update(weight_scale_2=torch.ones(())),
    )


def test_every_refusal_is_ours(tmp_path):
    """Values that no config should have."""
    made = encoded(FP8, 4, 8)
    values = [None, -1, 0, 1.5, True, "x", [], [1], ["("], ["re:("], {}, {"a": 1}, {"x": {}}]
    keys = [*config(FP8), "weight", *FP8]
    for number, value in enumerate(values):
        for key in keys:
            if key == "quant_method":
                continue
            weight = value if key == "weight" else {**FP8, key: value} if key in FP8 else FP8
            more = {key: value} if key in config(FP8) else {}
            folder = write(tmp_path / f"{key}-{number}", {MODULE: made}, config(weight) | more)
            try:
                found = opened(folder).read_dense(MODULE)
            except QuantloadError:
                continue
            assert np.array_equal(found.float().numpy(), made.values), (key, value)


# -- real checkpoints ------------------------------------------------------------------------------

needs_shared = pytest.mark.skipif(not TOOL.is_dir(), reason="no folder shared/checkpoints")
EXACT = ["nano-llama-MXFP6-E2M3", "micro-qwen3-moe-MXFP4"]  # products need no rounding
LOADED = ["nano-llama-MXFP6-E2M3", "nano-llama-INT4-sym-g32", "nano-llama-UINT4-asym-g32-order"]
LOADED += ["nano-llama-INT8-W8A8", "nano-llama-MIXED-fp8-mxfp4", "nano-llama-FP8-PTPC"]


def logits(folder, ids):
    model = quantload.load(folder, device="cpu", dtype=torch.float32, quantize_inputs=False)
    with torch.no_grad():
        return model(ids).logits.double()


def relative(found, expected):
    return float((found - expected.double()).norm() / expected.double().norm())


@needs_shared
@pytest.mark.parametrize("name", LOADED)
def test_logits(name):
    expected = load_file(TOOL / name / "expected.safetensors")
    assert relative(logits(TOOL / name, expected["input_ids"]), expected["logits"]) < 0.02


@needs_shared
@pytest.mark.parametrize("name", EXACT)
def test_logits_are_those_of_a_plain_model_with_the_expected_weights(name, tmp_path):
    expected = load_file(TOOL / name / "expected.safetensors")
    stored = load_file(TOOL / name / "model.safetensors")
    plain = {n: t for n, t in stored.items() if t.dtype == torch.bfloat16}
    plain |= {key: tensor for key, tensor in expected.items() if key.endswith(".weight")}
    content = json.loads((TOOL / name / "config.json").read_text())
    content.pop("quantization_config")
    tiny.write(tmp_path / "plain", content, {n: t.float() for n, t in plain.items()})
    ids = expected["input_ids"]
    assert relative(logits(TOOL / name, ids), logits(tmp_path / "plain", ids)) < 1e-4


@needs_shared
def test_conversion_to_full_precision(tmp_path):
    folder = TOOL / "nano-llama-UINT4-asym-g32"
    output = converted(folder, tmp_path / "out", "dense", dtype=torch.float32)
    written = load_file(output / "model.safetensors")
    expected = load_file(folder / "expected.safetensors")
    for key in (key for key in expected if key.endswith(".weight")):
        assert torch.equal(written[key], expected[key].float())
