"""Scales of blocks, bit for bit against compressed-tensors on every number of 16 bits."""

import compressed
import pytest
import torch
from oracles import e8m0_values, same_bits

from quantload.quant.grid import E2M1, E2M3, E4M3
from quantload.quant.rtn import quantize_rtn
from quantload.quant.scales import (
    e4m3_scale,
    global_scale,
    merged_range,
    power_of_two_scale,
    shared_range,
)
from quantload.quant.scheme import parse_scheme

BELOW = 0.0411  # largest float16 magnitudes whose global scale overflows float16
HALF = (torch.float16, torch.bfloat16)
PRESETS = {"e2m1": "MXFP4A16", "e2m3": "MXFP6A16", "e4m3": "MXFP8A16"}


def magnitudes(dtype):
    """Every finite number from 0 on as [R, 1]; of float32 those beside every power of two."""
    if dtype in HALF:
        numbers = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    else:
        fields = torch.arange(255, dtype=torch.int32)[:, None] << 23
        parts = torch.tensor([0.0, 0.25, 0.5, 0.75, 0.875, 0.9375, 1.0]) * 2**23
        beside = torch.arange(-2, 3, dtype=torch.int32)
        places = (parts.to(torch.int32)[:, None] + beside).reshape(-1)
        numbers = (fields + places).clamp(0).reshape(-1).view(dtype)
    return numbers[numbers.isfinite()][:, None]


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("grid", [E2M1, E2M3, E4M3])
def test_powers_of_two_equal_compressed_tensors(grid, dtype):
    largest = magnitudes(dtype)
    args = compressed.preset(PRESETS[grid.name]).weights
    scale, _ = compressed.library().calculate_qparams(-largest, largest, args)
    stored, ours = power_of_two_scale(largest, grid)
    finite = scale.isfinite()
    assert same_bits(ours[finite], scale[finite])
    assert ours.isnan().tolist() == (~finite).tolist()
    means = torch.from_numpy(e8m0_values())[stored.view(torch.uint8).long()]
    assert torch.equal(means[finite].to(dtype), scale[finite])
    assert means[~finite].isnan().all()


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf])
def test_what_is_not_finite_has_no_power_of_two(dtype, bad):
    stored, scale = power_of_two_scale(torch.tensor([[bad, 1.0]], dtype=dtype), E2M1)
    assert scale.isnan().tolist() == [[True, False]]
    assert stored.view(torch.uint8).tolist() == [[255, 125]]


def test_nan_of_any_bits_has_no_power_of_two():
    bits = torch.arange(0x7F80, 0x8000, dtype=torch.int32).to(torch.int16)
    assert power_of_two_scale(bits.view(torch.bfloat16)[:, None], E2M1)[1].isnan().all()


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
def test_global_scales_equal_compressed_tensors(dtype):
    for largest in magnitudes(dtype)[::61].reshape(-1, 1):
        if dtype == torch.float16 and 0 < float(largest) < BELOW:
            continue  # where the original overflows and takes 1
        expected = compressed.library().generate_gparam(-largest, largest)
        assert same_bits(global_scale(torch.cat([-largest, largest])), expected)


def test_a_global_scale_beyond_float16_is_no_one():
    """compressed-tensors takes 1, and with it every weight becomes zero."""
    every = magnitudes(torch.float16).flatten()
    for largest in every[(every > 0) & (every < BELOW)].reshape(-1, 1)[::61]:
        shared = torch.cat([-largest / 2, largest])
        assert compressed.library().generate_gparam(-largest, largest).tolist() == [1.0]
        assert global_scale(shared).tolist() == pytest.approx([2688 / float(largest)], rel=1e-6)
        assert same_bits(global_scale(-shared.flip(0)), global_scale(shared))
    inside = every[every >= BELOW].reshape(-1, 1)[:2]
    for largest in inside:
        assert compressed.library().generate_gparam(-largest, largest).tolist() != [1.0]
    assert global_scale(torch.zeros(2, dtype=torch.float16)).tolist() == [1.0]


@pytest.mark.parametrize("size", [1e-3, 3e-5])
def test_small_float16_weights_survive_nvfp4(size):
    weight = (torch.randn(64, 128, generator=torch.Generator().manual_seed(1)) * size).half()
    read = quantize_rtn(weight, parse_scheme("NVFP4A16").weight).dequantize().float()
    noise, signal = (read - weight.float()).square().mean(), weight.float().square().mean()
    assert float(noise / signal) < 0.02


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("outer", [1.0, 384.0, 3.1e-5, 2.7e30])
def test_e4m3_scales_equal_compressed_tensors(dtype, outer):
    largest, args = magnitudes(dtype), compressed.preset("NVFP4A16").weights
    divisor = torch.tensor([outer])
    scale, _ = compressed.library().calculate_qparams(-largest, largest, args, divisor)
    ours = e4m3_scale(largest, E2M1, divisor)
    assert ours.dtype == torch.float8_e4m3fn
    assert same_bits(ours.to(torch.float32), scale)


def test_ranges():
    weight = torch.randn(7, 9)
    assert shared_range(weight).tolist() == [weight.min().item(), weight.max().item()]
    parts = [shared_range(weight[:3]), shared_range(weight[3:])]
    assert same_bits(merged_range(parts), shared_range(weight))
    weight[2, 2] = torch.nan
    assert shared_range(weight).isnan().all()
    assert merged_range([torch.tensor([-1.0, torch.nan]), torch.zeros(2)])[1].isnan()
