"""Flat blocks laid out as a grid, against the definition, element by element."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from quantload.loader.formats.flat_blocks import block_of, on_grid, with_blocks
from quantload.quant.grid import INT4
from quantload.quant.scheme import WeightScheme

SIZES = st.integers(1, 12)


@given(SIZES, SIZES, st.integers(1, 160))
def test_every_element_finds_the_scale_of_its_flat_block(rows, columns, size):
    shape = rows, columns
    flat = torch.arange(-(-rows * columns // size))
    height, width = block_of(shape, size)
    grid = on_grid(flat, shape, size)
    for n in range(rows):
        for k in range(columns):
            assert grid[n // height, k // width] == (n * columns + k) // size
    scheme = with_blocks(WeightScheme(grid=INT4, granularity="tensor"), shape, size)
    assert scheme.block_of(*shape) == (height, width)
