"""Compiled loops on stored scales: the bits of PyTorch, which other tests hold to references."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import same_bits

from quantload.errors import NonFiniteWeight
from quantload.quant import compiled, stored_scales
from quantload.quant.grid import E2M1, E4M3, INT4, INT8, int_grid, uint_grid
from quantload.quant.qtensor import Evaluation
from quantload.quant.scheme import WeightScheme
from quantload.quant.stored_scales import quantize_on_stored_scales

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def groups(grid, size=32, *, symmetric=True, scale="float"):
    return WeightScheme(
        grid=grid, granularity="group", group_size=size, symmetric=symmetric, scale=scale
    )


SCHEMES = {
    "int4": groups(INT4),
    "int4 128": groups(INT4, 128),
    "int4 asymmetric": groups(INT4, symmetric=False),
    "uint4 asymmetric": groups(uint_grid(4), 16, symmetric=False),
    "int3 asymmetric": groups(int_grid(3), 64, symmetric=False),
    "int8 channel": WeightScheme(grid=INT8, granularity="channel"),
    "int8 channel asymmetric": WeightScheme(grid=INT8, granularity="channel", symmetric=False),
    "int8 tensor": WeightScheme(grid=INT8, granularity="tensor"),
    "fp8 tensor": WeightScheme(grid=E4M3, granularity="tensor"),
    "fp8 channel": WeightScheme(grid=E4M3, granularity="channel"),
    "fp8 block": WeightScheme(grid=E4M3, granularity="block", block=(16, 48)),
    "nvfp4": groups(E2M1, 16, scale="e4m3"),
}


@pytest.fixture(autouse=True)
def _started(monkeypatch):
    monkeypatch.setattr(compiled, "_seen", compiled._WORTH_STARTING)


def made(weight, scheme, scale_dtype):
    evaluation = Evaluation(torch.float32)
    return quantize_on_stored_scales(
        weight, scheme, scale_dtype=scale_dtype, evaluation=evaluation
    ).tensors()


def assert_equals_torch(weight, name, scale_dtype):
    scheme = SCHEMES[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "_seen", 0)
        patch.setattr(compiled, "_WORTH_STARTING", 1 << 40)
        try:
            expected = made(weight, scheme, scale_dtype)
        except NonFiniteWeight as error:
            expected = error.message
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_scales, "_by_torch", lambda *_: pytest.fail("PyTorch was used"))
        if isinstance(expected, str):
            with pytest.raises(NonFiniteWeight) as found:
                made(weight, scheme, scale_dtype)
            assert found.value.message == expected
            return
        ours = made(weight, scheme, scale_dtype)
    assert ours.keys() == expected.keys()
    for part, tensor in expected.items():
        assert same_bits(ours[part], tensor), part


def spread(dtype, smallest, greatest):
    """Blocks of many sizes, zeros, numbers of one sign, and a row of a size of its own."""
    weight = torch.randn(40, 384) * 10.0 ** torch.linspace(smallest, greatest, 384)
    weight[3], weight[4], weight[5, :200] = 0.0, -0.0, 0.0
    weight[6:9].abs_()
    weight[9] = -weight[9].abs()
    weight[10] *= 1e-3
    return weight.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("sizes", [(-2, 0), (-9, 4), (-40, -30), (-8, -3)])
def test_the_loop_equals_torch(sizes, name, scale_dtype, dtype):
    assert_equals_torch(spread(dtype, *sizes), name, scale_dtype)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**63 - 1),
    st.sampled_from(sorted(SCHEMES)),
    st.sampled_from(DTYPES),
    st.sampled_from([torch.float16, torch.float32]),
)
def test_the_loop_equals_torch_for_any_bits(seed, name, dtype, scale_dtype):
    generator = torch.Generator().manual_seed(seed)
    whole = torch.int32 if dtype == torch.float32 else torch.int16
    limits = torch.iinfo(whole)
    bits = torch.randint(limits.min, limits.max + 1, (9, 384), generator=generator)
    weight = bits.to(whole).view(dtype)
    assert_equals_torch(weight, name, scale_dtype)
    assert_equals_torch(torch.where(weight.isfinite(), weight, 0.0), name, scale_dtype)
    small = torch.frexp(weight.nan_to_num().to(torch.float64)).mantissa * 2.0**-14
    assert_equals_torch(small.to(dtype), name, scale_dtype)


@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (33, 47), (130, 129)])
@pytest.mark.parametrize("name", [name for name in SCHEMES if SCHEMES[name].granularity != "group"])
def test_any_shape(name, shape):
    assert_equals_torch(torch.randn(shape).bfloat16(), name, torch.float32)


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", SCHEMES)
def test_what_is_not_finite_is_refused(name, bad):
    weight = torch.randn(40, 384).bfloat16()
    weight[17, 200] = bad
    with pytest.raises(NonFiniteWeight, match="1 of 15360 elements"):
        made(weight, SCHEMES[name], torch.float16)
