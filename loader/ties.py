"""What is told about input and output embeddings that are one parameter, or should be."""

from __future__ import annotations

import logging
from collections.abc import Set

from torch import Tensor, nn

_log = logging.getLogger("quantload")


def tell_untied(alias: str, owner: str, values: Tensor, owned: Tensor) -> None:
    """Warn of a tied parameter for which a checkpoint holds values of its own.

    Both are used, as transformers 5.24 does.

    Args:
        alias: Name of the parameter.
        owner: Name of the one that the config ties it to.
        values: The values of `alias`.
        owned: The values of `owner`, of the same shape.
    """
    _log.warning(
        "tied by the config to `%s`, but the checkpoint holds other values, which are used: %s, "
        "largest difference %.4g",
        owner,
        alias,
        float((values.float() - owned.float()).abs().max()),
    )


def hint_of_missing(model: nn.Module, names: Set[str]) -> str:
    """Say what may be wrong with a checkpoint that has no tensors for these parameters."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    paths = [path for path, module in model.named_modules() if module is head]
    if head is not None and names == {f"{path}.weight" for path in paths}:
        return (
            "`tie_word_embeddings` of the config is false, so that the output head needs a weight "
            "of its own; set it to true if the model shares that of the embedding"
        )
    return "a shard may be missing, or the names are those of another architecture"


__all__ = ["hint_of_missing", "tell_untied"]
