"""Modules that stay in full precision unless a rule names them whole, each with its reason.

Names are compared by whole components: `gate` is a router, `gate_proj` is not. Sources: the default
ignore lists of llm-compressor, ModelOpt and AutoRound, and the reports about them.
"""

from __future__ import annotations

import re

from quantload.mappers.facts import Kind

_ROUTERS = {"gate", "router", "shared_expert_gate", "gate_network", "router_proj"}
_STATE_SPACE = {
    "dt_proj",
    "x_proj",
    "in_proj_a",
    "in_proj_b",
    "in_proj_ba",
    "conv1d",
    "weights_proj",
}
_TOWERS = {
    "vision_tower",
    "vision_model",
    "visual",
    "vision_embed_tokens",
    "audio_tower",
    "audio_model",
    "multi_modal_projector",
    "mm_projector",
    "embed_vision",
    "embed_audio",
}
_PREDICTION = {"mtp", "eh_proj", "nextn", "mtp_block"}
_HEADS = {"lm_head", "output_layer", "embed_out", "head"}
_NORMS = re.compile(r"(^|_)(layer|rms)?norm\d*$|^ln(_|\d|$)|_ln$", re.IGNORECASE)


def is_beside_the_decoder(module: str) -> bool:
    """True for what lies in a tower or in a block for multi-token prediction."""
    return bool((_TOWERS | _PREDICTION).intersection(module.split(".")))


def reason_to_keep(module: str, kind: Kind) -> str | None:
    """Return why a module stays in full precision by default; None if it does not.

    Args:
        module: Dotted checkpoint name.
        kind: Kind of the module.
    """
    components = module.split(".")
    if kind == "head" or components[-1] in _HEADS:
        return "output head"
    if kind == "embedding":
        return "embedding"
    if kind == "convolution":
        return "convolution"
    if _NORMS.search(components[-1]):
        return "norm"
    for names, reason in (
        (_PREDICTION, "multi-token prediction block"),
        (_TOWERS, "vision or audio tower"),
        (_ROUTERS, "router"),
    ):
        if names.intersection(components):
            return reason
    if components[-1] in _STATE_SPACE:
        return "small state-space or indexer projection"
    if kind == "other":
        return "not a linear layer"
    return None
