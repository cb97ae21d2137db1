"""Layers that a split over devices cuts inside a group or a block."""

import pytest

from quantload.loader.tensor_parallel import about_split, layers_cut
from quantload.quant.scheme import parse_scheme

OUT, UP = "model.layers.0.mlp.down_proj", "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("module", "shape", "scheme", "parts", "is_cut"),
    [
        (OUT, (64, 896), "W4A16", 2, True),
        (OUT, (64, 4864), "W4A16", 2, False),
        (OUT, (64, 896), "W4A16:g64", 2, False),
        (OUT, (64, 896), "W4A16:channel", 2, False),
        (OUT, (64, 896), "W8A8", 2, False),
        (OUT, (64, 896), "W8A8", 3, True),
        (OUT, (64, 896), "FP8_BLOCK", 2, True),
        (UP, (896, 64), "FP8_BLOCK", 2, True),
        (UP, (896, 64), "FP8_DYNAMIC", 2, False),
        (UP, (896, 128), "W4A16", 2, False),
        (UP, (897, 128), "W4A16", 2, True),
        (UP, (897, 128), "W4A16", 1, False),
    ],
)
def test_what_is_cut(module, shape, scheme, parts, is_cut):
    assert bool(layers_cut([(module, shape, parse_scheme(scheme))], parts)) is is_cut


def test_full_precision_and_experts_in_one_parameter_are_left_out():
    layers = [(OUT, (5, 7), None), (OUT, (5, 7), parse_scheme("dense"))]
    layers.append((OUT, (3, 5, 7), parse_scheme("W4A16")))
    assert not layers_cut(layers, 2)


def test_layers_that_are_cut_alike_are_told_at_once():
    layers = [(f"l.{n}.o_proj", (64, 896), parse_scheme("W4A16")) for n in range(3)]
    assert about_split(layers, 2) == [
        "3 layers cannot be split over 2 devices without cutting a group: `l.0.o_proj`, "
        "`l.1.o_proj`, `l.2.o_proj`: 896 columns in 2 parts, groups of 128"
    ]
