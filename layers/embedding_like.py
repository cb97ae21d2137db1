"""Parallel embeddings for modules of a model's own class, which keep their forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quantload.errors import ConfigError
from quantload.layers.cut import Schemes
from quantload.layers.embedding import VocabParallelEmbedding
from quantload.quant.scheme import DENSE
from quantload.runtime.parallel import Parallel


def embedding_like(
    original: nn.Embedding,
    *,
    scheme: Schemes = DENSE,
    dtype: torch.dtype,
    parallel: Parallel | None = None,
    prefix: str = "",
) -> VocabParallelEmbedding:
    """Return a parallel embedding that computes what a module of a model computes.

    A subclass of `nn.Embedding` keeps its forward, as those that scale their rows have one: its
    class is put before ours, so that its `super().forward(tokens)` is our lookup.

    Args:
        original: The module, on any device; its weight is not read.
        scheme: As in `VocabParallelEmbedding`.
        dtype: As in `VocabParallelEmbedding`.
        parallel: As in `VocabParallelEmbedding`.
        prefix: As in `VocabParallelEmbedding`.

    Raises:
        ConfigError: The class has parameters of its own, renormalises rows, or looks rows up
            otherwise than by `super().forward`.
    """
    made = VocabParallelEmbedding(
        original.num_embeddings,
        original.embedding_dim,
        padding_idx=original.padding_idx,
        scheme=scheme,
        dtype=dtype,
        parallel=parallel,
        prefix=prefix,
    )
    if original.max_norm is not None:
        raise ConfigError(f"embedding `{prefix}` renormalises its rows, which is not supported")
    kind = type(original)
    if kind is nn.Embedding:
        return made
    others = [name for name in original._parameters if name != "weight"] + [*original._modules]
    if others:
        raise ConfigError(
            f"embedding `{prefix}` of class `{kind.__name__}` has `{others[0]}` beside its weight, "
            "expected the weight alone"
        )
    if kind.forward is not nn.Embedding.forward:
        _check_lookup(original, prefix)
    state: dict[str, Any] = {
        name: value for name, value in vars(original).items() if name not in vars(made)
    }
    vars(made).update(state)
    made._buffers.update(original._buffers)
    made._non_persistent_buffers_set |= original._non_persistent_buffers_set
    made.__class__ = type(kind.__name__, (kind, VocabParallelEmbedding), {})
    return made.train(original.training)


def _check_lookup(original: nn.Embedding, prefix: str) -> None:
    """Run an embedding of another class, and see that it asks `nn.Embedding` for its rows, once.

    Raises:
        ConfigError: It does not.
    """
    asked: list[Tensor] = []

    class Asked(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            asked.append(input)
            return torch.zeros(*input.shape, self.embedding_dim, device=input.device)

    probe: nn.Embedding = object.__new__(type("Probe", (type(original), Asked), {}))
    vars(probe).update(vars(original))
    tokens = torch.zeros(1, 1, dtype=torch.long)
    try:
        with torch.no_grad():
            probe(tokens)
    except Exception as error:  # whatever code of a model raises
        raise ConfigError(
            f"embedding `{prefix}` of class `{type(original).__name__}` cannot be run on one "
            f"token: {type(error).__name__}: {error}"
        ) from error
    if len(asked) != 1 or asked[0] is not tokens:
        raise ConfigError(
            f"embedding `{prefix}` of class `{type(original).__name__}` does not look its tokens "
            "up by `super().forward`, once, as they are"
        )


__all__ = ["embedding_like"]
