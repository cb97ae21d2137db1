"""What is known of a GGUF file when the details of its architecture are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantload.loader.gguf_header import GgufTensor
from quantload.loader.gguf_metadata import Metadata


@dataclass(frozen=True)
class Facts:
    """What is known of a file when its architecture's own details are read.

    Args:
        metadata: Of the file.
        tensors: Its tensor table.
        sizes: Size of each axis, to be completed.
        options: Which tensors there are, to be completed.
        by_layer: Sizes and options that differ from layer to layer, to be completed.
        rope: `rope_parameters` so far; empty for an architecture without rotation.
    """

    metadata: Metadata
    tensors: Mapping[str, GgufTensor]
    sizes: dict[str, int]
    options: dict[str, bool]
    by_layer: dict[str, list[int]]
    rope: dict[str, Any]


def read_experts(facts: Facts) -> tuple[int, int]:
    """Return E and how many experts are used for a token; their width becomes a size."""
    count, used = facts.metadata.count("expert_count"), facts.metadata.count("expert_used_count")
    width = facts.sizes.get("intermediate")
    if not facts.metadata.has(
        "expert_feed_forward_length"
    ):  # older files leave it to the facts.tensors
        stacked = facts.tensors.get("blk.0.ffn_down_exps.weight")
        width = stacked.shape[-1] if stacked is not None else width
    facts.sizes["experts"], facts.sizes["moe"] = (
        count,
        facts.metadata.count("expert_feed_forward_length", width),
    )
    facts.metadata.ignore("expert_count", "expert_used_count")
    for key, neutral in (("expert_weights_scale", 1.0), ("expert_group_count", 1)):
        facts.metadata.refuse_unless(key, neutral, "a change of the experts' weights")
    facts.metadata.refuse_unless("expert_group_used_count", 1, "a choice among groups of experts")
    return count, used
