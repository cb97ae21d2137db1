"""Every row of the table of kernels, for every scheme, on ragged shapes, against float64.

    |y - exact| <= 8 * rounding unit * sqrt(sum over k of (x[m, k] * W[n, k])^2)

element by element: what independent roundings of the factors and of the result give, eight times
over. A column that is left out, or counted twice, is sqrt(K) times smaller than the root and shows
up to K = 4000. What is not written shows because all memory is NaN before: new tensors are filled.

On a CPU the kernels run in Triton's interpreter, on small shapes; `-m gpu` takes large ones.
"""

from types import SimpleNamespace

import pytest
import torch
from weight_forms import CASES
from weight_forms import make_weight as make_form

from quantload.quant.activation import fake_quantize
from quantload.quant.qtensor import QuantTensor
from quantload.quant.rtn import quantize_rtn
from quantload.quant.scheme import PRESETS, parse_scheme
from quantload.runtime.gemm import KERNELS, choose, usable_input

BF16, F16 = torch.bfloat16, torch.float16
UNIT = {BF16: 2.0**-9, F16: 2.0**-11}
SCHEMES = [
    *(name for name, scheme in PRESETS.items() if scheme.weight is not None),
    *("W4A16:g32", "W4A16:g64", "W4A16:channel", "W4A16_ASYM:g32", "W8A16:channel"),
]
CUDA = torch.device("cuda", 0)


def make_weight(scheme, n, k, *, seed=0, dtype=BF16) -> QuantTensor:
    """A random weight [n, k]; the last group of columns, and of rows, may be cut."""
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(-(-n // 128) * 128, -(-k // 128) * 128, generator=generator)
    dense *= torch.rand(dense.shape[0], 1, generator=generator) + 0.1
    return quantize_rtn((dense * 0.05).to(dtype), scheme.weight).rows(0, n).columns(0, k)


def exact(x: torch.Tensor, weight: QuantTensor, input) -> tuple[torch.Tensor, torch.Tensor]:
    """x' @ W^T in float64, and the root of the sum of the squares of its terms."""
    seen = x if input is None else fake_quantize(x, input)
    seen, values = seen.double(), weight.dequantize(torch.float64).to(x.device)
    return seen @ values.T, (seen.square() @ values.square().T).sqrt()


@pytest.fixture
def poisoned(monkeypatch):
    """Fill every new floating-point tensor with NaN."""

    def filled(make):
        def made(*args, **kwargs):
            tensor = make(*args, **kwargs)
            narrow = tensor.element_size() == 1
            return (
                tensor.fill_(float("nan")) if tensor.is_floating_point() and not narrow else tensor
            )

        return made

    monkeypatch.setattr(torch, "empty", filled(torch.empty))
    monkeypatch.setattr(torch, "empty_like", filled(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", filled(torch.Tensor.new_empty))


def rows_for(weight, input, device, dtype, monkeypatch):
    """Rows of the table that serve on a card; without one, as if one of sm_80 were here."""
    asked = device
    if device.type == "cpu":
        asked = CUDA
        sizes = SimpleNamespace(
            major=8, minor=9, multi_processor_count=8, shared_memory_per_block_optin=1 << 17
        )
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 9))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: sizes)
    serving = []
    for row in KERNELS:
        reason = row.why_not(weight, input, device=asked, dtype=dtype)
        assert reason is None or reason, f"{row.name} refuses without a reason"
        if reason is None:
            serving.append(row)
    return serving


def close(y, x, weight, input, bias=None):
    """Where y is not the product of x and the weight: a text, "" if nowhere."""
    expected, size = exact(x, weight, input)
    if bias is not None:
        expected, size = expected + bias.double(), size + bias.double().abs()
    # y is rounded, values of the weight may be, and so may be the sums of parts of K in cuBLAS; of
    # millions of results some are five times the root of squares, and so are their errors
    allowed = UNIT[x.dtype] * (expected.abs() + 14 * size)
    excess = (y.double() - expected).abs() - allowed
    worst = int(excess.argmax())
    place = divmod(worst, y.shape[1])
    bad = not bool(excess.max() <= 0)  # NaN is bad, too
    return f"{excess.max():.3g} above the bound of {allowed[place]:.3g} at {place}" if bad else ""


def test_the_bound_shows_one_column_that_is_left_out():
    weight = make_weight(parse_scheme("W4A16"), 37, 1000)
    x = torch.randn(3, 1000, dtype=BF16)
    right = (x.double() @ weight.dequantize(torch.float64).T).to(BF16)
    assert not close(right, x, weight, None)
    left_out = x.clone()
    left_out[:, -1] = 0
    wrong = (left_out.double() @ weight.dequantize(torch.float64).T).to(BF16)
    assert "above the bound" in close(wrong, x, weight, None)
    right[1, 5] = float("nan")
    assert close(right, x, weight, None)


@pytest.mark.parametrize("index", range(len(SCHEMES)), ids=SCHEMES)
@torch.no_grad()
def test_every_row_of_the_table_in_the_interpreter(index, kernel_device, poisoned, monkeypatch):
    scheme = parse_scheme(SCHEMES[index])
    m, n, k = ((3, 37, 200), (17, 70, 136), (1, 33, 264), (5, 130, 72))[index % 4]
    input, _ = usable_input(scheme.input)
    if input is not None and not input.dynamic:
        input = None  # a layer rounds with the scale of the checkpoint before the kernel
    is_float = scheme.weight.scale == "float"  # other weights are bfloat16, which shows in float16
    dtype = F16 if is_float and index % 2 else BF16
    weight = make_weight(scheme, n, k, seed=index, dtype=dtype)
    x = torch.randn(m + 2, k, generator=torch.Generator().manual_seed(index)).to(dtype)
    bias = torch.randn(n).to(kernel_device, dtype) if index % 3 else None
    x = x.to(kernel_device)
    rows = rows_for(weight, input, kernel_device, dtype, monkeypatch)
    assert rows[-1].name == "dequantize and multiply"
    assert len(rows) > 1 or weight.grid.name == "e2m3", "no kernel of ours serves"
    for row in rows:
        packed = row.pack(weight.to(kernel_device), input, device=kernel_device, dtype=dtype)
        y = packed(x[:m], bias)
        assert (y.shape, y.dtype) == ((m, n), dtype), row.name
        assert not close(y, x[:m], weight, input, bias), row.name


@pytest.mark.parametrize("index", range(len(CASES)), ids=list(CASES))
@torch.no_grad()
def test_every_row_and_every_form_of_weight(index, kernel_device, poisoned, monkeypatch):
    """Zero points, offsets, act-order, odd groups, tables: what schemes do not have."""
    m, n, k = ((2, 37, 200), (9, 70, 136), (1, 33, 264))[index % 3]
    weight = make_form(list(CASES.values())[index], n, k, seed=index)
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(index)).to(F16)
    x = x.to(kernel_device)
    for row in rows_for(weight, None, kernel_device, F16, monkeypatch):
        packed = row.pack(weight.to(kernel_device), None, device=kernel_device, dtype=F16)
        assert not close(packed(x), x, weight, None), row.name


def with_bad_row(x, bad):
    broken = x.clone()
    broken[len(x) // 2, x.shape[1] - 1] = bad
    return broken


def check_values_and_strides(packed, x, weight, input, where):
    """Bad values stay with their token; strides change nothing but the way, and so the last bit."""
    (m, k), y = x.shape, packed(x)
    wide = torch.randn(m, 3 * k, device=x.device).to(x.dtype)
    wide[:, 8 : 8 + k] = x
    assert torch.equal(packed(wide[:, 8 : 8 + k]), y), f"{where}: rows of a wider tensor"
    wide[:, 3 : 3 + k] = x
    for name, same in (
        ("rows that are not aligned", wide[:, 3 : 3 + k]),
        ("columns first", x.t().contiguous().t()),
        ("every second", torch.stack([x, x], dim=-1)[..., 0]),
    ):
        said = close(packed(same), x, weight, input)
        assert not said, f"{where}, {name}: {said}"
    assert torch.equal(packed(x[None])[0], y), f"{where}: a leading axis"
    for bad in (float("nan"), float("inf"), float("-inf")):
        found = packed(with_bad_row(x, bad))
        assert not found[m // 2].isfinite().any(), f"{where}: {bad} is gone"
        if m > 1 and (input is None or input.granularity != "tensor"):
            keep = torch.arange(m, device=x.device) != m // 2
            assert torch.equal(found[keep], y[keep]), f"{where}: {bad} touches other tokens"


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy, of infinities
@pytest.mark.parametrize("name", ["W4A16", "W8A16", "W8A8", "FP8_BLOCK", "NVFP4A16", "W4AFP8"])
@torch.no_grad()
def test_bad_values_strides_and_empty_inputs(name, kernel_device, poisoned, monkeypatch):
    scheme, (n, k) = parse_scheme(name), (40, 136)
    weight = make_weight(scheme, n, k).to(kernel_device)
    for row in rows_for(weight, scheme.input, kernel_device, BF16, monkeypatch):
        packed = row.pack(weight, scheme.input, device=kernel_device, dtype=BF16)
        x = torch.randn(5, k).to(kernel_device, BF16)
        check_values_and_strides(packed, x, weight, scheme.input, row.name)
        assert packed(x[:0]).shape == (0, n), row.name
        assert packed(x[0]).shape == (n,), row.name


# -- on the card -----------------------------------------------------------------------------------

SHAPES = [(1, 1), (77, 1000), (1536, 576), (640, 4104), (999, 2047)]
TOKENS = (1, 7, 16, 33, 64, 100, 300, 1025, 2049)


@pytest.fixture
def card(kernel_device):
    assert kernel_device.type == "cuda"
    return CUDA


@pytest.mark.gpu
@pytest.mark.parametrize("name", SCHEMES)
@torch.no_grad()
def test_every_row_of_the_table_on_the_card(name, card, poisoned, monkeypatch):
    scheme = parse_scheme(name)
    input, _ = usable_input(scheme.input)
    if input is not None and not input.dynamic:
        input = None
    failures, ran = [], set()
    for number, (n, k) in enumerate(SHAPES):
        weight = make_weight(scheme, n, k, seed=number).to(card)
        x_all = torch.randn(max(TOKENS), k, device=card, dtype=BF16)
        bias = torch.randn(n, device=card, dtype=BF16) if number % 2 else None
        for row in rows_for(weight, input, card, BF16, monkeypatch):
            packed, place = row.pack(weight, input, device=card, dtype=BF16), f"{row.name} {n}x{k}"
            ran.add(row.name)
            for m in TOKENS:
                x = x_all[:m]
                y = packed(x, bias)
                if y.shape != (m, n) or y.dtype != BF16:
                    failures.append(f"{place} M={m}: {y.dtype} {tuple(y.shape)}")
                elif said := close(y, x, weight, input, bias):
                    failures.append(f"{place} M={m}: {said}")
                elif not torch.equal(y, packed(x, bias)):
                    failures.append(f"{place} M={m}: two runs differ")
    assert not failures, "\n".join(failures[:20]) + f"\n{len(failures)} failures"
    assert "dequantize and multiply" in ran


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_every_row_and_every_form_of_weight_on_the_card(name, card, poisoned, monkeypatch):
    failures = []
    for n, k in ((77, 1000), (640, 1536)):
        weight = make_form(CASES[name], n, k).to(card)
        x = torch.randn(300, k, device=card, dtype=BF16)
        for row in rows_for(weight, None, card, BF16, monkeypatch):
            packed = row.pack(weight, None, device=card, dtype=BF16)
            for m in (1, 16, 40, 300):
                if said := close(packed(x[:m]), x[:m], weight, None):
                    failures.append(f"{row.name} {n}x{k} M={m}: {said}")
    assert not failures, "\n".join(failures)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SCHEMES)
@torch.no_grad()
def test_bad_values_strides_and_empty_inputs_on_the_card(name, card, poisoned, monkeypatch):
    scheme, (n, k) = parse_scheme(name), (520, 1160)
    input, _ = usable_input(scheme.input)
    if input is not None and not input.dynamic:
        input = None
    weight = make_weight(scheme, n, k).to(card)
    for row in rows_for(weight, input, card, BF16, monkeypatch):
        packed = row.pack(weight, input, device=card, dtype=BF16)
        for m in (1, 5, 40, 200, 1100):
            x = torch.randn(m, k, device=card, dtype=BF16)
            check_values_and_strides(packed, x, weight, input, f"{row.name} M={m}")
        assert packed(x[:0]).shape == (0, n), row.name
        assert packed(x[0]).shape == (n,), row.name


@pytest.mark.gpu
@pytest.mark.parametrize("name", SCHEMES)
@torch.inference_mode()
def test_graphs_and_compiled_code_on_the_card(name, card):
    scheme, (n, k) = parse_scheme(name), (768, 2048)
    input, _ = usable_input(scheme.input)
    if input is not None and not input.dynamic:
        input = None
    weight = make_weight(scheme, n, k).to(card)
    choice = choose(weight, input, device=card, dtype=BF16)
    packed = choice.kernel.pack(weight, input, device=card, dtype=BF16)
    torch._dynamo.reset()  # what other tests compiled counts towards its limit of recompilations
    compiled = torch.compile(lambda x: packed(x), fullgraph=True, dynamic=False)
    for m in (1, 48, 2048):
        x = torch.randn(m, k, device=card, dtype=BF16)
        expected = packed(x)
        if m == 48 and "triton" in choice.kernel.name:
            assert torch.equal(compiled(x), expected), f"{choice.kernel.name} M={m}, compiled"
        graph, fixed = torch.cuda.CUDAGraph(), torch.zeros_like(x)
        packed(fixed)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            y = packed(fixed)
        fixed.copy_(x)
        for _ in range(3):
            graph.replay()
        assert torch.equal(y, expected), f"{choice.kernel.name} M={m}, in a graph"


@pytest.mark.gpu
@torch.inference_mode()
def test_two_streams_at_a_time_on_the_card(card):
    """Counters and sums of parts of K of one stream are not those of another."""
    for name in ("W4A16", "W8A16", "FP8_DYNAMIC", "W8A8"):
        scheme = parse_scheme(name)
        weight = make_weight(scheme, 512, 8192).to(card)
        choice = choose(weight, scheme.input, device=card, dtype=BF16)
        packed = choice.kernel.pack(weight, scheme.input, device=card, dtype=BF16)
        inputs = [torch.randn(4, 8192, device=card, dtype=BF16) for _ in range(2)]
        expected = [packed(x) for x in inputs]
        torch.cuda.synchronize()
        streams, found = [torch.cuda.Stream() for _ in inputs], [[], []]
        for _ in range(50):
            for stream, x, results in zip(streams, inputs, found, strict=True):
                with torch.cuda.stream(stream):
                    results.append(packed(x))
        torch.cuda.synchronize()
        for results, wanted in zip(found, expected, strict=True):
            assert all(torch.equal(y, wanted) for y in results), choice.kernel.name
