"""FP8 checkpoints against a slow reference of `float8.py`'s formula, and the tools' own files."""

import time

import numpy as np
import oracles
import pytest
import torch
from faults import silent_faults
from fp8_files import (
    BF16,
    E4M3,
    E5M2,
    E8M0,
    F16,
    F32,
    FP8,
    codes,
    opened,
    reference,
    scales,
    write,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from truth import CHECKPOINTS, Truth

import quantload
from quantload.errors import FormatMismatch, MissingTensor, NonFiniteWeight, UnsupportedVariant
from quantload.loader.checkpoint import Checkpoint, TensorEntry
from quantload.loader.formats.fp8 import Fp8Reader
from quantload.loader.plan import PlanOptions

NAMES = {F32: "float32", F16: "float16", BF16: "bfloat16"}
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"
GPTQMODEL = {"quant_method": "fp8", "format": "float8_e4m3fn", "weight_scale_semantics": "inverse"}
SHAPES = [(64, 64), (100, 72), (33, 160), (1, 5), (130, 1)]
needs_checkpoints = pytest.mark.skipif(
    not CHECKPOINTS.is_dir(), reason="no folder shared/checkpoints"
)


def one(tmp_path, parts, config, **more):
    """The source of a checkpoint with one quantized module."""
    tensors = {f"{Q}.{leaf}": part for leaf, part in parts.items()}
    return opened(write(tmp_path / "model", tensors, config, **more))


# -- values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, BF16, F16, torch.float64, E8M0, torch.uint8])
@pytest.mark.parametrize("leaf", ["weight_scale", "weight_scale_inv", "scale", "qscale_weight"])
def test_names_and_dtypes_of_scales(tmp_path, leaf, dtype):
    q, s = codes((100, 72)), scales((4, 3), dtype)
    config = {**FP8, "weight_block_size": [32, 32]}
    source = one(tmp_path, {"weight": q, leaf: s}, config)
    assert torch.equal(source.read_dense(Q), reference(q, s, (32, 32), result=BF16))
    scheme = source.weights[Q].scheme
    assert scheme.weight.scale == ("e8m0" if dtype in (E8M0, torch.uint8) else "float")
    assert (scheme.input.granularity, scheme.input.group_size) == ("group", 32)
    assert source.weights[Q].dtype == source.read_dense(Q).dtype == BF16
    assert not source.plain


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block", [(32, 32), (64, 16), (1, 32), (128, 128), (7, 5)])
def test_blocks_may_be_partial(tmp_path, shape, block):
    grid = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    q, s = codes(shape), scales(grid, F32)
    config = {**FP8, "weight_block_size": list(block)}
    source = one(tmp_path, {"weight": q, "weight_scale_inv": s}, config)
    assert torch.equal(source.read_dense(Q), reference(q, s, block, result=BF16))


@pytest.mark.parametrize("spelled", [(), (1,), (1, 1)])
@pytest.mark.parametrize("block", [None, [128, 128], "left out"])
def test_one_scale_for_the_tensor(tmp_path, spelled, block):
    q, s = codes((48, 40)), scales(spelled, F32)
    config = FP8 if block == "left out" else {**FP8, "weight_block_size": block}
    source = one(tmp_path, {"weight": q, "weight_scale_inv": s}, config)
    expected = reference(q, s.reshape(1, 1), (48, 40), result=BF16)
    assert torch.equal(source.read_dense(Q), expected)
    kind = source.weights[Q].scheme.weight.granularity
    assert kind == ("block" if isinstance(block, list) else "tensor")


@pytest.mark.parametrize("spelled", [(48,), (48, 1)])
def test_one_scale_a_row(tmp_path, spelled):
    q, s = codes((48, 40)), scales(spelled, BF16)
    source = one(tmp_path, {"weight": q, "weight_scale": s}, FP8)
    assert torch.equal(source.read_dense(Q), reference(q, s.reshape(48, 1), (1, 40), result=BF16))
    assert source.weights[Q].scheme.name == "FP8_DYNAMIC"


def test_blocks_that_the_config_leaves_out_are_those_of_transformers(tmp_path):
    q, s = codes((200, 130)), scales((2, 2), F32)
    source = one(tmp_path, {"weight": q, "weight_scale_inv": s}, FP8)
    assert torch.equal(source.read_dense(Q), reference(q, s, (128, 128), result=BF16))
    assert source.weights[Q].scheme.name == "FP8_BLOCK"
    config = {**FP8, "weight_block_size": None}
    with pytest.raises(FormatMismatch, match="weight_scale_inv"):
        one(tmp_path / "null", {"weight": q, "weight_scale_inv": s}, config)


@pytest.mark.parametrize("fmt", ["e5m2", "float8_e5m2"])
def test_e5m2(tmp_path, fmt):
    q, s = codes((33, 40), storage=E5M2), scales((33, 1), F32)
    source = one(tmp_path, {"weight": q, "weight_scale": s}, {**FP8, "fmt": fmt})
    assert torch.equal(source.read_dense(Q), reference(q, s, (1, 40), result=BF16))
    with pytest.raises(FormatMismatch, match=r"q_proj.weight.*float8_e5m2"):
        one(tmp_path / "other", {"weight": q, "weight_scale": s}, FP8)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_values_are_rounded_to_the_dtype_of_the_model(tmp_path, dtype):
    q, s = codes((48, 40)), scales((48, 1), F32)
    parts = {"weight": q, "weight_scale": s}
    expected = reference(q, s, (1, 40))
    found = one(tmp_path / "fp8", parts, FP8, dtype=dtype).read_dense(Q)
    assert found.dtype == dtype
    assert torch.equal(found, expected.to(dtype))
    fbgemm = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
    source = one(tmp_path / "fbgemm", parts, fbgemm, dtype=dtype)
    assert torch.equal(source.read_dense(Q), expected)
    assert source.weights[Q].dtype == F32
    assert source.weights[Q].scheme.input.granularity == "token"


@pytest.mark.parametrize(
    ("method", "shape", "block"),
    [("tensor", (), (48, 40)), ("row", (48,), (1, 40)), ("block", (6, 5), (8, 8))],
)
def test_scales_of_gptqmodel_are_divisors(tmp_path, method, shape, block):
    q, s = codes((48, 40)), 1 / scales(shape, F32)
    config = {**GPTQMODEL, "weight_scale_method": method}
    config |= {"weight_block_size": list(block)} if method == "block" else {}
    parts = {"weight": q, "weight_scale_inv": s}
    grid = (-(-48 // block[0]), -(-40 // block[1]))
    for dtype in (F32, BF16, F16):
        source = one(tmp_path / NAMES[dtype], parts, config, dtype=dtype)
        narrow = s.to(dtype).reshape(grid)
        expected = reference(q, narrow, block, divides=True)
        assert torch.equal(source.read_dense(Q), expected)
        assert source.weights[Q].scheme.input is None
        assert "divisors" in source.warnings[-1]
    large = one(tmp_path / "large", {"weight": q, "weight_scale_inv": s * 1e6}, config, dtype=F16)
    expected = reference(q, (s * 1e6).reshape(grid), block, divides=True)
    assert torch.equal(large.read_dense(Q), expected)
    other = {"tensor": "row", "row": "tensor", "block": "row"}[method]
    with pytest.raises(FormatMismatch, match="weight_scale_method"):
        one(tmp_path / "x", parts, {**config, "weight_scale_method": other})


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "mxfp8"},
        {"quant_method": "mxfp8", "weight_block_size": [1, 32]},
        {**FP8, "weight_block_size": [1, 32], "scale_fmt": "ue8m0"},
    ],
)
@pytest.mark.parametrize("dtype", [E8M0, torch.uint8])
def test_mxfp8(tmp_path, config, dtype):
    q, s = codes((20, 72)), scales((20, 3), dtype)
    source = one(tmp_path, {"weight": q, "weight_scale": s}, config)
    assert torch.equal(source.read_dense(Q), reference(q, s, (1, 32), result=BF16))
    scheme = source.weights[Q].scheme
    assert (scheme.weight.granularity, scheme.weight.group_size) == ("group", 32)
    assert scheme.input.scale == scheme.weight.scale == "e8m0"
    with pytest.raises(FormatMismatch, match="MXFP8"):
        one(tmp_path / "f", {"weight": q, "weight_scale": s.view(torch.uint8).float()}, config)


def test_bytes_of_exponents():
    """BR040: 127 is one, 120 is 2^-7, and so on."""
    assert oracles.e8m0_values()[[127, 120, 119, 128]].tolist() == [1.0, 2**-7, 2**-8, 2.0]


def test_exponent_bytes_are_not_numbers(tmp_path):
    q = torch.full((2, 64), 0x38, dtype=torch.uint8).view(E4M3)
    s = torch.tensor([[127, 120], [119, 128]], dtype=torch.uint8)
    source = one(tmp_path, {"weight": q, "weight_scale": s}, {"quant_method": "mxfp8"})
    values = source.read_dense(Q).float()
    assert values[:, [0, 31, 32, 63]].tolist() == [[1, 1, 2**-7, 2**-7], [2**-8, 2**-8, 2, 2]]


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_half_precision_scales_are_widened(tmp_path, dtype):
    q = torch.full((1, 32), 0x38, dtype=torch.uint8).view(E4M3)
    s = torch.tensor([[0.00390625 * 1.9921875]], dtype=BF16).to(dtype)
    values = one(tmp_path, {"weight": q, "weight_scale_inv": s}, FP8).read_dense(Q)
    assert values.unique().tolist() == [255 * 2.0**-15]


# -- inputs, experts, names ------------------------------------------------------------------------


@pytest.mark.parametrize("leaf", ["input_scale", "activation_scale", "qscale_act"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_static_inputs(tmp_path, leaf, shape):
    parts = {"weight": codes((8, 8)), "weight_scale": scales((), F32)}
    config = {**FP8, "activation_scheme": "static"}
    source = one(tmp_path, {**parts, leaf: torch.full(shape, 0.25)}, config)
    scheme = source.weights[Q].scheme.input
    assert (scheme.granularity, scheme.dynamic) == ("tensor", False)
    assert source.read_weight(Q).input_scale.tolist() == [0.25]
    assert not source.plain


def test_static_inputs_without_scale(tmp_path):
    parts = {"weight": codes((8, 8)), "weight_scale": scales((), F32)}
    with pytest.raises(MissingTensor, match=rf"{Q}.input_scale"):
        one(tmp_path, parts, {**FP8, "activation_scheme": "static"})


def test_bounds_of_inputs_belong_to_the_layer(tmp_path):
    parts = {"weight": codes((8, 8)), "weight_scale": scales((8, 1), F32)}
    parts["input_scale_ub"] = torch.tensor([1200.0])
    assert not one(tmp_path, parts, {"quant_method": "fbgemm_fp8"}).plain


def test_packed_fp4_experts_of_deepseek_v4(tmp_path):
    expert = "model.layers.0.mlp.experts.3.gate_proj"
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (12, 32), dtype=np.uint8)
    s = scales((12, 2), E8M0)
    q, dense_scale = codes((40, 40)), scales((2, 2), E8M0)
    config = {**FP8, "weight_block_size": [32, 32], "scale_fmt": "ue8m0", "expert_dtype": "fp4"}
    nibbles = np.stack([raw & 15, raw >> 4], axis=-1).reshape(12, 64)
    factors = oracles.e8m0_values()[s.view(torch.uint8).numpy()]
    expected = oracles.e2m1_values()[nibbles] * np.repeat(factors, 32, axis=1)
    for dtype in (np.int8, np.uint8):
        tensors = {
            f"{expert}.weight": torch.from_numpy(raw.view(dtype)),
            f"{expert}.scale": s,
            f"{Q}.weight": q,
            f"{Q}.scale": dense_scale,
        }
        source = opened(write(tmp_path / dtype.__name__, tensors, config))
        assert source.weights[expert].shape == (12, 64)
        assert np.array_equal(source.read_dense(expert).double().numpy(), expected)
        assert torch.equal(source.read_dense(Q), reference(q, dense_scale, (32, 32), result=BF16))


def test_bytes_that_are_neither(tmp_path):
    parts = {"weight": torch.zeros(8, 16, dtype=torch.int8), "weight_scale": torch.ones(8, 1)}
    with pytest.raises(FormatMismatch, match=r"q_proj.weight.*int8"):
        one(tmp_path, parts, FP8)


def test_scales_of_other_things_stay_plain(tmp_path):
    """A parameter that happens to be called `scale` is one, unless it scales FP8 somewhere."""
    tensors = {
        f"{Q}.weight": codes((8, 8)),
        f"{Q}.weight_scale": scales((), F32),
        "model.layers.0.attn_scale.scale": torch.ones(8, dtype=BF16),
        "model.layers.0.mlp.gate_proj.weight": torch.ones(8, 8, dtype=BF16),
        "model.layers.0.mlp.gate_proj.scale": torch.ones(1, dtype=BF16),
    }
    source = opened(write(tmp_path / "plain", tensors, FP8))
    assert {name.rpartition(".")[2] for name in source.plain} == {"scale"}
    tensors[f"{Q}.scale"] = tensors.pop(f"{Q}.weight_scale")
    with pytest.raises((FormatMismatch, MissingTensor), match="scale"):
        opened(write(tmp_path / "used", tensors, FP8))


def test_cache_scales(tmp_path):
    parts = {"weight": codes((8, 8)), "weight_scale": scales((), F32)}
    tensors = {f"{Q}.{leaf}": part for leaf, part in parts.items()}
    attention = Q.rpartition(".")[0]
    tensors[f"{attention}.k_proj.k_scale"] = torch.tensor(0.5)
    tensors[f"{attention}.v_proj.output_scale"] = torch.tensor(0.25)
    source = opened(write(tmp_path / "model", tensors, FP8))
    assert {name: source.read_plain(name).item() for name in source.plain} == {
        f"{attention}.k_scale": 0.5,
        f"{attention}.v_scale": 0.25,
    }
    assert source.reader.cache_scheme["num_bits"] == 8


# -- config and files ------------------------------------------------------------------------------


def test_modules_that_the_config_leaves_out(tmp_path):
    tensors = {
        f"{Q}.weight": codes((8, 8)),
        f"{Q}.weight_scale": scales((), F32),
        "lm_head.weight": torch.ones(8, 8, dtype=BF16),
        f"{DOWN}.weight": torch.ones(8, 8, dtype=BF16),
    }
    source = opened(write(tmp_path / "plain", tensors, {**FP8, "ignored_layers": ["lm_head"]}))
    assert [m for m, w in source.weights.items() if w.is_quantized] == [Q]
    assert not source.warnings
    listed = {**FP8, "modules_to_not_convert": ["model.layers.0.self_attn.qkv_proj"]}
    source = opened(write(tmp_path / "quantized", tensors, listed))
    assert source.weights[Q].is_quantized
    assert Q in source.warnings[0]
    converted = {**FP8, "modules_to_convert": [DOWN]}
    with pytest.raises(FormatMismatch, match=DOWN):
        opened(write(tmp_path / "converted", tensors, converted))


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"weight_scale": None}, MissingTensor, rf"no scale for tensor `{Q}.weight`"),
        ({"weight": None}, MissingTensor, rf"`{Q}.weight` is missing"),
        ({"weight_scale_inv": torch.ones(8, 1)}, FormatMismatch, "both"),
        ({"weight": torch.ones(8, 8)}, FormatMismatch, "expected FP8 beside its scale"),
        ({"weight_scale": torch.ones(7, 1)}, FormatMismatch, r"\(7, 1\).*\(8, 1\)"),
        ({"weight_scale": torch.ones(8, 1, dtype=torch.int32)}, FormatMismatch, "int32"),
        ({"weight": torch.zeros(2, 8, 8).to(E4M3)}, UnsupportedVariant, "3 dimensions"),
        ({"input_scale": torch.ones(2)}, FormatMismatch, "input_scale"),
        ({"input_scale": torch.ones(1), "activation_scale": torch.ones(1)}, FormatMismatch, "both"),
        ({"weight_zero_point": torch.ones(8, 1)}, UnsupportedVariant, "weight_zero_point"),
        ({"pre_quant_scale": torch.ones(8)}, UnsupportedVariant, "pre_quant_scale"),
    ],
)
def test_files_that_do_not_fit(tmp_path, changes, error, match):
    parts = {"weight": codes((8, 8)), "weight_scale": scales((8, 1), F32), **changes}
    parts = {leaf: part for leaf, part in parts.items() if part is not None}
    with pytest.raises(error, match=match):
        one(tmp_path, parts, FP8)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"weight": torch.full((8, 8), float("nan")).to(E4M3)}, NonFiniteWeight, "q_proj.weight`"),
        ({"weight_scale": torch.full((8, 1), float("inf"))}, NonFiniteWeight, "weight_scale`"),
        (
            {"weight_scale": torch.full((8, 1), 255, dtype=torch.uint8)},
            NonFiniteWeight,
            "weight_scale`",
        ),
        ({"input_scale": torch.tensor(float("nan"))}, NonFiniteWeight, "input_scale`"),
        ({"weight_scale": torch.zeros(8, 1)}, FormatMismatch, "all scales .* are zero"),
    ],
)
def test_values_that_are_none(tmp_path, changes, error, match):
    parts = {"weight": codes((8, 8)), "weight_scale": scales((8, 1), F32), **changes}
    source = one(tmp_path, parts, FP8)
    with pytest.raises(error, match=match):
        source.read_weight(Q)


def test_a_weight_of_zeros_may_have_scales_of_zero(tmp_path):
    parts = {"weight": torch.zeros(8, 8).to(E4M3), "weight_scale": torch.zeros(8, 1)}
    assert not one(tmp_path, parts, FP8).read_dense(Q).any()


@pytest.mark.parametrize("config", [FP8, {**FP8, "weight_block_size": [16, 16]}])
@pytest.mark.parametrize("dtype", [F32, E8M0])
def test_no_fault_is_silent_that_a_header_shows(tmp_path, config, dtype):
    shape = (48, 1) if config is FP8 else (3, 3)
    tensors = {f"{m}.weight": codes((48, 40), seed=i) for i, m in enumerate((Q, DOWN))}
    tensors |= {f"{m}.weight_scale_inv": scales(shape, dtype) for m in (Q, DOWN)}
    tensors |= {f"{m}.input_scale": torch.tensor([0.5]) for m in (Q, DOWN)}
    tensors |= {"model.norm.weight": torch.ones(40, dtype=BF16)}
    folder = write(tmp_path / "sound", tensors, {**config, "activation_scheme": "static"})
    silent = silent_faults(folder, tmp_path)
    # The only evidence of rows and columns of a weight is the weight itself and its scales.
    assert {key.split()[0] for key in silent} <= {"truncate", "narrow", "transpose"}
    assert all(key.split()[1].endswith(".weight") for key in silent)


def test_a_hundred_thousand_tensors_take_seconds(tmp_path):
    tensors = {}
    for number in range(50_000):
        module = f"model.layers.{number // 800}.mlp.experts.{number % 800}.gate_proj"
        for leaf, dtype, shape in (("weight", E4M3, (64, 64)), ("weight_scale_inv", F32, (1, 1))):
            name = f"{module}.{leaf}"
            tensors[name] = TensorEntry(name, dtype, shape, tmp_path, 0, 64)
    names = [f"model.layers.{i}.mlp.gate" for i in range(2000)]
    config = {**FP8, "weight_block_size": [64, 64], "modules_to_not_convert": [*names, "lm_head"]}
    checkpoint = Checkpoint("many", tmp_path, {}, tensors, quantization_config=config)
    before = time.process_time()
    assert len(Fp8Reader(checkpoint).weights()) == 50_000
    assert time.process_time() - before < 10


# -- models ----------------------------------------------------------------------------------------

MODELS = (
    "transformers-quant-5.24.0/odd-llama-fp8-block128-partial",
    "transformers-quant-5.24.0/micro-llama-mxfp8-1x32-u8",
    "transformers-quant-5.24.0/micro-llama-fbgemm-fp8-bf16scale",
    "transformers-quant-5.24.0/tiny-deepseek-v3-mtp-fp8-block32",
    "transformers-quant-5.24.0/tiny-qwen3-moe-fp8-block128",
    "gptqmodel-7.7.0/micro-llama-fp8-block64",
    "amd-quark-0.13/nano-llama-FP8-customfp8",
)


@needs_checkpoints
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_dense_weights(name, tmp_path):
    truth = Truth(CHECKPOINTS / name)
    options = PlanOptions(dtype=F32)
    quantload.convert(truth.folder, tmp_path / "dense", "dense", options=options)
    dense = load_file(tmp_path / "dense" / "model.safetensors")
    for key in truth.weights:
        assert not truth.difference(key, dense[key.partition("@")[0]]), key
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=F32)
    model = quantload.load(truth.folder, device="cpu", dtype=F32, quantize_inputs=False)
    with torch.no_grad():
        expected = plain(truth.tensors["input_ids"], use_cache=False).logits
        found = model(truth.tensors["input_ids"], use_cache=False).logits
    assert (found - expected).norm() <= 1e-4 * expected.norm()
    stored = truth.tensors["logits"].float()
    assert (found - stored).norm() <= 0.02 * stored.norm()
