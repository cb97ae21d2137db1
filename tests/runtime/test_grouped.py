"""The grouped kernel, routing and the sum over choices against float64: interpreted, or on a card.

The oracle multiplies with `QuantTensor.dequantize` in float64. The allowed error is that of float32
sums, element by element; values of NVFP4 are rounded by their producer, but not by the kernel.
Where an expert has more than 64 pairs, the kernel rounds products of codes and scales to bfloat16.
"""

from __future__ import annotations

import pytest
import torch
from whole_weights import whole_weight

E, CHOICES = 3, 2
SCHEMES = {  # scheme: allowed relative error of the producer's own rounding
    "W4A16:g32": 0.0,
    "W4A16:channel": 0.0,
    "W4A16_ASYM:g32": 0.0,
    "MXFP4": 0.0,
    "NVFP4": 2.0**-8,
    "FP8_BLOCK": 0.0,
    "FP8_DYNAMIC": 0.0,
    "W8A8": 0.0,
}
ROUNDED = 2.0**-9  # of a value, to bfloat16
MORE = {
    "W4A16": 0.0, "W4A16:g64": 0.0, "W4A16_ASYM": 0.0, "W4A16_ASYM:g64": 0.0,
    "W4A16_ASYM:channel": 0.0, "W2A16:g32": 0.0,
}  # fmt: skip


@pytest.fixture
def grouped(kernel_device, monkeypatch):
    """The module under test; large tiles where the interpreter runs each program."""
    from quantload.runtime.kernels import grouped_product

    if kernel_device.type == "cpu":
        rule = {"rows": 64, "warps": 1, "stages": 1, "after": 1}
        monkeypatch.setattr(grouped_product, "_rule", lambda block, pairs, is_wide: rule)
    return grouped_product


def stacked(scheme, device, *, rows, n, k, experts=E):
    """Weights of experts with biases, together and one by one."""
    from quantload.runtime.kernels.grouped_layout import ExpertStack

    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    stack = ExpertStack(experts, rows, dtype)
    weights = [whole_weight(n, k, scheme, seed=e).to(device) for e in range(experts)]
    assert [stack.add(e, weight) for e, weight in enumerate(weights)] == [None] * experts
    back = stack.taken_out(experts - 1)
    assert torch.equal(back.codes.view(torch.uint8), weights[-1].codes.view(torch.uint8))
    assert torch.equal(back.dequantize(torch.float64), weights[-1].dequantize(torch.float64))
    biases = [torch.randn(n, device=device) for _ in range(experts)]
    values = torch.stack([weight.dequantize(torch.float64) for weight in weights])
    return stack.finished(biases), values, torch.stack(biases).double()


def rows_of(device, tokens, k):
    """Rows of a wider tensor."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return torch.randn(tokens, k + 8, device=device).to(dtype)[:, :k]


def routed(device, tokens, choices=CHOICES, experts=E):
    """Experts of each token, one of them not here."""
    index = [torch.randperm(experts + 1)[:choices] for _ in range(tokens)]
    return torch.stack(index).to(device) + 5


def poison(device):
    """Fill the memory that results will get with NaN."""
    if device.type == "cuda":
        held = [torch.full((n,), torch.nan, device=device) for n in (1 << 12, 1 << 16, 1 << 22)]
        del held


def expected_of(x, values, biases, index):
    """[S, N] products, and sums of sizes of their terms; zeros for pairs of no expert."""
    pairs = x.double().repeat_interleave(index.shape[1], 0)
    ids = index.flatten() - 5
    y = torch.zeros(len(pairs), values.shape[1], dtype=torch.float64, device=x.device)
    size = torch.zeros_like(y)
    for e in range(values.shape[0]):
        here = ids == e
        y[here] = pairs[here] @ values[e].T + biases[e]
        size[here] = pairs[here].abs() @ values[e].abs().T + biases[e].abs()
    return y, size, ids < values.shape[0]


def check(found, y, size, here, k, rounding):
    error = (found.double() - y).abs()[here]
    assert bool((error <= size[here] * ((k + 16) * 2.0**-23 + rounding)).all()), float(
        (error / size[here]).max()
    )


def case(scheme, device, grouped, *, rows, n, k, tokens, rounding, experts=E, choices=CHOICES):
    weight, values, biases = stacked(scheme, device, rows=rows, n=n, k=k, experts=experts)
    x, index = rows_of(device, tokens, k), routed(device, tokens, choices, experts)
    routing = grouped.routing(weight, index, first=5)
    poison(device)
    found = grouped.grouped_product(x, weight, routing, choices=choices, in_float32=True)
    y, size, here = expected_of(x, values, biases, index)
    check(found, y, size, here, k, rounding)
    assert bool(
        (weight.values(torch.float64) - values).abs().max() <= values.abs().max() * rounding
    )
    again = grouped.grouped_product(x, weight, routing, choices=choices, in_float32=True)
    assert torch.equal(again[here], found[here])
    return x, index, weight, routing, y, here


@pytest.mark.parametrize(("scheme", "rounding"), SCHEMES.items())
def test_products(scheme, rounding, kernel_device, grouped):
    """Ragged: K is no whole block, N no whole tile; each program finds its own pairs."""
    case(
        scheme, kernel_device, grouped, rows="plain", n=72, k=160, tokens=3, rounding=rounding
    )  # fmt: skip


@pytest.mark.parametrize(("scheme", "is_joined"), [("MXFP4", True), ("NVFP4", False)])
def test_scales_are_loads_of_four_bytes(scheme, is_joined, kernel_device, grouped, monkeypatch):
    """Of MXFP4 a thread has one scale, where rows are few: two are an integer then."""
    rule = {"rows": 64, "warps": 4, "stages": 2}
    monkeypatch.setattr(grouped, "_rule", lambda block, pairs, is_wide: rule)
    seen, joined = [], grouped.joined_scales

    def watched(scale, form, **sizes):
        seen.append(joined(scale, form, **sizes))
        return seen[-1]

    monkeypatch.setattr(grouped, "joined_scales", watched)
    case(scheme, kernel_device, grouped, rows="plain", n=72, k=288, tokens=3, rounding=2.0**-8)
    assert {scale.dtype for scale in seen} == {torch.int32 if is_joined else torch.int16}


def test_lone_scales_of_two_bytes_are_held_in_four():
    weight, _, _ = stacked("FP8_BLOCK", torch.device("cpu"), rows="plain", n=72, k=300)
    assert (weight.kind, weight.scale.dtype) == ("fp32", torch.int32)


@pytest.mark.parametrize("rows", ["halves", "alternate"])
def test_gate_and_up(rows, kernel_device, grouped):
    x, _, weight, routing, y, here = case(
        "W4A16:g32", kernel_device, grouped, rows=rows, n=72, k=64, tokens=3, rounding=0.0
    )
    gate, up = (y[:, :36], y[:, 36:]) if rows == "halves" else (y[:, ::2], y[:, 1::2])
    for limits in ({}, {"alpha": 1.7, "gate_limit": 0.5, "up_limit": 0.4, "shift": 1.0}):
        act = grouped.GatedActivation(name="silu", **limits)
        poison(kernel_device)
        found = grouped.grouped_product(
            x, weight, routing, choices=CHOICES, activation=act, in_float32=True
        )
        g = gate.clamp(max=act.gate_limit)
        inner = g * torch.sigmoid(act.alpha * g)
        inner = inner * (up.clamp(-act.up_limit, act.up_limit) + act.shift)
        assert found.shape == inner.shape
        torch.testing.assert_close(found.double()[here], inner[here], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(("block", "at_once"), [(8, 8192), (64, 64)])
def test_routes(block, at_once, kernel_device, monkeypatch):
    """Blocks of an expert hold its pairs, in order; the others are nobody's."""
    from quantload.runtime.kernels import route as module
    from quantload.runtime.kernels.route import route

    monkeypatch.setattr(module, "_MOST_AT_ONCE", at_once)
    index = torch.randint(0, 9, (150,), device=kernel_device)
    order, blocks = route(index, first=2, experts=5, block=block)
    seen = []
    for e, start, stop in blocks.t().tolist():
        if e < 0:
            continue
        pairs = order[start:stop].tolist()
        assert 0 < len(pairs) <= block
        assert all(int(index[pair]) == e + 2 for pair in pairs)
        seen += pairs
    here = ((index >= 2) & (index < 7)).nonzero().flatten().tolist()
    assert sorted(seen) == here
    assert (blocks[0] >= 0).sum() == sum(-(-int((index == e).sum()) // block) for e in range(2, 7))


def test_products_of_routed_blocks(kernel_device, grouped, monkeypatch):
    monkeypatch.setattr(grouped, "_DIRECT_PAIRS", 0)
    case("W4A16:g32", kernel_device, grouped, rows="plain", n=64, k=64, tokens=9, rounding=0.0)


def sum_case(scheme, device, *, tokens, choices, n, k, rounding, experts=E, few=32):
    """The last product and the sum, against float64; NaN inputs of pairs of no expert."""
    from quantload.runtime.kernels import grouped_product, grouped_sum

    weight, values, biases = stacked(scheme, device, rows="plain", n=n, k=k, experts=experts)
    index = routed(device, tokens, choices, experts)
    x, weights = rows_of(device, tokens * choices, k), torch.rand(tokens, choices, device=device)
    here = (index.flatten() - 5) < experts
    x[~here] = torch.nan
    routing = grouped_product.routing(weight, index, first=5)
    poison(device)
    found = grouped_sum.grouped_sum(x, weight, routing, weights, dtype=torch.float32)
    y, size, _ = expected_of(x, values, biases, index.flatten()[:, None])
    parts = weights.flatten()[:, None].double()
    y, size = (
        torch.where(here[:, None], part.nan_to_num() * parts, 0).view(tokens, choices, -1).sum(1)
        for part in (y, size)
    )
    bound = size * ((k + 24) * 2.0**-23 + rounding)
    assert bool(((found.double() - y).abs() <= bound).all())
    again = grouped_sum.grouped_sum(x, weight, routing, weights, dtype=torch.float32)
    assert torch.equal(again, found)


@pytest.mark.parametrize(
    ("scheme", "rounding"),
    [("W4A16:g32", 0.0), ("MXFP4", 0.0), ("NVFP4", 2.0**-8), ("FP8_BLOCK", 0.0)],
)
def test_few_tokens_are_summed_at_once(scheme, rounding, kernel_device):
    sum_case(scheme, kernel_device, tokens=2, choices=3, n=24, k=160, rounding=rounding)


def test_settings_may_sum_few_tokens_afterwards(kernel_device, grouped, monkeypatch):
    from quantload.runtime.kernels import grouped_sum

    weight, _, _ = stacked("W4A16:g32", kernel_device, rows="plain", n=24, k=64)
    assert grouped_sum.kernel_names(weight, 6, 3) == ("grouped_token_kernel",)
    monkeypatch.setattr(grouped_sum, "_RULE", {"rows": 0, "stages": 0})
    sum_case("W4A16:g32", kernel_device, tokens=2, choices=3, n=24, k=64, rounding=0.0)
    assert grouped_sum.kernel_names(weight, 6, 3) == ("grouped_kernel", "_weighted_sum_kernel")


def test_weighted_sum(kernel_device):
    """NaN of pairs of no expert never shows; tokens without any are zeros."""
    from quantload.runtime.kernels.route import weighted_sum

    rows = torch.randn(8, 300, device=kernel_device)
    index = torch.tensor([[0, 1], [4, 2], [9, 9], [1, 3]], device=kernel_device)
    weights = torch.rand(4, 2, device=kernel_device)
    here = (index >= 1) & (index < 4)
    rows[~here.flatten()] = torch.nan
    found = weighted_sum(rows, weights, index, first=1, experts=3, dtype=torch.float32)
    clean = rows.nan_to_num().view(4, 2, -1).double() * (weights * here)[..., None].double()
    torch.testing.assert_close(found.double(), clean.sum(1), atol=1e-6, rtol=1e-6)
    assert not found[2].any()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 5, 40, 700])
@pytest.mark.parametrize(("scheme", "rounding"), [*SCHEMES.items(), *MORE.items()])
def test_products_on_a_card(scheme, rounding, tokens, kernel_device, grouped):
    for n, k in ((200, 336), (512, 256)):
        if k % 128 and scheme in ("W4A16", "W4A16:g64", "W4A16_ASYM", "W4A16_ASYM:g64"):
            k = 384
        case(
            scheme, kernel_device, grouped, rows="halves", n=n, k=k, tokens=tokens,
            rounding=max(rounding, ROUNDED if tokens == 700 else 0.0), experts=9, choices=4,
        )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 40, 300])
@pytest.mark.parametrize(("scheme", "rounding"), [*SCHEMES.items(), *MORE.items()])
def test_sums_on_a_card(scheme, rounding, tokens, kernel_device):
    rounding = max(rounding, ROUNDED if tokens == 300 else 0.0)
    for n, k in ((200, 384), (512, 256)):
        sum_case(
            scheme, kernel_device, tokens=tokens, choices=6, n=n, k=k, rounding=rounding, experts=9
        )
