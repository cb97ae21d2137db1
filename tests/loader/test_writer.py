"""The files of an output: made at full size, then filled in any order."""

import errno
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quantload.errors import OutputError
from quantload.loader import writer
from quantload.loader.output_files import OutputTensor, assign_files
from quantload.loader.writer import OutputFiles

TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b": torch.tensor(2.5).bfloat16(),
    "c": torch.zeros(0, 4),
    "d": torch.arange(7, dtype=torch.int8),
}


def _planned(tensors, max_bytes=1 << 20):
    planned = [[OutputTensor(name, t.dtype, tuple(t.shape), name)] for name, t in tensors.items()]
    return assign_files(planned, max_bytes=max_bytes)


@pytest.fixture
def new(tmp_path):
    """Make the files of an output in a new folder."""
    made = []

    def files(tensors=TENSORS, max_bytes=1 << 20):
        (tmp_path / "out").mkdir(exist_ok=True)
        out = OutputFiles(tmp_path / "out", _planned(tensors, max_bytes), final=tmp_path / "final")
        made.append(out)
        return out

    yield files
    for out in made:
        out.close()


def _write_all(files, tensors=TENSORS):
    files.create()
    for name in reversed(tensors):
        files.write(name, tensors[name])
    files.write_index()
    return files.folder


def _is_what_was_written(folder, tensors=TENSORS):
    read = {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}
    assert {n: t.dtype for n, t in read.items()} == {n: t.dtype for n, t in tensors.items()}
    return all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def test_the_library_reads_what_is_written(new):
    folder = _write_all(new())
    assert _is_what_was_written(folder)
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]


def test_json_is_utf8(new):
    files = new()
    files.write_json("config.json", {"a": "ä"})
    assert (files.folder / "config.json").read_text(encoding="utf-8") == '{\n  "a": "ä"\n}\n'


def test_the_index_is_that_of_transformers(new):
    folder = _write_all(new(max_bytes=1))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(t.nbytes for t in TENSORS.values())}
    assert set(index["weight_map"]) == set(TENSORS)
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(folder / file)[name], TENSORS[name])


def test_strided_and_transposed_tensors(new):
    tensor = torch.arange(12.0).reshape(4, 3)
    views = {"t": tensor.T, "s": tensor[::2, 1:], "c": tensor[:, :1].T.contiguous().T}
    assert _is_what_was_written(_write_all(new(views), views), views)


def test_rows_in_any_order(new):
    files = new()
    files.create()
    files.write("a", TENSORS["a"][1:], first_row=1)
    files.write("a", TENSORS["a"][:1])
    files.write_bytes("d", TENSORS["d"][4:].numpy().data, start=4)
    files.write_bytes("d", TENSORS["d"][:4].numpy().data, start=0)
    read = load_file(files.folder / "model.safetensors")
    assert torch.equal(read["a"], TENSORS["a"])
    assert torch.equal(read["d"], TENSORS["d"])


@pytest.mark.parametrize(
    ("tensor", "first_row"),
    [
        (TENSORS["a"].T, 0),
        (TENSORS["a"].double(), 0),
        (TENSORS["a"], 1),
        (TENSORS["a"][:1], 2),
        (TENSORS["a"][:, :2], 0),
        (TENSORS["a"].reshape(-1), 0),
        (torch.tensor(1.0), 0),
    ],
)
def test_a_tensor_that_was_not_planned(new, tensor, first_row):
    files = new()
    files.create()
    with pytest.raises(AssertionError, match="planned were"):
        files.write("a", tensor, first_row=first_row)


def test_files_have_their_size_from_the_beginning(new):
    files = new(max_bytes=1)
    assert not files.create()
    planned = _planned(TENSORS, 1)
    for file in planned:
        path = files.folder / file.name
        assert path.stat().st_size == file.num_bytes
        assert path.read_bytes().startswith(file.header)
    assert files.create()


def _shorten(path):
    os.truncate(path, path.stat().st_size - 1)


def _lengthen(path):
    os.truncate(path, path.stat().st_size + 1)


def _spoil_header(path):
    content = bytearray(path.read_bytes())
    content[12] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [_shorten, _lengthen, _spoil_header, os.unlink])
def test_only_files_that_are_not_as_planned_are_made_anew(new, damage):
    files = new(max_bytes=1)
    folder = _write_all(files)
    damage(folder / "model-00002-of-00004.safetensors")
    again = new(max_bytes=1)
    assert not again.create()
    again.write("b", TENSORS["b"])
    assert _is_what_was_written(folder)


def test_a_disk_that_is_too_small(new, monkeypatch):
    files = new()
    usage = shutil.disk_usage(files.folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    (file,) = _planned(TENSORS)
    with pytest.raises(
        OutputError, match=rf"disk is too small: {file.num_bytes} bytes needed, 100 free.*final"
    ):
        files.create()
    assert list(files.folder.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails(new, monkeypatch, number):
    def pwrite(*_):
        raise OSError(number, os.strerror(number))

    files = new()
    files.create()
    monkeypatch.setattr(os, "pwrite", pwrite)
    (file,) = _planned(TENSORS)
    with pytest.raises(OutputError) as caught:
        files.write("a", TENSORS["a"])
    message = f"cannot write `{files.final}`: {os.strerror(number)}, {file.num_bytes} bytes are"
    assert message in str(caught.value)
    assert ("hint: make room" in str(caught.value)) is (number == errno.ENOSPC)


def test_short_writes_are_continued(new, monkeypatch):
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:5], at))
    assert _is_what_was_written(_write_all(new()))


def test_the_checksum_of_parts_adds_up_to_that_of_the_file(new):
    files = new()
    files.create()
    parts = [files.write("a", TENSORS["a"][i : i + 1], first_row=i) for i in range(2)]
    assert files.checksum_of("a") == sum(parts) % 2**64 != 0
    assert files.checksum_of("d") == 0  # not written yet
    assert files.checksum_of("c") == files.write("c", TENSORS["c"]) == 0
    (files.folder / "model.safetensors").write_bytes(b"")
    assert files.checksum_of("a") == 0


def test_few_of_many_files_are_open_at_a_time(new, monkeypatch):
    monkeypatch.setattr(writer, "_MOST_OPEN", 3)
    tensors = {f"t{number}": torch.full((4,), float(number)) for number in range(40)}
    files = new(tensors, max_bytes=16)
    assert len(files.all) == 40
    files.create()
    before = len(list(Path("/proc/self/fd").iterdir()))
    most = []

    def write(name):
        files.write(name, tensors[name])
        files.checksum_of(name)
        most.append(len(list(Path("/proc/self/fd").iterdir())) - before)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, [*tensors, *reversed(tensors)]))
    assert 3 <= max(most) <= 8
    with files.opened(files.all[0].name) as one, ExitStack() as others:
        for file in files.all[1:9]:
            others.enter_context(files.opened(file.name))
        assert os.fstat(one).st_size == files.all[0].num_bytes
    assert _is_what_was_written(files.folder, tensors)
