"""The config made from GGUF metadata; the oracle for rotary scaling is transformers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tiny_gguf import (
    HEAD_SIZE,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    LAYERS,
    VOCABULARY,
    write_tiny_gguf,
)

from quantload.errors import FormatMismatch, HeaderError, MissingTensor, UnsupportedVariant
from quantload.loader.gguf_config import build_config
from quantload.loader.gguf_header import read_header


def config_of(tmp_path, **options):
    file = tmp_path / "model.gguf"
    write_tiny_gguf(file, **options)
    return build_config(read_header(file), file)


def test_llama_config(tmp_path):
    ids = {
        "tokenizer.ggml.bos_token_id": 3,
        "tokenizer.ggml.eos_token_id": 4,
        "tokenizer.ggml.padding_token_id": 5,
    }
    assert config_of(tmp_path, metadata=ids) == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "dtype": "float32",
        "bos_token_id": 3,
        "eos_token_id": 4,
        "pad_token_id": 5,
        "attention_bias": False,
        "mlp_bias": False,
    }


@pytest.mark.parametrize(
    ("architecture", "class_name"),
    [("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM")],
)
def test_qwen_configs(tmp_path, architecture, class_name):
    config = config_of(tmp_path, architecture=architecture, tied=True)
    assert config["architectures"] == [class_name]
    assert config["tie_word_embeddings"] is True
    assert "mlp_bias" not in config
    assert config.get("attention_bias", False) is False


def test_biases_and_head_count_are_found(tmp_path):
    config = config_of(tmp_path, biases=True, metadata={"attention.head_count_kv": None})
    assert config["attention_bias"] is True
    assert config["mlp_bias"] is True
    assert config["num_key_value_heads"] == HEADS


def test_head_size_is_the_key_length(tmp_path):
    config = config_of(
        tmp_path, metadata={"attention.key_length": 32, "attention.value_length": 32}
    )
    assert config["head_dim"] == 32


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"weight_type": "F32"}, "float32"),
        ({"weight_type": "F16"}, "float16"),
        ({"weight_type": "BF16"}, "bfloat16"),
        ({"weight_type": "Q8_0"}, "bfloat16"),
        ({"weight_type": "Q8_0", "types": {"token_embd.weight": "F16"}}, "float16"),
        ({"weight_type": "Q8_0", "types": {"token_embd.weight": "F32"}}, "bfloat16"),
        ({"weight_type": "F16", "types": {"token_embd.weight": "F32"}}, "bfloat16"),
    ],
)
def test_dtype_follows_the_float_weights(tmp_path, options, dtype):
    assert config_of(tmp_path, **options)["dtype"] == dtype


def test_token_ids_without_metadata(tmp_path):
    config = config_of(tmp_path, metadata={"tokenizer.ggml.model": "gpt2"})
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (None,) * 3
    config = config_of(tmp_path, metadata={"tokenizer.ggml.model": "llama"})
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, None)


# -- rotary embedding ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"rope.freq_base": None}, {"rope_type": "default", "rope_theta": 10000.0}),
        ({"rope.freq_base": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {"rope_type": "default"}),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 1.0}, {"rope_type": "default"}),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        ({"rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 32,
                "rope.scaling.finetuned": True,
                "rope.scaling.attn_factor": 1.0,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
    ],
)
def test_rotary_metadata(tmp_path, metadata, expected):
    rope = config_of(tmp_path, metadata=metadata)["rope_parameters"]
    assert rope == {"rope_theta": 10000.0} | expected


def llama3_factors(factor=8.0, theta=10000.0, high=4.0):
    """The table of llama.cpp's converter, in plain Python."""
    table = []
    for index in range(0, HEAD_SIZE, 2):
        wavelength = 2 * math.pi * theta ** (index / HEAD_SIZE)
        if wavelength < 8192 / high:
            table.append(1.0)
        elif wavelength > 8192:
            table.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (high - 1)
            table.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(table, dtype=np.float32)


@pytest.mark.parametrize(("factor", "theta"), [(8.0, 10000.0), (32.0, 5e5), (8.0, 1e5)])
def test_llama3_scaling_is_recognised(tmp_path, factor, theta):
    rope = config_of(
        tmp_path,
        metadata={"rope.freq_base": theta},
        extra={"rope_freqs.weight": llama3_factors(factor, theta)},
    )["rope_parameters"]
    assert rope == {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_llama3_scaling_means_the_same_to_transformers(tmp_path):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    factors = llama3_factors()
    metadata = {"context_length": 131072}
    config = config_of(tmp_path, metadata=metadata, extra={"rope_freqs.weight": factors})
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**config), torch.device("cpu"))
    plain = 1e4 ** (-torch.arange(0, HEAD_SIZE, 2) / HEAD_SIZE)
    assert len(set(factors.tolist())) == 3  # some kept, some stretched, one between
    torch.testing.assert_close(theirs, plain / torch.from_numpy(factors), rtol=1e-5, atol=0)


def test_factors_of_one_change_nothing(tmp_path):
    ones = np.ones(HEAD_SIZE // 2, dtype=np.float32)
    rope = config_of(tmp_path, extra={"rope_freqs.weight": ones})["rope_parameters"]
    assert rope == {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("factors", "metadata"),
    [
        (llama3_factors(high=2.0), {}),
        (llama3_factors(theta=1e6), {}),
        (llama3_factors()[:-1], {}),
        (llama3_factors(), {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}),
    ],
)
def test_other_factors_are_refused(tmp_path, factors, metadata):
    with pytest.raises(UnsupportedVariant, match=r"`rope_freqs\.weight` is not the rotary scaling"):
        config_of(tmp_path, extra={"rope_freqs.weight": factors}, metadata=metadata)


def test_factors_of_another_type_are_refused(tmp_path):
    extra = {"rope_freqs.weight": llama3_factors().astype(np.float16)}
    with pytest.raises(UnsupportedVariant, match="has type `F16`, expected `F32`"):
        config_of(tmp_path, extra=extra)


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "error", "words"),
    [
        ({"block_count": None}, HeaderError, "`llama.block_count` is missing"),
        (
            {"block_count": 0},
            HeaderError,
            "`llama.block_count` is `0`, expected a positive integer",
        ),
        ({"block_count": "2"}, HeaderError, "expected a positive integer"),
        ({"rope.freq_base": "high"}, HeaderError, "`llama.rope.freq_base` is `high`"),
        ({"rope.freq_base": math.inf}, HeaderError, "expected a number"),
        (
            {"attention.head_count_kv": [2, 1]},
            UnsupportedVariant,
            "`llama.attention.head_count_kv` differs from layer to layer",
        ),
        ({"expert_count": 8}, UnsupportedVariant, "a mixture of experts is not read"),
        ({"attention.head_count_kv": 3}, HeaderError, "`4` heads of queries and `3` of keys"),
        (
            {"attention.layer_norm_epsilon": 1e-6},
            FormatMismatch,
            "`llama.attention.layer_norm_rms_epsilon` and .* differ",
        ),
        ({"attention.causal": False}, UnsupportedVariant, "attention in both directions"),
        ({"rope.dimension_count": 8}, UnsupportedVariant, "rotation of a part of `16`"),
        ({"attention.value_length": 8}, UnsupportedVariant, "a value size that is not `16`"),
        (
            {"rope.scaling.type": "longrope", "rope.scaling.factor": 4.0},
            UnsupportedVariant,
            "is `longrope`, expected `none`, `linear` or `yarn`",
        ),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.attn_factor": 2.0,
            },
            UnsupportedVariant,
            "a factor on attention is not read",
        ),
        (
            {"logit_scale": 2.0, "attention.sliding_window": 64},
            UnsupportedVariant,
            r"not understood: `llama\.attention\.sliding_window`, `llama\.logit_scale`",
        ),
        ({"vocab_size": 50}, FormatMismatch, "a vocabulary of `50`, but tensor"),
        (
            {"tokenizer.ggml.eos_token_id": VOCABULARY},
            FormatMismatch,
            "id of the `eos` token is `48`, expected less than the vocabulary of `48`",
        ),
        ({"tokenizer.ggml.bos_token_id": "one"}, HeaderError, "is `one`, expected a token id"),
    ],
)
def test_refusals(tmp_path, metadata, error, words):
    with pytest.raises(error, match=words) as caught:
        config_of(tmp_path, metadata=metadata)
    assert "model.gguf" in str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "words"),
    [
        (
            "command-r",
            "`command-r` is not read, expected one of `bloom`, `falcon`, `gemma`",
        ),
        ("deci", "`deci` is not read: transformers has no model class for it, expected"),
        ("llama with experts", "architecture `llama with experts` is not read"),
    ],
)
def test_other_architectures_are_refused(tmp_path, architecture, words):
    with pytest.raises(UnsupportedVariant, match=words) as caught:
        config_of(tmp_path, architecture=architecture)
    assert "`t5encoder`" in str(caught.value)
    assert "t5 with" not in str(caught.value)


def test_experts_are_refused_where_the_architecture_has_none(tmp_path):
    with pytest.raises(UnsupportedVariant, match=r"`qwen2\.expert_count` is `8`: a mixture of"):
        config_of(tmp_path, architecture="qwen2", metadata={"expert_count": 8})


def test_file_without_embedding_is_refused(tmp_path):
    with pytest.raises(MissingTensor, match=r"tensor `token_embd\.weight` is not in"):
        config_of(tmp_path, without=("token_embd.weight",))
