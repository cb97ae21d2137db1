"""The checksum of files that are written in pieces."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantload.loader.checksum import WORD, sum_of_words


def _slow(data, position):
    """Byte by byte: byte `p` of a file counts 256 ** (p % 8) times its value."""
    return sum(byte << 8 * ((position + i) % 8) for i, byte in enumerate(data)) % 2**64


@given(st.binary(max_size=70), st.integers(0, 100))
def test_words_of_a_file(data, position):
    assert sum_of_words(memoryview(data), position) == _slow(data, position)


@given(st.binary(max_size=70), st.lists(st.integers(0, 70), max_size=6), st.integers(0, 9))
def test_pieces_add_up(data, cuts, position):
    ends = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    parts = [sum_of_words(memoryview(data)[a:b], position + a) for a, b in pairwise(ends)]
    assert sum(parts) & WORD == sum_of_words(memoryview(data), position)


def test_sums_wrap_around():
    data = b"\xff" * 8 * 1000
    assert sum_of_words(memoryview(data), 0) == -1000 % 2**64
    assert sum_of_words(memoryview(b""), 3) == 0


@pytest.mark.parametrize("block", [512, 4096])
def test_a_block_that_was_never_written_is_found(block):
    data = bytearray(random.Random(0).randbytes(1 << 16))
    whole = sum_of_words(memoryview(data), 24)
    for start in range(0, len(data), block):
        lost = bytearray(data)
        lost[start : start + block] = bytes(block)
        assert sum_of_words(memoryview(lost), 24) != whole
