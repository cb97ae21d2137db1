"""GGUF files: which tensors an architecture has, what transformers calls them, where they lie.

Architectures: llama (with Mistral and others that are stored as llama), qwen2, qwen3. A file has
exactly the tensors of its architecture, in the shapes that its metadata says, or it is an error.

In a llama file the rows of q and k, weights and biases, are in the order of Meta's rotary
embedding: the two halves of each head interleaved. `Checkpoint.read` restores the order of
transformers.

Letters: D size of a head.

Source: llama.cpp, `LlamaModel` in `convert_hf_to_gguf.py`, at
https://github.com/ggml-org/llama.cpp/tree/a458664fc83b6513baea7adafcb0ef0626b006f8
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from quantload.errors import (
    FormatMismatch,
    MissingTensor,
    UnexpectedTensor,
    UnsupportedVariant,
    listed,
)
from quantload.loader.checkpoint import Checkpoint, TensorEntry
from quantload.loader.gguf_config import EMBEDDING, HEAD, ROPE_FACTORS, build_config
from quantload.loader.gguf_header import PLAIN_DTYPES, GgufHeader, GgufTensor, read_header

# GGUF leaf: Hugging Face leaf, then the sizes of the axes by name
_LAYER_WEIGHTS = {
    "attn_norm": ("input_layernorm", "hidden"),
    "attn_q": ("self_attn.q_proj", "q", "hidden"),
    "attn_k": ("self_attn.k_proj", "kv", "hidden"),
    "attn_v": ("self_attn.v_proj", "kv", "hidden"),
    "attn_output": ("self_attn.o_proj", "hidden", "q"),
    "ffn_norm": ("post_attention_layernorm", "hidden"),
    "ffn_gate": ("mlp.gate_proj", "intermediate", "hidden"),
    "ffn_up": ("mlp.up_proj", "intermediate", "hidden"),
    "ffn_down": ("mlp.down_proj", "hidden", "intermediate"),
}
_QK_NORMS = {
    "attn_q_norm": ("self_attn.q_norm", "head"),
    "attn_k_norm": ("self_attn.k_norm", "head"),
}
_QKV = ("attn_q", "attn_k", "attn_v")
_MLP = ("ffn_gate", "ffn_up", "ffn_down")


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file of the llama family under the names that transformers uses.

    Only the header is read, and rotary factors: they become part of the config (`build_config`).

    Args:
        path: A `.gguf` file.

    Raises:
        HeaderError: The file is damaged or truncated.
        UnsupportedVariant: An architecture, a feature or a type that quantload does not read.
        FormatMismatch: Metadata and tensor shapes contradict each other.
        MissingTensor: A tensor of the architecture is not there.
        UnexpectedTensor: A tensor has no place in the architecture.
    """
    header = read_header(path)
    if re.search(r"-\d{5}-of-\d{5}\.gguf$", path.name) or header.metadata.get("split.count", 1) > 1:
        raise UnsupportedVariant(
            f"a GGUF model split into several files is not read: `{path}`",
            hint="join the parts first: `llama-gguf-split --merge FIRST_PART OUT.gguf`",
        )
    config = build_config(header, path)
    tensors = _map_tensors(header, config, path)
    return Checkpoint(
        name=str(path),
        folder=path.parent,
        config=config,
        tensors={name: tensors[name] for name in sorted(tensors, key=_natural_order)},
        gguf_file=path,
    )


def _map_tensors(
    header: GgufHeader, config: Mapping[str, Any], path: Path
) -> dict[str, TensorEntry]:
    """Return the entries by Hugging Face name; the file has exactly those of the architecture."""
    present = header.tensors.keys() - {ROPE_FACTORS}
    if config["num_hidden_layers"] > len(present):
        raise MissingTensor(
            f"`{config['num_hidden_layers']}` layers in the metadata, but only `{len(present)}` "
            f"tensors, in `{path}`"
        )
    expected = _expected_tensors(config)
    if unexpected := present - expected.keys():
        raise UnexpectedTensor(
            f"tensors that architecture `{config['model_type']}` has no place for: "
            f"{listed(unexpected)}, in `{path}`",
            hint="the file holds more than the model, or a feature that quantload does not read",
        )
    if missing := expected.keys() - present:
        raise MissingTensor(
            f"tensors of architecture `{config['model_type']}` are missing: {listed(missing)}, "
            f"in `{path}`"
        )
    entries = {}
    for name, (hf_name, shape) in expected.items():
        tensor = header.tensors[name]
        if tensor.shape != shape:
            raise FormatMismatch(
                f"tensor `{name}` has shape `{tensor.shape}`, expected `{shape}` by the metadata, "
                f"in `{path}`"
            )
        entries[hf_name] = _entry(tensor, hf_name, config, path)
    return entries


def _expected_tensors(config: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return Hugging Face name and shape by GGUF name."""
    sizes = {
        "hidden": config["hidden_size"],
        "intermediate": config["intermediate_size"],
        "head": config["head_dim"],
        "q": config["num_attention_heads"] * config["head_dim"],
        "kv": config["num_key_value_heads"] * config["head_dim"],
    }
    with_bias: tuple[str, ...] = _QKV if config["model_type"] == "qwen2" else ()
    with_bias += (*_QKV, "attn_output") if config.get("attention_bias") else ()
    with_bias += _MLP if config.get("mlp_bias") else ()
    weights = _LAYER_WEIGHTS | (_QK_NORMS if config["model_type"] == "qwen3" else {})
    table = (config["vocab_size"], config["hidden_size"])
    expected: dict[str, tuple[str, tuple[int, ...]]] = {
        EMBEDDING: ("model.embed_tokens.weight", table),
        "output_norm.weight": ("model.norm.weight", table[1:]),
    }
    if not config["tie_word_embeddings"]:
        expected[HEAD] = ("lm_head.weight", table)
    for layer in range(config["num_hidden_layers"]):
        for leaf, (hf_leaf, *axes) in weights.items():
            name, hf_name = f"blk.{layer}.{leaf}", f"model.layers.{layer}.{hf_leaf}"
            shape = tuple(sizes[axis] for axis in axes)
            expected[f"{name}.weight"] = (f"{hf_name}.weight", shape)
            if leaf in with_bias:
                expected[f"{name}.bias"] = (f"{hf_name}.bias", shape[:1])
    return expected


def _entry(tensor: GgufTensor, hf_name: str, config: Mapping[str, Any], path: Path) -> TensorEntry:
    heads = 0
    if config["model_type"] == "llama":
        heads = config["num_attention_heads"] if ".q_proj." in hf_name else 0
        heads = config["num_key_value_heads"] if ".k_proj." in hf_name else heads
    plain = PLAIN_DTYPES.get(tensor.type_name)
    if plain is None and len(tensor.shape) != 2:
        raise UnsupportedVariant(
            f"tensor `{tensor.name}` of shape `{tensor.shape}` has type `{tensor.type_name}`, "
            f"expected a float type, in `{path}`"
        )
    shape = tensor.shape if plain else (tensor.shape[0], tensor.num_bytes // tensor.shape[0])
    return TensorEntry(
        name=hf_name,
        dtype=plain or torch.uint8,
        shape=shape,
        file=path,
        start=tensor.start,
        num_bytes=tensor.num_bytes,
        block_type="" if plain else tensor.type_name,
        interleaved_heads=heads,
    )


def _natural_order(name: str) -> list[tuple[int, str]]:
    """Sort key that puts layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
