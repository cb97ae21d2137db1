"""Put our embeddings and output heads into a model where one is quantized or shared by ranks.

An embedding and a head that are one weight are replaced together or not at all, so that they stay
one. What cannot be replaced stays the model's own: it is then in full precision on every rank, and
the reason is returned.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from quantload.errors import ConfigError
from quantload.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from quantload.layers.embedding_like import embedding_like
from quantload.layers.layer_builder import LayerBuilder
from quantload.layers.meta_model import TransformersModel, output_head
from quantload.layers.replacement import path_of, put
from quantload.layers.siblings import is_plain_linear


def replace_vocabulary(
    model: TransformersModel, builder: LayerBuilder, tied: Mapping[str, str]
) -> dict[str, str]:
    """Put our embeddings and head into a model on the meta device.

    Args:
        model: Changed in place.
        builder: Knows schemes and ranks.
        tied: Parameters that are another one, by name.

    Returns:
        Why modules stay the model's own that should not: {path: reason}.
    """
    head = path_of(model, output_head(model))
    partners = dict(_partners(tied))
    refused: dict[str, str] = {}
    for path, module in list(model.named_modules()):
        is_shared = builder.style(path).kind == "vocabulary"
        is_quantized = path in builder.schemes
        if not isinstance(module, nn.Embedding) or isinstance(module, VocabParallelEmbedding):
            continue
        partner = partners.get(path)
        if not is_shared and not is_quantized and partner not in builder.schemes:
            continue
        reason = _why_not(model, partner, head)
        try:
            ours = embedding_like(
                module,
                scheme=builder.scheme(path),
                dtype=builder.dtype,
                parallel=builder.parallel if is_shared else None,
                prefix=path,
            )
        except ConfigError as error:
            reason = error.message
        if reason:
            refused[path] = reason
            continue
        put(model, path, ours)
        if partner is not None:
            tied_head = _head(model, partner, builder, is_shared=is_shared)
            put(model, partner, tied_head.tie_weights(ours))
    is_shared = bool(head) and builder.style(head).kind == "vocabulary"
    if is_shared and head not in partners and is_plain_linear(model.get_submodule(head)):
        put(model, head, _head(model, head, builder, is_shared=True))
    return refused


def _head(model: nn.Module, path: str, builder: LayerBuilder, *, is_shared: bool) -> ParallelLMHead:
    linear = model.get_submodule(path)
    assert isinstance(linear, nn.Linear), f"{path} is a linear layer"
    return ParallelLMHead(
        linear.out_features,
        linear.in_features,
        bias=linear.bias is not None,
        scheme=builder.scheme(path),
        dtype=builder.dtype,
        parallel=builder.parallel if is_shared else None,
        prefix=path,
    )


def _why_not(model: nn.Module, partner: str | None, head: str) -> str:
    """Say why an embedding cannot be replaced together with what it is tied to."""
    if partner is None:
        return ""
    if partner != head or not is_plain_linear(model.get_submodule(partner)):
        return f"it is tied to `{partner}`, which is no output head"
    return ""


def _partners(tied: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return (module, module that has the same weight), both ways."""
    found = []
    for one, two in tied.items():
        modules = one.rpartition(".")[0], two.rpartition(".")[0]
        found += [modules, modules[::-1]]
    return found


__all__ = ["replace_vocabulary"]
