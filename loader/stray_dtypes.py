"""Single tensors in the other 16-bit float than all their like: told, since no header is wrong."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping

import torch

from quantload.errors import listed
from quantload.loader.checkpoint import TensorEntry
from quantload.loader.source import SourceWeight

_SIXTEEN = (torch.float16, torch.bfloat16)
_NUMBER = re.compile(r"\d+")
_LEAST = 4  # so many alike for each one that differs


def warn_of_stray_dtypes(
    tensors: Mapping[str, TensorEntry], weights: Mapping[str, SourceWeight]
) -> list[str]:
    """Return a warning for each kind of tensor of which few are float16 and most bfloat16.

    The bytes of one read as the other are other values, in their thousands within range. Tools
    write all tensors of a kind in one of the two; float32 beside them is usual, and not told. Nor
    is a dtype in which the same tensor of all layers is stored.

    Args:
        tensors: Headers of all tensors.
        weights: Weights by module; a kind is a leaf of quantized ones, or everything else.
    """
    kinds: dict[str, list[TensorEntry]] = {}
    for kind, entry in _kinds(tensors, weights):
        kinds.setdefault(kind, []).append(entry)
    return [warning for entries in kinds.values() if (warning := _warning(entries))]


def _warning(entries: list[TensorEntry]) -> str:
    (most, many), *rest = Counter(entry.dtype for entry in entries).most_common()
    if not rest or many < _LEAST * rest[0][1]:
        return ""
    other = rest[0][0]
    layers: dict[str, list[torch.dtype]] = {}
    for entry in entries:
        layers.setdefault(_NUMBER.sub("#", entry.name), []).append(entry.dtype)
    by_design = {key for key, found in layers.items() if len(found) > 1 and set(found) == {other}}
    stray = [e.name for e in entries if e.dtype == other]
    stray = [name for name in stray if _NUMBER.sub("#", name) not in by_design]
    if not stray:
        return ""
    return (
        f"{listed(stray)}: `{other}`, but {many} tensors of the kind are `{most}`; a wrong dtype "
        "in the header would give wrong values"
    )


def _kinds(
    tensors: Mapping[str, TensorEntry], weights: Mapping[str, SourceWeight]
) -> Iterator[tuple[str, TensorEntry]]:
    """Yield (kind, header) of every tensor in a 16-bit float."""
    leaves = {
        name: leaf
        for weight in weights.values()
        if weight.is_quantized
        for leaf, name in weight.leaves.items()
    }
    for name, entry in tensors.items():
        if entry.dtype in _SIXTEEN:
            yield leaves.get(name, ""), entry
