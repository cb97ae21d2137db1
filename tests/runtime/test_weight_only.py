"""The weight-only kernel against a float64 oracle: in the interpreter, and (`-m gpu`) on the card.

The allowed error is the bound in the kernel's docstring, element by element: nothing is tuned.
"""

from dataclasses import replace

import pytest
import torch
from weight_forms import BF16, CASES, F16, F32, NF4, Case, make_weight, oracle

from quantload.errors import ShapeError
from quantload.quant.grid import E4M3, INT4, table_grid
from quantload.quant.qtensor import Evaluation, QuantTensor

UNIT = {BF16: 2.0**-8, F16: 2.0**-11, F32: 2.0**-24}  # largest relative error of rounding


def check(weight: QuantTensor, m: int, dtype: torch.dtype, device: torch.device, *, bias=False):
    """Multiply and compare with the bound of the kernel's docstring."""
    from quantload.runtime.kernels.weight_only import pack, weight_only_linear, why_not

    n, k = weight.shape
    generator = torch.Generator().manual_seed(m * n + k)
    x = torch.randn((m, k), generator=generator).to(device, dtype)
    b = torch.randn(n, generator=generator).to(device, dtype) if bias else None
    weight = weight.to(device)
    assert why_not(weight, device=device, dtype=dtype) is None
    packed = pack(weight, device=device)
    y = weight_only_linear(x, packed, b)
    assert y.shape == (m, n)
    assert y.dtype == dtype

    values, sizes = oracle(weight)
    exact = x.double() @ values.T
    size = x.double().abs() @ sizes.T
    if b is not None:
        exact, size = exact + b.double(), size + b.double().abs()
    width = packed.codes.shape[2]
    slices = packed.codes.shape[0] * (2 if packed.nibbles else 1)
    bound = (width + slices + 4) * 2.0**-23 * size + UNIT[dtype] * exact.abs() + 2.0**-24
    if weight.grid == NF4:
        bound += UNIT[dtype] * size
    excess = (y.double() - exact).abs() - bound
    assert excess.max().item() <= 0, f"error above its bound by {excess.max().item()}"
    assert torch.equal(y, weight_only_linear(x, packed, b)), "two runs differ"


def indexed(values):
    return [pytest.param(value, index, id=str(value)) for index, value in enumerate(values)]


@pytest.mark.parametrize(("name", "index"), indexed(CASES))
def test_every_kind_of_weight(name, index, kernel_device):
    m, n, k = ((3, 70, 200), (17, 33, 130), (1, 40, 264))[index % 3]
    weight = make_weight(CASES[name], n, k)
    check(weight, m, (BF16, F16, F32)[index // 3 % 3], kernel_device, bias=index % 2 == 0)


def test_scales_that_are_divisors(kernel_device):
    from quantload.runtime.kernels.weight_only import pack, weight_only_linear

    weight = make_weight(Case(E4M3, (8, 16), scale=F32), 40, 64)
    divided = replace(
        weight, scale=1 / weight.scale, evaluation=replace(weight.evaluation, values="/")
    ).to(kernel_device)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).to(kernel_device)
    y = weight_only_linear(x, pack(divided, device=kernel_device), None)
    expected = x.double() @ divided.dequantize().double().T
    assert (y.double() - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("case", ["int4-g64-zero", "uint8-block-offset", "e4m3-channel"])
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 1, 1), (1, 1, 300), (2, 3, 16), (5, 1, 65), (4, 129, 31), (33, 65, 129), (70, 130, 64)],
)
def test_every_shape(case, m, n, k, kernel_device):
    check(make_weight(CASES[case], n, k), m, F16, kernel_device)


@pytest.mark.parametrize(
    ("name", "k"),
    [
        ("int4-g32-zero-int32", 520),
        ("uint2-g16-offset-outer", 270),
        ("uint2-g16-offset-outer-values", 270),
        ("uint4-channel-offset", 2048),
        ("int8-channel", 1030),
    ],
)
def test_split_of_k(name, k, kernel_device):
    from quantload.runtime.kernels.weight_only import _splits, pack

    weight = make_weight(CASES[name], 20, k)
    steps = pack(weight, device=kernel_device).codes.shape[0]
    assert _splits(1, steps, processors=8)[0] > 1
    check(weight, 2, F16, kernel_device, bias=True)


def test_slices_keep_regular_groups_in_order_and_pad_little(kernel_device):
    from quantload.runtime.kernels.weight_only import pack

    def layout(name, k):
        packed = pack(make_weight(CASES[name], 4, k), device=torch.device("cpu"))
        return packed.codes.shape, packed.slices_per_group, packed.columns is None

    assert layout("int4-g128", 1024) == ((4, 4, 128), 1, True)
    assert layout("int4-g64-zero", 576) == ((5, 4, 64), 1, True)
    assert layout("int4-g32-act-order", 64) == ((1, 4, 32), 1, False)
    assert layout("int4-g24-f16", 96) == ((2, 4, 32), 1, False)
    assert layout("int8-channel", 576) == ((5, 4, 128), 5, True)


def test_cut_groups_of_act_order(kernel_device):
    weight = make_weight(CASES["int4-g32-act-order"], 24, 160)
    check(weight.columns(40, 110), 3, F16, kernel_device)
    few = replace(weight, group_of=weight.group_of.clamp(max=1))  # groups 2, 3 and 4 are empty
    check(few, 3, F16, kernel_device)


def test_leading_axes_strides_and_no_tokens(kernel_device):
    from quantload.runtime.kernels.weight_only import pack, weight_only_linear

    weight = make_weight(CASES["int4-g64-zero"], 24, 70).to(kernel_device)
    packed = pack(weight, device=kernel_device)
    x = torch.randn(2, 3, 70, dtype=F16).to(kernel_device)
    flat = weight_only_linear(x.reshape(6, 70), packed)
    assert torch.equal(weight_only_linear(x, packed).reshape(6, 24), flat)
    wide = torch.cat([x, x], dim=-1)
    assert torch.equal(weight_only_linear(wide[..., :70], packed).reshape(6, 24), flat)
    across = x.reshape(6, 70).t().contiguous().t()
    assert torch.equal(weight_only_linear(across, packed), flat)
    assert weight_only_linear(x[:, :0], packed).shape == (2, 0, 24)
    assert weight_only_linear(x[0, 0], packed).shape == (24,)


def test_nan_stays_nan_and_padding_stays_out(kernel_device):
    from quantload.runtime.kernels.weight_only import pack, weight_only_linear

    weight = make_weight(CASES["int4-g64-zero"], 24, 70).to(kernel_device)
    x = torch.randn(3, 70).to(kernel_device)
    x[1, 69] = float("nan")
    y = weight_only_linear(x, pack(weight, device=kernel_device))
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()


def test_wrong_width_is_an_error(kernel_device):
    from quantload.runtime.kernels.weight_only import pack, weight_only_linear

    packed = pack(make_weight(CASES["int8-channel"], 8, 64), device=kernel_device)
    with pytest.raises(ShapeError, match="input has `63` features, the weight expects `64`"):
        weight_only_linear(torch.zeros(1, 63), packed)


def test_reasons(kernel_device):
    from quantload.runtime.kernels.weight_only import _why_not_on_card, why_not

    weight = make_weight(CASES["int4-g128"], 8, 64)
    cpu = torch.device("cpu")
    assert why_not(weight, device=torch.device("meta"), dtype=F16) == (
        "the kernel needs a CUDA device, not meta"
    )
    assert why_not(weight, device=cpu, dtype=torch.float64) == (
        "inputs are torch.float64, the kernel takes bfloat16, float16 and float32"
    )
    five_bits = table_grid("codebook", tuple(float(i) for i in range(32)))
    wide = replace(weight, grid=five_bits, codes=weight.codes.to(torch.uint8) & 15)
    assert why_not(wide, device=cpu, dtype=F16) == (
        "grid codebook is a table of more than 16 values"
    )
    empty = replace(weight, codes=weight.codes[:0], scale=weight.scale[:0])
    assert why_not(empty, device=cpu, dtype=F16) == "the weight is empty: 0 x 64"
    rounded = replace(weight, evaluation=Evaluation(F32, result=BF16))
    assert why_not(rounded, device=cpu, dtype=F32) == (
        "values are rounded to torch.bfloat16, which shows in torch.float32"
    )
    assert "which shows" not in str(why_not(rounded, device=torch.device("meta"), dtype=BF16))
    assert _why_not_on_card(E4M3, (8, 0)) == (
        "grid e4m3 needs compute capability 8.9, the device has 8.0"
    )
    assert _why_not_on_card(INT4, (9, 0)) is None


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # in inductor
def test_compiles_as_one_graph(kernel_device):
    from quantload.runtime.kernels.weight_only import pack, weight_only_linear

    packed = pack(make_weight(CASES["int4-g64-zero"], 24, 70), device=kernel_device)
    bias = torch.randn(24).to(kernel_device)

    def forward(x):
        return weight_only_linear(x * 2, packed, bias) + 1

    backend = "inductor" if kernel_device.type == "cuda" else "aot_eager"
    compiled = torch.compile(forward, fullgraph=True, backend=backend)
    x = torch.randn(2, 3, 70).to(kernel_device)
    with torch.inference_mode():
        assert torch.equal(compiled(x), forward(x))
    parts = list(vars(packed).values())  # in_features is no argument
    torch.library.opcheck(
        torch.ops.quantload.weight_only_gemm.default,
        (x[0], *parts[:-5], bias, *parts[-4:]),
    )


# -- on the card -----------------------------------------------------------------------------------

ON_CARD = [(name, BF16) for name in CASES] + [
    (name, dtype)
    for name in (
        "int4-g128",
        "int4-g32-act-order",
        "uint4-g64-offset",
        "int8-channel",
        "e4m3-block",
    )
    for dtype in (F16, F32)
]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtype"), ON_CARD)
def test_on_card(name, dtype, kernel_device):
    weight = make_weight(CASES[name], 1536, 576)
    for m in (1, 3, 16, 17, 128, 500):
        check(weight, m, dtype, kernel_device, bias=m % 2 == 1)
    check(make_weight(CASES[name], 77, 1000), 5, dtype, kernel_device)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["int4-g128", "int8-channel", "e4m3-channel", "uint4-g64-offset"])
def test_large_on_card(name, kernel_device):
    weight = make_weight(CASES[name], 4096, 14336)
    for m in (1, 16, 64, 300):
        check(weight, m, BF16, kernel_device)


@pytest.mark.gpu
def test_nan_codes_on_card(kernel_device):
    from quantload.runtime.kernels.weight_only import pack, weight_only_linear

    weight = make_weight(CASES["e4m3-channel"], 24, 70).to(kernel_device)
    weight.codes.view(torch.uint8)[3, 0] = 0x7F  # NaN
    y = weight_only_linear(
        torch.randn(2, 70, device=kernel_device), pack(weight, device=kernel_device)
    )
    assert y[:, 3].isnan().all()
    assert y.isfinite().sum() == 2 * 23


@pytest.mark.gpu
def test_cuda_graph(kernel_device):
    from quantload.runtime.kernels.weight_only import pack, weight_only_linear

    packed = pack(make_weight(CASES["int4-g128"], 256, 4096), device=kernel_device)  # splits K
    x = torch.randn(1, 4096, device=kernel_device, dtype=BF16)
    weight_only_linear(x, packed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = weight_only_linear(x, packed)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(y, weight_only_linear(x, packed))
