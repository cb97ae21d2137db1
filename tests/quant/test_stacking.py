"""Rows of weights in another order keep their values."""

import pytest
import torch

from quantload.quant.grid import int_grid
from quantload.quant.qtensor import Evaluation, QuantTensor
from quantload.quant.stacking import joined_rows, take_rows


@pytest.mark.parametrize("block", [(1, 4), (3, 4), (8, 16), (5, 3)])
@pytest.mark.parametrize("outer_rows", [0, 1, 8])
def test_rows_in_another_order(block, outer_rows):
    torch.manual_seed(0)
    grid = int_grid(4)
    scales = (-(-8 // block[0]), -(-16 // block[1]))
    weight = QuantTensor(
        grid=grid,
        codes=torch.randint(-8, 8, (8, 16), dtype=grid.storage),
        scale=torch.rand(scales),
        zero=torch.randint(-8, 8, scales).float(),
        outer=torch.rand(outer_rows, 1) if outer_rows else None,
        block=block,
        evaluation=Evaluation(dtype=torch.float32),
    )
    for rows in (torch.arange(1, 8, 2), torch.randperm(8), torch.tensor([5, 5, 0])):
        assert torch.equal(take_rows(weight, rows).dequantize(), weight.dequantize()[rows])


@pytest.mark.parametrize("shape", [(12,), (12, 3), (12, 2, 3)])
def test_parts_that_lie_side_by_side_are_joined_without_a_copy(shape):
    whole = torch.randn(20, *shape[1:])[4:16]
    joined = joined_rows([whole[:5], whole[5:6], whole[6:]])
    assert torch.equal(joined, whole)
    assert joined.data_ptr() == whole.data_ptr()


def test_other_parts_are_joined_in_new_memory():
    whole = torch.randn(12, 4)
    for parts in (
        [whole[:5], whole[6:]],  # a gap
        [whole[6:], whole[:6]],  # the other order
        [whole[:6, :2], whole[6:, :2]],  # columns
        [whole[:6], whole[6:].clone()],
        [whole[:6], whole[5:]],
    ):
        joined = joined_rows(parts)
        assert torch.equal(joined, torch.cat(parts))
        assert joined.data_ptr() != whole.data_ptr()
    assert joined_rows([whole]).data_ptr() == whole.data_ptr()
