"""Products of rounded inputs against float64: in the interpreter, and (`-m gpu`) on the card.

The oracle multiplies, in float64, what the codes and scales of both sides stand for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from quantload.errors import ShapeError
from quantload.quant.grid import E4M3, INT4, INT8, Grid
from quantload.quant.qtensor import Evaluation, QuantTensor
from quantload.quant.scheme import InputScheme

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
UNIT = {BF16: 2.0**-8, F16: 2.0**-11, F32: 2.0**-23}


@dataclass(frozen=True)
class Case:
    """Block (0: all rows, all columns), kind of input, and what else a weight has."""

    grid: Grid
    block: tuple[int, int]
    input: InputScheme
    outer: str = ""
    scale: torch.dtype = F32


def tokens(grid: Grid, **more: object) -> InputScheme:
    return InputScheme(grid=grid, granularity="token", **more)  # type: ignore[arg-type]


def groups(size: int, **more: object) -> InputScheme:
    return InputScheme(grid=E4M3, granularity="group", group_size=size, **more)  # type: ignore[arg-type]


CASES = {
    "int8-channel": Case(INT8, (1, 0), tokens(INT8)),
    "int8-channel-zeros": Case(INT8, (1, 0), tokens(INT8, symmetric=False), scale=BF16),
    "int8-tensor": Case(INT8, (0, 0), replace(tokens(INT8), granularity="tensor")),
    "e4m3-channel": Case(E4M3, (1, 0), tokens(E4M3), scale=BF16),
    "e4m3-tensor": Case(E4M3, (0, 0), replace(tokens(E4M3), granularity="tensor")),
    "e4m3-outer": Case(E4M3, (0, 0), tokens(E4M3), outer="value*"),
    "e4m3-outer-divisor": Case(E4M3, (1, 0), tokens(E4M3), outer="scale/"),
    "e4m3-block": Case(E4M3, (128, 128), groups(128)),
    "e4m3-block-40": Case(E4M3, (40, 128), groups(128), scale=BF16),
    "e4m3-block-outer": Case(E4M3, (128, 128), groups(128), outer="value*"),
    "mxfp8": Case(E4M3, (1, 32), groups(32, scale="e8m0"), scale=torch.float8_e8m0fnu),
}


def make_weight(case: Case, n: int, k: int, seed: int = 0) -> QuantTensor:
    generator = torch.Generator().manual_seed(seed)
    block = (case.block[0] or n, case.block[1] or k)
    shape = (-(-n // block[0]), -(-k // block[1]))
    if case.grid is INT8:
        codes = torch.randint(-128, 128, (n, k), generator=generator).to(torch.int8)
    else:
        codes = (torch.randn(n, k, generator=generator) * 100).clamp(-448, 448).to(E4M3.storage)
    scale = torch.rand(shape, generator=generator) * 0.02 + 0.001
    if case.scale == torch.float8_e8m0fnu:
        scale = torch.exp2(torch.randint(-9, -4, shape, generator=generator).float())
    outer = torch.rand(n, 1, generator=generator) + 0.5 if case.outer else None
    use = case.outer or "scale*"
    evaluation = Evaluation(dtype=F32, outer=use, result=None)  # type: ignore[arg-type]
    return QuantTensor(
        grid=case.grid, codes=codes, scale=scale.to(case.scale), block=block, outer=outer,
        evaluation=evaluation,
    )  # fmt: skip


def weight_values(weight: QuantTensor) -> Tensor:
    """[N, K] float64, nothing rounded on its way."""
    return replace(weight, evaluation=replace(weight.evaluation, dtype=torch.float64)).dequantize()


def input_values(codes: Tensor, scales: Tensor, size: int) -> Tensor:
    """[M, K] float64, what codes and scales of an input stand for."""
    values, scales = codes.double(), scales.double()
    if size:
        return values * scales.repeat_interleave(size, dim=1)[:, : codes.shape[1]]
    if scales.ndim == 2 and scales.shape[1] == 2:
        return (values - scales[:, 1:]) * scales[:, :1]
    return values * scales


def product(case: Case, x: Tensor, weight: QuantTensor, bias: Tensor | None, device):
    """The kernel's result, the exact one, and the sum of |terms|."""
    from quantload.runtime.kernels.quantize_rows import quantize_rows
    from quantload.runtime.kernels.rounded import pack, rounded_linear

    packed = pack(weight, case.input, device=device)
    on_device = None if bias is None else bias.to(device)
    y = rounded_linear(x.to(device), packed, case.input, on_device).cpu()
    rows = x.reshape(-1, x.shape[-1])
    codes, scales = (part.cpu() for part in quantize_rows(rows.to(device), case.input))
    size = case.input.group_size or 0
    values, w = input_values(codes, scales, size), weight_values(weight)
    exact = values @ w.T + (0.0 if bias is None else bias.double())
    size_of = values.abs() @ w.abs().T
    if case.grid is INT8 and scales.ndim == 2 and scales.shape[1] == 2:
        # zero points leave what products of codes add up to before they are taken away
        size_of = codes.double().abs() * scales[:, :1].double() @ w.abs().T + size_of
    return y, exact.reshape(y.shape), size_of.reshape(y.shape)


def check(y: Tensor, exact: Tensor, size: Tensor, *, integers: bool) -> None:
    """FP8 sums within 2^-12 of the sum of |terms|, int8 sums exact, then rounded to y's dtype."""
    allowed = exact.abs() * (UNIT[y.dtype] + 2.0**-20) + size * (2.0**-22 if integers else 2.0**-12)
    assert y.isfinite().all()
    assert ((y.double() - exact).abs() <= allowed + 1e-30).all()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, BF16) for name in CASES]
    + [(name, dtype) for name in ("int8-channel-zeros", "e4m3-block") for dtype in (F16, F32)],
    ids=str,
)
def test_products_are_those_of_float64(name, dtype, kernel_device) -> None:
    case = CASES[name]
    # ragged, and so long that K is cut among programs
    shapes = ((3, 40, 144),) if dtype != BF16 else ((2, 40, 1040), (17, 72, 130))
    for m, n, k in shapes:
        x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(dtype)
        bias = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)
        weight = make_weight(case, n, k)
        y, exact, size = product(case, x, weight, bias if m != 17 else None, kernel_device)
        assert y.dtype == dtype
        check(y, exact, size, integers=case.grid is INT8)
