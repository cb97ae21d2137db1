"""How codes of up to four bits lie in memory for our GEMM kernels, and how they become values.

Four codes share an int16 word, and each comes from another slice of columns:

    word[b, n, i] = c(0) | c(1) << 4 | c(2) << 8 | c(3) << 12,   c(j) = code[n, (4 b + j) C + i]

so a tile [BN, C] of words is loaded once, straight into the registers that a tensor core takes its
left operand from, and unpacks there into four tiles [BN, C] of values (`nibble_values`), one for
each slice of C columns of the input. Nothing moves between threads.

Letters: N output features, K input features, C columns of a slice (16 to 128, a power of two),
B blocks of 4 C columns (B * 4 * C >= K).
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantload.runtime.kernels.nibble_values import (
    INTERPRETED,
    table_registers,
    unpack4,
)

__all__ = [
    "INTERPRETED",
    "SLICE_COLUMNS",
    "lookup_table",
    "pack_nibbles",
    "table_registers",
    "unpack4",
    "unpack_nibbles",
]

SLICE_COLUMNS = 64


def pack_nibbles(codes: Tensor, *, columns: int = SLICE_COLUMNS, fill: int = 0) -> Tensor:
    """Lay codes out in words of four slices.

    Args:
        codes: [..., N, K] uint8, 0 to 15.
        columns: C, columns of a slice.
        fill: Code of the columns that are added where 4 C does not divide K.

    Returns:
        [..., B, N, C] int16, contiguous, on the device of `codes`.
    """
    assert codes.dtype == torch.uint8, f"codes of {codes.dtype}, expected uint8"
    missing = -codes.shape[-1] % (4 * columns)
    if missing:
        codes = torch.nn.functional.pad(codes, (0, missing), value=fill)
    parts: Tensor = codes.unflatten(-1, (-1, 4, columns)).movedim(-3, -4)  # [..., B, N, 4, C]
    words: Tensor = parts[..., 0, :].to(torch.int16)
    for slot in (1, 2, 3):
        words |= parts[..., slot, :].to(torch.int16) << 4 * slot
    return words.contiguous()


def unpack_nibbles(words: Tensor, features: int) -> Tensor:
    """Undo `pack_nibbles`.

    Args:
        words: [..., B, N, C] int16.
        features: K.

    Returns:
        [..., N, K] uint8.
    """
    slots = [((words >> 4 * slot) & 15).to(torch.uint8) for slot in range(4)]
    codes = torch.stack(slots, dim=-2).movedim(-4, -3)  # [..., N, B, 4, C]
    return codes.flatten(-3)[..., :features].contiguous()


def lookup_table(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a table of 16 values as the form "table" of `unpack4` reads it.

    Args:
        values: [16] float, the value of each code.
        dtype: float16 or bfloat16, which the values are rounded to.

    Returns:
        [24] int32: high bytes of the 16 values, low bytes, then all of them as float32 bits.
    """
    rounded = values.to(dtype)
    in_bytes = rounded.contiguous().view(torch.uint8).view(16, 2)
    split = torch.cat([in_bytes[:, 1], in_bytes[:, 0]]).contiguous().view(torch.int32)
    return torch.cat([split, rounded.float().contiguous().view(torch.int32)])
