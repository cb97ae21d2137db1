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

from quantload.loader.checkpoint import Checkpoint

_SPELLED = re.compile(
    r"(?P<attention>.+)\.(?:"
    r"(?:[qkv]_proj|qkv_proj|(?<=attn\.)attn|(?<=attention\.)attn|(?<=mixer\.)attn)"
    r"\.(?P<plain>[qkv])_(?P<kind>scale|zero_point)"
    r"|(?P<projection>[qkv])_proj\.output_(?P<output>scale|zero_point)"
    r"|(?P<cache>[kv])_cache\.(?P<cached>scale|zero_point))"
)


def usual_cache_name(name: str) -> str | None:
    """Return the usual name of a cache scale stored under another name; None for all others."""
    match = _SPELLED.fullmatch(name)
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
