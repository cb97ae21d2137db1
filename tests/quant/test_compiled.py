"""Compiled loops: the bits of compressed-tensors and of PyTorch, wherever there is a loop."""

import builtins
import threading
from pathlib import Path

import compressed
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import packed_bits, same_bits

from quantload.errors import NonFiniteWeight
from quantload.quant import compiled, packing, rtn
from quantload.quant.compiled_jit import Kernel
from quantload.quant.grid import E2M1, E2M3, E4M3, E5M2, INT4, INT8, int_grid, uint_grid
from quantload.quant.packing import pack_dense
from quantload.quant.rtn import quantize_rtn, round_to_nearest
from quantload.quant.scales import global_scale, minmax_scale, shared_range
from quantload.quant.scheme import PRESETS, WeightScheme

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def _started(monkeypatch):
    monkeypatch.setattr(compiled, "_seen", compiled._WORTH_STARTING)


def groups(grid, size=32, *, symmetric=True, scale="float"):
    return WeightScheme(
        grid=grid, granularity="group", group_size=size, symmetric=symmetric, scale=scale
    )


SCHEMES = {
    **{f"int{bits}": groups(int_grid(bits)) for bits in range(2, 9)},
    **{f"int{bits} asymmetric": groups(int_grid(bits), symmetric=False) for bits in range(2, 9)},
    "uint4 asymmetric": groups(uint_grid(4), symmetric=False),
    "uint8 asymmetric": groups(uint_grid(8), symmetric=False),
    "int8 channel": WeightScheme(grid=INT8, granularity="channel"),
    "int4 channel asymmetric": WeightScheme(grid=INT4, granularity="channel", symmetric=False),
    "int8 tensor": WeightScheme(grid=INT8, granularity="tensor"),
    "int8 block": WeightScheme(grid=INT8, granularity="block", block=(16, 32)),
    "int4 block asymmetric": WeightScheme(
        grid=INT4, granularity="block", block=(16, 32), symmetric=False
    ),
    "fp8 channel": WeightScheme(grid=E4M3, granularity="channel"),
    "fp8 group": groups(E4M3),
    "fp8 tensor": WeightScheme(grid=E4M3, granularity="tensor"),
    "fp8 block": WeightScheme(grid=E4M3, granularity="block", block=(128, 128)),
    "nvfp4": groups(E2M1, 16, scale="e4m3"),
    "mxfp4": groups(E2M1, scale="e8m0"),
    "mxfp6": groups(E2M3, scale="e8m0"),
    "mxfp8": groups(E4M3, scale="e8m0"),
    "fp4 channel": WeightScheme(grid=E2M1, granularity="channel"),
}
RAGGED = [name for name, scheme in SCHEMES.items() if scheme.granularity != "group"]


def scale_of_range(shared, scheme):
    low, high = shared.reshape(2, 1, 1)
    return minmax_scale(low, high, scheme.grid, symmetric=True)[0]


def by_loop(weight, scheme):
    """Codes, stored scale and zero point as the compiled loop gives them."""
    given, outer = None, None
    if scheme.scale == "e4m3":
        outer = global_scale(shared_range(weight))
    elif scheme.granularity == "tensor":
        given = scale_of_range(shared_range(weight), scheme)
    found = compiled.quantize(weight, scheme, given=given, outer=outer)
    assert found is not None, "there is a loop"
    return found


def assert_equals_torch(weight, scheme):
    """The loop and PyTorch agree, but for codes under a scale that is not finite."""
    codes, scale, zero = by_loop(weight, scheme)
    expected = round_to_nearest(weight, scheme)
    finite = expected.scale.to(torch.float32).isfinite()
    assert torch.equal(scale.to(torch.float32).isfinite(), finite)
    assert scale.dtype == expected.scale.dtype
    assert same_bits(scale.to(torch.float32)[finite], expected.scale.to(torch.float32)[finite])
    height, width = expected.block
    of_element = finite.repeat_interleave(height, 0).repeat_interleave(width, 1)
    of_element = of_element[: weight.shape[0], : weight.shape[1]]
    assert codes.dtype == expected.codes.dtype
    assert torch.equal(
        codes.view(torch.uint8)[of_element], expected.codes.view(torch.uint8)[of_element]
    )
    assert (zero is None) == (expected.zero is None)
    if zero is not None:
        assert zero.dtype == expected.zero.dtype
        assert torch.equal(zero[finite], expected.zero[finite])


# -- values ----------------------------------------------------------------------------------------


def normal(dtype):
    return torch.randn(40, 256).to(dtype)


def shifted(dtype):
    return (torch.randn(40, 256) + 0.7).to(dtype)


def zeros(dtype):
    weight = torch.randn(40, 256)
    weight[:20, :128] = 0.0
    weight[3], weight[4] = 0.0, -0.0
    weight[30:, 128:] = -0.0
    return weight.to(dtype)


def one_sign(dtype):
    weight = torch.rand(40, 256) + 1.0
    weight[::2] *= -1.0
    return weight.to(dtype)


def subnormal(dtype):
    smallest = torch.finfo(dtype).smallest_normal / 2 ** (torch.finfo(dtype).bits // 4)
    return (torch.randint(-6, 7, (40, 256)).to(torch.float64) * smallest).to(dtype)


def largest(dtype):
    weight = torch.rand(40, 256).to(dtype)
    weight[:, ::5] = torch.finfo(dtype).max
    weight[::2, 1::7] = torch.finfo(dtype).min
    return weight


def uneven(dtype):
    return (torch.randn(40, 256) * 10.0 ** torch.linspace(-9, 4, 256)).to(dtype)


def ties(dtype):
    """Multiples of a quarter beside the number that makes a scale of one."""
    weight = torch.randint(-28, 29, (40, 256)) / 4
    weight[:, ::16] = 7.5
    return weight.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize(
    "make", [normal, shifted, zeros, one_sign, subnormal, largest, uneven, ties]
)
def test_the_loop_equals_torch(make, name, dtype):
    assert_equals_torch(make(dtype), SCHEMES[name])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**63 - 1), st.sampled_from(sorted(SCHEMES)), st.sampled_from(DTYPES))
def test_the_loop_equals_torch_for_any_bits(seed, name, dtype):
    """Every exponent, subnormals, both zeros, NaN and infinity: and blocks free of these."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.int32 if dtype == torch.float32 else torch.int16
    limits = torch.iinfo(whole)
    bits = torch.randint(limits.min, limits.max + 1, (9, 128), generator=generator)
    weight = bits.to(whole).view(dtype)
    assert_equals_torch(torch.where(weight.isfinite(), weight, 0.0), SCHEMES[name])
    narrow = torch.frexp(weight.nan_to_num().to(torch.float64)).mantissa.to(dtype)
    assert_equals_torch(narrow, SCHEMES[name])
    if SCHEMES[name].scale != "e4m3":  # whose range alone tells, see `quantize_rtn`
        assert_equals_torch(weight, SCHEMES[name])


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 300),
    st.integers(1, 300),
    st.sampled_from(RAGGED),
    st.sampled_from(DTYPES),
    st.integers(0, 2**32 - 1),
)
def test_any_shape(rows, columns, name, dtype, seed):
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)
    assert_equals_torch(weight, SCHEMES[name])


@pytest.mark.parametrize("shape", [(1, 32), (1, 1024), (7, 96), (129, 64)])
@pytest.mark.parametrize("name", [name for name in SCHEMES if name not in RAGGED])
def test_groups_of_any_shape(name, shape):
    assert_equals_torch(torch.randn(shape, dtype=torch.bfloat16), SCHEMES[name])


@pytest.mark.parametrize("size", [16, 64, 128, 3])
def test_group_sizes(size):
    assert_equals_torch(torch.randn(5, 384, dtype=torch.bfloat16), groups(INT4, size))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("grid", [INT4, INT8, E4M3, E2M1, E2M3], ids=lambda grid: grid.name)
def test_every_number_under_every_kind_of_scale(grid, dtype):
    """Each finite number of 16 bits in a row, under a largest number of each exponent."""
    numbers = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    numbers = numbers[numbers.isfinite()]
    tops = torch.tensor([1.0, 1.37, 6.55, 448.0, 3e-4, 2e4]).to(dtype)
    rows = [torch.cat([torch.where(numbers.abs() <= top, numbers, 0), top[None]]) for top in tops]
    assert_equals_torch(torch.stack(rows), WeightScheme(grid=grid, granularity="channel"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["W4A16", "W4A16_ASYM", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK"])
def test_the_loop_equals_compressed_tensors(name, dtype):
    weight = uneven(dtype)
    codes, scale, zero = by_loop(weight, PRESETS[name].weight)
    expected = compressed.quantized(weight, compressed.preset(name).weights)
    assert same_bits(codes, expected[0])
    assert same_bits(scale, expected[1])
    assert zero is None or same_bits(zero, expected[2])


@pytest.mark.parametrize("name", ["int8 tensor", "fp8 tensor"])
def test_slices_share_a_range(name):
    weight, scheme = torch.randn(64, 96, dtype=torch.bfloat16), SCHEMES[name]
    whole, given = round_to_nearest(weight, scheme), scale_of_range(shared_range(weight), scheme)
    for start in range(0, 64, 16):
        found = compiled.quantize(weight[start : start + 16], scheme, given=given)
        assert same_bits(found[0], whole.codes[start : start + 16])
        assert same_bits(found[1], whole.scale)


def test_a_parameter_and_a_strided_weight():
    weight = torch.nn.Parameter(torch.randn(256, 8, dtype=torch.bfloat16).t())
    codes, scale, _ = by_loop(weight, SCHEMES["int4"])
    assert not scale.requires_grad
    assert_equals_torch(weight, SCHEMES["int4"])
    assert codes.is_contiguous()


@pytest.mark.parametrize("shape", [(8, 1), (8, 100), (264, 65), (16, 256)])
def test_eight_rows_are_packed_down(shape):
    codes = torch.randint(-8, 8, shape).to(torch.int8)
    packed = compiled.pack_eight_rows(codes)
    assert packed.shape == (shape[1], shape[0] // 8)
    fields = (codes.numpy().astype(np.int64) + 8).reshape(-1, 8, shape[1])
    expected = sum(fields[:, i] << (4 * place) for i, place in enumerate((0, 4, 1, 5, 2, 6, 3, 7)))
    assert packed.numpy().view(np.uint32).T.tolist() == expected.tolist()


# -- which way is taken ----------------------------------------------------------------------------


def no_torch(*_, **__):
    pytest.fail("PyTorch was used")


@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if preset.weight])
def test_every_preset_is_quantized_by_a_loop(name, monkeypatch):
    weight, scheme = torch.randn(128, 256, dtype=torch.bfloat16), PRESETS[name].weight
    expected = round_to_nearest(weight, scheme)
    monkeypatch.setattr(rtn, "scaled_blocks", no_torch)
    ours = quantize_rtn(weight, scheme)
    assert ours.block == expected.block
    assert ours.evaluation == expected.evaluation
    assert ours.tensors().keys() == expected.tensors().keys()
    for part, tensor in expected.tensors().items():
        assert same_bits(ours.tensors()[part], tensor)


@pytest.mark.parametrize("bits", range(2, 8))
def test_fields_are_packed_by_a_loop(bits, monkeypatch):
    fields = torch.randint(0, 1 << bits, (3, 40)).to(torch.uint8)
    expected = torch.from_numpy(
        np.stack([packed_bits(row, bits, per_word=None) for row in fields.tolist()])
    )
    monkeypatch.setattr(packing, "_packed_by_torch", no_torch)
    assert torch.equal(pack_dense(fields, bits), expected)


@pytest.mark.parametrize(
    ("weight", "scheme"),
    [
        (torch.randn(4, 64, dtype=torch.float64), SCHEMES["int4"]),
        (torch.randn(0, 64), SCHEMES["int4"]),
        (torch.randn(4, 64), WeightScheme(grid=E5M2, granularity="channel")),
        (torch.randn(4, 64), WeightScheme(grid=E4M3, granularity="channel", symmetric=False)),
        (torch.empty(4, 64, device="meta"), SCHEMES["int4"]),
    ],
    ids=["float64", "empty", "e5m2", "fp8 with zero points", "meta"],
)
def test_where_there_is_no_loop(weight, scheme):
    assert compiled.quantize(weight, scheme) is None


def test_bad_weights_are_refused_as_by_torch():
    weight = torch.randn(4, 256, dtype=torch.bfloat16)
    weight[2, 10] = torch.nan
    for preset in PRESETS.values():
        if preset.weight is not None:
            with pytest.raises(NonFiniteWeight, match="1 of 1024 elements of a weight are NaN"):
                quantize_rtn(weight, preset.weight)


def without_numba(monkeypatch, error):
    real = builtins.__import__

    def refuse(name, *arguments, **options):
        if name.partition(".")[0] == "numba":
            raise error
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    monkeypatch.setattr(compiled, "_modules", compiled._modules.__wrapped__)


def test_without_numba_torch_does_all(monkeypatch):
    weight = torch.randn(8, 256, dtype=torch.bfloat16)
    expected = quantize_rtn(weight, PRESETS["W4A16"].weight)
    fields = expected.codes.view(torch.uint8) & 15
    words = pack_dense(fields, 4)
    without_numba(monkeypatch, ModuleNotFoundError("No module named 'numba'"))
    assert not compiled.start()
    assert compiled.quantize(weight, PRESETS["W4A16"].weight) is None
    ours = quantize_rtn(weight, PRESETS["W4A16"].weight)
    assert same_bits(ours.codes, expected.codes)
    assert same_bits(ours.scale, expected.scale)
    assert torch.equal(pack_dense(fields, 4), words)


def test_a_numba_that_does_not_fit_is_named(monkeypatch):
    without_numba(monkeypatch, ImportError("Numba needs NumPy 2.4 or less"))
    with pytest.warns(UserWarning, match="numba cannot be used, PyTorch quantizes: Numba needs"):
        assert not compiled.start()


def test_little_work_does_not_start_numba(monkeypatch):
    weight, starts = torch.randn(64, 256, dtype=torch.bfloat16), []
    monkeypatch.setattr(compiled, "_seen", 0)
    monkeypatch.setattr(compiled, "_WORTH_STARTING", 2 * weight.numel())
    monkeypatch.setattr(compiled, "_modules", lambda: starts.append(1))
    quantize_rtn(weight, SCHEMES["int4"])
    assert starts == []
    quantize_rtn(weight, SCHEMES["int4"])
    assert starts == [1]


def test_numba_that_is_turned_off(monkeypatch):
    monkeypatch.setattr("numba.config.DISABLE_JIT", 1)
    monkeypatch.setattr(compiled, "_modules", compiled._modules.__wrapped__)
    assert not compiled.start()
    assert compiled.quantize(torch.randn(4, 64), SCHEMES["int4"]) is None


@pytest.mark.parametrize("threads", [4])
def test_threads_do_not_disturb_each_other(threads):
    weights = [torch.randn(64, 1024, dtype=torch.bfloat16) for _ in range(threads)]
    results = [None] * threads

    def work(i):
        for _ in range(20):
            results[i] = by_loop(weights[i], SCHEMES["int4"])

    workers = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for weight, (codes, scale, _) in zip(weights, results, strict=True):
        expected = round_to_nearest(weight, SCHEMES["int4"])
        assert same_bits(codes, expected.codes)
        assert same_bits(scale, expected.scale)


# -- the cache on disk -----------------------------------------------------------------------------


def compile_copy(folder, monkeypatch, cache):
    """A kernel of a source file in `folder`, with numba's cache at `cache`."""
    source = Path(folder) / "doubling.py"
    source.write_text(
        "def double(array):\n    for i in range(array.size):\n        array[i] *= 2\n"
    )
    namespace = {}
    exec(compile(source.read_text(), str(source), "exec"), namespace)
    monkeypatch.setattr("numba.config.CACHE_DIR", str(cache))
    return Kernel(namespace["double"])


def test_compiled_code_is_kept(tmp_path, monkeypatch):
    kernel = compile_copy(tmp_path, monkeypatch, tmp_path / "kept")
    array = np.arange(3)
    kernel(array)
    assert array.tolist() == [0, 2, 4]
    assert list((tmp_path / "kept").rglob("*.nbc"))


def test_other_sources_are_compiled_anew(tmp_path, monkeypatch):
    """numba looks at the file of a function alone, not at those of what it calls."""
    for digest in ("one", "one", "two"):
        monkeypatch.setattr("quantload.quant.compiled_jit._sources_digest", lambda d=digest: d)
        compile_copy(tmp_path, monkeypatch, tmp_path / "kept")(np.arange(3))
    kept = sorted(path.name for path in (tmp_path / "kept").rglob("*.nbi"))
    assert [("double-one" in name, "double-two" in name) for name in kept] == [
        (True, False),
        (False, True),
    ]


def test_a_damaged_cache_is_not_used(tmp_path, monkeypatch):
    compile_copy(tmp_path, monkeypatch, tmp_path / "kept")(np.arange(3))
    index, *_ = (tmp_path / "kept").rglob("*.nbi")
    index.write_bytes(index.read_bytes()[:-20])
    array = np.arange(3)
    compile_copy(tmp_path, monkeypatch, tmp_path / "kept")(array)
    assert array.tolist() == [0, 2, 4]


def test_no_place_for_a_cache():
    """A function without a source file has none, as one in a folder that cannot be written."""
    namespace = {}
    exec("def negate(array):\n    array *= -1", namespace)
    kernel, array = Kernel(namespace["negate"]), np.arange(3)
    kernel(array)
    assert array.tolist() == [0, -1, -2]
    assert not kernel._is_cached


def test_an_error_of_a_loop_is_not_hidden(tmp_path, monkeypatch):
    kernel = compile_copy(tmp_path, monkeypatch, tmp_path / "kept")
    with pytest.raises(Exception, match=r"(?i)typ"):
        kernel("no array")
