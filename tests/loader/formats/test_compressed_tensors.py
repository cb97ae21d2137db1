"""compressed-tensors against its own compressors, and against checkpoints of real producers."""

import hashlib
import json
from pathlib import Path

import compressed
import pytest
import tiny_checkpoints as tiny
import torch
from converting import converted, opened
from hypothesis import given, settings
from hypothesis import strategies as st
from loading import logits_errors
from safetensors.torch import load_file
from truth import CHECKPOINTS, Truth, read_named

from quantload.errors import FormatMismatch, MissingTensor, QuantloadError, UnsupportedVariant
from quantload.loader.formats import open_source
from quantload.loader.formats.compressed_tensors import encode, layout
from quantload.loader.formats.compressed_tensors_config import build_config
from quantload.loader.open import open_checkpoint
from quantload.quant.qtensor import QuantTensor
from quantload.quant.rtn import quantize_rtn
from quantload.quant.scheme import parse_scheme

GOLDEN = Path(__file__).parents[2] / "golden" / "compressed-tensors"
MODULE = "model.layers.0.mlp.down_proj"


# -- golden checkpoints ----------------------------------------------------------------------------


@pytest.mark.parametrize("folder", sorted(GOLDEN.glob("*/")), ids=lambda folder: folder.name)
def test_golden(folder):
    expected = json.loads((folder / "expected.json").read_text())
    weight = open_source(open_checkpoint(folder)).read_dense(expected["module"])
    assert str(weight.dtype) == f"torch.{expected['dtype']}"
    assert list(weight.shape) == expected["shape"]
    assert weight[0, :8].tolist() == expected["first_values"]
    raw = weight.contiguous().view(torch.uint8).numpy().tobytes()
    assert hashlib.sha256(raw).hexdigest() == expected["sha256"]


def test_there_is_golden_data():
    assert len(list(GOLDEN.glob("*/expected.json"))) == 6


# -- our encoding against that of the library ------------------------------------------------------


def _theirs(weight, name):
    scheme = compressed.preset(name)
    args = scheme.weights
    low, high = compressed._range(_padded(weight, args), args)
    scale, zero = compressed.library().calculate_qparams(low, high, args)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    kind = "float" if args.type == "float" else "int" if scheme.input_activations else "pack"
    return compressed.compressors()[f"{kind}-quantized"].compress(state, scheme)


def _padded(weight, args):
    if args.strategy != "block":
        return weight
    height, width = args.block_structure
    return torch.nn.functional.pad(
        weight, (0, -weight.shape[1] % width, 0, -weight.shape[0] % height)
    )


NAMES = ["W4A16", "W4A16_ASYM", "W8A16", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(64, 128), (33, 256), (1, 384), (130, 128)])
@pytest.mark.parametrize("name", NAMES)
def test_encode_equals_the_library(name, shape, dtype):
    weight = (torch.randn(shape) * torch.logspace(-3, 1, shape[0])[:, None]).to(dtype)
    weight[0, :3] = 0
    scheme = parse_scheme(name)
    ours = encode(quantize_rtn(weight, scheme.weight), scheme)
    theirs = _theirs(weight, name)
    assert set(ours) == {leaf for leaf, tensor in theirs.items() if tensor is not None}
    for leaf, tensor in ours.items():
        assert tensor.dtype == theirs[leaf].dtype, leaf
        raw = [part.reshape(-1).view(torch.uint8) for part in (tensor, theirs[leaf])]
        assert tensor.shape == theirs[leaf].shape, leaf
        assert torch.equal(*raw), leaf


@pytest.mark.parametrize("shape", [(130, 200), (1, 1), (257, 129)])
def test_partial_blocks_equal_the_library(shape):
    weight = torch.randn(shape, dtype=torch.bfloat16)
    ours = encode(quantize_rtn(weight, parse_scheme("FP8_BLOCK").weight), parse_scheme("FP8_BLOCK"))
    theirs = _theirs(weight, "FP8_BLOCK")
    assert torch.equal(ours["weight_scale"], theirs["weight_scale"])
    assert torch.equal(ours["weight"].view(torch.uint8), theirs["weight"].view(torch.uint8))


@pytest.mark.parametrize("name", [*NAMES, "W4A16:g32", "W4A16_ASYM:g32", "W8A16:channel"])
@pytest.mark.parametrize("shape", [(64, 128), (3, 256), (9, 160)])
def test_layout_is_what_encode_makes(name, shape):
    scheme = parse_scheme(name).fitted(shape[1])
    leaves = encode(quantize_rtn(torch.randn(shape), scheme.weight), scheme)
    planned = layout(scheme, shape, torch.float32)
    assert {leaf: (t.dtype, tuple(t.shape)) for leaf, t in leaves.items()} == {
        leaf: (spec.dtype, spec.shape) for leaf, spec in planned.items()
    }


# -- round trip through files ----------------------------------------------------------------------


def _write(folder, scheme, leaves, **changes):
    config = build_config({MODULE: scheme}, []) | changes.pop("config", {})
    arguments = config["config_groups"].get("group_0")
    if arguments is not None:
        arguments |= changes.pop("group", {})
        arguments["weights"] |= changes.pop("weights", {})
    assert not changes
    named = {f"{MODULE}.{leaf}": tensor.contiguous() for leaf, tensor in leaves.items()}
    return tiny.write(folder, {"quantization_config": config}, named)


def _made(name, shape=(32, 128), dtype=torch.bfloat16):
    scheme = parse_scheme(name)
    quantized = quantize_rtn(torch.randn(shape).to(dtype), scheme.weight)
    return scheme, quantized, encode(quantized, scheme)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", [*NAMES, "W4A16_ASYM:g32", "W4A16:channel"])
@pytest.mark.parametrize("shape", [(32, 128), (7, 128), (1, 256)])
def test_round_trip(tmp_path, name, shape, dtype):
    scheme, quantized, leaves = _made(name, shape, dtype)
    source = open_source(open_checkpoint(_write(tmp_path, scheme, leaves)))
    weight = source.weights[MODULE]
    assert weight.shape == shape
    assert weight.scheme == scheme
    assert source.plain == {}
    read = source.read_weight(MODULE)
    assert isinstance(read, QuantTensor)
    assert torch.equal(read.codes.view(torch.uint8), quantized.codes.view(torch.uint8))
    assert torch.equal(read.scale, quantized.scale)
    assert (read.zero is None) == (quantized.zero is None)
    assert read.zero is None or torch.equal(read.zero, quantized.zero)
    assert torch.equal(source.read_dense(MODULE), quantized.dequantize())


def test_decided_by_and_encoding(tmp_path):
    scheme, _, leaves = _made("W4A16")
    weight = open_source(open_checkpoint(_write(tmp_path, scheme, leaves))).weights[MODULE]
    assert weight.decided_by == "group_0: Linear"
    assert weight.encoding == "pack-quantized W4A16"
    assert weight.dtype == torch.bfloat16


def test_scalar_and_flat_scales(tmp_path):
    scheme, _, leaves = _made("FP8_DYNAMIC")
    expected = leaves["weight"].float() * leaves["weight_scale"].float()
    flat = {**leaves, "weight_scale": leaves["weight_scale"].flatten()}
    source = open_source(open_checkpoint(_write(tmp_path / "flat", scheme, flat)))
    assert torch.equal(source.read_dense(MODULE), expected.bfloat16())
    for number, shape in enumerate([(), (1,), (1, 1)]):
        one = {**leaves, "weight_scale": torch.full(shape, 0.5)}
        folder = _write(tmp_path / str(number), scheme, one, weights={"strategy": "tensor"})
        source = open_source(open_checkpoint(folder))
        assert torch.equal(source.read_dense(MODULE), leaves["weight"].float() * 0.5)


def test_rows_of_scales_where_the_config_says_tensor(tmp_path):
    scheme, quantized, leaves = _made("FP8_DYNAMIC")
    folder = _write(tmp_path, scheme, leaves, weights={"strategy": "tensor"})
    source = open_source(open_checkpoint(folder))
    assert source.weights[MODULE].scheme.weight.granularity == "channel"
    assert torch.equal(source.read_dense(MODULE), quantized.dequantize())


def test_unpacked_zero_points(tmp_path):
    scheme, quantized, leaves = _made("W4A16_ASYM:g32")
    leaves["weight_zero_point"] = quantized.zero
    source = open_source(open_checkpoint(_write(tmp_path, scheme, leaves)))
    assert torch.equal(source.read_dense(MODULE), quantized.dequantize())


def test_groups_out_of_order(tmp_path):
    scheme, quantized, leaves = _made("W4A16:g32", (16, 128))
    order = torch.randperm(128)
    index = (torch.arange(128) // 32)[order].to(torch.int32)
    expected = (quantized.codes.float() * quantized.scale.float()[:, index.long()]).bfloat16()
    source = open_source(
        open_checkpoint(_write(tmp_path / "a", scheme, leaves | {"weight_g_idx": index}))
    )
    assert torch.equal(source.read_dense(MODULE), expected)
    unset = leaves | {"weight_g_idx": torch.full((128,), -1, dtype=torch.int32)}
    source = open_source(open_checkpoint(_write(tmp_path / "b", scheme, unset)))
    assert torch.equal(source.read_dense(MODULE), quantized.dequantize())


@pytest.mark.parametrize("value", [4, 1000, -2])
def test_groups_that_do_not_exist(tmp_path, value):
    scheme, _, leaves = _made("W4A16:g32")
    index = (torch.arange(128) // 32).to(torch.int32)
    index[5] = value
    source = open_source(
        open_checkpoint(_write(tmp_path, scheme, leaves | {"weight_g_idx": index}))
    )
    with pytest.raises(FormatMismatch, match=r"weight_g_idx`.*expected 128 numbers of 4 groups"):
        source.read_weight(MODULE)


# -- config against headers ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"weights": {"num_bits": 8}},
            FormatMismatch,
            "`(32, 32)` for a 8-bit weight of `(32, 128)`",
        ),
        ({"weights": {"group_size": 64}}, FormatMismatch, "`(32, 1)`, expected `(32, 2)`"),
        ({"weights": {"symmetric": False}}, MissingTensor, "weight_zero_point` is missing"),
        (
            {"group": {"format": "float-quantized"}},
            FormatMismatch,
            "format `float-quantized` of config group `group_0` holds `e4m3`, but the group says "
            "`int4` in groups of 128",
        ),
        ({"group": {"format": "int-quantized"}}, MissingTensor, ".weight` is missing"),
        ({"group": {"format": "marlin-24"}}, UnsupportedVariant, "`marlin-24` is not read"),
        ({"weights": {"actorder": "group"}}, MissingTensor, "weight_g_idx` is missing"),
        ({"weights": {"actorder": "spiral"}}, UnsupportedVariant, "`actorder` is `spiral`"),
        ({"group": {"targets": ["re:(", "Linear"]}}, FormatMismatch, "not a regular expression"),
        (
            {"group": {"format": "nvfp4-pack-quantized"}},
            FormatMismatch,
            "`nvfp4-pack-quantized` of config group `group_0` holds symmetric `e2m1` in groups of "
            "16, but the group says `int4`",
        ),
    ],
)
def test_config_that_contradicts_the_headers(tmp_path, changes, error, message):
    scheme, _, leaves = _made("W4A16")
    folder = _write(tmp_path, scheme, leaves, **changes)
    with pytest.raises(error) as caught:
        open_source(open_checkpoint(folder))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("leaf", "tensor", "error"),
    [
        ("weight_packed", None, MissingTensor),
        ("weight_scale", None, MissingTensor),
        ("weight_shape", None, MissingTensor),
        ("weight_packed", torch.zeros(32, 16, dtype=torch.uint8), FormatMismatch),
        ("weight_packed", torch.zeros(32, 15, dtype=torch.int32), FormatMismatch),
        ("weight_packed", torch.zeros(31, 16, dtype=torch.int32), FormatMismatch),
        ("weight_packed", torch.zeros(2, 32, 16, dtype=torch.int32), UnsupportedVariant),
        ("weight_shape", torch.tensor([32, 128, 1]), FormatMismatch),
        ("weight_shape", torch.tensor([32.0, 128.0]), FormatMismatch),
        ("weight_shape", torch.tensor([-32, 128]), FormatMismatch),
        ("weight_shape", torch.tensor([32, 0]), FormatMismatch),
        ("weight_shape", torch.tensor(7), FormatMismatch),
        ("weight_scale", torch.ones(32, 2), FormatMismatch),
        ("weight_scale", torch.ones(1, 1), FormatMismatch),
        ("weight_scale", torch.ones(32, 1, dtype=torch.uint8), FormatMismatch),
        ("weight_global_scale", torch.ones(1), UnsupportedVariant),
        ("weight_zero_point", torch.zeros(3, 1, dtype=torch.int32), FormatMismatch),
        ("weight_zero_point", torch.zeros(32, 2, dtype=torch.int8), FormatMismatch),
    ],
)
def test_tensors_that_do_not_fit(tmp_path, leaf, tensor, error):
    scheme, _, leaves = _made("W4A16")
    leaves = {**leaves, leaf: tensor}
    folder = _write(tmp_path, scheme, {k: v for k, v in leaves.items() if v is not None})
    with pytest.raises(error, match=rf"{MODULE}\.|module has"):
        open_source(open_checkpoint(folder))


def test_codes_of_another_dtype(tmp_path):
    scheme, _, leaves = _made("W8A8")
    leaves["weight"] = leaves["weight"].to(torch.uint8)
    with pytest.raises(FormatMismatch, match=r"is `torch.uint8`, expected `torch.int8`"):
        open_source(open_checkpoint(_write(tmp_path, scheme, leaves)))


def _llama_folder(folder, quantized, *, targets, ignore=()):
    content = tiny.config(layers=1)
    made = tiny.tensors(content)
    scheme = parse_scheme("W4A16:g32")
    for module in quantized:
        weight = made.pop(f"{module}.weight")
        leaves = encode(quantize_rtn(weight, scheme.weight), scheme)
        made |= {f"{module}.{leaf}": tensor for leaf, tensor in leaves.items()}
    config = build_config(dict.fromkeys(quantized, scheme), ignore)
    config["config_groups"]["group_0"]["targets"] = list(targets)
    return tiny.write(folder, {**content, "quantization_config": config}, made)


DOWN = "model.layers.0.mlp.down_proj"
UP = "model.layers.0.mlp.up_proj"


def test_a_class_target_with_plain_tensors_is_full_precision(tmp_path):
    folder = _llama_folder(tmp_path, [DOWN], targets=["Linear"])
    source = open_source(open_checkpoint(folder))
    assert [m for m, weight in source.weights.items() if weight.is_quantized] == [DOWN]
    assert source.weights[UP].encoding == "BF16"


def test_an_exact_target_with_plain_tensors(tmp_path):
    folder = _llama_folder(tmp_path, [DOWN], targets=[DOWN, UP])
    with pytest.raises(FormatMismatch, match=rf"names modules that are not quantized.*`{UP}`"):
        open_source(open_checkpoint(folder))


def test_an_ignored_module_that_is_packed(tmp_path):
    folder = _llama_folder(tmp_path, [DOWN, "lm_head"], targets=["Linear"], ignore=["lm_head"])
    weight = open_source(open_checkpoint(folder)).weights["lm_head"]
    assert weight.is_quantized
    assert weight.decided_by == "group_0: the headers (the config leaves it out)"


_TOKENS = {"num_bits": 8, "dynamic": True, "strategy": "token"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_activations": _TOKENS}, "2 groups fit it"),
        ({"weights": {"num_bits": 8}}, ""),
        ({}, ""),
    ],
)
def test_a_packed_module_that_no_group_names(tmp_path, changes, message):
    """The only group that fits reads it; of several that read it differently, none."""
    folder = _llama_folder(tmp_path, [DOWN, UP], targets=[DOWN])
    config = json.loads((folder / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    groups["group_1"] = {**groups["group_0"], "targets": ["re:nothing"], **changes}
    groups["group_1"]["weights"] = groups["group_0"]["weights"] | changes.get("weights", {})
    (folder / "config.json").write_text(json.dumps(config))
    if message:
        with pytest.raises(FormatMismatch, match=f"module `{UP}` is quantized.*{message}"):
            opened(folder)
        return
    source = opened(folder)
    assert source.weights[UP].decided_by == "group_0: the headers (the config leaves it out)"
    assert any("modules are quantized in the files although" in text for text in source.warnings)


def test_a_packed_module_that_no_group_fits(tmp_path):
    folder = _llama_folder(tmp_path, [DOWN, UP], targets=[DOWN])
    config = json.loads((folder / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    for number, bits in enumerate((2, 8)):
        weights = groups["group_0"]["weights"] | {"num_bits": bits}
        groups[f"group_{number + 1}"] = {**groups["group_0"], "targets": [], "weights": weights}
    groups["group_0"] = {**groups["group_0"], "weights": None}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(FormatMismatch, match="no config group names it, and none fits it"):
        opened(folder)


def test_fused_packed_experts_are_not_taken_for_plain_tensors(tmp_path):
    scheme, _, leaves = _made("W4A16")
    folder = _write(tmp_path, scheme, leaves)
    extra = {"model.layers.0.mlp.experts.gate_up_proj_packed": torch.zeros(2, 4, dtype=torch.int32)}
    tiny.write(
        folder,
        json.loads((folder / "config.json").read_text()),
        load_file(folder / "model.safetensors") | extra,
    )
    with pytest.raises(
        UnsupportedVariant, match=r"`model\.layers\.0\.mlp\.experts\.gate_up_proj_packed`"
    ):
        open_source(open_checkpoint(folder))


def test_weights_in_fp8_without_a_scale(tmp_path):
    scheme, _, leaves = _made("FP8_DYNAMIC")
    folder = _write(tmp_path, scheme, {"weight": leaves["weight"]})
    with pytest.raises(MissingTensor, match="weight_scale` is missing"):
        open_source(open_checkpoint(folder))


# -- nothing but our own errors --------------------------------------------------------------------

_SCALAR = st.sampled_from([None, True, -1, 0, 3, 4, 8, 128, 1.5, "", "int", "group", [], {}, ["x"]])
_WEIGHTS = st.dictionaries(
    st.sampled_from(
        ["num_bits", "type", "strategy", "group_size", "symmetric", "block_structure", "dynamic"]
    ),
    _SCALAR
    | st.sampled_from(["float", "block", "channel", "tensor", "128x", "1x0", [1, 2], [0, 0]]),
)
_GROUP = st.fixed_dictionaries(
    {"weights": _WEIGHTS | _SCALAR},
    optional={
        "targets": st.just(["Linear"]) | _SCALAR,
        "input_activations": _WEIGHTS | _SCALAR,
        "format": st.sampled_from(["pack-quantized", "float-quantized", 4, None]),
    },
)
_CONFIG = st.fixed_dictionaries(
    {"quant_method": st.just("compressed-tensors")},
    optional={
        "config_groups": st.dictionaries(st.sampled_from(["group_0", "W4A16", "dense"]), _GROUP)
        | st.dictionaries(st.sampled_from(["W4A16", "W9", "dense"]), _SCALAR)
        | _SCALAR,
        "format": st.sampled_from(["pack-quantized", "int-quantized"]) | _SCALAR,
        "ignore": _SCALAR | st.just(["re:["]) | st.just([3]),
        "sparsity_config": _SCALAR,
        "transform_config": _SCALAR,
    },
)


@settings(max_examples=400)
@given(config=_CONFIG)
def test_any_config_is_read_or_refused(tmp_path_factory, config):
    folder = tmp_path_factory.getbasetemp() / "any_ct_config"
    if not folder.exists():
        _write(folder, *(_made("W4A16")[index] for index in (0, 2)))
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    try:
        source = open_source(open_checkpoint(folder))
        weight = source.read_dense(MODULE)
    except QuantloadError as error:
        assert str(error)  # noqa: PT017 - either outcome is right
    else:
        assert weight.shape == (32, 128)


_DTYPES = st.sampled_from([torch.int32, torch.uint8, torch.int8, torch.bfloat16, torch.int64])


@settings(max_examples=300)
@given(
    leaves=st.dictionaries(
        st.sampled_from(
            [
                *("weight_packed", "weight_scale", "weight_shape", "weight_zero_point"),
                *("weight_g_idx", "weight", "input_scale", "bias"),
            ]
        ),
        st.tuples(st.lists(st.sampled_from([0, 1, 2, 4, 16, 32]), max_size=3), _DTYPES),
    ),
    method=st.sampled_from(["W4A16", "W4A16_ASYM", "W8A8", "FP8_BLOCK"]),
)
def test_any_tensors_are_read_or_refused(tmp_path_factory, leaves, method):
    scheme = parse_scheme(method)
    tensors = {leaf: torch.full(shape, 3).to(dtype) for leaf, (shape, dtype) in leaves.items()}
    folder = _write(tmp_path_factory.getbasetemp() / "any_ct_tensors", scheme, tensors)
    try:
        source = open_source(open_checkpoint(folder))
        shapes = {module: source.read_dense(module).shape for module in source.weights}
    except QuantloadError as error:
        assert str(error)  # noqa: PT017 - either outcome is right
    else:
        assert shapes == {m: torch.Size(weight.shape) for m, weight in source.weights.items()}


def test_a_symmetric_scheme_with_zero_points(tmp_path):
    """Producers store zeros for symmetric schemes; anything else contradicts the config."""
    scheme, quantized, leaves = _made("W4A16")
    zero = torch.zeros(quantized.scale.shape, dtype=torch.int8)
    source = opened(_write(tmp_path / "zeros", scheme, leaves | {"weight_zero_point": zero}))
    assert source.read_weight(MODULE).zero is None
    source = opened(_write(tmp_path / "ones", scheme, leaves | {"weight_zero_point": zero + 1}))
    with pytest.raises(FormatMismatch, match=r"weight_zero_point` is not all zero"):
        source.read_weight(MODULE)


def test_packed_and_plain_at_once(tmp_path):
    scheme, _, leaves = _made("W4A16")
    plain = torch.zeros_like(leaves["weight_packed"])
    folder = _write(tmp_path, scheme, leaves | {"weight": plain})
    with pytest.raises(FormatMismatch, match="has both `weight` and `weight_packed`"):
        opened(folder)


def test_flags_that_are_no_flags(tmp_path):
    scheme, _, leaves = _made("W4A16")
    folder = _write(tmp_path, scheme, leaves, weights={"symmetric": "false"})
    with pytest.raises(FormatMismatch, match="`symmetric` is `'false'`, expected true or false"):
        opened(folder)


# -- whole models ----------------------------------------------------------------------------------

MODELS = [
    "compressed-tensors-0.17.0/odd-llama-W6A16-channel-oldpack",
    "compressed-tensors-0.20.1/nano-llama-MXFP6A8",
    "compressed-tensors-0.20.1/odd-llama-converted-modelopt-NVFP4",
    "llmcompressor-0.14.0.1/micro-qwen3-moe-FP8_DYNAMIC",
    "llmcompressor-0.14.0.1/nano-llama-MIXED-presets",
    "llmcompressor-0.14.0.1/tiny-gemma3-FP8_DYNAMIC-embed-lmhead",
    "llmcompressor-0.7.1/nano-llama-W4A16_ASYM-gptq-actorder-group",
    "auto-round-0.16.1/nano-llama-llmc-MXFP4",
]


@pytest.mark.skipif(not CHECKPOINTS.is_dir(), reason="no folder shared/checkpoints")
@pytest.mark.parametrize("name", MODELS)
def test_logits(name):
    exact, rounded = logits_errors(CHECKPOINTS / name)
    assert exact < 1e-4
    assert rounded < 0.02


@pytest.mark.skipif(not CHECKPOINTS.is_dir(), reason="no folder shared/checkpoints")
@pytest.mark.parametrize("name", MODELS)
def test_converted_to_full_precision(name, tmp_path):
    truth = Truth(CHECKPOINTS / name)
    output = opened(converted(truth.folder, tmp_path / "out", "dense", dtype=torch.float32))
    for key, expected in truth.weights.items():
        written = read_named(output, key)
        assert written.dtype == torch.float32
        assert torch.equal(written, expected.float()), key
