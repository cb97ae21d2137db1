"""Weights of unsigned integer fields, `(q - zero) * scale`: what GPTQ and AWQ have in common.

Fields and zero points become signed by taking 2^(bits - 1) from both: the difference, and so the
weight, is the same, and a symmetric weight has no zero point at all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantload.errors import FormatMismatch
from quantload.loader.formats.finite import refuse_nonfinite
from quantload.quant.grid import int_grid, uint_grid
from quantload.quant.scheme import Scheme, WeightScheme, scheme_of


def int_scheme(
    *,
    bits: int,
    group_size: int,
    columns: int,
    symmetric: bool,
    is_signed: bool = True,
    act_order: bool = False,
) -> Scheme:
    """Return the scheme of integer fields that share a scale by groups of columns.

    Args:
        bits: Bits of a field.
        group_size: Columns of a group; -1 for whole rows.
        columns: K. One group of them all is a channel scheme.
        symmetric: True if every zero point is 2^(bits - 1).
        is_signed: False if fields stay unsigned, with an offset instead of a zero point.
        act_order: True if columns find their group by number.
    """
    is_channel = group_size == -1 or group_size >= columns
    return scheme_of(
        WeightScheme(
            grid=int_grid(bits) if is_signed else uint_grid(bits),
            granularity="channel" if is_channel else "group",
            symmetric=symmetric,
            group_size=None if is_channel else group_size,
            act_order=act_order,
            zero="int" if is_signed else "offset",
        ),
        None,
    )


def group_count(group_size: int, columns: int) -> int:
    """Return how many groups the columns make; the last may be partial."""
    return 1 if group_size == -1 else -(-columns // group_size)


def signed(fields: Tensor, bits: int) -> Tensor:
    """Return u - 2^(bits - 1) of uint8 fields as int8; wraps to the right value for 8 bits."""
    return (fields - (1 << (bits - 1))).view(torch.int8)


def unsigned(codes: Tensor, bits: int) -> Tensor:
    """Undo `signed`: int8 codes to uint8 fields."""
    return (codes.view(torch.uint8) + (1 << (bits - 1))) & ((1 << bits) - 1)


def check_scales(scales: Tensor, codes: Tensor, name: str, checkpoint_name: str) -> None:
    """Refuse scales that cannot be a weight's.

    Args:
        scales: Float, any shape.
        codes: Signed codes of the weight; those of zeros may have scales of zero.
        name: Name of the tensor of scales.
        checkpoint_name: For messages.

    Raises:
        NonFiniteWeight: NaN or infinity among them.
        FormatMismatch: All are zero, and the codes are not.
    """
    refuse_nonfinite(scales, name, checkpoint_name)
    if not bool(scales.any()) and bool(codes.any()):
        raise FormatMismatch(
            f"tensor `{name}` is all zero, expected scales, in `{checkpoint_name}`",
            hint="the tool that wrote it left its scales out; quantize the model again",
        )
