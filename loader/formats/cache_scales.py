"""Scales of the key-value cache: many names on disk, one afterwards.

    usual name              also stored as (A is the attention module, x is k, v or q)
    <A>.x_scale             <A>.x_proj.x_scale     ModelOpt, old vLLM
                            <A>.qkv_proj.x_scale   ModelOpt with fused projections
                            <A>.attn.x_scale       vLLM's own module names
                            <A>.x_proj.output_scale  Quark, llm-compressor before 0.8
                            <A>.x_cache.scale      early exporters
    <A>.x_zero_point        the same with zero_point in place of scale

The tensors themselves are plain tensors: no layer's weight is decoded from them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from quantload.errors import listed
from quantload.loader.checkpoint import Checkpoint

_SPELLED = re.compile(
    r"(?P<attention>.+)\.(?:"
    r"(?:[qkv]_proj|qkv_proj|(?<=attn\.)attn|(?<=attention\.)attn|(?<=mixer\.)attn)"
    r"\.(?P<plain>[qkv])_(?P<kind>scale|zero_point)"
    r"|(?P<projection>[qkv])_proj\.output_(?P<output>scale|zero_point)"
    r"|(?P<cache>[kv])_cache\.(?P<cached>scale|zero_point))"
)

# How the names begin to match from their end; asked first, since most names are others.
_SPELLED_ENDS = tuple(
    f"{which}{kind}"
    for which in ("q_", "k_", "v_", "output_", "_cache.")
    for kind in ("scale", "zero_point")
)
_PROJECTION_ENDS = ("k_proj", "v_proj", "qkv_proj")
_CACHE_LEAF = re.compile(r"[qkv]_(?:scale|zero_point)")
_PROJECTION = re.compile(r"(?P<attention>.+)\.(?:k_proj|v_proj|qkv_proj)")
_PARTNERS = {"k_scale": "v_scale", "v_scale": "k_scale"}
_NUMBER = re.compile(r"\d+")


def usual_cache_name(name: str) -> str | None:
    """Return the usual name of a cache scale stored under another name; None for all others."""
    match = _SPELLED.fullmatch(name) if name.endswith(_SPELLED_ENDS) else None
    if match is None:
        return None
    which = match["plain"] or match["projection"] or match["cache"]
    kind = match["kind"] or match["output"] or match["cached"]
    return f"{match['attention']}.{which}_{kind}"


def with_usual_cache_names(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with its cache scales under their usual names.

    Raises:
        CheckpointError: One scale is there under two names.
    """
    names = {name: usual for name in checkpoint.tensors if (usual := usual_cache_name(name))}
    return checkpoint.renamed(names) if names else checkpoint


def about_cache_scales(checkpoint: Checkpoint, scheme: Mapping[str, Any] | None) -> list[str]:
    """Warn of attention modules without a scale that their like have: engines take 1 for it.

    Args:
        checkpoint: With its cache scales under their usual names.
        scheme: How keys and values are cached, as compressed-tensors writes it down.
    """
    leaves: dict[str, set[str]] = {}  # of each attention module that caches
    for name in checkpoint.tensors:
        parent, _, leaf = name.rpartition(".")
        if leaf[1:2] == "_" and _CACHE_LEAF.fullmatch(leaf):
            leaves.setdefault(parent, set()).add(leaf)
        elif parent.endswith(_PROJECTION_ENDS) and (match := _PROJECTION.fullmatch(parent)):
            leaves.setdefault(match["attention"], set())
    alike: dict[str, set[str]] = {}
    for module, found in leaves.items():
        alike.setdefault(_NUMBER.sub("#", module), set()).update(found)
    for found in alike.values():
        found.update(_PARTNERS[leaf] for leaf in tuple(found) if leaf in _PARTNERS)
    missing = [
        f"{module}.{leaf}"
        for module, found in leaves.items()
        for leaf in sorted(alike[_NUMBER.sub("#", module)] - found)
    ]
    if missing:
        return [
            f"{len(missing)} scales of the key-value cache are missing: {listed(missing)}, in "
            f"`{checkpoint.name}`; engines take 1"
        ]
    if scheme is not None and not scheme.get("dynamic") and leaves and not any(leaves.values()):
        return [
            "the quantization config says that keys and values are cached with fixed scales, but "
            f"there is none in `{checkpoint.name}`; engines take 1"
        ]
    return []
