"""Which rows and columns of a weight the elements of its stored tensors stand for.

Formats that store output features first, then input features, can be read in parts: rows of the
weight are rows of its tensors. Codes that are packed and scales of blocks allow only some cuts.

Letters: N output features, K input features.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from quantload.loader.checkpoint import TensorEntry
from quantload.loader.source import Block, SourceWeight
from quantload.quant.scheme import WeightScheme

WHOLE = Block(0, 0)


def stored_blocks(
    weight: SourceWeight,
    tensors: Mapping[str, TensorEntry],
    *,
    codes: str,
    scales: Collection[str],
    whole: Collection[str],
    packed_rows: Collection[str] = (),
    has_columns: bool = True,
) -> dict[str, Block] | None:
    """Return the block of the weight that an element of each of its tensors stands for.

    Args:
        weight: A quantized weight [N, K].
        tensors: Headers by tensor name.
        codes: Leaf of the codes: one an element, or packed along an axis.
        scales: Leaves of which an element belongs to a block of the scheme.
        whole: Leaves that every part of the weight needs all of.
        packed_rows: Leaves of fields of the grid that are packed along the rows, else as scales.
        has_columns: False if only whole rows can be decoded.

    Returns:
        {leaf: block}; None if the tensors are laid out in another way.
    """
    if weight.scheme is None or weight.scheme.weight is None:
        return None
    scheme = weight.scheme.weight
    found: dict[str, Block] = {}
    for leaf, name in weight.leaves.items():
        entry, block = tensors[name], None
        if leaf in whole:
            block = WHOLE
        elif leaf == codes:
            block = _of_codes(entry, weight.shape, scheme.grid.bits)
        elif leaf in scales:
            block = _of_scales(entry, weight.shape, scheme.block_of(*weight.shape))
        elif leaf in packed_rows:
            block = _of_fields(entry, weight.shape, scheme)
        if block is None:
            return None
        found[leaf] = block
    if codes not in found:
        return None
    if not has_columns or not found[codes].columns:
        return {leaf: Block(block.rows, 0) for leaf, block in found.items()}
    return found


def _of_codes(entry: TensorEntry, shape: tuple[int, int], bits: int) -> Block | None:
    if len(entry.shape) != 2:
        return None
    each = 8 * entry.dtype.itemsize
    sizes: list[int] = []
    for stored, length in zip(entry.shape, shape, strict=True):
        many = each // bits
        if stored == length:
            sizes.append(1)
        elif each % bits == 0 and stored == -(-length // many):
            sizes.append(many)
        else:
            sizes.append(0)  # fields lie across elements: only whole rows can be read
    if not sizes[0]:
        return None
    return Block(sizes[0], sizes[1])


def _of_scales(entry: TensorEntry, shape: tuple[int, int], block: tuple[int, int]) -> Block | None:
    if len(entry.shape) > 2:
        return None
    sizes = [0, 0]
    for axis, stored in enumerate(entry.shape):
        if stored == 1:
            continue  # one serves all
        if stored != -(-shape[axis] // block[axis]):
            return None
        sizes[axis] = block[axis]
    return Block(sizes[0], sizes[1])


def _of_fields(entry: TensorEntry, shape: tuple[int, int], scheme: WeightScheme) -> Block | None:
    each, block = 8 * entry.dtype.itemsize, scheme.block_of(*shape)
    many = each // scheme.grid.bits
    if each % scheme.grid.bits or block[0] != 1 or len(entry.shape) != 2:
        return None
    columns = _of_scales(replace(entry, shape=(shape[0], entry.shape[1])), shape, block)
    if entry.shape[0] != -(-shape[0] // many) or columns is None:
        return None
    return Block(many, columns[1])


__all__ = ["WHOLE", "Block", "stored_blocks"]
