"""The search for scales: against a slow search in float64, against minmax, and in all its forms."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import same_bits

from quantload.errors import ConfigError, ShapeError
from quantload.loader.formats.targets import target_named
from quantload.quant import compiled, search
from quantload.quant.rtn import as_blocks, quantize_rtn
from quantload.quant.scales import shared_range
from quantload.quant.scheme import parse_scheme
from quantload.quant.search import search_scales

NAMES = (
    *(f"W{bits}A16:g32" for bits in range(2, 9)),
    "W4A16_ASYM:g32",
    "W4A16:channel",
    "W8A8",
    "NVFP4A16",
    "MXFP4A16",
    "MXFP6A16",
    "MXFP8A16",
    "FP8_DYNAMIC",
    "FP8_BLOCK",
)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OTHERS = (
    ("gptq", "W4A16:g32"),
    ("gptq", "W3A16:g32"),
    ("awq", "W4A16_ASYM:g32"),
    ("fp8", "FP8_BLOCK"),
    ("modelopt", "NVFP4A16"),
    ("modelopt", "FP8_DYNAMIC"),
    ("modelopt", "MXFP8"),
)


def weight_of(dtype=torch.bfloat16, *, rows=40, columns=128, size=0.05, seed=3):
    """Rows of several kinds: outliers, one sign, zeros, tiny and large ones."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * size
    weight[0] = weight[0].abs()
    weight[1, :64] = 0
    weight[2] *= 100
    weight[3, ::17] *= 12
    weight[4] = -0.0
    weight[5] *= 1e-6
    return weight.to(dtype)


def minmax(weight, name, format_name="compressed-tensors", shared=None):
    scheme = parse_scheme(name).weight
    return target_named(format_name).quantize(weight, scheme, shared=shared)


def searched(weight, name, format_name="compressed-tensors", *, importance=None, shared=None):
    tensor = minmax(weight, name, format_name, shared)
    return search_scales(weight, tensor, parse_scheme(name).weight, importance=importance)


def errors(tensor, weight, importance=None):
    """Sum of squared errors of each block, in float64."""
    off = (tensor.dequantize().to(torch.float64) - weight.to(torch.float64)) ** 2
    if importance is not None:
        off = off * importance.to(torch.float64)
    return as_blocks(off, tensor.block).sum(dim=(1, 3))


def importance_of(columns, seed=0):
    return torch.rand(columns, generator=torch.Generator().manual_seed(seed)) ** 4


def without_loops(monkeypatch):
    monkeypatch.setattr(compiled, "search_blocks", lambda *_, **__: None)


def with_loops():
    if not compiled.start():
        pytest.skip("numba is not installed, or off")


# -- never worse, and better where it can be -------------------------------------------------------


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_no_block_is_worse_than_with_minmax(name, is_weighted, monkeypatch):
    without_loops(monkeypatch)
    for dtype in DTYPES:
        weight = weight_of(dtype)
        importance = importance_of(128) if is_weighted else None
        before = errors(minmax(weight, name), weight, importance)
        after = errors(searched(weight, name, importance=importance), weight, importance)
        assert bool((after <= before).all())
        if name not in ("MXFP8A16", "FP8_BLOCK"):  # a wide grid, and a block of all kinds of rows
            assert float(after.sum()) < float(before.sum())


@given(
    st.sampled_from(NAMES),
    st.sampled_from(DTYPES),
    st.integers(0, 2**31 - 1),
    st.floats(-12, 4),
    st.booleans(),
)
def test_no_block_is_worse_whatever_the_weight(name, dtype, seed, exponent, is_weighted):
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(2, 64, generator=random) ** 3 * 10.0**exponent
    weight = weight.clamp(-3e4, 3e4).to(dtype)
    importance = importance_of(64, seed) if is_weighted else None
    before = errors(minmax(weight, name), weight, importance)
    after = errors(searched(weight, name, importance=importance), weight, importance)
    assert bool((after <= before).all())


@pytest.mark.parametrize(("format_name", "name"), OTHERS)
def test_other_formats_are_searched_on_the_scales_that_they_store(format_name, name):
    for dtype in (torch.bfloat16, torch.float16):
        weight = weight_of(dtype)
        plain, found = minmax(weight, name, format_name), searched(weight, name, format_name)
        assert bool((errors(found, weight) <= errors(plain, weight)).all())
        assert found.scale.dtype == plain.scale.dtype
        if found.scale.dtype == torch.float16:  # engines cast them to the model's dtype
            new = found.scale != plain.scale
            assert bool(new.any())
            assert bool((found.scale.to(dtype).to(torch.float16) == found.scale)[new].all())


def test_what_counts_more_gets_less_error():
    weight, importance = weight_of(), torch.ones(128)
    importance[::4] = 100
    plain = searched(weight, "W3A16:g32")
    weighted = searched(weight, "W3A16:g32", importance=importance)
    assert errors(weighted, weight, importance).sum() < errors(plain, weight, importance).sum()
    assert errors(weighted, weight).sum() > errors(plain, weight).sum()


def test_the_unit_of_the_importance_does_not_matter():
    weight, importance = weight_of(), importance_of(128)
    one = searched(weight, "W4A16:g32", importance=importance)
    other = searched(weight, "W4A16:g32", importance=importance * 2.0**-60)
    assert same_bits(one.codes, other.codes)
    assert same_bits(one.scale, other.scale)


# -- against slow searches -------------------------------------------------------------------------

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = np.concatenate([-E2M1[::-1], E2M1])


def best_of(blocks, scales, grid, *, rounded=lambda x: x):
    """Least error of each block, every element at its nearest value, in float64.

    Args:
        blocks: [B, E].
        scales: [C, B].
        grid: Its values.
        rounded: How a reader rounds values.
    """
    found = []
    for scale in scales:
        values = rounded(scale[:, None, None] * grid)  # [B, 1, values]
        found.append(((values - blocks[:, :, None]) ** 2).min(axis=2).sum(axis=1))
    return np.min(found, axis=0)


def test_nvfp4_takes_the_best_of_all_e4m3_scales():
    """Not only of the neighbours: whatever else e4m3 holds is no better by more than a hair."""
    weight = torch.randn(32, 64).to(torch.float32)
    found = searched(weight, "NVFP4A16")
    every = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
    outer = float(found.outer)
    blocks = weight.double().reshape(-1, 16).numpy()
    scales = (every / outer)[:, None].repeat(len(blocks), axis=1)

    def rounded(values):
        return torch.from_numpy(values).to(torch.bfloat16).double().numpy()

    best = best_of(blocks, scales, E2M1, rounded=rounded)
    assert float(errors(found, weight).sum()) <= 1.002 * best.sum()
    assert float(errors(minmax(weight, "NVFP4A16"), weight).sum()) > 1.2 * best.sum()


def test_mxfp4_takes_the_best_of_all_powers_of_two():
    weight = torch.randn(64, 64).to(torch.bfloat16)
    found = searched(weight, "MXFP4A16")
    blocks = weight.double().reshape(-1, 32).numpy()
    scales = (2.0 ** np.arange(-20, 5))[:, None].repeat(len(blocks), axis=1)
    best = best_of(blocks, scales, E2M1)
    assert np.allclose(errors(found, weight).flatten().numpy(), best, rtol=1e-4)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_integers_come_close_to_a_search_of_a_thousand_scales(bits):
    weight, name = torch.randn(64, 64), f"W{bits}A16:g32"
    grid = np.arange(-(2.0 ** (bits - 1)), 2.0 ** (bits - 1))
    blocks = weight.double().reshape(-1, 32).numpy()
    largest = np.abs(blocks).max(axis=1)
    scales = largest / 2 ** (bits - 1) * np.linspace(0.2, 2.1, 1000)[:, None]
    best = best_of(blocks, scales, grid)
    found = float(errors(searched(weight, name), weight).sum())
    assert best.sum() * (1 - 1e-5) <= found <= 1.02 * best.sum()
    assert float(errors(minmax(weight, name), weight).sum()) > 1.15 * best.sum()


# -- ties, slices, loops ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["W4A16:g32", "W4A16_ASYM:g32", "NVFP4A16", "MXFP4A16"])
def test_what_minmax_represents_exactly_stays(name):
    """A weight that is a quantized one: every bit stays, also codes of a negative zero."""
    weight = minmax(weight_of(), name).dequantize()
    plain = minmax(weight, name)
    exact = errors(plain, weight) == 0
    assert bool(exact.any())
    found = searched(weight, name)
    assert same_bits(found.scale.view(torch.uint8), plain.scale.view(torch.uint8)) or bool(
        (~exact).any()
    )
    kept = exact.repeat_interleave(plain.block[1], dim=1)
    assert bool((found.codes == plain.codes)[kept].all())
    assert bool((found.scale.float() == plain.scale.float())[exact].all())


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e30])
def test_weights_beyond_the_search_stay_as_minmax_has_them(value):
    weight = torch.full((2, 64), value)
    weight[:, ::3] *= 0.3
    plain, found = minmax(weight, "W4A16:g32"), searched(weight, "W4A16:g32")
    assert same_bits(found.codes, plain.codes)
    assert same_bits(found.scale, plain.scale)


@pytest.mark.parametrize("name", NAMES)
def test_slices_of_rows_give_what_the_whole_gives(name, monkeypatch):
    weight = weight_of(rows=300 if name == "FP8_BLOCK" else 40)
    shared, step = shared_range(weight), 128 if name == "FP8_BLOCK" else 8
    sharing = shared if parse_scheme(name).weight.shares_range else None
    importance = importance_of(128)
    whole = searched(weight, name, importance=importance)
    monkeypatch.setattr(search, "_ELEMENTS", 1)  # and chunks inside of them
    parts = [
        searched(part, name, importance=importance, shared=sharing) for part in weight.split(step)
    ]
    for leaf in ("codes", "scale", "zero"):
        if getattr(whole, leaf) is not None:
            joined = torch.cat([getattr(part, leaf).view(torch.uint8) for part in parts])
            assert same_bits(joined, getattr(whole, leaf).view(torch.uint8)), leaf


# One of each kind of loop that is fast to compile: integers, e2m1, e4m3.
LOOPS = ("W2A16:g32", "W4A16_ASYM:g32", "W8A8", "NVFP4A16", "MXFP4A16", "MXFP8A16")


@pytest.mark.parametrize("name", LOOPS)
def test_compiled_loops_give_the_same_bits(name, monkeypatch):
    with_loops()
    cases = [(weight_of(), importance) for importance in (None, importance_of(128))]
    loops = [searched(weight, name, importance=importance) for weight, importance in cases]
    without_loops(monkeypatch)
    for (weight, importance), found in zip(cases, loops, strict=True):
        slow = searched(weight, name, importance=importance)
        assert same_bits(found.codes.view(torch.uint8), slow.codes.view(torch.uint8))
        assert same_bits(found.scale.view(torch.uint8), slow.scale.view(torch.uint8))
        assert (found.zero is None) == (slow.zero is None)
        assert found.zero is None or same_bits(found.zero, slow.zero)


# -- refusals --------------------------------------------------------------------------------------


def test_one_scale_for_the_tensor_is_refused():
    weight = weight_of()
    with pytest.raises(ConfigError, match="one scale for the tensor"):
        searched(weight, "FP8")


@pytest.mark.parametrize(
    ("importance", "message"),
    [
        (torch.ones(64), r"shape `\(64,\)`, expected \(128,\)"),
        (-torch.ones(128), "reaches from -1.0 to -1.0"),
        (torch.full((128,), torch.nan), "finite numbers"),
    ],
)
def test_importance_that_makes_no_sense_is_refused(importance, message):
    with pytest.raises(ShapeError, match=message):
        searched(weight_of(), "W4A16:g32", importance=importance)


def test_an_importance_of_nothing_changes_nothing():
    weight = weight_of()
    plain = minmax(weight, "W4A16:g32")
    found = searched(weight, "W4A16:g32", importance=torch.zeros(128))
    assert same_bits(found.codes, plain.codes)


def test_the_rest_of_the_tensor_is_kept():
    weight, scheme = weight_of(), parse_scheme("NVFP4A16").weight
    plain = replace(quantize_rtn(weight, scheme), input_scale=torch.ones(1))
    found = search_scales(weight, plain, scheme)
    assert found.input_scale is plain.input_scale
    assert same_bits(found.outer, plain.outer)
    assert found.evaluation == plain.evaluation
