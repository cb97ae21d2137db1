"""Weights of one byte against a float64 oracle: in the interpreter, and (`-m gpu`) on the card.

The allowed error is the bound in the kernel's docstring, element by element: nothing is tuned.
"""

from dataclasses import dataclass

import pytest
import torch

from quantload.errors import ShapeError
from quantload.quant.grid import E2M1, E4M3, E5M2, INT4, INT8, Grid, int_grid, uint_grid
from quantload.quant.qtensor import Evaluation, QuantTensor

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
UNIT = {BF16: 2.0**-8, F16: 2.0**-11}  # largest relative error of rounding


@dataclass(frozen=True)
class Case:
    """A kind of weight; in `block`, 0 stands for all rows or columns."""

    grid: Grid
    block: tuple[int, int]
    zero: torch.dtype | None = None
    scale: torch.dtype = F32
    outer: str = ""


CASES = {
    "int8-channel": Case(INT8, (1, 0)),
    "int8-channel-zero": Case(INT8, (1, 0), zero=torch.int8),
    "int8-g128": Case(INT8, (1, 128), scale=BF16),
    "int8-g32-zero": Case(INT8, (1, 32), zero=torch.int8, scale=F16),
    "uint8-g64-zero": Case(uint_grid(8), (1, 64), zero=torch.uint8, scale=BF16),
    "uint8-tensor": Case(uint_grid(8), (0, 0)),
    "int6-g48": Case(int_grid(6), (1, 48)),
    "e4m3-tensor-outer": Case(E4M3, (0, 0), outer="value*"),
    "e4m3-block": Case(E4M3, (128, 128)),
    "e4m3-mx": Case(E4M3, (1, 32), scale=torch.float8_e8m0fnu),
    "e4m3-g64-outer": Case(E4M3, (1, 64), scale=torch.float8_e4m3fn, outer="scale/"),
    "e5m2-channel": Case(E5M2, (1, 0)),
}


def make_weight(case: Case, n: int, k: int) -> QuantTensor:
    """A random weight [n, k] whose codes take every value of the grid."""
    generator = torch.Generator().manual_seed(n + k)
    block = (case.block[0] or n, case.block[1] or k)
    shape = (-(-n // block[0]), -(-k // block[1]))
    low, high = int(case.grid.low), int(case.grid.high)
    if case.grid.is_float8:
        codes = (torch.randn((n, k), generator=generator) * 30).to(case.grid.storage)
    else:
        codes = torch.randint(low, high + 1, (n, k), generator=generator).to(case.grid.storage)
    zero = None
    if case.zero is not None:
        zero = torch.randint(low, high + 1, shape, generator=generator).to(case.zero)
    outer = torch.rand((n, 1), generator=generator) + 0.5 if case.outer else None
    return QuantTensor(
        grid=case.grid,
        codes=codes,
        scale=(torch.rand(shape, generator=generator) * 0.02 + 0.005).to(case.scale),
        block=block,
        evaluation=Evaluation(F32, case.outer or "scale*"),
        zero=zero,
        outer=outer,
    )


def oracle(weight: QuantTensor) -> torch.Tensor:
    """The weight [n, k] in float64, by the formula of QuantTensor."""
    n, k = weight.shape
    row = torch.arange(n, device=weight.device)[:, None] // weight.block[0]
    group = torch.arange(k, device=weight.device)[None, :] // weight.block[1]
    values = weight.codes.float().double()
    if weight.zero is not None:
        values = values - weight.zero.double()[row, group]
    values = values * weight.scale.float().double()[row, group]
    if weight.outer is None:
        return values
    outer = weight.outer.double()
    return values / outer if weight.evaluation.outer.endswith("/") else values * outer


def check(case: Case, m: int, n: int, k: int, dtype: torch.dtype, device, *, fused=True):
    """Multiply and compare with the bound of the kernel's docstring."""
    from quantload.runtime.kernels.byte_layout import pack, why_not_packed
    from quantload.runtime.kernels.byte_linear import byte_linear

    weight = make_weight(case, n, k).to(device)
    assert why_not_packed(weight) is None
    generator = torch.Generator().manual_seed(m)
    x = torch.randn((m, k), generator=generator).to(device, dtype)
    bias = torch.randn(n, generator=generator).to(device, dtype)
    y = byte_linear(x, pack(weight, device=device), bias)
    values = oracle(weight)
    expected = x.double() @ values.t() + bias.double()
    size = x.double().abs() @ values.abs().t() + bias.double().abs()
    allowed = size * (k * 1.1 + 8) * 2.0**-24 + expected.abs() * UNIT[dtype] * 1.01
    if not fused:
        allowed += size * UNIT[dtype] * 2
    assert y.dtype == dtype
    assert bool(((y.double() - expected).abs() <= allowed + 1e-30).all())


@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_weight(name, kernel_device):
    """Ragged rows, columns and tokens, with K cut among programs and with a weight dequantized."""
    check(CASES[name], 3, 37, 390, BF16, kernel_device)
    check(CASES[name], 2, 20, 64, F16, kernel_device)


@pytest.mark.parametrize("name", ["int8-channel-zero", "e4m3-mx"])
def test_many_tokens_take_the_dequantized_weight(name, kernel_device):
    from quantload.runtime.kernels.byte_settings import MOST_FUSED

    check(CASES[name], MOST_FUSED, 33, 70, BF16, kernel_device, fused=False)
    check(CASES[name], MOST_FUSED, 33, 70, F16, kernel_device, fused=False)
    check(CASES[name], 100, 70, 70, F16, kernel_device)


def test_k_is_cut_and_summed_in_order(kernel_device):
    from quantload.runtime.kernels.byte_layout import pack
    from quantload.runtime.kernels.byte_linear import byte_linear
    from quantload.runtime.kernels.byte_settings import card, rule

    processors, shared, _ = card(kernel_device)
    if kernel_device.type == "cpu":
        assert rule(3, 16, 2080, 64, processors, shared)["splits"] > 1
    check(CASES["int8-channel"], 3, 16, 2080, F16, kernel_device)
    packed = pack(make_weight(CASES["e4m3-block"], 16, 2080), device=kernel_device)
    x = torch.randn(3, 2080).to(kernel_device, F16)
    assert torch.equal(byte_linear(x, packed), byte_linear(x, packed))


@pytest.mark.parametrize("name", CASES)
def test_layout_keeps_every_value(name):
    from quantload.runtime.kernels.byte_layout import pack

    weight = make_weight(CASES[name], 19, 150)
    found = pack(weight, device=torch.device("cpu")).dequantize(F32).double()
    expected = oracle(weight)
    assert bool(((found - expected).abs() <= expected.abs() * 2.0**-22).all())


def test_every_code_has_its_value(kernel_device):
    """A token that is 1 in one column reads that column's codes, which no sum may round."""
    from quantload.runtime.kernels.byte_layout import pack
    from quantload.runtime.kernels.byte_linear import byte_linear

    for grid in (INT8, E4M3, E5M2):
        raw = torch.arange(256, dtype=torch.uint8)
        raw[~raw.view(grid.storage).float().isfinite()] = 0
        weight = QuantTensor(
            grid=grid,
            codes=raw[:, None].repeat(1, 32).view(grid.storage),
            scale=torch.ones(256, 1),
            block=(1, 32),
            evaluation=Evaluation(F32),
        ).to(kernel_device)
        packed = pack(weight, device=kernel_device)
        for dtype in (BF16, F16):
            x = torch.zeros(2, 32, device=kernel_device, dtype=dtype)
            x[0, 3] = x[1, 17] = 1  # one in each slice
            y = byte_linear(x, packed)
            assert torch.equal(y.float(), weight.codes[:, [3, 17]].t().float())


def test_nan_stays_in_its_row_and_column(kernel_device):
    from quantload.runtime.kernels.byte_layout import pack
    from quantload.runtime.kernels.byte_linear import byte_linear

    weight = make_weight(CASES["e4m3-mx"], 20, 70)
    weight.codes.view(torch.uint8)[7, 3] = 0xFF
    packed = pack(weight.to(kernel_device), device=kernel_device)
    x = torch.randn(4, 70).to(kernel_device, F16)
    x[1, 69], x[2, 5] = torch.nan, torch.inf
    y = byte_linear(x, packed).cpu()
    is_nan = torch.zeros(4, 20, dtype=torch.bool)
    is_nan[1], is_nan[:, 7] = True, True
    assert torch.equal(y[[0, 1, 3]].isnan(), is_nan[[0, 1, 3]])
    assert not y[2].isfinite().any()


def test_leading_axes_strides_and_no_tokens(kernel_device):
    from quantload.runtime.kernels.byte_layout import pack
    from quantload.runtime.kernels.byte_linear import byte_linear

    packed = pack(make_weight(CASES["int8-g128"], 20, 70).to(kernel_device), device=kernel_device)
    x = torch.randn(2, 3, 75).to(kernel_device, F16)[..., 5:]
    expected = byte_linear(x.contiguous(), packed)
    assert torch.equal(byte_linear(x, packed), expected)
    columns = x.reshape(6, 70).t().contiguous().t()
    assert torch.equal(byte_linear(columns, packed), expected.reshape(6, 20))
    assert byte_linear(x[:0], packed).shape == (0, 3, 20)
    with pytest.raises(ShapeError, match=r"has `7` features, the weight expects `70`"):
        byte_linear(torch.zeros(1, 7, dtype=F16, device=kernel_device), packed)


def test_reasons():
    from quantload.runtime.kernels.byte_layout import why_not_packed

    def reason(case, n=16, k=64, **parts):
        return why_not_packed(QuantTensor(**{**vars(make_weight(case, n, k)), **parts})) or ""

    assert "codes are int4" in reason(Case(INT4, (1, 0)))
    assert "codes are e2m1" in reason(Case(E2M1, (1, 0)), codes=torch.zeros(16, 64).byte())
    assert "is empty" in reason(CASES["int8-channel"], n=0)
    assert "by number" in reason(CASES["int8-channel"], group_of=torch.zeros(64).int())
    assert "factors of columns" in reason(CASES["int8-channel"], inner=torch.ones(64))
    assert "offsets" in reason(CASES["int8-channel"], offset=torch.ones(16, 1))
    assert "zero points are torch.float32" in reason(CASES["int8-channel"], zero=torch.ones(16, 1))
    assert "groups of 24 columns" in reason(Case(INT8, (1, 24)))
    infinite = torch.full((16, 64), torch.inf).to(torch.float8_e5m2)
    assert "infinite" in reason(CASES["e5m2-channel"], codes=infinite)


def test_row():
    from quantload.runtime.byte_gemm import ByteGemm

    row, weight = ByteGemm(), make_weight(CASES["int8-channel"], 16, 64)
    on_cpu = row.why_not(weight, None, device=torch.device("cpu"), dtype=BF16)
    assert on_cpu == "runs on CUDA, found `cpu`"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
@pytest.mark.parametrize("name", CASES)
def test_on_card(name, dtype, kernel_device):
    for m, n, k in ((1, 130, 144), (16, 512, 4096), (300, 257, 2050)):
        check(CASES[name], m, n, k, dtype, kernel_device)


@pytest.mark.gpu
def test_row_on_card(kernel_device):
    """The row serves, compiles into one graph, replays, and says what it launches."""
    from torch.profiler import ProfilerActivity, profile

    from quantload.runtime.byte_gemm import ByteGemm

    row, weight = ByteGemm(), make_weight(CASES["e4m3-block"], 256, 512)
    assert row.why_not(weight, None, device=kernel_device, dtype=BF16) is None
    assert "float32" in (row.why_not(weight, None, device=kernel_device, dtype=F32) or "")
    module = row.pack(weight, None, device=kernel_device, dtype=BF16)
    x = torch.randn(4, 512, device=kernel_device, dtype=BF16)
    expected = module(x)
    compiled = torch.compile(module, fullgraph=True)
    with torch.inference_mode():
        assert torch.equal(compiled(x), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = module(x)
    y.fill_(torch.nan)
    graph.replay()
    assert torch.equal(y, expected)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as record:
        module(x)
        torch.cuda.synchronize()
    names = {event.key for event in record.key_averages()}
    assert set(module.kernels_for(4)) <= names
    weight_values = module.weight_values(F32).double()
    assert torch.allclose(weight_values, oracle(weight.to(kernel_device)), rtol=1e-6)
