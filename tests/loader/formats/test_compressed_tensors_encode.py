"""Every preset: planned, written, read back by our reader and by the library, alone and mixed."""

import json
from dataclasses import fields

import compressed
import pytest
import tiny_checkpoints as tiny
import torch
from oracles import same_bits

from quantload.loader.formats import open_source
from quantload.loader.formats.compressed_tensors_arguments import written_format
from quantload.loader.formats.compressed_tensors_config import build_config, validate_config
from quantload.loader.formats.compressed_tensors_encode import encode, layout
from quantload.loader.open import open_checkpoint
from quantload.quant.activation import with_input_scale
from quantload.quant.qtensor import QuantTensor
from quantload.quant.rtn import quantize_rtn
from quantload.quant.scheme import PRESETS, parse_scheme

NAMES = [name for name, scheme in PRESETS.items() if scheme.weight is not None]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def quantized(scheme, weight, absmax=37.5):
    """A weight with the number of its input, if the scheme has one."""
    tensor = quantize_rtn(weight, scheme.weight)
    if scheme.input is not None and scheme.input.needs_scale:
        tensor = with_input_scale(tensor, scheme.input, absmax)
    return tensor


def written(folder, modules):
    """A checkpoint of quantized modules: {name: (scheme, tensor)}."""
    config = build_config({name: scheme for name, (scheme, _) in modules.items()}, ["lm_head"])
    validate_config(config)
    tensors = {
        f"{name}.{leaf}": part.contiguous()
        for name, (scheme, tensor) in modules.items()
        for leaf, part in encode(tensor, scheme).items()
    }
    return tiny.write(folder, {"quantization_config": config}, tensors)


def assert_read_back(source, name, scheme, tensor):
    """The reader finds the scheme, and a tensor that is the same in every part."""
    assert source.weights[name].scheme == scheme
    assert source.weights[name].encoding.startswith(written_format(scheme))
    read = source.read_weight(name)
    assert isinstance(read, QuantTensor)
    for field in fields(QuantTensor):
        ours, theirs = getattr(tensor, field.name), getattr(read, field.name)
        if isinstance(ours, torch.Tensor):
            assert same_bits(ours, theirs), field.name
        else:
            assert ours == theirs, field.name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_planned_written_and_read_back(tmp_path, name, dtype):
    scheme = PRESETS[name]
    weight = (torch.randn(33, 256) * torch.logspace(-3, 1, 33)[:, None]).to(dtype)
    tensor = quantized(scheme, weight)
    leaves = encode(tensor, scheme)
    planned = layout(scheme, (33, 256), dtype)
    assert {leaf: (part.dtype, tuple(part.shape)) for leaf, part in leaves.items()} == {
        leaf: (spec.dtype, spec.shape) for leaf, spec in planned.items()
    }
    source = open_source(open_checkpoint(written(tmp_path, {"m": (scheme, tensor)})))
    assert_read_back(source, "m", scheme, tensor)
    values = compressed.decompressed(leaves, scheme)
    assert same_bits(source.read_dense("m"), values)


def test_all_formats_in_one_model(tmp_path):
    modules = {
        f"model.layers.{number}.mlp.down_proj": (PRESETS[name], torch.randn(16, 256))
        for number, name in enumerate(NAMES)
    }
    modules = {
        name: (scheme, quantized(scheme, weight.bfloat16(), absmax=number + 1.0))
        for number, (name, (scheme, weight)) in enumerate(modules.items())
    }
    folder = written(tmp_path, modules)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    assert {group["format"] for group in config["config_groups"].values()} == {
        "float-quantized",
        "int-quantized",
        "mxfp4-pack-quantized",
        "mxfp6-pack-quantized",
        "mxfp8-quantized",
        "nvfp4-pack-quantized",
        "pack-quantized",
    }
    source = open_source(open_checkpoint(folder))
    assert source.plain == {}
    for name, (scheme, tensor) in modules.items():
        assert_read_back(source, name, scheme, tensor)


@pytest.mark.parametrize("name", NAMES)
def test_the_config_is_what_the_library_writes_of_its_preset(name):
    """Every argument but those that say how scales were found, and the format of few bits."""
    scheme = parse_scheme(name)
    config = build_config({"m": scheme}, [])
    (ours,) = compressed.read_config(config).config_groups.values()
    theirs = compressed.preset(name)
    for part in ("weights", "input_activations"):
        mine, expected = getattr(ours, part), getattr(theirs, part)
        assert (mine is None) == (expected is None)
        if mine is None:
            continue
        left_out = {"observer", "observer_kwargs", "zp_dtype"}
        assert mine.model_dump(exclude=left_out) == expected.model_dump(exclude=left_out)
    assert (ours.format, config["format"]) == (written_format(scheme), written_format(scheme))


def test_an_encoded_weight_of_a_fixed_input_has_its_number():
    scheme = PRESETS["FP8"]
    with pytest.raises(AssertionError, match="what meets a fixed input scale has it"):
        encode(quantize_rtn(torch.randn(2, 32), scheme.weight), scheme)
