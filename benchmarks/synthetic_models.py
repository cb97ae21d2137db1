"""Checkpoints of a stated size with the shapes of real models and random bfloat16 weights.

    python benchmarks/synthetic_models.py FOLDER --gb 8 [--shape llama|moe] [--shard-gb 5]

`llama` has the widths of Llama 3 8B (of Llama 3.2 1B below 0.9 GB), `moe` those of Qwen3 30B-A3B
with one tensor for each projection of each expert. Layers, experts and vocabulary are counted so
that the whole has the stated size and full-precision embedding and head take about the share that
they have in the real model. Weights are normal with a deviation of 0.02. They are cut from one
pool of 16 million numbers, at another place for each tensor, and are written as they are made:
memory stays at some hundred MB whatever the size.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

GB = 1e9
POOL = 1 << 24
STANDARD_DEVIATION = 0.02
BYTES_PER_WEIGHT = 2
LLAMA_HEADS_SHARE, MOE_HEADS_SHARE = 0.13, 0.04  # of embedding and head together, in bytes
EXPERTS, LEAST_EXPERTS = 128, 8
Shapes = dict[str, tuple[int, ...]]


def bytes_of(shapes: Shapes) -> int:
    return sum(BYTES_PER_WEIGHT * math.prod(shape) for shape in shapes.values())


def attention(hidden: int, queries: int, keys: int) -> Shapes:
    return {
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }


def mlp(prefix: str, hidden: int, inner: int) -> Shapes:
    return {
        f"{prefix}.gate_proj.weight": (inner, hidden),
        f"{prefix}.up_proj.weight": (inner, hidden),
        f"{prefix}.down_proj.weight": (hidden, inner),
    }


def _whole(layer: Shapes, layers: int, hidden: int, size: int) -> tuple[Shapes, int]:
    """Add embedding and head, whose vocabulary fills what is left; return it too."""
    left = size - layers * bytes_of(layer)
    vocabulary = max(256, round(left / (2 * BYTES_PER_WEIGHT * hidden) / 64) * 64)
    shapes: Shapes = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for number in range(layers):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    ends: Shapes = {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}
    return shapes | ends, vocabulary


def llama(size: int) -> tuple[Shapes, dict]:
    """Shapes and config of a Llama of about so many bytes."""
    small = size < 0.9 * GB
    hidden, inner, keys = (2048, 8192, 512) if small else (4096, 14336, 1024)
    layer = attention(hidden, hidden, keys) | mlp("mlp", hidden, inner)
    layers = max(1, round((1 - LLAMA_HEADS_SHARE) * size / bytes_of(layer)))
    shapes, vocabulary = _whole(layer, layers, hidden, size)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "intermediate_size": inner,
        "head_dim": 64 if small else 128,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
    return shapes, config | _common(hidden, layers, vocabulary)


def moe(size: int) -> tuple[Shapes, dict]:
    """Shapes and config of a Qwen3 mixture of experts of about so many bytes."""
    hidden, inner, head = 2048, 768, 128
    heads = attention(hidden, 32 * head, 4 * head) | {
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
    }
    expert = bytes_of(mlp("", hidden, inner))
    in_layers = (1 - MOE_HEADS_SHARE) * size
    layers = max(1, math.ceil(in_layers / (bytes_of(heads) + EXPERTS * expert)))
    wanted = (in_layers / layers - bytes_of(heads)) / expert
    experts = max(LEAST_EXPERTS, int(wanted) // LEAST_EXPERTS * LEAST_EXPERTS)
    layer = heads | {"mlp.gate.weight": (experts, hidden)}
    for number in range(experts):
        layer |= mlp(f"mlp.experts.{number}", hidden, inner)
    shapes, vocabulary = _whole(layer, layers, hidden, size)
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "intermediate_size": 6144,
        "moe_intermediate_size": inner,
        "num_experts": experts,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "head_dim": head,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    }
    return shapes, config | _common(hidden, layers, vocabulary)


def _common(hidden: int, layers: int, vocabulary: int) -> dict:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


MODELS = {"llama": llama, "moe": moe}


class Weights:
    """An endless supply of random bfloat16 weights.

    Args:
        seed: Of the pool, and of the places where tensors begin in it.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        values = self._random.standard_normal(POOL, dtype=np.float32) * STANDARD_DEVIATION
        self._pool = ((values.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)

    def pieces(self, numbers: int) -> Iterator[memoryview]:
        """Yield the bytes of so many weights."""
        start = int(self._random.integers(0, POOL))
        while numbers:
            piece = self._pool[start : start + numbers]
            yield memoryview(piece).cast("B")
            numbers -= len(piece)
            start = 0


def _shards(shapes: Shapes, shard_bytes: float) -> list[Shapes]:
    shards: list[Shapes] = [{}]
    filled = 0
    for name, shape in shapes.items():
        size = bytes_of({name: shape})
        if shards[-1] and filled + size > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = shape
        filled += size
    return shards


def _write_shard(path: Path, shapes: Shapes, weights: Weights) -> None:
    header, position = {}, 0
    for name, shape in shapes.items():
        end = position + bytes_of({name: shape})
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            for piece in weights.pieces(math.prod(shape)):
                file.write(piece)


def write_model(folder: Path, *, shape: str, gb: float, shard_gb: float = 5.0) -> Path:
    """Write a checkpoint; the folder appears when it is complete."""
    return write_shapes(folder, *MODELS[shape](int(gb * GB)), shard_gb=shard_gb)


def write_shapes(
    folder: Path,
    shapes: Shapes,
    config: dict,
    *,
    shard_gb: float = 5.0,
    weights: Weights | None = None,
) -> Path:
    """Write a checkpoint of given shapes; the folder appears when it is complete."""
    shards = _shards(shapes, shard_gb * GB)
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    weights, places = weights or Weights(), {}
    for number, shard in enumerate(shards, 1):
        name = "model.safetensors"
        if len(shards) > 1:
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(unfinished / name, shard, weights)
        places |= dict.fromkeys(shard, name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": bytes_of(shapes)}, "weight_map": places}
        (unfinished / "model.safetensors.index.json").write_text(json.dumps(index))
    (unfinished / "config.json").write_text(json.dumps(config, indent=2))
    return unfinished.rename(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gb", type=float, required=True)
    parser.add_argument("--shape", choices=MODELS, default="llama")
    parser.add_argument("--shard-gb", type=float, default=5.0)
    options = parser.parse_args()
    write_model(options.folder, shape=options.shape, gb=options.gb, shard_gb=options.shard_gb)


if __name__ == "__main__":
    main()
