"""GPTQ checkpoints on disk: tiny ones packed field by field, and those that GPTQModel wrote."""

import json

import numpy as np
import pytest
import torch
from faults import silent_faults
from int_packing import gptq_tensors, quantized_llama, random_parts, values_of
from loading import logits_errors
from truth import CHECKPOINTS

from quantload.errors import FormatMismatch, MissingTensor, UnsupportedVariant
from quantload.loader.formats import open_source
from quantload.loader.open import open_checkpoint

CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}


def packer(*, bits=4, group_size=32, symmetric=False, act_order=False, dtype=torch.float16, **how):
    """What `quantized_llama` calls for each linear layer."""

    def pack(module, rows, columns):
        seed = sum(module.encode())
        groups = np.arange(columns) // (columns if group_size == -1 else group_size)
        if act_order:
            groups = np.random.default_rng(seed).permutation(groups)
        fields, zeros, scales = random_parts(rows, columns, max(groups) + 1, bits, seed=seed)
        if symmetric:
            zeros[:] = 1 << (bits - 1)
        leaves = gptq_tensors(fields, zeros, scales, bits=bits, groups=groups, **how)
        return leaves, values_of(fields, zeros, scales, groups, dtype)

    return pack


def opened(folder):
    return open_source(open_checkpoint(folder))


def check_values(source, values):
    quantized = {module for module, weight in source.weights.items() if weight.is_quantized}
    assert quantized == values.keys()
    for module, expected in values.items():
        assert torch.equal(source.read_weight(module).dequantize(), expected), module


@pytest.mark.parametrize(
    ("how", "config"),
    [
        ({}, {}),
        ({"bits": 2}, {}),
        ({"bits": 3, "offset": 0}, {"checkpoint_format": "gptq_v2"}),
        ({"bits": 8, "group_size": -1}, {}),
        ({"bits": 5, "planar": True, "offset": 0}, {"format": "gptq_p"}),
        ({"bits": 3, "planar": True, "offset": 0}, {"format": "gptq_p"}),
        ({"bits": 7, "planar": True, "symmetric": True, "offset": 0}, {"format": "gptq_p"}),
        ({"bits": 6}, {"provider": "auto-round"}),
        ({"symmetric": True}, {}),
        ({"act_order": True}, {"desc_act": True}),
        ({"bits": 2, "borrow": True}, {"meta": {"quantizer": ["gptqmodel:7.7.0"]}}),
    ],
    ids=str,
)
def test_values(tmp_path, how, config):
    stated = {
        **CONFIG,
        "bits": how.get("bits", 4),
        "group_size": how.get("group_size", 32),
        "sym": how.get("symmetric", False),
        **config,
    }
    values = quantized_llama(tmp_path / "m", packer(**how), stated)
    source = opened(tmp_path / "m")
    check_values(source, values)
    assert source.format_name == "gptq"
    order = {w.scheme.weight.act_order for w in source.weights.values() if w.is_quantized}
    assert order == {how.get("act_order", False)}


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_gptqmodel_multiplies_in_the_dtype_of_its_model(tmp_path, key):
    def rename(_, content):
        content[key] = content.pop("dtype")

    made = {**CONFIG, "meta": {"quantizer": ["gptqmodel:7.7.0"]}}
    values = quantized_llama(
        tmp_path / "m",
        packer(dtype=torch.bfloat16, borrow=True),
        made,
        dtype=torch.bfloat16,
        change=rename,
    )
    check_values(opened(tmp_path / "m"), values)
    values = quantized_llama(tmp_path / "n", packer(), CONFIG, dtype=torch.bfloat16)
    check_values(opened(tmp_path / "n"), values)


def test_columns_in_order_have_no_numbers(tmp_path):
    values = quantized_llama(tmp_path / "m", packer(), {**CONFIG, "desc_act": True})
    source = opened(tmp_path / "m")
    check_values(source, values)
    assert not any(w.scheme.weight.act_order for w in source.weights.values() if w.is_quantized)


def test_config_in_a_file_of_its_own(tmp_path):
    values = quantized_llama(tmp_path / "m", packer(), None)
    config = {key: value for key, value in CONFIG.items() if key != "quant_method"}
    (tmp_path / "m" / "quantize_config.json").write_text(json.dumps(config))
    check_values(opened(tmp_path / "m"), values)


def test_modules_with_rules_of_their_own(tmp_path):
    def pack(module, rows, columns):
        bits, group_size = (8, 64) if module.endswith("q_proj") else (4, 32)
        return packer(bits=bits, group_size=group_size)(module, rows, columns)

    def skip(tensors, _):
        for name in [n for n in tensors if ".down_proj." in n]:
            del tensors[name]
        tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(64, 128)

    rules = {"-:.*down_proj": {}, r"+:.*\.q_proj": {"bits": 8, "group_size": 64}}
    values = quantized_llama(tmp_path / "m", pack, {**CONFIG, "dynamic": rules}, change=skip)
    del values["model.layers.0.mlp.down_proj"]
    source = opened(tmp_path / "m")
    check_values(source, values)
    assert source.weights["model.layers.0.self_attn.q_proj"].decided_by.startswith("dynamic: +:")
    assert str(source.weights["model.layers.0.self_attn.k_proj"].scheme) == "W4A16_ASYM:g32"
    assert not [text for text in source.warnings if "modules" in text]


def test_quantized_although_the_config_leaves_it_out(tmp_path):
    config = {**CONFIG, "modules_in_block_to_quantize": [["q_proj", "k_proj", "v_proj"]]}
    values = quantized_llama(tmp_path / "m", packer(), config)
    source = opened(tmp_path / "m")
    check_values(source, values)
    assert any(text.startswith("4 modules are quantized") for text in source.warnings)


def test_full_precision_although_the_config_names_it(tmp_path):
    exact = {r"model\.layers\.0\.mlp\.down_proj": {"bits": 4}}

    def unpack(tensors, _):
        for leaf in ("qweight", "qzeros", "scales", "g_idx"):
            del tensors[f"model.layers.0.mlp.down_proj.{leaf}"]
        tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(64, 128)

    quantized_llama(tmp_path / "m", packer(), {**CONFIG, "dynamic": exact}, change=unpack)
    with pytest.raises(FormatMismatch, match="names modules that are not quantized"):
        opened(tmp_path / "m")
    quantized_llama(tmp_path / "n", packer(), CONFIG, change=unpack)
    assert not opened(tmp_path / "n").weights["model.layers.0.mlp.down_proj"].is_quantized


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"bits": 8}, FormatMismatch, "the config says 8 bits"),
        ({"group_size": 64}, FormatMismatch, "groups of 64"),
        ({"checkpoint_format": "marlin"}, UnsupportedVariant, "`marlin` is not read"),
    ],
)
def test_config_and_headers_disagree(tmp_path, change, error, message):
    quantized_llama(tmp_path / "m", packer(), {**CONFIG, **change})
    with pytest.raises(error, match=message):
        opened(tmp_path / "m")


def test_a_convention_that_is_labelled_wrong_is_told_once(tmp_path):
    pack = packer(symmetric=True, offset=0)
    values = quantized_llama(tmp_path / "m", pack, {**CONFIG, "sym": True})
    source = opened(tmp_path / "m")
    assert not source.warnings
    check_values(source, values)
    assert len(source.warnings) == 1
    assert "convention v2 although the config says v1" in source.warnings[0]


def test_a_missing_tensor(tmp_path):
    def drop(tensors, _):
        del tensors["model.layers.0.mlp.up_proj.scales"]

    quantized_llama(tmp_path / "m", packer(), CONFIG, change=drop)
    with pytest.raises(MissingTensor, match=r"tensor `model.layers.0.mlp.up_proj.scales`"):
        opened(tmp_path / "m")


def test_packed_codes_of_no_module(tmp_path):
    def add(tensors, _):
        tensors["model.layers.0.mlp.experts.gate_up_proj_blocks"] = torch.zeros(
            2, dtype=torch.uint8
        )

    quantized_llama(tmp_path / "m", packer(), CONFIG, change=add)
    with pytest.raises(UnsupportedVariant, match="gate_up_proj_blocks"):
        opened(tmp_path / "m")


@pytest.mark.parametrize(
    ("how", "config"),
    [({}, {}), ({"act_order": True}, {"desc_act": True}), ({"symmetric": True}, {"sym": True})],
    ids=["asymmetric", "act-order", "symmetric"],
)
def test_faults_never_go_unnoticed(tmp_path, how, config):
    def keep_one(tensors, _):
        for name in [n for n in tensors if ".layers." in n and ".up_proj." not in n]:
            del tensors[name]

    quantized_llama(tmp_path / "m", packer(**how), {**CONFIG, **config}, change=keep_one)
    assert silent_faults(tmp_path / "m", tmp_path / "faults") == {}


@pytest.mark.parametrize(
    "name",
    ["micro-llama-w3g64-asym-descact", "micro-llama-w4g64-lmhead", "tiny-qwen3-moe-w4g64"],
)
def test_logits(name):
    folder = CHECKPOINTS / "gptqmodel-7.7.0" / name
    if not folder.is_dir():
        pytest.skip("no folder shared/checkpoints")
    exact, rounded = logits_errors(folder)
    assert exact < 1e-4
    assert rounded < 0.02
