"""Adapters of peft beside a model, or alone: told of, refused, and not carried over."""

import json

import pytest
import tiny_checkpoints as tiny
import torch
from safetensors.torch import load_file

import quantload
from quantload.errors import UnknownFormat

CONFIG = {"peft_type": "LORA", "base_model_name_or_path": "someone/base", "r": 8}
WARNING = (
    "an adapter `LORA` of `someone/base` (`adapter_config.json`, `adapter_model.safetensors`) is "
    "left out, weights are those of the base alone; merge it into the weights"
)


def with_adapter(folder, config=CONFIG, weights="adapter_model.safetensors"):
    folder.mkdir(exist_ok=True)
    if config is not None:
        text = config if isinstance(config, str) else json.dumps(config)
        (folder / "adapter_config.json").write_text(text)
    if weights:
        tiny.save_file({"base_model.model.x.lora_A.weight": torch.zeros(8, 8)}, folder / weights)
    return folder


def sharded(folder):
    """Give a model an index, as large ones have."""
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("has_index", [False, True])
def test_an_adapter_beside_a_model_is_told(has_index, tmp_path, caplog):
    folder = tiny.llama(tmp_path / "model")
    if has_index:
        sharded(folder)
    (warning,) = quantload.inspect(with_adapter(folder)).warnings
    assert warning.startswith(WARNING)
    quantload.load(folder, device="cpu")
    assert [WARNING in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize(
    ("config", "weights", "said"),
    [
        (CONFIG, "", "an adapter `LORA` of `someone/base` (`adapter_config.json`) is left out"),
        (None, "adapter_model.bin", "an adapter (`adapter_model.bin`) is left out"),
        ("{", "", "an adapter (`adapter_config.json`) is left out"),
        ({"peft_type": "IA3"}, "", "an adapter `IA3` (`adapter_config.json`) is left out"),
    ],
)
def test_parts_of_an_adapter(config, weights, said, tmp_path):
    folder = with_adapter(tiny.llama(tmp_path / "model"), config, weights)
    assert [warning[: len(said)] for warning in quantload.inspect(folder).warnings] == [said]


def test_an_output_has_no_half_of_an_adapter(tmp_path):
    """With its config alone transformers would look for the weights, and fail or take others."""
    folder = with_adapter(tiny.llama(tmp_path / "model"))
    done = quantload.convert(folder, tmp_path / "out", "W8A16:channel")
    assert not list(done.folder.glob("adapter*"))
    assert not quantload.inspect(done.folder).warnings


@pytest.mark.parametrize("config", [CONFIG, None])
def test_an_adapter_alone_is_refused(config, tmp_path):
    with pytest.raises(UnknownFormat, match=r"is all there is in .* expected a whole model") as e:
        quantload.inspect(with_adapter(tmp_path / "adapter", config))
    assert ("of `someone/base`" in e.value.message) == (config is not None)
    assert "merge_and_unload" in e.value.hint


def test_an_adapter_beside_other_weights(tmp_path):
    folder = with_adapter(tmp_path / "adapter")
    tiny.save_file({"x": torch.zeros(1)}, folder / "consolidated.safetensors")
    (folder / "adapter_modelling.py").write_text("")
    with pytest.raises(UnknownFormat, match=r"beside `consolidated.safetensors`") as e:
        quantload.inspect(folder)
    assert "adapter_modelling" not in e.value.message


@pytest.mark.parametrize("name", ["adapter_modelling.py", "adapter_model.md"])
def test_code_is_no_adapter(name, tmp_path):
    folder = tiny.llama(tmp_path / "model", layers=1)
    (folder / name).write_text("")
    assert not quantload.inspect(folder).warnings
