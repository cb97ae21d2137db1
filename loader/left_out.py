"""Tensors without a place in the model that may be left out: each has its reason."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from quantload.errors import listed
from quantload.loader.source import Source

_log = logging.getLogger("quantload")


def why_left_out(source: Source, name: str) -> str:
    """Say why a plain tensor without a place is no weight that the model misses; "" if it may be.

    Beside quantized weights, and on a layer with a weight, no number is left out: it may be a
    scale. What is no bias of zeros is told to the user.

    Args:
        source: An open checkpoint.
        name: Name of one of its plain tensors.
    """
    if _is_empty_bias(source, name):
        return "bias of zeros for a layer without bias"
    reason = _why_no_weight(source, name)
    if reason:
        _log.warning("tensor `%s` has no place in the model, left out: %s", name, reason)
    return reason


def tell_left_out(dropped: Mapping[str, str]) -> None:
    """Log which tensors of a checkpoint are left out of a model, a line for each reason.

    Args:
        dropped: {name: reason}.
    """
    by_reason: dict[str, list[str]] = {}
    for name, reason in dropped.items():
        by_reason.setdefault(reason, []).append(name)
    for reason, names in by_reason.items():
        _log.info("%d tensors left out: %s (%s)", len(names), reason, listed(names, limit=2))


def _is_empty_bias(source: Source, name: str) -> bool:
    """True for the zero biases that GPTQ exporters add to layers without bias."""
    if not name.endswith(".bias"):
        return False
    weight = source.weights.get(name.removesuffix(".bias"))
    if weight is None or not weight.is_quantized:
        return False
    return not bool(source.read_plain(name).any())


def _why_no_weight(source: Source, name: str) -> str:
    entry = source.plain[name]
    if not entry.num_elements:
        return "it has no elements"
    if source.is_quantized or name.rpartition(".")[0] in source.weights:
        return ""
    if not entry.shape:
        return "a single number"
    return "" if entry.dtype.is_floating_point else f"{len(entry.shape)}-D integers"
