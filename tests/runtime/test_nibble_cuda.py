"""The nibble kernels on a card: every form and kernel against float64, and how they behave."""

import pytest
import torch

from quantload.runtime.gemm import choose
from quantload.runtime.nibble_gemm import NibbleGemm
from tests.runtime.nibble_cases import BF16, CASES, F16, allowed, make_weight

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
TOKENS = (1, 2, 5, 8, 13, 16, 31, 64, 100, 257)


@pytest.fixture(autouse=True)
def needs_card():
    if not torch.cuda.is_available():
        pytest.skip("needs a card")


def packed(weight, dtype=BF16):
    row = NibbleGemm()
    assert row.why_not(weight, None, device=CUDA, dtype=dtype) is None
    return row.pack(weight, None, device=CUDA, dtype=dtype)


def inputs(m, k, dtype, seed=0):
    return torch.randn(m, k, generator=torch.Generator().manual_seed(seed)).to(CUDA, dtype)


def worst(y, x, weight, bias=None):
    exact, error = allowed(x, weight, rounds_values=True)
    if bias is not None:
        exact = exact + bias.double()
        error = error + 2 * exact.abs() * torch.finfo(x.dtype).eps
    return ((y.double() - exact).abs() / error).max().item()


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("case", CASES)
def test_any_number_of_tokens(case, dtype):
    n, k = (200, 1280) if CASES[case].group == 256 else (200, 1120)
    if CASES[case].act_order and k % CASES[case].group:
        k = 1024
    weight = make_weight(CASES[case], n, k).to(CUDA)
    module = packed(weight, dtype)
    bias = inputs(1, n, dtype, seed=9)[0]
    for m in TOKENS:
        x = inputs(m, k, dtype, seed=m)
        assert worst(module(x, bias), x, weight, bias) <= 1, m
    values = module.weight_values(torch.float32)
    torch.testing.assert_close(values, weight.dequantize(torch.float32), rtol=2e-2, atol=1e-6)


PLANS = {
    "decode, parts of K": (5, {"rows": 32, "tokens": 8, "splits": 3, "warps": 2}),
    "decode, copy engine": (13, {"rows": 64, "tokens": 16, "tma": 1}),
    "gemv": (2, {"path": 3, "rows": 8, "unroll": 4}),
    "parallel": (16, {"path": 4, "rows": 32, "tokens": 16, "unroll": 4}),
    "mid": (70, {"path": 1, "rows": 128, "tokens": 64, "splits": 2, "after": 0, "stages": 4}),
    "overlap": (200, {"path": 5, "rows": 128, "tokens": 128, "warps": 8, "stages": 2, "step": 64}),
    "overlap, narrow": (70, {"path": 5, "rows": 128, "tokens": 64, "warps": 8, "stages": 4}),
    "overlap, shared": (
        200,
        {"path": 5, "rows": 128, "tokens": 128, "warps": 8, "stages": 2, "step": 64, "shared": 1},
    ),
    "wide": (300, {"path": 6, "rows": 256, "tokens": 128, "stages": 4}),
    "wide, shared": (200, {"path": 6, "rows": 256, "tokens": 128, "stages": 4, "shared": 1}),
    "wide, narrow": (70, {"path": 6, "rows": 128, "tokens": 64, "stages": 4, "step": 64}),
    "wide, few rows": (
        200, {"path": 6, "rows": 128, "tokens": 128, "stages": 2, "step": 64, "shared": 1}
    ),
}  # fmt: skip


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "case", ["int4-g128", "int4-g128-zero", "mxfp4", "nvfp4", "int4-channel", "int4-g64"]
)
def test_every_kernel(case, plan):
    from quantload.runtime.kernels.nibble import run
    from quantload.runtime.kernels.nibble_plan import Plan, fitted
    from quantload.runtime.kernels.nibble_weight import pack

    m, settings = PLANS[plan]
    if torch.cuda.get_device_capability()[0] < 9 and settings.get("path") in (1, 5, 6):
        pytest.skip("needs the copy engine")
    weight = make_weight(CASES[case], 4416, 2048).to(CUDA)
    part = pack(weight, dtype=BF16, device=CUDA)
    x = inputs(m, 2048, BF16)
    planned = fitted(Plan.from_settings(settings), part)
    y = run(x, part, None, planned)
    assert worst(y, x, weight) <= 1
    assert torch.equal(run(x, part, None, planned), y)


@pytest.mark.parametrize("shape", [(1, 64), (3, 100), (17, 4096), (4097, 256), (1000, 7)])
@pytest.mark.parametrize("case", ["int4-g128", "int4-channel", "mxfp4", "nvfp4"])
def test_ragged_shapes(case, shape):
    weight = make_weight(CASES[case], *shape).to(CUDA)
    module = packed(weight)
    for m in (1, 9, 65):
        x = inputs(m, shape[1], BF16, seed=m)
        assert worst(module(x), x, weight) <= 1, m


def test_strided_inputs_and_no_tokens():
    weight = make_weight(CASES["int4-g128"], 256, 512).to(CUDA)
    module = packed(weight)
    wide = inputs(70, 1030, BF16)
    for x in (wide[:, 3:515], wide[:, :512], wide.t()[:512, :64].t(), wide[::2, 8:520]):
        assert worst(module(x), x, weight) <= 1
    assert module(wide[:0, :512]).shape == (0, 256)
    assert module(wide[:6, :512].view(2, 3, 512)).shape == (2, 3, 256)


@pytest.mark.parametrize("m", [1, 7, 16, 64, 200])
def test_nan_and_infinity_stay_in_their_token(m):
    weight = make_weight(CASES["int4-g128-zero"], 256, 1024).to(CUDA)
    module = packed(weight)
    x = inputs(m, 1024, BF16)
    clean = module(x)
    x[0, 77], x[0, 99] = float("nan"), float("inf")
    dirty = module(x)
    assert dirty[0].isnan().all()
    assert torch.equal(dirty[1:], clean[1:])


@pytest.mark.parametrize("m", [1, 4, 16, 64, 128])
def test_equal_inputs_give_equal_bits_over_poisoned_memory(m):
    weight = make_weight(CASES["int4-g128"], 1024, 4096).to(CUDA)
    module = packed(weight)
    x = inputs(m, 4096, BF16)
    first = module(x)
    for _ in range(20):
        poison = torch.full((1 << 20,), float("nan"), device=CUDA)
        del poison
        assert torch.equal(module(x), first)


@pytest.mark.parametrize("m", [1, 16, 100, 2048])
def test_compiled_and_captured(m):
    weight = make_weight(CASES["int4-g128"], 512, 2048).to(CUDA)
    module = packed(weight)
    x = inputs(m, 2048, BF16)
    expected = module(x)
    compiled = torch.compile(module, fullgraph=True)
    assert torch.equal(compiled(x), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = module(x)
    x.copy_(inputs(m, 2048, BF16, seed=3))
    y.fill_(float("nan"))
    graph.replay()
    assert torch.equal(y, module(x))
    with torch.inference_mode():
        assert torch.equal(module(x), y)


def test_two_streams_at_once_do_not_disturb_each_other():
    weight = make_weight(CASES["int4-g128"], 1024, 4096).to(CUDA)
    module = packed(weight)
    xs = [inputs(16, 4096, BF16, seed=s) for s in range(2)]
    expected = [module(x) for x in xs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in xs]
    for _ in range(50):
        found = []
        for stream, x in zip(streams, xs, strict=True):
            with torch.cuda.stream(stream):
                found.append(module(x))
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_the_row_is_chosen_and_names_its_kernels():
    from torch.profiler import ProfilerActivity, profile

    weight = make_weight(CASES["int4-g128"], 512, 2048).to(CUDA)
    chosen = choose(weight, None, device=CUDA, dtype=BF16).kernel
    assert chosen.name == "triton nibble"
    module = chosen.pack(weight, None, device=CUDA, dtype=BF16)
    for m in (1, 16, 100, 4096):
        x = inputs(m, 2048, BF16)
        module(x)
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as record:
            module(x)
            torch.cuda.synchronize()
        ran = {event.key for event in record.key_averages()}
        for name in module.kernels_for(m):
            assert name == "cuBLAS" or any(name in key for key in ran), (name, ran)


def test_one_process_can_use_both_dtypes_and_refuses_others():
    row = NibbleGemm()
    weight = make_weight(CASES["int4-g128"], 64, 256)
    assert "float32" in row.why_not(weight, None, device=CUDA, dtype=torch.float32)
    assert "CUDA" in row.why_not(weight, None, device=torch.device("cpu"), dtype=BF16)
