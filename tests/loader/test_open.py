"""Which files of a folder count, and what is said when something is wrong with them."""

import json
from pathlib import Path

import pytest
import tiny_checkpoints as tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantload.errors import (
    CheckpointError,
    HeaderError,
    MissingTensor,
    QuantloadError,
    SourceNotFound,
    UnknownFormat,
)
from quantload.loader.formats import open_source
from quantload.loader.open import INDEX, natural_order, open_checkpoint, read_json

CONFIG = tiny.config(layers=1)


@pytest.fixture
def made() -> dict[str, torch.Tensor]:
    return tiny.tensors(CONFIG)


def test_single_file(tmp_path, made):
    checkpoint = open_checkpoint(tiny.write(tmp_path / "m", CONFIG, made))
    assert set(checkpoint.tensors) == set(made)
    assert checkpoint.config == CONFIG
    assert checkpoint.quantization_config is None
    assert checkpoint.warnings == ()
    for name, tensor in made.items():
        assert torch.equal(checkpoint.read(name), tensor)


def test_single_file_hides_other_files(tmp_path, made):
    folder = tiny.write(tmp_path / "m", CONFIG, made)
    tiny.save_file({"x": torch.zeros(1)}, folder / "other.safetensors")
    checkpoint = open_checkpoint(folder)
    assert set(checkpoint.tensors) == set(made)
    assert checkpoint.warnings == ("files left out: `other.safetensors`",)


def test_shards_are_read_in_natural_order(tmp_path):
    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 1, 2, 9, 10, 11, 100)]
    shards = [{name: torch.full((2, 2), float(i))} for i, name in enumerate(reversed(names))]
    checkpoint = open_checkpoint(tiny.write(tmp_path / "m", CONFIG, shards))
    assert list(checkpoint.tensors) == names
    assert checkpoint.read(names[-1])[0, 0] == 0.0


def test_files_without_an_index_are_all_read(tmp_path, made):
    folder = tiny.write(tmp_path / "m", CONFIG, tiny.halves(made))
    (folder / INDEX).unlink()
    assert set(open_checkpoint(folder).tensors) == set(made)


def test_a_tensor_in_two_files_without_an_index(tmp_path):
    folder = tiny.write(tmp_path / "m", CONFIG, [{"a": torch.zeros(1)}, {"b": torch.zeros(1)}])
    tiny.save_file({"b": torch.ones(1), "a": torch.ones(1)}, folder / "model-extra.safetensors")
    (folder / INDEX).unlink()
    with pytest.raises(
        CheckpointError, match=r"tensor `[ab]` is in two files, `model-.*there is no"
    ):
        open_checkpoint(folder)


def test_the_index_decides_between_two_files(tmp_path):
    folder = tiny.write(tmp_path / "m", CONFIG, [{"a": torch.zeros(2)}, {"b": torch.zeros(2)}])
    tiny.save_file(
        {"b": torch.zeros(2), "a": torch.ones(2)}, folder / "model-00002-of-00002.safetensors"
    )
    checkpoint = open_checkpoint(folder)
    assert checkpoint.read("a").tolist() == [0.0, 0.0]
    assert checkpoint.warnings == ("1 tensors are not listed in the index, left out: `a`",)


def test_a_file_that_the_index_does_not_name_is_not_opened(tmp_path, made):
    folder = tiny.write(tmp_path / "m", CONFIG, tiny.halves(made))
    (folder / "model-00009-of-00009.safetensors").write_bytes(b"no header")
    assert set(open_checkpoint(folder).tensors) == set(made)


def test_missing_shard(tmp_path, made):
    folder = tiny.write(tmp_path / "m", CONFIG, tiny.halves(made))
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"shard `model-00002-of-00002.safetensors` is missing"
    ):
        open_checkpoint(folder)


def test_tensor_that_is_not_in_its_shard(tmp_path, made):
    folder = tiny.write(tmp_path / "m", CONFIG, tiny.halves(made))
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= {"model.ghost.weight": "model-00001-of-00002.safetensors"}
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(
        MissingTensor, match=r"1 tensors are not in the shards .*model\.ghost\.weight"
    ):
        open_checkpoint(folder)


@pytest.mark.parametrize("target", ["../other.safetensors", "/etc/passwd", "sub/x.safetensors"])
def test_index_that_points_outside(tmp_path, made, target):
    folder = tiny.write(tmp_path / "m", CONFIG, tiny.halves(made))
    tiny.save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": target}}))
    with pytest.raises(CheckpointError, match="points outside its folder"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "index", [{}, {"weight_map": {}}, {"weight_map": ["a"]}, {"weight_map": {"a": 3}}, []]
)
def test_index_of_the_wrong_form(tmp_path, made, index):
    folder = tiny.write(tmp_path / "m", CONFIG, made)
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="index"):
        open_checkpoint(folder)


def test_no_config(tmp_path, made):
    folder = tiny.write(tmp_path / "m", CONFIG, made)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"`config.json` is missing in"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "text", ["{", "", "[1]", '"x"', "\x00", '{"a": ' + "9" * 5000 + "}", "[" * 100_000]
)
def test_config_that_is_no_object(tmp_path, made, text):
    folder = tiny.write(tmp_path / "m", CONFIG, made)
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(folder)


def test_config_that_is_not_utf8(tmp_path, made):
    folder = tiny.write(tmp_path / "m", CONFIG, made)
    (folder / "config.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(CheckpointError, match="not a JSON file"):
        open_checkpoint(folder)


def test_code_in_pickles_is_never_run(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch hacked'\ntR.")
    with pytest.raises(
        UnknownFormat,
        match=r"pickled file .* code.*`os.system`.*pytorch_model.bin`\n\nhint: .*safetensors",
    ):
        open_checkpoint(tmp_path)
    assert not Path("hacked").exists()


def test_adapters_are_not_weights(tmp_path):
    tiny.save_file({"a": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UnknownFormat, match=r"`adapter_model.safetensors`.* is all there is"):
        open_checkpoint(tmp_path)


def test_several_gguf_files(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"2 GGUF files .*`a.gguf`, `b.gguf`"):
        open_checkpoint(tmp_path)


def test_empty_folder(tmp_path):
    with pytest.raises(SourceNotFound, match="no safetensors or GGUF file"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "source",
    ["./nothing/here", "../nothing", "a/b/c/d", "~nobody_of_this_name/x", "x" * 5000, "a\0b"],
)
def test_nothing_there(source):
    with pytest.raises(SourceNotFound, match="no such folder or file"):
        open_checkpoint(source)


def test_a_file_that_is_no_checkpoint(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(UnknownFormat, match=r"expected a folder, a `.gguf` file or a hub id"):
        open_checkpoint(file)


@pytest.mark.parametrize("holder", ["quantization_config", "compression_config", "text_config"])
def test_where_the_quantization_config_is_found(tmp_path, made, holder):
    found = {"quant_method": "gptq"}
    content = {**CONFIG, holder: {"quantization_config": found} if holder[0] == "t" else found}
    checkpoint = open_checkpoint(tiny.write(tmp_path / "m", content, made))
    assert checkpoint.quantization_config == found
    assert checkpoint.quantization_config_file == "config.json"


def test_quantization_config_in_a_side_file(tmp_path, made):
    folder = tiny.write(tmp_path / "m", CONFIG, made)
    (folder / "quantize_config.json").write_text('{"bits": 4}')
    checkpoint = open_checkpoint(folder)
    assert checkpoint.quantization_config == {"bits": 4}
    assert checkpoint.quantization_config_file == "quantize_config.json"


@pytest.mark.parametrize("value", [[], 0, "", [{"quant_method": "gptq"}]])
def test_a_quantization_config_that_is_no_object(tmp_path, made, value):
    folder = tiny.write(tmp_path / "m", {**CONFIG, "quantization_config": value}, made)
    with pytest.raises(CheckpointError, match=r"`quantization_config` in .* is not an object"):
        open_checkpoint(folder)


def test_a_side_file_that_disagrees_is_told(tmp_path, made):
    found = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"}
    folder = tiny.write(tmp_path / "m", {**CONFIG, "quantization_config": found}, made)
    beside = folder / "quantize_config.json"
    beside.write_text(json.dumps({"bits": 4, "group_size": 32, "damp_percent": 0.01}))
    assert open_checkpoint(folder).warnings == ()
    beside.write_text(json.dumps({"bits": 4, "group_size": 64, "checkpoint_format": "gptq"}))
    opened = open_checkpoint(folder)
    assert opened.quantization_config == found
    assert opened.warnings == (
        "`quantize_config.json` and `config.json` disagree on `checkpoint_format`, `group_size`; "
        "`config.json` counts",
    )
    beside.write_text("{")  # nobody needs it
    assert open_checkpoint(folder).warnings == ()


def test_natural_order():
    names = ["a.10.b", "a.9.b", "a.09.c", "a.x.b", "b", "a.2"]
    assert sorted(names, key=natural_order) == ["a.2", "a.9.b", "a.09.c", "a.10.b", "a.x.b", "b"]


@given(st.lists(st.text(alphabet="a.0179²٣", max_size=8), max_size=6))
def test_natural_order_takes_any_name(names):
    assert sorted(sorted(names, key=natural_order)) == sorted(names)


def test_read_json_names_the_type(tmp_path):
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(CheckpointError, match="holds a JSON list, expected an object"):
        read_json(tmp_path / "x.json", needed_for="a test")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(
    keys=st.dictionaries(
        st.sampled_from(
            ["quantization_config", "text_config", "compression_config", "dtype", "architectures"]
        ),
        _JSON | st.dictionaries(st.sampled_from(["quant_method", "quantization_config"]), _JSON),
    )
)
def test_any_config_is_opened_or_refused(tmp_path_factory, keys):
    folder = tmp_path_factory.getbasetemp() / "any_config"
    if not folder.exists():
        tiny.write(folder, {}, {"a.weight": torch.zeros(2, 2)})
    (folder / "config.json").write_text(json.dumps(keys))
    try:
        source = open_source(open_checkpoint(folder))
    except QuantloadError as error:
        assert str(error)  # noqa: PT017 - either outcome is right
    else:
        assert list(source.weights) == ["a"]


def test_damaged_shard_is_named(tmp_path, made):
    folder = tiny.write(tmp_path / "m", CONFIG, tiny.halves(made))
    file = folder / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(HeaderError, match=r"model-00002-of-00002\.safetensors"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["", "  "])
def test_an_empty_name_is_not_the_current_folder(name):
    with pytest.raises(SourceNotFound, match="no source: the name is empty"):
        open_checkpoint(name)
