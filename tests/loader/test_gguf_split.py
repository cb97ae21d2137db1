"""GGUF models in several files, written by the `gguf` package itself."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from tiny_gguf import add_value, raw_header, raw_tensor, write_tiny_gguf

from quantload.errors import CheckpointError, FormatMismatch, HeaderError
from quantload.loader.gguf_file import open_gguf
from quantload.loader.gguf_split import first_parts, read_headers


def split(folder, **options):
    """Write a model in several files; return their paths in order, and the model's values."""
    whole = folder / "whole.gguf"
    stored = write_tiny_gguf(whole, **options)
    reader = gguf.GGUFReader(whole)
    writer = gguf.GGUFWriter(None, "llama", split_max_tensors=8)
    for field in reader.fields.values():
        if field.name.startswith("llama."):
            add_value(writer, field.name, field.contents())
    for tensor in reader.tensors:
        kind = tensor.tensor_type
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=kind)
    writer.write_header_to_file(folder / "model.gguf")
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    whole.unlink()
    return sorted(folder.glob("*.gguf")), stored


@pytest.mark.parametrize("opened", [0, 1, 2])
def test_all_files_are_read_whichever_is_named(tmp_path, opened):
    files, stored = split(tmp_path)
    assert [file.name for file in files][1] == "model-00002-of-00003.gguf"
    checkpoint = open_gguf(files[opened])
    assert checkpoint.gguf_file == files[0]
    assert set(checkpoint.tensors) == set(stored)
    assert {entry.file for entry in checkpoint.tensors.values()} == set(files)
    for name, expected in stored.items():
        assert torch.equal(checkpoint.read(name), torch.from_numpy(expected)), name


def test_blocks_are_read_from_their_file(tmp_path):
    files, _ = split(tmp_path, weight_type="Q8_0")
    checkpoint = open_gguf(files[0])
    for file in files:
        for tensor in gguf.GGUFReader(file).tensors:
            if tensor.name.endswith("ffn_up.weight"):
                name = f"model.layers.{tensor.name.split('.')[1]}.mlp.up_proj.weight"
                assert np.array_equal(checkpoint.read(name).numpy(), tensor.data)


def test_a_missing_file_is_named(tmp_path):
    files, _ = split(tmp_path)
    files[1].unlink()
    with pytest.raises(CheckpointError, match=r"`1` of `3` files .*`model-00002-of-00003.gguf`"):
        open_gguf(files[0])


def test_files_of_another_model_are_refused(tmp_path):
    files, _ = split(tmp_path)
    files[2].replace(files[1])
    write_tiny_gguf(files[2])
    with pytest.raises(FormatMismatch, match=r"`split.no` is `2`, expected `1`"):
        open_gguf(files[0])


def test_tensors_in_two_files_are_refused(tmp_path):
    for number in (1, 2):
        content = raw_header(tensors=(raw_tensor("a", (8,)),)) + bytes(64)
        (tmp_path / f"m-0000{number}-of-00002.gguf").write_bytes(content)
    with pytest.raises(HeaderError, match=r"`a` is in two files, `m-00001-of-00002.gguf`"):
        read_headers(tmp_path / "m-00001-of-00002.gguf")


def test_the_number_of_tensors_is_checked(tmp_path):
    metadata = {"split.tensors.count": 22, "split.count": 1}
    write_tiny_gguf(tmp_path / "m-00001-of-00001.gguf", metadata=metadata)
    with pytest.raises(FormatMismatch, match="says `22` tensors, found `21`"):
        open_gguf(tmp_path / "m-00001-of-00001.gguf")


def test_a_part_under_another_name_is_refused(tmp_path):
    write_tiny_gguf(tmp_path / "model.gguf", metadata={"split.count": 2})
    words = r"(?s)`split.count` is `2`, expected `1` .*NAME-00001-of-00002.gguf"
    with pytest.raises(FormatMismatch, match=words):
        open_gguf(tmp_path / "model.gguf")


def test_followers_are_not_models_of_their_own(tmp_path):
    names = ("a-00001-of-00002.gguf", "a-00002-of-00002.gguf", "b.gguf", "c-2.gguf")
    found = first_parts(tmp_path / name for name in names)
    assert [file.name for file in found] == [names[0], *names[2:]]
