"""bitsandbytes against a slow reference of its byte layout, and its own files."""

import json

import numpy as np
import pytest
import tiny_checkpoints
import torch
from faults import silent_faults
from safetensors.torch import save_file
from truth import CHECKPOINTS, Truth

import quantload
from quantload.errors import FormatMismatch, MissingTensor, NonFiniteWeight, UnsupportedVariant
from quantload.loader.formats import open_source
from quantload.loader.formats.bitsandbytes import GRIDS
from quantload.loader.open import open_checkpoint
from quantload.loader.plan import PlanOptions

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
NAMES = {F32: "float32", F16: "float16", BF16: "bfloat16"}
Q, UP = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"
CONFIG_4BIT = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
CONFIG_8BIT = {"quant_method": "bitsandbytes", "load_in_8bit": True}
needs_checkpoints = pytest.mark.skipif(
    not CHECKPOINTS.is_dir(), reason="no folder shared/checkpoints"
)


def packed(
    shape,
    *,
    kind="nf4",
    blocksize=64,
    nested=0,
    dtype=BF16,
    storage=torch.uint8,
    seed=0,
    table=None,
):
    """Tensors of a random 4-bit parameter by leaf ("" is the bytes), and its values."""
    rng = np.random.default_rng(seed)
    count = int(np.prod(shape))
    codes = rng.integers(0, 16, count, dtype=np.uint8)
    table = np.array(GRIDS[kind].table if table is None else table, dtype=np.float32)
    blocks = -(-count // blocksize)
    state = {
        "quant_type": kind,
        "blocksize": blocksize,
        "dtype": NAMES[dtype],
        "shape": list(shape),
    }
    leaves = {}
    absmax = rng.uniform(0.1, 3, blocks).astype(np.float32)
    if nested:
        state |= {"nested_blocksize": nested, "nested_dtype": "float32", "nested_offset": 0.37}
        fields = rng.integers(0, 256, blocks, dtype=np.uint8)
        values = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
        outer = rng.uniform(0.1, 3, -(-blocks // nested)).astype(np.float32)
        absmax = np.array(
            [values[fields[i]] * outer[i // nested] + np.float32(0.37) for i in range(blocks)]
        )
        leaves |= {"nested_absmax": outer, "nested_quant_map": values, "absmax": fields}
    else:
        leaves["absmax"] = absmax
    padded = np.append(codes, np.zeros(-count % 2, dtype=np.uint8))
    raw = bytes(int(padded[i]) * 16 + int(padded[i + 1]) for i in range(0, len(padded), 2))
    expected = np.array([table[codes[i]] * absmax[i // blocksize] for i in range(count)])
    found = {name: torch.from_numpy(np.ascontiguousarray(part)) for name, part in leaves.items()}
    found["quant_map"] = torch.from_numpy(table)
    found[f"quant_state.bitsandbytes__{kind}"] = as_bytes(state)
    found[""] = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(storage).reshape(-1, 1)
    return found, torch.from_numpy(expected.reshape(shape)).to(dtype)


def as_bytes(state):
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


def rows8(shape, *, seed=0):
    """Tensors of a random int8 weight by leaf, and its values."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(-128, 128, shape, dtype=np.int8)
    scale = rng.uniform(0.1, 3, shape[0]).astype(np.float32)
    factor = np.float32(7.874015718698502e-3)
    expected = [[np.float32(q) * scale[n] * factor for q in row] for n, row in enumerate(codes)]
    leaves = {
        "weight": torch.from_numpy(codes),
        "SCB": torch.from_numpy(scale),
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return leaves, torch.tensor(np.array(expected))


def named(parameter, leaves):
    return {f"{parameter}.{leaf}" if leaf else parameter: part for leaf, part in leaves.items()}


def write(folder, tensors, config=CONFIG_4BIT, **model):
    folder.mkdir(parents=True, exist_ok=True)
    content = {"model_type": "llama", **model}
    if config is not None:
        content["quantization_config"] = config
    (folder / "config.json").write_text(json.dumps(content))
    save_file(tensors, folder / "model.safetensors")
    return folder


def read(folder):
    return open_source(open_checkpoint(folder))


def one(tmp_path, *, config=CONFIG_4BIT, without=(), changes=None, **options):
    """A checkpoint of one 4-bit layer with some tensors left out or replaced."""
    tensors = named(f"{Q}.weight", packed((8, 32), **options)[0])
    for leaf in without:
        del tensors[f"{Q}.weight.{leaf}" if leaf else f"{Q}.weight"]
    for leaf, part in (changes or {}).items():
        tensors[f"{Q}.weight.{leaf}" if leaf else f"{Q}.weight"] = part
    return write(tmp_path / "model", tensors, config)


# -- values ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "blocksize", "block"),
    [
        ((4, 128), 64, (1, 64)),
        ((3, 96), 64, (1, 32)),  # blocks straddle rows
        ((5, 10), 64, (5, 10)),  # one block, partial
        ((40, 16), 64, (4, 16)),  # whole rows, the last block partial
        ((9, 32), 128, (4, 32)),
        ((7, 24), 16, (1, 8)),
        ((3, 5), 4, (1, 1)),  # an odd number of elements
        ((6, 64), 32, (1, 32)),
    ],
)
@pytest.mark.parametrize("nested", [0, 2])
def test_blocks_of_any_size_are_read_exactly(tmp_path, shape, blocksize, block, nested):
    leaves, expected = packed(shape, blocksize=blocksize, nested=nested, dtype=F32, seed=shape[0])
    source = read(write(tmp_path / "model", named(f"{Q}.weight", leaves)))
    weight = source.weights[Q]
    found = source.read_weight(Q)
    assert (weight.shape, weight.dtype, found.block) == (shape, F32, block)
    assert torch.equal(found.dequantize(), expected)
    assert weight.scheme.weight.block_of(*shape) == block
    assert not source.plain


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("storage", [torch.uint8, F16, BF16, F32])
def test_types_and_dtypes(tmp_path, kind, dtype, storage):
    leaves, expected = packed((8, 128), kind=kind, dtype=dtype, storage=storage, nested=4)
    config = {**CONFIG_4BIT, "bnb_4bit_quant_type": kind}
    source = read(write(tmp_path / "model", named(f"{Q}.weight", leaves), config))
    found = source.read_weight(Q)
    assert found.grid.name == kind
    assert found.dequantize().dtype == dtype == source.weights[Q].dtype
    assert torch.equal(found.dequantize(), expected)
    assert torch.equal(found.evaluated_in(F32).dequantize(), expected)


def test_the_table_of_the_file_counts(tmp_path):
    table = np.linspace(-2, 2, 16)
    leaves, expected = packed((8, 64), table=table)
    source = read(write(tmp_path / "model", named(f"{Q}.weight", leaves)))
    assert torch.equal(source.read_weight(Q).dequantize(), expected)


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_narrow_scales_are_widened_first(tmp_path, dtype):
    leaves, _ = packed((8, 64), dtype=F32)
    leaves["absmax"] = leaves["absmax"].to(dtype)
    source = read(write(tmp_path / "model", named(f"{Q}.weight", leaves)))
    raw = leaves[""].flatten()
    codes = torch.stack((raw >> 4, raw & 15), 1).reshape(8, 64)
    expected = leaves["quant_map"][codes.long()] * leaves["absmax"].float().reshape(8, 1)
    assert torch.equal(source.read_weight(Q).dequantize(), expected)


def test_int8_rows(tmp_path):
    leaves, expected = rows8((5, 24))
    source = read(write(tmp_path / "model", named(Q, leaves), CONFIG_8BIT))
    weight = source.weights[Q]
    assert torch.equal(source.read_weight(Q).dequantize(), expected)
    assert (weight.scheme.name, weight.scheme.input, weight.shape) == ("W8A16", None, (5, 24))
    assert set(weight.leaves) == {"weight", "SCB", "weight_format"}


def test_int8_from_before_weight_format(tmp_path):
    leaves, expected = rows8((5, 24))
    del leaves["weight_format"]
    source = read(write(tmp_path / "model", named(Q, leaves), CONFIG_8BIT))
    assert torch.equal(source.read_weight(Q).dequantize(), expected)


def test_experts_of_one_parameter(tmp_path):
    name = "model.layers.0.mlp.experts.gate_up_proj"
    leaves, expected = packed((3, 8, 48), blocksize=64)
    source = read(write(tmp_path / "model", named(name, leaves)))
    weight = source.weights[name]
    assert (weight.parameter_name, weight.parameter_shape) == (name, (3, 8, 48))
    assert source.read_weight(name).shape == (24, 48)
    assert torch.equal(source.read_parameter(name), expected)


def test_a_layer_that_keeps_input_features_first(tmp_path):
    name = "transformer.h.0.attn.c_attn"
    leaves, expected = packed((96, 32))
    folder = write(tmp_path / "model", named(f"{name}.weight", leaves), model_type="gpt2")
    source = read(folder)
    assert source.weights[name].parameter_shape == (32, 96)
    assert torch.equal(source.read_parameter(name), expected.T)
    assert torch.equal(source.read_weight(name).dequantize(), expected)


def test_a_transposed_layer_is_compared_with_its_full_precision(tmp_path):
    name = "transformer.h.0.attn.c_attn"
    leaves, expected = packed((96, 32))
    quantized = write(tmp_path / "4", named(f"{name}.weight", leaves), model_type="gpt2")
    dense = {f"{name}.weight": expected.T.contiguous()}
    dense = write(tmp_path / "16", dense, config=None, model_type="gpt2")
    report = quantload.compare(dense, quantized)
    assert not [row for row in report.layers if row.differs]


# -- which modules -----------------------------------------------------------------------------


def plain(rows=4, columns=8):
    return torch.ones(rows, columns, dtype=BF16)


def test_skipped_modules_and_a_quantized_head(tmp_path):
    tensors = named(f"{Q}.weight", packed((8, 32))[0]) | {f"{UP}.weight": plain()}
    tensors |= named("lm_head.weight", packed((8, 32))[0])
    config = {**CONFIG_4BIT, "llm_int8_skip_modules": ["up_proj", "lm_head"]}
    source = read(write(tmp_path / "model", tensors, config))
    assert {m: w.is_quantized for m, w in source.weights.items()} == {
        "lm_head": True,
        UP: False,
        Q: True,
    }
    assert source.warnings == (
        "1 modules are quantized in the files although the config leaves them out; they are read "
        "as quantized: `lm_head`",
    )
    assert source.weights[Q].decided_by == "load_in_4bit"


@pytest.mark.parametrize(
    ("pattern", "skipped"),
    [
        ("kv_proj", ["resampler.kv_proj"]),  # whole components
        ("vision_model", ["vision_model.encoder.layers.0.fc1"]),
        ("model.layers.1", ["model.layers.1.mlp"]),
        ("model.layers.*.mlp", ["model.layers.10.mlp", "model.layers.1.mlp"]),
    ],
)
def test_skipped_by_the_rule_of_transformers(tmp_path, pattern, skipped):
    names = {
        "model.layers.0.self_attn.qkv_proj",
        "resampler.kv_proj",
        "vision_model.encoder.layers.0.fc1",
        "my_vision_model.fc1",
        "model.layers.1.mlp",
        "model.layers.10.mlp",
    }
    tensors = {}
    for name in names:
        tensors |= named(f"{name}.weight", packed((4, 32))[0])
    config = {**CONFIG_4BIT, "llm_int8_skip_modules": [pattern]}
    (warning,) = read(write(tmp_path / "model", tensors, config)).warnings
    assert warning.startswith(f"{len(skipped)} modules")
    for name in names:
        assert (f"`{name}`" in warning) == (name in skipped)


@pytest.mark.parametrize("config", [CONFIG_4BIT, CONFIG_8BIT, {"load_in_4bit": True}])
def test_a_config_without_quantized_tensors_is_read_as_full_precision(tmp_path, config):
    source = read(write(tmp_path / "model", {f"{Q}.weight": plain()}, config))
    assert not source.is_quantized
    assert "asks to quantize while loading (`load_in_" in source.warnings[0]
    assert torch.equal(source.read_weight(Q), plain())


def test_old_configs_without_a_method(tmp_path):
    source = read(one(tmp_path, config={"load_in_4bit": True}))
    assert source.format_name == "bitsandbytes"
    assert source.weights[Q].is_quantized


def test_no_config_at_all(tmp_path):
    leaves, expected = packed((8, 32))
    source = read(write(tmp_path / "4", named(f"{Q}.weight", leaves), config=None))
    assert source.format_name == "bitsandbytes"
    assert torch.equal(source.read_weight(Q).dequantize(), expected)
    leaves, expected = rows8((8, 32))
    source = read(write(tmp_path / "8", named(Q, leaves), config=None))
    assert torch.equal(source.read_weight(Q).dequantize(), expected)


# -- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"load_in_4bit": False}, "load_in_4bit = False, load_in_8bit = False"),
        ({"load_in_4bit": None}, "load_in_4bit = False, load_in_8bit = False"),
        ({"load_in_8bit": True}, "load_in_4bit = True, load_in_8bit = True"),
        ({"load_in_4bit": 1}, "`load_in_4bit` .* is `1`, expected true or false"),
        ({"load_in_8bit": "no"}, "`load_in_8bit` .* is `'no'`, expected true or false"),
        ({"load_in_4bit": False, "load_in_8bit": True}, "holds `nf4`, but .* says `8 bits`"),
        ({"bnb_4bit_quant_type": "fp4"}, "holds `nf4`, but the config says `4 bits, fp4`"),
        ({"bnb_4bit_quant_type": 4}, "`bnb_4bit_quant_type` of .* is `4`"),
        ({"bnb_4bit_quant_type": "int4"}, "`bnb_4bit_quant_type` is `int4`, expected `nf4`"),
        ({"llm_int8_skip_modules": "lm_head"}, "is `'lm_head'`, expected a list of names"),
        ({"llm_int8_skip_modules": [3]}, r"is `\[3\]`, expected a list of names"),
        ({"llm_int8_skip_modules": [""]}, r"is `\[''\]`, expected a list of names"),
        ({"llm_int8_skip_modules": ["("]}, r"is `'\('`, expected regular expressions"),
    ],
)
def test_errors_of_the_config(tmp_path, changes, message):
    with pytest.raises((FormatMismatch, UnsupportedVariant), match=message):
        read(one(tmp_path, config={**CONFIG_4BIT, **changes}))


STATE = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [8, 32]}
NESTED = {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.5}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({**STATE, "quant_type": "fp4"}, "`quant_type` is `'fp4'`, expected `nf4`"),
        ({**STATE, "blocksize": 0}, "`blocksize` is `0`, expected a positive number"),
        ({**STATE, "blocksize": True}, "`blocksize` is `True`"),
        ({**STATE, "blocksize": 32}, r"absmax` has shape `\(4,\)`, expected `\(8,\)`"),
        ({**STATE, "dtype": "int8"}, "`dtype` is `'int8'`, expected `float32`"),
        ({**STATE, "dtype": None}, "`dtype` is `None`"),
        ({**STATE, "dtype": ["x"]}, "`dtype` is"),
        ({**STATE, "shape": [8, -32]}, r"`shape` is `\[8, -32\]`, expected a list of positive"),
        ({**STATE, "shape": []}, r"`shape` is `\[\]`"),
        ({**STATE, "shape": 256}, "`shape` is `256`"),
        ({**STATE, "shape": [256]}, r"has shape `\(256,\)`, expected the weight of a linear"),
        ({**STATE, "shape": [2, 4, 32]}, r"has shape `\(2, 4, 32\)`, expected the weight"),
        ({**STATE, "shape": [8, 64]}, r"absmax` has shape `\(4,\)`, expected `\(8,\)`"),
        ({"quant_type": "nf4"}, "`shape` is `'nothing'`"),
        ({**STATE, **NESTED}, "nested_absmax` is missing"),
        ({**STATE, **NESTED, "nested_dtype": "float16"}, "`nested_dtype` is `'float16'`"),
        ({**STATE, **NESTED, "nested_offset": None}, "`nested_offset` is `None`"),
        ({**STATE, **NESTED, "nested_offset": float("nan")}, "`nested_offset` is `nan`"),
        ({**STATE, **NESTED, "nested_offset": 10**400}, "`nested_offset` is `1000"),
        ({**STATE, "blocksize": 10**400}, "`blocksize` is `1000"),
        ({**STATE, **NESTED, "nested_blocksize": -1}, "`nested_blocksize` is `-1`"),
        ([1], "holds a JSON list, expected an object"),
    ],
)
def test_errors_of_the_state(tmp_path, state, message):
    changes = {"quant_state.bitsandbytes__nf4": as_bytes(state)}
    with pytest.raises((FormatMismatch, MissingTensor, UnsupportedVariant), match=message):
        read(one(tmp_path, changes=changes))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"without": ["absmax"]}, MissingTensor, "`.*q_proj.weight.absmax` is missing"),
        ({"without": ["quant_map"]}, MissingTensor, "weight.quant_map` is missing"),
        ({"without": [""]}, MissingTensor, "tensor `.*q_proj.weight` is missing"),
        (
            {"without": ["quant_state.bitsandbytes__nf4"]},
            MissingTensor,
            "quant_state.bitsandbytes__nf4` is missing",
        ),
        ({"nested": 2, "without": ["nested_absmax"]}, MissingTensor, "nested_absmax` is missing"),
        (
            {"changes": {"nested_absmax": torch.ones(1)}},
            FormatMismatch,
            "the state says nothing of double quantization",
        ),
        (
            {"changes": {"quant_state.bitsandbytes__fp4": as_bytes(STATE)}},
            FormatMismatch,
            "has two states",
        ),
        (
            {"changes": {"quant_state.bitsandbytes__int4": as_bytes(STATE)}},
            UnsupportedVariant,
            "bitsandbytes type `int4` is not read",
        ),
        (
            {"changes": {"quant_state.bitsandbytes__nf4": torch.zeros(9, dtype=torch.uint8)}},
            FormatMismatch,
            "holds no JSON",
        ),
        (
            {"changes": {"quant_state.bitsandbytes__nf4": torch.zeros(5000, dtype=torch.uint8)}},
            FormatMismatch,
            "expected the bytes of a small JSON object",
        ),
        ({"changes": {"": torch.zeros(127, 1, dtype=torch.uint8)}}, FormatMismatch, "has shape"),
        ({"changes": {"": torch.zeros(128, 1)}}, FormatMismatch, r"expected `\(32, 1\)`"),
        ({"changes": {"": torch.zeros(16, 1, dtype=torch.int64)}}, FormatMismatch, "is `torch.int"),
    ],
)
def test_errors_of_the_tensors(tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        read(one(tmp_path, **options))


@pytest.mark.parametrize("leaf", ["absmax", "quant_map", "nested_absmax", "nested_quant_map"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_that_are_not_finite_are_refused(tmp_path, leaf, value):
    leaves = packed((8, 32), nested=0 if leaf == "absmax" else 2)[0]
    leaves[leaf][0] = value
    source = read(write(tmp_path / "model", named(f"{Q}.weight", leaves)))
    with pytest.raises(NonFiniteWeight, match=f"`{Q}.weight.{leaf}` holds NaN or infinity"):
        source.read_weight(Q)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"SCB": None}, MissingTensor, "q_proj.SCB` is missing"),
        ({"weight": None}, MissingTensor, "q_proj.weight` is missing"),
        ({"SCB": torch.ones(4)}, FormatMismatch, r"SCB` has shape `\(4,\)`, expected `\(5,\)`"),
        ({"SCB": torch.ones(5, dtype=torch.int32)}, FormatMismatch, "SCB` is `torch.int32`"),
        ({"weight": torch.zeros(5, 24)}, FormatMismatch, "weight` is `torch.float32`"),
        ({"weight": torch.zeros(5, dtype=torch.int8)}, UnsupportedVariant, "expected 2 dimensions"),
        (
            {"weight_format": torch.tensor(1, dtype=torch.uint8)},
            UnsupportedVariant,
            "weight_format` is `1`, expected `0`: the codes are in the layout of an old GPU kernel",
        ),
    ],
)
def test_errors_of_int8(tmp_path, changes, error, message):
    leaves = {k: v for k, v in (rows8((5, 24))[0] | changes).items() if v is not None}
    with pytest.raises(error, match=message):
        read(write(tmp_path / "model", named(Q, leaves), CONFIG_8BIT))


def test_int8_rows_that_are_not_finite_are_refused(tmp_path):
    leaves = rows8((5, 24))[0]
    leaves["SCB"][3] = float("nan")
    source = read(write(tmp_path / "model", named(Q, leaves), CONFIG_8BIT))
    with pytest.raises(NonFiniteWeight, match="SCB` holds NaN"):
        source.read_weight(Q)


def test_codes_without_any_scale_are_refused(tmp_path):
    tensors = {f"{Q}.weight": torch.zeros(128, 1, dtype=torch.uint8)}
    with pytest.raises(UnsupportedVariant, match=r"are not read: `.*q_proj.weight`"):
        read(write(tmp_path / "model", tensors))


# NOTE: scales of zero are scales, and nothing states the width of an int8 weight.
@pytest.mark.parametrize("nested", [0, 2])
def test_no_fault_in_a_4bit_checkpoint_is_silent(tmp_path, nested):
    tensors = named(f"{Q}.weight", packed((6, 48), nested=nested)[0]) | {f"{UP}.weight": plain()}
    folder = write(tmp_path / "model", tensors)
    assert silent_faults(folder, tmp_path, without=("zero",)) == {}


def test_no_fault_in_an_int8_checkpoint_is_silent(tmp_path):
    folder = write(tmp_path / "model", named(Q, rows8((6, 40))[0]), CONFIG_8BIT)
    assert silent_faults(folder, tmp_path, without=("zero", "narrow")) == {}


def test_many_modules_are_described_in_a_moment(tmp_path):
    content = tiny_checkpoints.config(hidden=32, intermediate=32, layers=40)
    leaves = packed((32, 32))[0]
    tensors = {}
    for layer in range(40):
        for name in "abcdefgh":
            tensors |= named(f"model.layers.{layer}.{name}.weight", leaves)
    folder = write(tmp_path / "model", {k: v.clone() for k, v in tensors.items()}, **content)
    assert len(read(folder).weights) == 320


# -- their own files ---------------------------------------------------------------------------


@needs_checkpoints
@pytest.mark.parametrize(
    "name", ["odd-llama-nf4-dq", "tiny-gpt2-int8", "tiny-gpt2-nf4", "tiny-qwen3-moe-nf4-dq"]
)
def test_a_loaded_model_is_the_dense_one(tmp_path, name):
    from transformers import AutoModelForCausalLM

    truth = Truth(CHECKPOINTS / "bitsandbytes-0.50.2" / name)
    options = PlanOptions(dtype=F32)
    quantload.convert(truth.folder, tmp_path / "dense", "dense", options=options)
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=F32).eval()
    model = quantload.load(truth.folder, device="cpu", dtype=F32, quantize_inputs=False)
    ids, logits = truth.tensors["input_ids"], truth.tensors["logits"]
    with torch.no_grad():
        found, expected = model(ids).logits, dense(ids).logits
    assert (found - expected).norm() < 1e-4 * expected.norm()
    assert (found - logits).norm() < 2e-2 * logits.norm()
