"""The Hugging Face config that the metadata of a GGUF file amounts to.

Keys are read under the name of the architecture ("llama.block_count"). A key that is not understood
is an error, since it may change the result.

Letters: D size of a head.

Source: llama.cpp, its `load_hparams` for defaults and `LlamaModel` in `convert_hf_to_gguf.py`, at
https://github.com/ggml-org/llama.cpp/tree/a458664fc83b6513baea7adafcb0ef0626b006f8
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantload.errors import (
    FormatMismatch,
    HeaderError,
    MissingTensor,
    UnsupportedVariant,
    listed,
)
from quantload.loader.checkpoint import TensorEntry, read_entry
from quantload.loader.gguf_header import PLAIN_DTYPES, GgufHeader, GgufTensor

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
EMBEDDING, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
# Metadata that changes no result, or is derived from what is checked.
_WITHOUT_EFFECT = ("rope.scaling.finetuned", "tensor_data_layout", "expert_used_count")
_OTHER_SOURCE = "start from the model's safetensors checkpoint"


def build_config(header: GgufHeader, path: Path) -> dict[str, Any]:
    """Return the config of a model of the llama family.

    GGUF does not say in which dtype a model computes. `dtype` is "float16" if every float weight
    [N, K] is F16, "float32" if every weight [N, K] is F32, else "bfloat16".

    Raises:
        HeaderError: Metadata is missing or makes no sense.
        UnsupportedVariant: An architecture or a feature that quantload does not read.
        FormatMismatch: Metadata and tensors contradict each other.
        MissingTensor: There is no token embedding.
    """
    return _Config(header, path).build()


def special_token_ids(metadata: Mapping[str, Any], path: Path) -> dict[str, int | None]:
    """Return the ids of the tokens "bos", "eos", "unk" and "pad"; None where there is none.

    Raises:
        HeaderError: An id is no number.
    """
    # What llama.cpp assumes where a file with a SentencePiece vocabulary is silent.
    sentencepiece = metadata.get("tokenizer.ggml.model") == "llama"
    defaults = {"bos": 1, "eos": 2, "unk": 0} if sentencepiece else {}
    keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {}
    for name, key in keys.items():
        token = metadata.get(f"tokenizer.ggml.{key}_token_id", defaults.get(name))
        if token is not None and (not isinstance(token, int) or token < 0):
            raise HeaderError(
                f"metadata key `tokenizer.ggml.{key}_token_id` is `{token}`, expected a token id, "
                f"in `{path}`"
            )
        ids[name] = token
    return ids


class _Config:
    """Makes a config from metadata, and keeps account of which keys were understood."""

    def __init__(self, header: GgufHeader, path: Path) -> None:
        self._header = header
        self._path = path
        self._read: set[str] = set()
        self._architecture = str(header.metadata.get("general.architecture"))
        if self._architecture not in ARCHITECTURES:
            raise UnsupportedVariant(
                f"GGUF architecture `{self._architecture}` is not read, expected one of "
                f"{listed(ARCHITECTURES)}, in `{path}`",
                hint=_OTHER_SOURCE,
            )

    def build(self) -> dict[str, Any]:
        """Return the Hugging Face config."""
        for key in _WITHOUT_EFFECT:
            self._number(key, 0)
        self._refuse_unless("expert_count", 0, "a mixture of experts")
        self._refuse_unless("attention.causal", True, "attention in both directions")
        embedding = self._header.tensors.get(EMBEDDING)
        if embedding is None:
            raise MissingTensor(f"tensor `{EMBEDDING}` is not in `{self._path}`")
        rows = embedding.shape[0]
        if self._count("vocab_size", rows) != rows:
            raise FormatMismatch(
                f"metadata says a vocabulary of `{self._number('vocab_size')}`, but tensor "
                f"`{EMBEDDING}` has `{rows}` rows, in `{self._path}`"
            )
        heads, hidden = self._count("attention.head_count"), self._count("embedding_length")
        head_size, context = self._head_size(hidden // heads), self._count("context_length")
        config: dict[str, Any] = {
            "architectures": [ARCHITECTURES[self._architecture]],
            "model_type": self._architecture,
            "hidden_size": hidden,
            "intermediate_size": self._count("feed_forward_length"),
            "num_hidden_layers": self._count("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._count("attention.head_count_kv", heads),
            "head_dim": head_size,
            "max_position_embeddings": context,
            "rms_norm_eps": self._float("attention.layer_norm_rms_epsilon"),
            "rope_parameters": self._rope(head_size, context),
            "vocab_size": rows,
            "tie_word_embeddings": HEAD not in self._header.tensors,
            "hidden_act": "silu",
            "dtype": _compute_dtype(self._header),
        }
        config |= self._token_ids(rows)
        if self._architecture != "qwen2":  # its biases on q, k, v are no choice
            config["attention_bias"] = "blk.0.attn_q.bias" in self._header.tensors
        if self._architecture == "llama":
            config["mlp_bias"] = "blk.0.ffn_gate.bias" in self._header.tensors
        self._refuse_unread()
        return config

    def _token_ids(self, vocabulary: int) -> dict[str, int | None]:
        ids = special_token_ids(self._header.metadata, self._path)
        for name, token in ids.items():
            if token is not None and token >= vocabulary:
                raise FormatMismatch(
                    f"id of the `{name}` token is `{token}`, expected less than the vocabulary of "
                    f"`{vocabulary}`, in `{self._path}`"
                )
        return {f"{name}_token_id": ids[name] for name in ("bos", "eos", "pad")}

    def _number(self, key: str, default: Any = None) -> Any:  # noqa: ANN401
        self._read.add(key)
        full = f"{self._architecture}.{key}"
        value = self._header.metadata.get(full, default)
        if value is None:
            raise HeaderError(f"metadata key `{full}` is missing, in `{self._path}`")
        if isinstance(value, np.ndarray | list):
            raise UnsupportedVariant(
                f"metadata key `{full}` differs from layer to layer, expected one value, "
                f"in `{self._path}`"
            )
        return value

    def _count(self, key: str, default: int | None = None) -> int:
        value = self._number(key, default)
        if not isinstance(value, int) or value < 1:
            raise HeaderError(
                f"metadata key `{self._architecture}.{key}` is `{value}`, expected a positive "
                f"integer, in `{self._path}`"
            )
        return value

    def _float(self, key: str, default: float | None = None) -> float:
        value = self._number(key, default)
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise HeaderError(
                f"metadata key `{self._architecture}.{key}` is `{value}`, expected a number, "
                f"in `{self._path}`"
            )
        return float(
            str(np.float32(value))
        )  # the shortest decimal number, 1e-05 for 9.99999974e-06

    def _refuse_unless(self, key: str, neutral: Any, meaning: str) -> None:  # noqa: ANN401
        value = self._number(key, neutral)
        if value != neutral:
            raise UnsupportedVariant(
                f"metadata key `{self._architecture}.{key}` is `{value}`: {meaning} is not read, "
                f"in `{self._path}`",
                hint=_OTHER_SOURCE,
            )

    def _head_size(self, default: int) -> int:
        size = self._count("attention.key_length", default)
        self._refuse_unless("attention.value_length", size, f"a value size that is not `{size}`")
        self._refuse_unless("rope.dimension_count", size, f"rotation of a part of `{size}`")
        return size

    def _rope(self, head_size: int, context: int) -> dict[str, Any]:
        theta = self._float("rope.freq_base", 10000.0)
        kind = self._number("rope.scaling.type", "linear")  # llama.cpp's default, with factor 1
        factor = self._float("rope.scaling.factor", self._float("rope.scale_linear", 1.0))
        original = self._count("rope.scaling.original_context_length", context)
        scaled = kind != "none" and factor not in (0.0, 1.0)
        table = self._header.tensors.get(ROPE_FACTORS)
        if table is not None:
            found = _llama3_scaling(_read_factors(table, self._path), theta, head_size)
            if found is None or scaled:
                raise UnsupportedVariant(
                    f"tensor `{ROPE_FACTORS}` is not the rotary scaling of Llama 3.1 to 3.3, "
                    f"in `{self._path}`",
                    hint=_OTHER_SOURCE,
                )
            return {"rope_theta": theta} | found
        if not scaled:
            return {"rope_type": "default", "rope_theta": theta}
        rope = {"rope_type": kind, "rope_theta": theta, "factor": factor}
        if kind == "linear":
            return rope
        if kind != "yarn":
            raise UnsupportedVariant(
                f"metadata key `{self._architecture}.rope.scaling.type` is `{kind}`, expected "
                f"`none`, `linear` or `yarn`, in `{self._path}`"
            )
        self._refuse_unless("rope.scaling.attn_factor", 1.0, "a factor on attention")
        return rope | {"original_max_position_embeddings": original}

    def _refuse_unread(self) -> None:
        prefix = f"{self._architecture}."
        unread = {
            key
            for key in self._header.metadata
            if key.startswith(prefix) and key.removeprefix(prefix) not in self._read
        }
        if unread:
            raise UnsupportedVariant(
                f"metadata keys that may change the result are not understood: {listed(unread)}, "
                f"in `{self._path}`",
                hint=_OTHER_SOURCE,
            )


def _compute_dtype(header: GgufHeader) -> str:
    types = {tensor.type_name for tensor in header.tensors.values() if len(tensor.shape) == 2}
    if types == {"F32"}:
        return "float32"
    return "float16" if types & PLAIN_DTYPES.keys() == {"F16"} else "bfloat16"


def _read_factors(table: GgufTensor, path: Path) -> Tensor:
    entry = TensorEntry(
        ROPE_FACTORS, torch.float32, table.shape, path, table.start, table.num_bytes
    )
    if table.type_name != "F32":
        raise UnsupportedVariant(
            f"tensor `{ROPE_FACTORS}` has type `{table.type_name}`, expected `F32`, in `{path}`"
        )
    return read_entry(entry)


def _llama3_scaling(factors: Tensor, theta: float, head_size: int) -> dict[str, Any] | None:
    """Recognise the factors [D / 2] float32 that wavelengths are stretched by.

    Waves longer than the original context are stretched by `factor`, those shorter than a quarter
    of it not at all, and those between by a smooth mixture. Only these limits (1 and 4) and this
    context (8192) are in use; None if the factors do not come from them.
    """
    if factors.shape != (head_size // 2,):
        return None
    if bool((factors == 1).all()):
        return {"rope_type": "default"}
    factor, low, high, context = factors.max().item(), 1.0, 4.0, 8192
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    turns = context * theta**-exponents / (2 * math.pi)  # within the original context
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    if not torch.allclose(factors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-4, atol=0):
        return None
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }
