"""Which tensors of a checkpoint have no place in its model, and which parameters get none."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """Names that do not fit, in both directions.

    Args:
        unplaced: Tensors, as a checkpoint in full precision names them, without a place.
        unfilled: Parameters of the model for which there is no tensor.
        without_prefix: Tensors that lack the prefix of the base model, such as `model.`.
        origin: "model probe", or why it is not known.
    """

    unplaced: tuple[str, ...] = ()
    unfilled: tuple[str, ...] = ()
    without_prefix: tuple[str, ...] = ()
    origin: str = "model probe"


__all__ = ["Placement"]
