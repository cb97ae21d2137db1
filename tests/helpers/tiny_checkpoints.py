"""Tiny Hugging Face checkpoints on disk: made with safetensors and json alone."""

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN2 = {
    **LLAMA,
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "sliding_window": None,
    "use_sliding_window": False,
}
_SHORT = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
# A layer's own spread of values, so that the scales of two layers are never alike.
_SPREAD = {"q_proj": 1.0, "k_proj": 4.0, "v_proj": 0.25, "gate_proj": 2.0, "up_proj": 0.5}


def config(
    *,
    hidden: int = 64,
    intermediate: int = 128,
    layers: int = 2,
    vocabulary: int = 96,
    tied: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    base: Mapping[str, Any] = LLAMA,
) -> dict[str, Any]:
    """The config.json of a tiny model with 4 heads and 2 key-value heads."""
    return {
        **base,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "dtype": _SHORT[dtype],
    }


def tensors(content: Mapping[str, Any], *, seed: int = 0) -> dict[str, Tensor]:
    """Random tensors of the model of a config, by checkpoint name, in its dtype."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, content["dtype"])
    hidden, inner = content["hidden_size"], content["intermediate_size"]
    narrow = content["num_key_value_heads"] * content["head_dim"]
    biased = content["model_type"] == "qwen2"

    def weight(name: str, *shape: int) -> Tensor:
        spread = 0.05 * _SPREAD.get(name, 1.0)
        return (torch.randn(shape, generator=generator) * spread).to(dtype)

    made = {"model.embed_tokens.weight": weight("embed_tokens", content["vocab_size"], hidden)}
    for number in range(content["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        made[f"{layer}.input_layernorm.weight"] = 1 + weight("norm", hidden)
        made[f"{layer}.post_attention_layernorm.weight"] = 1 + weight("norm", hidden)
        for name, rows in (("q_proj", hidden), ("k_proj", narrow), ("v_proj", narrow)):
            made[f"{layer}.self_attn.{name}.weight"] = weight(name, rows, hidden)
            if biased:
                made[f"{layer}.self_attn.{name}.bias"] = weight(name, rows)
        made[f"{layer}.self_attn.o_proj.weight"] = weight("o_proj", hidden, hidden)
        made[f"{layer}.mlp.gate_proj.weight"] = weight("gate_proj", inner, hidden)
        made[f"{layer}.mlp.up_proj.weight"] = weight("up_proj", inner, hidden)
        made[f"{layer}.mlp.down_proj.weight"] = weight("down_proj", hidden, inner)
    made["model.norm.weight"] = 1 + weight("norm", hidden)
    if not content["tie_word_embeddings"]:
        made["lm_head.weight"] = weight("lm_head", content["vocab_size"], hidden)
    return made


def write(
    folder: Path,
    content: Mapping[str, Any],
    parts: Mapping[str, Tensor] | Iterable[Mapping[str, Tensor]],
) -> Path:
    """Write a folder: one file for a mapping, numbered shards and an index for several."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    if isinstance(parts, Mapping):
        save_file(dict(parts), folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    shards = list(parts)
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(dict(shard), folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def llama(folder: Path, *, seed: int = 0, **sizes: Any) -> Path:
    """A single-file llama in one call; `sizes` are those of `config`."""
    content = config(**sizes)
    return write(folder, content, tensors(content, seed=seed))


def halves(made: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Split tensors into two shards."""
    names = list(made)
    middle = len(names) // 2
    return [{n: made[n] for n in names[:middle]}, {n: made[n] for n in names[middle:]}]


def mixed(made: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors in three dtypes: norms float32, MLPs float16, the rest as it was."""
    return {
        name: tensor.float() if "norm" in name else tensor.half() if ".mlp." in name else tensor
        for name, tensor in made.items()
    }


def raw_safetensors(file: Path, header: object, data: bytes = b"", *, length: int = -1) -> Path:
    """Write a file with any header, also a lying one."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text) if length < 0 else length) + text + data)
    return file
