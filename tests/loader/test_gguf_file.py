"""Opening GGUF files: names, places and row order of tensors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_gguf import HEADS, KV_HEADS, permuted, write_tiny_gguf

from quantload.errors import (
    FormatMismatch,
    MissingTensor,
    ShapeError,
    UnexpectedTensor,
    UnsupportedVariant,
)
from quantload.loader.checkpoint import Checkpoint, unpermute_rows
from quantload.loader.formats.gguf import GgufReader
from quantload.loader.gguf_file import open_gguf
from quantload.loader.gguf_restore import GgufEntry, minus_one
from quantload.quant.qtensor import QuantTensor

SHARED = Path(__file__).parents[2] / "../shared/checkpoints/gguf-0.19.0"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="no folder shared/checkpoints")


def opened(tmp_path, **options):
    file = tmp_path / "model.gguf"
    stored = write_tiny_gguf(file, **options)
    return open_gguf(file), stored


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_is_read_under_its_name(tmp_path, architecture, tied):
    checkpoint, stored = opened(tmp_path, architecture=architecture, tied=tied)
    assert set(checkpoint.tensors) == set(stored)
    for name, expected in stored.items():
        found = checkpoint.read(name)
        assert torch.equal(found, torch.from_numpy(expected)), name


def test_biases_of_q_and_k_are_interleaved_like_their_rows(tmp_path):
    checkpoint, stored = opened(tmp_path, biases=True)
    for letter, heads in (("q", HEADS), ("k", KV_HEADS), ("v", 0)):
        name = f"model.layers.1.self_attn.{letter}_proj.bias"
        entry = checkpoint.tensors[name]
        assert entry.interleaved_heads == heads
        found = checkpoint.read(name)
        assert torch.equal(found, torch.from_numpy(stored[name]))


def test_qwen_rows_are_in_order(tmp_path):
    checkpoint, _ = opened(tmp_path, architecture="qwen3")
    assert {entry.interleaved_heads for entry in checkpoint.tensors.values()} == {0}


def test_checkpoint_describes_the_file(tmp_path):
    checkpoint, _ = opened(tmp_path)
    file = tmp_path / "model.gguf"
    assert isinstance(checkpoint, Checkpoint)
    assert (checkpoint.gguf_file, checkpoint.folder, checkpoint.name) == (file, tmp_path, str(file))
    assert (checkpoint.quantization_config, checkpoint.warnings) == (None, ())


def test_tensors_come_in_natural_order(tmp_path):
    file = tmp_path / "model.gguf"
    write_tiny_gguf(file)
    layers = 11
    writer = gguf.GGUFWriter(tmp_path / "long.gguf", "llama")
    for field in gguf.GGUFReader(file).fields.values():
        if field.name.startswith("llama."):
            value = layers if field.name == "llama.block_count" else field.contents()
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(field.name, value)
    for tensor in gguf.GGUFReader(file).tensors:
        if tensor.name.startswith("blk.0."):
            for layer in range(layers):
                writer.add_tensor(tensor.name.replace("blk.0.", f"blk.{layer}."), tensor.data)
        elif not tensor.name.startswith("blk."):
            writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    names = list(open_gguf(tmp_path / "long.gguf").tensors)
    numbers = [int(name.split(".")[2]) for name in names if ".layers." in name]
    assert numbers == sorted(numbers)
    assert numbers[-1] == 10


def test_blocks_are_rows_of_bytes(tmp_path):
    checkpoint, _ = opened(tmp_path, weight_type="Q4_1")
    entry = checkpoint.tensors["model.layers.0.mlp.down_proj.weight"]
    assert (entry.dtype, entry.shape, entry.block_type) == (
        torch.uint8,
        (64, 96 // 32 * 20),
        "Q4_1",
    )
    assert checkpoint.read(entry.name).shape == entry.shape
    norm = checkpoint.tensors["model.norm.weight"]
    assert (norm.dtype, norm.shape, norm.block_type) == (torch.float32, (64,), "")


@pytest.mark.parametrize(
    ("type_name", "dtype"),
    [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)],
)
def test_float_weights_keep_their_dtype(tmp_path, type_name, dtype):
    checkpoint, stored = opened(tmp_path, weight_type=type_name)
    weight = checkpoint.read("lm_head.weight")
    assert weight.dtype == dtype
    assert torch.equal(weight.float(), torch.from_numpy(stored["lm_head.weight"]))


# -- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "shape"), [(1, (8, 3)), (4, (32, 5)), (3, (18,)), (2, (8, 2, 2))]
)
def test_unpermute_undoes_the_converter(heads, shape):
    rows = np.arange(np.prod(shape)).reshape(shape)
    found = unpermute_rows(torch.from_numpy(permuted(rows, heads).copy()), heads)
    assert found.tolist() == rows.tolist()


def test_unpermute_takes_even_rows_first():
    assert unpermute_rows(torch.arange(8), 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert unpermute_rows(torch.arange(6), 1).tolist() == [0, 2, 4, 1, 3, 5]
    assert unpermute_rows(torch.arange(6), 0).tolist() == [0, 1, 2, 3, 4, 5]


def test_unpermute_refuses_rows_that_are_no_heads():
    with pytest.raises(ShapeError, match="`6` rows, expected `2` heads of an even number"):
        unpermute_rows(torch.arange(6), 2)


# -- refusals ------------------------------------------------------------------------------------


def test_unknown_tensors_are_named(tmp_path):
    extra = {"blk.0.attn_norm.bias": np.zeros(64, np.float32), "odd": np.zeros(4, np.float32)}
    words = r"`llama` has no place for: `blk\.0\.attn_norm\.bias`, `odd`"
    with pytest.raises(UnexpectedTensor, match=words):
        opened(tmp_path, extra=extra)


def test_missing_tensors_are_named(tmp_path):
    with pytest.raises(MissingTensor, match=r"are missing: `blk\.1\.ffn_up\.weight`"):
        opened(tmp_path, without=("blk.1.ffn_up.weight",))


def test_bias_on_some_projections_is_refused(tmp_path):
    extra = {"blk.0.attn_q.bias": np.zeros(64, np.float32)}
    with pytest.raises(MissingTensor, match=r"`blk\.0\.attn_k\.bias`, `blk\.0\.attn_output\.bias`"):
        opened(tmp_path, extra=extra)


def test_more_layers_than_tensors_is_refused(tmp_path):
    words = "`4000000000` layers in the metadata, but only `21` tensors"
    with pytest.raises(MissingTensor, match=words):
        opened(tmp_path, metadata={"block_count": 4_000_000_000})


def test_shapes_that_contradict_the_metadata_are_refused(tmp_path):
    words = (
        r"tensor `blk\.0\.ffn_(gate|up|down)\.weight` has shape `\(.*\)`, expected `\(.*128.*\)`"
    )
    with pytest.raises(FormatMismatch, match=words):
        opened(tmp_path, metadata={"feed_forward_length": 128})


def test_blocks_in_a_vector_are_refused(tmp_path):
    words = r"tensor `output_norm\.weight` of shape `\(64,\)` has type `Q8_0`, expected a float"
    with pytest.raises(UnsupportedVariant, match=words):
        opened(tmp_path, types={"output_norm.weight": "Q8_0"})


# -- the whole model -----------------------------------------------------------------------------


@needs_shared
@pytest.mark.parametrize(
    "folder", ["micro-llama-Q4_1", "nano256-Q4_K_M", "tiny-gemma3-Q8_0", "tiny-qwen3-moe-Q4_0"]
)
def test_transformers_computes_the_same_logits(tmp_path, folder):
    from transformers import AutoModelForCausalLM

    checkpoint = open_gguf(SHARED / folder / f"{folder}.gguf")
    reader = GgufReader(checkpoint)
    state = {}
    for module, weight in reader.weights().items():
        value = reader.decode(weight)
        value = value.dequantize() if isinstance(value, QuantTensor) else value
        state[f"{module}.weight"] = value.float()
    for name in checkpoint.tensors.keys() - state.keys():
        state[name] = checkpoint.read(name)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(checkpoint.config))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    expected = load_file(SHARED / folder / "expected.safetensors")
    with torch.no_grad():
        logits = model.eval()(expected["input_ids"]).logits
    manifest = json.loads((SHARED / folder / "MANIFEST.json").read_text())
    assert manifest["expected"].endswith("dtype=float32) on CPU")
    torch.testing.assert_close(logits, expected["logits"].float(), rtol=1e-4, atol=1e-4)


def test_what_a_converter_changed_is_not_copied_as_it_is(tmp_path):
    """Raw bytes of norms that are stored plus one would be silently wrong."""
    place = {"name": "n", "dtype": torch.float32, "shape": (4,), "file": tmp_path, "start": 0}
    plain = GgufEntry(**place, num_bytes=16)
    assert plain.is_contiguous
    assert not replace(plain, steps=(minus_one,)).is_contiguous
    assert not replace(plain, late_steps=(minus_one,)).is_contiguous
    assert not replace(plain, parts=(plain,)).is_contiguous
    assert not replace(plain, is_transposed=True).is_contiguous
    assert not replace(plain, block_type="Q4_1").is_contiguous
