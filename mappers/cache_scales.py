"""Scales of a quantized key-value cache: every name under which producers store them, in one table.

All rows mean "a scale (or zero point) of this attention", though half of them lie in a linear
layer: they are found before anything that sorts by linear layers, such as stacks of q, k and v.

    leaf below the attention                producer
    k_scale, attn.k_scale                   vLLM's own name, fp8 checkpoints
    k_proj.k_scale, qkv_proj.k_scale        ModelOpt
    k_proj.output_scale                     Quark, ModelOpt, fp8
    k_cache.scale, q.scale                  compressed-tensors (attention modules of their own)
    kv_scale                                early fp8: one for keys and values

(the same with v and q, and with zero_point)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Tensor = Literal["q", "k", "v"]
_TENSORS: tuple[Tensor, ...] = ("q", "k", "v")


@dataclass(frozen=True, slots=True)
class CacheScale:
    """What one tensor says about the cache of one attention.

    Args:
        attention: Dotted path of the attention module, as the checkpoint calls it.
        of: Whose scale it is.
        kind: "scale" (a multiplier) or "zero_point".
    """

    attention: str
    of: tuple[Tensor, ...]
    kind: Literal["scale", "zero_point"]


_KIND = r"(?P<kind>scale|zero_point)"
# Each row: what follows the path of the attention. The first that fits counts.
_TABLE = (
    rf"(?:q|k|v|qkv|kv)_proj\.(?P<of>q|k|v|kv)_{_KIND}",
    rf"(?P<of>q|k|v|qkv)_proj\.output_{_KIND}",
    rf"(?P<of>q|k|v)_cache\.{_KIND}",
    rf"(?P<of>q|k|v|kv|qkv)_{_KIND}",
)
_ONLY_BELOW_ATTENTION = rf"(?P<of>q|k|v)\.{_KIND}"
_PATTERNS = tuple(re.compile(rf"(?:(?P<attention>.*?)\.)?{row}") for row in _TABLE)
_BELOW = re.compile(
    rf"(?P<attention>(?:.*\.)?(?:self_attn|self_attention|attn|attention|mixer))\."
    rf"{_ONLY_BELOW_ATTENTION}"
)
_INNER = re.compile(r"(?P<outer>(?:^|.*\.)(?:self_attn|self_attention|attention|mixer))\.attn")


def cache_scale_of(name: str) -> CacheScale | None:
    """Return what a tensor says about a key-value cache; None if it is about something else."""
    matches = (pattern.fullmatch(name) for pattern in (*_PATTERNS, _BELOW))
    match = next((found for found in matches if found is not None), None)
    if match is None:
        return None
    attention = match["attention"] or ""
    inner = _INNER.fullmatch(attention)  # vLLM's own attention layer lies in the model's
    of = tuple(letter for letter in _TENSORS if letter in match["of"])
    kind: Literal["scale", "zero_point"] = "scale" if match["kind"] == "scale" else "zero_point"
    return CacheScale(attention if inner is None else inner["outer"], of, kind)


__all__ = ["CacheScale", "cache_scale_of"]
