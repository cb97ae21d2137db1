"""GGUF blocks in safetensors; the oracle is `gguf.quants`, which packs and unpacks blocks."""

import gguf
import numpy as np
import pytest
import torch
from faults import silent_faults
from int_packing import memory_checkpoint, quantized_llama
from truth import CHECKPOINTS, read_named, truths

from quantload.errors import FormatMismatch, NonFiniteWeight, UnsupportedVariant
from quantload.loader.formats import open_source
from quantload.loader.open import open_checkpoint

CONFIG = {"quant_method": "gguf", "bits": 4, "format": "q_k_m", "checkpoint_format": "q_k_m"}
TYPES = {
    "Q4_0": (4, "q_0"),
    "Q8_0": (8, "q_0"),
    "Q4_K": (4, "q_k_s"),
    "Q5_K": (5, "q_k"),
    "Q6_K": (6, "q_k"),
}
MODEL = {"hidden_size": 64, "intermediate_size": 300, "num_attention_heads": 4, "head_dim": 24}


def blocks(kind, rows, columns, *, seed=0):
    """Rows of random blocks, filled up to whole ones, and their values [N, K]."""
    number = gguf.GGMLQuantizationType[kind]
    size, num_bytes = gguf.GGML_QUANT_SIZES[number]
    shape = (rows, -(-columns // size) * num_bytes)
    # bytes below 0x78: float16 scales stay finite wherever they lie in a block
    raw = np.random.default_rng(seed).integers(0, 0x78, shape, dtype=np.uint8)
    return torch.from_numpy(raw), torch.from_numpy(gguf.quants.dequantize(raw, number))[:, :columns]


def opened(tensors, config=None, **model):
    return open_source(memory_checkpoint(tensors, config or CONFIG, config={**MODEL, **model}))


def values(source, module):
    return source.read_dense(module)


@pytest.mark.parametrize("kind", TYPES)
def test_values(tmp_path, kind):
    bits, name = TYPES[kind]

    def pack(module, rows, columns):
        raw, expected = blocks(kind, rows, columns, seed=sum(module.encode()))
        return {"qweight": raw}, expected

    config = {"quant_method": "gguf", "bits": bits, "format": name}
    expected = quantized_llama(tmp_path / "m", pack, config)
    source = open_source(open_checkpoint(tmp_path / "m"))
    assert source.format_name == "gptqmodel-gguf"
    assert {m for m, w in source.weights.items() if w.is_quantized} == expected.keys()
    for module, value in expected.items():
        assert torch.equal(values(source, module), value), module
        assert source.weights[module].encoding == kind


@pytest.mark.parametrize(
    ("module", "columns"),
    [
        ("model.layers.0.self_attn.k_proj", 64),
        ("model.layers.0.self_attn.o_proj", 96),
        ("model.layers.0.mlp.down_proj", 300),
        ("model.layers.0.mlp.experts.3.down_proj", 40),
        ("model.layers.0.mlp.shared_expert.down_proj", 72),
        ("model.layers.0.mlp.experts.3.gate_proj", 64),
        ("lm_head", 64),
    ],
)
def test_true_lengths_of_rows(module, columns):
    raw, expected = blocks("Q4_K", 8, columns)
    sizes = {"moe_intermediate_size": 40, "shared_expert_intermediate_size": 72}
    source = opened({f"{module}.qweight": raw}, **sizes)
    assert source.weights[module].shape == (8, columns)
    assert torch.equal(values(source, module), expected)


def test_sizes_of_a_text_config_come_first():
    raw, expected = blocks("Q4_K", 8, 70)
    module = "model.language_model.layers.0.self_attn.q_proj"
    source = opened({f"{module}.qweight": raw}, text_config={"hidden_size": 70})
    assert torch.equal(values(source, module), expected)


def test_names_that_tell_no_length():
    raw, _ = blocks("Q4_K", 8, 64)
    with pytest.raises(UnsupportedVariant, match="has up to 256 input features"):
        opened({"model.layers.0.fc1.qweight": raw})
    raw, expected = blocks("Q8_0", 8, 64)
    config = {**CONFIG, "bits": 8, "checkpoint_format": "q_0"}
    source = opened({"model.layers.0.fc1.qweight": raw}, config)
    assert torch.equal(values(source, "model.layers.0.fc1"), expected)


def test_rules():
    four, expected = blocks("Q4_K", 8, 64)
    eight, others = blocks("Q8_0", 8, 64)
    rules = {r".*k_proj": {"bits": 8, "checkpoint_format": "q_0"}, "-:.*v_proj": {}}
    tensors = {
        "model.layers.0.q_proj.qweight": four,
        "model.layers.0.k_proj.qweight": eight,
        "model.layers.0.v_proj.weight": torch.zeros(8, 64),
    }
    source = opened(tensors, {**CONFIG, "dynamic": rules})
    assert torch.equal(values(source, "model.layers.0.q_proj"), expected)
    assert torch.equal(values(source, "model.layers.0.k_proj"), others)
    assert not source.weights["model.layers.0.v_proj"].is_quantized
    assert not source.warnings


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bits": 1, "checkpoint_format": "q_0"}, "`bits` `1` in format `q_0`"),
        ({"bits": None}, "`bits` `None`"),
        ({"bits": "4"}, "`bits` `4`"),
        ({"checkpoint_format": "iq_xs"}, "format `iq_xs`"),
        ({"checkpoint_format": None, "format": None}, "format `none`"),
        ({"dynamic": {"a": {"bits": 2}}}, "`bits` `2`"),
    ],
)
def test_types_that_are_not_read(config, message):
    with pytest.raises(UnsupportedVariant, match=message):
        opened({}, {**CONFIG, **config})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qweight": torch.zeros(8, 143, dtype=torch.uint8)}, "rows of blocks of 144 bytes"),
        ({"qweight": torch.zeros(8, 288, dtype=torch.uint8)}, "holds 512 columns, expected 64"),
        ({"qweight": torch.zeros(144, dtype=torch.uint8)}, "rows of blocks of 144 bytes"),
        ({"qweight": torch.zeros(8, 144, dtype=torch.int8)}, "is `torch.int8`"),
        ({"weight": torch.zeros(8, 64)}, "has both `weight` and `qweight`"),
    ],
)
def test_headers_that_do_not_fit(change, message):
    parts = {"qweight": blocks("Q4_K", 8, 64)[0], **change}
    with pytest.raises(FormatMismatch, match=message):
        opened({f"model.layers.0.q_proj.{leaf}": tensor for leaf, tensor in parts.items()})


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_scales_that_are_no_numbers(kind):
    raw, _ = blocks(kind, 8, 64)
    raw[3, :2] = torch.tensor([0x00, 0x7E], dtype=torch.uint8)  # NaN
    bits, name = TYPES[kind]
    source = opened({"lm_head.qweight": raw}, {**CONFIG, "bits": bits, "checkpoint_format": name})
    with pytest.raises(NonFiniteWeight, match=r"tensor `lm_head.qweight`"):
        values(source, "lm_head")


def test_faults_never_go_unnoticed(tmp_path):
    def pack(module, rows, columns):
        raw, expected = blocks("Q4_K", rows, columns)
        return {"qweight": raw}, expected

    def keep_one(tensors, _):
        for name in [n for n in tensors if ".layers." in n and ".up_proj." not in n]:
            del tensors[name]

    quantized_llama(tmp_path / "m", pack, CONFIG, change=keep_one)
    # Headers tell only how many columns there are: fewer rows, or another name, make a smaller
    # model, which is found when the model is built.
    kinds = ("truncate", "delete", "rename")
    assert silent_faults(tmp_path / "m", tmp_path / "faults", without=kinds) == {}


@pytest.mark.skipif(not CHECKPOINTS.is_dir(), reason="no folder shared/checkpoints")
def test_rows_are_in_the_order_of_transformers():
    for truth in truths("gptqmodel-*/*gguf*"):
        source = open_source(open_checkpoint(truth.folder))
        key = next(key for key in truth.weights if "q_proj" in key)
        assert truth.difference(key, read_named(source, key.partition("@")[0])) == ""


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_rows_of_canonical_types_end_at_their_true_length(kind):
    raw, expected = blocks(kind, 8, 60)
    bits, name = TYPES[kind]
    config = {**CONFIG, "bits": bits, "checkpoint_format": name}
    source = opened({"model.layers.0.mlp.up_proj.qweight": raw}, config, hidden_size=60)
    assert torch.equal(values(source, "model.layers.0.mlp.up_proj"), expected)
