"""An output head: the embedding's weight in one checkpoint, a weight of its own in another.

Names of embeddings and heads differ from model to model, so they are told by their shapes: what
lies outside of the blocks and is [vocabulary, hidden].
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from quantload.loader.source import Source, SourceWeight

_OF_A_BLOCK = re.compile(r"(^|\.)\d+(\.|$)")


def has_own_head(source: Source) -> bool:
    """Return whether an embedding and a head of its shape are both stored."""
    largest = max((w.shape for w in _outside(source).values()), default=None)
    return sum(weight.shape == largest for weight in _outside(source).values()) > 1


def with_tied_head(reference: Source, candidate: Source) -> Source:
    """Return the reference with its embedding under the name of a head that the candidate has.

    A reference without a head multiplies with its embedding, which is what a head of the
    candidate's own is to be held to.
    """
    lone = {m: w for m, w in _outside(candidate).items() if m not in reference.weights}
    added: dict[str, SourceWeight] = {}
    for module, weight in lone.items():
        same = [w for w in _outside(reference).values() if w.shape == weight.shape]
        if len(same) == 1 and same[0].module in candidate.weights:
            added[module] = same[0]
    if len(added) != 1:
        return reference
    ((head, embedding),) = added.items()
    alias = replace(embedding, module=head, parameter=embedding.parameter_name)
    return replace(reference, weights={**reference.weights, head: alias})


def _outside(source: Source) -> Mapping[str, SourceWeight]:
    """The weights of layers that lie in no numbered block."""
    return {
        module: weight
        for module, weight in source.weights.items()
        if weight.is_matrix and not _OF_A_BLOCK.search(module)
    }


__all__ = ["has_own_head", "with_tied_head"]
