"""Pickled weights: every layout that torch writes; nothing that a pickle asks for is ever run."""

import io
import json
import os
import pickle
import shutil
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import tiny_checkpoints as tiny
import torch
from torch import nn

from quantload.errors import (
    CheckpointError,
    MissingTensor,
    QuantloadError,
    SourceNotFound,
    UnknownFormat,
    UnsupportedVariant,
)
from quantload.loader.formats import open_source
from quantload.loader.open import open_checkpoint
from quantload.loader.pickled import read_pickle

CONFIG = tiny.config(layers=1)
SHARDS = "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"


@pytest.fixture
def made():
    return tiny.tensors(CONFIG)


def write(folder, content, name="pytorch_model.bin", **options):
    """Write a folder with one pickled file."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    torch.save(content, folder / name, **options)
    return folder


def write_shards(folder, made, files=SHARDS):
    halves = tiny.halves(made)
    for file, half in zip(files, halves, strict=True):
        write(folder, half, file)
    weight_map = {name: file for file, half in zip(files, halves, strict=True) for name in half}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def check_equal(checkpoint, expected):
    assert set(checkpoint.tensors) == set(expected)
    for name, tensor in expected.items():
        found = checkpoint.read(name)
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)
        entry = checkpoint.tensors[name]
        assert (entry.dtype, entry.shape) == (tensor.dtype, tuple(tensor.shape))
        assert entry.num_bytes == tensor.numel() * tensor.element_size()


@pytest.mark.parametrize("is_zip", [True, False])
def test_one_file(tmp_path, made, is_zip):
    folder = write(tmp_path / "m", made, _use_new_zipfile_serialization=is_zip)
    checkpoint = open_checkpoint(folder)
    check_equal(checkpoint, made)
    assert checkpoint.warnings == ()
    assert len(open_source(checkpoint).weights) == sum(t.ndim == 2 for t in made.values())


@pytest.mark.parametrize("name", ["model.pt", "weights.pth", "my_model.bin"])
def test_other_names(tmp_path, made, name):
    check_equal(open_checkpoint(write(tmp_path / "m", made, name)), made)


def test_shards(tmp_path, made):
    folder = write_shards(tmp_path / "m", made)
    write(folder, {"stale": torch.zeros(1)}, "pytorch_model.bin")
    check_equal(open_checkpoint(folder), made)


def test_a_missing_shard(tmp_path, made):
    folder = write_shards(tmp_path / "m", made)
    (folder / SHARDS[1]).unlink()
    with pytest.raises(CheckpointError, match=rf"shard `{SHARDS[1]}` is missing"):
        open_checkpoint(folder)


def test_a_tensor_missing_in_its_shard(tmp_path, made):
    folder = write_shards(tmp_path / "m", made)
    first = tiny.halves(made)[0]
    name = first.popitem()[0]
    torch.save(first, folder / SHARDS[0])
    with pytest.raises(MissingTensor, match=rf"1 tensors are not in the shards .*{name}"):
        open_checkpoint(folder)


def test_an_index_that_points_outside(tmp_path, made):
    folder = write_shards(tmp_path / "m", made)
    torch.save(made, tmp_path / "x.bin")
    index = {"weight_map": dict.fromkeys(made, "../x.bin")}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="points outside its folder"):
        open_checkpoint(folder)


def test_links_are_followed(tmp_path, made):
    folder = write_shards(tmp_path / "blobs", made)
    links = tmp_path / "m"
    links.mkdir()
    for file in folder.iterdir():
        (links / file.name).symlink_to(file)
    check_equal(open_checkpoint(links), made)


def test_safetensors_are_preferred(tmp_path, made):
    folder = tiny.write(tmp_path / "m", CONFIG, made)
    (folder / "pytorch_model.bin").write_bytes(b"never opened")
    check_equal(open_checkpoint(folder), made)


@pytest.mark.parametrize("holder", ["state_dict", "model_state_dict", "model"])
def test_a_state_dict_one_level_down(tmp_path, made, holder):
    content = {holder: OrderedDict(made), "epoch": 3, "optimizer": {"lr": 0.1}}
    check_equal(open_checkpoint(write(tmp_path / "m", content)), made)


def test_entries_that_are_no_tensors(tmp_path, made):
    content = made | {"version": "1", "steps": [1, 2], "model.extra": None}
    checkpoint = open_checkpoint(write(tmp_path / "m", content))
    check_equal(checkpoint, made)
    assert checkpoint.warnings == (
        "3 entries of `pytorch_model.bin` are no tensors, left out: `model.extra`, `steps`, "
        "`version`",
    )


def test_dictionaries_of_modules(tmp_path):
    layer = {"W_q": torch.arange(6, dtype=torch.uint8), "nbits": 4, "kind": torch.bfloat16}
    file = write(tmp_path / "m", {"a.b": layer, "n": torch.ones(2)}) / "pytorch_model.bin"
    found = read_pickle(file)
    assert list(found.tensors) == ["a.b.W_q", "n"]
    assert json.loads(found.texts["a.b"]) == {
        "nbits": 4,
        "kind": {"_type": "torch.dtype", "_data": "bfloat16"},
    }


@pytest.mark.parametrize("is_zip", [True, False])
def test_shared_strided_and_odd_tensors(tmp_path, is_zip):
    base = torch.arange(24.0).reshape(4, 6)
    content = {
        "whole": base,
        "same": base,
        "rows": base[1:3],
        "columns": base[:, ::2],
        "turned": base.T,
        "expanded": torch.ones(1, 3).expand(4, 3),
        "parameter": nn.Parameter(torch.randn(3)),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "flags": torch.tensor([True, False]),
        "fp8": torch.ones(3).to(torch.float8_e4m3fn).view(torch.uint8),
    }
    folder = write(tmp_path / "m", content, _use_new_zipfile_serialization=is_zip)
    checkpoint = open_checkpoint(folder)
    check_equal(checkpoint, {name: tensor.detach() for name, tensor in content.items()})
    read = checkpoint.read("turned")
    assert read.is_contiguous()
    read.zero_()
    assert torch.equal(checkpoint.read("whole"), base)


def test_files_are_mapped_and_not_read(tmp_path, made, monkeypatch):
    folder = write(tmp_path / "m", made)
    asked = []
    load = torch.load
    monkeypatch.setattr(torch, "load", lambda *a, **k: asked.append(k) or load(*a, **k))
    open_checkpoint(folder)
    assert asked == [{"map_location": "cpu", "weights_only": True, "mmap": True}]


# -- what is refused -------------------------------------------------------------------------------


class Payload:
    """Pickled as a call that makes a folder."""

    def __reduce__(self):
        return os.mkdir, ("PICKLE_WAS_EXECUTED",)


class Foreign:
    """A class that nobody allowed."""


@pytest.fixture(autouse=True)
def nothing_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    assert not Path("PICKLE_WAS_EXECUTED").exists()


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize(
    ("value", "named"), [(Payload(), r"posix\.mkdir"), (Foreign(), r"[\w.]*Foreign")]
)
def test_code_is_never_run(tmp_path, made, value, named, is_zip):
    folder = write(tmp_path / "m", made | {"x": value}, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(
        UnknownFormat,
        match=rf"asks for code, which is never run: `{named}`, in `.*\n\nhint: .*safetensors",
    ) as caught:
        open_checkpoint(folder)
    assert "weights_only" not in str(caught.value), "torch's advice to load it anyway"


@pytest.mark.parametrize("protocol", range(5))
def test_bare_pickles_are_never_run(tmp_path, protocol):
    folder = write(tmp_path / "m", {})
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"x": Payload()}, protocol))
    with pytest.raises(QuantloadError):
        open_checkpoint(folder)


def test_what_the_process_allows_is_not_allowed_here(tmp_path, made):
    folder = write(tmp_path / "m", made | {"x": Foreign()})
    with torch.serialization.safe_globals([Foreign]):
        with pytest.raises(UnknownFormat, match="asks for code"):
            open_checkpoint(folder)
        assert Foreign in torch.serialization.get_safe_globals()


def test_a_whole_module_is_refused(tmp_path):
    with pytest.raises(UnknownFormat, match=r"`torch\.nn\.modules\.linear\.Linear`"):
        open_checkpoint(write(tmp_path / "m", nn.Linear(2, 2)))


def test_torchscript_is_refused(tmp_path):
    folder = write(tmp_path / "m", {})
    torch.jit.script(nn.ReLU()).save(folder / "pytorch_model.bin")
    with pytest.raises(UnknownFormat, match="is a TorchScript archive, expected weights"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        (torch.eye(3).to_sparse(), "sparse_coo"),
        (torch.zeros(2, dtype=torch.complex64), "complex64"),
        (torch.empty(2, device="meta"), "meta"),
    ],
)
def test_tensors_without_plain_elements(tmp_path, tensor, kind):
    with pytest.raises(UnsupportedVariant, match=rf"tensor `a` is .*{kind}.*expected plain"):
        open_checkpoint(write(tmp_path / "m", {"a": tensor}))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([torch.zeros(2)], "holds a `list`, expected tensors by name"),
        (torch.zeros(2), "holds a `Tensor`"),
        ({}, "no tensors in the pickled file"),
        ({"a": 1}, "no tensors in the pickled file"),
        ({3: torch.zeros(2)}, "a tensor has the name `3`"),
        ({"a.b": torch.zeros(2), "a": {"b": torch.zeros(2)}}, "two tensors have the name `a.b`"),
    ],
)
def test_content_of_the_wrong_form(tmp_path, content, said):
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(write(tmp_path / "m", content))


def test_a_tensor_that_repeats_itself_without_end(tmp_path):
    folder = write(tmp_path / "m", {"a": torch.zeros(1).expand(1 << 40)})
    with pytest.raises(CheckpointError, match="repeats few elements to more bytes than its file"):
        open_checkpoint(folder)


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_file_cut_short_anywhere(tmp_path, is_zip):
    content = {"a": torch.randn(40), "b": torch.randn(3)}
    folder = write(tmp_path / "m", content, _use_new_zipfile_serialization=is_zip)
    file = folder / "pytorch_model.bin"
    raw = file.read_bytes()
    for length in range(0, len(raw), 7):
        file.write_bytes(raw[:length])
        with pytest.raises(QuantloadError, match=r"(cannot be|asks for).*pytorch_model\.bin"):
            open_checkpoint(folder)


def test_a_compressed_archive(tmp_path, made):
    folder = write(tmp_path / "m", made)
    file = folder / "pytorch_model.bin"
    content = io.BytesIO()
    with (
        zipfile.ZipFile(file) as old,
        zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for record in old.infolist():
            new.writestr(record.filename, old.read(record))
    file.write_bytes(content.getvalue())
    with pytest.raises(CheckpointError, match="is compressed, expected plain records"):
        open_checkpoint(folder)


def test_a_record_shorter_than_its_tensor(tmp_path):
    folder = write(tmp_path / "m", {"a": torch.ones(64), "b": torch.zeros(64)})
    file = folder / "pytorch_model.bin"
    content = io.BytesIO()
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(content, "w") as new:
        for record in old.infolist():
            data = old.read(record)
            new.writestr(record.filename, data[:-8] if record.filename.endswith("/0") else data)
    file.write_bytes(content.getvalue())
    with pytest.raises(CheckpointError, match="not as long as the records that hold them"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "name", ["training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state_0.pth", "scaler.pt"]
)
def test_files_of_a_training_run(tmp_path, made, name):
    folder = write(tmp_path / "m", made)
    (folder / name).write_bytes(b"never opened")
    check_equal(open_checkpoint(folder), made)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(SourceNotFound, match=rf"only `{name}`"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("consolidated.00.pth", "files left out: `consolidated.00.pth`"),
        ("adapter_model.bin", "an adapter (`adapter_model.bin`) is left out"),
    ],
)
def test_copies_and_adapters(tmp_path, made, name, said):
    folder = write(tmp_path / "m", made, "weights.bin")
    (folder / name).write_bytes(b"never opened")
    checkpoint = open_checkpoint(folder)
    check_equal(checkpoint, made)
    assert [warning.partition(",")[0] for warning in checkpoint.warnings] == [said]


def test_gguf_beside_pickles(tmp_path, made):
    folder = write(tmp_path / "m", made)
    (folder / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="both GGUF and pickled weights"):
        open_checkpoint(folder)


def test_the_fuzzed_pickle_is_read_or_refused(tmp_path):
    folder = write(tmp_path / "m", {"a": torch.arange(8.0)}, _use_new_zipfile_serialization=False)
    file = folder / "pytorch_model.bin"
    raw = file.read_bytes()
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        place = int(torch.randint(len(raw), (1,), generator=generator))
        value = int(torch.randint(256, (1,), generator=generator))
        file.write_bytes(raw[:place] + bytes([value]) + raw[place + 1 :])
        try:
            open_checkpoint(folder)
        except QuantloadError as error:
            assert str(error)  # noqa: PT017 - either outcome is right
    shutil.rmtree(folder)
