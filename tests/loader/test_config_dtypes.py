"""Dtypes in a config.json that are no names of one: nobody guesses, and nothing is written."""

import json

import pytest
import served
import tiny_checkpoints as tiny
import torch

import quantload
from quantload.errors import ModelError

WRONG = {
    "fp16": "`float16`",
    "f64": "`float64`",
    "bf16": "`bfloat16`",
    "FLOAT16": "`float16`",
    "auto": "the stored weights",
    "": "the stored weights",
    "int8": "the stored weights",
}


def with_dtype(folder, value, key="dtype", section=""):
    content = json.loads((folder / "config.json").read_text())
    for other in ("dtype", "torch_dtype"):
        content.pop(other, None)
    (content.setdefault(section, {}) if section else content)[key] = value
    (folder / "config.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("section", ["", "vision_config"])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("value", [*WRONG, ["float16"], 16], ids=repr)
def test_what_is_no_dtype(value, key, section, tmp_path):
    folder = with_dtype(tiny.llama(tmp_path / "model", layers=1), value, key, section)
    for call in (
        lambda: quantload.load(folder, device="cpu"),
        lambda: quantload.convert(folder, tmp_path / "out", "W8A16:channel"),
    ):
        with pytest.raises(ModelError) as caught:
            call()
        name = f"{section}.{key}" if section else key
        assert f"`{name}` in config.json is " in caught.value.message
        assert str(value) in caught.value.message
        assert "expected one of `bfloat16`, `float16`, `float32`" in caught.value.message
        near = WRONG.get(value, "") if isinstance(value, str) else ""
        assert near in caught.value.hint
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("section", ["", "vision_config"])
def test_doctor_says_it(section, tmp_path):
    folder = with_dtype(served.llama(tmp_path / "model"), "fp16", section=section)
    (found,) = [f for f in quantload.doctor(folder, "vllm").errors if f.rule == "config-field"]
    name = f"{section}.dtype" if section else "dtype"
    assert found.found == f"`{name}` in config.json is `fp16` of type `str`"
    assert "`float16`" in found.expected
    assert "did you mean `float16`?" in found.hint


def test_no_dtype_at_all_is_one(tmp_path):
    folder = with_dtype(tiny.llama(tmp_path / "model", layers=1), None)
    assert quantload.load(folder, device="cpu").dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["float64", "torch.float64"])
def test_double_precision_is_that_of_the_config(name, tmp_path):
    folder = with_dtype(tiny.llama(tmp_path / "model", layers=1), name)
    assert quantload.load(folder, device="cpu").dtype == torch.float64
    done = quantload.convert(folder, tmp_path / "out", "W8A16:channel")
    assert done.report.passed
    assert quantload.load(done.folder, device="cpu").dtype in (torch.bfloat16, torch.float64)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("half", torch.float16), ("torch.half", torch.float16), ("float", torch.float32)],
)
def test_other_names_of_torch(name, dtype, tmp_path):
    """transformers looks them up in torch, and they are there."""
    folder = with_dtype(tiny.llama(tmp_path / "model", layers=1), name)
    assert quantload.load(folder, device="cpu").dtype == dtype
    quantload.convert(folder, tmp_path / "out", "W8A16:channel")
    assert quantload.inspect(tmp_path / "out").checkpoint.config["dtype"] == "bfloat16", "as stored"
    quantload.load(tmp_path / "out", device="cpu")
