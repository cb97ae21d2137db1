"""Decoding GGUF blocks; the oracles are `gguf.quants` and formulas written out in NumPy."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_gguf import write_tiny_gguf

from quantload.errors import NonFiniteWeight, UnsupportedVariant
from quantload.loader.checkpoint import Checkpoint, TensorEntry
from quantload.loader.formats import gguf as gguf_format
from quantload.loader.formats.gguf import GgufReader
from quantload.loader.gguf_file import open_gguf
from quantload.quant.qtensor import QuantTensor

SHARED = Path(__file__).parents[3] / "../shared/checkpoints/gguf-0.19.0"
FOLDERS = sorted(folder.name for folder in SHARED.iterdir()) if SHARED.is_dir() else []
CANONICAL = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4")
DECODED = sorted(
    kind.name for kind in gguf.quants._type_traits if kind.name not in (*CANONICAL, "BF16")
)
ROWS, COLUMNS = 6, 512


def values_of(decoded):
    return decoded.dequantize() if isinstance(decoded, QuantTensor) else decoded


def bits(values):
    """Return float32 values as integers, so that NaN and the sign of zero count too."""
    return np.ascontiguousarray(values, dtype=np.float32).view(np.int32)


def block_file(tmp_path, type_name, *, rows=ROWS, heads=0, seed=0):
    """Return a checkpoint of one weight of random blocks, and its bytes [N, bytes per row]."""
    size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    shape = (rows, COLUMNS // size * num_bytes)
    # bytes below 0x78: float16 and e8m0 scales anywhere in a block stay finite
    raw = np.random.default_rng(seed).integers(0, 0x78, shape, dtype=np.uint8)
    file = tmp_path / "blocks"
    file.write_bytes(b"head" + raw.tobytes())
    name = "layer.weight"
    entry = TensorEntry(name, torch.uint8, shape, file, 4, raw.size, type_name, heads)
    return Checkpoint("test", tmp_path, {}, {name: entry}, gguf_file=file), raw


# -- the producer's truth ------------------------------------------------------------------------


@pytest.mark.skipif(not FOLDERS, reason="no folder shared/checkpoints")
@pytest.mark.parametrize("folder", FOLDERS or ["none"])
def test_weights_are_the_producers_bit_for_bit(folder):
    expected = load_file(SHARED / folder / "expected.safetensors")
    manifest = json.loads((SHARED / folder / "MANIFEST.json").read_text())
    reader = GgufReader(open_gguf(SHARED / folder / f"{folder}.gguf"))
    weights = reader.weights()
    recorded = {name.partition("@")[0] for name in expected if ".weight" in name}
    assert recorded == {f"{module}.weight" for module in weights}
    for module, weight in weights.items():
        name = f"{module}.weight"
        found = values_of(reader.decode(weight)).float()
        rows = manifest["expected_rows"].get(name)
        if rows is None:
            assert torch.equal(found, expected[name].float()), name
        else:
            assert torch.equal(found[rows], expected[f"{name}@rows"].float()), name
            dtype, shape, digest = manifest["expected_full_sha256"][name]
            stored = found.to(getattr(torch, dtype)).contiguous()
            assert list(stored.shape) == shape
            raw = stored.view(torch.uint8).numpy().tobytes()
            assert hashlib.sha256(raw).hexdigest() == digest, name


# -- each block type -----------------------------------------------------------------------------


@pytest.mark.parametrize("type_name", CANONICAL)
@pytest.mark.parametrize("seed", range(3))
def test_canonical_types_equal_the_gguf_package(tmp_path, type_name, seed):
    checkpoint, raw = block_file(tmp_path, type_name, seed=seed)
    reader = GgufReader(checkpoint)
    decoded = reader.decode(reader.weights()["layer"])
    assert isinstance(decoded, QuantTensor)
    e8m0 = torch.float8_e8m0fnu
    assert decoded.scale.dtype == (e8m0 if type_name == "MXFP4" else torch.float16)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[type_name])
    assert np.array_equal(bits(decoded.dequantize().numpy()), bits(expected))


@pytest.mark.parametrize("type_name", DECODED)
def test_other_types_equal_the_gguf_package(tmp_path, type_name):
    checkpoint, raw = block_file(tmp_path, type_name)
    reader = GgufReader(checkpoint)
    decoded = reader.decode(reader.weights()["layer"])
    assert isinstance(decoded, torch.Tensor)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[type_name])
    assert decoded.dtype == torch.float32
    assert np.array_equal(bits(decoded.numpy()), bits(expected))


def test_every_type_of_the_gguf_package_is_known():
    known = {kind.name for kind in gguf.quants._type_traits} - {"BF16"}
    assert set(gguf_format._BLOCK_TYPES) == known


def one_row(tmp_path, type_name, block):
    """Decode one block of bytes as a weight [1, 32]."""
    file = tmp_path / "block"
    file.write_bytes(bytes(block))
    entry = TensorEntry("a.weight", torch.uint8, (1, len(block)), file, 0, len(block), type_name)
    reader = GgufReader(Checkpoint("test", tmp_path, {}, {"a.weight": entry}, gguf_file=file))
    return reader.decode(reader.weights()["a"])


HALF, QUARTER = np.float16(0.5).tobytes(), np.float16(-0.25).tobytes()
NIBBLES = bytes((i * 7 + 3) % 256 for i in range(16))
CODES = [byte & 15 for byte in NIBBLES] + [byte >> 4 for byte in NIBBLES]
FIFTH = 0b1010_0110_0000_1111_1100_0011_0101_1001
FIVE_BIT = [code + 16 * (FIFTH >> i & 1) for i, code in enumerate(CODES)]


@pytest.mark.parametrize(
    ("type_name", "block", "codes", "values"),
    [
        ("Q4_0", HALF + NIBBLES, [c - 8 for c in CODES], [(c - 8) * 0.5 for c in CODES]),
        ("Q4_1", HALF + QUARTER + NIBBLES, CODES, [c * 0.5 - 0.25 for c in CODES]),
        (
            "Q5_0",
            HALF + FIFTH.to_bytes(4, "little") + NIBBLES,
            [c - 16 for c in FIVE_BIT],
            [(c - 16) * 0.5 for c in FIVE_BIT],
        ),
        (
            "Q5_1",
            HALF + QUARTER + FIFTH.to_bytes(4, "little") + NIBBLES,
            FIVE_BIT,
            [c * 0.5 - 0.25 for c in FIVE_BIT],
        ),
        (
            "Q8_0",
            HALF + bytes(range(240, 256)) + bytes(range(16)),
            [*range(-16, 0), *range(16)],
            [c * 0.5 for c in (*range(-16, 0), *range(16))],
        ),
    ],
)
def test_blocks_written_out_by_hand(tmp_path, type_name, block, codes, values):
    decoded = one_row(tmp_path, type_name, block)
    assert decoded.codes.tolist() == [codes]
    assert decoded.scale.tolist() == [[0.5]]
    assert decoded.dequantize().tolist() == [values]
    assert (decoded.offset is not None) == type_name.endswith("_1")
    assert decoded.zero is None


def test_mxfp4_block_written_out_by_hand(tmp_path):
    decoded = one_row(tmp_path, "MXFP4", bytes([129]) + NIBBLES)
    magnitudes = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
    values = [(-1 if code & 8 else 1) * magnitudes[code & 7] * 2.0 ** (129 - 127) for code in CODES]
    assert decoded.grid.name == "e2m1"
    assert decoded.dequantize().tolist() == [values]
    zeros = one_row(tmp_path, "MXFP4", bytes([129]) + bytes([0x88]) * 16).dequantize()
    assert not torch.signbit(zeros).any()  # as GGUF decodes the negative zero of MXFP4


@pytest.mark.parametrize("exponent", [0, 1, 254, 255])
def test_mxfp4_scales_at_both_ends(tmp_path, exponent):
    block = bytes([exponent]) + bytes([0x10, 0x91] * 8)  # larger codes are infinite at 255
    decoded = one_row(tmp_path, "MXFP4", block)
    raw = np.frombuffer(block, np.uint8)[None]
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.MXFP4)
    assert isinstance(decoded, QuantTensor) == (exponent < 255)
    assert np.array_equal(bits(values_of(decoded).numpy()), bits(expected))


def test_infinite_values_are_refused(tmp_path):
    with pytest.raises(NonFiniteWeight, match="weight` holds NaN or infinity"):
        one_row(tmp_path, "MXFP4", bytes([255]) + NIBBLES)


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scales_that_are_not_finite_are_refused(tmp_path, type_name, value):
    checkpoint, raw = block_file(tmp_path, type_name)
    at = 208 if type_name == "Q6_K" else 2 if type_name == "Q4_1" else 0  # d, or m of Q4_1
    raw = raw.copy()
    raw[1, at : at + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)
    (tmp_path / "blocks").write_bytes(b"head" + raw.tobytes())
    reader = GgufReader(checkpoint)
    with pytest.raises(NonFiniteWeight, match="weight` holds NaN or infinity"):
        reader.decode(reader.weights()["layer"])


def test_offset_form_is_kept(tmp_path):
    # (q - zero) * d with zero = -m / d, which other loaders make of it, gives other bits
    checkpoint, raw = block_file(tmp_path, "Q4_1", rows=64)
    reader = GgufReader(checkpoint)
    found = reader.decode(reader.weights()["layer"]).dequantize().numpy()
    blocks = raw.reshape(64, -1, 20)
    scale = blocks[..., 0:2].copy().view(np.float16).astype(np.float32)
    offset = blocks[..., 2:4].copy().view(np.float16).astype(np.float32)
    codes = np.concatenate((blocks[..., 4:] & 15, blocks[..., 4:] >> 4), -1).astype(np.float32)
    assert np.array_equal(bits(found), bits((codes * scale + offset).reshape(64, -1)))
    affine = (codes - -offset / scale) * scale
    assert not np.array_equal(bits(found), bits(affine.reshape(64, -1)))


def test_slices_of_rows_make_the_whole(tmp_path, monkeypatch):
    checkpoint, raw = block_file(tmp_path, "Q4_K", rows=7)
    monkeypatch.setattr(gguf_format, "_ELEMENTS_AT_ONCE", 2 * COLUMNS)
    sizes = []
    whole = gguf.quants.dequantize

    def dequantize(data, kind):
        sizes.append(len(data))
        return whole(data, kind)

    monkeypatch.setattr(gguf.quants, "dequantize", dequantize)
    reader = GgufReader(checkpoint)
    decoded = reader.decode(reader.weights()["layer"])
    assert sizes == [2, 2, 2, 1]
    expected = whole(raw, gguf.GGMLQuantizationType.Q4_K)
    assert np.array_equal(bits(decoded.numpy()), bits(expected))


# -- whole files ---------------------------------------------------------------------------------


@pytest.mark.parametrize("type_name", [*CANONICAL, "F32", "F16", "BF16"])
def test_file_of_one_type(tmp_path, type_name):
    file = tmp_path / "model.gguf"
    stored = write_tiny_gguf(file, weight_type=type_name)
    reader = GgufReader(open_gguf(file))
    weights = reader.weights()
    two_dimensional = {name for name, value in stored.items() if value.ndim == 2}
    assert {f"{module}.weight" for module in weights} == two_dimensional
    for module, weight in weights.items():
        expected = stored[f"{module}.weight"]
        found = values_of(reader.decode(weight))
        assert found.dtype == weight.dtype
        assert weight.shape == expected.shape
        assert torch.equal(found.float(), torch.from_numpy(expected)), module


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_K"])
def test_interleaved_rows_are_put_in_order(tmp_path, type_name):
    checkpoint, raw = block_file(tmp_path, type_name, rows=8, heads=2)
    reader = GgufReader(checkpoint)
    found = values_of(reader.decode(reader.weights()["layer"])).numpy()
    stored = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[type_name])
    assert np.array_equal(bits(found), bits(stored[[0, 2, 1, 3, 4, 6, 5, 7]]))


def test_descriptions(tmp_path):
    file = tmp_path / "model.gguf"
    write_tiny_gguf(file, weight_type="Q4_1", types={"token_embd.weight": "F16"})
    weights = GgufReader(open_gguf(file)).weights()
    down = weights["model.layers.0.mlp.down_proj"]
    assert (down.shape, down.encoding, down.dtype) == ((64, 96), "Q4_1", torch.float32)
    assert down.leaves == {"weight": "model.layers.0.mlp.down_proj.weight"}
    assert down.is_quantized
    assert str(down.scheme) == "Q4_1:g32"
    assert down.scheme.weight.grid.name == "uint4"
    assert down.scheme.weight.symmetric is False
    embedding = weights["model.embed_tokens"]
    assert (embedding.scheme, embedding.encoding, embedding.dtype) == (None, "F16", torch.float16)


@pytest.mark.parametrize(
    ("type_name", "grid", "group_size", "symmetric"),
    [
        ("Q4_0", "int4", 32, True),
        ("Q5_0", "int5", 32, True),
        ("Q5_1", "uint5", 32, False),
        ("Q8_0", "int8", 32, True),
        ("Q4_K", "uint4", 32, False),
        ("Q6_K", "int6", 16, True),
        ("MXFP4", "e2m1", 32, True),
    ],
)
def test_schemes_name_their_type(tmp_path, type_name, grid, group_size, symmetric):
    checkpoint, _ = block_file(tmp_path, type_name)
    scheme = GgufReader(checkpoint).weights()["layer"].scheme
    assert scheme.name == type_name
    found = (scheme.weight.grid.name, scheme.weight.group_size, scheme.weight.symmetric)
    assert found == (grid, group_size, symmetric)


@pytest.mark.parametrize("type_name", ["Q8_1", "Q8_K", "I8", "Q1_0"])
def test_types_that_are_not_decoded_are_refused(tmp_path, type_name):
    checkpoint, _ = block_file(tmp_path, type_name)
    words = f"tensor `layer.weight` has GGUF type `{type_name}`, which is not decoded"
    with pytest.raises(UnsupportedVariant, match=words):
        GgufReader(checkpoint).weights()
