"""AWQ checkpoints on disk: tiny ones packed field by field, and those that the tools wrote."""

import json

import numpy as np
import pytest
import tiny_checkpoints
import torch
from faults import silent_faults
from int_packing import awq_tensors, memory_checkpoint, quantized_llama, random_parts, values_of
from loading import logits_errors
from transformers import AutoConfig, AutoModelForCausalLM
from truth import CHECKPOINTS

import quantload
from quantload.errors import CheckpointError, FormatMismatch, NonFiniteWeight, UnsupportedVariant
from quantload.loader.formats import open_source
from quantload.loader.open import open_checkpoint

CONFIG = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 32,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": None,
}


def packer(*, bits=4, group_size=32, symmetric=False, kind="gemm"):
    """What `quantized_llama` calls for each linear layer."""

    def pack(module, rows, columns):
        groups = np.arange(columns) // (columns if group_size == -1 else group_size)
        seed = sum(module.encode())
        fields, zeros, scales = random_parts(rows, columns, groups[-1] + 1, bits, seed=seed)
        if symmetric:
            zeros[:] = 1 << (bits - 1)
        leaves = awq_tensors(fields, zeros, scales, bits=bits, kind=kind, padded_groups=32)
        if kind != "gemv_fast":
            return leaves, values_of(fields, zeros, scales, groups, torch.float16)
        offsets = -(scales.float() * torch.tensor(zeros)).half().float()
        exact = torch.tensor(fields) * scales.float()[:, groups] + offsets[:, groups]
        return leaves, exact.half()

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
        ({}, {"version": "GEMM"}),
        ({}, {"version": "exllama"}),
        ({}, {"version": None}),
        ({}, {"version": "gemm", "format": "gemm", "checkpoint_format": "gemm"}),
        ({"bits": 7}, {"bits": 7}),
        ({"bits": 8}, {"bits": 8}),
        ({"group_size": -1}, {"group_size": -1}),
        ({"symmetric": True}, {"zero_point": False}),
        ({"symmetric": True}, {"zero_point": None, "sym": True}),
        ({}, {"zero_point": None}),
        ({"kind": "gemv"}, {"version": "gemv"}),
        ({"kind": "gemv"}, {"version": None}),
        ({"kind": "gemv_fast"}, {"version": "gemv_fast"}),
        ({"kind": "gemv_fast"}, {"version": "llm-awq"}),
        ({"kind": "gemv"}, {"version": "gemm", "backend": "llm-awq"}),
    ],
    ids=str,
)
def test_values(tmp_path, how, config):
    values = quantized_llama(tmp_path / "m", packer(**how), {**CONFIG, **config})
    source = opened(tmp_path / "m")
    assert source.format_name == "awq"
    check_values(source, values)


@pytest.mark.parametrize("file", ["quant_config.json", "quantize_config.json"])
def test_config_in_a_file_of_its_own(tmp_path, file):
    values = quantized_llama(tmp_path / "m", packer(), None)
    config = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    (tmp_path / "m" / file).write_text(json.dumps(config))
    check_values(opened(tmp_path / "m"), values)


def test_a_list_of_parts_of_names(tmp_path):
    """Layer 1 is left out; layers 10 to 19 are not, although its name is in theirs."""

    def unpack(tensors, _):
        for name in [n for n in tensors if n.startswith("model.layers.1.") and "_proj" in n]:
            shape = tensors.pop(name).shape
            if name.endswith(".qweight"):
                plain = name.removesuffix("qweight") + "weight"
                tensors[plain] = torch.zeros(shape[1] * 8, shape[0])

    config = {**CONFIG, "modules_to_not_convert": ["model.layers.1", "lm_head"]}
    values = quantized_llama(tmp_path / "m", packer(), config, layers=11, change=unpack)
    values = {m: v for m, v in values.items() if not m.startswith("model.layers.1.")}
    source = opened(tmp_path / "m")
    check_values(source, values)
    assert source.weights["model.layers.1.mlp.up_proj"].encoding == "F32"
    assert any(text.startswith("7 modules are quantized") for text in source.warnings)
    tenth = source.weights["model.layers.10.mlp.up_proj"]
    assert tenth.decided_by == "modules_to_not_convert: model.layers.1"


def test_dynamic_rules(tmp_path):
    def pack(module, rows, columns):
        return packer(bits=8 if module.endswith("v_proj") else 4)(module, rows, columns)

    config = {**CONFIG, "dynamic": {".*v_proj": {"bits": 8}, "-:lm_head": {}}}
    values = quantized_llama(tmp_path / "m", pack, config)
    source = opened(tmp_path / "m")
    check_values(source, values)
    assert source.weights["lm_head"].scheme is None


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"bits": None}, FormatMismatch, "`bits` is missing"),
        ({"bits": "4"}, FormatMismatch, "`bits` is `'4'`"),
        ({"bits": 9}, UnsupportedVariant, "`bits` is `9`"),
        ({"bits": 8}, FormatMismatch, "the config says `gemm`, 8 bits"),
        ({"group_size": 0}, FormatMismatch, "`group_size` is `0`"),
        ({"group_size": None}, FormatMismatch, "`group_size` is missing"),
        ({"group_size": 64}, FormatMismatch, "groups of 64"),
        ({"zero_point": "no"}, FormatMismatch, "`zero_point` is `'no'`"),
        ({"version": "marlin"}, UnsupportedVariant, "AWQ version `marlin` is not read"),
        ({"version": 3}, UnsupportedVariant, "AWQ version `3` is not read"),
        ({"version": "gemv"}, FormatMismatch, "`gemv`"),
        ({"version": "gemv_fast"}, FormatMismatch, "is `torch.int32`, expected `torch.int16`"),
        ({"modules_to_not_convert": "lm_head"}, FormatMismatch, "expected a list of names"),
        ({"modules_to_not_convert": [1]}, FormatMismatch, "expected a list of names"),
        ({"dynamic": {"(": {}}}, FormatMismatch, "no regular expression"),
        ({"dynamic": {"a": {"bits": 1}}}, UnsupportedVariant, "`bits` is `1`"),
    ],
)
def test_configs_that_make_no_sense(tmp_path, change, error, message):
    quantized_llama(tmp_path / "m", packer(), {**CONFIG, **change})
    with pytest.raises(error, match=message) as caught:
        opened(tmp_path / "m")
    assert str(tmp_path / "m") in str(caught.value)


# -- scaled activations --------------------------------------------------------------------------


def block(*, act="transformer.h.0.mlp.act", hidden=32, inner=64, divisors=64):
    """A block of two linear layers around an activation with scales."""
    tensors, values = {}, {}
    for name, rows, columns in (("c_fc", inner, hidden), ("c_proj", hidden, inner)):
        module = f"transformer.h.0.mlp.{name}"
        leaves, values[module] = packer()(module, rows, columns)
        tensors |= {f"{module}.{leaf}": tensor for leaf, tensor in leaves.items()}
    tensors[f"{act}.scales"] = torch.rand(divisors).half() + 0.5
    return tensors, values


def test_a_scaled_activation_divides_the_inputs_of_the_layer_that_takes_it():
    tensors, values = block()
    source = open_source(memory_checkpoint(tensors, CONFIG))
    scales = tensors["transformer.h.0.mlp.act.scales"]
    found = source.read_weight("transformer.h.0.mlp.c_proj")
    assert torch.equal(found.inner, scales)
    expected = values["transformer.h.0.mlp.c_proj"] / scales
    assert torch.equal(found.dequantize(), expected)
    assert source.read_weight("transformer.h.0.mlp.c_fc").inner is None
    assert source.plain == {}


@pytest.mark.parametrize(
    "options",
    [
        {"hidden": 64},  # both layers take as many features
        {"divisors": 63},
        {"act": "transformer.h.0.act"},
        {"act": "transformer.h.1.mlp.act"},
    ],
)
def test_a_scaled_activation_without_a_clear_taker_is_refused(options):
    tensors, _ = block(**options)
    with pytest.raises(UnsupportedVariant, match="scales an activation"):
        open_source(memory_checkpoint(tensors, CONFIG))


def test_a_scaled_activation_before_a_layer_in_full_precision_is_refused():
    tensors, _ = block()
    for leaf in ("qweight", "qzeros", "scales"):
        del tensors[f"transformer.h.0.mlp.c_proj.{leaf}"]
    tensors["transformer.h.0.mlp.c_proj.weight"] = torch.zeros(32, 64)
    with pytest.raises(UnsupportedVariant, match="scales an activation"):
        open_source(memory_checkpoint(tensors, CONFIG))


def test_two_scaled_activations_of_one_layer_are_refused():
    tensors, _ = block()
    tensors["transformer.h.0.mlp.gelu.scales"] = torch.ones(64)
    with pytest.raises(UnsupportedVariant, match="scales an activation"):
        open_source(memory_checkpoint(tensors, CONFIG))


@pytest.mark.parametrize(
    ("value", "error"), [(0.0, FormatMismatch), (float("nan"), NonFiniteWeight)]
)
def test_divisors_that_divide_nothing(value, error):
    tensors, _ = block()
    tensors["transformer.h.0.mlp.act.scales"][7] = value
    source = open_source(memory_checkpoint(tensors, CONFIG))
    with pytest.raises(error, match=r"tensor `transformer.h.0.mlp.act.scales` holds"):
        source.read_weight("transformer.h.0.mlp.c_proj")


# -- Quark's names -------------------------------------------------------------------------------


def all_qweight(tensors, _):
    for name in [n for n in tensors if n.endswith(".weight")]:
        tensors[name.removesuffix("weight") + "qweight"] = tensors.pop(name)


def test_weights_that_are_all_called_qweight(tmp_path):
    values = quantized_llama(tmp_path / "m", packer(), CONFIG, change=all_qweight)
    source = opened(tmp_path / "m")
    check_values(source, values)
    assert "model.norm.weight" in source.plain
    assert source.weights["lm_head"].leaves == {"weight": "lm_head.weight"}
    assert not any(name.endswith("norm.qweight") for name in source.checkpoint.tensors)


def test_a_weight_under_both_names(tmp_path):
    def add(tensors, _):
        tensors["model.norm.qweight"] = torch.zeros(64)

    quantized_llama(tmp_path / "m", packer(), CONFIG, change=add)
    with pytest.raises(CheckpointError, match=r"model\.norm\.qweight"):
        opened(tmp_path / "m")


# -- all -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gemm", "gemv", "gemv_fast"])
def test_faults_never_go_unnoticed(tmp_path, kind):
    def keep_one(tensors, _):
        for name in [n for n in tensors if ".layers." in n and ".up_proj." not in n]:
            del tensors[name]

    stated = {**CONFIG, "version": kind}
    quantized_llama(tmp_path / "m", packer(kind=kind), stated, change=keep_one)
    assert silent_faults(tmp_path / "m", tmp_path / "faults") == {}


@pytest.mark.parametrize(
    "name",
    [
        "autoawq-0.2.9/micro-llama-gemm-g64-skip",
        "gptqmodel-7.7.0/tiny-qwen3-moe-awq-gemm-g64",
        "amd-quark-0.13/nano-llama-UINT4-asym-awqmode",
    ],
)
def test_logits(name):
    folder = CHECKPOINTS / name
    if not folder.is_dir():
        pytest.skip("no folder shared/checkpoints")
    exact, rounded = logits_errors(folder)
    assert exact < 1e-4
    assert rounded < 0.02


def test_a_model_with_a_scaled_activation_runs(tmp_path):
    content = {
        "architectures": ["Starcoder2ForCausalLM"],
        "model_type": "starcoder2",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 40,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "quantization_config": CONFIG,
    }
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(**content)).float().eval()
    tensors = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    divisors = torch.rand(64) + 0.5
    with torch.no_grad():
        for name in ("c_fc", "c_proj"):
            linear = plain.model.layers[0].mlp.get_submodule(name)
            module = f"model.layers.0.mlp.{name}"
            del tensors[f"{module}.weight"]
            leaves, _ = packer()(module, *linear.weight.shape)
            tensors |= {f"{module}.{leaf}": tensor for leaf, tensor in leaves.items()}
            fields, zeros, scales = random_parts(
                *linear.weight.shape, linear.weight.shape[1] // 32, 4, seed=sum(module.encode())
            )
            groups = np.arange(linear.weight.shape[1]) // 32
            value = values_of(fields, zeros, scales, groups, torch.float16).float()
            linear.weight.copy_(value / divisors if name == "c_proj" else value)
    tensors["model.layers.0.mlp.act.scales"] = divisors
    tiny_checkpoints.write(tmp_path / "m", content, tensors)
    loaded = quantload.load(tmp_path / "m", device="cpu", dtype=torch.float32)
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        found, expected = loaded(tokens).logits, plain(tokens).logits
    assert float((found - expected).norm() / expected.norm()) < 1e-5
    with torch.no_grad():
        plain.model.layers[0].mlp.c_proj.weight.mul_(divisors)
        without = plain(tokens).logits
    assert float((found - without).norm() / without.norm()) > 1e-3
