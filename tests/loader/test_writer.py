"""The writer: all or nothing, in a folder of its own."""

import errno
import json
import multiprocessing
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quantload.errors import OutputError
from quantload.loader.output_files import OutputTensor, assign_files
from quantload.loader.writer import CheckpointWriter, check_place

TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b": torch.tensor(2.5).bfloat16(),
    "c": torch.zeros(0, 4),
}


def _files(max_bytes=1 << 20):
    planned = [[OutputTensor(name, t.dtype, tuple(t.shape), name)] for name, t in TENSORS.items()]
    return assign_files(planned, max_bytes=max_bytes)


def _write_all(folder, max_bytes=1 << 20):
    with CheckpointWriter(folder, _files(max_bytes)) as writer:
        for name in reversed(TENSORS):
            writer.write(name, TENSORS[name])
        writer.write_json("config.json", {"a": "ä"})
        return writer.finish()


def test_the_library_reads_what_is_written(tmp_path):
    folder = _write_all(tmp_path / "deep" / "out")
    read = load_file(folder / "model.safetensors")
    assert {n: t.dtype for n, t in read.items()} == {n: t.dtype for n, t in TENSORS.items()}
    assert all(torch.equal(read[name], tensor) for name, tensor in TENSORS.items())
    assert (folder / "config.json").read_text(encoding="utf-8") == '{\n  "a": "ä"\n}\n'
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert list(folder.parent.iterdir()) == [folder]


def test_the_index_is_that_of_transformers(tmp_path):
    folder = _write_all(tmp_path / "out", max_bytes=1)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(t.nbytes for t in TENSORS.values())}
    assert set(index["weight_map"]) == set(TENSORS)
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(folder / file)[name], TENSORS[name])


def test_strided_and_transposed_tensors(tmp_path):
    tensor = torch.arange(12.0).reshape(4, 3)
    views = {"t": tensor.T, "s": tensor[::2, 1:], "c": tensor[:, :1].T.contiguous().T}
    files = assign_files(
        [[OutputTensor(n, t.dtype, tuple(t.shape), n) for n, t in views.items()]], max_bytes=10**6
    )
    with CheckpointWriter(tmp_path / "out", files) as writer:
        for name, view in views.items():
            writer.write(name, view)
        folder = writer.finish()
    read = load_file(folder / "model.safetensors")
    assert all(torch.equal(read[name], view) for name, view in views.items())


def test_an_empty_folder_is_used(tmp_path):
    (tmp_path / "out").mkdir()
    assert (_write_all(tmp_path / "out") / "config.json").exists()


def test_the_present_folder_is_used_if_it_is_empty(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    _write_all(Path())
    assert (tmp_path / "here" / "config.json").exists()


@pytest.mark.parametrize("error", [RuntimeError("x"), KeyboardInterrupt()])
def test_nothing_is_left_after_an_error(tmp_path, error):
    with pytest.raises(type(error)), CheckpointWriter(tmp_path / "out", _files()) as writer:  # noqa: PT012
        writer.write("a", TENSORS["a"])
        raise error
    assert list(tmp_path.iterdir()) == []


def test_a_missing_tensor_is_no_checkpoint(tmp_path):
    with (  # noqa: PT012 - the writer is what raises
        pytest.raises(AssertionError, match="were not written: `b`, `c`"),
        CheckpointWriter(tmp_path / "out", _files()) as writer,
    ):
        writer.write("a", TENSORS["a"])
        writer.finish()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "tensor",
    [TENSORS["a"].T, TENSORS["a"].double(), TENSORS["a"][:1]],
    ids=["shape", "dtype", "size"],
)
def test_a_tensor_that_was_not_planned(tmp_path, tensor):
    with (
        pytest.raises(AssertionError, match="planned were"),
        CheckpointWriter(tmp_path / "out", _files()) as writer,
    ):
        writer.write("a", tensor)


def test_a_tensor_written_twice(tmp_path):
    with (  # noqa: PT012 - the writer is what raises
        pytest.raises(AssertionError, match="a is written twice"),
        CheckpointWriter(tmp_path / "out", _files()) as writer,
    ):
        writer.write("a", TENSORS["a"])
        writer.write("a", TENSORS["a"])


def _killed(folder):
    writer = CheckpointWriter(folder, _files())
    writer.__enter__()
    os._exit(1)


def test_what_a_killed_run_left_is_replaced(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=_killed, args=(tmp_path / "out",))
    process.start()
    process.join()
    assert process.exitcode == 1
    (left,) = tmp_path.iterdir()
    assert left.name == ".out.unfinished"
    (left / "stray").touch()
    folder = _write_all(tmp_path / "out")
    assert list(tmp_path.iterdir()) == [folder]
    assert not (folder / "stray").exists()


def test_a_folder_of_others_in_the_place_of_the_unfinished_one(tmp_path):
    (tmp_path / ".out.unfinished").mkdir()
    (tmp_path / ".out.unfinished" / "thesis.txt").touch()
    with pytest.raises(OutputError, match=r"\.out\.unfinished` is in the way and was not made by"):
        _write_all(tmp_path / "out")
    assert (tmp_path / ".out.unfinished" / "thesis.txt").exists()


def test_two_runs_at_once(tmp_path):
    with CheckpointWriter(tmp_path / "out", _files()) as writer:
        with pytest.raises(OutputError, match=r"another process is writing `.*out`"):
            _write_all(tmp_path / "out")
        for name, tensor in TENSORS.items():
            writer.write(name, tensor)
        folder = writer.finish()
    assert torch.equal(load_file(folder / "model.safetensors")["a"], TENSORS["a"])


def test_places_that_are_taken(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name, message in (
        ("file", "is a file or a link"),
        ("full", "is not empty"),
        ("link", "a link"),
    ):
        with pytest.raises(OutputError, match=message):
            check_place(tmp_path / name)
        with pytest.raises(OutputError, match=message):
            _write_all(tmp_path / name)
    with pytest.raises(OutputError, match=r"cannot write `.*`: Not a directory"):
        _write_all(tmp_path / "file" / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full", "link"]


def test_a_folder_that_fills_up_meanwhile(tmp_path):
    with (  # noqa: PT012 - the writer is what raises
        pytest.raises(OutputError, match="Directory not empty"),
        CheckpointWriter(tmp_path / "out", _files()) as writer,
    ):
        for name, tensor in TENSORS.items():
            writer.write(name, tensor)
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "x").touch()
        writer.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["x"]


def test_a_disk_that_is_too_small(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    (file,) = _files()
    with pytest.raises(
        OutputError, match=rf"disk is too small: {file.num_bytes} bytes needed, 100 free"
    ):
        _write_all(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up(tmp_path, monkeypatch):
    def pwrite(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(OutputError, match=r"cannot write `.*out`: No space left on device"):
        _write_all(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_short_writes_are_continued(tmp_path, monkeypatch):
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:5], at))
    folder = _write_all(tmp_path / "out")
    assert torch.equal(load_file(folder / "model.safetensors")["a"], TENSORS["a"])
