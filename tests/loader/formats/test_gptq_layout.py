"""GPTQ's tensors, against packers that set field by field what the specification says."""

import numpy as np
import pytest
import torch
from int_packing import gptq_tensors, memory_checkpoint, random_parts, values_of, words_of

from quantload.errors import (
    FormatMismatch,
    MissingTensor,
    NonFiniteWeight,
    QuantloadError,
    UnsupportedVariant,
)
from quantload.loader.formats.gptq_groups import read_groups
from quantload.loader.formats.gptq_layout import (
    GPTQ_LEAVES,
    GptqLayout,
    decode_gptq,
    gptq_weight,
)
from quantload.loader.formats.module_leaves import by_module


def described(parts, layout, **options):
    checkpoint = memory_checkpoint({f"a.{leaf}": t for leaf, t in parts.items()}, {})
    leaves = by_module(checkpoint, GPTQ_LEAVES)["a"]
    return gptq_weight(leaves, layout, decided_by="the test", **options)


def decoded(parts, layout, *, warnings=None, **options):
    weight = described(parts, layout, **options)
    heard = [] if warnings is None else warnings
    return decode_gptq(parts, weight, layout, checkpoint_name="memory", warn=heard.append)


def in_order(columns, group_size):
    return np.arange(columns) // (columns if group_size == -1 else group_size)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("planar", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns", "group_size"), [(32, 64, 32), (8, 96, 64), (40, 32, -1), (1, 160, 64)]
)
@pytest.mark.parametrize("offset", [0, 1])
def test_random_fields(bits, planar, rows, columns, group_size, offset):
    if planar and rows % 32:
        rows = 32
    groups = in_order(columns, group_size)
    parts = random_parts(rows, columns, groups[-1] + 1, bits, seed=bits)
    layout = GptqLayout(
        bits=bits, group_size=group_size, symmetric=False, zero_offset=offset, is_planar=planar
    )
    tensors = gptq_tensors(*parts, bits=bits, planar=planar, offset=offset, groups=groups)
    found = decoded(tensors, layout)
    assert found.group_of is None
    assert torch.equal(found.dequantize(), values_of(*parts, groups, torch.float16))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("rows", "columns"), [(5, 77), (13, 41), (3, 7)])
def test_ragged_widths(bits, rows, columns):
    groups = in_order(columns, 32)
    parts = random_parts(rows, columns, groups[-1] + 1, bits)
    layout = GptqLayout(bits=bits, group_size=32, symmetric=False)
    found = decoded(gptq_tensors(*parts, bits=bits, groups=groups), layout)
    assert found.shape == (rows, columns)
    assert torch.equal(found.dequantize(), values_of(*parts, groups, torch.float16))


def test_codes_after_the_last_column():
    groups = in_order(40, 32)
    fields, zeros, scales = random_parts(8, 40, 2, 4)
    fields[3, 38] = 1
    tensors = gptq_tensors(fields, zeros, scales, bits=4, groups=groups)
    tensors["g_idx"] = tensors["g_idx"][:38]
    layout = GptqLayout(bits=4, group_size=32, symmetric=False)
    with pytest.raises(FormatMismatch, match=r"`a.qweight` has codes for more than 38 columns"):
        decoded(tensors, layout)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_zero_points_that_borrow_from_their_neighbours(bits):
    groups = in_order(64, 32)
    fields, zeros, scales = random_parts(32, 64, 2, bits)
    zeros[::3] = 0  # each takes one from the field after it
    layout = GptqLayout(bits=bits, group_size=32, symmetric=False, zeros_borrow=True)
    tensors = gptq_tensors(fields, zeros, scales, bits=bits, borrow=True, groups=groups)
    expected = values_of(fields, zeros, scales, groups, torch.float16)
    heard = []
    assert torch.equal(decoded(tensors, layout, warnings=heard).dequantize(), expected)
    assert heard == []
    by_field = GptqLayout(bits=bits, group_size=32, symmetric=False)
    assert not torch.equal(decoded(tensors, by_field).dequantize(), expected)


def test_zero_points_of_zero_wrap_in_their_field_and_are_told():
    groups = in_order(32, 32)
    fields, zeros, scales = random_parts(8, 32, 1, 4)
    zeros[3] = 0
    layout = GptqLayout(bits=4, group_size=32, symmetric=False)
    heard = []
    found = decoded(gptq_tensors(fields, zeros, scales, bits=4), layout, warnings=heard)
    assert torch.equal(found.dequantize(), values_of(fields, zeros, scales, groups, torch.float16))
    assert len(heard) == 1
    assert "zero points are 0" in heard[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_columns_in_any_order(bits, dtype):
    groups = np.random.default_rng(1).permutation(in_order(96, 32))
    parts = random_parts(16, 96, 3, bits)
    layout = GptqLayout(bits=bits, group_size=32, symmetric=False, desc_act=True)
    tensors = gptq_tensors(*parts, bits=bits, groups=groups)
    found = decoded(tensors, layout, dtype=dtype, act_order=True)
    assert torch.equal(found.group_of, torch.tensor(groups, dtype=torch.int32))
    assert torch.equal(found.dequantize(), values_of(*parts, groups, dtype))


def test_groups_of_uneven_sizes():
    groups = np.array([0] * 50 + [2] * 10 + [1] * 4)
    parts = random_parts(8, 64, 2, 4)
    layout = GptqLayout(bits=4, group_size=32, symmetric=False)
    tensors = gptq_tensors(*parts, bits=4, groups=groups)
    with pytest.raises(FormatMismatch, match="values from 0 to 2, expected numbers of 2 groups"):
        decoded(tensors, layout)
    groups[groups == 2] = 1
    heard = []
    found = decoded(gptq_tensors(*parts, bits=4, groups=groups), layout, warnings=heard)
    assert torch.equal(found.dequantize(), values_of(*parts, groups, torch.float16))
    assert any("`desc_act` is false" in text for text in heard)


@pytest.mark.parametrize("group", [-1, 2, 1000])
def test_groups_that_are_not_there(group):
    groups = torch.zeros(64, dtype=torch.int32)
    groups[5] = group
    layout = GptqLayout(bits=4, group_size=32, symmetric=True)
    with pytest.raises(FormatMismatch, match=r"tensor `a.g_idx` has values from"):
        read_groups(groups, layout.group_size, "a.g_idx", "memory")


# -- symmetric -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("stored", ["none", "as labelled", "by the other convention"])
@pytest.mark.parametrize("offset", [0, 1])
def test_symmetric(bits, stored, offset):
    planar = bits in (5, 6, 7)
    groups = in_order(64, 32)
    fields, _, scales = random_parts(32, 64, 2, bits)
    zeros = np.full((32, 2), 1 << (bits - 1))
    other = stored == "by the other convention"
    tensors = gptq_tensors(
        fields,
        None if stored == "none" else zeros,
        scales,
        bits=bits,
        planar=planar,
        offset=1 - offset if other else offset,
    )
    layout = GptqLayout(
        bits=bits, group_size=32, symmetric=True, zero_offset=offset, is_planar=planar
    )
    heard = []
    found = decoded(tensors, layout, warnings=heard)
    assert found.zero is None
    assert torch.equal(found.dequantize(), values_of(fields, zeros, scales, groups, torch.float16))
    assert len(heard) == other
    if other:
        said, stored_as = ("v1", "v2") if offset else ("v2", "v1")
        assert f"convention {stored_as} although the config says {said}" in heard[0]


def test_symmetric_3_bit_zero_points_with_swapped_constants():
    fields, _, scales = random_parts(64, 32, 1, 3)
    tensors = gptq_tensors(fields, np.full((64, 1), 4), scales, bits=3, offset=0)
    constants = [0x24924924, 0x92492492, 0x49249249] * 2
    words = [
        (int(w) & 0xFFFFFFFF) - c for w, c in zip(tensors["qzeros"][0], constants, strict=True)
    ]
    tensors["qzeros"] = torch.tensor([[words_of(w & 0xFFFFFFFF, 1)[0] for w in words]])
    tensors["qzeros"] = tensors["qzeros"].to(torch.int32)
    heard = []
    found = decoded(tensors, GptqLayout(bits=3, group_size=32, symmetric=True), warnings=heard)
    expected = values_of(fields, np.full((64, 1), 4), scales, in_order(32, 32), torch.float16)
    assert torch.equal(found.dequantize(), expected)
    assert heard == []


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_symmetric_with_other_zero_points_is_refused(bits):
    fields, zeros, scales = random_parts(32, 32, 1, bits)
    zeros[:] = 1 << (bits - 1)
    zeros[7] -= 1
    layout = GptqLayout(bits=bits, group_size=32, symmetric=True)
    with pytest.raises(FormatMismatch, match=r"tensor `a.qzeros` in `memory`"):
        decoded(gptq_tensors(fields, zeros, scales, bits=bits), layout)


# -- headers -------------------------------------------------------------------------------------

SOUND = gptq_tensors(*random_parts(32, 64, 2, 4), bits=4, groups=in_order(64, 32))
ASYMMETRIC = GptqLayout(bits=4, group_size=32, symmetric=False)


def test_what_headers_say():
    weight = described(SOUND, ASYMMETRIC)
    assert weight.shape == (32, 64)
    assert str(weight.scheme) == "W4A16_ASYM:g32"
    assert weight.dtype is torch.float16
    assert set(weight.leaves) == {"qweight", "qzeros", "scales", "g_idx"}
    assert described(SOUND, ASYMMETRIC, dtype=torch.bfloat16).dtype is torch.bfloat16
    assert described(SOUND, ASYMMETRIC, act_order=True).scheme.weight.act_order


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"qweight": None}, MissingTensor, r"tensor `a.qweight` is missing"),
        ({"scales": None}, MissingTensor, r"tensor `a.scales` is missing"),
        ({"qzeros": None}, MissingTensor, r"tensor `a.qzeros` is missing"),
        ({"weight": torch.zeros(2, 2)}, FormatMismatch, "has both `weight` and `qweight`"),
        ({"qweight": lambda t: t.to(torch.int64)}, FormatMismatch, "is `torch.int64`"),
        ({"qweight": lambda t: t[None]}, UnsupportedVariant, "has 3 dimensions"),
        ({"qweight": lambda t: t[:-1]}, FormatMismatch, r"expected 8 rows for 64 columns"),
        ({"qweight": lambda t: t[:, :-1]}, FormatMismatch, r"expected `\(2, 31\)`"),
        ({"qweight": lambda t: t.T}, FormatMismatch, r"expected 8 rows for 64 columns"),
        ({"qweight": lambda t: t[:, :0]}, FormatMismatch, "has shape"),
        ({"scales": lambda t: t[:1]}, FormatMismatch, r"expected `\(2, 32\)`"),
        ({"scales": lambda t: t.to(torch.int32)}, FormatMismatch, "is `torch.int32`"),
        ({"qzeros": lambda t: t[:, :-1]}, FormatMismatch, r"expected `\(2, 4\)`"),
        ({"qzeros": lambda t: t.float()}, FormatMismatch, "is `torch.float32`"),
        ({"g_idx": lambda t: t.float()}, FormatMismatch, "is `torch.float32`"),
        ({"g_idx": lambda t: t[:-8]}, FormatMismatch, r"expected 7 rows for 56 columns"),
        ({"g_idx": lambda t: t[None]}, FormatMismatch, r"expected \(K,\)"),
        ({"g_idx": None, "qweight": lambda t: t[:-1]}, MissingTensor, "`a.g_idx` is missing"),
    ],
)
def test_headers_that_do_not_fit(change, error, message):
    parts = dict(SOUND)
    for leaf, made in change.items():
        if made is None:
            del parts[leaf]
        else:
            parts[leaf] = made(parts[leaf]) if callable(made) else made
    with pytest.raises(error, match=message) as caught:
        described(parts, ASYMMETRIC)
    assert "memory" in str(caught.value)


def test_layouts_that_need_g_idx():
    parts = {leaf: t for leaf, t in SOUND.items() if leaf != "g_idx"}
    assert described(parts, ASYMMETRIC).shape == (32, 64)
    for needed in ({"desc_act": True}, {"needs_groups": True}):
        layout = GptqLayout(bits=4, group_size=32, symmetric=False, **needed)
        with pytest.raises(MissingTensor, match=r"`a.g_idx` is missing"):
            described(parts, layout)


def test_planar_fields_come_in_blocks_of_32():
    parts = gptq_tensors(*random_parts(32, 40, 2, 8), bits=8, groups=in_order(40, 32))
    layout = GptqLayout(bits=8, group_size=32, symmetric=False, is_planar=True)
    with pytest.raises(FormatMismatch, match="40 columns"):
        described(parts, layout)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_scales_that_are_no_numbers(value):
    parts = {**SOUND, "scales": SOUND["scales"].clone()}
    parts["scales"][1, 3] = value
    with pytest.raises(NonFiniteWeight, match=r"tensor `a.scales` holds NaN or infinity"):
        decoded(parts, ASYMMETRIC)


def test_scales_of_zero():
    parts = {**SOUND, "scales": torch.zeros_like(SOUND["scales"])}
    with pytest.raises(FormatMismatch, match=r"tensor `a.scales` is all zero"):
        decoded(parts, ASYMMETRIC)
    parts["scales"][0, 0] = 1
    assert bool(decoded(parts, ASYMMETRIC).dequantize().any())


@pytest.mark.parametrize("bits", [3, 4])
def test_the_wrong_number_of_bits_is_found_by_the_shapes(bits):
    layout = GptqLayout(bits=7 - bits, group_size=32, symmetric=False)
    parts = gptq_tensors(*random_parts(32, 64, 2, bits), bits=bits, groups=in_order(64, 32))
    with pytest.raises(QuantloadError, match="rows for 64 columns"):
        described(parts, layout)
