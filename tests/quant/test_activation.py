"""Fake quantization of inputs, bit for bit against compressed-tensors and against NumPy."""

import shutil

import compressed
import pytest
import torch
from oracles import as_numpy, e4m3_values, fake_quantized, same_bits

from quantload.errors import ConfigError
from quantload.quant.activation import (
    NVFP4_ABSMAX,
    constant_input_scale,
    default_absmax,
    fake_quantize,
    fake_quantize_columns,
    fake_quantize_static,
    token_codes,
    with_input_scale,
)
from quantload.quant.grid import E4M3, INT8, int_grid
from quantload.quant.rtn import quantize_rtn
from quantload.quant.scheme import PRESETS, InputScheme, parse_scheme
from quantload.runtime.rounded_gemm import _codes_with_zeros

NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
PRESET_INPUTS = [
    (name, PRESETS[name].input)
    for name in ("W4A4", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP4", "MXFP8")
]
NVFP4 = PRESETS["NVFP4"].input


def arguments(**fields):
    return compressed.library().QuantizationArgs(dynamic=True, **fields)


def normal(dtype):
    return torch.randn(2, 5, 256).to(dtype)


def with_outliers(dtype):
    x = torch.randn(2, 5, 256)
    x[0, 1, 7], x[1, :, 200] = 300.0, -70.0
    return x.to(dtype)


def with_zeros(dtype):
    x = torch.randn(2, 5, 256)
    x[0, 2], x[1, 3, :128], x[1, 4], x[0, :, ::3] = 0.0, 0.0, -0.0, -0.0
    return x.to(dtype)


def tiny_and_huge(dtype):
    info = torch.finfo(dtype)
    x = torch.randn(2, 5, 256).clamp(-2.0, 2.0).to(torch.float64)
    x[0] *= info.smallest_normal / 16
    x[1] *= info.max / 4
    return x.to(dtype)


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize(("name", "scheme"), PRESET_INPUTS)
@pytest.mark.parametrize("make", [normal, with_outliers, with_zeros, tiny_and_huge])
def test_presets_equal_compressed_tensors(make, name, scheme, dtype):
    x = make(dtype)
    expected = compressed.fake_quantized(x, compressed.preset(name).input_activations)
    assert same_bits(fake_quantize(x, scheme), expected)


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("strategy", "scheme"),
    [
        ({"strategy": "token"}, {"granularity": "token"}),
        ({"strategy": "tensor"}, {"granularity": "tensor"}),
        ({"strategy": "group", "group_size": 64}, {"granularity": "group", "group_size": 64}),
    ],
)
@pytest.mark.parametrize("bits", [4, 8])
def test_integers_equal_compressed_tensors(bits, strategy, scheme, symmetric, dtype):
    args = arguments(num_bits=bits, type="int", symmetric=symmetric, **strategy)
    x = torch.randn(2, 5, 256).to(dtype) + 0.25
    ours = fake_quantize(x, InputScheme(grid=int_grid(bits), symmetric=symmetric, **scheme))
    assert same_bits(ours, compressed.fake_quantized(x, args))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(("name", "scheme"), PRESET_INPUTS)
def test_nan_and_infinity_spoil_what_shares_their_scale(name, scheme, bad):
    x = torch.randn(2, 5, 256)
    x[0, 3, 2] = bad
    ours = fake_quantize(x, scheme)
    spoilt = ours.isnan()
    width = scheme.group_size or 256
    assert spoilt[0, 3, :width].all()
    assert spoilt.sum() == width
    expected = compressed.fake_quantized(x, compressed.preset(name).input_activations)
    if scheme.scale == "e8m0":  # the library takes the bits of NaN for a power of two
        expected[0, 3, :width] = torch.nan
    assert same_bits(ours, expected)


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize(
    ("grid", "values"), [(INT8, None), (int_grid(4), None), (E4M3, e4m3_values())]
)
@pytest.mark.parametrize("size", [None, 128, 48])
def test_two_dimensions_and_a_ragged_last_group(size, grid, values, dtype):
    x = torch.randn(4, 200).to(dtype)
    x[1, :64] = 0.0
    expected = torch.empty_like(x)
    for token, row in enumerate(as_numpy(x)):
        for start in range(0, 200, size or 200):
            part = fake_quantized(
                row[start : start + (size or 200)],
                NAMES[dtype],
                low=grid.low,
                high=grid.high,
                values=values,
            )
            expected[token, start : start + len(part)] = torch.from_numpy(part)
    granularity = "token" if size is None else "group"
    scheme = InputScheme(grid=grid, granularity=granularity, group_size=size)
    assert same_bits(fake_quantize(x, scheme), expected)


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (3, 0)])
@pytest.mark.parametrize(("name", "scheme"), PRESET_INPUTS)
def test_nothing_stays_nothing(name, scheme, shape):
    assert name in PRESETS
    assert fake_quantize(torch.empty(shape), scheme).shape == shape


@pytest.mark.parametrize("shape", [(64,), (1, 64), (2, 3, 4, 64)])
def test_any_number_of_axes(shape):
    x = torch.randn(shape)
    ours = fake_quantize(x, InputScheme(grid=INT8, granularity="token"))
    one_by_one = [
        fake_quantize(token.reshape(1, -1), InputScheme(grid=INT8, granularity="token"))
        for token in x.reshape(-1, 64)
    ]
    assert ours.shape == shape
    assert same_bits(ours.reshape(-1, 64), torch.cat(one_by_one))


def test_the_input_is_left_alone_and_strides_do_not_matter():
    x = torch.randn(3, 64, 5).transpose(1, 2)
    before = x.clone()
    scheme = InputScheme(grid=E4M3, granularity="group", group_size=32)
    assert same_bits(fake_quantize(x, scheme), fake_quantize(x.contiguous(), scheme))
    assert same_bits(x, before)


@pytest.mark.parametrize("grid", [INT8, E4M3])
def test_codes_of_tokens_are_what_fake_quantization_means(grid):
    x = torch.randn(6, 96, dtype=torch.bfloat16)
    scheme = InputScheme(grid=grid, granularity="token")
    codes, scale = token_codes(x, scheme)
    assert codes.dtype == grid.storage
    assert scale.shape == (6, 1)
    assert torch.equal(codes.to(torch.bfloat16) * scale, fake_quantize(x, scheme))


def test_codes_of_tokens_do_not_look_for_nan():
    x = torch.full((2, 8), torch.nan)
    _, scale = token_codes(x, InputScheme(grid=INT8, granularity="token"))
    assert scale.isnan().all()


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("make", [normal, with_outliers, with_zeros, tiny_and_huge])
@pytest.mark.parametrize("absmax", [2688.0, 5.0, 1e-3])
def test_nvfp4_inputs_equal_compressed_tensors(make, dtype, absmax):
    x, outer = make(dtype), constant_input_scale(NVFP4, absmax)
    args = compressed.preset("NVFP4").input_activations
    ours = fake_quantize(x, NVFP4, outer=outer)
    assert ours.dtype == dtype
    assert same_bits(ours, compressed.fake_quantized(x, args, outer))


def test_e4m3_scales_want_their_global_scale():
    with pytest.raises(ConfigError, match="inputs with e4m3 scales take a global scale from"):
        fake_quantize(torch.ones(1, 16), NVFP4)


# -- fixed numbers -----------------------------------------------------------------------------


@pytest.mark.parametrize("absmax", [0.0, 1e-30, 0.37, 1.0, 6.0, 250.0, 2688.0, 1e6])
def test_numbers_of_inputs_equal_compressed_tensors(absmax):
    library, reach = compressed.library(), torch.tensor([absmax])
    outer = constant_input_scale(NVFP4, absmax)
    assert same_bits(outer, library.generate_gparam(-reach, reach))
    args = compressed.preset("FP8").input_activations
    for dtype in (torch.float32, torch.bfloat16):
        low, high = -reach.to(dtype), reach.to(dtype)
        scale = constant_input_scale(PRESETS["FP8"].input, absmax, dtype=dtype)
        assert same_bits(scale, library.calculate_qparams(low, high, args)[0])


def test_the_default_of_nvfp4_inputs_covers_what_its_text_says():
    assert default_absmax(PRESETS["FP8"].input) is None
    assert default_absmax(NVFP4) == NVFP4_ABSMAX
    outer = constant_input_scale(NVFP4, NVFP4_ABSMAX)
    x = torch.zeros(4, 16)
    x[:, 0] = torch.tensor([1.0, 1 / 28672, 1 / 450_000, 1 / 470_000]) * NVFP4_ABSMAX
    kept = fake_quantize(x, NVFP4, outer=outer)[:, 0] / x[:, 0]
    assert (kept[:2] - 1).abs().max() < 1 / 16
    assert kept[2] > 0
    assert kept[3] == 0
    assert fake_quantize(x * 4, NVFP4, outer=outer)[0, 0] == NVFP4_ABSMAX  # clipped


@pytest.mark.parametrize("absmax", [-1.0, torch.nan, torch.inf])
def test_numbers_that_no_input_reaches(absmax):
    with pytest.raises(ConfigError) as error:
        constant_input_scale(NVFP4, absmax)
    assert str(error.value) == (
        f"the largest |x| of an input is `{absmax}`, expected a finite number"
    )


def test_numbers_that_the_dtype_does_not_hold():
    with pytest.raises(ConfigError, match=r"which `torch\.float16` does not hold"):
        constant_input_scale(PRESETS["FP8"].input, 1e6, dtype=torch.float16)


def test_a_weight_with_the_number_of_its_input():
    weight = torch.randn(4, 32, dtype=torch.bfloat16)
    fp8 = quantize_rtn(weight, PRESETS["FP8"].weight)
    ours = with_input_scale(fp8, PRESETS["FP8"].input, 7.0)
    assert (ours.evaluation.input, ours.input_scale.dtype) == ("*", torch.bfloat16)
    assert ours.input_scale.tolist() == [7.0 / 448]
    nvfp4 = quantize_rtn(weight, PRESETS["NVFP4"].weight)
    ours = with_input_scale(nvfp4, NVFP4, 7.0)
    assert (ours.evaluation.input, ours.input_scale.dtype) == ("/", torch.float32)
    assert same_bits(ours.input_scale, constant_input_scale(NVFP4, 7.0))
    assert same_bits(ours.dequantize(), nvfp4.dequantize())


def test_static_schemes_want_their_scale():
    scheme = InputScheme(grid=INT8, granularity="tensor", dynamic=False)
    with pytest.raises(ConfigError) as error:
        fake_quantize(torch.ones(1, 4), scheme)
    assert str(error.value) == (
        "a static input scheme takes its scale from the checkpoint, found `dynamic = false`"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["int8", "int8 asymmetric", "e4m3"])
def test_static_inputs_are_rounded_as_in_the_library(dtype, scale_dtype, kind):
    x = torch.randn(7, 48, dtype=dtype)
    scale = torch.tensor([0.0173], dtype=scale_dtype)
    zero = torch.tensor([11], dtype=torch.int8) if "asymmetric" in kind else None
    args = {"num_bits": 8, "type": "float" if kind == "e4m3" else "int", "strategy": "tensor"}
    wide = scale.to(torch.promote_types(dtype, scale_dtype))  # as a model casts its scales
    expected = _library_static(x, wide, zero, {**args, "symmetric": zero is None})
    found = fake_quantize_static(x, E4M3 if kind == "e4m3" else INT8, scale, zero)
    assert found.dtype == x.dtype
    assert torch.equal(found, expected.to(dtype))


def _library_static(x, scale, zero, args):
    library = compressed.library()
    return library.fake_quantize(x, scale, zero, library.QuantizationArgs(**args))


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile wants a C++ compiler")
@pytest.mark.parametrize("name", ["W4A4", "FP8_DYNAMIC", "MXFP4XFP8", "NVFP4"])
def test_compiled_code_rounds_as_the_format_says(name):
    """A compiler that fuses the steps keeps float32 between them, and finds other codes."""
    scheme = parse_scheme(name).input
    outer = torch.tensor([300.0]) if scheme.needs_scale else None
    x = torch.randn(48, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    compiled = torch.compile(lambda x: fake_quantize(x, scheme, outer=outer) * 2, fullgraph=True)
    assert torch.equal(compiled(x), fake_quantize(x, scheme, outer=outer) * 2)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile wants a C++ compiler")
def test_compiled_code_rounds_with_fixed_scales_and_to_codes_of_tokens():
    scale, zero = torch.tensor([0.0173], dtype=torch.bfloat16), torch.tensor([3])
    scheme = parse_scheme("W8A8").input

    def both(x):
        return fake_quantize_static(x, INT8, scale, zero) * 2, token_codes(x, scheme)

    x = torch.randn(48, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    (fixed, (codes, scales)), (expected, pair) = torch.compile(both, fullgraph=True)(x), both(x)
    assert torch.equal(fixed, expected)
    assert torch.equal(codes, pair[0])
    assert torch.equal(scales, pair[1])


HALVES = ((0, 512), (200, 512))  # the second begins inside a group


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile wants a C++ compiler")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("columns", HALVES, ids=str)
@pytest.mark.parametrize("name", ["W4A4", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP4XFP8", "NVFP4"])
def test_compiled_code_rounds_columns_as_the_format_says(name, columns, backend):
    """The codes of a part of the columns are those of all: what others reach is larger here."""
    scheme = parse_scheme(name).input
    outer = torch.tensor([300.0]) if scheme.needs_scale else None
    x = torch.randn(2, 24, 200, generator=torch.Generator().manual_seed(0)).bfloat16()

    def half(x):
        shared = fake_quantize_columns(
            x, scheme, columns, exchange_max=lambda ends: ends * 1.25, outer=outer
        )
        return shared * 2

    torch._dynamo.reset()
    assert torch.equal(torch.compile(half, fullgraph=True, backend=backend)(x), half(x))


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile wants a C++ compiler")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_codes_of_tokens_whose_other_columns_are_elsewhere(backend):
    scheme = parse_scheme("W8A8").input
    x = torch.randn(48, 512, generator=torch.Generator().manual_seed(0)).bfloat16()

    def shared(x):
        symmetric = token_codes(x, scheme, exchange_max=lambda reached: reached * 1.25)
        return *symmetric, *_codes_with_zeros(x, lambda ends: ends * 1.25)

    torch._dynamo.reset()
    found = torch.compile(shared, fullgraph=True, backend=backend)(x)
    for part, expected in zip(found, shared(x), strict=True):
        assert torch.equal(part, expected)
