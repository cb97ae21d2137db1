"""Rounding to nearest, bit for bit against compressed-tensors."""

from dataclasses import replace

import compressed
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import same_bits

from quantload.errors import CheckpointError, ConfigError, NonFiniteWeight
from quantload.quant import chunks
from quantload.quant.grid import INT8, int_grid
from quantload.quant.rtn import quantize_rtn, round_to_nearest
from quantload.quant.scheme import PRESETS, WeightScheme, parse_scheme

NAMES = ("W4A16", "W4A16_ASYM", "W8A16", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def assert_equal(weight, scheme, args):
    """Ours and theirs agree in codes, scales, zero points and values, or both cannot scale."""
    codes, scale, zero, values = compressed.quantized(weight, args)
    if not scale.isfinite().all():
        with pytest.raises(NonFiniteWeight):
            quantize_rtn(weight, scheme)
        return
    ours = quantize_rtn(weight, scheme)
    assert same_bits(ours.codes, codes)
    assert same_bits(ours.scale, scale)
    assert same_bits(ours.dequantize(), values)
    if scheme.symmetric:
        assert ours.zero is None
        assert not zero.to(torch.float32).any()
    else:
        assert same_bits(ours.zero, zero)


def normal(dtype):
    return torch.randn(40, 256).to(dtype)


def zero_groups(dtype):
    weight = torch.randn(40, 256)
    weight[:20, :128] = 0.0
    weight[3] = 0.0
    weight[30:, 128:] = -0.0
    return weight.to(dtype)


def constant_groups(dtype):
    weight = torch.linspace(-2.0, 2.0, 40).unsqueeze(1).repeat(1, 256)
    weight[:, 128:] = 0.7
    return weight.to(dtype)


def one_sign(dtype):
    weight = torch.rand(40, 256) + 1.0
    weight[::2] *= -1.0
    return weight.to(dtype)


def negative_zeros(dtype):
    weight = torch.randn(40, 256)
    return torch.where(weight > 0, -0.0, weight).to(dtype)


def subnormal(dtype):
    smallest = torch.finfo(dtype).smallest_normal / 2 ** (torch.finfo(dtype).bits // 4)
    steps = torch.randint(-6, 7, (40, 256)).to(torch.float64)
    return (steps * smallest).to(dtype)


def huge(dtype):
    return (
        torch.randn(40, 256).clamp(-2.0, 2.0).to(torch.float64) * torch.finfo(dtype).max / 8
    ).to(dtype)


def largest(dtype):
    weight = torch.rand(40, 256).to(dtype)
    weight[:, ::5] = torch.finfo(dtype).max
    return weight


def uneven(dtype):
    return (torch.randn(40, 256) * 10.0 ** torch.linspace(-6, 4, 256)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "make",
    [
        normal,
        zero_groups,
        constant_groups,
        one_sign,
        negative_zeros,
        subnormal,
        huge,
        largest,
        uneven,
    ],
)
def test_presets_equal_compressed_tensors(make, name, dtype):
    weight = make(dtype)
    assert weight.isfinite().all()
    assert_equal(weight, PRESETS[name].weight, compressed.preset(name).weights)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(128, 128), (128, 200), (200, 128), (1, 1), (127, 129), (300, 260)]
)
def test_ragged_blocks_equal_compressed_tensors(shape, dtype):
    weight = torch.randn(shape).to(dtype) - 0.5
    assert_equal(weight, PRESETS["FP8_BLOCK"].weight, compressed.preset("FP8_BLOCK").weights)


@pytest.mark.parametrize("name", ["W8A8", "FP8_DYNAMIC"])
@pytest.mark.parametrize("columns", [1, 77])
def test_channels_of_any_width_equal_compressed_tensors(name, columns):
    weight = torch.randn(9, columns, dtype=torch.bfloat16)
    assert_equal(weight, PRESETS[name].weight, compressed.preset(name).weights)


def weights_of_bits(dtype):
    """[2, 128] finite numbers of uniformly drawn bits: every exponent, subnormals, both zeros."""

    def build(seed):
        generator = torch.Generator().manual_seed(seed)
        whole = torch.int32 if dtype == torch.float32 else torch.int16
        limits = torch.iinfo(whole)
        bits = torch.randint(limits.min, limits.max + 1, (2, 128), generator=generator)
        weight = bits.to(whole).view(dtype)
        return torch.where(weight.isfinite(), weight, 0.0)

    return st.integers(0, 2**63 - 1).map(build)


@given(st.data(), st.sampled_from(NAMES), st.sampled_from(DTYPES), st.integers(-1, 6))
def test_any_finite_weight_equals_compressed_tensors(data, name, dtype, spread):
    weight = data.draw(weights_of_bits(dtype))
    if spread >= 0:  # else all exponents: nearly every weight is zero beside the largest
        weight = torch.frexp(weight.to(torch.float64)).mantissa.to(dtype) * 2.0**-spread
    assert_equal(weight, PRESETS[name].weight, compressed.preset(name).weights)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("symmetric", [True, False])
def test_every_width_equals_compressed_tensors(bits, symmetric):
    args = compressed.library().QuantizationArgs(
        num_bits=bits, type="int", strategy="group", group_size=32, symmetric=symmetric
    )
    scheme = WeightScheme(
        grid=int_grid(bits), granularity="group", group_size=32, symmetric=symmetric
    )
    assert_equal(torch.randn(16, 96, dtype=torch.bfloat16) + 0.3, scheme, args)


@pytest.mark.parametrize("name", NAMES)
def test_chunks_do_not_show(name, monkeypatch):
    weight = torch.randn(300, 256, dtype=torch.bfloat16)
    whole = quantize_rtn(weight, PRESETS[name].weight)
    monkeypatch.setattr(chunks, "_ELEMENTS", 1000)
    in_chunks = quantize_rtn(weight, PRESETS[name].weight)
    assert in_chunks.block == whole.block
    for part, expected in whole.tensors().items():
        assert same_bits(in_chunks.tensors()[part], expected)


def test_a_tensor_scale_is_that_of_one_row():
    weight = torch.randn(6, 10)
    scheme = WeightScheme(grid=INT8, granularity="tensor")
    ours = quantize_rtn(weight, scheme)
    row = quantize_rtn(weight.reshape(1, -1), replace(scheme, granularity="channel"))
    assert ours.block == (6, 10)
    assert same_bits(ours.scale, row.scale)
    assert same_bits(ours.codes.reshape(1, -1), row.codes)


def test_a_parameter_and_a_strided_weight():
    weight = torch.randn(256, 8, dtype=torch.bfloat16).t()
    scheme = PRESETS["W4A16"].weight
    expected = quantize_rtn(weight.contiguous(), scheme)
    ours = quantize_rtn(torch.nn.Parameter(weight), scheme)
    assert not ours.scale.requires_grad
    assert same_bits(ours.codes, expected.codes)
    assert same_bits(ours.dequantize(), expected.dequantize())


# -- refusals ----------------------------------------------------------------------------------


def test_a_group_size_that_does_not_divide():
    with pytest.raises(ConfigError) as error:
        quantize_rtn(torch.ones(2, 96), PRESETS["W4A16"].weight)
    assert str(error.value) == (
        "group size does not divide the input width: 96 columns, group 128\n\n"
        "hint: take the scheme from `Scheme.fitted`, which falls to a group size that divides"
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "bad", [(torch.nan,), (torch.inf,), (-torch.inf,), (torch.nan, torch.inf, -torch.inf)]
)
def test_non_finite_weights_are_never_quantized(name, dtype, bad):
    weight = torch.randn(4, 256).to(dtype)
    weight[2, 10 : 10 + len(bad)] = torch.tensor(bad, dtype=dtype)
    with pytest.raises(NonFiniteWeight) as error:
        quantize_rtn(weight, PRESETS[name].weight)
    assert isinstance(error.value, CheckpointError)
    assert str(error.value) == (
        f"{len(bad)} of 1024 elements of a weight are NaN or infinite, expected finite values\n\n"
        "hint: the checkpoint is damaged or was saved after a failed step; "
        "`keep` copies the tensor as it is"
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_range_that_overflows_is_never_quantized(dtype):
    weight = torch.zeros(4, 256, dtype=dtype)
    weight[1, 0], weight[1, 1] = torch.finfo(dtype).max, torch.finfo(dtype).min
    assert quantize_rtn(weight, PRESETS["W4A16"].weight).scale.isfinite().all()
    with pytest.raises(NonFiniteWeight) as error:
        quantize_rtn(weight, PRESETS["W4A16_ASYM"].weight)
    assert str(error.value) == (
        f"max - min of a block of a weight overflows `{dtype}`, expected a finite scale\n\n"
        "hint: convert the weight to float32 first, or take a symmetric scheme"
    )


def test_unchecked_rounding_lets_nan_through():
    weight = torch.ones(2, 128)
    weight[1, 5] = torch.nan
    quantized = round_to_nearest(weight, PRESETS["W4A16"].weight)
    assert quantized.scale.isnan().tolist() == [[False], [True]]
    assert quantized.dequantize()[1].isnan().all()


def test_a_fitted_scheme_divides():
    scheme = parse_scheme("W4A16").fitted(96)
    assert scheme is not None
    assert quantize_rtn(torch.randn(3, 96), scheme.weight).scale.shape == (3, 3)
