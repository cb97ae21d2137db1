"""Tiny GGUF files, written with the `gguf` package: a model, and headers by hand."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, LAYERS, VOCABULARY = 64, 96, 4, 2, 2, 48
HEAD_SIZE = HIDDEN // HEADS
# GGUF leaf, Hugging Face leaf, shape
_LEAVES = [
    ("attn_q", "self_attn.q_proj", (HIDDEN, HIDDEN)),
    ("attn_k", "self_attn.k_proj", (KV_HEADS * HEAD_SIZE, HIDDEN)),
    ("attn_v", "self_attn.v_proj", (KV_HEADS * HEAD_SIZE, HIDDEN)),
    ("attn_output", "self_attn.o_proj", (HIDDEN, HIDDEN)),
    ("ffn_gate", "mlp.gate_proj", (INTERMEDIATE, HIDDEN)),
    ("ffn_up", "mlp.up_proj", (INTERMEDIATE, HIDDEN)),
    ("ffn_down", "mlp.down_proj", (HIDDEN, INTERMEDIATE)),
]


def names(architecture: str, *, biases: bool, tied: bool) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return GGUF name, Hugging Face name and shape of each tensor."""
    rows: list[tuple[str, str, tuple[int, ...]]] = [
        ("token_embd.weight", "model.embed_tokens.weight", (VOCABULARY, HIDDEN)),
        ("output_norm.weight", "model.norm.weight", (HIDDEN,)),
    ]
    if not tied:
        rows.append(("output.weight", "lm_head.weight", (VOCABULARY, HIDDEN)))
    with_bias = {"attn_q", "attn_k", "attn_v"} if architecture == "qwen2" else set()
    if biases:
        with_bias = {leaf for leaf, _, _ in _LEAVES}
    for layer in range(LAYERS):
        ours, theirs = f"blk.{layer}", f"model.layers.{layer}"
        rows.append((f"{ours}.attn_norm.weight", f"{theirs}.input_layernorm.weight", (HIDDEN,)))
        rows.append(
            (f"{ours}.ffn_norm.weight", f"{theirs}.post_attention_layernorm.weight", (HIDDEN,))
        )
        for leaf, hf_leaf, shape in _LEAVES:
            rows.append((f"{ours}.{leaf}.weight", f"{theirs}.{hf_leaf}.weight", shape))
            if leaf in with_bias:
                rows.append((f"{ours}.{leaf}.bias", f"{theirs}.{hf_leaf}.bias", shape[:1]))
        if architecture == "qwen3":
            for letter in "qk":
                name = f"self_attn.{letter}_norm.weight"
                rows.append((f"{ours}.attn_{letter}_norm.weight", f"{theirs}.{name}", (HEAD_SIZE,)))
    return rows


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Interleave the halves of each head, as llama.cpp's converter does it (`permute`)."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write_tiny_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    weight_type: str = "F32",
    types: dict[str, str] | None = None,
    metadata: dict[str, Any] | None = None,
    without: tuple[str, ...] = (),
    extra: dict[str, np.ndarray] | None = None,
    biases: bool = False,
    tied: bool = False,
) -> dict[str, np.ndarray]:
    """Write a model of random weights.

    Args:
        path: File to write.
        architecture: "llama", "qwen2", "qwen3" or anything.
        weight_type: GGML type of every 2-D weight.
        types: GGML type of single tensors, by GGUF name.
        metadata: Keys under the architecture that replace or join the usual ones; None drops one.
        without: GGUF names to leave out.
        extra: Further tensors, by GGUF name.
        biases: True if all linear layers have biases.
        tied: True if there is no output matrix.

    Returns:
        The values that were stored, float32 in the order of transformers, by Hugging Face name.
    """
    generator = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture)
    _write_metadata(writer, architecture, metadata or {})
    stored = {}
    for name, hf_name, shape in names(architecture, biases=biases, tied=tied):
        if name in without:
            continue
        values = generator.standard_normal(shape, dtype=np.float32)
        type_name = (types or {}).get(name, weight_type if len(shape) == 2 else "F32")
        kind = gguf.GGMLQuantizationType[type_name]
        stored[hf_name] = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
        if architecture == "llama" and (".attn_q." in name or ".attn_k." in name):
            values = permuted(values, HEADS if ".attn_q." in name else KV_HEADS)
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    _finish(writer)
    return stored


def _write_metadata(writer: gguf.GGUFWriter, architecture: str, changes: dict[str, Any]) -> None:
    values: dict[str, Any] = {
        "context_length": 128,
        "embedding_length": HIDDEN,
        "block_count": LAYERS,
        "feed_forward_length": INTERMEDIATE,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    for key, value in (values | changes).items():
        full = key if key.startswith(("tokenizer.", "split.")) else f"{architecture}.{key}"
        add_value(writer, full, value)


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add metadata of the type that fits the Python value; None adds nothing."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


def write_metadata_only(path: Path, metadata: dict[str, Any]) -> Path:
    """Write a GGUF file without tensors that holds these full keys."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        add_value(writer, key, value)
    _finish(writer)
    return path


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def text(value: str) -> bytes:
    """Return a GGUF string."""
    return struct.pack("<Q", len(value.encode())) + value.encode()


def raw_header(
    *,
    version: int = 3,
    tensors: tuple[bytes, ...] = (),
    keys: tuple[bytes, ...] = (),
    counts: tuple[int, int] | None = None,
) -> bytes:
    """Return a header by hand; `counts` replaces the true numbers of tensors and keys."""
    numbers = counts or (len(tensors), len(keys))
    return b"GGUF" + struct.pack("<IQQ", version, *numbers) + b"".join((*keys, *tensors))


def raw_tensor(name: str, shape: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    """Return one row of the tensor table; `shape` in ggml order."""
    axes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + axes + struct.pack("<IQ", kind, offset)
