"""Chunks of rows: together all rows once, in order, in whole multiples."""

import pytest
import torch

from quantload.quant.chunks import row_chunks

CPU = torch.device("cpu")


def test_a_small_tensor_is_one_chunk():
    assert list(row_chunks((10, 100), CPU)) == [(0, 10)]


def test_a_large_tensor_is_cut_after_about_eight_million_elements():
    assert list(row_chunks((300, 1 << 16), CPU)) == [(0, 128), (128, 256), (256, 300)]


def test_a_row_larger_than_a_chunk_is_a_chunk():
    assert list(row_chunks((3, 1 << 24), CPU)) == [(0, 1), (1, 2), (2, 3)]


def test_chunks_are_whole_blocks():
    assert list(row_chunks((500, 1 << 16), CPU, multiple=100)) == [
        (0, 100),
        (100, 200),
        (200, 300),
        (300, 400),
        (400, 500),
    ]
    assert list(row_chunks((5, 1 << 24), CPU, multiple=2)) == [(0, 2), (2, 4), (4, 5)]


def test_elsewhere_all_rows_are_one_chunk():
    assert list(row_chunks((300, 1 << 16), torch.device("meta"))) == [(0, 300)]


@pytest.mark.parametrize("shape", [(0, 5), (0, 0)])
def test_no_rows_no_chunks(shape):
    assert list(row_chunks(shape, CPU)) == []


def test_rows_without_columns():
    assert list(row_chunks((3, 0), CPU)) == [(0, 3)]
