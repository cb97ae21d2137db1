"""Weights of any source, written so that compressed-tensors' own code gets the same values."""

from dataclasses import replace
from pathlib import Path

import compressed
import pytest
import tiny_checkpoints as tiny
import torch
from converting import opened
from truth import truths

from quantload.errors import FormatError, NotLossless
from quantload.loader.checkpoint import TensorEntry
from quantload.loader.formats.compressed_tensors_config import build_config, validate_config
from quantload.loader.formats.compressed_tensors_encode import layout
from quantload.loader.formats.compressed_tensors_lossless import (
    encode_lossless,
    lossless_layout,
    lossless_scheme,
    planned_scheme,
    why_not_lossless,
    why_not_planned,
)
from quantload.loader.output_files import Leaf
from quantload.loader.source import SourceWeight
from quantload.quant.grid import E2M1, E2M3, E4M3, E5M2, INT4, int_grid, table_grid, uint_grid
from quantload.quant.qtensor import Evaluation, QuantTensor
from quantload.quant.scheme import InputScheme, Scheme, WeightScheme

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
INTS = [int_grid(bits) for bits in range(2, 9)] + [uint_grid(bits) for bits in range(2, 9)]
SHAPES = [
    (40, 64),
    (33, 160),
]  # at least 33 rows: the library cannot unpack one word of zero points
BLOCKS = {"channel": (1, 0), "tensor": (0, 0), "g32": (1, 32), "16x32": (16, 32), "g128": (1, 128)}


def _codes(grid, shape):
    if grid.is_integer:
        return torch.randint(int(grid.low), int(grid.high) + 1, shape).to(grid.storage)
    if grid.is_float8:
        return (torch.randn(shape) * 60).to(grid.storage)
    return torch.randint(0, len(grid.table), shape).to(torch.uint8)


def _tensor(
    grid, shape, block, dtype=F32, *, scale_dtype=None, zero=None, zero_value=None, **parts
):
    """A random weight; `block` has 0 for a whole axis, `zero` is the dtype of zero points."""
    block = block[0] or shape[0], block[1] or shape[1]
    grid_shape = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    if zero is not None:
        parts["zero"] = _codes(grid, grid_shape).to(zero)
    if zero_value is not None:
        parts["zero"] = torch.full(grid_shape, float(zero_value))
    scale = (torch.rand(grid_shape) * 0.1 + 0.001).to(scale_dtype or dtype)
    return QuantTensor(
        grid=grid,
        codes=_codes(grid, shape),
        block=block,
        **{"scale": scale, "evaluation": Evaluation(dtype=dtype), **parts},
    )


def _library(leaves, scheme):
    weights = {leaf: part for leaf, part in leaves.items() if not leaf.startswith("input")}
    return compressed.decompressed(weights, scheme)


def _check(tensor, scheme=None):
    """Encode, decode with the library and with our reader; both give the source's values."""
    scheme = scheme or lossless_scheme(tensor)
    leaves = encode_lossless(tensor, scheme)
    expected = tensor.dequantize()
    found = _library(leaves, scheme)
    if scheme.weight.scale == "e4m3":
        expected = expected.to(BF16)
    assert torch.equal(found.double(), expected.double())
    return scheme, leaves, found


# -- integers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, F16, F32, F64], ids=str)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("grid", INTS, ids=lambda grid: grid.name)
def test_integers(grid, block, dtype):
    for shape in SHAPES:
        for zero in (None, grid.storage, F32):
            tensor = _tensor(grid, shape, BLOCKS[block], dtype, zero=zero)
            scheme, leaves, found = _check(tensor)
            assert found.dtype == dtype == leaves["weight_scale"].dtype
            middle = 0 if grid.low < 0 else 1 << (grid.bits - 1)
            at = 0 if tensor.zero is None else tensor.zero.float()
            assert scheme.weight.symmetric is bool(torch.as_tensor(at == middle).all())
            spec = layout(scheme, shape, dtype)
            assert {n: Leaf(t.dtype, tuple(t.shape)) for n, t in leaves.items()} == spec


@pytest.mark.parametrize("shape", [(1, 32), (3, 96), (130, 7), (5, 33)])
@pytest.mark.parametrize("bits", range(2, 9))
def test_small_and_odd_shapes_are_read_back(tmp_path, bits, shape):
    for number, zero in enumerate((None, torch.uint8)):
        tensor = _tensor(uint_grid(bits), shape, (1, 0), BF16, zero=zero)
        scheme = lossless_scheme(tensor)
        leaves = encode_lossless(tensor, scheme)
        folder = _write(tmp_path / str(number), scheme, leaves)
        assert torch.equal(opened(folder).read_dense("m.q_proj"), tensor.dequantize())


def _write(folder, scheme, leaves, config=None):
    config = config or build_config({"m.q_proj": scheme}, [])
    named = {f"m.q_proj.{leaf}": part.contiguous() for leaf, part in leaves.items()}
    return tiny.write(folder, {"quantization_config": config}, named)


def test_zero_points_in_the_middle_are_none_at_all():
    tensor = _tensor(uint_grid(4), (40, 64), (1, 32), F16)
    for middle in (8, 8.0):
        dtype = torch.uint8 if isinstance(middle, int) else F16
        zero = torch.full((40, 2), middle, dtype=dtype)
        scheme, leaves, _ = _check(replace(tensor, zero=zero))
        assert scheme.name == "W4A16"
        assert "weight_zero_point" not in leaves


def test_a_scheme_with_zero_points_for_a_weight_without():
    tensor = _tensor(INT4, (40, 64), (1, 32), F16)
    asymmetric = WeightScheme(grid=INT4, granularity="group", group_size=32, symmetric=False)
    _, leaves, _ = _check(tensor, Scheme(name="x", weight=asymmetric))
    assert leaves["weight_zero_point"].shape == (5, 2)


def test_groups_that_do_not_divide_become_smaller():
    tensor = _tensor(INT4, (40, 192), (1, 128), F32)
    scheme, leaves, _ = _check(tensor)
    assert scheme.weight.group_size == 64
    assert leaves["weight_scale"].shape == (40, 3)


@pytest.mark.parametrize("outer", ["scale*", "scale/"])
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("block", ["tensor", "g32", "16x32"])
def test_outer_factors_become_part_of_the_scales(outer, rows, block):
    evaluation = Evaluation(dtype=F32, outer=outer)
    tensor = _tensor(
        INT4, (40, 64), BLOCKS[block], outer=torch.rand(rows, 1) + 0.5, evaluation=evaluation
    )
    scheme, leaves, _ = _check(tensor)
    kinds = {"tensor": "channel", "g32": "group", "16x32": "group"}
    assert scheme.weight.granularity == (kinds[block] if rows > 1 else scheme.weight.granularity)
    assert leaves["weight_scale"].dtype == F32


def test_scales_are_stored_in_the_dtype_in_which_they_are_used():
    narrow = _tensor(INT4, (40, 64), (1, 32), F32, scale_dtype=F16)
    _, leaves, found = _check(narrow)
    assert leaves["weight_scale"].dtype == found.dtype == F32
    wide = _tensor(INT4, (40, 64), (1, 32), BF16, scale_dtype=F32)
    _, leaves, found = _check(wide)
    assert leaves["weight_scale"].dtype == found.dtype == BF16


def test_values_that_the_source_rounds_at_the_end():
    """The library leaves them in float32; rounded once, they are the source's."""
    evaluation = Evaluation(dtype=F32, result=BF16)
    tensor = _tensor(E4M3, (40, 64), (16, 32), evaluation=evaluation)
    scheme = lossless_scheme(tensor)
    leaves = encode_lossless(tensor, scheme)
    found = _library(leaves, scheme)
    assert found.dtype == leaves["weight_scale"].dtype == F32
    assert torch.equal(found.to(BF16), tensor.dequantize())
    assert not torch.equal(found, tensor.dequantize().float())


# -- act-order -------------------------------------------------------------------------------------


def test_act_order(tmp_path):
    order = (torch.arange(64) // 32)[torch.randperm(64)].to(torch.int32)
    tensor = _tensor(uint_grid(4), (40, 64), (1, 32), F16, zero=torch.uint8, group_of=order)
    with pytest.raises(NotLossless, match="ordered by activation"):
        lossless_scheme(tensor)
    scheme = lossless_scheme(tensor, act_order=True)
    leaves = encode_lossless(tensor, scheme)
    assert torch.equal(leaves["weight_g_idx"], order)
    assert layout(scheme, (40, 64), F16)["weight_g_idx"] == Leaf(torch.int32, (64,))
    source = opened(_write(tmp_path, scheme, leaves))
    assert source.weights["m.q_proj"].scheme == scheme
    assert torch.equal(source.read_dense("m.q_proj"), tensor.dequantize())


# -- floats ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("block", BLOCKS)
def test_e4m3(block, dtype):
    for shape in SHAPES:
        scheme, leaves, found = _check(_tensor(E4M3, shape, BLOCKS[block], dtype))
        assert found.dtype == dtype
        assert leaves["weight"].dtype == torch.float8_e4m3fn
        assert build_config({"m": scheme}, [])["format"] == "float-quantized"


def _exponents(shape, low=100, high=150):
    return torch.randint(low, high, shape).to(torch.uint8).view(torch.float8_e8m0fnu)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("grid", [E2M1, E2M3, E4M3], ids=lambda grid: grid.name)
def test_mx(grid, dtype):
    scale = _exponents((40, 3))
    scheme, leaves, found = _check(_tensor(grid, (40, 96), (1, 32), dtype, scale=scale))
    assert scheme.name == f"MXFP{grid.bits}A16"
    assert leaves["weight_scale"].dtype == torch.uint8
    assert found.dtype == BF16


def test_mx_scales_that_are_floats():
    """Only the scheme can know that they are powers of two."""
    tensor = _tensor(E4M3, (40, 96), (1, 32), F32, scale=_exponents((40, 3)).float())
    mx = Scheme(
        name="x",
        weight=WeightScheme(grid=E4M3, granularity="group", group_size=32, scale="e8m0"),
    )
    _check(tensor, mx)
    odd = replace(tensor, scale=tensor.scale * 1.5)
    assert "no powers of two" in why_not_lossless(odd, mx)
    _check(odd)


def test_mx_values_that_bfloat16_cannot_hold():
    scale = _exponents((40, 2), 0, 3)
    tensor = _tensor(E4M3, (40, 64), (1, 32), F32, scale=scale)
    tensor.codes[:] = torch.full((), 2**-9).to(torch.float8_e4m3fn)
    with pytest.raises(NotLossless, match="values would differ"):
        lossless_scheme(tensor)


def _nvfp4(outer=None, use="scale/", dtype=F32, result=BF16, **parts):
    scale = (torch.rand(40, 4) * 448).to(torch.float8_e4m3fn)
    evaluation = Evaluation(dtype=dtype, outer=use, result=result, scale=F32)
    outer = torch.full((1, 1), 2345.678) if outer is None else outer
    return _tensor(
        E2M1,
        (40, 64),
        (1, 16),
        **{"scale": scale, "outer": outer, "evaluation": evaluation, **parts},
    )


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("result", [BF16, None], ids=str)
def test_nvfp4_with_a_divisor(tmp_path, dtype, result):
    """A scale rounded to bfloat16 is what the library makes of a divisor without dimensions."""
    tensor = _nvfp4(dtype=dtype, result=result)
    scheme, leaves, _ = _check(tensor)
    assert leaves["weight_global_scale"].shape == (() if dtype == BF16 else (1,))
    assert leaves["weight_global_scale"].item() == tensor.outer.item()
    source = opened(_write(tmp_path, scheme, leaves))
    assert torch.equal(source.read_dense("m.q_proj"), tensor.dequantize(BF16))


def test_nvfp4_with_a_factor():
    """A power of two has an exact reciprocal; of others scales may differ in their last bit."""
    _, leaves, _ = _check(_nvfp4(torch.full((1, 1), 2.0**-11), "scale*", result=None))
    assert leaves["weight_global_scale"].item() == 2**11
    reasons = [
        why_not_lossless(_nvfp4(torch.rand(1, 1), "scale*", result=None), _NVFP4) for _ in range(50)
    ]
    assert sum(reason is None for reason in reasons) > 25
    assert all(r is None or "values would differ" in r for r in reasons)


_NVFP4 = Scheme(
    name="NVFP4A16",
    weight=WeightScheme(grid=E2M1, granularity="group", group_size=16, scale="e4m3"),
)


def test_nvfp4_with_any_factor_is_right_or_refused():
    right = 0
    for _ in range(40):
        for result in (None, BF16):
            tensor = _nvfp4(torch.rand(1, 1), "scale*", result=result)
            if why_not_lossless(tensor, _NVFP4) is None:
                right += 1
                _check(tensor, _NVFP4)
    assert right


def test_nvfp4_whose_rows_have_several_global_scales():
    outer = torch.full((40, 1), 3.0)
    _check(_nvfp4(outer))
    outer[7] = 2.0
    with pytest.raises(NotLossless, match="rows have several"):
        lossless_scheme(_nvfp4(outer))


# -- refused ---------------------------------------------------------------------------------------

NF4 = table_grid("nf4", tuple(n / 8 - 1 for n in range(16)))


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (lambda: _tensor(NF4, (40, 64), (1, 32)), "no weights on the grid `nf4`"),
        (lambda: _tensor(E5M2, (40, 64), (1, 32)), "no weights on the grid `e5m2`"),
        (lambda: _tensor(E2M1, (40, 64), (1, 32)), "no `e2m1` weights with float scales"),
        (lambda: _tensor(INT4, (40, 64), (1, 32), inner=torch.rand(64)), "columns have factors"),
        (
            lambda: _tensor(uint_grid(4), (40, 64), (1, 32), offset=torch.rand(40, 2)),
            "offsets in units of a weight",
        ),
        (
            lambda: _tensor(uint_grid(4), (40, 64), (1, 32), zero=F32, scale=torch.ones(40, 2)),
            None,
        ),
        (
            lambda: _tensor(uint_grid(4), (40, 64), (1, 32), zero_value=7.5),
            "zero point of 7.5, expected numbers of the grid from 0 to 15",
        ),
        (
            lambda: _tensor(uint_grid(4), (40, 64), (1, 32), zero_value=16),
            "zero point of 16, expected numbers of the grid from 0 to 15",
        ),
        (
            lambda: _tensor(
                INT4,
                (40, 64),
                (1, 32),
                outer=torch.rand(1, 1),
                evaluation=Evaluation(dtype=F32, outer="value*"),
            ),
            "of 2560 values would differ",
        ),
        (lambda: _tensor(INT4, (40, 51), (1, 32)), "groups of 32 do not divide its 51 columns"),
    ],
)
def test_what_compressed_tensors_cannot_hold(tensor, message):
    tensor = tensor()
    if message is None:
        _check(tensor)
        return
    with pytest.raises(NotLossless) as caught:
        lossless_scheme(tensor)
    assert message in str(caught.value)


def test_outer_factors_of_values_that_happen_to_be_exact():
    evaluation = Evaluation(dtype=F32, outer="value*")
    _check(_tensor(INT4, (40, 64), (1, 32), outer=torch.full((1, 1), 0.25), evaluation=evaluation))
    _check(_tensor(INT4, (40, 64), (1, 32), offset=torch.zeros(40, 2)))


def test_a_scheme_of_another_kind():
    tensor = _tensor(INT4, (40, 64), (1, 32))
    group = WeightScheme(grid=INT4, granularity="group", group_size=32)
    for weight, message in (
        (replace(group, grid=int_grid(8)), "codes are `int4`, expected `int8`"),
        (replace(group, granularity="channel", group_size=None), "cannot be refined"),
        (replace(group, act_order=True), "by number in one of source and scheme only"),
    ):
        reason = why_not_lossless(tensor, Scheme(name="x", weight=weight))
        assert message in reason
    with_zero = replace(tensor, zero=torch.ones(40, 2, dtype=torch.int8))
    assert "it has zero points" in why_not_lossless(with_zero, Scheme(name="x", weight=group))


# -- plans from headers ----------------------------------------------------------------------------


def _described(tensor, weight, input=None, dtype=None, **entries):
    """A source's description of a weight, and headers of its tensors."""
    leaves = {"codes": tensor.codes, "scales": tensor.scale, **entries}
    tensors = {
        f"m.{leaf}": TensorEntry(f"m.{leaf}", t.dtype, tuple(t.shape), Path("x"), 0, 0)
        for leaf, t in leaves.items()
    }
    described = SourceWeight(
        module="m",
        shape=tensor.shape,
        scheme=Scheme(name="source", weight=weight, input=input),
        encoding="",
        dtype=dtype or tensor.dequantize().dtype,
        leaves={leaf: f"m.{leaf}" for leaf in leaves},
    )
    return described, tensors


@pytest.mark.parametrize(
    ("grid", "symmetric", "zero"),
    [
        (INT4, True, None),
        (INT4, False, torch.int8),
        (uint_grid(4), False, torch.uint8),
        (uint_grid(4), False, F16),
        (uint_grid(4), True, None),
        (uint_grid(3), False, F32),
        (E4M3, True, None),
    ],
)
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_a_plan_is_what_becomes_of_it(grid, symmetric, zero, dtype):
    tensor = _tensor(grid, (40, 192), (1, 128), dtype, zero=zero)
    stored = WeightScheme(grid=grid, granularity="group", group_size=128, symmetric=symmetric)
    described, tensors = _described(tensor, stored)
    assert why_not_planned(described) is None
    scheme = planned_scheme(described)
    planned = lossless_layout(described, scheme, tensors)
    leaves = encode_lossless(tensor, scheme, planned)
    assert {n: Leaf(t.dtype, tuple(t.shape)) for n, t in leaves.items()} == planned
    assert torch.equal(_library(leaves, scheme), tensor.dequantize())
    validate_config(build_config({"m": scheme}, []))


def test_a_plan_stores_scales_in_the_wider_dtype():
    evaluation = Evaluation(dtype=F32, result=BF16)
    tensor = _tensor(E4M3, (40, 64), (16, 32), evaluation=evaluation)
    stored = WeightScheme(grid=E4M3, granularity="block", block=(16, 32))
    described, tensors = _described(tensor, stored)
    assert described.dtype == BF16
    planned = lossless_layout(described, planned_scheme(described), tensors)
    assert planned["weight_scale"].dtype == F32
    leaves = encode_lossless(tensor, planned_scheme(described), planned)
    assert torch.equal(leaves["weight_scale"], tensor.scale)


def test_a_plan_that_the_weight_contradicts():
    tensor = _tensor(INT4, (40, 64), (1, 32), F32)
    stored = WeightScheme(grid=INT4, granularity="group", group_size=32)
    described, tensors = _described(tensor, stored, dtype=F32)
    planned = lossless_layout(described, planned_scheme(described), tensors)
    planned["weight_zero_point"] = Leaf(torch.int8, (1,))
    with pytest.raises(NotLossless, match="planned were"):
        encode_lossless(tensor, planned_scheme(described), planned)


STATIC = InputScheme(grid=E4M3, granularity="tensor", dynamic=False)
NVFP4_INPUT = InputScheme(grid=E2M1, granularity="group", group_size=16, scale="e4m3")


def test_fixed_scales_of_inputs_come_along():
    one = torch.full((1,), 0.5)
    tensor = _tensor(E4M3, (40, 64), (0, 0), input_scale=one)
    stored = WeightScheme(grid=E4M3, granularity="tensor")
    described, tensors = _described(tensor, stored, STATIC, input_scale=one)
    scheme = planned_scheme(described)
    assert scheme.name == "FP8"
    planned = lossless_layout(described, scheme, tensors)
    assert encode_lossless(tensor, scheme, planned)["input_scale"].tolist() == [0.5]
    without, _ = _described(tensor, stored, STATIC)
    assert planned_scheme(without).input is None


@pytest.mark.parametrize("use", ["*", "/"])
def test_fixed_scales_of_nvfp4_inputs(use):
    tensor = _nvfp4(input_scale=torch.full((1,), 0.25))
    tensor = replace(tensor, evaluation=replace(tensor.evaluation, input=use))
    leaf = {"*": "input_scale", "/": "input_global_scale"}[use]
    described, tensors = _described(
        tensor, _NVFP4.weight, NVFP4_INPUT, **{leaf: tensor.input_scale}
    )
    scheme = planned_scheme(described)
    assert scheme.name == "NVFP4"
    leaves = encode_lossless(tensor, scheme, lossless_layout(described, scheme, tensors))
    assert leaves["input_global_scale"].tolist() == [4.0 if use == "*" else 0.25]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scheme": None}, "module `m` is not quantized"),
        ({"experts": 4}, "holds 4 experts"),
        ({"is_transposed": True}, "holds input features first"),
        ({"weight": {"zero": "offset", "symmetric": False}}, "offsets in units of a weight"),
        ({"weight": {"grid": E5M2}}, "no weights on the grid `e5m2`"),
        ({"weight": {"act_order": True}}, "reads no `weight_g_idx` since 0.20"),
        ({"weight": {"group_size": 48}}, None),
        ({"weight": {"group_size": 25}}, "groups of 25 do not divide its 64 columns"),
    ],
)
def test_plans_that_headers_refuse(changes, message):
    stored = WeightScheme(grid=INT4, granularity="group", group_size=32)
    described, _ = _described(_tensor(INT4, (40, 64), (1, 32)), stored)
    if "weight" in changes:
        changed = replace(stored, **changes["weight"])
        changes = {"scheme": Scheme(name="source", weight=changed)}
    reason = why_not_planned(replace(described, **changes))
    assert reason is None if message is None else message in reason


# -- checkpoints of real tools ---------------------------------------------------------------------

TRUTHS = [truth for truth in truths() if not truth.folder.parent.name.startswith("gguf")]
CERTAIN = (  # tools whose every weight has such a form
    "compressed-tensors-0.20.1/",
    "llmcompressor-0.14.0.1/",
    "autoawq-0.2.9/",
    "auto-round-0.16.1/nano-llama-llmc",
)


@pytest.mark.parametrize(
    "truth", TRUTHS, ids=lambda truth: f"{truth.folder.parent.name}/{truth.folder.name}"
)
def test_real_checkpoints(truth):
    """Each quantized weight is refused, or the library gets the values that its own tool has."""
    try:
        source = opened(truth.folder)
    except FormatError:
        pytest.skip("not read")
    refused = []
    for module, weight in source.weights.items():
        if not weight.is_quantized:
            continue
        try:
            scheme = planned_scheme(weight)
            planned = lossless_layout(weight, scheme, source.checkpoint.tensors)
            tensor = source.read_weight(module)
            if not isinstance(tensor, QuantTensor):
                continue
            leaves = encode_lossless(tensor, scheme, planned)
        except NotLossless as error:
            refused.append(str(error))
            continue
        found, expected = _library(leaves, scheme), tensor.dequantize()
        wide = expected.dtype if scheme.weight.scale == "float" else found.dtype
        assert torch.equal(found.to(wide).double(), expected.to(wide).double()), module
    name = f"{truth.folder.parent.name}/{truth.folder.name}"
    assert not name.startswith(CERTAIN) or refused == []
