"""torchao: every class of tensors against a slow reference, flattened and pickled."""

import json
import re

import faults
import numpy as np
import pytest
import tiny_checkpoints as tiny
import tiny_torchao as ao
import torch
import transformers
from converting import converted, opened
from truth import CHECKPOINTS, Truth, truths

import quantload
from quantload.errors import (
    FormatMismatch,
    MissingTensor,
    NonFiniteWeight,
    QuantloadError,
    UnknownFormat,
    UnsupportedVariant,
)
from quantload.quant.grid import E4M3, INT8, int_grid
from quantload.quant.scheme import InputScheme

UP, DOWN = ao.UP, ao.DOWN
NAME = f"{UP}.weight"
SHAPES = [((6, 8), (1, 8)), ((6, 8), (1, 4)), ((6, 8), (6, 8)), ((6, 8), (2, 4)), ((5, 12), (5, 1))]
INTX = {"_type": "IntxWeightOnlyConfig", "_data": {"mapping_type": {"_data": "ASYMMETRIC"}}}


def read(folder, module=UP):
    return opened(folder).read_dense(module)


def by_loops(codes, scale, zero, block, evaluation, result):
    """(code - zero) * scale, element by element, each step rounded to `evaluation`."""
    found = torch.empty(codes.shape, dtype=evaluation)
    for place in np.ndindex(*codes.shape):
        at = tuple(i // size for i, size in zip(place, block, strict=True))
        value = codes[place].to(evaluation)
        if zero is not None:
            value = value - zero[at].to(evaluation)
        found[place] = value * scale[at].to(evaluation)
    return found.to(result)


@pytest.mark.parametrize(("shape", "block"), SHAPES)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("result", ["bfloat16", "float32", "float16"])
def test_int8(tmp_path, shape, block, scale_dtype, result):
    parts, description = ao.int8(shape, block, dtype=ao.dtype(result))
    parts["scale"] = parts["scale"].to(scale_dtype)
    folder = ao.write(tmp_path / "m", {NAME: (parts, description)})
    wide = torch.promote_types(getattr(torch, result), scale_dtype)
    expected = by_loops(parts["qdata"], parts["scale"], None, block, wide, getattr(torch, result))
    found = read(folder)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_scale_of_one_number(tmp_path, shape):
    parts, description = ao.int8((6, 8), (6, 8), zero=False)
    expected = read(ao.write(tmp_path / "a", {NAME: (parts, description)}))
    parts["scale"] = parts["scale"].reshape(shape)
    assert torch.equal(read(ao.write(tmp_path / "b", {NAME: (parts, description)})), expected)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("zero_dtype", [torch.int8, torch.bfloat16])
def test_intx(tmp_path, bits, zero_dtype):
    half, block = 1 << (bits - 1), (1, 4)
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(-half, half, (6, 8), generator=generator).to(torch.int8)
    scale = (torch.rand(6, 2, generator=generator) + 0.01).bfloat16()
    zero = torch.randint(-half, half, (6, 2), generator=generator).to(zero_dtype)
    if zero_dtype.is_floating_point:
        zero += 0.37
    stored = ao.subclass(
        "IntxUnpackedToInt8Tensor",
        {"qdata": codes, "scale": scale, "zero_point": zero},
        **{"target_dtype": ao.dtype(f"int{bits}"), "block_size": [1, 4], "dtype": ao.DTYPE},
        activation_quantization=None,
    )
    folder = ao.write(tmp_path / "m", {NAME: stored}, config=ao.quantization(INTX))
    expected = by_loops(codes, scale, zero, block, torch.bfloat16, torch.bfloat16)
    assert torch.equal(read(folder), expected)
    assert opened(folder).weights[UP].scheme.weight.grid == int_grid(bits)


def test_intx_codes_beyond_their_bits(tmp_path):
    parts, _ = ao.int8((6, 8), (1, 8))
    stored = ao.subclass(
        "IntxUnpackedToInt8Tensor",
        parts,
        **{"target_dtype": ao.dtype("int4"), "block_size": [1, 8], "dtype": ao.DTYPE},
    )
    folder = ao.write(tmp_path / "m", {NAME: stored}, config=ao.quantization(INTX))
    with pytest.raises(FormatMismatch, match=r"_weight_qdata` has codes from -\d+ to \d+.*`int4`"):
        read(folder)


def test_zero_points_that_the_config_does_not_know(tmp_path):
    parts, description = ao.int8()
    parts["zero_point"] = parts["zero_point"] + 1
    with pytest.raises(FormatMismatch, match=r"_weight_zero_point` is not all zero"):
        read(ao.write(tmp_path / "m", {NAME: (parts, description)}))


@pytest.mark.parametrize("storage", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize(("shape", "block"), [*SHAPES, ((6, 8), None)])
def test_float8(tmp_path, storage, shape, block):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(shape, generator=generator).to(storage)
    sizes = block or shape
    counts = [n // size for n, size in zip(shape, sizes, strict=True)]
    scale = torch.rand(counts, generator=generator) + 0.01
    data = {"block_size": block and list(block), "dtype": ao.DTYPE, "act_quant_kwargs": None}
    stored = ao.subclass("Float8Tensor", {"qdata": codes, "scale": scale}, **data)
    config = ao.quantization({"_type": "Float8WeightOnlyConfig", "_data": {}})
    folder = ao.write(tmp_path / "m", {NAME: stored}, config=config)
    expected = by_loops(codes, scale, None, sizes, torch.float32, torch.bfloat16)
    assert torch.equal(read(folder), expected)


def int4(shape=(6, 16), group=4, *, experts=0, seed=0, **data):
    """A random Int4Tensor, its codes [.., N, K], and its description."""
    generator = torch.Generator().manual_seed(seed)
    full = (experts, *shape) if experts else shape
    codes = torch.randint(-8, 8, full, generator=generator)
    packed = np.zeros((*full[:-1], full[-1] // 2), dtype=np.uint8)
    for place in np.ndindex(*packed.shape):
        low, high = (int(codes[(*place[:-1], 2 * place[-1] + i)]) & 15 for i in (0, 1))
        packed[place] = low | high << 4
    turned = (*full[:-2], full[-1] // group, full[-2])
    parts = {
        "qdata": torch.from_numpy(packed.view(np.int8)),
        "scale": (torch.rand(turned, generator=generator) + 0.01).bfloat16(),
        "zero_point": torch.randn(turned, generator=generator).bfloat16(),
    }
    block = [1] * (len(full) - 1) + [group]
    data = {"block_size": block, "shape": list(full), "activation_dtype": ao.DTYPE, **data}
    return codes, ao.subclass("Int4Tensor", parts, **data)


INT4 = {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": 4}}


@pytest.mark.parametrize("experts", [0, 3])
def test_int4(tmp_path, experts):
    codes, stored = int4(experts=experts)
    name = "model.layers.0.mlp.experts.gate_up_proj" if experts else NAME
    folder = ao.write(tmp_path / "m", {name: stored}, config=ao.quantization(INT4))
    scale, zero = (stored[0][part].float() for part in ("scale", "zero_point"))
    expected = torch.empty(codes.shape)
    for place in np.ndindex(*codes.shape):
        at = (*place[:-2], place[-1] // 4, place[-2])
        expected[place] = codes[place].float() * scale[at] + zero[at]
    source = opened(folder)
    module = name if experts else UP
    assert source.weights[module].parameter_name == name
    assert torch.equal(source.read_parameter(module), expected)


@pytest.mark.parametrize(("sizes", "counts"), [((1, 1, 8), (3, 4, 1)), ((3, 4, 8), (1, 1, 1))])
def test_experts_in_one_parameter(tmp_path, sizes, counts):
    parts, description = ao.int8((3, 4, 8), sizes)
    assert tuple(parts["scale"].shape) == counts
    name = "model.layers.0.mlp.experts.down_proj"
    source = opened(ao.write(tmp_path / "m", {name: (parts, description)}))
    expected = by_loops(parts["qdata"], parts["scale"], None, sizes, torch.float32, torch.bfloat16)
    assert source.weights[name].experts == 3
    assert torch.equal(source.read_parameter(name), expected)


def test_scales_shared_by_some_experts(tmp_path):
    with pytest.raises(UnsupportedVariant, match="scales shared by 2 of 4 experts"):
        opened(ao.write(tmp_path / "m", {"a.b": ao.int8((4, 4, 8), (2, 4, 8))}))


def test_factors_of_input_features(tmp_path):
    codes, (parts, description) = int4()
    plain = read(
        ao.write(tmp_path / "a", {NAME: (parts, description)}, config=ao.quantization(INT4))
    )
    factors = torch.rand(16) + 0.5
    with_factors = {**parts, "act_pre_scale": factors}
    stored = with_factors, description | {"_tensor_data_names": list(with_factors)}
    folder = ao.write(tmp_path / "b", {NAME: stored}, config=ao.quantization(INT4))
    assert torch.equal(read(folder), plain * factors)
    assert codes.shape == plain.shape


# -- inputs ----------------------------------------------------------------------------------------


def kwargs(kind, granularity, inside=None, **data):
    granularity = {"_type": granularity, "_data": inside or {}}
    return {"_type": kind, "_data": {"granularity": granularity, **data}}


TO_INT8, TO_FLOAT8 = "QuantizeTensorToInt8Kwargs", "QuantizeTensorToFloat8Kwargs"


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        (None, None),
        (kwargs(TO_INT8, "PerRow"), InputScheme(grid=INT8, granularity="token")),
        (
            kwargs(TO_INT8, "PerTensor", mapping_type={"_type": "M", "_data": "ASYMMETRIC"}),
            InputScheme(grid=INT8, granularity="tensor", symmetric=False),
        ),
        (
            kwargs(TO_INT8, "PerRow", reduce_range=True),
            InputScheme(grid=int_grid(7), granularity="token"),
        ),
        (kwargs(TO_FLOAT8, "PerRow"), InputScheme(grid=E4M3, granularity="token")),
        (
            kwargs(TO_FLOAT8, "PerBlock", {"block_size": [1, 128]}),
            InputScheme(grid=E4M3, granularity="group", group_size=128),
        ),
    ],
)
def test_inputs(tmp_path, stated, expected):
    stored = ao.int8((6, 8), (1, 8), act_quant_kwargs=stated)
    assert opened(ao.write(tmp_path / "m", {NAME: stored})).weights[UP].scheme.input == expected


@pytest.mark.parametrize(
    "stated",
    [
        kwargs(TO_INT8, "PerAxis"),
        kwargs(TO_FLOAT8, "PerRow", hp_value_ub=3.0),
        kwargs(TO_FLOAT8, "PerRow", float8_dtype=ao.dtype("float8_e4m3fnuz")),
        kwargs("QuantizeTensorToMXKwargs", "PerRow"),
        kwargs(TO_FLOAT8, "PerBlock", {"block_size": [2, 128]}),
        {"_type": TO_INT8, "_data": {}},
        "dynamic",
    ],
)
def test_inputs_that_are_not_read(tmp_path, stated):
    stored = ao.int8((6, 8), (1, 8), act_quant_kwargs=stated)
    with pytest.raises(UnsupportedVariant, match="is not read"):
        opened(ao.write(tmp_path / "m", {NAME: stored}))


@pytest.mark.parametrize("shifted", [False, True])
def test_fixed_scales_of_inputs(tmp_path, shifted):
    parts, description = ao.int8((6, 8), (1, 8))
    parts["act_quant_scale"] = torch.tensor([[0.25]])
    if shifted:
        parts["act_quant_zero_point"] = torch.tensor([[3]], dtype=torch.int8)
    description["_tensor_data_names"] = list(parts)
    source = opened(ao.write(tmp_path / "m", {NAME: (parts, description)}))
    input = InputScheme(grid=INT8, granularity="tensor", dynamic=False, symmetric=not shifted)
    assert source.weights[UP].scheme.input == input
    weight = source.read_weight(UP)
    assert weight.input_scale.tolist() == [0.25]
    assert (weight.input_zero.tolist() if shifted else weight.input_zero) == (
        [3] if shifted else None
    )


# -- files -----------------------------------------------------------------------------------------


def test_parts_in_different_shards(tmp_path):
    stored = {NAME: ao.int8(seed=1), f"{DOWN}.weight": ao.int8((64, 128), (1, 32), seed=2)}
    one, many = ao.write(tmp_path / "a", stored), ao.write(tmp_path / "b", stored, shards=3)
    assert len(list(many.glob("*.safetensors"))) == 3
    for module in (UP, DOWN):
        assert torch.equal(read(many, module), read(one, module))


def test_shards_that_contradict_each_other(tmp_path):
    folder = ao.write(tmp_path / "m", {NAME: ao.int8()}, shards=2)
    file = folder / "model-00002-of-00002.safetensors"
    tensors = {f"{UP}._weight_scale": ao.int8()[0]["scale"]}
    other = ao.metadata({NAME: ao.int8(block=(1, 32))})
    tiny.save_file(tensors, file, metadata=other)
    with pytest.raises(FormatMismatch, match=f"files describe `{re.escape(NAME)}` differently"):
        opened(folder)


def test_a_file_without_its_metadata(tmp_path):
    folder = ao.write(tmp_path / "m", {NAME: ao.int8()})
    tiny.save_file(ao.flattened({NAME: ao.int8()}), folder / "model.safetensors")
    with pytest.raises(FormatMismatch, match=r"parts .* that no metadata describes: .*_weight_qd"):
        opened(folder)


def test_a_checkpoint_without_its_config(tmp_path):
    folder = ao.write(tmp_path / "m", {NAME: ao.int8()})
    (folder / "config.json").write_text(json.dumps(ao.CONFIG))
    with pytest.raises(FormatMismatch, match="no quantization config"):
        opened(folder)


def test_descriptions_of_old_releases(tmp_path):
    parts, description = ao.int8()
    del description["_tensor_data_names"]
    found = read(ao.write(tmp_path / "m", {NAME: (parts, description)}))
    assert torch.equal(found, read(ao.write(tmp_path / "n", {NAME: ao.int8()})))


@pytest.mark.parametrize(
    "kind",
    [
        *("Int4TilePackedTo4dTensor", "Int4PreshuffledTensor", "Int4OpaqueTensor", "MXTensor"),
        *("NVFP4Tensor", "Int4PlainInt32Tensor"),
    ],
)
def test_classes_that_are_refused_by_name(tmp_path, kind):
    parts, description = ao.int8()
    with pytest.raises(UnsupportedVariant, match=f"torchao's `{kind}` is not read: `{NAME}`"):
        opened(ao.write(tmp_path / "m", {NAME: (parts, description | {"_type": kind})}))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"block_size": None}, "attribute `block_size` .* is missing, expected 2 integers"),
        ({"block_size": [1]}, r"`block_size` .* is `\[1\]`, expected 2 integers"),
        ({"block_size": [1, 0]}, "sizes that divide"),
        ({"block_size": [1, 7]}, "sizes that divide"),
        ({"block_size": [1, -2]}, "sizes that divide"),
        ({"block_size": ["1", 64]}, "2 integers"),
        ({"block_size": [True, 64]}, "2 integers"),
        ({"block_size": [1, 32]}, r"_weight_scale` has shape `\(128, 1\)`, expected `\(128, 2\)`"),
        ({"dtype": None}, "attribute `dtype` .* is missing, expected a dtype"),
        ({"dtype": ao.dtype("bf17")}, "expected a dtype"),
        ({"dtype": 3}, "expected a dtype"),
    ],
)
def test_attributes_that_make_no_sense(tmp_path, changes, said):
    with pytest.raises(FormatMismatch, match=said):
        opened(ao.write(tmp_path / "m", {NAME: ao.int8(**changes)}))


def test_a_part_that_is_not_read(tmp_path):
    parts, description = ao.int8()
    parts["per_tensor_scale"] = torch.ones(1)
    description["_tensor_data_names"] = list(parts)
    with pytest.raises(UnsupportedVariant, match="part `per_tensor_scale` of a `Int8Tensor`"):
        opened(ao.write(tmp_path / "m", {NAME: (parts, description)}))


def test_a_tensor_beside_the_parts(tmp_path):
    folder = ao.write(tmp_path / "m", {NAME: ao.int8()})
    tensors = ao.flattened({NAME: ao.int8()}) | {f"{UP}.factor": torch.ones(1)}
    texts = ao.metadata({NAME: ao.int8()})
    tiny.save_file(tensors, folder / "model.safetensors", metadata=texts)
    with pytest.raises(UnsupportedVariant, match=r"have tensors that are not read: .*\.factor"):
        opened(folder)


def test_a_weight_that_is_there_twice(tmp_path):
    folder = ao.write(tmp_path / "m", {NAME: ao.int8()})
    tensors = ao.flattened({NAME: ao.int8()}) | {NAME: torch.ones(128, 64)}
    texts = ao.metadata({NAME: ao.int8()})
    tiny.save_file(tensors, folder / "model.safetensors", metadata=texts)
    with pytest.raises(FormatMismatch, match="both an ordinary tensor and the parts of a `Int8T"):
        opened(folder)


def test_no_fault_is_silent(tmp_path):
    codes, stored = int4((8, 16))
    weights = {
        NAME: ao.int8((8, 16), (1, 8)),
        f"{DOWN}.weight": ao.int8((6, 8), (6, 8), zero=False),
    }
    folder = ao.write(tmp_path / "m", weights)
    assert faults.silent_faults(folder, tmp_path / "faults") == {}
    folder = ao.write(tmp_path / "n", {NAME: stored}, config=ao.quantization(INT4))
    silent = faults.silent_faults(folder, tmp_path / "more", without=("zero",))
    assert silent == {}, codes.shape


# -- config ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "decided", "is_stored"),
    [
        ({UP: INT4, "_default": ao.INT8}, f"{UP}", None),
        ({UP: ao.INT8, "_default": None}, UP, True),
        ({NAME: ao.INT8}, NAME, True),
        ({r"re:model\.layers\.\d+\.mlp\.\w+": ao.INT8}, r"re:model\.layers\.\d+\.mlp\.\w+", True),
        ({r"re:model\.layers": INT4, "_default": ao.INT8}, "default", True),
        ({"_default": ao.INT8, "re:.*down_proj": None}, "default", True),
    ],
)
def test_rules_by_name(tmp_path, rules, decided, is_stored):
    folder = ao.write(tmp_path / "m", {NAME: ao.int8()}, config=ao.quantization(ao.fqn(rules)))
    if is_stored is None:
        with pytest.raises(
            FormatMismatch, match=r"is a `Int8Tensor`, but .* `Int4WeightOnlyConfig`"
        ):
            opened(folder)
        return
    source = opened(folder)
    assert source.weights[UP].decided_by == decided
    assert all("match no module: `fqn_to_config: re:" in told for told in source.warnings)
    assert bool(source.warnings) is (decided == "default" and len(rules) > 1)


@pytest.mark.parametrize(
    "config",
    [
        ao.quantization(ao.fqn({UP: None, "_default": ao.INT8})),
        ao.quantization(ao.fqn({f"re:{re.escape(UP)}": None, "_default": ao.INT8})),
        ao.quantization(ao.fqn({"model.layers.9": ao.INT8})),
        ao.quantization(modules_to_not_convert=["mlp"]),
        ao.quantization(modules_to_not_convert=["layers.0"]),
        ao.quantization(modules_to_not_convert=[UP]),
    ],
)
def test_what_is_left_out_but_quantized_is_read_with_a_warning(tmp_path, config):
    source = opened(ao.write(tmp_path / "m", {NAME: ao.int8()}, config=config))
    assert source.weights[UP].is_quantized
    assert "1 modules are quantized in the files although" in source.warnings[0]


@pytest.mark.parametrize("entry", ["layers.1", "up", "proj", "model.layer", "mlp.up"])
def test_entries_are_compared_by_whole_components(tmp_path, entry):
    config = ao.quantization(modules_to_not_convert=[entry])
    source = opened(ao.write(tmp_path / "m", {NAME: ao.int8()}, config=config))
    (told,) = source.warnings
    assert f"match no module: `modules_to_not_convert: {entry}`, in" in told


def test_plain_weights_under_a_rule_for_all(tmp_path):
    source = opened(ao.write(tmp_path / "m", {NAME: ao.int8()}, whole=True))
    assert sum(weight.is_quantized for weight in source.weights.values()) == 1
    assert source.warnings == ()


def test_a_plain_weight_that_is_named(tmp_path):
    rules = {DOWN: ao.INT8, "_default": ao.INT8}
    config = ao.quantization(ao.fqn(rules))
    with pytest.raises(FormatMismatch, match=f"names modules that are not quantized.*{DOWN}"):
        opened(ao.write(tmp_path / "m", {NAME: ao.int8()}, config=config, whole=True))


@pytest.mark.parametrize(
    "data",
    [
        {"group_size": 32},
        {"granularity": {"_type": "PerGroup", "_data": {"group_size": 32}}},
        {"weight_granularity": {"_type": "PerGroup", "_data": {"group_size": 32}}},
    ],
)
def test_groups_of_another_size(tmp_path, data):
    config = ao.quantization({"_type": "Int8WeightOnlyConfig", "_data": data})
    right = ao.int8(block=(1, 32))
    assert opened(ao.write(tmp_path / "a", {NAME: right}, config=config)).weights
    with pytest.raises(FormatMismatch, match=r"blocks of `\(1, 64\)`, expected groups of 32"):
        opened(ao.write(tmp_path / "b", {NAME: ao.int8()}, config=config))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_type": None}, "`quant_type` is missing"),
        ({"quant_type": []}, "`quant_type` is"),
        ({"quant_type": {}}, "`quant_type` is"),
        ({"quant_type": 3}, "`quant_type` is `3`"),
        ({"quant_type": "autoquant"}, "`quant_type` is `autoquant`"),
        ({"quant_type": {"default": None}}, "`quant_type.default` is missing"),
        ({"quant_type": {"default": {"_type": 3}}}, "`quant_type.default` is"),
        ({"quant_type": {"default": {"_type": "X", "_data": []}}}, "`quant_type.default` is"),
        ({"quant_type": {"default": ao.INT8, "lm_head": ao.INT8}}, "expected only `default`"),
        ({"quant_type": {"default": ao.fqn(None)}}, "`fqn_to_config` is missing"),
        ({"quant_type": {"default": ao.fqn({"a": 3})}}, "`fqn_to_config.a` is `3`"),
        ({"quant_type": {"default": ao.fqn({"re:(": ao.INT8})}}, "is no regular expression"),
        ({"modules_to_not_convert": "lm_head"}, "`modules_to_not_convert` is `'lm_head'`"),
        ({"modules_to_not_convert": [3]}, "`modules_to_not_convert` is"),
        ({"quant_type": "int8_weight_only", "quant_type_kwargs": 3}, "`quant_type_kwargs` is"),
    ],
)
def test_configs_that_make_no_sense(tmp_path, config, said):
    folder = ao.write(tmp_path / "m", {NAME: ao.int8()}, config=ao.quantization() | config)
    with pytest.raises(QuantloadError, match=said):
        opened(folder)


def test_configs_of_old_releases(tmp_path):
    config = {"quant_method": "torchao", "quant_type": "int8_weight_only"}
    source = opened(ao.write(tmp_path / "m", {NAME: ao.int8()}, config=config))
    assert source.weights[UP].is_quantized
    assert source.warnings == ()


# -- pickled ---------------------------------------------------------------------------------------


def pickled(folder, stored, *classes, config=None, package="torchao.quantization"):
    folder.mkdir()
    content = ao.CONFIG | {"quantization_config": config or ao.quantization()}
    (folder / "config.json").write_text(json.dumps(content))
    ao.save_pickled({NAME: stored}, folder / "pytorch_model.bin", *classes, package=package)
    return folder


def test_pickled(tmp_path):
    parts, description = ao.int8()
    cls = ao.pickled_class("Int8Tensor")
    act = ao.QuantizeTensorToInt8Kwargs(ao.PerRow(), ao.MappingType.ASYMMETRIC)
    state = {**parts, "block_size": [1, 64], "act_quant_kwargs": act, "act_pre_scale": None}
    folder = pickled(
        tmp_path / "m",
        cls((128, 64), torch.bfloat16, **state),
        *(cls, ao.QuantizeTensorToInt8Kwargs, ao.PerRow, ao.MappingType),
    )
    assert torch.equal(read(folder), read(ao.write(tmp_path / "n", {NAME: (parts, description)})))
    assert opened(folder).weights[UP].scheme.input == InputScheme(
        grid=INT8, granularity="token", symmetric=False
    )


def old_tensor(domain, zero, **state):
    """An AffineQuantizedTensor in its plain layout, its classes, and its codes and scales."""
    inner, outer = (ao.pickled_class(n) for n in ("PlainAQTTensorImpl", "AffineQuantizedTensor"))
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (6, 8), generator=generator).to(torch.uint8)
    scale = (torch.rand(6, 2, generator=generator) + 0.01).bfloat16()
    impl = inner((6, 8), torch.uint8, int_data=codes, scale=scale, zero_point=zero, _layout=None)
    impl._layout = ao.PlainLayout()
    state = {"block_size": (1, 4), "quant_min": 0, "quant_max": 15, **state}
    tensor = outer((6, 8), torch.bfloat16, tensor_impl=impl, zero_point_domain=domain, **state)
    return tensor, (inner, outer, ao.PlainLayout, ao.ZeroPointDomain), codes, scale


def test_the_old_class_with_integer_zero_points(tmp_path):
    zero = torch.randint(0, 16, (6, 2))
    tensor, classes, codes, scale = old_tensor(ao.ZeroPointDomain.INT, zero)
    folder = pickled(tmp_path / "m", tensor, *classes, package="torchao.dtypes.affine")
    expected = by_loops(codes, scale, zero, (1, 4), torch.bfloat16, torch.bfloat16)
    assert torch.equal(read(folder), expected)


def test_the_old_class_with_offsets(tmp_path):
    zero = torch.randn(6, 2).bfloat16()
    tensor, classes, codes, scale = old_tensor(ao.ZeroPointDomain.FLOAT, zero)
    config = ao.quantization({"_type": "Int4WeightOnlyConfig", "_data": {"group_size": 4}})
    folder = pickled(tmp_path / "m", tensor, *classes, config=config)
    expected = torch.empty(6, 8, dtype=torch.bfloat16)
    for n, k in np.ndindex(6, 8):
        value = (codes[n, k].to(torch.int16) - 8).bfloat16() * scale[n, k // 4]
        expected[n, k] = value + zero[n, k // 4]
    assert torch.equal(read(folder), expected)


def test_the_old_class_with_quantized_inputs(tmp_path):
    zero = torch.randint(0, 16, (6, 2))
    tensor, classes, codes, scale = old_tensor(ao.ZeroPointDomain.INT, zero)
    cls = ao.pickled_class("LinearActivationQuantizedTensor")

    def _int8_asymm_per_token_quant() -> None:
        raise AssertionError("a function in a file is never called")

    _int8_asymm_per_token_quant.__qualname__ = "_int8_asymm_per_token_quant"
    state = {"original_weight_tensor": tensor, "input_quant_func": _int8_asymm_per_token_quant}
    folder = pickled(
        tmp_path / "m",
        cls((6, 8), torch.bfloat16, **state, quant_kwargs={}),
        *(cls, _int8_asymm_per_token_quant, *classes),
    )
    expected = by_loops(codes, scale, zero, (1, 4), torch.bfloat16, torch.bfloat16)
    assert torch.equal(read(folder), expected)
    assert opened(folder).weights[UP].scheme.input.symmetric is False


def test_old_layouts_for_one_kernel(tmp_path):
    impl, outer = (
        ao.pickled_class(n) for n in ("TensorCoreTiledAQTTensorImpl", "AffineQuantizedTensor")
    )
    inner = impl((6, 8), torch.int32, packed_weight=torch.zeros(1, 1, 32, 4, dtype=torch.int32))
    tensor = outer((6, 8), torch.bfloat16, tensor_impl=inner, block_size=(1, 4))
    folder = pickled(tmp_path / "m", tensor, impl, outer)
    with pytest.raises(UnsupportedVariant, match="layout `TensorCoreTiledAQTTensorImpl`"):
        opened(folder)


def test_classes_of_other_packages_are_refused(tmp_path):
    cls = ao.pickled_class("Int8Tensor")
    tensor = cls((128, 64), torch.bfloat16, **ao.int8()[0], block_size=[1, 64])
    with pytest.raises(UnknownFormat, match=r"`torchaox\.quantization\.Int8Tensor`"):
        opened(pickled(tmp_path / "m", tensor, cls, package="torchaox.quantization"))


# -- whole models ----------------------------------------------------------------------------------


def test_nan_in_scales(tmp_path):
    parts, description = ao.int8()
    parts["scale"][3] = float("nan")
    folder = ao.write(tmp_path / "m", {NAME: (parts, description)})
    with pytest.raises(NonFiniteWeight, match=r"_weight_scale` holds NaN"):
        read(folder)


def test_a_missing_part(tmp_path):
    parts, description = ao.int8()
    del parts["scale"]
    with pytest.raises(MissingTensor, match=r"parts of .* are missing: `.*_weight_scale`"):
        opened(ao.write(tmp_path / "m", {NAME: (parts, description)}))


TRUTHS = truths("torchao-*/*")
needs_truths = pytest.mark.skipif(not CHECKPOINTS.is_dir(), reason="no folder shared/checkpoints")


def plain_model(truth: Truth) -> transformers.PreTrainedModel:
    """The model in float32, with the weights that the reader decodes (`test_truth` proves them)."""
    source = opened(truth.folder)
    config = {k: v for k, v in source.checkpoint.config.items() if k != "quantization_config"}
    kind = transformers.CONFIG_MAPPING[config["model_type"]]
    model = transformers.AutoModelForCausalLM.from_config(kind.from_dict(config)).float()
    state = {w.parameter_name: source.read_parameter(m) for m, w in source.weights.items()}
    state |= {name: source.read_plain(name) for name in source.plain}
    lost = model.load_state_dict(state, strict=False)
    assert not lost.unexpected_keys
    assert set(lost.missing_keys) <= set(model.all_tied_weights_keys)
    model.tie_weights()
    return model.eval()


def relative(found, expected):
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@needs_truths
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("truth", TRUTHS, ids=lambda truth: truth.folder.name)
@torch.no_grad()
def test_logits(truth):
    ids = truth.tensors["input_ids"]
    model = quantload.load(truth.folder, device="cpu", dtype=torch.float32, quantize_inputs=False)
    found = model(ids).logits
    assert relative(found, plain_model(truth)(ids).logits) <= 1e-4
    is_dynamic = opened(truth.folder).weights
    is_dynamic = any(w.scheme and w.scheme.input for w in is_dynamic.values())
    assert relative(found, truth.tensors["logits"]) <= (0.03 if is_dynamic else 0.02)


@needs_truths
@pytest.mark.parametrize("truth", TRUTHS, ids=lambda truth: truth.folder.name)
def test_a_dense_copy_holds_the_weights(truth, tmp_path):
    folder = converted(truth.folder, tmp_path / "copy", "dense", dtype=torch.float32)
    source, copy = opened(truth.folder), opened(folder)
    for module in source.weights:
        assert torch.equal(copy.read_dense(module), source.read_dense(module, torch.float32))
