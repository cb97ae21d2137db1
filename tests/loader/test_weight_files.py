"""Which files of a folder hold its weights, whatever they are called."""

import json

import pytest
import tiny_checkpoints as tiny
import torch

from quantload.errors import CheckpointError
from quantload.loader.open import open_checkpoint
from quantload.loader.weight_files import has_pickles, has_safetensors, read_weights

CONFIG = tiny.config(layers=1)


@pytest.fixture
def made():
    return tiny.tensors(CONFIG)


def folder_with(folder, files, index=None):
    """A folder with safetensors files: {name: tensors}, and an index: (name, {tensor: file})."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name, tensors in files.items():
        tiny.save_file(dict(tensors), folder / name)
    if index is not None:
        (folder / index[0]).write_text(json.dumps({"weight_map": index[1]}))
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "gptq_model-4bit-128g.safetensors",
        "model-00001-of-00001.safetensors",
        "pytorch_model.safetensors",
        "awq_model_w4_g128.safetensors",
    ],
)
def test_one_file_of_another_name(tmp_path, made, name):
    checkpoint = open_checkpoint(folder_with(tmp_path / "m", {name: made}))
    assert set(checkpoint.tensors) == set(made)
    assert checkpoint.warnings == ()


def test_shards_without_an_index(tmp_path, made):
    halves = tiny.halves(made)
    files = {f"gptq-{i}-of-2.safetensors": half for i, half in enumerate(halves, start=1)}
    assert set(open_checkpoint(folder_with(tmp_path / "m", files)).tensors) == set(made)


def test_an_index_of_another_name(tmp_path, made):
    name = "gptq_model-4bit-128g.safetensors"
    stale = {name: made, "model-extra.safetensors": {"stale": torch.zeros(1)}}
    index = (f"{name}.index.json", dict.fromkeys(made, name))
    assert set(open_checkpoint(folder_with(tmp_path / "m", stale, index)).tensors) == set(made)


def test_two_indexes_of_other_names(tmp_path, made):
    folder = folder_with(tmp_path / "m", {"a.safetensors": made})
    for name in ("a.safetensors.index.json", "b.safetensors.index.json"):
        (folder / name).write_text("{}")
    with pytest.raises(CheckpointError, match=r"2 indexes in .*`a\.saf.*`, `b\.saf.*expected one"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ("consolidated.safetensors", "files left out: `consolidated.safetensors`"),
        ("expected.safetensors", "files left out: `expected.safetensors`"),
        ("adapter_model.safetensors", "an adapter (`adapter_model.safetensors`) is left out"),
    ],
)
def test_copies_and_adapters_are_left_out(tmp_path, made, other, said):
    files = {"weights.safetensors": made, other: {"x": torch.zeros(1)}}
    checkpoint = open_checkpoint(folder_with(tmp_path / "m", files))
    assert set(checkpoint.tensors) == set(made)
    assert [warning.partition(",")[0] for warning in checkpoint.warnings] == [said]


def test_linked_files(tmp_path, made):
    blobs = folder_with(tmp_path / "blobs", {"0a1b": made})
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.safetensors").symlink_to(blobs / "0a1b")
    (tmp_path / "m" / "config.json").symlink_to(blobs / "config.json")
    assert set(open_checkpoint(tmp_path / "m").tensors) == set(made)


def test_texts_of_a_header_are_kept(tmp_path):
    file = tmp_path / "model.safetensors"
    tiny.save_file({"a": torch.zeros(1)}, file, metadata={"format": "pt", "a": "of a"})
    weights = read_weights(tmp_path)
    assert weights is not None
    assert weights.texts == {file.name: {"format": "pt", "a": "of a"}}


def test_an_empty_folder(tmp_path):
    assert read_weights(tmp_path) is None
    assert not has_safetensors(tmp_path)
    assert not has_pickles(tmp_path)


def test_what_a_folder_has(tmp_path):
    tiny.save_file({"a": torch.zeros(1)}, tmp_path / "x.safetensors")
    assert has_safetensors(tmp_path)
    (tmp_path / "y.bin").write_bytes(b"")
    assert has_pickles(tmp_path)


def test_two_sets_of_weights_are_not_chosen_between(tmp_path, made):
    """transformers takes the single file, other engines what the index names."""
    shards = {f"model-{i}-of-2.safetensors": h for i, h in enumerate(tiny.halves(made), start=1)}
    weight_map = {name: file for file, half in shards.items() for name in half}
    index = ("model.safetensors.index.json", weight_map)
    folder = folder_with(tmp_path / "m", {**shards, "model.safetensors": made}, index)
    with pytest.raises(
        CheckpointError, match=r"two sets of weights: .* are in `model\.safetensors`"
    ):
        open_checkpoint(folder)
    tiny.save_file({"stray": torch.zeros(1)}, folder / "model.safetensors")
    assert set(open_checkpoint(folder).tensors) == set(made)


def test_an_index_of_one_file(tmp_path, made):
    index = ("model.safetensors.index.json", dict.fromkeys(made, "model.safetensors"))
    folder = folder_with(tmp_path / "m", {"model.safetensors": made}, index)
    assert set(open_checkpoint(folder).tensors) == set(made)
