"""The header of GGUF files; the oracle is the reader of the `gguf` package."""

from __future__ import annotations

import re
import struct
import tracemalloc

import gguf
import numpy as np
import pytest
import tiny_gguf
from tiny_gguf import raw_header, raw_tensor, text, write_metadata_only, write_tiny_gguf

from quantload.errors import HeaderError, UnsupportedVariant
from quantload.loader import gguf_header
from quantload.loader.gguf_header import read_header

U32, F32, STRING, ARRAY = 4, 6, 8, 9


def write(path, content):
    path.write_bytes(content)
    return path


def test_metadata_is_what_the_gguf_package_reads(tmp_path):
    file = write_metadata_only(
        tmp_path / "a.gguf",
        {
            "a.text": "häl\nlo",
            "a.count": 7,
            "a.number": 0.1,
            "a.flag": True,
            "a.words": ["x", "", "yz "],
            "a.numbers": [1, -2, 3],
            "a.floats": [0.5, -1.25],
        },
    )
    theirs = gguf.GGUFReader(file).fields
    ours = read_header(file).metadata
    assert set(ours) == {key for key in theirs if not key.startswith("GGUF.")}
    for key, value in ours.items():
        value = value.tolist() if isinstance(value, np.ndarray) else value
        assert value == theirs[key].contents(), key


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16", "Q4_1", "Q8_0"])
def test_tensors_are_where_the_gguf_package_finds_them(tmp_path, type_name):
    file = tmp_path / "a.gguf"
    write_tiny_gguf(file, weight_type=type_name)
    ours = read_header(file).tensors
    theirs = gguf.GGUFReader(file).tensors
    assert list(ours) == [tensor.name for tensor in theirs]
    for tensor in theirs:
        mine = ours[tensor.name]
        assert mine.shape == tuple(tensor.shape.tolist()[::-1])
        assert mine.type_name == tensor.tensor_type.name
        assert (mine.start, mine.num_bytes) == (tensor.data_offset, tensor.n_bytes)


def test_alignment_of_the_file_is_used(tmp_path):
    key = text("general.alignment") + struct.pack("<II", U32, 256)
    content = raw_header(keys=(key,), tensors=(raw_tensor("a"),))
    content += bytes(256 - len(content)) + bytes(128)
    assert read_header(write(tmp_path / "a.gguf", content)).tensors["a"].start == 256


@pytest.mark.parametrize("content", [b"", b"GG", b"{}" * 20, bytes(100)])
def test_other_files_are_refused(tmp_path, content):
    with pytest.raises(HeaderError, match="not a GGUF file: it does not begin with `GGUF`"):
        read_header(write(tmp_path / "a.gguf", content))


@pytest.mark.parametrize("length", [5, 50, 300, 1000])
def test_header_cut_short_is_an_error(tmp_path, length):
    file = tmp_path / "a.gguf"
    write_tiny_gguf(file)
    content = file.read_bytes()
    with pytest.raises(HeaderError, match=r"(?s)header ends inside .*truncated"):
        read_header(write(file, content[:length]))


def test_every_cut_is_an_error(tmp_path):
    file = tmp_path / "a.gguf"
    content = raw_header(
        keys=(text("k") + struct.pack("<IIQ", ARRAY, STRING, 1) + text("v"),),
        tensors=(raw_tensor("a", (32, 2)),),
    )
    content += bytes(-len(content) % 32) + bytes(256)
    assert read_header(write(file, content)).tensors["a"].shape == (2, 32)
    for length in range(len(content)):
        with pytest.raises(HeaderError):
            read_header(write(file, content[:length]))


def test_data_cut_short_names_the_tensor(tmp_path):
    file = tmp_path / "a.gguf"
    write_tiny_gguf(file)
    content = file.read_bytes()
    # the last tensor of the file ends up to 31 bytes before it, for alignment
    with pytest.raises(HeaderError, match=r"(?s)file ends inside tensor `blk\.1\..*download"):
        read_header(write(file, content[:-64]))


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (1, "GGUF version `1` is not read, expected little-endian version 2 or 3"),
        (4, "GGUF version `4`"),
        (3 << 24, "big-endian byte order"),
    ],
)
def test_other_versions_are_refused(tmp_path, version, words):
    with pytest.raises(UnsupportedVariant, match=words):
        read_header(write(tmp_path / "a.gguf", raw_header(version=version)))


@pytest.mark.parametrize(
    "content",
    [
        raw_header(counts=(1 << 62, 0)),
        raw_header(counts=(0, 1 << 62)),
        raw_header(keys=(struct.pack("<Q", 1 << 62) + b"name",)),
        raw_header(keys=(text("k") + struct.pack("<IQ", STRING, 1 << 62),)),
        raw_header(keys=(text("k") + struct.pack("<IIQ", ARRAY, 0, 1 << 62),)),
        raw_header(keys=(text("k") + struct.pack("<IIQ", ARRAY, F32, 1 << 40),)),
        raw_header(keys=(text("k") + struct.pack("<IIQ", ARRAY, STRING, 1 << 62),)),
        raw_header(tensors=(raw_tensor("a", (32, 1 << 62)),)),
        raw_header(tensors=(raw_tensor("a", offset=1 << 63),)),
    ],
)
def test_hostile_counts_allocate_nothing(tmp_path, content):
    file = write(tmp_path / "a.gguf", content + bytes(1000))
    tracemalloc.start()
    try:
        with pytest.raises(HeaderError):
            read_header(file)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_header_beyond_the_limit_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_header, "_MAX_HEADER_BYTES", 64)
    file = tmp_path / "a.gguf"
    write_tiny_gguf(file)
    with pytest.raises(HeaderError, match="headers beyond 128 MiB are not read"):
        read_header(file)


KEY = text("k") + struct.pack("<II", U32, 1)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (raw_header(keys=(KEY, KEY)), "metadata key `k` is there twice"),
        (raw_header(tensors=(raw_tensor("a"), raw_tensor("a"))), "tensor `a` is there twice"),
        (raw_header(tensors=(raw_tensor("a", (1,) * 5),)), "tensor `a` has `5` axes"),
        (raw_header(tensors=(raw_tensor("a", ()),)), "tensor `a` has `0` axes"),
        (
            raw_header(tensors=(raw_tensor("a", (33, 2), kind=3),)),
            "rows of tensor `a` have `33` elements, expected a multiple of 32 for type `Q4_1`",
        ),
        (raw_header(keys=(text("k") + struct.pack("<I", 77),)), "`k` has unknown type `77`"),
        (
            raw_header(keys=(text("k") + struct.pack("<IIQ", ARRAY, ARRAY, 1),)),
            "`k` is an array of unknown type `9`",
        ),
        (
            raw_header(keys=(struct.pack("<Q", 2) + b"\xff\xfe",)),
            "a metadata key is not UTF-8",
        ),
        (
            raw_header(keys=(text("general.alignment") + struct.pack("<II", U32, 24),)),
            "`general.alignment` is `24`, expected a power of two",
        ),
    ],
)
def test_headers_that_lie_are_refused(tmp_path, content, words):
    file = write(tmp_path / "a.gguf", content + bytes(1000))
    with pytest.raises(HeaderError, match=words) as caught:
        read_header(file)
    assert str(file) in str(caught.value)


def test_unknown_type_names_tensor_and_number(tmp_path):
    content = raw_header(tensors=(raw_tensor("blk.0.odd", kind=999),)) + bytes(1000)
    with pytest.raises(
        UnsupportedVariant, match=r"tensor `blk\.0\.odd` has GGML type number `999`"
    ):
        read_header(write(tmp_path / "a.gguf", content))


def test_helper_permutes_as_documented():
    assert tiny_gguf.permuted(np.arange(8), 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


# -- every byte of the data belongs to one tensor ------------------------------------------------


def two_tensors(tmp_path, offset, *, tail=b"", shape=(32,)):
    """A file of two float32 tensors; the second one begins at `offset`."""
    head = raw_header(tensors=(raw_tensor("a", shape), raw_tensor("b", offset=offset)))
    return write(tmp_path / "a.gguf", head + bytes(-len(head) % 32) + b"\1" * 256 + tail)


def test_tensors_one_after_the_other(tmp_path):
    assert set(read_header(two_tensors(tmp_path, 128)).tensors) == {"a", "b"}
    assert set(read_header(two_tensors(tmp_path, 128, shape=(25,))).tensors) == {"a", "b"}
    assert read_header(two_tensors(tmp_path, 128, tail=bytes(100))).tensors  # zeros are padding


def test_a_tensor_with_too_few_bytes_in_the_table(tmp_path):
    with pytest.raises(HeaderError, match=r"(?s)`a` and `b` leave a gap.*type `F32` or shape"):
        read_header(two_tensors(tmp_path, 128, shape=(24,)))
    with pytest.raises(HeaderError, match="`32` bytes behind the last tensor `b` belong to none"):
        read_header(two_tensors(tmp_path, 128, tail=bytes(31) + b"x"))


@pytest.mark.parametrize("offset", [0, 96])
def test_tensors_that_overlap(tmp_path, offset):
    with pytest.raises(HeaderError, match="tensors `a` and `b` overlap"):
        read_header(two_tensors(tmp_path, offset))


@pytest.mark.parametrize("type_name", ["F16", "Q4_0", "Q8_0"])
def test_a_type_of_fewer_bits_than_the_tensor_has(tmp_path, type_name):
    file = tmp_path / "a.gguf"
    write_tiny_gguf(file)  # float32
    content = bytearray(file.read_bytes())
    for tensor in gguf.GGUFReader(file).tensors:
        if tensor.name in ("token_embd.weight", "blk.1.ffn_down.weight", "output.weight"):
            info = text(tensor.name) + struct.pack("<IQQ", 2, *map(int, tensor.shape))
            at = content.index(info) + len(info)
            changed = content.copy()
            kind = gguf.GGMLQuantizationType[type_name]
            changed[at : at + 4] = struct.pack("<I", int(kind))
            with pytest.raises(HeaderError, match=re.escape(tensor.name)):
                read_header(write(tmp_path / "b.gguf", bytes(changed)))
