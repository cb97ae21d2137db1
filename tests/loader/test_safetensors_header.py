"""Headers of safetensors files against the safetensors library, and files that lie."""

import json
import time
import tracemalloc

import pytest
import tiny_checkpoints as tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from quantload.errors import HeaderError, QuantloadError, UnsupportedVariant
from quantload.loader.checkpoint import read_entry
from quantload.loader.safetensors_header import DTYPES, NAMES, read_header

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def _sample(dtype):
    numbers = torch.arange(6).reshape(2, 3)
    return (numbers % 2 == 0) if dtype == torch.bool else numbers.to(torch.float32).to(dtype)


def test_entries_are_those_of_the_library(tmp_path):
    file = tmp_path / "x.safetensors"
    made = {f"t.{name}": _sample(dtype) for name, dtype in DTYPES.items() if dtype.itemsize < 8}
    made |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4, dtype=torch.bfloat16)}
    made |= {"long": torch.arange(3), "double": torch.ones(2, dtype=torch.float64)}
    save_file(made, file, metadata={"any": "thing"})
    found = read_header(file)
    with safe_open(file, framework="pt") as library:
        assert set(found) == set(library.keys())
        for name in library.keys():  # noqa: SIM118 - not a mapping
            expected = library.get_tensor(name)
            entry = found[name]
            assert (entry.dtype, entry.shape) == (expected.dtype, tuple(expected.shape))
            assert entry.num_bytes == expected.numel() * expected.element_size()
            read = read_entry(entry)
            assert read.dtype == expected.dtype
            as_bytes = [part.reshape(-1).view(torch.uint8) for part in (read, expected)]
            assert torch.equal(*as_bytes)
    assert float(read_entry(found["scalar"])) == 3.5


def test_names_and_dtypes_are_one_to_one():
    assert {DTYPES[name] for name in NAMES.values()} == set(DTYPES.values())
    assert len(NAMES) == len(DTYPES)


@pytest.mark.parametrize(
    ("header", "data", "length"),
    [
        ({"a": F32}, b"\0" * 7, -1),
        ({"a": F32}, b"\0" * 9, -1),
        ({"a": F32, "b": F32}, b"\0" * 8, -1),
        ({"a": {**F32, "data_offsets": [8, 0]}}, b"\0" * 8, -1),
        ({"a": {**F32, "data_offsets": [0, 2**63]}}, b"\0" * 8, -1),
        ({"a": {**F32, "data_offsets": [-8, 0]}}, b"\0" * 8, -1),
        ({"a": {**F32, "shape": [3]}}, b"\0" * 8, -1),
        ({"a": {**F32, "shape": [2**62, 2**62]}}, b"\0" * 8, -1),
        ({"a": {**F32, "shape": "2"}}, b"\0" * 8, -1),
        ({"a": {"shape": [2], "data_offsets": [0, 8]}}, b"\0" * 8, -1),
        ({"a": None}, b"", -1),
        ([], b"", -1),
        (b"{", b"", -1),
        (b"\xff\xfe", b"", -1),
        ({"a": F32}, b"\0" * 8, 2**62),
        ({"a": F32}, b"\0" * 8, 2**64 - 1),
        ({"a": F32}, b"\0" * 8, 10_000),
        ({"a": F32}, b"\0" * 8, 3),
    ],
)
def test_damaged_and_lying_headers(tmp_path, header, data, length):
    file = tiny.raw_safetensors(tmp_path / "x.safetensors", header, data, length=length)
    with pytest.raises(HeaderError, match=r"(?s)x\.safetensors.*hint: the file is damaged"):
        read_header(file)


@pytest.mark.parametrize("size", [0, 4, 8, 20])
def test_truncated_files(tmp_path, size):
    file = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(4)}, file)
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(HeaderError, match=r"x\.safetensors"):
        read_header(file)


def test_a_name_twice(tmp_path):
    one = json.dumps(F32)
    text = f'{{"a": {one}, "a": {one}}}'.encode()
    file = tiny.raw_safetensors(tmp_path / "x.safetensors", text, b"\0" * 8)
    with pytest.raises(HeaderError, match=r"`a` stands twice in the header of .*x\.safetensors"):
        read_header(file)


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "C64", "Q4_0"])
def test_dtypes_that_torch_does_not_know(tmp_path, dtype):
    bits = {"F4": 4, "F6_E2M3": 6, "C64": 64}.get(dtype, 8)
    info = {"dtype": dtype, "shape": [8], "data_offsets": [0, bits]}
    file = tiny.raw_safetensors(tmp_path / "x.safetensors", {"a": info}, b"\0" * bits)
    with pytest.raises((UnsupportedVariant, HeaderError), match=rf"(?s){dtype}.*x\.safetensors"):
        read_header(file)


def test_a_huge_length_costs_nothing(tmp_path):
    file = tiny.raw_safetensors(tmp_path / "x.safetensors", {"a": F32}, b"\0" * 8, length=2**40)
    tracemalloc.start()
    before = time.perf_counter()
    with pytest.raises(HeaderError):
        read_header(file)
    assert time.perf_counter() - before < 1
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_no_such_file(tmp_path):
    with pytest.raises(HeaderError, match=r"nothing\.safetensors"):
        read_header(tmp_path / "nothing.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(HeaderError, match=r"folder\.safetensors"):
        read_header(tmp_path / "folder.safetensors")


def _library_reads(file):
    try:
        with safe_open(file, framework="pt") as opened:
            opened.keys()
    except SafetensorError:
        return False
    return True


@pytest.mark.parametrize(
    "header",
    [
        {"a": {**F32, "more": 1}},
        {"a": F32, "__metadata__": None},
        {"a": F32, "__metadata__": {"x": 1}},
        {"a": F32, "__metadata__": ["x"]},
        {"a": F32, "__metadata__": F32},
        {"a": F32, "__metadata__": {"dtype": "x", "shape": "x", "data_offsets": "x"}},
        {"a": {"dtype": F32, "shape": F32, "data_offsets": F32}},
        {"a": F32, "b": {**F32, "shape": [0], "data_offsets": [8, 8]}},
        {"a": F32, "b": {**F32, "shape": [0], "data_offsets": [4, 4]}},
        {"a": {**F32, "shape": [True, 2]}},
        {"a": {**F32, "shape": [2.0]}},
        {"a": {**F32, "dtype": None}},
        {"a": {**F32, "dtype": F32}},
        {"a": {**F32, "data_offsets": [0, 8, 8]}},
        {"a": {**F32, "data_offsets": {"0": 8}}},
        {"a": {**F32, "shape": [2**64, 0], "data_offsets": [0, 0]}},
        {"a": [F32]},
        F32,
        b"{}",
        b"{} {}",
        b'{"a": NaN}',
        b'{"a\\ud800": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}   ',
        b"\xef\xbb\xbf{}",
        b"[" * 100_000,
        b'{"a": ' + b"9" * 5000 + b"}",
        json.dumps({"a": F32}).encode("utf-16"),
    ],
    ids=lambda header: str(header)[:40],
)
def test_what_the_library_reads_is_read(tmp_path, header):
    file = tiny.raw_safetensors(tmp_path / "x.safetensors", header, b"\0" * 8)
    try:
        read_header(file)
    except HeaderError:
        assert not _library_reads(file)
    else:
        assert _library_reads(file)


_INFO = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPES, "F4", "", 3]),
        "shape": st.lists(st.integers(-1, 4), max_size=3),
        "data_offsets": st.lists(st.integers(-1, 64), min_size=2, max_size=2),
    }
)


@settings(max_examples=300)
@given(
    header=st.dictionaries(st.text(max_size=3), _INFO, max_size=3)
    | st.dictionaries(st.sampled_from(["a", "__metadata__"]), st.dictionaries(st.text(), st.text()))
    | st.binary(max_size=40),
    data=st.binary(max_size=64),
)
def test_any_bytes_are_read_or_refused(tmp_path_factory, header, data):
    file = tmp_path_factory.getbasetemp() / "fuzz.safetensors"
    tiny.raw_safetensors(file, header, data)
    try:
        entries = read_header(file)
    except QuantloadError as error:
        assert "fuzz.safetensors" in str(error)  # noqa: PT017 - either outcome is right
        is_ours = isinstance(error, UnsupportedVariant) or "stands twice" in str(error)
        assert is_ours or not _library_reads(file)
    else:
        assert _library_reads(file)
        for entry in entries.values():
            assert tuple(read_entry(entry).shape) == entry.shape
