"""Signed errors in steps, and codes, counted by hand, by NumPy and by the compiled loop."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from quantload.quant import compiled
from quantload.quant import step_errors as module
from quantload.quant.grid import E2M1, E4M3, INT4, INT8, uint_grid
from quantload.quant.qtensor import Evaluation, QuantTensor
from quantload.quant.rtn import quantize_rtn
from quantload.quant.scheme import parse_scheme
from quantload.quant.step_errors import num_values, step_errors

SCHEMES = [
    *("W4A16:g32", "W4A16_ASYM:g32", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK", "FP8"),
    *("NVFP4A16", "MXFP4A16", "MXFP8A16", "MXFP6A16"),
]


def _weight():
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(130, 192, generator=generator) * 0.05
    weight[3, 5], weight[9] = 2.0, 0.0
    return weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", SCHEMES)
def test_both_ways_agree(name, dtype):
    compiled.start()
    weight = _weight().to(dtype)
    part = quantize_rtn(weight, parse_scheme(name).weight)
    damaged = replace(part, scale=part.scale.clone())
    damaged.scale.view(torch.uint8)[0, :2] ^= 1
    for candidate in (part, damaged):
        arguments = candidate, candidate.dequantize(), weight
        one = module._count_compiled(*arguments)
        two = module._count_plainly(*arguments)
        assert one is not None
        assert torch.equal(one[1], two[1])
        assert int(one[0].sum()) == weight.numel()
        # float32 scales here and there: an error at the edge of a bin may be in the next one
        assert int((one[0] - two[0]).abs().sum()) <= 2 * weight.numel() // 1000
        assert one[2] == pytest.approx(two[2], abs=1e-3)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_counts_are_those_of_numpy(is_compiled, monkeypatch):
    """Oracle: NumPy's histogram of (value - weight) / scale."""
    compiled.start()
    if not is_compiled:
        monkeypatch.setattr(module, "_count_compiled", lambda *_: None)
    generator = np.random.default_rng(3)
    weight = generator.normal(size=(64, 96)).astype(np.float32)
    codes = generator.integers(-8, 8, size=(64, 96)).astype(np.int8)
    scale = generator.uniform(0.05, 3, size=(64, 3)).astype(np.float32)
    part = QuantTensor(
        grid=INT4,
        codes=torch.from_numpy(codes),
        scale=torch.from_numpy(scale),
        block=(1, 32),
        evaluation=Evaluation(torch.float32),
    )
    spread = np.repeat(scale, 32, axis=1)
    steps = ((codes * spread).astype(np.float64) - weight) / spread
    edges = np.concatenate([[-np.inf], np.arange(-20, 21) / 20, [np.inf]])
    found = step_errors(part, part.dequantize(), torch.from_numpy(weight))
    assert found.bins.tolist() == np.histogram(steps, edges)[0].tolist()
    assert found.bias == pytest.approx(steps.mean(), rel=1e-9)
    by_code = {code: int((codes == code).sum()) for code in range(-8, 8)}
    assert {code: int(found.codes[code % 256]) for code in range(-8, 8)} == by_code
    at_ends = by_code[-8] + by_code[-7] + by_code[7]
    assert found.rail_share(INT4) == pytest.approx(at_ends / codes.size)
    assert found.num_used(INT4) == 16


def _by_hand(codes, *, zero=None, grid=INT4):
    count = len(codes)
    return QuantTensor(
        grid=grid,
        codes=torch.tensor([codes]).to(grid.storage),
        scale=torch.full((1, 1), 0.5),
        zero=None if zero is None else torch.tensor([[zero]]),
        block=(1, count),
        evaluation=Evaluation(torch.float32),
    )


def test_bins_and_bias_by_hand():
    part = _by_hand([0, 1, 2, 7])  # 0, 0.5, 1, 3.5
    weight = torch.tensor([[0.0, 0.25, 2.0, 0.0]])  # errors in steps 0, 0.5, -2, 7
    found = step_errors(part, part.dequantize(), weight)
    places = {place: count for place, count in enumerate(found.bins.tolist()) if count}
    assert places == {0: 1, 21: 1, 31: 1, 41: 1}
    assert found.bias == pytest.approx((0.5 - 2 + 7) / 4)
    assert (found + found).bins.tolist() == [2 * count for count in found.bins.tolist()]
    assert (found + found).bias == found.bias


def test_a_step_of_zero():
    part = replace(_by_hand([1, 1]), scale=torch.zeros(1, 1))
    found = step_errors(part, part.dequantize(), torch.tensor([[0.0, 3.0]]))
    assert found.bins.tolist()[0] == 1  # 3 was lost, and is infinitely many steps away
    assert found.bins.tolist()[21] == 1
    assert found.bias == -torch.inf


def test_rails_around_a_fixed_zero_point():
    """4-bit codes stored with 8 in the middle: 1 stands for -7, 15 for 7."""
    codes, grid = [0, 1, 8, 14, 15], uint_grid(4)
    part = _by_hand(codes, zero=8, grid=grid)
    assert step_errors(part, part.dequantize(), part.dequantize()).rail_share(grid) == 3 / 5
    moving = replace(
        part,
        codes=part.codes.repeat(2, 1),
        scale=part.scale.repeat(2, 1),
        zero=torch.tensor([[8], [3]]),
    )
    found = step_errors(moving, moving.dequantize(), moving.dequantize())
    assert found.rail_share(grid) == 2 / 5


def test_values_of_grids():
    assert num_values(INT4) == 16
    assert num_values(INT8) == 256
    assert num_values(E2M1) == 15  # 0 and -0 are one value
    assert num_values(E4M3) == 253  # likewise, and two codes are NaN
