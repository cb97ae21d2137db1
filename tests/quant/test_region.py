"""A region of a weight holds exactly the values of that part of the whole weight."""

import pytest
import torch

from quantload.errors import ShapeError
from quantload.quant.grid import INT4
from quantload.quant.qtensor import Evaluation, QuantTensor
from quantload.quant.region import WHOLE, Region


def quantized(rows, columns, block, seed=0):
    generator = torch.Generator().manual_seed(seed)
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    return QuantTensor(
        grid=INT4,
        codes=torch.randint(-8, 8, (rows, columns), generator=generator, dtype=torch.int8),
        scale=torch.rand(grid, generator=generator) + 0.1,
        block=block,
        evaluation=Evaluation(torch.float32),
    )


REGIONS = [
    Region(),
    Region(rows=((3, 11),)),
    Region(columns=(5, 17)),
    Region(rows=((0, 4), (9, 12)), columns=(8, 24)),
    Region(rows=((10, 12), (1, 4))),
]


@pytest.mark.parametrize("region", REGIONS, ids=str)
@pytest.mark.parametrize("block", [(1, 8), (4, 8), (1, 24), (12, 24), (5, 7)], ids=str)
def test_values_are_those_of_the_whole_weight(region, block):
    whole = quantized(12, 24, block)
    expected = whole.dequantize()
    if region.columns:
        expected = expected[:, slice(*region.columns)]
    if region.rows:
        expected = torch.cat([expected[start:stop] for start, stop in region.rows])
    part = region.of(whole)
    assert torch.equal(part.dequantize(), expected)
    assert part.shape == region.shape_of(whole.shape)
    assert torch.equal(region.of(whole.dequantize()), expected)


def test_a_bias_has_rows_only():
    bias = torch.arange(12.0)
    region = Region(rows=((0, 2), (6, 8)), columns=(0, 4))
    assert region.of(bias).tolist() == [0, 1, 6, 7]
    assert region.shape_of((12,)) == (4,)


def test_nothing_is_cut_by_default():
    assert WHOLE.is_whole
    assert not Region(columns=(0, 4)).is_whole


@pytest.mark.parametrize("region", [Region(rows=((0, 13),)), Region(columns=(20, 25))], ids=str)
def test_a_region_beyond_the_weight_is_refused(region):
    with pytest.raises(ShapeError, match="reaches beyond"):
        region.of(torch.zeros(12, 24))


def test_an_empty_region_is_refused():
    with pytest.raises(ShapeError, match="holds nothing"):
        Region(rows=((4, 4),))
