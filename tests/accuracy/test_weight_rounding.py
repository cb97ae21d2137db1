"""Layers that stand out in how they are rounded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tiny_checkpoints as tiny
import torch
from safetensors.torch import load_file, save_file

from quantload import api
from quantload.accuracy.weight_rounding import Rounding, far_above, rounding_of, standing_out
from quantload.quant.rtn import quantize_rtn
from quantload.quant.scheme import parse_scheme

SHAPE = (512, 1024)
LAYERS = 6


def weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(SHAPE, generator=generator) * 0.02).to(torch.bfloat16) for _ in range(LAYERS)
    ]


def judged(candidates, references, kind="W4A16"):
    return standing_out(
        {
            str(number): (kind, rounding_of(quantized, quantized.dequantize(), reference))
            for number, (quantized, reference) in enumerate(
                zip(candidates, references, strict=True)
            )
        }
    )


def swap_nibbles(quantized, row=7, group=3):
    """As a tool does that writes the two codes of a byte in the wrong order, in one group."""
    width = quantized.block[1]
    codes = quantized.codes.clone()
    part = codes[row, group * width : (group + 1) * width]
    part.copy_(part.view(-1, 2).flip(1).reshape(-1))
    return replace(quantized, codes=codes)


@pytest.mark.parametrize("scheme", ["W4A16:g32", "W4A16", "W4A16_ASYM", "NVFP4A16", "MXFP4A16"])
def test_nibbles_of_one_group(scheme):
    references = weights()
    quantized = [quantize_rtn(weight, parse_scheme(scheme).weight) for weight in references]
    assert judged(quantized, references, scheme) == {}
    quantized[4] = swap_nibbles(quantized[4])
    found = judged(quantized, references, scheme)
    assert list(found) == ["4"]
    assert "steps" in found["4"]


def test_relative_error_hides_it():
    """What this file is for: the same damage moves the relative error by less than 1 %."""
    weight = weights()[0]
    quantized = quantize_rtn(weight, parse_scheme("W4A16:g32").weight)
    errors = [
        float((part.dequantize().double() - weight.double()).norm() / weight.double().norm())
        for part in (quantized, swap_nibbles(quantized))
    ]
    assert 1.0 < errors[1] / errors[0] < 1.01


@pytest.mark.parametrize("scheme", ["W4A16_ASYM", "W8A8", "FP8_DYNAMIC"])
def test_rows_in_another_order(scheme):
    references = weights()
    quantized = [quantize_rtn(weight, parse_scheme(scheme).weight) for weight in references]
    codes = quantized[2].codes.clone()
    raw = codes.view(torch.uint8)
    raw[[10, 11]] = raw[[11, 10]]
    quantized[2] = replace(quantized[2], codes=codes)
    assert list(judged(quantized, references, scheme)) == ["2"]


def test_zero_points_off_by_one():
    references = weights()
    quantized = [quantize_rtn(weight, parse_scheme("W4A16_ASYM").weight) for weight in references]
    quantized[1] = replace(quantized[1], zero=quantized[1].zero + 1)
    found = judged(quantized, references)
    assert list(found) == ["1"]


def test_histogram_of_rounding_to_nearest():
    """Even between -0.5 and 0.5, but for the largest of each group, which is exact."""
    weight = weights()[0]
    found = rounding_of(
        quantized := quantize_rtn(weight, parse_scheme("W4A16").weight),
        quantized.dequantize(),
        weight,
    )
    assert sum(found.histogram) == weight.numel()
    assert len(found.histogram) == 42
    inside = found.histogram[11:31]
    assert sum(inside) > 0.99 * weight.numel()
    assert max(inside) < 1.5 * min(inside)
    assert abs(found.bias) < 0.01
    assert (found.codes, found.codes_used) == (16, 16)
    codes = quantized.codes
    at_ends = float(((codes <= -7) | (codes == 7)).float().mean())
    assert found.rail_share == pytest.approx(at_ends)


def rounding(*, beyond=9, max_steps=5.0, block_excess=2.0, row_excess=1.0):
    return Rounding(
        beyond=beyond, max_steps=max_steps, block_excess=block_excess, row_excess=row_excess
    )


def of_one_kind(*layers):
    return {f"{number}.q": ("W4A16", layer) for number, layer in enumerate(layers)}


def test_layers_that_all_clip_are_alike():
    """GPTQ and AWQ leave more than half a step: nothing stands out if all layers do."""
    usual = [rounding(block_excess=80.0 + number, row_excess=9.0) for number in range(6)]
    assert standing_out(of_one_kind(*usual)) == {}
    for worse in (rounding(block_excess=700.0), rounding(row_excess=50.0)):
        assert list(standing_out(of_one_kind(*usual, worse))) == ["6.q"]


def test_few_layers_say_nothing_of_what_is_usual():
    rescaled = rounding(block_excess=700.0, row_excess=9.0)
    assert standing_out(of_one_kind(rounding(), rescaled)) == {}
    assert list(standing_out(of_one_kind(rounding(), rounding(block_excess=700.0)))) == ["1.q"]


def test_rounding_to_nearest_is_asked_of_a_layer_if_most_others_are():
    near = rounding(beyond=0, max_steps=0.5)
    other_order = rounding(beyond=3, max_steps=0.56)
    assert standing_out(of_one_kind(near, near, near, other_order)) == {}
    assert standing_out(of_one_kind(near, near, rounding(block_excess=9.0))) == {}
    assert list(standing_out(of_one_kind(near, near, near, rounding()))) == ["3.q"]


def test_grids_without_steps_are_left_out():
    assert standing_out({"0": ("NF4", None)}) == {}


# -- models with few layers of a projection --------------------------------------------------------


def of_a_small_model(**damaged):
    """Two blocks by a tool that does not round to nearest; one layer is as given."""
    names = [f"layers.{n}.{leaf}" for n in (0, 1) for leaf in ("q_proj", "k_proj", "down_proj")]
    layers = {name: ("W4A16", rounding(row_excess=2.0, block_excess=14.0)) for name in names}
    return layers | {"layers.0.k_proj": ("W4A16", rounding(**damaged))}


@pytest.mark.parametrize(
    ("damaged", "what"),
    [
        ({"row_excess": 43.0, "block_excess": 164.0}, "many rows"),
        ({"row_excess": 6.1}, "many rows"),
        ({"block_excess": 90.0}, "a block"),
        ({"row_excess": 5.9, "block_excess": 60.0}, ""),
    ],
)
def test_one_layer_with_far_more_noise_than_all_others(damaged, what):
    found = standing_out(of_a_small_model(**damaged))
    assert {name: why.split(" is ")[0] for name, why in found.items()} == (
        {"layers.0.k_proj": f"noise of {what}"} if what else {}
    )


def test_weights_that_were_rescaled_are_more_than_one():
    layers = of_a_small_model(row_excess=26.9, block_excess=190.5)
    layers["layers.0.down_proj"] = "W4A16", rounding(row_excess=13.6, block_excess=53.6)
    assert standing_out(layers) == {}


def far(*errors, row_excess=None, projection="down_proj"):
    held = None if row_excess is None else rounding(row_excess=row_excess)
    rows = {f"layers.{n}.{projection}": ("NF4", error, held) for n, error in enumerate(errors)}
    return far_above(rows | {f"layers.{n}.up_proj": ("NF4", 0.2, None) for n in range(2)})


def test_an_error_far_above_the_other_layers_of_the_projection():
    """3 times the median of the others, which is 0.105; those of up_proj are another projection."""
    assert far(0.1, 0.11, 0.1, 0.31, 0.11) == {}
    found = far(0.1, 0.11, 0.1, 0.32, 0.11)
    assert found == {
        "layers.3.down_proj": "stands out: weight error 0.32, and the median of the other layers "
        "of its projection is 0.105"
    }
    assert far(0.1, 0.11, 0.1, 0.32, 0.11, row_excess=1.1) == {}  # its own steps explain it
    assert list(far(0.1, 0.11, 0.1, 0.32, 0.11, row_excess=6.1)) == ["layers.3.down_proj"]


def test_few_layers_of_a_projection_are_held_to_their_encoding():
    """Four others, of which two have 0.2: their median is 0.155."""
    assert far(0.11, 0.46, 0.1) == {}
    assert "of its encoding is 0.155" in far(0.11, 0.47, 0.1)["layers.1.down_proj"]
    assert far(0.11, 0.95) == {}  # three others say nothing


@pytest.mark.parametrize("scheme", ["W4A16:g32", "W4A16_ASYM:g32", "FP8_DYNAMIC", "W8A8"])
def test_a_scale_of_zero_loses_values(tmp_path, scheme):
    source = tiny.llama(tmp_path / "source", hidden=64)
    output = api.convert(source, tmp_path / "out", scheme).folder
    (file,) = output.glob("*.safetensors")
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj"
    tensors[f"{name}.weight_scale"][5] = 0
    save_file(tensors, file)
    found = api.compare(source, output)
    assert found.failures == (
        f"`{name}`: values are lost: a scale is zero where the reference is not",
    )
