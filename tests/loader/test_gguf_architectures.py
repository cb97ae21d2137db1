"""Every architecture that is read from GGUF.

A model of random weights is written as llama.cpp's converter does it and read again. The oracles:
the model itself, for names, values, config and logits; and transformers' own GGUF loader.
"""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf_converter import gguf_tensors, hub_tensors, write_as_gguf
from safetensors.torch import save_file
from versions import IS_OLD

from quantload.errors import MissingTensor, UnexpectedTensor, UnsupportedVariant
from quantload.loader.formats.gguf import GgufReader
from quantload.loader.gguf_architectures import ARCHITECTURES
from quantload.loader.gguf_file import open_gguf
from quantload.loader.source import as_parameter
from quantload.quant.qtensor import QuantTensor

VOCABULARY = 48
BASE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
BIASES = {"attention_bias": True, "mlp_bias": True}
HEAD_32 = BASE | {"head_dim": 32}
MOE = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_MOE = {"num_local_experts": 3, "num_experts_per_tok": 2}
T5 = {
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
FALCON = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
QWEN35 = HEAD_32 | {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e5,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 32,
}
GEMMA4 = BASE | {
    "num_hidden_layers": 6,
    "head_dim": 16,
    "global_head_dim": 32,
    "vocab_size_per_layer_input": 48,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
}
EXPERTS = {"num_experts": 3, "top_k_experts": 2, "moe_intermediate_size": 32}
WIDE = {"use_double_wide_mlp": True}
THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}
# name: (architecture, model class, config)
CASES = {
    "llama": ("llama", "LlamaForCausalLM", BASE | THETA),
    "llama-biases": (
        "llama",
        "LlamaForCausalLM",
        BASE | {"attention_bias": True, "mlp_bias": True},
    ),
    "mixtral": ("llama", "MixtralForCausalLM", HEAD_32 | LOCAL_MOE),
    "qwen2": ("qwen2", "Qwen2ForCausalLM", BASE | {"tie_word_embeddings": True}),
    "qwen2-moe": (
        "qwen2moe",
        "Qwen2MoeForCausalLM",
        BASE | MOE | {"shared_expert_intermediate_size": 64},
    ),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", HEAD_32),
    "qwen3-moe": ("qwen3moe", "Qwen3MoeForCausalLM", HEAD_32 | MOE | {"norm_topk_prob": True}),
    "qwen3.5": ("qwen35", "Qwen3_5ForCausalLM", QWEN35),
    "qwen3.5-moe": (
        "qwen35moe",
        "Qwen3_5MoeForCausalLM",
        QWEN35 | MOE | {"shared_expert_intermediate_size": 64},
    ),
    "gemma": ("gemma", "GemmaForCausalLM", HEAD_32),
    "gemma2": ("gemma2", "Gemma2ForCausalLM", HEAD_32 | {"sliding_window": 8}),
    "gemma3": (
        "gemma3",
        "Gemma3ForCausalLM",
        HEAD_32 | {"sliding_window": 8, "num_hidden_layers": 7},
    ),
    "gemma4": (
        "gemma4",
        "Gemma4ForCausalLM",
        GEMMA4 | {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2} | WIDE,
    ),
    "gemma4-keys": (
        "gemma4",
        "Gemma4ForCausalLM",
        GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "gemma4-moe": (
        "gemma4",
        "Gemma4ForCausalLM",
        GEMMA4 | EXPERTS | {"enable_moe_block": True},
    ),
    "gpt-oss": (
        "gpt-oss",
        "GptOssForCausalLM",
        HEAD_32 | LOCAL_MOE | {"sliding_window": 8, "rope_parameters": YARN},
    ),
    "minimax-m2": ("minimax-m2", "MiniMaxM2ForCausalLM", HEAD_32 | LOCAL_MOE | {"rotary_dim": 8}),
    "nemotron": ("nemotron", "NemotronForCausalLM", HEAD_32),
    "phi3": ("phi3", "Phi3ForCausalLM", BASE | {"sliding_window": 16}),
    "stablelm": ("stablelm", "StableLmForCausalLM", BASE | {"use_parallel_residual": True}),
    "stablelm-norms": (
        "stablelm",
        "StableLmForCausalLM",
        BASE | {"qk_layernorm": True, "use_qkv_bias": True},
    ),
    "starcoder2": ("starcoder2", "Starcoder2ForCausalLM", BASE | THETA),
    "bloom": ("bloom", "BloomForCausalLM", {"hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "falcon": ("falcon", "FalconForCausalLM", FALCON | {"num_kv_heads": 1}),
    "falcon-groups": (
        "falcon",
        "FalconForCausalLM",
        FALCON | {"num_kv_heads": 2, "new_decoder_architecture": True, "multi_query": False},
    ),
    "gpt2": (
        "gpt2",
        "GPT2LMHeadModel",
        {"n_embd": 64, "n_inner": 256, "n_layer": 2, "n_head": 4, "n_positions": 128},
    ),
    "lfm2": (
        "lfm2",
        "Lfm2ForCausalLM",
        BASE | {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    ),
    "mamba": (
        "mamba",
        "MambaForCausalLM",
        {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8, "time_step_rank": 4},
    ),
    "t5": ("t5", "T5ForConditionalGeneration", T5 | {"num_decoder_layers": 3}),
    "t5-gated": ("t5", "T5ForConditionalGeneration", T5 | {"feed_forward_proj": "gated-gelu"}),
    "umt5": ("t5", "UMT5ForConditionalGeneration", T5 | {"feed_forward_proj": "gated-gelu"}),
    "t5-encoder": ("t5encoder", "T5EncoderModel", T5 | {"feed_forward_proj": "gated-gelu"}),
    "umt5-encoder": ("t5encoder", "UMT5EncoderModel", T5 | {"feed_forward_proj": "gated-gelu"}),
}
# What GGUF does not hold, and no forward pass reads or the class default is right for.
NOT_STORED = {
    *("transformers_version", "dtype", "architectures", "_name_or_path", "use_cache"),
    *("initializer_range", "initializer_factor", "pad_token_id"),
}
NOT_STORED_IN = {
    "qwen2": {"head_dim"},  # the class has none, its model code reads it all the same
    "qwen2-moe": {"head_dim"},
    "t5-encoder": {"decoder_start_token_id", "is_encoder_decoder"},
    "umt5-encoder": {"decoder_start_token_id", "is_encoder_decoder"},
    "minimax-m2": {"scoring_func", "use_routing_bias", "use_qk_norm", "qk_norm_type"},
}
# Why transformers 5.24 is no oracle: it cannot read such a file, or reads it wrongly.
NOT_READ_BY_TRANSFORMERS = {
    "gemma4": "it takes sizes of the class for those that differ from layer to layer",
    "gemma4-keys": "as gemma4",
    "gemma4-moe": "as gemma4",
    "gemma": "it does not map the architecture",
    "mixtral": "it makes a dense llama of it",
    "gpt-oss": "it fails on the metadata of yarn, and looks for experts under other names",
    "falcon-groups": "it leaves rows of q, k, v in the order of the file",
    "stablelm-norms": "it does not read the norms of heads",
    "t5": "it looks for a gate in every model, and counts layers of the encoder in the decoder",
}
NEWER = ("minimax-m2", "qwen3.5", "qwen3.5-moe")
# Config entries that transformers leaves at the default of the class; the weights are an oracle.
CONFIG_IS_LOST = {
    "llama-biases": "biases",
    "qwen2-moe": "width of experts",
    "qwen3": "size of a head",
    "qwen3-moe": "width of experts",
    "starcoder2": "tie of the head",
    "gpt2": "number of positions",
    "nemotron": "size of a head",
    "phi3": "padding token",
    "t5-encoder": "kind of feed-forward layer",
}


@pytest.fixture(scope="module")
def models():
    """Random models by the name of their case, made once."""
    made = {}

    def get(case):
        if IS_OLD and case in NEWER:
            pytest.skip("transformers before 5.24 does not have it, or not its GGUF")
        if case not in made:
            _, class_name, options = CASES[case]
            model_class = getattr(transformers, class_name)
            options = options | {"vocab_size": VOCABULARY, "bos_token_id": None}
            options |= {"eos_token_id": None}
            options |= {} if "d_model" in options else {"pad_token_id": None}
            torch.manual_seed(0)
            model = model_class(model_class.config_class(**options)).float().eval()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.normal_(0, 0.2)
                    parameter.add_(1.0 if parameter.ndim == 1 and "norm" in name else 0.0)
            made[case] = model
        return made[case]

    return get


def tensors_of(checkpoint):
    """Return all tensors in full precision, as a checkpoint on the hub has them."""
    reader = GgufReader(checkpoint)
    found, used = {}, set()
    for weight in reader.weights().values():
        value = reader.decode(weight)
        value = value.dequantize() if isinstance(value, QuantTensor) else value
        assert value.dtype == weight.dtype
        found[weight.parameter_name] = as_parameter(value, weight).contiguous()
        used.update(weight.leaves.values())
    for name, entry in checkpoint.tensors.items():
        if name not in used:
            found[name] = checkpoint.read(name)
            assert found[name].shape == entry.shape
    return found


def loaded_from(checkpoint, folder, model):
    """Let transformers load what was read as if it came from the hub."""
    folder.mkdir()
    save_file(tensors_of(checkpoint), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(checkpoint.config))
    return type(model).from_pretrained(folder, dtype=torch.float32).eval()


def outputs(model):
    ids = torch.arange(24)[None] % VOCABULARY
    kwargs = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    if type(model).__name__.endswith("EncoderModel"):
        kwargs = {}
    with torch.no_grad():
        return model(input_ids=ids, **kwargs)[0]


@pytest.mark.parametrize("case", CASES)
def test_names_values_and_config_are_those_of_the_model(tmp_path, models, case):
    model = models(case)
    write_as_gguf(model, tmp_path / "m.gguf", CASES[case][0])
    checkpoint = open_gguf(tmp_path / "m.gguf")
    found, expected = tensors_of(checkpoint), hub_tensors(model)
    assert set(found) == set(expected)
    for name, values in expected.items():
        # w + 1 - 1 and log(exp(w)) lose the last bits, as they do in every reader
        is_exact = not name.endswith(("norm.weight", "A_log"))
        if is_exact:
            assert torch.equal(found[name], values), name
        torch.testing.assert_close(found[name], values, rtol=1e-6, atol=3e-7)
    config = type(model.config).from_dict(dict(checkpoint.config))
    assert config_of(config, case) == config_of(model.config, case)
    assert checkpoint.config["architectures"] == [CASES[case][1]]
    assert checkpoint.config["dtype"] == "float32"


def config_of(config, case):
    values = config.to_dict()
    left_out = NOT_STORED | NOT_STORED_IN.get(case, set())
    return {key: value for key, value in values.items() if key not in left_out}


@pytest.mark.parametrize("case", CASES)
def test_transformers_computes_the_same_of_what_was_read(tmp_path, models, case):
    model = models(case)
    write_as_gguf(model, tmp_path / "m.gguf", CASES[case][0])
    checkpoint = open_gguf(tmp_path / "m.gguf")
    loaded = loaded_from(checkpoint, tmp_path / "hf", model)
    assert set(loaded.state_dict()) == set(model.state_dict())
    torch.testing.assert_close(outputs(loaded), outputs(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", [case for case in CASES if case not in NOT_READ_BY_TRANSFORMERS])
@pytest.mark.parametrize("weight_type", ["F32", "Q8_0"])
def test_weights_are_those_of_transformers_gguf_loader(
    tmp_path, models, case, weight_type, monkeypatch
):
    model = models(case)
    write_as_gguf(model, tmp_path / "m.gguf", CASES[case][0], weight_type=weight_type)
    # it asks for accelerate although it needs nothing of it on one device
    with monkeypatch.context() as patch:
        patch.setattr("transformers.modeling_utils.is_accelerate_available", lambda *_: True)
        options = {"config": model.config} if case in CONFIG_IS_LOST else {}
        theirs = type(model).from_pretrained(
            tmp_path, gguf_file="m.gguf", dtype=torch.float32, **options
        )
    mine = loaded_from(open_gguf(tmp_path / "m.gguf"), tmp_path / "hf", model)
    found, expected = mine.state_dict(), theirs.state_dict()
    assert set(found) == set(expected)
    for name, values in expected.items():
        if name.endswith("A_log"):  # by NumPy in one of its loaders, by torch in the other
            torch.testing.assert_close(found[name], values, rtol=1e-6, atol=1e-7)
        else:
            assert torch.equal(found[name], values), name


def test_every_row_has_a_case():
    covered = {(architecture, class_name) for architecture, class_name, _ in CASES.values()}
    rows = {(name.split(" ")[0], row.hf_class) for name, row in ARCHITECTURES.items()}
    assert rows == covered


# -- blocks in experts, transposed and reordered weights -----------------------------------------


@pytest.mark.parametrize(
    ("case", "weight_type"),
    [
        *(("gpt-oss", weight_type) for weight_type in ("Q8_0", "Q5_1", "F16", "BF16")),
        *(("gpt2", weight_type) for weight_type in ("Q4_0", "Q8_0")),
        *(("qwen3.5", weight_type) for weight_type in ("Q8_0", "Q4_1")),
        *((case, "Q4_0") for case in ("mixtral", "qwen3-moe", "minimax-m2", "falcon-groups")),
    ],
)
def test_blocks_are_moved_as_values_are(tmp_path, models, case, weight_type):
    model = models(case)
    write_as_gguf(model, tmp_path / "m.gguf", CASES[case][0], weight_type=weight_type)
    checkpoint = open_gguf(tmp_path / "m.gguf")
    expected, found = hub_tensors(model), tensors_of(checkpoint)
    kind = gguf.GGMLQuantizationType[weight_type]
    count = 0
    for weight in GgufReader(checkpoint).weights().values():
        name = weight.parameter_name
        if weight.encoding != weight_type or "linear_attn.out_proj" in name:
            continue  # the columns of that one: see below
        axes = (-1, -2) if weight.is_transposed else (-1, -1)  # rows of blocks are output features
        rows = expected[name].transpose(*axes).contiguous().numpy()
        values = gguf.quants.dequantize(gguf.quants.quantize(rows, kind), kind)
        assert torch.equal(found[name].float(), torch.from_numpy(values).transpose(*axes)), name
        count += 1
    assert count > 8


@pytest.mark.parametrize(("value_head", "is_canonical"), [(32, True), (16, False)])
def test_columns_of_value_heads_are_put_in_order(tmp_path, models, value_head, is_canonical):
    config = type(models("qwen3.5").config)(
        **(models("qwen3.5").config.to_dict() | {"linear_value_head_dim": value_head})
    )
    torch.manual_seed(0)
    model = transformers.Qwen3_5ForCausalLM(config).float()
    write_as_gguf(model, tmp_path / "m.gguf", "qwen35", weight_type="Q8_0")
    kind = gguf.GGMLQuantizationType.Q8_0
    stored = gguf_tensors(model, "qwen35")["blk.0.ssm_out.weight"]
    stored = gguf.quants.dequantize(gguf.quants.quantize(stored, kind), kind)
    # tiled: value head 0 of key 0, 0 of key 1, 1 of key 0, 1 of key 1
    expected = np.concatenate([np.split(stored, 4, axis=1)[head] for head in (0, 2, 1, 3)], axis=1)
    reader = GgufReader(open_gguf(tmp_path / "m.gguf"))
    decoded = reader.decode(reader.weights()["model.layers.0.linear_attn.out_proj"])
    assert isinstance(decoded, QuantTensor) == is_canonical
    values = decoded.dequantize() if is_canonical else decoded
    assert np.array_equal(values.numpy(), expected)


def test_experts_are_slices_of_the_file(tmp_path, models):
    write_as_gguf(models("qwen3-moe"), tmp_path / "m.gguf", "qwen3moe", weight_type="Q8_0")
    checkpoint = open_gguf(tmp_path / "m.gguf")
    stacked = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    down = stacked["blk.1.ffn_down_exps.weight"]
    weights = GgufReader(checkpoint).weights()
    for expert in range(3):
        name = f"model.layers.1.mlp.experts.{expert}.down_proj"
        weight, entry = weights[name], checkpoint.tensors[f"{name}.weight"]
        assert (weight.shape, weight.encoding, weight.experts) == ((64, 32), "Q8_0", 0)
        assert weight.is_matrix
        assert entry.num_bytes == down.n_bytes // 3
        assert np.array_equal(checkpoint.read(entry.name).numpy(), down.data[expert])


def test_a_parameter_of_all_experts_is_described(tmp_path, models):
    write_as_gguf(models("gpt-oss"), tmp_path / "m.gguf", "gpt-oss", weight_type="Q8_0")
    reader = GgufReader(open_gguf(tmp_path / "m.gguf"))
    weight = reader.weights()["model.layers.0.mlp.experts.gate_up_proj"]
    assert weight.parameter_name == "model.layers.0.mlp.experts.gate_up_proj"
    assert (weight.shape, weight.experts, weight.is_transposed) == ((192, 64), 3, True)
    assert weight.parameter_shape == (3, 64, 192)
    decoded = reader.decode(weight)
    assert isinstance(decoded, QuantTensor)
    assert decoded.shape == (3 * 192, 64)


def test_gate_and_up_of_two_types_are_refused(tmp_path, models):
    path = tmp_path / "m.gguf"
    write_as_gguf(models("gpt-oss"), tmp_path / "first.gguf", "gpt-oss")
    rewrite(tmp_path / "first.gguf", path, "gpt-oss", {"blk.0.ffn_up_exps.weight": "F16"})
    words = (
        r"`blk\.0\.ffn_gate_exps\.weight`, `blk\.0\.ffn_up_exps\.weight` have types `F32`, `F16`"
    )
    with pytest.raises(UnsupportedVariant, match=words):
        open_gguf(path)


@pytest.mark.parametrize(
    ("case", "tensor"),
    [
        ("gpt-oss", "blk.0.ffn_gate_exps.bias"),
        ("gemma2", "blk.0.attn_norm.weight"),
        ("lfm2", "blk.0.shortconv.conv.weight"),
    ],
)
def test_blocks_where_values_are_changed_are_refused(tmp_path, models, case, tensor):
    architecture = CASES[case][0]
    options = {"conv_L_cache": 32} if case == "lfm2" else {}
    model = models(case)
    if options:
        config = type(model.config)(**(model.config.to_dict() | options))
        model = type(model)(config).float()
    write_as_gguf(model, tmp_path / "first.gguf", architecture)
    rewrite(tmp_path / "first.gguf", tmp_path / "m.gguf", architecture, {tensor: "Q8_0"})
    words = f"tensor `{tensor}` of shape .* has type `Q8_0`, expected a float type"
    with pytest.raises(UnsupportedVariant, match=words):
        open_gguf(tmp_path / "m.gguf")


def rewrite(source, target, architecture, types):
    """Copy a file with other types for some tensors."""
    from tiny_gguf import add_value

    reader, writer = gguf.GGUFReader(source), gguf.GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if field.name.startswith(f"{architecture}."):
            add_value(writer, field.name, field.contents())
    for tensor in reader.tensors:
        kind = gguf.GGMLQuantizationType[types.get(tensor.name, tensor.tensor_type.name)]
        values = gguf.quants.quantize(np.array(tensor.data), kind)
        writer.add_tensor(tensor.name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# -- what only some files have -------------------------------------------------------------------


def test_layers_that_predict_more_tokens_are_left_out(tmp_path, models):
    model = models("qwen3.5")
    extra = {"blk.2.nextn.eh_proj.weight": np.zeros((64, 128), np.float32)}
    changes = {"block_count": 3, "nextn_predict_layers": 1}
    write_as_gguf(model, tmp_path / "m.gguf", "qwen35", metadata=changes, extra=extra)
    checkpoint = open_gguf(tmp_path / "m.gguf")
    assert checkpoint.config["num_hidden_layers"] == 2
    assert checkpoint.warnings == ("1 tensors of multi-token prediction layers are left out",)
    assert set(tensors_of(checkpoint)) == set(hub_tensors(model))
    write_as_gguf(model, tmp_path / "m.gguf", "qwen35", extra=extra)
    with pytest.raises(UnexpectedTensor, match=r"`blk\.2\.nextn\.eh_proj\.weight`"):
        open_gguf(tmp_path / "m.gguf")


def test_keys_of_layers_that_share_those_of_others_are_left_out(tmp_path, models):
    extra = {"blk.5.attn_k.weight": np.zeros((64, 64), np.float32)}
    write_as_gguf(models("gemma4"), tmp_path / "m.gguf", "gemma4", extra=extra)
    checkpoint = open_gguf(tmp_path / "m.gguf")
    assert checkpoint.warnings == (
        "1 keys and values of layers that share those of others are left out",
    )
    assert set(tensors_of(checkpoint)) == set(hub_tensors(models("gemma4")))


def test_rotation_of_gemma4_must_be_known(tmp_path, models):
    extra = {"rope_freqs.weight": np.linspace(1, 4, 16, dtype=np.float32)}
    write_as_gguf(models("gemma4"), tmp_path / "m.gguf", "gemma4", extra=extra)
    with pytest.raises(UnsupportedVariant, match=r"`16` factors, expected `16` that are 1 and th"):
        open_gguf(tmp_path / "m.gguf")


def test_two_tables_of_rotary_factors(tmp_path, models):
    model = models("phi3")
    long, short = np.linspace(1, 8, 8), np.linspace(1, 1.5, 8)
    tables = {"rope_factors_long.weight": long, "rope_factors_short.weight": short}
    extra = {name: table.astype(np.float32) for name, table in tables.items()}
    changes = {"rope.scaling.original_context_length": 32, "rope.scaling.attn_factor": 1.25}
    write_as_gguf(model, tmp_path / "m.gguf", "phi3", metadata=changes, extra=extra)
    config = open_gguf(tmp_path / "m.gguf").config
    rope = config["rope_parameters"]
    assert config["original_max_position_embeddings"] == 32
    assert rope["rope_type"] == "longrope"
    assert rope["attention_factor"] == 1.25
    assert np.array_equal(np.float32(rope["long_factor"]), extra["rope_factors_long.weight"])
    assert np.array_equal(np.float32(rope["short_factor"]), extra["rope_factors_short.weight"])
    transformers.Phi3Config.from_dict(dict(config))
    del extra["rope_factors_long.weight"]
    write_as_gguf(model, tmp_path / "m.gguf", "phi3", metadata=changes, extra=extra)
    with pytest.raises(UnsupportedVariant, match=r"`rope_factors_long\.weight` is missing"):
        open_gguf(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("case", "metadata", "words"),
    [
        ("mamba", {"ssm.dt_b_c_rms": True}, "the architecture FalconMamba is not read"),
        ("bloom", {"feed_forward_length": 96}, "is `96`, expected `256`"),
        ("starcoder2", {"attention.key_length": 32, "attention.value_length": 32}, "only size of"),
        ("lfm2", {"attention.head_count_kv": [1, 2]}, r"`\[1, 2\]`, expected one count and 0"),
        ("minimax-m2", {"expert_gating_func": 1}, "another choice of experts is not read"),
        ("qwen3-moe", {"expert_gating_func": 2}, "another choice of experts is not read"),
        ("qwen3-moe", {"expert_group_count": 4}, "a change of the experts' weights is not read"),
        ("qwen3", {"rope.dimension_count": 16}, "rotation of a part of `32` is not read"),
        ("qwen3.5", {"ssm.group_count": 3}, "value heads of together"),
        ("gemma4", {"feed_forward_length": [96, 96, 96, 192, 192, 192]}, "expected one width"),
        ("gemma4", {"attention.head_count_kv": [2, 1, 2, 1, 2, 1]}, "one count for each kind"),
    ],
)
def test_variants_are_refused(tmp_path, models, case, metadata, words):
    write_as_gguf(models(case), tmp_path / "m.gguf", CASES[case][0], metadata=metadata)
    with pytest.raises(UnsupportedVariant, match=words) as caught:
        open_gguf(tmp_path / "m.gguf")
    assert "m.gguf" in str(caught.value)


@pytest.mark.parametrize(
    ("case", "key"),
    [("gemma2", "block_count"), ("lfm2", "block_count"), ("t5", "decoder_block_count")],
)
def test_a_claim_of_many_layers_costs_nothing(tmp_path, models, case, key):
    write_as_gguf(models(case), tmp_path / "m.gguf", CASES[case][0], metadata={key: 2**31})
    with pytest.raises(MissingTensor, match=r"`21474836\d\d` layers in the metadata, but only"):
        open_gguf(tmp_path / "m.gguf")
