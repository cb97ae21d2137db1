"""W4A8 against a float64 oracle: in the interpreter, and (`-m gpu`) on the card.

Sums of int8 products are exact, those of e4m3 nearly so: allowed is the rounding of the float32
sums and of the result, and for e4m3 what the tensor core's short additions lose.
"""

from dataclasses import dataclass

import pytest
import torch

from quantload.errors import ShapeError
from quantload.quant.grid import E2M1, E4M3, E5M2, INT4, INT8, Grid, int_grid, uint_grid
from quantload.quant.qtensor import Evaluation, QuantTensor
from quantload.quant.scheme import InputScheme

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
UNIT = {BF16: 2.0**-8, F16: 2.0**-11}  # largest relative error of rounding
TOKENS = {
    "int8": InputScheme(grid=INT8, granularity="token"),
    "e4m3": InputScheme(grid=E4M3, granularity="token"),
}


@dataclass(frozen=True)
class Case:
    """A kind of weight and of input; in `group`, 0 stands for all columns."""

    grid: Grid
    group: int
    input: str
    scale: torch.dtype = F32
    outer: bool = False


CASES = {
    "int4-g128-int8": Case(INT4, 128, "int8", BF16),
    "int4-channel-int8": Case(INT4, 0, "int8"),
    "int4-g32-int8": Case(INT4, 32, "int8", F16, outer=True),
    "int3-g96-int8": Case(int_grid(3), 96, "int8"),
    "int4-g128-e4m3": Case(INT4, 128, "e4m3", BF16),
    "int4-channel-e4m3": Case(INT4, 0, "e4m3", outer=True),
    "int4-g32-e4m3": Case(INT4, 32, "e4m3", F16),
    "e2m1-g32-e4m3": Case(E2M1, 32, "e4m3", torch.float8_e8m0fnu),
}


def make_weight(case: Case, n: int, k: int) -> QuantTensor:
    """A random weight [n, k] whose codes take every value of the grid."""
    generator = torch.Generator().manual_seed(n + k)
    group = case.group or k
    shape = (n, -(-k // group))
    low, high = (0, 15) if case.grid.table else (int(case.grid.low), int(case.grid.high))
    codes = torch.randint(low, high + 1, (n, k), generator=generator).to(case.grid.storage)
    return QuantTensor(
        grid=case.grid,
        codes=codes,
        scale=(torch.rand(shape, generator=generator) * 0.02 + 0.005).to(case.scale),
        block=(1, group),
        evaluation=Evaluation(F32),
        outer=torch.rand((n, 1), generator=generator) + 0.5 if case.outer else None,
    )


def oracle(weight: QuantTensor) -> torch.Tensor:
    """The weight [n, k] in float64, by the formula of QuantTensor."""
    group = torch.arange(weight.shape[1], device=weight.device) // weight.block[1]
    if weight.grid.table is None:
        values = weight.codes.double()
    else:
        table = torch.tensor(weight.grid.table, dtype=torch.float64, device=weight.device)
        values = table[weight.codes.long()]
    values = values * weight.scale.float().double()[:, group]
    return values if weight.outer is None else values * weight.outer.double()


def rounded_input(case: Case, m: int, k: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [m, k] that reach the ends of the grid, and scales [m, 1]."""
    generator = torch.Generator().manual_seed(m)
    x = torch.randn((m, k), generator=generator)
    scale = x.abs().amax(1, keepdim=True) / (448 if case.input == "e4m3" else 127)
    codes = x / scale
    codes = codes.to(E4M3.storage) if case.input == "e4m3" else codes.round().to(torch.int8)
    return codes.to(device), scale.to(device)


def check(case: Case, m: int, n: int, k: int, dtype: torch.dtype, device, *, fused=True):
    """Multiply and compare, element by element."""
    from quantload.runtime.kernels.nibble_rounded import nibble_rounded_linear
    from quantload.runtime.kernels.nibble_rounded_layout import pack, why_not_packed

    weight, floats = make_weight(case, n, k).to(device), case.input == "e4m3"
    assert why_not_packed(weight, floats=floats) is None
    codes, scales = rounded_input(case, m, k, device)
    bias = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(device, dtype)
    packed = pack(weight, floats=floats, device=device)
    y = nibble_rounded_linear(codes, scales, packed, bias, dtype=dtype)
    x, values = codes.float().double() * scales.double(), oracle(weight)
    expected = x @ values.t() + bias.double()
    size = x.abs() @ values.abs().t() + bias.double().abs()
    allowed = size * (k / 16 + 16) * 2.0**-24 + expected.abs() * UNIT[dtype] * 1.01
    if not fused:
        allowed += size * UNIT[dtype] * 3
    if floats and device.type == "cuda":
        allowed += size * 2.0**-9
    assert y.dtype == dtype
    assert bool(((y.double() - expected).abs() <= allowed + 1e-30).all())


@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_weight(name, kernel_device):
    check(CASES[name], 3, 37, 390, BF16, kernel_device)
    check(CASES[name], 2, 20, 64, F16, kernel_device)


@pytest.mark.parametrize("name", ["int4-g128-int8", "int4-g32-e4m3", "e2m1-g32-e4m3"])
def test_many_tokens_take_the_dequantized_weight(name, kernel_device):
    from quantload.runtime.kernels.nibble_rounded_settings import MOST_FUSED

    check(CASES[name], MOST_FUSED, 33, 70, BF16, kernel_device, fused=False)
    check(CASES[name], 70, 70, 70, F16, kernel_device)


def test_k_is_cut_and_summed_in_order(kernel_device):
    from quantload.runtime.kernels.byte_settings import card
    from quantload.runtime.kernels.nibble_rounded_settings import rule

    processors, shared, _ = card(kernel_device)
    if kernel_device.type == "cpu":
        assert rule("int", 3, 16, 2080, 64, processors, shared)["splits"] > 1
    check(CASES["int4-g128-int8"], 3, 16, 2080, F16, kernel_device)
    check(CASES["int4-channel-int8"], 3, 16, 2080, F16, kernel_device)


@pytest.mark.parametrize("name", CASES)
def test_layout_keeps_every_value(name):
    from quantload.runtime.kernels.nibble_rounded_layout import pack

    weight = make_weight(CASES[name], 19, 150)
    packed = pack(weight, floats=CASES[name].input == "e4m3", device=torch.device("cpu"))
    expected = oracle(weight)
    found = packed.dequantize(F32).double()
    assert bool(((found - expected).abs() <= expected.abs() * 2.0**-22).all())


def test_every_code_has_its_value(kernel_device):
    """A token that is 1 in one column reads that column's codes."""
    from quantload.runtime.kernels.nibble_rounded import nibble_rounded_linear
    from quantload.runtime.kernels.nibble_rounded_layout import pack

    for grid, storage in ((INT4, torch.int8), (INT4, E4M3.storage), (E2M1, E4M3.storage)):
        codes = torch.arange(16) if grid is E2M1 else torch.arange(-8, 8)
        weight = QuantTensor(
            grid=grid,
            codes=codes[:, None].repeat(1, 64).to(grid.storage),
            scale=torch.ones(16, 1),
            block=(1, 64),
            evaluation=Evaluation(F32),
        ).to(kernel_device)
        packed = pack(weight, floats=storage != torch.int8, device=kernel_device, columns=32)
        x = torch.zeros(2, 64)
        x[0, 3] = x[1, 49] = 1  # one in each slice
        scales = torch.ones(2, 1, device=kernel_device)
        y = nibble_rounded_linear(x.to(storage).to(kernel_device), scales, packed, dtype=BF16)
        assert torch.equal(y.double(), oracle(weight)[:, [3, 49]].t())


@pytest.mark.filterwarnings("ignore:invalid value")  # of NumPy, in the interpreter
def test_the_module_rounds_its_input(kernel_device):
    """The module's result is that of `fake_quantize` and the weight; NaN stays in its row."""
    from quantload.quant.activation import fake_quantize
    from quantload.runtime.kernels.nibble_rounded_layout import pack
    from quantload.runtime.nibble_rounded_gemm import NibbleRoundedLinear

    weight = make_weight(CASES["int4-g128-int8"], 20, 270).to(kernel_device)
    packed = pack(weight, floats=False, device=kernel_device)
    module = NibbleRoundedLinear(packed, TOKENS["int8"], F16)
    x = torch.randn(2, 3, 270).to(kernel_device, F16)
    expected = fake_quantize(x, TOKENS["int8"]).double() @ oracle(weight).t()
    y = module(x)
    assert y.shape == (2, 3, 20)
    assert torch.allclose(y.double(), expected, rtol=2e-2, atol=2e-2 * float(expected.std()))
    x[0, 1, 5], x[1, 2, 0] = torch.nan, torch.inf
    broken = module(x)
    is_broken = torch.zeros(2, 3, dtype=torch.bool)
    is_broken[0, 1] = is_broken[1, 2] = True
    assert not broken[is_broken.to(kernel_device)].isfinite().any()
    assert torch.equal(broken[~is_broken.to(kernel_device)], y[~is_broken.to(kernel_device)])
    assert module(x[:0]).shape == (0, 3, 20)
    with pytest.raises(ShapeError, match=r"has `7` features, the weight expects `270`"):
        module.forward_rounded(
            torch.zeros(1, 7, dtype=torch.int8, device=kernel_device),
            torch.ones(1, 1, device=kernel_device),
        )


def test_reasons():
    from quantload.runtime.kernels.nibble_rounded_layout import why_not_packed

    def reason(case, *, floats=False, n=16, k=64, **parts):
        weight = QuantTensor(**{**vars(make_weight(case, n, k)), **parts})
        return why_not_packed(weight, floats=floats) or ""

    assert "codes are e2m1" in reason(CASES["e2m1-g32-e4m3"])
    assert not reason(CASES["e2m1-g32-e4m3"], floats=True)
    assert "codes are int8" in reason(Case(INT8, 0, "int8"))
    assert "codes are uint4" in reason(Case(uint_grid(4), 0, "int8"))
    assert "is empty" in reason(CASES["int4-channel-int8"], n=0)
    zero = torch.ones(16, 1, dtype=torch.int8)
    assert "has `zero`" in reason(CASES["int4-channel-int8"], zero=zero)
    assert "groups of 48 columns" in reason(Case(INT4, 48, "int8"))
    assert "columns in one sum" in reason(CASES["int4-channel-int8"], n=1, k=(1 << 17) + 1)


def test_row_on_other_devices():
    from quantload.runtime.nibble_rounded_gemm import NibbleRoundedGemm

    row, weight = NibbleRoundedGemm(), make_weight(CASES["int4-g128-int8"], 16, 128)
    cpu = torch.device("cpu")
    assert (
        row.why_not(weight, TOKENS["int8"], device=cpu, dtype=BF16) == "runs on CUDA, found `cpu`"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
@pytest.mark.parametrize("name", CASES)
def test_on_card(name, dtype, kernel_device):
    for m, n, k in ((1, 130, 144), (16, 512, 4096), (300, 257, 2050)):
        check(CASES[name], m, n, k, dtype, kernel_device)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["int4-g128-int8", "int4-g128-e4m3"])
def test_row_on_card(name, kernel_device):
    """The row serves, compiles into one graph, replays, and says what it launches."""
    from torch.profiler import ProfilerActivity, profile

    from quantload.runtime.nibble_rounded_gemm import NibbleRoundedGemm

    row, weight = NibbleRoundedGemm(), make_weight(CASES[name], 256, 512)
    tokens = TOKENS[CASES[name].input]

    def why(scheme, dtype=BF16):
        return row.why_not(weight, scheme, device=kernel_device, dtype=dtype) or ""

    assert why(tokens) == ""
    assert "none" in why(None)
    assert "float32" in why(tokens, F32)
    assert "found e5m2" in why(InputScheme(grid=E5M2, granularity="token"))
    assert "dynamic scale a token" in why(InputScheme(grid=INT8, granularity="tensor"))
    module = row.pack(weight, tokens, device=kernel_device, dtype=BF16)
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
    assert set(module.kernels_for(4)) <= {event.key for event in record.key_averages()}
