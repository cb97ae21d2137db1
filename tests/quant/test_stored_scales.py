"""Rounding on scales as formats store them, against slow references and bounds on the error."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from quantload.errors import ConfigError, NonFiniteWeight
from quantload.quant.qtensor import Evaluation
from quantload.quant.scales import merged_range, shared_range
from quantload.quant.scheme import parse_scheme
from quantload.quant.stored_scales import quantize_on_stored_scales

EXACT = Evaluation(torch.float64)  # codes times stored scales, nothing else rounds
SCHEMES = ["W4A16:g32", "W4A16_ASYM:g32", "W8A16:g64", "W3A16:g32", "W2A16:channel", "FP8"]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def weight_of(dtype, *, size=0.05, rows=48, columns=128):
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(rows, columns, generator=generator) * size
    weight[0] = weight[0].abs()  # no negative values: the lowest zero point
    weight[1, :32] = 0
    weight[2] *= 1000
    return weight.to(dtype)


def rounded(weight, scheme, *, scale_dtype=torch.float16, shared=None, evaluation=EXACT):
    return quantize_on_stored_scales(
        weight,
        parse_scheme(scheme).weight,
        scale_dtype=scale_dtype,
        evaluation=evaluation,
        shared=shared,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1e-9, 1e-6, 0.05, 15.0])
@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s != "FP8"])
def test_errors_stay_within_half_a_stored_step(scheme, size, dtype):
    """Within a whole one at the ends of the grid, as where rounding has no clipping to answer for.

    Also where float16 has few bits: a scale that is rounded down there would clip by far more.
    """
    weight = weight_of(dtype, size=size)
    made = rounded(weight, scheme)
    step = made.scale.double().repeat_interleave(weight.shape[1] // made.scale.shape[1], dim=1)
    error = (made.dequantize() - weight.double()).abs() / step
    is_end = (made.codes == made.grid.low) | (made.codes == made.grid.high)
    assert made.scale.dtype == torch.float16
    assert float(error[~is_end].max()) <= 0.5 + 1e-6
    assert float(error.max()) <= 1.0


def nearest_e4m3():
    bits = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return bits.double().numpy()


@pytest.mark.parametrize("scheme", ["FP8", "FP8_DYNAMIC", "FP8_BLOCK"])
def test_e4m3_codes_are_the_nearest(scheme):
    weight = weight_of(torch.bfloat16, rows=150, columns=200)
    made = rounded(weight, scheme, scale_dtype=torch.float32)
    block = made.block
    table = nearest_e4m3()
    for row, column in [(0, 0), (2, 7), (149, 199), (128, 128), (77, 130)]:
        part = weight[
            row // block[0] * block[0] : (row // block[0] + 1) * block[0],
            column // block[1] * block[1] : (column // block[1] + 1) * block[1],
        ]
        scale = np.float32(float(part.abs().max())) / np.float32(448)
        found = float(made.scale[row // block[0], column // block[1]])
        assert found == float(scale)
        wanted = abs(float(weight[row, column])) / float(scale)
        nearest = np.abs(table - wanted).min()
        assert abs(abs(float(made.codes[row, column].double())) - wanted) <= nearest * (1 + 1e-6)


def test_asymmetric_codes_equal_a_slow_reference():
    weight = weight_of(torch.float32, rows=8, columns=64)
    made = rounded(weight, "W4A16_ASYM:g32")
    for row in range(8):
        for group in range(2):
            values = weight[row, 32 * group : 32 * group + 32].numpy().astype(np.float32)
            low, high = min(values.min(), 0), max(values.max(), 0)
            scale = np.float32(np.float16((high - low) / np.float32(15))) if high > low else 2**-10
            zero = min(max(np.rint(np.float32(-8) - low / np.float32(scale)), -8), 7)
            codes = np.clip(np.rint(values / np.float32(scale) + np.float32(zero)), -8, 7)
            assert float(made.scale[row, group]) == scale
            assert int(made.zero[row, group]) == zero
            assert made.codes[row, 32 * group : 32 * group + 32].tolist() == codes.tolist()


def test_scales_of_bfloat16_models_are_bfloat16_numbers():
    """Engines cast scales to the dtype of the model: here the cast changes nothing."""
    scale = rounded(weight_of(torch.bfloat16), "W4A16:g32").scale
    assert torch.equal(scale.to(torch.bfloat16).to(torch.float16), scale)
    finer = rounded(weight_of(torch.bfloat16).to(torch.float32), "W4A16:g32").scale
    assert not torch.equal(finer.to(torch.bfloat16).to(torch.float16), finer)


@pytest.mark.parametrize("scheme", SCHEMES[:5])
def test_small_scales_are_rounded_up(scheme):
    weight = weight_of(torch.float32, size=1e-7)
    made = rounded(weight, scheme)
    exact = rounded(weight, scheme, scale_dtype=torch.float32).scale
    is_small = exact < 2.0**-14
    assert bool(is_small.any())
    assert bool((made.scale.float() >= exact)[is_small].all())


def test_zeros_get_eps_as_their_scale():
    made = rounded(torch.zeros(4, 64), "W4A16_ASYM:g32")
    assert set(made.scale.flatten().tolist()) == {torch.finfo(torch.float16).eps}
    assert not bool(made.dequantize().any())


def test_a_scale_that_overflows_float16_is_refused():
    weight = torch.full((2, 32), 1e6)
    with pytest.raises(NonFiniteWeight, match=r"2 of 2 scales .* overflow `torch.float16`"):
        rounded(weight, "W4A16:g32")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_weight_that_is_not_finite_is_refused(bad):
    weight = torch.ones(2, 32)
    weight[1, 3] = bad
    with pytest.raises(NonFiniteWeight, match="1 of 64 elements"):
        rounded(weight, "W4A16:g32")


def test_a_group_that_does_not_divide_is_refused():
    with pytest.raises(ConfigError, match="48 columns, group 32"):
        rounded(torch.ones(2, 48), "W4A16:g32")


# -- one value for the tensor ----------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["FP8", "NVFP4A16", "FP8_BLOCK"])
def test_slices_that_know_the_range_make_the_whole(scheme):
    weight = weight_of(torch.bfloat16, rows=256, columns=64)
    whole = rounded(weight, scheme, scale_dtype=torch.float32)
    shared = merged_range([shared_range(weight[:128]), shared_range(weight[128:])])
    parts = [
        rounded(part, scheme, scale_dtype=torch.float32, shared=shared)
        for part in weight.split(128)
    ]
    codes = torch.cat([part.codes.view(torch.uint8) for part in parts])
    assert torch.equal(codes, whole.codes.view(torch.uint8))
    for part in parts:
        assert part.outer is None or torch.equal(part.outer, whole.outer)


def test_a_weight_outside_of_the_shared_range_is_refused():
    weight = weight_of(torch.float32)
    with pytest.raises(ConfigError, match="the stated range"):
        rounded(weight, "FP8", shared=torch.tensor([-1e-3, 1e-3]))
    with pytest.raises(NonFiniteWeight, match="another part"):
        rounded(weight, "FP8", shared=torch.tensor([-math.inf, 1e9]))


def test_nvfp4_multiplies_by_the_scale_of_the_tensor():
    weight = weight_of(torch.bfloat16, rows=16, columns=64)
    made = rounded(weight, "NVFP4A16", evaluation=Evaluation(torch.float32))
    largest = np.float32(float(weight.abs().max()))
    outer = largest / np.float32(2688)
    assert float(made.outer) == outer
    floats = weight.float()
    for row, group in [(0, 0), (1, 0), (2, 3), (9, 2)]:
        block = floats[row, 16 * group : 16 * group + 16]
        top = np.float32(float(block.abs().max())) / (np.float32(6) * outer) or 1.0
        scale = torch.tensor(min(max(top, 2.0**-9), 448.0)).to(torch.float8_e4m3fn).float()
        assert float(made.scale[row, group].float()) == float(scale)
        step = scale * made.outer.flatten()
        error = (made.dequantize()[row, 16 * group : 16 * group + 16] - block).abs() / step
        scaled = (block / step).abs()
        gaps = torch.where(scaled > 4, 1.0, torch.where(scaled > 2, 0.5, 0.25))
        assert bool((error <= gaps + 1e-5).all())
