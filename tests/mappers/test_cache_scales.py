"""Every spelling of a key-value cache scale means the same attention."""

from __future__ import annotations

import pytest

from quantload.mappers.cache_scales import CacheScale, cache_scale_of

ATTENTION = "model.layers.0.self_attn"


@pytest.mark.parametrize(
    ("leaf", "of", "kind"),
    [
        ("k_scale", "k", "scale"),
        ("attn.k_scale", "k", "scale"),
        ("attn.q_scale", "q", "scale"),
        ("k_proj.k_scale", "k", "scale"),
        ("v_proj.v_scale", "v", "scale"),
        ("qkv_proj.k_scale", "k", "scale"),
        ("k_proj.output_scale", "k", "scale"),
        ("v_proj.output_zero_point", "v", "zero_point"),
        ("q_proj.output_scale", "q", "scale"),
        ("k_cache.scale", "k", "scale"),
        ("v_cache.zero_point", "v", "zero_point"),
        ("q.scale", "q", "scale"),
        ("k_zero_point", "k", "zero_point"),
        ("kv_scale", "kv", "scale"),
        ("kv_proj.kv_scale", "kv", "scale"),
    ],
)
def test_spellings(leaf: str, of: str, kind: str) -> None:
    assert cache_scale_of(f"{ATTENTION}.{leaf}") == CacheScale(ATTENTION, tuple(of), kind)


@pytest.mark.parametrize(
    "path", ["h.0.attn", "backbone.layers.3.mixer", "model.layers.1.attention", ""]
)
def test_attentions_of_other_names(path: str) -> None:
    name = f"{path}.k_scale" if path else "k_scale"
    assert cache_scale_of(name) == CacheScale(path, ("k",), "scale")


@pytest.mark.parametrize(
    "name",
    [
        f"{ATTENTION}.k_proj.weight_scale",
        f"{ATTENTION}.k_proj.input_scale",
        f"{ATTENTION}.o_proj.output_scale",
        f"{ATTENTION}.k_proj.scale",
        "model.layers.0.mlp.q.scale",  # no attention
        "model.layers.0.self_attn.k_scale.weight",
        "model.layers.0.task_scale",
    ],
)
def test_other_scales(name: str) -> None:
    assert cache_scale_of(name) is None
