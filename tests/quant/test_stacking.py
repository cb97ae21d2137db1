"""Rows of weights in another order keep their values."""

import pytest
import torch

from quantload.quant.grid import int_grid
from quantload.quant.qtensor import Evaluation, QuantTensor
from quantload.quant.stacking import take_rows


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
