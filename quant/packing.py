"""Bit packing of unsigned fields into 32-bit words, little endian.

Two layouts of b-bit fields along the last dimension:

    dense    element i takes bits i*b .. i*b + b - 1 of the row's bit string; ceil(K * b / 32) words
    padded   32 // b elements a word, from bit 0 up; for 3, 5, 6 and 7 bits the high bits are idle

They are the same for 2, 4 and 8 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantload.errors import ShapeError
from quantload.quant import compiled
from quantload.quant.chunks import row_chunks


def words_dense(columns: int, bits: int) -> int:
    """Words that a row of `columns` fields takes, packed densely."""
    return -(-columns * bits // 32)


def words_padded(columns: int, bits: int) -> int:
    """Words that a row of `columns` fields takes, whole fields in each word."""
    return -(-columns // (32 // bits))


def pack_dense(fields: Tensor, bits: int, *, signed: bool = False) -> Tensor:
    """Pack [N, K] fields of `bits` bits into [N, ceil(K * bits / 32)] int32; idle bits are 0.

    Args:
        fields: uint8 below 2^bits, or int8.
        bits: 1 to 8.
        signed: True if fields are -2^(bits-1) .. 2^(bits-1) - 1, in the bytes of int8; they are
            packed as offset binary, 2^(bits-1) more.
    """
    columns, offset = fields.shape[1], 1 << (bits - 1) if signed else 0
    padded = fields.contiguous().view(torch.uint8)
    if columns % 32:
        padded = torch.nn.functional.pad(padded, (0, -columns % 32), value=256 - offset & 0xFF)
    packed = compiled.pack_dense(padded, bits, signed=signed)
    if packed is None:
        packed = _packed_by_torch(padded + offset if offset else padded, bits)
    return packed.view(torch.int32)[:, : words_dense(columns, bits)].contiguous()


def _packed_by_torch(padded: Tensor, bits: int) -> Tensor:
    """[N, K] uint8, K a multiple of 32, to [N, K * bits / 8] uint8."""
    rows, columns = padded.shape
    if 8 % bits == 0:
        parts = torch.unflatten(padded, 1, (-1, 8 // bits))
        packed = parts[..., 0].clone()
        for i in range(1, 8 // bits):
            packed |= parts[..., i] << (bits * i)
        return packed
    packed = padded.new_empty(rows, columns // 8 * bits)
    for start, stop in row_chunks((rows, columns), padded.device):
        eights = _squeezed(padded[start:stop].view(torch.int64), bits)
        strings = torch.unflatten(eights.view(torch.uint8), 1, (-1, 8))[..., :bits]
        packed[start:stop] = strings.flatten(1)
    return packed


def unpack_dense(words: Tensor, bits: int, columns: int) -> Tensor:
    """Undo `pack_dense`: [N, W] int32 to [N, columns] uint8.

    Raises:
        ShapeError: W is not the number of words that `columns` fields take.
    """
    _check_words(words, words_dense(columns, bits), bits, columns)
    as_bytes = words.contiguous().view(torch.uint8)
    rows = words.shape[0]
    if 8 % bits == 0:
        mask = (1 << bits) - 1
        parts = [(as_bytes >> (bits * i)) & mask for i in range(8 // bits)]
        return torch.stack(parts, dim=-1).reshape(rows, -1)[:, :columns].contiguous()
    missing = -(-columns // 8) * bits - as_bytes.shape[1]  # to whole strings; may be negative
    fields = as_bytes.new_empty(rows, columns)
    for start, stop in row_chunks((rows, columns), words.device):
        strings = torch.nn.functional.pad(as_bytes[start:stop], (0, missing))
        eights = torch.nn.functional.pad(torch.unflatten(strings, 1, (-1, bits)), (0, 8 - bits))
        spread = _spread(eights.flatten(1).view(torch.int64), bits)
        fields[start:stop] = spread.view(torch.uint8)[:, :columns]
    return fields


def unpack_bytes(packed: Tensor, bits: int, columns: int) -> Tensor:
    """Undo `pack_dense` where the words are stored as bytes: [N, B] uint8 to [N, columns] uint8.

    Raises:
        ShapeError: B is not the number of bytes that `columns` fields take.
    """
    expected = -(-columns * bits // 8)
    if packed.shape[1] != expected:
        raise ShapeError(
            f"{packed.shape[1]} bytes a row do not hold {columns} fields of {bits} bits, "
            f"expected {expected}"
        )
    whole = torch.nn.functional.pad(packed, (0, -expected % 4)) if expected % 4 else packed
    return unpack_dense(whole.contiguous().view(torch.int32), bits, columns)


def unpack_padded(words: Tensor, bits: int, columns: int) -> Tensor:
    """Read [N, W] int32 words of 32 // bits fields each as [N, columns] uint8.

    Raises:
        ShapeError: W is not the number of words that `columns` fields take.
    """
    _check_words(words, words_padded(columns, bits), bits, columns)
    shifts = torch.arange(32 // bits, device=words.device, dtype=torch.int32) * bits
    parts = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return parts.reshape(words.shape[0], -1)[:, :columns].to(torch.uint8)


def _check_words(words: Tensor, expected: int, bits: int, columns: int) -> None:
    if words.shape[1] != expected:
        raise ShapeError(
            f"{words.shape[1]} words a row do not hold {columns} fields of {bits} bits, "
            f"expected {expected}"
        )


# Eight fields, one a byte of an int64, against the same eight as one string of 8 * bits bits.
# Neighbours meet pairwise: 8 lanes of one field, 4 of two, 2 of four, 1 of eight (and back).


def _squeezed(eights: Tensor, bits: int) -> Tensor:
    """[...] int64 of eight bytes below 2^bits to [...] int64, their string in the low bits."""
    for count in (1, 2, 4):
        even = _lanes(bits * count, 16 * count)
        odd = even << (bits * count)
        eights = (eights & even) | ((eights >> ((8 - bits) * count)) & odd)
    return eights


def _spread(strings: Tensor, bits: int) -> Tensor:
    """Undo `_squeezed`."""
    for count in (4, 2, 1):
        even = _lanes(bits * count, 16 * count)
        odd = even << (8 * count)
        strings = (strings & even) | ((strings << ((8 - bits) * count)) & odd)
    return strings


def _lanes(width: int, distance: int) -> int:
    """A 64-bit mask of `width` ones at every multiple of `distance`."""
    return sum(((1 << width) - 1) << shift for shift in range(0, 64, distance))
