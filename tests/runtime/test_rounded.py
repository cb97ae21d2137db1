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


def check(y: Tensor, exact: Tensor, size: Tensor, *, sums: float) -> None:
    """Sums within `sums` of the sum of |terms|, then rounded to y's dtype."""
    allowed = exact.abs() * (UNIT[y.dtype] + 2.0**-20) + size * sums
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
    shapes = [(2, 24, 528)]  # so long that K is cut among programs
    if name in ("int8-channel", "e4m3-block-40"):
        shapes.append((17, 72, 130))
    if kernel_device.type == "cuda":  # kernels of their own for few and for many tokens
        shapes += [(1, 1000, 4112), (40, 1000, 1040), (130, 1000, 4096), (700, 1000, 1040)]
    for m, n, k in shapes:
        x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(dtype)
        bias = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)
        weight = make_weight(case, n, k)
        y, exact, size = product(case, x, weight, bias if m != 17 else None, kernel_device)
        assert y.dtype == dtype
        # where all columns are added in the tensor core, see `rounded`
        is_plain = m > 64 and not case.input.group_size
        sums = 2.0**-22 if case.grid is INT8 else 2.0**-10 if is_plain else 2.0**-12
        check(y, exact, size, sums=sums)


def test_scales_are_put_in_order(kernel_device) -> None:
    from quantload.runtime.kernels.scale_order import by_group

    scales = torch.rand(70, 33, generator=torch.Generator().manual_seed(0)).to(kernel_device)
    for rows in (70, 72):
        ordered = by_group(scales, rows)
        assert torch.equal(ordered[:70], scales)
        assert ordered.stride() == (1, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("m", [64, 132, 1000, 333])
def test_blocks_by_the_library(m, bias) -> None:
    from quantload.runtime.kernels.rounded_settings import suits_library
    from quantload.runtime.launch_settings import trying

    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs sm_90")
    case, device = CASES["e4m3-block"], torch.device("cuda")
    n, k = 384, 1024
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(BF16)
    added = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(BF16) if bias else None
    weight = make_weight(case, n, k)
    with trying("rounded e4m3 g128", {"library": 1}):
        y, exact, size = product(case, x, weight, added, device)
        again, _, _ = product(case, x, weight, added, device)
    from quantload.runtime.kernels.rounded import pack

    assert suits_library(pack(weight, case.input, device=device), m, BF16)
    check(y, exact, size, sums=2.0**-10)
    assert torch.equal(y, again)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["int8-channel", "int8-channel-zeros", "e4m3-channel", "e4m3-block"]
)
@pytest.mark.parametrize("rows", [64, 128])
def test_programs_that_share_out_the_steps_of_tiles(name, rows) -> None:
    from quantload.runtime.launch_settings import trying

    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs sm_90")
    case, device = CASES[name], torch.device("cuda")
    family = {"int8": "rounded int8", "e4m3": "rounded e4m3"}[case.grid.name]
    family += f" g{case.input.group_size}" if case.input.group_size else ""
    settings = {"wide": 1, "bn": rows, "stages": 4, "band": 4, "registers": 208, "shared": 1}
    for m, n, k in [(200, 1000, 1040), (70, 136, 4096), (300, 4104, 528)]:
        x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(BF16)
        bias = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(BF16)
        weight = make_weight(case, n, k)
        with trying(family, settings):
            y, exact, size = product(case, x, weight, bias, device)
            again, _, _ = product(case, x, weight, bias, device)
        sums = 2.0**-22 if case.grid is INT8 else 2.0**-10
        check(y, exact, size, sums=sums)
        assert torch.equal(y, again)


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy
def test_what_is_not_finite_stays_in_its_token(kernel_device) -> None:
    from quantload.runtime.kernels.rounded import pack, rounded_linear

    x = torch.randn(5, 144, generator=torch.Generator().manual_seed(0)).to(BF16)
    damaged = x.clone()
    damaged[1, 3], damaged[3, 140] = float("nan"), float("inf")
    for name in ("int8-channel", "e4m3-block"):
        case = CASES[name]
        packed = pack(make_weight(case, 40, 144), case.input, device=kernel_device)
        y = rounded_linear(damaged.to(kernel_device), packed, case.input).cpu()
        whole = rounded_linear(x.to(kernel_device), packed, case.input).cpu()
        assert not y[[1, 3]].isfinite().any()
        assert torch.equal(y[[0, 2, 4]], whole[[0, 2, 4]])


def test_rows_of_a_wider_tensor_no_rows_and_one_row(kernel_device) -> None:
    from quantload.runtime.kernels.rounded import pack, rounded_linear

    case = CASES["e4m3-channel"]
    packed = pack(make_weight(case, 40, 144), case.input, device=kernel_device)
    wide = torch.randn(4, 300, generator=torch.Generator().manual_seed(0)).to(BF16)
    part = wide.to(kernel_device)[:, 7:151]
    y = rounded_linear(part, packed, case.input)
    assert torch.equal(y, rounded_linear(part.contiguous(), packed, case.input))
    assert torch.equal(y[2], rounded_linear(part[2], packed, case.input))
    assert rounded_linear(part[:0], packed, case.input).shape == (0, 40)


@pytest.mark.parametrize(("grid", "zero"), [(INT8, None), (INT8, -3), (E4M3, None)], ids=str)
def test_fixed_scales(grid, zero, kernel_device) -> None:
    from quantload.layers.inputs import StaticCodes
    from quantload.quant.activation import fake_quantize_static
    from quantload.runtime.kernels.rounded import pack
    from quantload.runtime.rounded_gemm import RoundedLinear

    static = InputScheme(grid=grid, granularity="tensor", dynamic=False, symmetric=zero is None)
    weight = make_weight(CASES[f"{grid.name}-channel"], 40, 144)
    scale = torch.tensor([0.011])
    place = None if zero is None else torch.tensor([zero], dtype=torch.int8)
    inner = RoundedLinear(pack(weight, static, device=kernel_device), static, F32)
    on_device = None if place is None else place.to(kernel_device)
    module = StaticCodes(inner, static, scale.to(kernel_device), on_device)
    x = torch.randn(2, 3, 144, generator=torch.Generator().manual_seed(0)) * 2
    rounded = fake_quantize_static(x, grid, scale, place).double()
    exact, size = rounded @ weight_values(weight).T, rounded.abs() @ weight_values(weight).abs().T
    y = module(x.to(kernel_device)).cpu()
    assert y.shape == (2, 3, 40)
    # the tensor core adds FP8 products with 14 bits below the largest: each of its steps may lose
    # some of the sum of |terms|, as where `is_plain` above
    on_card = kernel_device.type == "cuda"
    check(y, exact, size, sums=2.0**-10 if on_card and grid is E4M3 else 2.0**-20)
    assert torch.allclose(module.weight_values(F32).cpu().double(), weight_values(weight))


@pytest.mark.parametrize("name", ["int8-channel", "int8-channel-zeros", "e4m3-tensor"])
def test_columns_of_two_processes_share_a_scale(name, kernel_device) -> None:
    from quantload.runtime.kernels.quantize_rows import quantize_rows, rows_reach
    from quantload.runtime.kernels.rounded import pack
    from quantload.runtime.rounded_gemm import RoundedLinear

    case = CASES[name]
    weight = make_weight(case, 24, 256)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1)).to(BF16).to(kernel_device)
    codes, scales = quantize_rows(x, case.input)
    parts = []
    for start in (0, 128):
        part = weight.columns(start, start + 128)
        module = RoundedLinear(pack(part, case.input, device=kernel_device), case.input, F32)
        other = x[:, 128 - start : 256 - start]
        if case.input.symmetric:
            of_other = rows_reach(other)
            of_other = of_other.amax() if case.input.granularity == "tensor" else of_other
        else:
            of_other = torch.stack([-other.amin(dim=1), other.amax(dim=1)])
        module.exchange_max = lambda mine, theirs=of_other: torch.maximum(mine, theirs)
        mine, shared = module.round_input(x[:, start : start + 128])
        assert torch.equal(mine.view(torch.int8), codes[:, start : start + 128].view(torch.int8))
        assert torch.equal(shared, scales)
        parts.append(module(x[:, start : start + 128]).double().cpu())
    exact = input_values(codes.cpu(), scales.cpu(), 0) @ weight_values(weight).T
    assert (parts[0] + parts[1] - exact).norm() < 2e-3 * exact.norm()


def test_codes_that_do_not_fit_are_refused(kernel_device) -> None:
    from quantload.runtime.kernels.rounded import multiply_rounded, pack, rounded_linear

    case = CASES["e4m3-block"]
    packed = pack(make_weight(case, 40, 144), case.input, device=kernel_device)
    codes = torch.zeros(3, 144, dtype=E4M3.storage, device=kernel_device)
    scales = torch.ones(3, 2, device=kernel_device)
    assert not multiply_rounded(codes, scales, packed, None, dtype=BF16).any()
    with pytest.raises(ShapeError, match=r"\(3, 1\).*\(3, 2\)"):
        multiply_rounded(codes, scales[:, :1], packed, None, dtype=BF16)
    with pytest.raises(ShapeError, match=r"int8.*float8_e4m3fn"):
        multiply_rounded(codes.view(torch.int8), scales, packed, None, dtype=BF16)
    with pytest.raises(ShapeError, match="has `100` features"):
        rounded_linear(torch.zeros(1, 100, device=kernel_device), packed, case.input)


def test_why_not() -> None:
    from quantload.runtime.kernels.rounded_weight import why_not_on_card, why_not_scales

    weight = make_weight(CASES["e4m3-channel"], 8, 64)
    assert why_not_on_card(weight, (8, 9)) is None
    assert "8.9, the device has 8.0" in why_not_on_card(weight, (8, 0))
    assert why_not_on_card(make_weight(CASES["int8-channel"], 8, 64), (8, 0)) is None
    assert why_not_scales(weight, tokens(E4M3)) is None
    assert "found `e4m3` and `int8`" in why_not_scales(weight, tokens(INT8))
    assert "found 1" not in why_not_scales(make_weight(CASES["mxfp8"], 8, 64), tokens(E4M3))
    assert "found 128 and 64" in why_not_scales(
        make_weight(CASES["e4m3-block"], 8, 256), groups(64)
    )
    four = QuantTensor(
        grid=INT4, codes=torch.zeros(8, 64, dtype=torch.int8), scale=torch.ones(8, 1),
        block=(1, 64), evaluation=Evaluation(dtype=F32),
    )  # fmt: skip
    assert "both int8 or both e4m3" in why_not_scales(four, tokens(INT8))


def test_one_graph_and_inference_mode(kernel_device) -> None:
    from quantload.runtime.kernels.rounded import pack
    from quantload.runtime.rounded_gemm import RoundedLinear

    case = CASES["e4m3-channel"]
    packed = pack(make_weight(case, 24, 64), case.input, device=kernel_device)
    module = RoundedLinear(packed, case.input, BF16)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(0)).to(BF16).to(kernel_device)
    expected_y = module(x)
    assert torch.equal(compiled(x), expected_y)
    with torch.inference_mode():
        assert torch.equal(module(x), expected_y)
        assert torch.equal(module.forward_rounded(*module.round_input(x)), expected_y.flatten(0, 1))
    moved = module.to("meta")
    assert {part.device.type for part in moved.packed.tensors().values()} == {"meta"}


def test_settings_of_few_tokens_are_not_taken_for_many() -> None:
    from quantload.runtime.kernels.rounded_settings import candidates, fits

    few = {"bn": 64, "bm": 8, "bk": 256, "stages": 4, "warps": 4, "splits": 2, "swap": 1}
    for group in (0, 128):
        assert fits(few, 8, group=group, block_rows=128, shared=227 << 10)
        assert not fits(few, 4096, group=group, block_rows=128, shared=227 << 10)
    assert not fits({**few, "stages": 99}, 8, group=0, block_rows=1, shared=227 << 10)
    assert fits({"fused": 1}, 8, group=0, block_rows=1, shared=0)
    assert not fits({"fused": 1}, 9, group=0, block_rows=1, shared=0)
    assert not fits({"wide": 1, "bn": 128}, 512, group=128, block_rows=64, shared=0)
    for m in (1, 8, 64, 128, 1024):
        for group in (0, 32, 128):
            found = list(candidates(m, 4096, 4096, floats=True, group=group))
            assert found
            rows = 128 if group == 128 else 1
            assert all(fits(s, m, group=group, block_rows=rows, shared=227 << 10) for s in found)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [16, 48, 64, 112, 128])
@pytest.mark.parametrize(
    ("halves", "splits", "beside"), [(1, 1, 0), (1, 3, 0), (2, 1, 0), (2, 2, 0)]
)
def test_tiles_in_parts(rows, halves, splits, beside) -> None:
    from quantload.runtime.launch_settings import trying

    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs sm_90")
    if beside and rows > 64:
        pytest.skip("too many registers for two programs")
    case, device = CASES["e4m3-block"], torch.device("cuda")
    settings = {"parts": rows, "halves": halves, "stages": 4, "splits": splits, "beside": beside}
    # the last two: several tiles a program, of fewer steps than places and of more
    for m, n, k in [(40, 1000, 1040), (200, 136, 4096), (64, 9000, 128), (200, 9000, 1040)]:
        x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(BF16)
        bias = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(BF16)
        weight = make_weight(case, n, k)
        with trying("rounded e4m3 g128", settings):
            y, exact, size = product(case, x, weight, bias, device)
            again, _, _ = product(case, x, weight, bias, device)
        check(y, exact, size, sums=2.0**-12)
        assert torch.equal(y, again)


def test_parts_of_a_tile_are_powers_of_two() -> None:
    from quantload.runtime.kernels.rounded_parts import parts_of

    for rows in range(16, 129, 16):
        found = parts_of(rows)
        assert sum(found) == rows
        assert len(found) <= 3
        assert list(found) == sorted(found, reverse=True)
        assert all(part & (part - 1) == 0 and part >= 16 for part in found)


def test_scales_that_are_powers_of_two_are_bytes(kernel_device) -> None:
    from quantload.runtime.kernels.rounded import pack

    case = CASES["mxfp8"]
    weight = make_weight(case, 24, 64)
    packed = pack(weight, case.input, device=kernel_device)
    assert packed.scale.dtype == torch.uint8
    assert torch.equal(packed.values().cpu().double(), weight_values(weight))
    odd = replace(weight, scale=weight.scale.float() * 1.25)
    packed = pack(odd, case.input, device=kernel_device)
    assert packed.scale.dtype == torch.float32
    assert torch.equal(packed.values().cpu().double(), weight_values(odd))
