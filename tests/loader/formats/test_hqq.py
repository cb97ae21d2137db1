"""HQQ against a slow reference of its byte layout, and its own files."""

import json
import math

import numpy as np
import pytest
import torch
from faults import silent_faults
from safetensors.torch import save_file
from truth import CHECKPOINTS, Truth

import quantload
from quantload.errors import FormatMismatch, MissingTensor, NonFiniteWeight, UnsupportedVariant
from quantload.loader.formats import open_source
from quantload.loader.formats.hqq_meta import linear_tag
from quantload.loader.open import open_checkpoint
from quantload.loader.plan import PlanOptions

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
Q, UP = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"
PACKINGS = {  # nbits -> name, bits of a field, fields of a word, numpy dtype of a word
    8: ("8bit_u8", 8, 1, np.uint8),
    6: ("8bit_u8", 8, 1, np.uint8),
    5: ("8bit_u8", 8, 1, np.uint8),
    4: ("4bit_u8", 4, 2, np.uint8),
    3: ("3bit_32", 3, 10, np.int32),
    2: ("2bit_u8", 2, 4, np.uint8),
    1.58: ("2bit_u8", 2, 4, np.uint8),
    1: ("1bit_u8", 1, 8, np.uint8),
}
needs_checkpoints = pytest.mark.skipif(
    not CHECKPOINTS.is_dir(), reason="no folder shared/checkpoints"
)


def pack(codes, nbits):
    """Pack rows of codes, word by word."""
    _, bits, fields, dtype = PACKINGS[nbits]
    rows, columns = codes.shape
    height = -(-rows // fields)
    words = np.zeros((height, columns), dtype=dtype)
    for row in range(rows):
        field, word = divmod(row, height)
        for column in range(columns):
            words[word, column] |= dtype(int(codes[row, column]) << (bits * (fields - 1 - field)))
    return torch.from_numpy(words)


def quantized(shape, *, nbits=4, group_size=64, axis=1, dtype=BF16, channel_wise=True, seed=0):
    """Random codes as they are packed, scale, zero, and the values by hqq's own formula."""
    rng = np.random.default_rng(seed)
    count, rows = math.prod(shape), shape[0]
    grid = (rows, count // rows)
    if group_size is not None and channel_wise:
        grid = (count // group_size, group_size) if axis == 1 else (group_size, count // group_size)
    codes = rng.integers(0, round(2**nbits), grid)
    scales = (grid[0], 1) if axis == 1 else (1, grid[1])
    scales = scales if channel_wise else ()
    scale = torch.tensor(rng.uniform(0.01, 0.1, scales)).to(dtype)
    zero = torch.tensor(rng.uniform(-1, 2**nbits, scales)).to(dtype)
    values = ((torch.from_numpy(codes).to(dtype) - zero) * scale).reshape(shape)
    return codes, scale, zero, values


def text(word):
    return torch.tensor([ord(letter) for letter in word], dtype=torch.uint8)


def leaves_of(shape, *, nbits=4, group_size=64, axis=1, dtype=BF16, view=None, **options):
    """Tensors of one layer by leaf, as transformers 4.51 saves them, and its values."""
    codes, scale, zero, values = quantized(
        shape, nbits=nbits, group_size=group_size, axis=axis, dtype=dtype, **options
    )
    words = pack(codes, nbits)
    integer = torch.float32 if isinstance(nbits, float) else torch.int32
    leaves = {
        "W_q": words if view is None else words.view(view),
        "scale": scale,
        "zero": zero,
        "nbits": torch.tensor(nbits, dtype=integer),
        "axis": torch.tensor(axis, dtype=torch.int32),
        "shape": torch.tensor(shape),
        "packing": text(PACKINGS[nbits][0]),
        "view_as_float": torch.tensor(int(view is not None), dtype=torch.uint8),
        "channel_wise": torch.tensor(int(options.get("channel_wise", True)), dtype=torch.uint8),
        "compute_dtype": text(str(dtype)),
        "unpack_view_dtype": text(f"torch.{PACKINGS[nbits][3].__name__}"),
        "quant_scale": torch.tensor(0, dtype=torch.uint8),
        "quant_zero": torch.tensor(0, dtype=torch.uint8),
        "encoded_state_dict": torch.tensor(1, dtype=torch.uint8),
        "stores_quant_config": torch.tensor(1, dtype=torch.uint8),
        "offload_meta": torch.tensor(0, dtype=torch.uint8),
        "optimize": torch.tensor(1, dtype=torch.uint8),
        "round_zero": torch.tensor(0, dtype=torch.uint8),
    }
    if group_size is not None:
        leaves["group_size"] = torch.tensor(group_size, dtype=torch.int32)
    return leaves, values


def params(**changes):
    return {"weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 1, **changes}}


def config(quant=None, skip=("lm_head",), **changes):
    quant = params(**changes) if quant is None else quant
    return {"quant_method": "hqq", "quant_config": quant, "skip_modules": list(skip)}


def write(folder, tensors, quantization_config):
    folder.mkdir(parents=True, exist_ok=True)
    content = {"model_type": "llama"}
    if quantization_config is not None:
        content["quantization_config"] = quantization_config
    (folder / "config.json").write_text(json.dumps(content))
    save_file(tensors, folder / "model.safetensors")
    return folder


def named(module, leaves):
    return {f"{module}.{leaf}": part for leaf, part in leaves.items()}


def read(folder):
    return open_source(open_checkpoint(folder))


def one(tmp_path, *, without=(), changes=None, said=None, **options):
    leaves = leaves_of((8, 128), **options)[0] | (changes or {})
    leaves = {leaf: part for leaf, part in leaves.items() if leaf not in without}
    return write(tmp_path / "model", named(Q, leaves), said or config())


# -- values ------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbits", PACKINGS)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_bits_axes_and_dtypes(tmp_path, nbits, axis, dtype):
    options = {"nbits": nbits, "axis": axis, "group_size": 16, "dtype": dtype}
    leaves, expected = leaves_of((24, 32), **options)
    del options["dtype"]
    source = read(write(tmp_path / "model", named(Q, leaves), config(**options)))
    weight, found = source.weights[Q], source.read_dense(Q)
    assert (weight.shape, weight.dtype, found.dtype) == ((24, 32), dtype, dtype)
    assert torch.equal(found, expected)
    assert isinstance(source.read_weight(Q), torch.Tensor) == (axis == 0)
    assert not source.plain
    assert weight.scheme.weight.symmetric is False
    assert weight.decided_by == "quant_config: all"


@pytest.mark.parametrize(
    ("shape", "options", "block"),
    [
        ((8, 96), {"group_size": 64}, (1, 32)),  # groups straddle rows
        ((16, 40), {"group_size": 64}, (1, 8)),
        ((16, 32), {"group_size": 64}, (2, 32)),
        ((30, 40), {"nbits": 3, "group_size": 8}, (1, 8)),  # 150 groups, no padding
        ((7, 24), {"nbits": 3, "group_size": 8}, (1, 8)),  # 21 groups in 3 words
        ((8, 40), {"group_size": None}, (1, 40)),
        ((8, 40), {"group_size": None, "axis": 0}, (8, 1)),
        ((16, 40), {"group_size": 16, "axis": 0}, (16, 1)),  # a group is a whole column
        ((8, 40), {"group_size": None, "channel_wise": False}, (8, 40)),
        ((8, 40), {"group_size": 8, "channel_wise": False}, (8, 40)),
    ],
)
def test_shapes(tmp_path, shape, options, block):
    leaves, expected = leaves_of(shape, **options)
    said = {key: value for key, value in options.items() if key != "channel_wise"}
    source = read(write(tmp_path / "model", named(Q, leaves), config(**{"nbits": 4, **said})))
    found = source.read_weight(Q)
    assert found.block == block == source.weights[Q].scheme.weight.block_of(*shape)
    assert torch.equal(found.dequantize(), expected)
    assert torch.equal(found.evaluated_in(F32).dequantize(), expected)


@pytest.mark.parametrize(
    ("nbits", "view"), [(4, BF16), (4, F32), (3, F32), (3, BF16), (8, F16), (2, F32)]
)
def test_words_seen_as_floats(tmp_path, nbits, view):
    leaves, expected = leaves_of((24, 32), nbits=nbits, group_size=16, view=view)
    said = config(nbits=nbits, group_size=16)
    source = read(write(tmp_path / "model", named(Q, leaves), said))
    assert torch.equal(source.read_weight(Q).dequantize(), expected)


def test_files_from_before_some_of_the_numbers(tmp_path):
    leaves, expected = leaves_of((8, 64))
    late = ("view_as_float", "channel_wise", "compute_dtype", "quant_scale", "quant_zero")
    leaves = {leaf: part for leaf, part in leaves.items() if leaf not in late}
    source = read(write(tmp_path / "model", named(Q, leaves), config()))
    assert torch.equal(source.read_weight(Q).dequantize(), expected)


# -- hqq's own files ---------------------------------------------------------------------------


def module_of(shape, *, again=(), **options):
    """What `qmodel.pt` holds of one layer, and its values."""
    codes, scale, zero, values = quantized(shape, **options)
    nbits = options.get("nbits", 4)
    content = {
        "W_q": torch.nn.Parameter(pack(codes, nbits), requires_grad=False),
        "nbits": nbits,
        "group_size": options.get("group_size", 64),
        "shape": torch.Size(shape),
        "scale": scale,
        "zero": zero,
        "axis": options.get("axis", 1),
        "packing": PACKINGS[nbits][0],
        "unpack_view_dtype": torch.uint8,
        "view_as_float": False,
        "quant_scale": "scale" in again,
        "quant_zero": "zero" in again,
        "compute_dtype": BF16,
        "offload_meta": False,
    }
    if again:
        for part, wanted in (("scale", scale), ("zero", zero)):
            if part in again:
                content |= quantized_again(part, tuple(wanted.shape), wanted)
                del content[part]
        parts = {p: content[f"values_{p}"] if p in again else content[p] for p in ("scale", "zero")}
        grid = torch.from_numpy(codes).to(BF16)
        values = ((grid - parts["zero"]) * parts["scale"]).reshape(shape)
    return {key: part for key, part in content.items() if not key.startswith("values")}, values


def quantized_again(part, shape, wanted):
    """Scales in 8 bits and groups of 8 along axis 0, zero points in 8 bits with one scale."""
    options = {"nbits": 8, "axis": 0, "dtype": BF16, "seed": 5}
    if part == "scale":
        codes, scale, zero, values = quantized(shape, group_size=8, **options)
    else:
        codes, scale, zero, values = quantized(
            shape, group_size=None, channel_wise=False, **options
        )
    meta = {
        "nbits": 8,
        "group_size": 8 if part == "scale" else None,
        "shape": torch.Size(shape),
        "scale": scale,
        "zero": zero,
        "axis": 0,
        "packing": "8bit_u8",
        "unpack_view_dtype": torch.uint8,
        "view_as_float": False,
        "compute_dtype": BF16,
    }
    assert values.shape == wanted.shape
    return {f"{part}_q": pack(codes, 8), f"meta_{part}": meta, f"values_{part}": values}


def write_own(folder, content):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    torch.save(content, folder / "qmodel.pt")
    return folder


@pytest.mark.parametrize("again", [(), ("scale",), ("zero",), ("scale", "zero")])
def test_scales_that_are_quantized_again(tmp_path, again):
    content, expected = module_of((16, 64), group_size=16, again=again)
    bias = torch.ones(16, dtype=BF16)
    norm = {"weight": torch.ones(64, dtype=BF16)}
    folder = write_own(tmp_path / "m", {Q: {**content, "bias": bias}, "model.norm": norm})
    source = read(folder)
    found = source.read_weight(Q)
    assert source.format_name == "hqq"
    assert torch.equal(found.dequantize(), expected)
    assert set(source.plain) == {f"{Q}.bias", "model.norm.weight"}
    assert ("quantized again" in source.weights[Q].encoding) == bool(again)


@pytest.mark.parametrize("again", [(), ("scale", "zero")])
def test_files_of_early_versions_keep_all_under_meta(tmp_path, again):
    content, expected = module_of((16, 64), group_size=16, again=again)
    words = content.pop("W_q")
    late = ("unpack_view_dtype", "view_as_float", "compute_dtype", "offload_meta")
    meta = {key: part for key, part in content.items() if key not in late}
    folder = write_own(tmp_path / "m", {Q: {"W_q": words, "meta": meta, "bias": None}})
    source = read(folder)
    if not again:  # the dtype of the scales; else that of early versions
        assert torch.equal(source.read_weight(Q).dequantize(), expected)
    assert source.read_weight(Q).shape == (16, 64)
    assert not source.plain


def test_scales_and_zero_points_stacked(tmp_path):
    content, expected = module_of((16, 64))
    content["zero_scale"] = torch.stack((content.pop("zero"), content.pop("scale")))
    source = read(write_own(tmp_path / "m", {Q: content}))
    assert torch.equal(source.read_weight(Q).dequantize(), expected)


def test_quantized_scales_that_are_stacked_are_refused(tmp_path):
    content, _ = module_of((16, 64), group_size=16, again=("scale", "zero"))
    content["zero_scale"] = torch.stack([content.pop("scale_q")] * 2)
    with pytest.raises(UnsupportedVariant, match="quantized again and stacked"):
        read(write_own(tmp_path / "m", {Q: content}))


def test_quantized_scales_of_another_shape_are_refused(tmp_path):
    content, _ = module_of((16, 64), group_size=16, again=("scale",))
    content["meta_scale"]["shape"] = torch.Size((1, 64))
    with pytest.raises(FormatMismatch, match=r"have shape `\(1, 64\)`, expected `\(64, 1\)`"):
        read(write_own(tmp_path / "m", {Q: content}))


# -- which modules -----------------------------------------------------------------------------


def plain(rows=8, columns=64):
    return torch.ones(rows, columns, dtype=BF16)


def test_linear_tags():
    assert linear_tag("model.layers.31.self_attn.k_proj") == "self_attn.k_proj"
    assert linear_tag("model.layers.0.mlp.experts.12.up_proj") == "mlp.experts.up_proj"
    assert linear_tag("lm_head") == "lm_head"


def test_skipped_modules_and_parameters_by_tag(tmp_path):
    quant = {"self_attn.q_proj": params(), "mlp.up_proj": params(nbits=8), "mlp.down_proj": None}
    tensors = named(Q, leaves_of((8, 64))[0]) | named(UP, leaves_of((8, 64), nbits=8)[0])
    tensors |= {"model.layers.0.mlp.down_proj.weight": plain(), "lm_head.weight": plain()}
    source = read(write(tmp_path / "model", tensors, config(quant)))
    assert {m: w.is_quantized for m, w in source.weights.items()} == {
        Q: True,
        UP: True,
        "model.layers.0.mlp.down_proj": False,
        "lm_head": False,
    }
    assert source.weights[UP].decided_by == "quant_config: mlp.up_proj"
    assert source.warnings == ()


def test_a_quantized_module_that_the_config_skips(tmp_path):
    tensors = named(Q, leaves_of((8, 64))[0]) | named("lm_head", leaves_of((8, 64))[0])
    (warning,) = read(write(tmp_path / "model", tensors, config())).warnings
    assert warning.startswith("1 modules are quantized in the files although the config")


def test_a_config_without_quantized_tensors_is_read_as_full_precision(tmp_path):
    source = read(write(tmp_path / "model", {f"{Q}.weight": plain()}, config()))
    assert not source.is_quantized
    assert "asks to quantize while loading" in source.warnings[0]


@pytest.mark.parametrize(("axis", "size"), [(0, 8), (1, 128)])
def test_a_config_without_groups(tmp_path, axis, size):
    """Then hqq takes whole rows or columns, and writes down how long they are."""
    leaves, expected = leaves_of((8, 128), group_size=size, axis=axis)
    said = config(group_size=None, axis=axis)
    source = read(write(tmp_path / "model", named(Q, leaves), said))
    assert torch.equal(source.read_weight(Q).dequantize(), expected)


def test_no_config_at_all(tmp_path):
    leaves, expected = leaves_of((8, 64))
    source = read(write(tmp_path / "model", named(Q, leaves), None))
    assert torch.equal(source.read_weight(Q).dequantize(), expected)


# -- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (config(nbits=8), "says `nbits = 8`, but `4` lies beside"),
        (config(group_size=32), "says `group_size = 32`, but `64` lies beside"),
        (config(axis=0), "says `axis = 0`, but `1` lies beside"),
        (config(group_size=None), "says `group_size = None`, but `64` lies beside"),
        (config(group_size="64"), "`group_size` of the HQQ config is `'64'`, expected a number"),
        ({"quant_method": "hqq"}, "`quant_config` of the HQQ config is `None`"),
        (config({"q_proj": 4}), "quant_config.q_proj.weight_quant_params` .* is `None`"),
        (config([1]), r"`quant_config` of the HQQ config is `\[1\]`"),
        (config(skip=[1]), r"`skip_modules` of the HQQ config is `\[1\]`, expected a list"),
    ],
)
def test_errors_of_the_config(tmp_path, said, message):
    with pytest.raises(FormatMismatch, match=message):
        read(one(tmp_path, said=said))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"nbits": torch.tensor(7)}, FormatMismatch, "`nbits` is `7`, expected 8, 6, 5, 4, 3, 2"),
        ({"nbits": torch.tensor(8)}, UnsupportedVariant, "`packing` is `4bit_u8`, expected `8bit"),
        ({"packing": text("4bit_32")}, UnsupportedVariant, "`packing` is `4bit_32`"),
        ({"packing": torch.ones(3)}, UnsupportedVariant, "`packing` is `None`"),
        ({"packing": torch.zeros(300)}, FormatMismatch, "expected a number or a short text"),
        ({"axis": torch.tensor(2)}, FormatMismatch, "`axis` is `2`, expected 0 or 1"),
        ({"axis": torch.tensor([0, 1])}, FormatMismatch, "`axis` is `None`"),
        ({"axis": torch.tensor(0)}, FormatMismatch, "has shape"),
        ({"group_size": torch.tensor(48)}, FormatMismatch, "`group_size` is `48`, expected a div"),
        ({"group_size": torch.tensor(-1)}, FormatMismatch, "`group_size` is `-1`"),
        ({"group_size": torch.tensor(32)}, FormatMismatch, "W_q` has shape"),
        ({"shape": torch.tensor([1024])}, FormatMismatch, r"`shape` is `\[1024\]`, expected two"),
        ({"shape": torch.tensor([0, 128])}, FormatMismatch, r"`shape` is `\[0, 128\]`"),
        ({"shape": torch.ones(2)}, FormatMismatch, "`shape` is `None`"),
        ({"shape": torch.tensor([8, 64])}, FormatMismatch, "W_q` has shape"),
        (
            {"compute_dtype": text("torch.int8")},
            FormatMismatch,
            "`compute_dtype` is `'torch.int8'`",
        ),
        ({"quant_scale": torch.tensor(2)}, FormatMismatch, "`quant_scale` is `2`"),
        ({"quant_scale": torch.tensor(1)}, MissingTensor, "`nbits` is missing beside .* scales of"),
        ({"view_as_float": torch.tensor(1)}, FormatMismatch, "W_q` is `torch.uint8`"),
        ({"scale": torch.ones(8, 1, dtype=BF16)}, FormatMismatch, r"expected `\(16, 1\)`"),
        ({"zero": torch.ones(16, 1, dtype=torch.int32)}, FormatMismatch, "zero` is `torch.int32`"),
        ({"weight": plain()}, FormatMismatch, "has both `W_q` and `weight`"),
    ],
)
def test_errors_of_the_tensors(tmp_path, changes, error, message):
    with pytest.raises(error, match=message):
        read(one(tmp_path, changes=changes))


@pytest.mark.parametrize("leaf", ["W_q", "scale", "zero", "nbits", "axis", "shape", "packing"])
def test_missing_tensors(tmp_path, leaf):
    with pytest.raises(MissingTensor, match=f"`.*{leaf}` is missing"):
        read(one(tmp_path, without=(leaf,)))


@pytest.mark.parametrize("leaf", ["scale", "zero"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_scales_that_are_not_finite_are_refused(tmp_path, leaf, value):
    leaves = leaves_of((8, 128))[0]
    leaves[leaf][3] = value
    source = read(write(tmp_path / "model", named(Q, leaves), config()))
    with pytest.raises(NonFiniteWeight, match=f"`{Q}.{leaf}` holds NaN or infinity"):
        source.read_weight(Q)


@pytest.mark.parametrize("axis", [0, 1])
def test_no_fault_is_silent(tmp_path, axis):
    tensors = named(Q, leaves_of((8, 48), group_size=16, axis=axis)[0]) | {f"{UP}.weight": plain()}
    folder = write(tmp_path / "model", tensors, config(group_size=16, axis=axis))
    assert silent_faults(folder, tmp_path, without=("zero",)) == {}


# -- their own files ---------------------------------------------------------------------------


@needs_checkpoints
@pytest.mark.parametrize(
    "name",
    ["micro-llama-hqq-w4g64-axis0", "odd-llama-hqq-w3g64-fp16", "tiny-qwen2-hqq-own-w4g64"],
)
def test_a_loaded_model_is_the_dense_one(tmp_path, name):
    from transformers import AutoModelForCausalLM

    truth = Truth(CHECKPOINTS / "hqq-0.2.8.post1" / name)
    options = PlanOptions(dtype=F32)
    quantload.convert(truth.folder, tmp_path / "dense", "dense", options=options)
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=F32).eval()
    model = quantload.load(truth.folder, device="cpu", dtype=F32, quantize_inputs=False)
    ids, logits = truth.tensors["input_ids"], truth.tensors["logits"]
    with torch.no_grad():
        found, expected = model(ids).logits, dense(ids).logits
    assert (found - expected).norm() < 1e-4 * expected.norm()
    assert (found - logits).norm() < 2e-2 * logits.norm()
