"""Streaming: whatever threads do, tensors are those of the files, and errors name their place."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from quantload.errors import CheckpointError, HeaderError
from quantload.loader import portion
from quantload.loader.open import open_checkpoint
from quantload.loader.portion import composed, portion_of
from quantload.loader.runs import Fetch, Row, plan_reads
from quantload.loader.stream import Settings, Stream

CPU = torch.device("cpu")
PLAIN = Settings(3, 4096, gap_bytes=100, has_buffers=False)
BUFFERED = Settings(3, 4096, gap_bytes=100)
NONE_AHEAD = Settings(4, 1024, gap_bytes=0, ahead_bytes=0)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two files of tensors, and the tensors."""
    folder = tmp_path_factory.mktemp("files")
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{file}.{number}": torch.randn(rows, columns, generator=generator).to(dtype)
        for file in ("a", "b")
        for number, (rows, columns, dtype) in enumerate(
            [
                (3, 5, torch.float32),
                (200, 64, torch.bfloat16),
                (1, 1, torch.float32),
                (40, 3000, torch.bfloat16),
                (7, 9, torch.int8),
                (0, 4, torch.float32),
                (64, 64, torch.float16),
            ]
        )
    }
    for file in ("a", "b"):
        save_file(
            {name: tensor for name, tensor in tensors.items() if name.startswith(file)},
            folder / f"model-0000{1 + (file == 'b')}-of-00002.safetensors",
        )
    names = {n: f"model-0000{1 + n.startswith('b')}-of-00002.safetensors" for n in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (folder / "config.json").write_text("{}")
    return open_checkpoint(folder), tensors


def fetched(fetches, how, *, backwards=False):
    """The values of fetches, taken one by one."""
    with Stream(fetches, CPU, how) as stream:
        values = {}
        for fetch in fetches[::-1] if backwards else fetches:
            stream.wait([fetch])
            values[id(fetch)] = fetch.take()
    return [values[id(fetch)] for fetch in fetches]


@pytest.mark.parametrize("how", [PLAIN, BUFFERED, NONE_AHEAD], ids=["plain", "buffers", "none"])
@pytest.mark.parametrize("is_kept", [True, False])
def test_tensors_are_those_of_the_files(files, how, is_kept):
    checkpoint, tensors = files
    for backwards in (False, True):
        fetches = [
            Fetch(portion_of(checkpoint.tensors[name], None, None)[0], CPU, is_kept=is_kept)
            for name in tensors
        ]
        values = fetched(fetches, how, backwards=backwards)
        for value, expected in zip(values, tensors.values(), strict=True):
            assert value.dtype == expected.dtype
            assert torch.equal(value, expected)


spans = st.tuples(st.integers(0, 40), st.integers(0, 40)).filter(lambda pair: pair[0] < pair[1])
wide = st.tuples(st.integers(0, 3000), st.integers(0, 3000)).filter(lambda pair: pair[0] < pair[1])


@settings(max_examples=60, deadline=None)
@given(
    rows=st.none() | st.lists(spans, min_size=1, max_size=3),
    columns=st.none() | wide,
    how=st.sampled_from([PLAIN, BUFFERED, NONE_AHEAD, Settings(2, 300), Settings(1, 7)]),
)
def test_any_rows_and_columns(files, rows, columns, how):
    checkpoint, tensors = files
    whole = tensors["a.3"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(portion, "SMALLEST_PIECE", 2)
        part, left = portion_of(checkpoint.tensors["a.3"], rows, columns)
    assert left is None
    expected = whole if rows is None else torch.cat([whole[a:b] for a, b in rows])
    expected = expected if columns is None else expected[:, slice(*columns)]
    (value,) = fetched([Fetch(part, CPU, is_kept=True)], how)
    assert torch.equal(value, expected)
    assert part.shape == tuple(expected.shape)
    assert part.num_bytes == expected.nbytes


@given(
    taken=st.none() | st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), min_size=1),
    rows=st.none() | st.lists(spans, max_size=4),
)
def test_rows_of_rows(taken, rows):
    numbers = np.arange(60)
    runs = None if taken is None else [range(start, start + size) for start, size in taken]
    expected = numbers if runs is None else np.concatenate([numbers[list(run)] for run in runs])
    if rows is not None:
        rows = [(a, min(b, len(expected))) for a, b in rows if a < min(b, len(expected))]
        parts = [expected[a:b] for a, b in rows]
        expected = np.concatenate(parts) if parts else expected[:0]
    found = composed(runs, rows)
    got = numbers if found is None else [n for a, b in found for n in range(a, b)]
    assert list(got) == list(expected)


def test_neighbours_are_read_at_once(files):
    checkpoint, tensors = files
    entries = [e for e in checkpoint.tensors.values() if e.num_bytes]
    fetches = [Fetch(portion_of(entry, None, None)[0], CPU, is_kept=True) for entry in entries]
    reads = plan_reads(fetches, read_bytes=1 << 20, gap_bytes=0)
    assert len(reads) == 2  # one a file
    assert sum(read.num_bytes for read in reads) == sum(t.nbytes for t in tensors.values())
    fetches = [Fetch(fetch.portion, CPU, is_kept=True) for fetch in fetches]
    reads = plan_reads(fetches, read_bytes=1000, gap_bytes=0)
    assert max(read.num_bytes for read in reads) <= 1000
    starts = [(str(read.file), read.start) for read in reads]
    assert starts == sorted(starts)


def test_gaps_are_read_through_up_to_a_length(files):
    checkpoint, tensors = files
    entries = [checkpoint.tensors[name] for name in ("a.0", "a.1", "a.2", "a.3", "a.6")]
    entries.sort(key=lambda entry: entry.start)
    wanted = [entries[0], entries[2]]
    gap = wanted[1].start - wanted[0].start - wanted[0].num_bytes
    assert gap > 0
    for gap_bytes, count in ((gap - 1, 2), (gap, 1)):
        fetches = [Fetch(portion_of(entry, None, None)[0], CPU, is_kept=True) for entry in wanted]
        how = Settings(1, 1 << 20, gap_bytes=gap_bytes, has_buffers=False)
        with Stream(fetches, CPU, how) as stream:
            stream.wait(fetches)
        assert len(stream.reads) == count
        assert stream.bytes_read == sum(e.num_bytes for e in wanted) + gap * (count == 1)
        assert [f.take().equal(tensors[f.portion.entry.name]) for f in fetches] == [True, True]


def test_fetches_in_a_row_share_memory(files):
    checkpoint, tensors = files
    entry = checkpoint.tensors["a.1"]
    parts = [portion_of(entry, [span], None)[0] for span in ((50, 200), (0, 50))]
    fetches = [Fetch(part, CPU, is_kept=True) for part in parts]
    Row(fetches[::-1])
    two, one = fetched(fetches, PLAIN)
    assert one.data_ptr() + one.nbytes == two.data_ptr()
    assert torch.equal(torch.cat([one, two]), tensors["a.1"])


# -- faults ---------------------------------------------------------------------------------------


def cut_copy(checkpoint, folder, name, keep):
    """The header of a tensor whose file ends `keep` bytes after its start."""
    entry = checkpoint.tensors[name]
    file = folder / "cut.safetensors"
    file.write_bytes(entry.file.read_bytes()[: entry.start + keep])
    return replace(entry, file=file)


@pytest.mark.parametrize("how", [PLAIN, BUFFERED], ids=["plain", "buffers"])
@pytest.mark.parametrize("columns", [None, (100, 2900)])
def test_a_file_that_is_too_short(files, tmp_path, how, columns):
    checkpoint, _ = files
    entry = cut_copy(checkpoint, tmp_path, "a.3", 5000)
    fetch = Fetch(portion_of(entry, None, columns)[0], CPU, is_kept=True)
    with (
        pytest.raises(HeaderError, match=r"inside tensor `a.3`: 5000 of 240000 bytes") as caught,
        Stream([fetch], CPU, how) as stream,
    ):
        stream.wait([fetch])
    assert "cut.safetensors" in str(caught.value)


def test_a_file_that_is_gone(files, tmp_path):
    checkpoint, _ = files
    entry = cut_copy(checkpoint, tmp_path, "a.3", 5000)
    entry.file.unlink()
    fetch = Fetch(portion_of(entry, None, None)[0], CPU, is_kept=True)
    with (
        pytest.raises(CheckpointError, match=r"cannot read `.*cut.safetensors`.*`a.3`"),
        Stream([fetch], CPU, PLAIN) as stream,
    ):
        stream.wait([fetch])


def test_the_error_does_not_depend_on_the_threads(files, tmp_path):
    """Tensors before the fault arrive; who waits for the broken one gets its first error."""
    checkpoint, tensors = files
    broken = cut_copy(checkpoint, tmp_path, "a.3", 5000)
    for _ in range(20):
        fetches = [
            Fetch(portion_of(entry, None, None)[0], CPU, is_kept=True)
            for entry in (checkpoint.tensors["b.1"], broken, checkpoint.tensors["b.6"])
        ]
        with Stream(fetches, CPU, Settings(4, 512, gap_bytes=0, has_buffers=False)) as stream:
            stream.wait(fetches[2:])
            stream.wait(fetches[:1])
            with pytest.raises(HeaderError, match="5000 of 240000"):
                stream.wait(fetches[1:2])
        assert torch.equal(fetches[0].take(), tensors["b.1"])


def test_short_reads_are_continued(files, monkeypatch):
    checkpoint, tensors = files
    preadv = os.preadv

    def stingy(descriptor, buffers, offset):
        first = next(buffer for buffer in buffers if len(buffer))
        return preadv(descriptor, [first[: max(1, len(first) // 3)]], offset)

    monkeypatch.setattr(os, "preadv", stingy)
    names = ["a.0", "a.1", "a.6"]
    for how in (PLAIN, BUFFERED):
        fetches = [
            Fetch(portion_of(checkpoint.tensors[name], None, None)[0], CPU, is_kept=True)
            for name in names
        ]
        for value, name in zip(fetched(fetches, how), names, strict=True):
            assert torch.equal(value, tensors[name])


def test_threads_end_although_not_all_is_taken(files):
    checkpoint, tensors = files
    fetches = [
        Fetch(portion_of(checkpoint.tensors[name], None, None)[0], CPU, is_kept=False)
        for name in tensors
    ]
    stream = Stream(fetches, CPU, NONE_AHEAD)
    with stream:
        stream.wait(fetches[:1])  # and the others are never taken
    assert not [t for t in threading.enumerate() if t.name.startswith("quantload-reader")]


def test_what_is_read_ahead_is_bounded(files):
    """Of weights to be decoded no more lies there than was asked for, and one read."""
    checkpoint, tensors = files
    fetches = [
        Fetch(portion_of(checkpoint.tensors[name], None, None)[0], CPU, is_kept=False)
        for name in tensors
    ]
    how = Settings(2, 1024, gap_bytes=0, ahead_bytes=3000)
    allocated, most = 0, 0
    with Stream(fetches, CPU, how) as stream:
        ordered = sorted(fetches, key=lambda f: f.reads[-1].index if f.reads else -1)
        for fetch in ordered:
            stream.wait([fetch])
            allocated = sum(f.portion.num_bytes for f in fetches if f.is_allocated)
            most = max(most, allocated)
            fetch.take()
    largest = max(t.nbytes for t in tensors.values())
    assert most <= how.ahead_bytes + 2 * largest + fetches[0].portion.num_bytes
