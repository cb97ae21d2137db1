"""Reads of single tensors from files that change under the reader."""

import pytest
import tiny_checkpoints as tiny
import torch

from quantload.errors import CheckpointError, HeaderError, MissingTensor
from quantload.loader.checkpoint import TensorEntry, read_entry
from quantload.loader.open import open_checkpoint


def test_reads_are_new_memory(tmp_path):
    checkpoint = open_checkpoint(tiny.llama(tmp_path / "m", layers=1))
    one, two = (checkpoint.read("model.norm.weight") for _ in range(2))
    one.zero_()
    assert not torch.equal(one, two)
    assert torch.equal(two, checkpoint.read("model.norm.weight"))


def test_unknown_name(tmp_path):
    checkpoint = open_checkpoint(tiny.llama(tmp_path / "m", layers=1))
    with pytest.raises(MissingTensor, match=r"tensor `model.nrm.weight` is not in"):
        checkpoint.read("model.nrm.weight")


def test_file_cut_after_opening(tmp_path):
    folder = tiny.llama(tmp_path / "m", layers=1)
    checkpoint = open_checkpoint(folder)
    last = max(checkpoint.tensors.values(), key=lambda entry: entry.start)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(
        HeaderError, match=rf"file ends inside tensor `{last.name}`: \d+ of \d+ bytes"
    ):
        checkpoint.read(last.name)


def test_file_removed_after_opening(tmp_path):
    folder = tiny.llama(tmp_path / "m", layers=1)
    checkpoint = open_checkpoint(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"cannot read `.*model\.safetensors`: No such file"):
        checkpoint.read("model.norm.weight")


def test_entry_without_elements(tmp_path):
    (tmp_path / "x").write_bytes(b"")
    entry = TensorEntry("a", torch.bfloat16, (0, 3), tmp_path / "x", 0, 0)
    assert read_entry(entry).shape == (0, 3)
    assert entry.num_elements == 0
    assert TensorEntry("a", torch.bfloat16, (), tmp_path / "x", 0, 2).num_elements == 1
