"""Decoding against a reference written from the specification, and faults of every tensor."""

import json
from itertools import product

import compressed
import numpy as np
import pytest
import tiny_checkpoints as tiny
import torch
from converting import opened
from faults import silent_faults
from safetensors.torch import save_file

from quantload.errors import FormatMismatch, MissingTensor, NonFiniteWeight, UnsupportedVariant
from quantload.loader.formats.compressed_tensors_presets import NAMED_SCHEMES

MODULE = "model.layers.0.mlp.down_proj"
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
E2M3 = [m / 8 for m in range(8)] + [(1 + m / 8) * 2**e for e in range(3) for m in range(8)]


# -- the reference: one bit after the other --------------------------------------------------------


def bits_of(fields, bits):
    """Little-endian bits of a row of fields."""
    return [(int(field) >> bit) & 1 for field in fields for bit in range(bits)]


def words_of(bit_list, size):
    """Numbers of `size` bits from a row of bits; the last is filled up with zeros."""
    padded = bit_list + [0] * (-len(bit_list) % size)
    return [
        sum(b << n for n, b in enumerate(padded[i : i + size])) for i in range(0, len(padded), size)
    ]


def packed(fields, bits, *, padded=False):
    """int32 words of [N, K] fields: dense, or whole fields in each word."""
    rows = []
    for row in fields:
        if padded:
            words = [
                words_of(bits_of(row[i : i + 32 // bits], bits), 32)[0]
                for i in range(0, len(row), 32 // bits)
            ]
        else:
            words = words_of(bits_of(row, bits), 32)
        rows.append([word - (1 << 32) if word >> 31 else word for word in words])
    return torch.tensor(rows, dtype=torch.int32)


def packed_bytes(fields, bits):
    """uint8 of [N, K] fields."""
    return torch.tensor([words_of(bits_of(row, bits), 8) for row in fields], dtype=torch.uint8)


def write(folder, layout, weights, leaves, *, inputs=None, version="0.20.1", **config):
    """A checkpoint of one module."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    config = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "version": version,
        "config_groups": {"group_0": group},
        **config,
    }
    named = {f"{MODULE}.{leaf}": tensor for leaf, tensor in leaves.items()}
    return tiny.write(folder, {"quantization_config": config}, named)


def times(q, zero, scale, block, dtype):
    """(q - zero) * scale, one element after the other, rounded to dtype at each step."""
    values = torch.empty(q.shape, dtype=dtype)
    for n, k in product(*map(range, q.shape)):
        r, g = n // block[0], k // block[1]
        value = torch.tensor(float(q[n, k]), dtype=dtype) - torch.tensor(
            float(zero[r, g]), dtype=dtype
        )
        values[n, k] = value * scale[r, g]
    return values


# -- integers --------------------------------------------------------------------------------------

STRATEGIES = {
    "tensor": ({"strategy": "tensor"}, lambda n, k: (n, k)),
    "channel": ({"strategy": "channel"}, lambda n, k: (1, k)),
    "group": ({"strategy": "group", "group_size": 8}, lambda n, k: (1, 8)),
    "block": ({"strategy": "block", "block_structure": [4, 16]}, lambda n, k: (4, 16)),
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("bits", range(2, 9))
def test_packed_integers(tmp_path, bits, strategy, symmetric, padded):
    rng = np.random.default_rng(bits)
    n, k = int(rng.integers(2, 12)), int(rng.integers(20, 45))
    dtype = [torch.bfloat16, torch.float16, torch.float32][bits % 3]
    arguments, block_of = STRATEGIES[strategy]
    block = block_of(n, k)
    shape = (-(-n // block[0]), -(-k // block[1]))
    half = 1 << (bits - 1)
    q = rng.integers(-half, half, (n, k))
    zero = np.zeros(shape, int) if symmetric else rng.integers(-half, half, shape)
    scale = torch.from_numpy(rng.uniform(0.01, 0.1, shape)).to(dtype)
    leaves = {
        "weight_packed": packed(q + half, bits, padded=padded),
        "weight_scale": scale,
        "weight_shape": torch.tensor([n, k]),
    }
    if not symmetric:
        fields = packed((zero + half).T, bits, padded=padded).T.clone(
            memory_format=torch.contiguous_format
        )
        is_packed = strategy in ("group", "channel")
        leaves["weight_zero_point"] = fields if is_packed else torch.tensor(zero, dtype=torch.int8)
    weights = {"num_bits": bits, "symmetric": symmetric, **arguments}
    version = "0.17.1" if padded else "0.20.1"
    source = opened(write(tmp_path, "pack-quantized", weights, leaves, version=version))
    weight = source.read_dense(MODULE)
    assert weight.dtype == dtype == source.weights[MODULE].dtype
    assert torch.equal(weight, times(q, zero, scale, block, dtype))


def test_both_layouts_in_as_many_words(tmp_path):
    """20 fields of 3 bits take two words either way: the version decides, and must be there."""
    q = np.arange(20).reshape(1, 20) % 8 - 4
    weights = {"num_bits": 3, "strategy": "channel"}
    scale = torch.ones(1, 1)
    for version, padded in (("0.17.1", True), ("0.18.0", False), ("0.20.1.dev1", False)):
        leaves = {
            "weight_packed": packed(q + 4, 3, padded=padded),
            "weight_scale": scale,
            "weight_shape": torch.tensor([1, 20]),
        }
        assert leaves["weight_packed"].shape == (1, 2)
        source = opened(
            write(tmp_path / version, "pack-quantized", weights, leaves, version=version)
        )
        assert torch.equal(source.read_dense(MODULE), torch.from_numpy(q).float())
    source = opened(write(tmp_path / "none", "pack-quantized", weights, leaves, version=None))
    with pytest.raises(
        UnsupportedVariant, match="20 columns of 3 bits take 2 words in both layouts"
    ):
        source.read_weight(MODULE)


def test_both_layouts_in_one_checkpoint(tmp_path):
    """64 columns of 3 bits take 6 words, 7 in the old layout: one that lost its last has 6, too."""
    weights = {"num_bits": 3, "strategy": "channel"}
    leaves = {"weight_scale": torch.ones(4, 1), "weight_shape": torch.tensor([4, 64])}
    old = packed(np.zeros((4, 64), int), 3, padded=True)
    folder = write(tmp_path, "pack-quantized", weights, leaves, version=None)
    for other in (old, old[:, :-1].contiguous()):
        named = {f"{MODULE}.{leaf}": tensor for leaf, tensor in leaves.items()}
        named |= {f"other.{leaf}": tensor.clone() for leaf, tensor in leaves.items()}
        named |= {f"{MODULE}.weight_packed": old, "other.weight_packed": other.clone()}
        save_file(named, folder / "model.safetensors")
        if other is old:
            assert opened(folder).is_quantized
            continue
        with pytest.raises(FormatMismatch, match=f"`{MODULE}` are packed as before .*`other`"):
            opened(folder)


def test_zero_points_are_packed_like_the_codes(tmp_path):
    """16 rows of zero points take two words either way; 64 columns tell the layout."""
    rng = np.random.default_rng(0)
    q, zero = rng.integers(-4, 4, (16, 64)), rng.integers(-4, 4, (16, 8))
    weights = {"num_bits": 3, "symmetric": False, "strategy": "group", "group_size": 8}
    for padded in (False, True):
        leaves = {
            "weight_packed": packed(q + 4, 3, padded=padded),
            "weight_scale": torch.ones(16, 8),
            "weight_shape": torch.tensor([16, 64]),
            "weight_zero_point": packed((zero + 4).T, 3, padded=padded).T.contiguous(),
        }
        assert leaves["weight_zero_point"].shape == (2, 8)
        folder = write(tmp_path / str(padded), "pack-quantized", weights, leaves, version=None)
        expected = times(q, zero, torch.ones(16, 8), (1, 8), torch.float32)
        assert torch.equal(opened(folder).read_dense(MODULE), expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_integers_in_int8(tmp_path, bits):
    half = 1 << (bits - 1)
    q = torch.randint(-half, half, (6, 32)).to(torch.int8)
    zero = torch.randint(-half, half, (6, 2)).to(torch.int8)
    leaves = {"weight": q, "weight_scale": torch.rand(6, 2), "weight_zero_point": zero}
    weights = {"num_bits": bits, "symmetric": False, "group_size": 16}
    inputs = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
    source = opened(write(tmp_path, "int-quantized", weights, leaves, inputs=inputs))
    expected = times(q, zero, leaves["weight_scale"], (1, 16), torch.float32)
    assert torch.equal(source.read_dense(MODULE), expected)


def test_codes_and_zero_points_off_the_grid(tmp_path):
    weights = {"num_bits": 4, "strategy": "channel", "symmetric": False}
    for leaf, value in (("weight", 8), ("weight", -9), ("weight_zero_point", 9)):
        leaves = {
            "weight": torch.zeros(4, 32, dtype=torch.int8),
            "weight_scale": torch.ones(4, 1),
            "weight_zero_point": torch.zeros(4, 1, dtype=torch.int8),
        }
        leaves[leaf][0, 0] = value
        source = opened(write(tmp_path / f"{leaf}{value}", "int-quantized", weights, leaves))
        with pytest.raises(FormatMismatch, match=rf"{leaf}` has values from .* expected `int4`"):
            source.read_weight(MODULE)


# -- fp8, mx, nvfp4 --------------------------------------------------------------------------------


def _codes(columns, count, seed=0):
    return np.random.default_rng(seed).integers(0, count, (5, columns))


def _signed_table(magnitudes):
    return np.array([*magnitudes, *(-m for m in magnitudes)])


@pytest.mark.parametrize("layout", ["float-quantized", "naive-quantized"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fp8(tmp_path, layout, strategy):
    codes = (torch.randn(10, 24) * 40).to(torch.float8_e4m3fn)
    arguments, block_of = STRATEGIES[strategy]
    block = block_of(10, 24)
    shape = (-(-10 // block[0]), -(-24 // block[1]))
    scale = torch.rand(shape).to(torch.bfloat16)
    folder = write(
        tmp_path,
        layout,
        {"num_bits": 8, "type": "float", **arguments},
        {"weight": codes, "weight_scale": scale},
    )
    expected = times(codes.float(), torch.zeros(shape), scale, block, torch.bfloat16)
    assert torch.equal(opened(folder).read_dense(MODULE), expected)


@pytest.mark.parametrize("width", [32, 96])
@pytest.mark.parametrize("bits", [4, 6, 8])
def test_mx(tmp_path, bits, width):
    table = {4: _signed_table(E2M1), 6: _signed_table(E2M3)}.get(bits)
    exponents = np.random.default_rng(1).integers(100, 140, (5, width // 32))
    exponents[0, 0], exponents[1, 0] = 1, 250
    codes = _codes(width, 1 << bits)
    if table is None:
        codes = torch.from_numpy(codes % 127).to(torch.uint8).view(torch.float8_e4m3fn)
        values, leaves = codes.double().numpy(), {"weight": codes}
    else:
        values, leaves = table[codes], {"weight_packed": packed_bytes(codes, bits)}
    leaves["weight_scale"] = torch.from_numpy(exponents).to(torch.uint8)
    layout = {4: "mxfp4-pack-quantized", 6: "mxfp6-pack-quantized", 8: "mxfp8-quantized"}[bits]
    weights = {"num_bits": bits, "type": "float", "group_size": 32, "scale_dtype": "torch.uint8"}
    source = opened(write(tmp_path, layout, weights, leaves))
    expected = values * np.repeat(2.0 ** (exponents - 127), 32, axis=1)
    weight = source.read_dense(MODULE)
    assert weight.dtype == torch.bfloat16
    assert torch.equal(weight, torch.from_numpy(expected).to(torch.bfloat16))
    name = {4: "MXFP4A16", 6: "MXFP6A16", 8: "MXFP8A16"}[bits]
    assert source.weights[MODULE].scheme.name == name
    leaves["weight_scale"][2, 0] = 255
    with pytest.raises(NonFiniteWeight, match=r"weight_scale` holds NaN"):
        opened(write(tmp_path / "nan", layout, weights, leaves)).read_weight(MODULE)


def _nvfp4(shape=(1,), width=48):
    codes = _codes(width, 16)
    scale = torch.rand(5, width // 16).mul(400).to(torch.float8_e4m3fn)
    leaves = {
        "weight_packed": packed_bytes(codes, 4),
        "weight_scale": scale,
        "weight_global_scale": torch.full(shape, 2345.678),
    }
    weights = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group"}
    return codes, leaves, weights


@pytest.mark.parametrize("shape", [(1,), (1, 1), ()])
def test_nvfp4(tmp_path, shape):
    """Whether the divisor has a dimension decides in which dtype scales are computed."""
    codes, leaves, weights = _nvfp4(shape)
    source = opened(write(tmp_path, "nvfp4-pack-quantized", weights, leaves))
    scale = leaves["weight_scale"].float() / 2345.678
    dtype = torch.float32 if shape else torch.bfloat16
    scale = scale.to(dtype).repeat_interleave(16, dim=1)
    values = torch.from_numpy(_signed_table(E2M1)[codes]).to(dtype)
    expected = (values * scale).to(torch.bfloat16)
    weight = source.read_dense(MODULE)
    assert weight.dtype == torch.bfloat16
    assert torch.equal(weight, expected)
    scheme = source.weights[MODULE].scheme
    library = compressed.decompressed(leaves, scheme)
    assert torch.equal(weight, library)


def test_both_ways_of_nvfp4_differ():
    _, leaves, _ = _nvfp4()
    scalar = leaves | {"weight_global_scale": leaves["weight_global_scale"].reshape(())}
    one, other = (compressed.decompressed(ls, NAMED_SCHEMES["NVFP4A16"]) for ls in (leaves, scalar))
    assert not torch.equal(one, other)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"weight_global_scale": None}, MissingTensor, "weight_global_scale` is missing"),
        ({"weight_global_scale": torch.ones(5)}, FormatMismatch, r"has shape `\(5,\)`"),
        ({"weight_global_scale": torch.ones(1).half()}, FormatMismatch, "is `torch.float16`"),
        ({"weight_global_scale": torch.zeros(1)}, FormatMismatch, "is zero, expected a divisor"),
        ({"weight_global_scale": torch.full((1,), torch.inf)}, NonFiniteWeight, "holds NaN"),
        ({"weight_scale": torch.ones(5, 3)}, FormatMismatch, "is `torch.float32`"),
        (
            {"weight_packed": torch.zeros(5, 23, dtype=torch.uint8)},
            FormatMismatch,
            "23 bytes a row, expected a multiple of the 8 of a group",
        ),
    ],
)
def test_faults_of_nvfp4(tmp_path, changes, error, message):
    _, leaves, weights = _nvfp4()
    leaves = {leaf: part for leaf, part in (leaves | changes).items() if part is not None}
    folder = write(tmp_path, "nvfp4-pack-quantized", weights, leaves)
    with pytest.raises(error, match=message):
        opened(folder).read_weight(MODULE)


@pytest.mark.parametrize(("version", "warns"), [("0.13.0", True), ("0.14.0", False), (None, False)])
def test_exponents_before_014(tmp_path, version, warns):
    leaves = {
        "weight_packed": packed_bytes(_codes(32, 16), 4),
        "weight_scale": torch.full((5, 1), 120, dtype=torch.uint8),
    }
    weights = {"num_bits": 4, "type": "float", "group_size": 32}
    source = opened(write(tmp_path, "mxfp4-pack-quantized", weights, leaves, version=version))
    assert any("bias of 125" in text for text in source.warnings) is warns


# -- groups in full precision, input scales, caches ------------------------------------------------


def test_a_dense_group(tmp_path):
    """What is left of the quantization of a module in full precision is no tensor of its own."""
    leaves = {
        "weight": torch.rand(4, 32),
        "weight_scale": torch.ones(4, 1),
        "weight_zero_point": torch.zeros(4, 1, dtype=torch.int8),
    }
    source = opened(write(tmp_path, "dense", {"num_bits": 4, "strategy": "channel"}, leaves))
    weight = source.weights[MODULE]
    assert not weight.is_quantized
    assert source.plain == {}
    assert torch.equal(source.read_weight(MODULE), leaves["weight"])
    assert any("is in full precision" in text for text in source.warnings)


_STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


@pytest.mark.parametrize(
    ("inputs", "leaf", "shape", "error"),
    [
        (_STATIC, "input_scale", (1,), None),
        (_STATIC, "input_scale", (), None),
        (_STATIC, "input_scale", None, MissingTensor),
        (_STATIC, "input_scale", (2,), FormatMismatch),
        ({**_STATIC, "symmetric": False}, "input_scale", (1,), MissingTensor),
    ],
)
def test_static_inputs(tmp_path, inputs, leaf, shape, error):
    codes = torch.rand(4, 32).to(torch.float8_e4m3fn)
    leaves = {"weight": codes, "weight_scale": torch.ones(1)}
    leaves |= {} if shape is None else {leaf: torch.full(shape, 0.5)}
    weights = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    folder = write(tmp_path, "float-quantized", weights, leaves, inputs=inputs)
    if error is not None:
        with pytest.raises(error, match=r"input_"):
            opened(folder)
        return
    source = opened(folder)
    assert source.weights[MODULE].scheme.input.dynamic is False
    assert source.weights[MODULE].scheme.name == "FP8"
    assert source.read_weight(MODULE).input_scale.tolist() == [0.5]


def test_a_cache_scheme_that_is_no_object(tmp_path):
    folder = write(tmp_path, "dense", None, {"weight": torch.rand(4, 4)}, kv_cache_scheme="fp8")
    with pytest.raises(FormatMismatch, match=r"`kv_cache_scheme`.*is `fp8`, expected an object"):
        opened(folder)


def test_scales_of_a_cache_under_other_names(tmp_path):
    leaves = {"weight": torch.rand(4, 4), "k_scale": torch.ones(1)}
    folder = write(
        tmp_path, "dense", None, leaves, config_groups={}, kv_cache_scheme={"num_bits": 8}
    )
    content = json.loads((folder / "config.json").read_text())
    attention = "model.layers.0.self_attn"
    made = {
        f"{attention}.k_proj.weight": torch.rand(4, 4),
        f"{attention}.k_proj.k_scale": torch.ones(1),
    }
    source = opened(tiny.write(tmp_path / "b", content, made))
    assert list(source.plain) == [f"{attention}.k_scale"]
    assert source.reader.cache_scheme == {"num_bits": 8}


def test_quantized_embeddings_that_the_config_does_not_name(tmp_path):
    """Model-free exports quantize every weight of two dimensions under the target Linear."""
    codes = torch.rand(16, 32).to(torch.float8_e4m3fn)
    folder = write(
        tmp_path,
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "channel"},
        {"weight": codes, "weight_scale": torch.ones(16, 1)},
    )
    content = json.loads((folder / "config.json").read_text())
    name = "model.embed_tokens"
    made = {f"{name}.weight": codes, f"{name}.weight_scale": torch.full((16, 1), 0.25)}
    source = opened(tiny.write(tmp_path / "b", content, made))
    assert source.weights[name].decided_by == "group_0: Linear"
    assert torch.equal(source.read_dense(name), codes.float() * 0.25)


# -- faults ----------------------------------------------------------------------------------------


def _sound(kind):
    if kind == "nvfp4":
        _, leaves, weights = _nvfp4()
        inputs = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group"}
        leaves["input_global_scale"] = torch.ones(1)
        return "nvfp4-pack-quantized", weights, leaves, inputs | {"dynamic": "local"}
    if kind == "mxfp4":
        leaves = {
            "weight_packed": packed_bytes(_codes(96, 16), 4),
            "weight_scale": torch.randint(110, 130, (5, 3)).to(torch.uint8),
        }
        return (
            "mxfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "group_size": 32},
            leaves,
            None,
        )
    if kind == "fp8":
        leaves = {
            "weight": torch.randn(5, 24).to(torch.float8_e4m3fn),
            "weight_scale": torch.rand(5, 3),
            "input_scale": torch.ones(1),
        }
        weights = {"num_bits": 8, "type": "float", "group_size": 8}
        return "float-quantized", weights, leaves, _STATIC
    rng = np.random.default_rng(0)
    leaves = {
        "weight_packed": packed(rng.integers(0, 16, (9, 32)), 4),
        "weight_scale": torch.rand(9, 4),
        "weight_shape": torch.tensor([9, 32]),
        "weight_zero_point": packed(rng.integers(0, 16, (4, 9)), 4).T.contiguous(),
    }
    weights = {"num_bits": 4, "symmetric": False, "group_size": 8}
    return "pack-quantized", weights, leaves, None


@pytest.mark.parametrize("kind", ["packed", "fp8", "mxfp4", "nvfp4"])
def test_no_fault_is_silent(tmp_path, kind):
    layout, weights, leaves, inputs = _sound(kind)
    folder = write(tmp_path / "sound", layout, weights, leaves, inputs=inputs)
    # a partial last group is fine, so no header of an FP8 weight shows that a column is missing
    unseen = ("narrow",) if kind == "fp8" else ()
    assert silent_faults(folder, tmp_path / "faults", without=unseen) == {}


def test_zero_point_of_an_input_in_another_dtype(tmp_path):
    """An int8 zero point whose bytes are called FP8 would be another number."""
    inputs = {"num_bits": 8, "dynamic": False, "symmetric": False, "strategy": "tensor"}
    leaves = {
        "weight": torch.ones(4, 32, dtype=torch.int8),
        "weight_scale": torch.ones(4, 1),
        "input_scale": torch.ones(1),
        "input_zero_point": torch.tensor([-7], dtype=torch.int8),
    }
    weights = {"num_bits": 8, "strategy": "channel"}
    source = opened(write(tmp_path / "a", "int-quantized", weights, leaves, inputs=inputs))
    assert source.read_weight(MODULE).input_zero.tolist() == [-7]
    leaves["input_zero_point"] = leaves["input_zero_point"].view(torch.float8_e4m3fn)
    with pytest.raises(FormatMismatch, match=r"input_zero_point` is `torch.float8_e4m3fn`"):
        opened(write(tmp_path / "b", "int-quantized", weights, leaves, inputs=inputs))
