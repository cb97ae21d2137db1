"""The quantization kernels against `quant.activation`: codes and scales are equal, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantload.errors import ConfigError
from quantload.quant.activation import _as_weight_scheme, fake_quantize_static
from quantload.quant.grid import E2M1, E4M3, INT8
from quantload.quant.rtn import as_blocks, scaled_blocks
from quantload.quant.scales import block_scales
from quantload.quant.scheme import InputScheme

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SCHEMES = {
    "int8-token": InputScheme(grid=INT8, granularity="token"),
    "int8-token-zeros": InputScheme(grid=INT8, granularity="token", symmetric=False),
    "int8-tensor": InputScheme(grid=INT8, granularity="tensor"),
    "e4m3-token": InputScheme(grid=E4M3, granularity="token"),
    "e4m3-tensor": InputScheme(grid=E4M3, granularity="tensor"),
    "e4m3-g128": InputScheme(grid=E4M3, granularity="group", group_size=128),
    "e4m3-g64": InputScheme(grid=E4M3, granularity="group", group_size=64),
    "mxfp8": InputScheme(grid=E4M3, granularity="group", group_size=32, scale="e8m0"),
}


def make_input(m: int, k: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Numbers of many magnitudes, rows of zeros, signed zeros, ties and subnormals."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator)
    x *= torch.exp2(torch.randint(-12, 6, (m, 1), generator=generator).float())
    x[0] = 0.0
    x[1, ::3] = -0.0
    x[2 % m] *= 1e-6 if dtype != BF16 else 1e-37
    if m > 3:
        x[3, : k // 2] = (torch.arange(k // 2) - k // 4) / 16.0  # ties
        x[3, -1] = 448.0
    return x.to(dtype)


def expected(x: Tensor, scheme: InputScheme) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes [M, K], scales [., G] in x's dtype, zero points, with torch's operations."""
    weight = _as_weight_scheme(scheme)
    blocks = as_blocks(x, weight.block_of(*x.shape))
    scales = block_scales(blocks, weight, shared=None, outer=None)
    codes = scheme.grid.round(scaled_blocks(blocks, scales.divisor, scales.zero, scheme.grid))
    return codes.flatten(2).flatten(0, 1)[:, : x.shape[1]], scales.divisor, scales.zero


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("name", SCHEMES)
def test_codes_and_scales_are_those_of_torch(name, dtype, kernel_device) -> None:
    from quantload.runtime.kernels.quantize_rows import quantize_rows

    scheme = SCHEMES[name]
    for m, k in ((4, 200), (1, 96)):
        x = make_input(m, k, dtype) if m > 1 else make_input(3, k, dtype)[1:2]
        codes, scales = quantize_rows(x.to(kernel_device), scheme)
        codes, scales = codes.cpu(), scales.cpu()
        wanted, divisor, zero = expected(x, scheme)
        if scheme.granularity == "tensor":
            divisor = divisor.reshape(1)
        if zero is not None:
            divisor = torch.cat([divisor.float(), zero.float()], dim=1)
        assert codes.dtype == scheme.grid.storage
        assert scales.dtype == F32
        assert torch.equal(scales, divisor.float())
        assert torch.equal(codes.view(torch.int8), wanted.view(torch.int8))


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy, of what is not finite
@pytest.mark.parametrize("name", ["int8-token", "e4m3-token", "e4m3-g128", "mxfp8", "int8-tensor"])
def test_not_finite_rows_do_not_reach_others(name, kernel_device) -> None:
    from quantload.runtime.kernels.quantize_rows import quantize_rows

    scheme = SCHEMES[name]
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(3)).to(BF16)
    damaged = x.clone()
    damaged[1, 7], damaged[2, 200] = float("nan"), float("-inf")
    codes, scales = (part.cpu() for part in quantize_rows(damaged.to(kernel_device), scheme))
    if scheme.granularity == "tensor":
        assert not scales.isfinite().any()
        return
    wanted, divisor, _ = expected(x, scheme)
    for row in (0, 3):
        assert torch.equal(codes[row].view(torch.int8), wanted[row].view(torch.int8))
        assert torch.equal(scales[row], divisor[row].float())
    spoilt = ~scales.isfinite()
    count = spoilt.shape[1]
    assert spoilt.tolist() == [
        [False] * count,
        [group == 7 * count // 256 for group in range(count)],
        [group == 200 * count // 256 for group in range(count)],
        [False] * count,
    ]


@pytest.mark.filterwarnings("ignore:overflow")  # numpy, of what is clipped
@pytest.mark.parametrize("scale_dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("grid", [INT8, E4M3], ids=lambda grid: grid.name)
def test_static_codes_are_those_of_torch(grid, scale_dtype, kernel_device) -> None:
    from quantload.runtime.kernels.quantize_rows import quantize_static

    scheme = InputScheme(grid=grid, granularity="tensor", dynamic=False)
    x = make_input(5, 200, BF16)
    x[4, :3] = torch.tensor([float("inf"), float("-inf"), 3e38])
    scale = torch.tensor([0.0137]).to(scale_dtype)
    for zero in (None, torch.tensor([-3], dtype=torch.int8)) if grid is INT8 else (None,):
        on_device = None if zero is None else zero.to(kernel_device)
        codes = quantize_static(x.to(kernel_device), scheme, scale.to(kernel_device), on_device)
        scaled = x / scale
        wanted = grid.round(scaled if zero is None else scaled + zero.to(scaled.dtype))
        assert torch.equal(codes.cpu().view(torch.int8), wanted.view(torch.int8))
        values = codes.cpu().float() - (0 if zero is None else zero.float())
        assert torch.equal((values * scale).to(BF16), fake_quantize_static(x, grid, scale, zero))


@pytest.mark.parametrize("name", ["int8-token", "e4m3-token", "e4m3-tensor"])
def test_a_given_reach_is_that_of_the_whole_row(name, kernel_device) -> None:
    from quantload.runtime.kernels.quantize_rows import quantize_rows, rows_reach

    scheme, x = SCHEMES[name], make_input(4, 256, BF16)
    reach = rows_reach(x.to(kernel_device))
    assert torch.equal(reach.cpu(), x.abs().amax(dim=1).float())
    reach = reach.amax(dim=0, keepdim=True) if scheme.granularity == "tensor" else reach
    left = x[:, :96].to(kernel_device)  # rows of a wider tensor
    codes, scales = quantize_rows(left, scheme, reach=reach)
    whole, whole_scales = quantize_rows(x.to(kernel_device), scheme)
    assert torch.equal(codes.cpu().view(torch.int8), whole[:, :96].cpu().view(torch.int8))
    assert torch.equal(scales.cpu(), whole_scales.cpu())


def test_rows_wider_than_a_program_holds(kernel_device, monkeypatch) -> None:
    from quantload.runtime.kernels import quantize_rows as module

    monkeypatch.setattr(module, "_WIDEST", 64)
    for name in ("e4m3-token", "int8-token-zeros"):
        x = make_input(4, 200, BF16)
        codes, scales = module.quantize_rows(x.to(kernel_device), SCHEMES[name])
        wanted, divisor, _ = expected(x, SCHEMES[name])
        assert torch.equal(codes.cpu().view(torch.int8), wanted.view(torch.int8))
        assert torch.equal(scales.cpu()[:, :1], divisor.float())


def test_empty_inputs_and_columns(kernel_device) -> None:
    from quantload.runtime.kernels.quantize_rows import quantize_rows

    codes, scales = quantize_rows(torch.empty(0, 64, device=kernel_device), SCHEMES["e4m3-g64"])
    assert (codes.shape, scales.shape) == ((0, 64), (0, 1))


def test_refusals(kernel_device) -> None:
    from quantload.runtime.kernels.quantize_rows import quantize_rows, why_not

    nvfp4 = InputScheme(grid=E2M1, granularity="group", group_size=16, scale="e4m3")
    assert "found `e2m1`" in why_not(nvfp4, BF16)
    assert "zero points" in why_not(
        InputScheme(grid=E4M3, granularity="token", symmetric=False), BF16
    )
    assert "float64" in why_not(SCHEMES["int8-token"], torch.float64)
    odd = InputScheme(grid=E4M3, granularity="group", group_size=48)
    assert "found 48" in why_not(odd, BF16)
    static = InputScheme(grid=E4M3, granularity="tensor", dynamic=False)
    with pytest.raises(ConfigError, match="from the checkpoint"):
        quantize_rows(torch.zeros(1, 64, device=kernel_device), static)


@pytest.mark.parametrize("name", ["e4m3-token", "int8-token-zeros", "e4m3-tensor"])
def test_programs_share_a_long_row(name, kernel_device) -> None:
    from quantload.runtime.kernels.quantize_rows import quantize_rows

    x = make_input(3, 2100, BF16)
    codes, scales = quantize_rows(x.to(kernel_device), SCHEMES[name])
    wanted, divisor, _ = expected(x, SCHEMES[name])
    assert torch.equal(codes.cpu().view(torch.int8), wanted.view(torch.int8))
    found = scales.cpu()[:, 0] if scales.ndim == 2 else scales.cpu()
    assert torch.equal(found, divisor.float().flatten())


def test_scales_of_a_group_lie_side_by_side(kernel_device) -> None:
    from quantload.runtime.kernels.quantize_rows import quantize_rows

    scheme = SCHEMES["e4m3-g128"]
    x = torch.randn(5, 300, generator=torch.Generator().manual_seed(0)).to(kernel_device)
    codes, scales = quantize_rows(x, scheme)
    same, ordered = quantize_rows(x, scheme, by_group=True)
    assert ordered.stride() == (1, 5)
    assert torch.equal(ordered, scales)
    assert torch.equal(same.view(torch.int8), codes.view(torch.int8))
