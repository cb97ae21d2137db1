"""Bit packing of unsigned fields into 32-bit words, little endian.

Two layouts of b-bit fields along the last dimension:

    dense    element i takes bits i*b .. i*b + b - 1 of the row's bit string; ceil(K * b / 32) words
    padded   32 // b elements a word, from bit 0 up; the high bits of a word are idle for 3, 5, 6, 7 bits

They are the same for 2, 4 and 8 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantload.errors import ShapeError


def words_dense(columns: int, bits: int) -> int:
    """Words that a row of `columns` fields takes, packed densely."""
    return -(-columns * bits // 32)


def words_padded(columns: int, bits: int) -> int:
    """Words that a row of `columns` fields takes, whole fields in each word."""
    return -(-columns // (32 // bits))


def pack_dense(fields: Tensor, bits: int) -> Tensor:
    """Pack [N, K] uint8 fields below 2^bits into [N, ceil(K * bits / 32)] int32."""
    rows, columns = fields.shape
    padded = _pad_columns(fields, 32)
    if 8 % bits == 0:
        each = 8 // bits
        parts = padded.reshape(rows, -1, each)
        packed = parts[..., 0].clone()
        for i in range(1, each):
            packed |= parts[..., i] << (bits * i)
    else:
        packed = _bytes_from_bits(_bits(padded, bits).reshape(rows, -1))
    return packed.contiguous().view(torch.int32)[:, : words_dense(columns, bits)].contiguous()


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
    flat = _bits(as_bytes, 8).reshape(rows, -1)[:, : columns * bits]
    return _fields_from_bits(flat.reshape(rows, columns, bits))


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


def _pad_columns(fields: Tensor, multiple: int) -> Tensor:
    missing = -fields.shape[1] % multiple
    return torch.nn.functional.pad(fields, (0, missing)) if missing else fields


def _bits(values: Tensor, count: int) -> Tensor:
    """[...] uint8 to [..., count] uint8 of its `count` low bits, lowest first."""
    shifts = torch.arange(count, device=values.device, dtype=torch.uint8)
    return (values.unsqueeze(-1) >> shifts) & 1


def _bytes_from_bits(bits: Tensor) -> Tensor:
    """[N, 8 * B] bits, lowest first, to [N, B] uint8."""
    return _fields_from_bits(bits.reshape(bits.shape[0], -1, 8))


def _fields_from_bits(bits: Tensor) -> Tensor:
    """[..., b] bits, lowest first, to [...] uint8."""
    shifts = torch.arange(bits.shape[-1], device=bits.device, dtype=torch.uint8)
    return (bits << shifts).sum(dim=-1, dtype=torch.uint8)
