"""What a cut takes of a tensor, and tensors that share a parameter: equal to plain indexing."""

from __future__ import annotations

import pytest
import torch

from quantload.errors import ShapeError, UnsupportedVariant
from quantload.loader.cuts import Joining, check_all_taken, resolved, shape_after, taken
from quantload.mappers.targets import Cut, Join, Target
from quantload.quant.qtensor import QuantTensor
from quantload.quant.rtn import quantize_rtn
from quantload.quant.scheme import parse_scheme

WEIGHT = torch.randn(12, 64, generator=torch.Generator().manual_seed(0))
STRAIGHT = Cut(rows=(range(3, 9),))
ALTERNATING = Cut(rows=(range(0, 12, 2), range(1, 12, 2)))
TWO_RUNS = Cut(rows=(range(8, 12), range(2)))


def quantized(weight: torch.Tensor, scheme: str) -> QuantTensor:
    chosen = parse_scheme(scheme).weight
    assert chosen is not None
    return quantize_rtn(weight, chosen)


@pytest.mark.parametrize("cut", [STRAIGHT, ALTERNATING, TWO_RUNS])
def test_rows(cut: Cut) -> None:
    order = [row for run in cut.rows or () for row in run]
    assert torch.equal(taken(WEIGHT, cut, "w"), WEIGHT[order])
    assert torch.equal(taken(WEIGHT[:, 0], cut, "b"), WEIGHT[order, 0])
    assert shape_after((12, 64), cut, "w") == (len(order), 64)


@pytest.mark.parametrize("cut", [STRAIGHT, ALTERNATING, TWO_RUNS])
@pytest.mark.parametrize("scheme", ["W4A16:g32", "FP8_BLOCK", "W8A16:channel"])
def test_rows_of_quantized_weights_are_those_of_their_values(cut: Cut, scheme: str) -> None:
    weight = quantized(WEIGHT, scheme)
    order = [row for run in cut.rows or () for row in run]
    assert torch.equal(taken(weight, cut, "w").dequantize(), weight.dequantize()[order])


def test_rows_of_every_expert() -> None:
    experts = WEIGHT.reshape(2, 6, 64)
    cut = Cut(rows=(range(0, 6, 2), range(1, 6, 2)), axis=1)
    assert torch.equal(taken(experts, cut, "w"), experts[:, [0, 2, 4, 1, 3, 5]])
    assert shape_after((2, 6, 64), Cut(rows=(range(4),), axis=1), "w") == (2, 4, 64)


def test_transposing() -> None:
    always = Cut(transposed="always")
    assert torch.equal(taken(WEIGHT, always, "w"), WEIGHT.T)
    assert shape_after((2, 6, 64), always, "w") == (2, 64, 6)
    by_shape = Cut(transposed="by shape")
    assert resolved(by_shape, (2, 6, 64), (2, 6, 64)) is None
    assert resolved(by_shape, (2, 6, 64), (2, 64, 6)) == always
    assert resolved(always, (4, 4), (4, 4)) == always
    with pytest.raises(UnsupportedVariant, match="quantized weight of `w` would have to be transp"):
        taken(quantized(WEIGHT, "W8A16:g32"), always, "w")


def test_rows_beyond_the_tensor() -> None:
    with pytest.raises(ShapeError, match=r"`w` has shape `\(8, 64\)`, expected at least 9 along"):
        shape_after((8, 64), STRAIGHT, "w")


def test_every_row_has_to_go_somewhere() -> None:
    parts = [Target(f"m.{i}", "weight", cut=Cut(rows=(range(4 * i, 4 * i + 4),))) for i in range(3)]
    check_all_taken(parts, (12, 64), "qkv")
    with pytest.raises(ShapeError, match=r"`qkv` has shape `\(16, 64\)`, expected 12 along axis 0"):
        check_all_taken(parts, (16, 64), "qkv")
    padding = Target("lm_head", "weight", cut=Cut(rows=(range(8),), rest="padding"))
    check_all_taken([padding], (12, 64), "lm_head")


def test_parts_of_one_parameter_are_joined_in_their_order() -> None:
    joining, place = Joining(), Target("conv", "weight")
    assert joining.add(place, Join(2, 3), WEIGHT[9:]) is None
    assert joining.add(place, Join(0, 3), WEIGHT[:2]) is None
    assert torch.equal(joining.add(place, Join(1, 3), WEIGHT[2:9]), WEIGHT)
    halves = [quantized(part, "W4A16:g32") for part in WEIGHT.split(6)]
    assert joining.add(place, Join(1, 2), halves[1]) is None
    whole = joining.add(place, Join(0, 2), halves[0])
    assert torch.equal(whole.dequantize(), torch.cat([half.dequantize() for half in halves]))
