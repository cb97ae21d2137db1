"""Rounding to nearest, bit for bit against compressed-tensors."""

from dataclasses import replace

import compressed
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import same_bits

from quantload.errors import CheckpointError, ConfigError, NonFiniteWeight
from quantload.loader.formats.compressed_tensors_arguments import written_format
from quantload.loader.formats.compressed_tensors_encode import encode
from quantload.quant import chunks
from quantload.quant.activation import with_input_scale
from quantload.quant.grid import INT8, int_grid
from quantload.quant.rtn import quantize_rtn, round_to_nearest
from quantload.quant.scales import merged_range, shared_range
from quantload.quant.scheme import PRESETS, WeightScheme, parse_scheme

NAMES = (
    "W2A16",
    "W3A16",
    "W4A16",
    "W4A16_ASYM",
    "W8A16",
    "W8A8",
    "FP8",
    "FP8_DYNAMIC",
    "FP8_BLOCK",
    "NVFP4",
    "MXFP4A16",
    "MXFP6A16",
    "MXFP8A16",
)  # every weight of a preset but for more widths of integers
SHARING = ("FP8", "NVFP4")  # one value of the tensor comes from all of it
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
    assert same_bits(ours.scale.reshape(scale.shape), scale)
    assert same_bits(ours.dequantize(), values)
    if scheme.symmetric:
        assert ours.zero is None
        assert not zero.to(torch.float32).any()
    else:
        assert same_bits(ours.zero, zero)


def weight_leaves(tensor, scheme):
    """The tensors of a module but for the number of its input."""
    if scheme.input is not None and scheme.input.needs_scale:
        tensor = with_input_scale(tensor, scheme.input, 1.0)
    leaves = encode(tensor, scheme)
    return {leaf: part for leaf, part in leaves.items() if leaf.startswith("weight")}


def assert_stored_equal(weight, name):
    """Ours is stored in the very bytes of theirs, and means the same; or both cannot scale."""
    scheme, theirs = PRESETS[name], compressed.preset(name)
    layout = written_format(scheme)
    leaves = compressed.produced(weight, theirs, layout)
    if leaves is None:
        with pytest.raises(NonFiniteWeight):
            quantize_rtn(weight, scheme.weight)
        return
    ours = quantize_rtn(weight, scheme.weight)
    values = compressed.compressors()[layout].decompress(leaves, theirs)["weight"]
    if weight.dtype == torch.float16 and ours.outer is not None and float(ours.outer) > 65504:
        # where the global scale overflows float16 theirs is 1: block scales are subnormal or zero
        errors = [(w.double() - weight.double()).norm() for w in (ours.dequantize(), values)]
        assert float(leaves["weight_global_scale"]) == 1
        assert errors[0] <= errors[1]
        return
    stored = weight_leaves(ours, scheme)
    assert set(stored) == set(leaves)
    for leaf, expected in leaves.items():
        assert same_bits(stored[leaf], expected), leaf
    assert same_bits(ours.dequantize(), values)


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


def one_outlier(dtype):
    weight = torch.randn(40, 256) * 1e-4
    weight[17, 77] = -6e4
    return weight.to(dtype)


def ties(dtype):
    return (torch.randint(-28, 29, (40, 256)) / 4).to(dtype)


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
        one_outlier,
        ties,
        uneven,
    ],
)
def test_presets_equal_compressed_tensors(make, name, dtype):
    weight = make(dtype)
    assert weight.isfinite().all()
    assert_stored_equal(weight, name)


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
    assert_stored_equal(weight, name)


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


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_slices_of_rows_are_slices_of_the_whole(name, dtype):
    scheme, weight = PRESETS[name].weight, torch.randn(300, 256).to(dtype)
    weight[200, 3] = 40.0
    cuts = [(0, 128), (128, 256), (256, 300)]
    shared = merged_range([shared_range(weight[start:stop]) for start, stop in cuts])
    assert same_bits(shared, shared_range(weight))
    whole = quantize_rtn(weight, scheme)
    for start, stop in cuts:
        part = quantize_rtn(weight[start:stop], scheme, shared=shared)
        expected = whole.rows(start, stop)
        assert part.evaluation == expected.evaluation
        assert part.tensors().keys() == expected.tensors().keys()
        for field, tensor in expected.tensors().items():
            assert same_bits(part.tensors()[field], tensor), field


@pytest.mark.parametrize("dtype", DTYPES)
def test_members_of_a_fused_group_share_a_global_scale(dtype):
    q, k, v = (torch.randn(8, 64).to(dtype) * scale for scale in (1.0, 3.0, 0.1))
    scheme = PRESETS["NVFP4"]
    shared = merged_range(shared_range(member) for member in (q, k, v))
    theirs = compressed.preset("NVFP4A16")
    for member, others in ((q, (k, v)), (k, (q, v)), (v, (q, k))):
        ours = quantize_rtn(member, scheme.weight, shared=shared)
        leaves = compressed.produced(member, theirs, written_format(scheme), fused=others)
        stored = weight_leaves(ours, scheme)
        assert set(stored) == set(leaves)
        assert all(same_bits(stored[leaf], leaves[leaf]) for leaf in leaves)


@pytest.mark.parametrize("name", SHARING)
def test_a_stated_range_covers_the_weight(name):
    scheme, weight = PRESETS[name].weight, torch.ones(2, 32)
    weight[1, 1] = -3.0
    with pytest.raises(ConfigError) as error:
        quantize_rtn(weight, scheme, shared=torch.tensor([-2.0, 5.0]))
    assert str(error.value) == (
        "a weight reaches from -3 to 1, but the stated range of what shares its scale is -2 to 5"
        "\n\nhint: take `shared_range` of every part, and `merged_range` of these"
    )
    with pytest.raises(NonFiniteWeight, match="another part of the weight, or another member"):
        quantize_rtn(weight, scheme, shared=torch.tensor([-torch.inf, 5.0]))
    weight[0, 0] = torch.inf
    with pytest.raises(NonFiniteWeight, match="1 of 64 elements of a weight are NaN or infinite"):
        quantize_rtn(weight, scheme, shared=torch.tensor([-3.0, 5.0]))


def test_a_stated_range_means_nothing_without_a_value_of_the_tensor():
    weight, scheme = torch.randn(2, 128), PRESETS["W4A16"].weight
    ours = quantize_rtn(weight, scheme, shared=torch.tensor([0.0, 0.0]))
    assert same_bits(ours.codes, quantize_rtn(weight, scheme).codes)


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


@pytest.mark.parametrize(("dtype", "most"), [(torch.float16, 57344.0), (torch.bfloat16, 3.3e38)])
def test_a_power_of_two_that_overflows_is_never_stored(dtype, most):
    weight = torch.ones(2, 64, dtype=dtype)
    weight[1, 3] = -most
    with pytest.raises(NonFiniteWeight) as error:
        quantize_rtn(weight, PRESETS["MXFP4"].weight)
    assert str(error.value) == (
        f"a block of a weight reaches {float(-weight[1, 3]):.4g}, whose power of two overflows "
        f"`{dtype}`, expected a finite scale\n\n"
        "hint: convert the weight to a wider dtype first, or take a scheme with float scales"
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
