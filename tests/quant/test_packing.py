"""Bit packing against compressed-tensors and against a loop over single bits."""

import compressed
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import packed_bits

from quantload.errors import ShapeError
from quantload.quant import chunks, compiled
from quantload.quant.packing import (
    pack_dense,
    unpack_bytes,
    unpack_dense,
    unpack_padded,
    words_dense,
    words_padded,
)


def random_fields(bits, rows, columns, *, seed=0):
    random = np.random.default_rng(seed)
    return torch.from_numpy(random.integers(0, 1 << bits, (rows, columns), dtype=np.uint8))


def by_loop(fields, bits, *, per_word=None):
    rows = [packed_bits(row, bits, per_word=per_word) for row in fields.tolist()]
    return torch.from_numpy(np.stack(rows))


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 140), st.integers(0, 2**32 - 1))
def test_dense_equals_the_loop(bits, rows, columns, seed):
    fields = random_fields(bits, rows, columns, seed=seed)
    words = pack_dense(fields, bits)
    assert words.dtype == torch.int32
    assert words.is_contiguous()
    assert torch.equal(words, by_loop(fields, bits))
    assert torch.equal(unpack_dense(words, bits, columns), fields)


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 140), st.integers(0, 2**32 - 1))
def test_dense_equals_compressed_tensors(bits, rows, columns, seed):
    fields = random_fields(bits, rows, columns, seed=seed)
    signed = (fields.to(torch.int16) - (1 << (bits - 1))).to(torch.int8)
    words = compressed.library().pack_to_int32(signed, bits)
    assert torch.equal(pack_dense(fields, bits), words)
    assert torch.equal(compressed.library().unpack_from_int32(words, bits, signed.shape), signed)
    assert torch.equal(unpack_dense(words, bits, columns), fields)


@pytest.mark.parametrize("columns", [1, 31, 32, 77])
@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("with_loops", [True, False])
def test_signed_fields_are_packed_as_offset_binary(with_loops, bits, columns, monkeypatch):
    monkeypatch.setattr(compiled, "_seen", compiled._WORTH_STARTING if with_loops else 0)
    monkeypatch.setattr(compiled, "_WORTH_STARTING", compiled._seen or 1 << 30)
    fields = random_fields(bits, 3, columns)
    signed = (fields.to(torch.int16) - (1 << (bits - 1))).to(torch.int8)
    words = pack_dense(signed, bits, signed=True)
    assert torch.equal(words, by_loop(fields, bits))
    assert torch.equal(words, compressed.library().pack_to_int32(signed, bits))


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 140), st.integers(0, 2**32 - 1))
def test_padded_equals_the_loop(bits, rows, columns, seed):
    fields = random_fields(bits, rows, columns, seed=seed)
    words = by_loop(fields, bits, per_word=32 // bits)
    assert words.shape[1] == words_padded(columns, bits)
    assert torch.equal(unpack_padded(words, bits, columns), fields)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_both_layouts_are_one_where_fields_divide_a_word(bits):
    fields = random_fields(bits, 3, 67)
    words = pack_dense(fields, bits)
    assert words_dense(67, bits) == words_padded(67, bits)
    assert torch.equal(unpack_padded(words, bits, 67), fields)


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_idle_bits_are_not_read(bits):
    fields = random_fields(bits, 2, 3 * (32 // bits))
    words = by_loop(fields, bits, per_word=32 // bits)
    idle = (-1 << (32 // bits * bits)) & 0xFFFFFFFF
    noisy = words | torch.tensor(idle).to(torch.int32)
    assert not torch.equal(noisy, words)
    assert torch.equal(unpack_padded(noisy, bits, fields.shape[1]), fields)


@pytest.mark.parametrize("bits", range(1, 9))
def test_slices_and_transposes(bits):
    fields = random_fields(bits, 50, 41)
    turned = fields.t()[1:, 3:]
    words = pack_dense(turned, bits)
    assert torch.equal(words, by_loop(turned, bits))
    spaced = torch.stack([words, words], dim=-1)[..., 0]
    assert not spaced.is_contiguous()
    assert torch.equal(unpack_dense(spaced, bits, 47), turned)
    assert torch.equal(unpack_padded(by_loop(turned, bits, per_word=32 // bits), bits, 47), turned)


@pytest.mark.parametrize("bits", [3, 4, 7])
def test_chunks_do_not_show(bits, monkeypatch):
    fields = random_fields(bits, 50, 77)
    monkeypatch.setattr(chunks, "_ELEMENTS", 300)
    words = pack_dense(fields, bits)
    assert torch.equal(words, by_loop(fields, bits))
    assert torch.equal(unpack_dense(words, bits, 77), fields)


@pytest.mark.parametrize("unpack", [unpack_dense, unpack_padded])
@pytest.mark.parametrize("width", [3, 5])
def test_a_wrong_number_of_words(unpack, width):
    with pytest.raises(ShapeError) as error:
        unpack(torch.zeros(2, width, dtype=torch.int32), 4, 32)
    assert str(error.value) == (f"{width} words a row do not hold 32 fields of 4 bits, expected 4")


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("columns", [1, 2, 7, 32, 33, 40])
def test_words_stored_as_bytes(bits, columns):
    fields = random_fields(bits, 5, columns)
    rows = [sum(f << (bits * i) for i, f in enumerate(row)) for row in fields.tolist()]
    length = -(-columns * bits // 8)
    stored = torch.tensor([list(row.to_bytes(length, "little")) for row in rows]).to(torch.uint8)
    assert torch.equal(unpack_bytes(stored, bits, columns), fields)


def test_a_wrong_number_of_bytes():
    with pytest.raises(ShapeError, match="5 bytes a row do not hold 32 fields of 4 bits, expected"):
        unpack_bytes(torch.zeros(2, 5, dtype=torch.uint8), 4, 32)


@pytest.mark.parametrize(
    ("columns", "bits", "dense", "padded"),
    [(1, 1, 1, 1), (32, 3, 3, 4), (33, 3, 4, 4), (128, 5, 20, 22), (128, 4, 16, 16), (7, 7, 2, 2)],
)
def test_words_of_a_row(columns, bits, dense, padded):
    assert words_dense(columns, bits) == dense
    assert words_padded(columns, bits) == padded
