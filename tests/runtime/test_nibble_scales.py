"""Large scales of nibble weights: a power of two is moved into the factor of the row."""

from dataclasses import replace

import pytest
import torch

from tests.runtime.nibble_cases import BF16, CASES, F32, allowed, make_weight

PARTS = (  # also an `outer` of the weight, zero points, act-order, one or two scales of a slice
    "int4-g128", "int4-g128-outer", "int4-g128-zero", "int4-g128-act-order", "int4-g16",
    "int4-g32-zero", "uint4-g64",
)  # fmt: skip


@pytest.fixture
def nibble(kernel_device):
    from quantload.runtime.kernels import nibble

    return nibble


def with_scales(name, powers):
    """A weight [20, 512] with scales of both signs, and the same with rows times powers of two."""
    weight = make_weight(CASES[name], 20, 512)
    sign = torch.where(torch.arange(weight.scale.numel()) % 3 == 1, -1.0, 1.0)
    scale = weight.scale.float() * sign.reshape(weight.scale.shape)
    factor = 2.0 ** torch.tensor(powers).repeat(20)[:20, None]
    small = replace(weight, scale=scale.to(BF16))
    return small, replace(weight, scale=(scale * factor).to(BF16)), factor


def largest(packed):
    assert packed.kind == "bf16"
    return packed.scale.view(BF16).abs().max().item()


@pytest.mark.parametrize("powers", [[40.0], [0.0, 38.0, 120.0], [-20.0, 37.0]], ids=str)
@pytest.mark.parametrize("name", PARTS)
def test_scales_are_below_and_values_the_same_to_the_bit(nibble, kernel_device, name, powers):
    from quantload.runtime.kernels.nibble_weight import pack

    small, large, factor = with_scales(name, powers)
    assert large.scale.abs().max() >= 2.0**30
    packed = pack(large, dtype=BF16, device=kernel_device)
    assert largest(packed) < 2.0**30
    expected = nibble.weight_values(pack(small, dtype=BF16, device=kernel_device), F32).cpu()
    assert torch.equal(nibble.weight_values(packed, F32).cpu(), expected * factor)


@pytest.mark.parametrize(
    "settings",
    [
        {"rows": 16, "tokens": 16, "stages": 1},
        {"path": 2},
        {"path": 4, "rows": 16, "tokens": 16, "unroll": 2, "stages": 1},
    ],
    ids=["decode", "dense", "parallel"],
)
@pytest.mark.parametrize("name", ["int4-g128", "int4-g128-outer", "int4-g128-zero"])
def test_products_with_large_scales(nibble, kernel_device, name, settings):
    from quantload.runtime.kernels.nibble_plan import Plan
    from quantload.runtime.kernels.nibble_weight import pack

    _, weight, _ = with_scales(name, [37.0, 0.0, 90.0])
    weight = weight.to(kernel_device)
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(0)).to(kernel_device, BF16)
    packed = pack(weight, dtype=BF16, device=kernel_device)
    y = nibble.run(x, packed, None, Plan.from_settings(settings))
    exact, error = allowed(x, weight, rounds_values=settings.get("path") == 2)
    assert ((y.double() - exact).abs() <= error).all()


@pytest.mark.parametrize("name", ["int4-g128", "int4-g128-outer", "int4-channel-zero"])
def test_other_scales_stay_as_they_are(kernel_device, name):
    from quantload.runtime.kernels.nibble_weight import pack

    weight = make_weight(CASES[name], 20, 512)
    just_below = replace(weight, scale=weight.scale.to(BF16) * 2.0**35)
    packed = pack(just_below, dtype=BF16, device=kernel_device)
    if packed.scale is not None:  # the one of a row is a factor of its own
        pairs = packed.scale.cpu().view(BF16).unflatten(1, (20, 2))  # of a block
        assert torch.equal(pairs.transpose(0, 1).flatten(1), just_below.scale)
    assert (packed.outer is None) == (name == "int4-g128")


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy
def test_what_is_not_finite_stays_in_its_group(nibble, kernel_device):
    from quantload.runtime.kernels.nibble_weight import pack

    _, weight, _ = with_scales("int4-g128", [40.0])
    damaged = weight.scale.clone()
    damaged[3, 1], damaged[5, 0] = float("nan"), float("inf")
    packed = pack(replace(weight, scale=damaged), dtype=BF16, device=kernel_device)
    values = nibble.weight_values(packed, F32).cpu()
    sound = nibble.weight_values(pack(weight, dtype=BF16, device=kernel_device), F32).cpu()
    is_damaged = torch.zeros_like(values, dtype=torch.bool)
    is_damaged[3, 128:256] = is_damaged[5, :128] = True
    assert not values[is_damaged].isfinite().any()
    assert torch.equal(values[~is_damaged], sound[~is_damaged])


def test_scales_that_meet_values_while_these_are_unpacked_take_no_part(nibble, kernel_device):
    """Powers of two are bytes, but for one of 2^-127, which makes them bfloat16 elsewhere."""
    from quantload.runtime.kernels.nibble_weight import pack

    weight = make_weight(CASES["mxfp4"], 20, 512)
    exponents = weight.scale.view(torch.uint8).clone()
    exponents[:] = 160
    exponents[2, 3] = 0
    weight.codes[2, 96:128] = 0
    weight = replace(weight, scale=exponents.view(torch.float8_e8m0fnu))
    packed = pack(weight, dtype=BF16, device=kernel_device)
    assert packed.is_folded
    values = nibble.weight_values(packed, F32).cpu()
    assert torch.equal(values, weight.dequantize(F32))
