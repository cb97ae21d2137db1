"""optimum-quanto against a slow reference of its byte layout, and its own files."""

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
from quantload.loader.model_shapes import output_features
from quantload.loader.open import open_checkpoint
from quantload.loader.plan import PlanOptions

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
Q, UP, DOWN = (
    "model.layers.0.self_attn.q_proj",
    "model.layers.0.mlp.up_proj",
    "model.layers.0.mlp.down_proj",
)
FLOAT8 = {"qfloat8": torch.float8_e4m3fn, "qfloat8_e4m3fn": torch.float8_e4m3fn}
FLOAT8 |= {"qfloat8_e5m2": torch.float8_e5m2}
needs_checkpoints = pytest.mark.skipif(
    not CHECKPOINTS.is_dir(), reason="no folder shared/checkpoints"
)


def rows8(shape, *, kind="qint8", dtype=BF16, seed=0):
    """Tensors of an 8-bit weight by leaf, and its values."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
    if kind != "qint8":
        codes = codes.to(F32).to(FLOAT8[kind])
    scale = (torch.rand(shape[0], 1, generator=generator) + 0.01).to(dtype)
    return {"weight._data": codes, "weight._scale": scale}, codes.to(dtype) * scale


def groups4(shape, *, bits=4, width=128, dtype=BF16, shift_dtype=None, seed=0):
    """Tensors of a packed weight by leaf, and its values."""
    rng = np.random.default_rng(seed)
    count = shape[0] * shape[1] // width
    codes = rng.integers(0, 2**bits, (count, width), dtype=np.uint8)
    scale = torch.tensor(rng.uniform(0.01, 0.1, (count, 1))).to(dtype)
    fields = 8 // bits
    height = -(-count // fields)
    packed = np.zeros((height, width), dtype=np.uint8)
    for row in range(count):
        field, byte = divmod(row, height)
        for column in range(width):
            packed[byte, column] |= codes[row, column] << (bits * field)
    if shift_dtype is None:
        shift = torch.tensor(rng.uniform(-1, 1, (count, 1))).to(dtype)
        values = torch.from_numpy(codes).to(dtype) * scale - shift
    else:
        shift = torch.tensor(rng.integers(0, 2**bits, (count, 1))).to(shift_dtype)
        values = (torch.from_numpy(codes).to(torch.int8) - shift.to(torch.int8)) * scale
    leaves = {
        "weight._data._data": torch.from_numpy(packed),
        "weight._scale": scale,
        "weight._shift": shift,
    }
    return leaves, values.reshape(shape)


def named(module, leaves):
    ones = {
        f"{module}.{leaf}": torch.ones((), dtype=BF16) for leaf in ("input_scale", "output_scale")
    }
    return ones | {f"{module}.{leaf}": part for leaf, part in leaves.items()}


def with_bias(module, leaves, rows):
    return named(module, leaves) | {f"{module}.bias": torch.zeros(rows, dtype=BF16)}


def write(folder, tensors, qmap, *, content=None):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content or {"model_type": "llama"}))
    if qmap is not None:
        qmap = {m: says if isinstance(says, dict) else entry(says) for m, says in qmap.items()}
        (folder / "quanto_qmap.json").write_text(json.dumps(qmap))
    save_file(tensors, folder / "model.safetensors")
    return folder


def entry(weights, activations="none"):
    return {"weights": weights, "activations": activations}


def read(folder):
    return open_source(open_checkpoint(folder))


def plain(rows=8, columns=64):
    return torch.ones(rows, columns, dtype=BF16)


# -- values ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qint8", "qfloat8", "qfloat8_e4m3fn", "qfloat8_e5m2"])
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_rows_of_eight_bits(tmp_path, kind, dtype):
    leaves, expected = rows8((6, 40), kind=kind, dtype=dtype)
    source = read(write(tmp_path / "model", named(Q, leaves), {Q: kind}))
    found = source.read_weight(Q)
    assert source.format_name == "quanto"
    assert found.dequantize().dtype == dtype
    assert torch.equal(found.dequantize(), expected)
    assert torch.equal(found.evaluated_in(F32).dequantize(), expected)
    assert source.weights[Q].scheme.input is None
    assert not source.plain
    assert source.warnings == ()


@pytest.mark.parametrize(("bits", "kind"), [(4, "qint4"), (2, "qint2")])
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("shift", [None, torch.int8, torch.uint8])
@pytest.mark.parametrize(
    ("shape", "width"),
    [
        ((6, 256), 128),
        ((3, 192), 96),
        ((5, 320), 64),
        ((7, 160), 32),
        ((6, 128), 128),
        ((7, 40), 40),
        ((5, 150), 150),  # no group size divides it
    ],
)
def test_groups(tmp_path, bits, kind, dtype, shift, shape, width):
    leaves, expected = groups4(shape, bits=bits, width=width, dtype=dtype, shift_dtype=shift)
    source = read(write(tmp_path / "model", with_bias(Q, leaves, shape[0]), {Q: kind}))
    weight, found = source.weights[Q], source.read_weight(Q)
    assert weight.shape == shape
    assert found.block == (1, width) == weight.scheme.weight.block_of(*shape)
    assert torch.equal(found.dequantize(), expected)
    assert set(source.plain) == {f"{Q}.bias"}


@pytest.mark.parametrize("bits", [2, 4])
def test_widths_that_only_the_model_knows(tmp_path, bits):
    content = tiny_checkpoints.config(hidden=128, intermediate=256, layers=1)
    shapes = {Q: (128, 128), UP: (256, 128), DOWN: (128, 256)}
    tensors, values = {}, {}
    for seed, (module, shape) in enumerate(shapes.items()):
        leaves, values[module] = groups4(shape, bits=bits, seed=seed)
        tensors |= named(module, leaves)
    qmap = dict.fromkeys(shapes, f"qint{bits}")
    source = read(write(tmp_path / "model", tensors, qmap, content=content))
    for module, shape in shapes.items():
        assert source.weights[module].shape == shape
        assert torch.equal(source.read_weight(module).dequantize(), values[module])


def test_output_features_of_layers_and_of_experts():
    shapes = {
        "model.layers.0.mlp.experts.gate_up_proj": (4, 64, 32),
        "model.layers.0.mlp.experts.down_proj": (4, 32, 32),
        "lm_head.weight": (96, 32),
        "norm.weight": (32,),
    }
    block = "model.layers.0.mlp.experts"
    found = {
        name: output_features(shapes, name)
        for name in (
            *("lm_head", "norm", "other", f"{block}.1.gate_proj", f"{block}.2.w3"),
            *(f"{block}.1.down_proj", f"{block}.0.w2", f"{block}.0.router"),
        )
    }
    assert list(found.values()) == [96, None, None, 32, 32, 32, 32, None]


def test_a_model_that_cannot_be_built(tmp_path):
    tensors = named(Q, groups4((8, 128))[0])
    folder = write(tmp_path / "model", tensors, {Q: "qint4"}, content={"model_type": "no-such"})
    with pytest.raises(UnsupportedVariant, match=r"width of packed .* cannot build the model"):
        read(folder)


def test_a_width_that_is_no_group_size_needs_no_model(tmp_path):
    leaves, expected = groups4((8, 40), width=40)
    content = {"model_type": "no-such"}
    source = read(write(tmp_path / "model", named(Q, leaves), {Q: "qint4"}, content=content))
    assert torch.equal(source.read_weight(Q).dequantize(), expected)


def test_a_layer_that_the_model_does_not_have(tmp_path):
    content = tiny_checkpoints.config(hidden=128, layers=1)
    tensors = named("other", groups4((8, 128))[0])
    folder = write(tmp_path / "model", tensors, {"other": "qint4"}, content=content)
    with pytest.raises(UnsupportedVariant, match="width of the weight of `other` cannot be told"):
        read(folder)


# -- which modules -----------------------------------------------------------------------------


def test_a_module_that_the_map_leaves_out(tmp_path):
    tensors = named(Q, rows8((8, 64))[0]) | named(UP, rows8((8, 64))[0])
    (warning,) = read(write(tmp_path / "model", tensors, {Q: "qint8"})).warnings
    assert warning.startswith("1 modules are quantized in the files although the config")


def test_static_activations_come_with_the_weight(tmp_path):
    tensors = named(Q, rows8((8, 64))[0]) | {f"{Q}.input_scale": torch.tensor(0.25, dtype=BF16)}
    norm = {"model.norm.weight": torch.ones(8), "model.norm.output_scale": torch.ones(())}
    qmap = {Q: entry("qint8", "qint8"), "model.norm": entry("none", "qint8")}
    source = read(write(tmp_path / "model", tensors | norm, qmap))
    scheme = source.weights[Q].scheme.input
    assert (scheme.grid.name, scheme.granularity, scheme.dynamic) == ("int8", "tensor", False)
    assert source.read_weight(Q).input_scale.item() == 0.25
    assert [warning.split(",")[0].split(":")[0] for warning in source.warnings] == [
        "1 scales of activations are left out",
        "outputs are rounded too by optimum-quanto (`output_scale`)",
    ]
    assert set(source.plain) == {"model.norm.weight"}


def test_a_config_of_transformers(tmp_path):
    said = {"quant_method": "quanto", "weights": "int8"}
    content = {"model_type": "llama", "quantization_config": said}
    leaves, expected = rows8((8, 64))
    source = read(write(tmp_path / "model", named(Q, leaves), None, content=content))
    assert torch.equal(source.read_weight(Q).dequantize(), expected)
    assert not source.warnings


def test_a_config_of_transformers_with_an_entry_that_matches_nothing(tmp_path):
    leaves, _ = rows8((8, 64))
    said = {
        "quant_method": "quanto",
        "weights": "int8",
        "modules_to_not_convert": ["gate", "q_proj"],
    }
    content = {"model_type": "llama", "quantization_config": said}
    source = read(write(tmp_path / "a", named(Q, leaves), None, content=content))
    (told,) = source.warnings
    assert "match no module: `modules_to_not_convert: gate`, in" in told
    said["modules_to_not_convert"] = ["("]
    with pytest.raises(FormatMismatch, match="expected a list of names or regular expressions"):
        read(write(tmp_path / "b", named(Q, leaves), None, content=content))


# -- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        ({"weights": "int8"}, UnsupportedVariant, "no weight is quantized in"),
        ({"weights": "int7"}, FormatMismatch, "`weights` of the quanto config is `'int7'`"),
        ({}, FormatMismatch, "`weights` of the quanto config is `None`"),
        ({"weights": ["int8"]}, FormatMismatch, "`weights` of the quanto config is"),
    ],
)
def test_a_config_of_transformers_without_quantized_tensors(tmp_path, said, error, message):
    content = {"model_type": "llama", "quantization_config": {"quant_method": "quanto", **said}}
    folder = write(tmp_path / "model", {f"{Q}.weight": plain()}, None, content=content)
    with pytest.raises(error, match=message):
        read(folder)


@pytest.mark.parametrize(
    ("qmap", "error", "message"),
    [
        ({Q: entry("qint8"), UP: entry("qint8")}, MissingTensor, "names modules that are not in"),
        ({Q: entry("qint4")}, MissingTensor, "`.*weight._data._data` is missing"),
        ({Q: entry("qfloat8")}, FormatMismatch, "weight._data` is `torch.int8`, expected"),
        ({Q: entry("qint3")}, UnsupportedVariant, "`weights` of .* are `qint3`, expected"),
        ({Q: entry("qint8", "qint16")}, UnsupportedVariant, "`activations` of .* are `qint16`"),
        ({Q: {"weights": 8}}, FormatMismatch, "q_proj.weights` is `8`, expected the name of a"),
        ({Q: {"activations": "none"}}, FormatMismatch, "q_proj.weights` is `None`"),
        ({Q: {"weights": None}}, FormatMismatch, "q_proj.weights` is `None`"),
    ],
)
def test_errors_of_the_map(tmp_path, qmap, error, message):
    with pytest.raises(error, match=message):
        read(write(tmp_path / "model", named(Q, rows8((8, 64))[0]), qmap))


def test_a_map_without_objects(tmp_path):
    folder = write(tmp_path / "model", named(Q, rows8((8, 64))[0]), {})
    (folder / "quanto_qmap.json").write_text(json.dumps({Q: "qint8"}))
    with pytest.raises(FormatMismatch, match="q_proj` is `'qint8'`, expected an object"):
        read(folder)


def test_a_module_that_the_map_names_but_the_files_hold_plain(tmp_path):
    tensors = named(Q, rows8((8, 64))[0]) | {f"{UP}.weight": plain()}
    with pytest.raises(FormatMismatch, match="names modules that are not quantized in the files"):
        read(write(tmp_path / "model", tensors, {Q: "qint8", UP: "qint8"}))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"weight._scale": None}, MissingTensor, "weight._scale` is missing"),
        ({"weight._shift": None}, MissingTensor, "weight._shift` is missing"),
        ({"weight._data._data": None}, MissingTensor, "weight._data._data` is missing"),
        ({"weight._data": torch.zeros(1, 1)}, FormatMismatch, "has both `weight._data` and"),
        ({"weight": plain()}, FormatMismatch, "has both `weight` and"),
        ({"weight._scale": torch.ones(12, 2)}, FormatMismatch, r"expected `\(12, 1\)`"),
        ({"weight._scale": torch.ones(12)}, FormatMismatch, "expected 2 dimensions"),
        ({"weight._shift": torch.ones(6, 1)}, FormatMismatch, r"_shift` has shape `\(6, 1\)`"),
        ({"weight._shift": torch.ones(12, 1, dtype=torch.int32)}, FormatMismatch, "torch.int32"),
        (
            {"weight._data._data": torch.zeros(5, 128, dtype=torch.uint8)},
            FormatMismatch,
            r"has shape `\(5, 128\)`, expected `\(6, 128\)`",
        ),
        ({"bias": torch.zeros(5)}, FormatMismatch, "12 groups of 128 codes and 5 output features"),
        ({"bias": torch.zeros(0)}, FormatMismatch, "0 output features"),
        ({"input_scale": torch.ones(3)}, FormatMismatch, r"input_scale` has shape `\(3,\)`"),
    ],
)
def test_errors_of_packed_tensors(tmp_path, changes, error, message):
    tensors = with_bias(Q, groups4((6, 256))[0], 6)
    tensors |= {f"{Q}.{leaf}": part for leaf, part in changes.items()}
    tensors = {name: part for name, part in tensors.items() if part is not None}
    with pytest.raises(error, match=message):
        read(write(tmp_path / "model", tensors, {Q: "qint4"}))


def test_bits_that_neither_config_nor_shapes_tell(tmp_path):
    content = {
        "model_type": "llama",
        "quantization_config": {"quant_method": "quanto", "weights": "int8"},
    }
    folder = write(tmp_path / "model", with_bias(Q, groups4((6, 256))[0], 6), None, content=content)
    with pytest.raises(FormatMismatch, match="holds 12 groups, expected `qint8`"):
        read(folder)


@pytest.mark.parametrize("leaf", ["weight._scale", "weight._shift"])
def test_scales_that_are_not_finite_are_refused(tmp_path, leaf):
    leaves = groups4((6, 256))[0]
    leaves[leaf][2] = float("nan")
    source = read(write(tmp_path / "model", with_bias(Q, leaves, 6), {Q: "qint4"}))
    with pytest.raises(NonFiniteWeight, match=f"`{Q}.{leaf}` holds NaN"):
        source.read_weight(Q)


def test_codes_that_are_not_finite_are_refused(tmp_path):
    leaves = rows8((6, 64), kind="qfloat8")[0]
    leaves["weight._data"].view(torch.uint8)[0, 0] = 0x7F
    source = read(write(tmp_path / "model", named(Q, leaves), {Q: "qfloat8"}))
    with pytest.raises(NonFiniteWeight, match=r"weight._data` holds NaN"):
        source.read_weight(Q)


# NOTE: scales of zero are scales; nothing in the files states the width of rows of 8 bits.
def test_no_fault_in_rows_is_silent(tmp_path):
    tensors = named(Q, rows8((6, 40))[0]) | {f"{UP}.weight": plain()}
    folder = write(tmp_path / "model", tensors, {Q: "qint8"})
    assert silent_faults(folder, tmp_path, without=("zero", "narrow")) == {}


def test_no_fault_in_groups_is_silent(tmp_path):
    content = tiny_checkpoints.config(hidden=128, intermediate=256, layers=1)
    tensors = named(DOWN, groups4((128, 256))[0])
    folder = write(tmp_path / "model", tensors, {DOWN: "qint4"}, content=content)
    assert silent_faults(folder, tmp_path, without=("zero",)) == {}


# -- their own files ---------------------------------------------------------------------------


@needs_checkpoints
@pytest.mark.parametrize("name", ["micro-llama-qint2", "micro-llama-qint4-all"])
def test_a_loaded_model_is_the_dense_one(tmp_path, name):
    from transformers import AutoModelForCausalLM

    truth = Truth(CHECKPOINTS / "optimum-quanto-0.2.7" / name)
    options = PlanOptions(dtype=F32)
    quantload.convert(truth.folder, tmp_path / "dense", "dense", options=options)
    assert not (tmp_path / "dense" / "quanto_qmap.json").exists()
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=F32).eval()
    model = quantload.load(truth.folder, device="cpu", dtype=F32, quantize_inputs=False)
    ids, logits = truth.tensors["input_ids"], truth.tensors["logits"]
    with torch.no_grad():
        found, expected = model(ids).logits, dense(ids).logits
    assert (found - expected).norm() < 1e-4 * expected.norm()
    assert (found - logits).norm() < 2e-2 * logits.norm()
