"""The pure parts of FP8: what a scale's shape says, and the canonical form."""

import pytest
import torch

from quantload.loader.formats.float8 import as_scale, decode_float8, float8_scheme
from quantload.quant.grid import E5M2
from quantload.quant.qtensor import Evaluation


@pytest.mark.parametrize(
    ("scale", "block", "kind"),
    [
        ((), None, "tensor"),
        ((1,), None, "tensor"),
        ((1, 1), None, "tensor"),
        ((100,), None, "channel"),
        ((100, 1), None, "channel"),
        ((1, 100), None, None),
        ((72,), None, None),
        ((4, 3), None, None),
        ((4, 3), (32, 32), "block"),
        ((4, 1, 3, 1), (32, 32), "block"),
        ((3, 4), (32, 32), None),
        ((4,), (32, 32), None),
        ((), (32, 32), None),
        ((), (128, 128), "block"),
        ((1,), (128, 128), "block"),
        ((1, 1), (128, 128), "block"),
        ((100, 3), (1, 32), "group"),
        ((100, 1), (1, 32), None),
    ],
)
def test_shapes(scale, block, kind):
    found = float8_scheme((100, 72), scale, block)
    assert (found.granularity if found else None) == kind


def test_the_scheme_says_what_scales_are():
    found = float8_scheme((8, 64), (8, 2), (1, 32), grid=E5M2, scale_dtype=torch.uint8)
    assert (found.grid, found.scale, found.group_size) == (E5M2, "e8m0", 32)


def test_decode():
    codes = torch.full((3, 5), 2.0).to(torch.float8_e4m3fn)
    scale = torch.tensor([[128, 127], [126, 125]], dtype=torch.uint8)
    weight = float8_scheme((3, 5), (2, 2), (2, 3), scale_dtype=scale.dtype)
    expected = torch.tensor([[4.0, 4, 4, 2, 2], [4, 4, 4, 2, 2], [1, 1, 1, 0.5, 0.5]])
    assert torch.equal(decode_float8(codes, scale, weight).dequantize(), expected)
    rounded = Evaluation(torch.float32, result=torch.bfloat16)
    assert decode_float8(codes, scale, weight, rounded).dequantize().dtype == torch.bfloat16
    assert decode_float8(codes, scale.reshape(2, 1, 2, 1), weight).scale.shape == (2, 2)


def test_bytes_are_exponents():
    scale = torch.tensor([0, 127, 254], dtype=torch.uint8)
    assert as_scale(scale).float().tolist() == [2.0**-127, 1.0, 2.0**127]
    assert as_scale(torch.ones(1)).dtype == torch.float32
