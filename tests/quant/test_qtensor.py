"""`QuantTensor` against the formula in NumPy, bit for bit; slices and stacks against the dense."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import as_numpy, dequantized, e2m1_values, rounded, same_bits
from strategies import WORKING, cuts, quant_tensors, stackable

from quantload.errors import ShapeError, WrongType
from quantload.quant.grid import E2M1, E4M3, INT4, INT8, table_grid
from quantload.quant.qtensor import Evaluation, QuantTensor
from quantload.quant.stacking import stack, why_not_stackable

DIVIDED = Evaluation(torch.float32, "scale/")
NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def expected_of(tensor):
    """The weight by the oracle, [N, K] float32 numbers of the evaluation's dtype."""
    if tensor.grid is E2M1:
        values = e2m1_values()[tensor.codes.numpy()]
    elif tensor.grid.table is not None:
        values = np.array(tensor.grid.table)[tensor.codes.numpy()]
    else:
        values = as_numpy(tensor.codes)
    parts = {
        name: as_numpy(getattr(tensor, name))
        for name in ("zero", "offset", "outer")
        if getattr(tensor, name) is not None
    }
    return dequantized(
        values.astype(np.float32),
        as_numpy(tensor.scale),
        tensor.block,
        NAMES[tensor.evaluation.dtype],
        use=tensor.evaluation.outer,
        group_of=None if tensor.group_of is None else tensor.group_of.tolist(),
        **parts,
    )


def plain(rows=4, columns=6, *, block=(1, 6), dtype=torch.float32, **changes):
    """A small int8 tensor with one scale a block."""
    shape = -(-rows // max(1, block[0])), -(-columns // max(1, block[1]))
    parts = {
        "grid": INT8,
        "codes": torch.arange(rows * columns, dtype=torch.int8).reshape(rows, columns),
        "scale": torch.arange(1, shape[0] * shape[1] + 1, dtype=torch.float32).reshape(shape),
        "block": block,
        "evaluation": Evaluation(dtype=dtype),
    }
    return QuantTensor(**{**parts, **changes})


# -- values ------------------------------------------------------------------------------------


@given(quant_tensors())
def test_dequantize_is_the_formula(tensor):
    dtype = tensor.evaluation.dtype
    expected = torch.from_numpy(expected_of(tensor)).to(dtype)
    assert same_bits(tensor.dequantize(), expected)


@given(quant_tensors(), st.sampled_from(WORKING))
def test_dequantize_rounds_the_finished_values_to_the_dtype_asked_for(tensor, dtype):
    expected = rounded(expected_of(tensor), NAMES[dtype])
    assert same_bits(tensor.dequantize(dtype), torch.from_numpy(expected).to(dtype))


def test_dequantize_leaves_the_parts_alone():
    tensor = plain(zero=torch.ones(4, 1), outer=torch.full((4, 1), 2.0))
    before = {name: part.clone() for name, part in tensor.tensors().items()}
    tensor.dequantize()
    assert all(same_bits(part, before[name]) for name, part in tensor.tensors().items())
    assert set(before) == {"codes", "scale", "zero", "outer"}


def test_transposed_codes_are_read_in_their_logical_order():
    tensor = plain(block=(1, 3))
    turned = replace(tensor, codes=tensor.codes.t().contiguous().t())
    assert same_bits(turned.dequantize(), tensor.dequantize())


def test_a_divisor_is_not_the_multiplier_of_its_reciprocal():
    tensor = plain(1, 1, block=(1, 1), codes=torch.ones(1, 1, dtype=torch.int8))
    tensor = replace(tensor, scale=torch.tensor([[41.0]]))
    divided = replace(tensor, outer=torch.tensor([[41.0]]), evaluation=DIVIDED)
    multiplied = replace(tensor, outer=1 / torch.tensor([[41.0]]))
    assert divided.dequantize().item() == 1.0
    assert multiplied.dequantize().item() == 1.0 - 2.0**-24


def test_the_dtype_of_evaluation_shows_in_the_values():
    tensor = plain(1, 1, block=(1, 1), codes=torch.full((1, 1), 9, dtype=torch.int8))
    tensor = replace(tensor, scale=torch.tensor([[0.1]]))
    narrow = replace(tensor, evaluation=Evaluation(torch.bfloat16))
    assert tensor.dequantize(torch.bfloat16).item() == 0.8984375
    assert narrow.dequantize(torch.bfloat16).item() == 0.90234375
    assert narrow.dequantize().dtype == torch.bfloat16


def test_a_result_is_rounded_once_and_the_same_in_every_model():
    tensor = plain(1, 1, block=(1, 1), codes=torch.full((1, 1), 9, dtype=torch.int8))
    tensor = replace(tensor, scale=torch.tensor([[0.1]]))
    rounded = replace(tensor, evaluation=Evaluation(torch.float32, result=torch.bfloat16))
    assert rounded.dequantize().dtype == torch.bfloat16
    for model in (rounded, rounded.evaluated_in(torch.float32)):
        assert model.dequantize(torch.float32).item() == 0.8984375
    unrounded = replace(tensor, evaluation=Evaluation(torch.bfloat16))
    assert unrounded.evaluated_in(torch.float32).dequantize().item() == pytest.approx(0.9, rel=1e-7)


# -- rearrangements ----------------------------------------------------------------------------


@given(st.data(), quant_tensors())
def test_rows_are_the_rows_of_the_weight(data, tensor):
    start, stop = data.draw(cuts(tensor.shape[0]))
    part = tensor.rows(start, stop)
    assert same_bits(part.dequantize(), tensor.dequantize()[start:stop])
    assert_same_dtypes(part, tensor)


@given(st.data(), quant_tensors())
def test_columns_are_the_columns_of_the_weight(data, tensor):
    start, stop = data.draw(cuts(tensor.shape[1]))
    part = tensor.columns(start, stop)
    assert same_bits(part.dequantize(), tensor.dequantize()[:, start:stop])
    assert_same_dtypes(part, tensor)


@given(st.data(), quant_tensors())
def test_a_part_of_a_part_of_a_part(data, tensor):
    dense = tensor.dequantize()
    for _ in range(3):
        start, stop = data.draw(cuts(tensor.shape[0]))
        tensor, dense = tensor.rows(start, stop), dense[start:stop]
        start, stop = data.draw(cuts(tensor.shape[1]))
        tensor, dense = tensor.columns(start, stop), dense[:, start:stop]
    assert same_bits(tensor.dequantize(), dense)


@given(st.data(), quant_tensors())
def test_refining_keeps_the_values_or_refuses(data, tensor):
    block = tuple(data.draw(st.integers(1, length + 4)) for length in tensor.shape)
    fits = [
        old % new == 0 or length <= old
        for new, old, length in zip(block, tensor.block, tensor.shape, strict=True)
    ]
    if fits[0] and (fits[1] or tensor.group_of is not None):
        refined = tensor.refined(block)
        assert refined.block[0] == block[0]
        assert same_bits(refined.dequantize(), tensor.dequantize())
        assert_same_dtypes(refined, tensor)
    else:
        with pytest.raises(ShapeError, match="cannot be refined"):
            tensor.refined(block)


@given(stackable())
def test_a_stack_is_the_concatenation_of_the_weights(tensors):
    stacked = stack(tensors)
    assert same_bits(stacked.dequantize(), torch.cat([one.dequantize() for one in tensors]))
    for one in tensors:
        assert_same_dtypes(one, stacked)


@given(st.data(), stackable())
def test_a_slice_of_a_stack(data, tensors):
    dense = torch.cat([one.dequantize() for one in tensors])
    stacked = stack(tensors)
    rows, columns = data.draw(cuts(dense.shape[0])), data.draw(cuts(dense.shape[1]))
    part = stacked.columns(*columns).rows(*rows)
    assert same_bits(part.dequantize(), dense[slice(*rows), slice(*columns)])


@given(st.data(), stackable())
def test_a_stack_of_slices(data, tensors):
    columns = data.draw(cuts(tensors[0].shape[1]))
    rows = [data.draw(cuts(one.shape[0])) for one in tensors]
    parts = [one.rows(*cut).columns(*columns) for one, cut in zip(tensors, rows, strict=True)]
    expected = [
        one.dequantize()[slice(*cut), slice(*columns)]
        for one, cut in zip(tensors, rows, strict=True)
    ]
    assert same_bits(stack(parts).dequantize(), torch.cat(expected))


@given(st.data(), stackable())
def test_members_come_back_out_of_a_stack(data, tensors):
    stacked, start = stack(tensors), 0
    for one in tensors:
        part = stacked.rows(start, start + one.shape[0])
        assert same_bits(part.codes, one.codes)
        assert same_bits(part.dequantize(), one.dequantize())
        start += one.shape[0]
    assert start == stacked.shape[0]


@given(st.data(), quant_tensors())
def test_the_pieces_of_a_tensor_stack_to_the_tensor(data, tensor):
    inner = data.draw(st.sets(st.integers(1, tensor.shape[0]), max_size=3))
    edges = [0, *sorted(inner - {tensor.shape[0]}), tensor.shape[0]]
    pieces = [tensor.rows(*edge) for edge in pairwise(edges)]
    assert same_bits(stack(pieces).dequantize(), tensor.dequantize())


def assert_same_dtypes(one, other):
    """Stored parts keep their dtypes; a stack may add an outer that a member did without."""
    kept = one.tensors().items()
    assert {name: part.dtype for name, part in kept} == {
        name: part.dtype for name, part in other.tensors().items() if name in dict(kept)
    }


@pytest.mark.parametrize(
    ("heights", "blocks", "block", "rows_of_scales"),
    [
        ((256, 128, 128), (256, 128, 128), 128, 4),  # q/k/v with one scale each
        ((256, 128, 128), (128, 128, 128), 128, 4),  # blocks
        ((1536, 576), (128, 128), 128, 17),  # the last member ends inside a block
        ((576, 1536), (128, 128), 64, 33),  # the first one does
        ((6, 6), (1, 6), 1, 12),  # channels and a tensor
        ((3, 5), (3, 5), 3, 3),
        ((5, 3), (8, 8), 5, 2),  # blocks larger than the members
        ((4, 4), (8, 2), 2, 4),
    ],
)
def test_a_stack_repeats_no_more_scales_than_it_must(heights, blocks, block, rows_of_scales):
    tensors = [
        plain(height, 2, block=(size, 2), codes=torch.zeros(height, 2, dtype=torch.int8))
        for height, size in zip(heights, blocks, strict=True)
    ]
    stacked = stack(tensors)
    assert stacked.block == (block, 2)
    assert stacked.scale.shape == (rows_of_scales, 1)


def test_aligned_cuts_keep_the_block():
    tensor = plain(8, 8, block=(2, 4))
    assert tensor.rows(2, 7).block == (2, 4)
    assert tensor.columns(4, 8).block == (2, 4)
    assert tensor.rows(1, 7).block == (1, 4)
    assert tensor.columns(2, 8).block == (2, 2)
    assert tensor.columns(5, 7).block == (2, 2)
    assert tensor.columns(1, 4).block == (2, 3)


def test_outer_grows_rows_only_where_a_member_has_one():
    first, second = plain(2, block=(2, 6)), plain(3, block=(3, 6))
    assert stack([first, second]).outer is None
    doubled = replace(second, outer=torch.tensor([[2.0]]))
    outer = stack([first, doubled]).outer
    assert outer is not None
    assert outer.tolist() == [[1.0], [1.0], [2.0], [2.0], [2.0]]


def test_a_stack_of_one_is_that_one():
    tensor = plain()
    assert stack([tensor]) is tensor


def test_columns_of_an_ordered_tensor_keep_global_group_numbers():
    group_of = torch.tensor([2, 0, 1, 1, 0, 2], dtype=torch.int32)
    tensor = plain(group_of=group_of, scale=torch.arange(12.0).reshape(4, 3), block=(1, 2))
    part = tensor.columns(2, 5)
    assert part.group_of is not None
    assert part.group_of.tolist() == [1, 1, 0]
    assert same_bits(part.scale, tensor.scale)


def test_to_moves_every_part():
    tensor = plain(zero=torch.ones(4, 1), outer=torch.ones(1, 1)).to("meta")
    assert {part.device.type for part in tensor.tensors().values()} == {"meta"}
    assert tensor.device.type == "meta"


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"codes": torch.zeros(4, 6)},
            "codes of grid `int8` are `torch.float32` of shape `(4, 6)`, "
            "expected `torch.int8` of shape [N, K]",
        ),
        (
            {"codes": torch.zeros(24, dtype=torch.int8)},
            "codes of grid `int8` are `torch.int8` of shape `(24,)`, "
            "expected `torch.int8` of shape [N, K]",
        ),
        ({"block": (0, 6)}, "block `(0, 6)`, expected positive sizes"),
        (
            {"scale": torch.ones(4, 2)},
            "`scale` has shape `(4, 2)`, expected `(4, 1)` for codes of shape `(4, 6)` and blocks "
            "of `(1, 6)`",
        ),
        (
            {"zero": torch.ones(4)},
            "`zero` has shape `(4,)`, expected `(4, 1)` for codes of shape `(4, 6)` and blocks of "
            "`(1, 6)`",
        ),
        (
            {"scale": torch.tensor(1.0), "group_of": torch.zeros(6, dtype=torch.int32)},
            "`scale` has shape `()`, expected `(4, 1)` for codes of shape `(4, 6)` and blocks of "
            "`(1, 6)`",
        ),
        (
            {"zero": torch.ones(4, 1), "offset": torch.ones(4, 1)},
            "a quantized tensor has a zero point or an offset, not both",
        ),
        ({"outer": torch.ones(4)}, "`outer` has shape `(4,)`, expected (1, 1) or (4, 1)"),
        (
            {"group_of": torch.zeros(5, dtype=torch.int32)},
            "`group_of` has shape `(5,)`, expected (6,)",
        ),
    ],
)
def test_parts_that_do_not_fit_each_other(changes, message):
    with pytest.raises(ShapeError) as error:
        plain(**changes)
    assert str(error.value) == message


@pytest.mark.parametrize("make", [list, torch.Size, np.array])
def test_a_block_in_another_sequence_becomes_a_tuple(make):
    tensor = replace(plain(block=(1, 3)), block=list(make([1, 3])))
    assert type(tensor.block) is tuple
    assert tensor.block == (1, 3)
    assert [type(size) for size in tensor.block] == [int, int]
    assert torch.equal(tensor.rows(1, 3).dequantize(), tensor.dequantize()[1:3])
    assert tensor.refined([1, 3]) is tensor


@pytest.mark.parametrize(
    "block", [(1,), (1, 2, 3), (1.0, 6), ("1", "6"), (True, 6), (None, 6), "16", 6, None, {1, 6}]
)
def test_what_is_no_block_is_refused_by_name(block):
    with pytest.raises(WrongType, match=r"`block` is .*, expected \(rows, columns\)"):
        replace(plain(), block=block)
    with pytest.raises(WrongType, match=r"`block` is .*, expected \(rows, columns\)"):
        plain().refined(block)


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (lambda t: t.rows(0, 5), "rows 0..5 of a tensor with 4 rows"),
        (lambda t: t.rows(2, 2), "rows 2..2 of a tensor with 4 rows"),
        (lambda t: t.columns(-1, 2), "columns -1..2 of a tensor with 6 columns"),
        (lambda t: t.refined((1, 4)), "block size 3 of axis 1 cannot be refined to 4"),
        (lambda t: t.refined((0, 3)), "block size 1 of axis 0 cannot be refined to 0"),
    ],
)
def test_cuts_that_are_not_there(cut, message):
    with pytest.raises(ShapeError) as error:
        cut(plain(block=(1, 3)))
    assert str(error.value) == message


ORDER = torch.tensor([0, 1, 0, 1, 0, 1], dtype=torch.int32)


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ({}, {"rows": 2, "columns": 5, "block": (1, 5)}, "input widths differ: 6 and 5"),
        ({}, {"grid": INT4}, "grids differ: int8 and int4"),
        ({}, {"dtype": torch.float16}, "dtype or order of evaluation differ"),
        ({}, {"scale": torch.ones(4, 1).half()}, "dtype or order of evaluation differ"),
        ({}, {"zero": torch.ones(4, 1)}, "only some have a `zero`, or their dtypes differ"),
        (
            {"offset": torch.ones(4, 1)},
            {"offset": torch.ones(4, 1).half()},
            "only some have a `offset`, or their dtypes differ",
        ),
        (
            {"outer": torch.ones(1, 1)},
            {"outer": torch.ones(1, 1).half()},
            "dtypes of `outer` differ",
        ),
        ({}, {"group_of": ORDER, "scale": torch.ones(4, 2)}, "only some are ordered by activation"),
        (
            {"group_of": ORDER, "scale": torch.ones(4, 2)},
            {"group_of": 1 - ORDER, "scale": torch.ones(4, 2)},
            "their act-orders differ",
        ),
        (
            {"group_of": ORDER, "scale": torch.ones(4, 2)},
            {"group_of": ORDER, "scale": torch.ones(4, 3)},
            "their act-orders differ",
        ),
    ],
)
def test_members_of_different_kinds(first, second, reason):
    tensors = [plain(**first), plain(**first), plain(**second)]
    assert why_not_stackable(tensors[:2]) is None
    assert why_not_stackable(tensors) == reason
    with pytest.raises(ShapeError) as error:
        stack(tensors)
    assert str(error.value) == f"tensors cannot be stacked: {reason}"


def test_equal_tables_are_one_grid():
    table = tuple(float(i) for i in range(16))
    codes = torch.zeros(4, 6, dtype=torch.uint8)
    tensors = [plain(grid=table_grid("nf4", table), codes=codes) for _ in range(2)]
    assert why_not_stackable(tensors) is None
    other = plain(grid=E4M3, codes=codes.view(torch.float8_e4m3fn))
    assert why_not_stackable([tensors[0], other]) == "grids differ: nf4 and e4m3"


@pytest.mark.parametrize("block", [(1, 6), (2, 4), (4, 6)])
def test_scales_may_be_divisors(block):
    tensor = plain(block=block)
    divided = replace(tensor, evaluation=Evaluation(torch.float32, values="/"))
    ones = replace(tensor, codes=torch.ones_like(tensor.codes))
    expected = tensor.codes.float() / ones.dequantize()
    assert torch.equal(divided.dequantize(), expected)
    assert torch.equal(divided.rows(1, 3).dequantize(), expected[1:3])
    assert torch.equal(divided.multiplier, 1 / tensor.scale)
    assert tensor.multiplier is tensor.scale
    assert why_not_stackable([tensor, divided]) == "dtype or order of evaluation differ"


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("use", ["scale*", "scale/"])
@pytest.mark.parametrize("block", [(6, 8), (2, 4), (1, 4)])
def test_outer_factors_folded_into_the_scale(block, use, rows):
    codes = torch.randint(-8, 8, (6, 8)).to(torch.int8)
    grid_shape = (6 // block[0], 8 // block[1])
    tensor = QuantTensor(
        grid=INT4,
        codes=codes,
        scale=torch.rand(grid_shape).half(),
        zero=torch.randint(-8, 8, grid_shape).to(torch.int8),
        outer=torch.rand(rows, 1) + 0.5,
        block=block,
        evaluation=Evaluation(torch.float32, use),
    )
    folded = tensor.folded()
    assert folded.outer is None
    assert folded.scale.dtype == torch.float32
    assert folded.scale.shape[0] == (6 if rows > 1 else grid_shape[0])
    assert torch.equal(folded.dequantize(), tensor.dequantize())


def test_outer_factors_of_values_are_not_folded():
    scale = torch.ones(1, 1)
    codes = torch.ones(2, 2, dtype=torch.int8)
    of_values = Evaluation(torch.float32, "value*")
    tensor = QuantTensor(
        grid=INT4, codes=codes, scale=scale, block=(2, 2), outer=scale, evaluation=of_values
    )
    assert tensor.folded() is tensor
    alone = replace(tensor, outer=None)
    assert alone.folded() is alone


def test_the_dtype_in_which_a_scale_meets_outer():
    """bfloat16 codes times a scale that was divided in float32 and then rounded to bfloat16."""
    scale, outer = torch.tensor([[1.0]], dtype=torch.float8_e4m3fn), torch.tensor([[2345.678]])
    evaluation = Evaluation(torch.bfloat16, "scale/", scale=torch.float32)
    tensor = QuantTensor(
        grid=INT4,
        codes=torch.tensor([[3]], dtype=torch.int8),
        scale=scale,
        outer=outer,
        block=(1, 1),
        evaluation=evaluation,
    )
    expected = torch.tensor(3.0).bfloat16() * (1 / outer).bfloat16()
    assert torch.equal(tensor.dequantize(), expected)
    assert torch.equal(tensor.folded().dequantize(), expected)
    early = replace(tensor, evaluation=replace(evaluation, scale=None))
    assert not torch.equal(early.dequantize(), expected)
