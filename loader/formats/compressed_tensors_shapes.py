"""compressed-tensors: the shapes that scales and zero points must have, by scheme."""

from __future__ import annotations

from dataclasses import replace

import torch

from quantload.errors import FormatMismatch, listed
from quantload.loader.checkpoint import TensorEntry
from quantload.loader.formats.compressed_tensors_config import PACKED, Group
from quantload.quant.packing import words_dense, words_padded
from quantload.quant.scheme import Scheme, WeightScheme


def weight_of(scheme: Scheme) -> WeightScheme:
    """Return the weight scheme; config groups without one are left out when the config is read."""
    assert scheme.weight is not None, "config groups without weights are left out"
    return scheme.weight


def scheme_as_stored(
    scheme: Scheme, scale: tuple[int, ...], shape: tuple[int, int], module: str
) -> Scheme:
    """Return the scheme that a scale's shape shows.

    One scale a row may stand where the config says one a tensor.

    Raises:
        FormatMismatch: The shape does not fit the scheme.
    """
    weight = weight_of(scheme)
    expected = scale_shape(weight, shape)
    if scale in _spellings(expected):
        return scheme
    if weight.granularity == "tensor" and scale in _spellings((shape[0], 1)):
        return replace(scheme, weight=replace(weight, granularity="channel"))
    raise FormatMismatch(
        f"tensor `{module}.weight_scale` has shape `{scale}`, expected `{expected}` for a "
        f"weight of `{shape}` in scheme `{scheme}`"
    )


def scale_shape(weight: WeightScheme, shape: tuple[int, int]) -> tuple[int, int]:
    """(R, G): blocks of rows and groups of columns, partial ones included."""
    block = weight.block_of(*shape)
    return -(-shape[0] // max(1, block[0])), -(-shape[1] // max(1, block[1]))


def _spellings(shape: tuple[int, int]) -> set[tuple[int, ...]]:
    """Shapes in which scales [R, G] are stored; axes of one element may be left out."""
    allowed: set[tuple[int, ...]] = {shape}
    if shape[1] == 1:
        allowed.add((shape[0],))
    if shape == (1, 1):
        allowed.add(())
    return allowed


def check_zero_point(
    zero: TensorEntry | None, group: Group, scheme: Scheme, shape: tuple[int, int]
) -> None:
    """Check the shape of zero points, packed or not.

    Raises:
        FormatMismatch: It does not fit the scheme.
    """
    if zero is None:
        return
    weight = weight_of(scheme)
    blocks, groups = scale_shape(weight, shape)
    allowed = _spellings((blocks, groups))
    if group.format == PACKED and zero.dtype == torch.int32:
        bits = weight.grid.bits
        allowed = {(words_dense(blocks, bits), groups), (words_padded(blocks, bits), groups)}
    if zero.shape not in allowed:
        raise FormatMismatch(
            f"tensor `{zero.name}` has shape `{zero.shape}`, expected {listed(allowed)} for a "
            f"weight of `{shape}` in scheme `{scheme}`"
        )
