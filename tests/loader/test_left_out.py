"""Tensors without a place: what cannot be a weight is left out, anything else is an error."""

import json
import logging

import pytest
import tiny_checkpoints as tiny
import torch

import quantload
from quantload.errors import UnexpectedTensor

CONFIG = tiny.config(layers=1)


def load_with(folder, extra, scheme=None):
    tiny.write(folder, CONFIG, tiny.tensors(CONFIG) | extra)
    if scheme is not None:
        source, folder = folder, folder.parent / "quantized"
        quantload.convert(source, folder, scheme, verify_output=False)
    return quantload.load(folder, device="cpu")


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        ("model.counter", torch.tensor(3), "a single number"),
        ("model.layers.0.version", torch.tensor(2.0), "a single number"),
        ("model.layers.0.steps", torch.arange(5), "1-D integers"),
        ("model.nothing", torch.empty(0, 4), "it has no elements"),
        ("model.layers.0.mlp.up_proj.nothing", torch.empty(0), "it has no elements"),
    ],
)
def test_what_is_no_weight(tmp_path, caplog, name, tensor, reason):
    with caplog.at_level(logging.WARNING, logger="quantload"):
        load_with(tmp_path / "m", {name: tensor})
    assert f"tensor `{name}` has no place in the model, left out: {reason}" in caplog.text


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("model.layers.0.extra", torch.zeros(3)),
        ("model.layers.0.mlp.up_proj.factor", torch.tensor(2.0)),
        ("model.layers.0.mlp.up_proj.order", torch.arange(3)),
    ],
)
def test_what_may_be_one(tmp_path, name, tensor):
    with pytest.raises(UnexpectedTensor, match=name):
        load_with(tmp_path / "m", {name: tensor})


def test_numbers_beside_quantized_weights(tmp_path):
    with pytest.raises(UnexpectedTensor, match=r"model\.layers\.0\.scale"):
        load_with(tmp_path / "m", {"model.layers.0.scale": torch.tensor(2.0)}, "W8A16:g32")


def test_a_config_without_a_dtype_takes_that_of_the_tensors(tmp_path):
    made = {name: tensor.half() for name, tensor in tiny.tensors(CONFIG).items()}
    made["model.norm.weight"] = made["model.norm.weight"].float()
    content = {key: value for key, value in CONFIG.items() if key != "dtype"}
    folder = tiny.write(tmp_path / "m", content, made)
    assert "dtype" not in json.loads((folder / "config.json").read_text())
    assert quantload.load(folder, device="cpu").dtype == torch.float16
