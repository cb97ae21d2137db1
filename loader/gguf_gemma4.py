"""The config of Gemma 4, whose layers differ in their sizes.

Layers attend to a window or to all tokens, and heads of the two kinds have different sizes. The
last layers may share keys and values with earlier ones, and then may be twice as wide.

Source: llama.cpp, `Gemma4Model` in `conversion/gemma.py`, at
https://github.com/ggml-org/llama.cpp/blob/061b8c5f91885f2779d23198a091777df47c3f6f/conversion/gemma.py
"""

from __future__ import annotations

from typing import Any

from quantload.errors import UnsupportedVariant
from quantload.loader.gguf_facts import Facts, read_experts
from quantload.loader.gguf_metadata import OTHER_SOURCE
from quantload.loader.gguf_rope import ROPE_FACTORS, read_factors


def gemma4(facts: Facts) -> dict[str, Any]:
    """Return the entries of the config, and complete sizes and options of each layer."""
    metadata, sizes, layers = facts.metadata, facts.sizes, facts.sizes["layers"]
    is_local = metadata.counts("attention.sliding_window_pattern", layers)
    shared = metadata.count("attention.shared_kv_layers", 0, least=0)
    local, full = metadata.count("attention.key_length_swa"), sizes["head"]
    metadata.refuse_unless("attention.value_length_swa", local, f"a value size not `{local}`")
    sizes["input"] = metadata.count("embedding_length_per_layer_input", 0, least=0)
    sizes["inputs"] = layers * sizes["input"]
    heads = [local if flag else full for flag in is_local]
    kv_heads = metadata.counts("attention.head_count_kv", layers)
    widths = metadata.counts("feed_forward_length", layers)
    own_k = [layer < layers - shared for layer in range(layers)]
    same = any(own_k[n] and f"blk.{n}.attn_v.weight" not in facts.tensors for n in range(layers))
    facts.by_layer.update(
        head=heads,
        q=[sizes["heads"] * size for size in heads],
        kv=[count * size for count, size in zip(kv_heads, heads, strict=True)],
        intermediate=widths,
        own_k=[int(own) for own in own_k],
        own_v=[int(own_k[n] and not (same and not is_local[n])) for n in range(layers)],
    )
    config = {
        "head_dim": local,
        "attention_k_eq_v": same,
        "num_kv_shared_layers": shared,
        "enable_moe_block": facts.options["has_experts"],
        "hidden_size_per_layer_input": sizes["input"],
        "vocab_size_per_layer_input": sizes["vocab"],
        "sliding_window": metadata.count("attention.sliding_window"),
        "layer_types": ["sliding_attention" if flag else "full_attention" for flag in is_local],
        "rope_parameters": _rope(facts, local, full),
        "final_logit_softcapping": None,
    }
    if metadata.has("final_logit_softcapping"):
        config["final_logit_softcapping"] = metadata.number("final_logit_softcapping")
    return config | _widths(facts, widths, own_k) | _keys(facts, kv_heads, is_local) | _moe(facts)


def _widths(facts: Facts, widths: list[int], own_k: list[bool]) -> dict[str, Any]:
    width = min(widths)
    if set(widths) == {width}:
        return {"use_double_wide_mlp": False}
    if widths != [width if own else 2 * width for own in own_k]:
        raise UnsupportedVariant(
            f"metadata key `{facts.metadata.full('feed_forward_length')}` is `{widths}`, expected "
            f"one width, twice as much in layers that share keys, in `{facts.metadata.path}`",
            hint=OTHER_SOURCE,
        )
    return {"use_double_wide_mlp": True}


def _keys(facts: Facts, kv_heads: list[int], is_local: list[int]) -> dict[str, Any]:
    """Return the numbers of key heads; transformers has two where values are keys."""
    by_kind = [
        {count for count, flag in zip(kv_heads, is_local, strict=True) if bool(flag) == kind}
        for kind in (True, False)
    ]
    local, full = (next(iter(counts), 0) for counts in by_kind)
    same = any(not own_v for own_v, own_k in _own(facts) if own_k)
    if any(len(counts) != 1 for counts in by_kind) or (local != full and not same):
        raise UnsupportedVariant(
            f"metadata key `{facts.metadata.full('attention.head_count_kv')}` is `{kv_heads}`, "
            f"expected one count for each kind of layer, in `{facts.metadata.path}`",
            hint=OTHER_SOURCE,
        )
    facts.sizes["kv_heads"] = local
    return {"num_global_key_value_heads": full if same else None}


def _own(facts: Facts) -> list[tuple[int, int]]:
    return list(zip(facts.by_layer["own_v"], facts.by_layer["own_k"], strict=True))


def _moe(facts: Facts) -> dict[str, Any]:
    if not facts.options["has_experts"]:
        return {}
    count, used = read_experts(facts)
    facts.sizes["moe_twice"] = 2 * facts.sizes["moe"]
    return {
        "num_experts": count,
        "top_k_experts": used,
        "moe_intermediate_size": facts.sizes["moe"],
    }


def _rope(facts: Facts, local: int, full: int) -> dict[str, Any]:
    """Return the rotation of both kinds; a table of factors tells which part of a head turns."""
    metadata = facts.metadata
    for key, size in (("rope.dimension_count", full), ("rope.dimension_count_swa", local)):
        metadata.refuse_unless(key, size, f"rotation of a part of `{size}`")
    table = facts.tensors.get(ROPE_FACTORS)
    factors = [] if table is None else read_factors(table).tolist()
    turning = sum(factor == 1 for factor in factors)
    is_known = factors[:turning] == [1] * turning and all(f > 1e29 for f in factors[turning:])
    if len(factors) != full // 2 or not is_known:
        raise UnsupportedVariant(
            f"tensor `{ROPE_FACTORS}` has `{len(factors)}` factors, expected `{full // 2}` that "
            f"are 1 and then without bound, in `{metadata.path}`",
            hint=OTHER_SOURCE,
        )
    return {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 2 * turning / full,
            "rope_theta": metadata.number("rope.freq_base", 1e6),
        },
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": metadata.number("rope.freq_base_swa", 10000.0),
        },
    }
