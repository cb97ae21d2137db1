"""NaN and infinity are found in every dtype that has them."""

import pytest
import torch

from quantload.errors import NonFiniteWeight
from quantload.loader.formats.finite import is_finite, refuse_nonfinite

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("shape", [(), (1,), (3, 4), (2, 3, 4)])
def test_floats(dtype, value, shape):
    tensor = torch.ones(shape, dtype=dtype)
    assert is_finite(tensor)
    tensor.reshape(-1)[-1] = value
    assert not is_finite(tensor)
    with pytest.raises(NonFiniteWeight, match=r"`a.scale` .* `tiny`"):
        refuse_nonfinite(tensor, "a.scale", "tiny")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu])
def test_every_byte(dtype):
    for byte in range(256):
        tensor = torch.full((2, 3), byte, dtype=torch.uint8).view(dtype)
        assert is_finite(tensor) == bool(tensor.float().isfinite().all()), byte


def test_integers_have_none():
    assert is_finite(torch.tensor([255], dtype=torch.uint8))
    assert is_finite(torch.empty(0))
