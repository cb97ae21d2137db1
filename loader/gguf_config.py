"""The Hugging Face config that the metadata of a GGUF file amounts to.

What all architectures share is read here; what is special to one is in `gguf_config_details.py`.

Source: llama.cpp, its `load_hparams` for defaults and its converters, at
https://github.com/ggml-org/llama.cpp/tree/a458664fc83b6513baea7adafcb0ef0626b006f8
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantload.errors import FormatMismatch, HeaderError, MissingTensor, UnsupportedVariant, listed
from quantload.loader.gguf_architectures import ARCHITECTURES
from quantload.loader.gguf_config_details import DETAILS
from quantload.loader.gguf_facts import Facts
from quantload.loader.gguf_header import PLAIN_DTYPES, GgufHeader
from quantload.loader.gguf_metadata import OTHER_SOURCE, Metadata, special_token_ids
from quantload.loader.gguf_rope import rope_parameters, rotated_size
from quantload.loader.gguf_rows import EMBEDDING, Architecture

_DIFFERS = ("lfm2", "gemma4_text")  # architectures whose sizes differ from layer to layer
# Parts of names of tensors that converters store as F32 whatever the model has.
_ALWAYS_FLOAT32 = ("_norm.", "_gate_inp", "_rel_b", "position_embd", "ssm_", "shortconv.conv")
# Architectures that transformers maps and that no exact config can be made for.
_REFUSED = {
    "deci": "transformers has no model class for it",
}


@dataclass(frozen=True)
class GgufModel:
    """What a GGUF file's header amounts to.

    Args:
        architecture: How tensors are called and changed.
        config: The Hugging Face config.
        sizes: Size of each named axis.
        options: Which tensors there are.
        by_layer: Sizes and options that differ from layer to layer, one entry a layer.
    """

    architecture: Architecture
    config: dict[str, Any]
    sizes: Mapping[str, int]
    options: Mapping[str, bool]
    by_layer: Mapping[str, Sequence[int]]


def build_config(header: GgufHeader, path: Path) -> dict[str, Any]:
    """Return the Hugging Face config of a file, see `read_model`."""
    return read_model(header, path).config


def read_model(header: GgufHeader, path: Path) -> GgufModel:
    """Return config, sizes and options of the model in a file.

    GGUF does not say in which dtype a model computes. `dtype` is "float16" if every float weight
    [N, K] is F16, "float32" if every weight [N, K] is F32, else "bfloat16".

    Raises:
        HeaderError: Metadata is missing or makes no sense.
        UnsupportedVariant: An architecture or a feature that quantload does not read.
        FormatMismatch: Metadata and tensors contradict each other.
        MissingTensor: There is no token embedding.
    """
    metadata = Metadata(header.metadata, path)
    architecture = _architecture(header, metadata)
    options = {name: tensor in header.tensors for name, tensor in architecture.options.items()}
    sizes = _sizes(header, metadata, architecture)
    config: dict[str, Any] = {
        "architectures": [architecture.hf_class],
        "model_type": architecture.model_type,
        "vocab_size": sizes["vocab"],
        "tie_word_embeddings": not options["untied"],
        "dtype": _compute_dtype(header),
        **architecture.constants,
        **{name: options[name] for name in architecture.config_options},
    }
    config |= _token_ids(metadata, sizes["vocab"])
    by_layer: dict[str, list[int]] = {}
    if architecture.rotary == "none":
        metadata.ignore(*(key for key in _own_keys(metadata) if key.startswith("rope.")))
    elif architecture.rotary != "by layer":
        config |= _rotary(header, metadata, architecture, sizes)
    details = DETAILS.get(architecture.model_type)
    if details is not None:
        rope = config.get("rope_parameters", {})
        config |= details(Facts(metadata, header.tensors, sizes, options, by_layer, rope))
    epsilon = {"eps": metadata.epsilon()}
    config |= {
        key: value
        for name, key in architecture.keys.items()
        if (value := (sizes | epsilon).get(name)) is not None
    }
    metadata.refuse_unless("attention.causal", neutral=True, meaning="attention in both directions")
    metadata.ignore("expert_used_count")
    if "experts" not in sizes:
        metadata.refuse_unless("expert_count", 0, "a mixture of experts")
    metadata.refuse_unread()
    return GgufModel(architecture, config, sizes, options, by_layer)


def _architecture(header: GgufHeader, metadata: Metadata) -> Architecture:
    name = metadata.architecture
    variants = {
        "llama with experts": "blk.0.ffn_gate_inp.weight" in header.tensors,
        f"{name} with biases in all layers": "enc.blk.1.attn_rel_b.weight" in header.tensors,
    }
    for variant, is_it in variants.items():
        if is_it and variant.startswith(f"{name} ") and variant in ARCHITECTURES:
            return ARCHITECTURES[variant]
    if name in ARCHITECTURES and " " not in name:
        return ARCHITECTURES[name]
    reason = f": {_REFUSED[name]}" if name in _REFUSED else ""
    known = [known for known in ARCHITECTURES if " " not in known]
    raise UnsupportedVariant(
        f"GGUF architecture `{name}` is not read{reason}, expected one of "
        f"{listed(known, limit=len(known))}, in `{metadata.path}`",
        hint=OTHER_SOURCE,
    )


def _own_keys(metadata: Metadata) -> list[str]:
    prefix = metadata.full("")
    return [key.removeprefix(prefix) for key in metadata.all if key.startswith(prefix)]


def _sizes(header: GgufHeader, metadata: Metadata, architecture: Architecture) -> dict[str, int]:
    embedding = header.tensors.get(EMBEDDING)
    if embedding is None:
        raise MissingTensor(f"tensor `{EMBEDDING}` is not in `{metadata.path}`")
    rows = embedding.shape[0]
    if metadata.count("vocab_size", rows) != rows:
        raise FormatMismatch(
            f"metadata says a vocabulary of `{metadata.value('vocab_size')}`, but tensor "
            f"`{EMBEDDING}` has `{rows}` rows, in `{metadata.path}`"
        )
    sizes = {
        "vocab": rows,
        "hidden": metadata.count("embedding_length"),
        "layers": metadata.count("block_count"),
        "context": metadata.count("context_length"),
    }
    if sizes["layers"] > len(header.tensors):  # before anything is made for each layer
        raise MissingTensor(
            f"`{sizes['layers']}` layers in the metadata, but only `{len(header.tensors)}` "
            f"tensors, in `{metadata.path}`"
        )
    if architecture.model_type == "mamba":  # neither attention nor a feed-forward layer
        return sizes
    heads = metadata.count("attention.head_count")
    if architecture.model_type in _DIFFERS:
        kv_heads = max(1, *metadata.counts("attention.head_count_kv", sizes["layers"]))
    else:
        kv_heads = metadata.count("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise HeaderError(
            f"metadata says `{heads}` heads of queries and `{kv_heads}` of keys, expected a "
            f"multiple, in `{metadata.path}`"
        )
    head = _head_size(metadata, architecture, sizes["hidden"] // heads)
    sizes |= {"heads": heads, "kv_heads": kv_heads, "head": head}
    sizes |= {"q": heads * head, "kv": kv_heads * head, "qkv": (heads + 2 * kv_heads) * head}
    if "moe" not in _axes(architecture) or metadata.has("feed_forward_length"):
        sizes["intermediate"] = (
            min(metadata.counts("feed_forward_length", sizes["layers"]))
            if architecture.model_type in _DIFFERS
            else metadata.count("feed_forward_length")
        )
        sizes["gate_up"] = 2 * sizes["intermediate"]
    return sizes


def _axes(architecture: Architecture) -> set[str]:
    return {
        axis for block in architecture.blocks for row in block.rows for axis in row.axes.split()
    }


def _head_size(metadata: Metadata, architecture: Architecture, default: int) -> int:
    size = metadata.count("attention.key_length", default)
    metadata.refuse_unless("attention.value_length", size, f"a value size that is not `{size}`")
    if "head" not in architecture.keys and size != default:
        raise UnsupportedVariant(
            f"metadata key `{metadata.full('attention.key_length')}` is `{size}`, expected "
            f"`{default}`, the only size of a head that `{architecture.hf_class}` can have, "
            f"in `{metadata.path}`"
        )
    return size


def _rotary(
    header: GgufHeader, metadata: Metadata, architecture: Architecture, sizes: Mapping[str, int]
) -> dict[str, Any]:
    part = architecture.rotary == "part"
    size = rotated_size(metadata, sizes["head"], part=part)
    rope = rope_parameters(metadata, header.tensors, size, sizes["context"])
    if part:
        rope["partial_rotary_factor"] = size / sizes["head"]
    return {"rope_parameters": rope}


def _token_ids(metadata: Metadata, vocabulary: int) -> dict[str, int | None]:
    ids = special_token_ids(metadata.all, metadata.path)
    for name, token in ids.items():
        if token is not None and token >= vocabulary:
            raise FormatMismatch(
                f"id of the `{name}` token is `{token}`, expected less than the vocabulary of "
                f"`{vocabulary}`, in `{metadata.path}`"
            )
    return {f"{name}_token_id": ids[name] for name in ("bos", "eos", "pad")}


def _compute_dtype(header: GgufHeader) -> str:
    types = {
        tensor.type_name
        for name, tensor in header.tensors.items()
        if len(tensor.shape) >= 2 and not any(part in name for part in _ALWAYS_FLOAT32)
    }
    if types == {"F32"}:
        return "float32"
    return "float16" if types & PLAIN_DTYPES.keys() == {"F16"} else "bfloat16"
