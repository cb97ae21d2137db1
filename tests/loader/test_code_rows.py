"""Rows of a quantized weight that are decoded by themselves are those of the whole."""

from __future__ import annotations

import pytest
import tiny_checkpoints as tiny
import torch
from converting import converted, opened
from safetensors.torch import load_file, save_file

from quantload.loader.code_rows import CodeRows, row_step
from quantload.loader.formats.targets import target_named
from quantload.loader.row_reader import RowReader
from quantload.quant.qtensor import QuantTensor

MODULE = "model.layers.0.mlp.up_proj"
SCHEMES = {
    "compressed-tensors": (
        *("W4A16", "W4A16_ASYM", "W3A16", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16"),
        "MXFP4A16",
    ),
    "fp8": ("FP8_BLOCK",),
    "modelopt": ("NVFP4A16", "FP8_DYNAMIC"),
    "gptq": ("W4A16",),
    "awq": ("W4A16_ASYM",),
}
CASES = [(target, scheme) for target, schemes in SCHEMES.items() for scheme in schemes]


@pytest.fixture
def reader():
    found = RowReader(torch.device("cpu"))
    yield found
    found.close()


@pytest.mark.parametrize(("target", "scheme"), CASES)
def test_rows_are_those_of_the_whole(tmp_path, reader, target, scheme):
    content = tiny.config(hidden=128, intermediate=384)
    folder = tiny.write(tmp_path / "in", content, tiny.tensors(content))
    output = opened(converted(folder, tmp_path / "out", scheme, target=target_named(target)))
    found = CodeRows(output, MODULE, reader)
    assert found.is_apart == target_named(target).has_rows_apart
    assert found.is_quantized
    whole = output.read_weight(MODULE)
    for start, stop in ((0, 384), (128, 256), (0, 8), (376, 384), (131, 140)):
        part = found.rows(start, stop)
        assert isinstance(part, QuantTensor)
        assert part.shape == (stop - start, 128)
        assert torch.equal(part.dequantize(), whole.rows(start, stop).dequantize())


def test_rows_that_look_broken_alone_are_cut_out_of_the_whole(tmp_path, reader):
    """Scales that are all zero are refused, but those of some rows may be."""
    content = tiny.config(hidden=128, intermediate=384)
    folder = tiny.write(tmp_path / "in", content, tiny.tensors(content))
    output = converted(folder, tmp_path / "out", "W4A16")
    tensors = load_file(output / "model.safetensors")
    tensors[f"{MODULE}.weight_scale"][:8] = 0
    save_file(tensors, output / "model.safetensors", {"format": "pt"})
    found = CodeRows(opened(output), MODULE, reader)
    for start, stop in ((0, 8), (8, 16)):
        values = found.rows(start, stop).dequantize()
        assert bool((values == 0).all()) == (start == 0)


def test_weights_in_full_precision_have_no_codes(tmp_path):
    output = opened(tiny.llama(tmp_path))
    assert row_step(output, MODULE) is None
