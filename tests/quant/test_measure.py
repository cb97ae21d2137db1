"""The compiled loop measures what plain tensor arithmetic does."""

from dataclasses import replace

import pytest
import torch

from quantload.quant import compiled
from quantload.quant import measure as module
from quantload.quant.grid import E2M1, E4M3, INT4, INT8
from quantload.quant.rtn import quantize_rtn
from quantload.quant.scheme import parse_scheme
from quantload.quant.steps import code_table

SCHEMES = [
    *("W4A16:g32", "W4A16_ASYM:g32", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK", "FP8"),
    *("NVFP4A16", "MXFP4A16", "MXFP8A16", "MXFP6A16"),
]


def _weight(dtype):
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(130, 192, generator=generator) * 0.05
    weight[3, 5], weight[9] = 2.0, 0.0
    return weight.to(dtype)


@pytest.mark.parametrize("nearest", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", SCHEMES)
def test_both_ways_agree(name, dtype, nearest):
    compiled.start()
    weight = _weight(dtype)
    part = quantize_rtn(weight, parse_scheme(name).weight)
    damaged = replace(part, scale=part.scale.clone())
    damaged.scale.view(torch.uint8)[0, :2] ^= 1  # of a float the lowest bits; of an e8m0 a factor
    for candidate in (part, damaged):
        arguments = candidate, candidate.dequantize(), weight, dtype
        one = module._measure_compiled(*arguments, nearest=nearest)
        two = module._measure_plainly(*arguments, nearest=nearest)
        assert one is not None
        assert torch.equal(one.beyond, two.beyond)
        torch.testing.assert_close(one.noise, two.noise, rtol=1e-6, atol=0)
        torch.testing.assert_close(one.rounding, two.rounding, rtol=1e-6, atol=0)
        assert one.block_excess == pytest.approx(two.block_excess, rel=1e-6)
        torch.testing.assert_close(one.signals, two.signals, rtol=1e-6, atol=0)
        assert (one.max_abs, one.count) == (two.max_abs, two.count)
        assert one.max_steps == pytest.approx(two.max_steps, rel=1e-6)
    assert int(part.codes.numel()) == one.count


def test_values_that_are_not_finite_are_not_measured():
    compiled.start()
    weight = _weight(torch.bfloat16)
    part = quantize_rtn(weight, parse_scheme("W8A8").weight)
    part.scale[4] = float("nan")
    assert module.measure(part, part.dequantize(), weight, nearest=True) is None


def test_half_steps_by_hand():
    table = code_table(E2M1)
    assert table.values[:8].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert table.half_steps[:8].tolist() == [0.25, 0.25, 0.25, 0.25, 0.5, 0.5, 1, 1]
    assert table.is_end[:16].nonzero().flatten().tolist() == [7, 15]
    assert set(code_table(INT8).half_steps.tolist()) == {0.5}
    ends = code_table(INT4).values[code_table(INT4).is_end]
    assert sorted(set(ends.tolist())) == [-8, 7]
    fp8 = code_table(E4M3)
    assert fp8.values[0x7E] == 448
    assert fp8.half_steps[0x7E] == 16
    assert fp8.half_steps[0x01] == 2**-10
