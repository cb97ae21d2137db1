"""The end of a greedy step in one launch: the most likely token of each row, and the next position.

Grid: [splits of the vocabulary, rows]. Each program keeps the best (value, place) of its part as
one integer that is larger for a larger value, and for an earlier place among equals; the last
program of a row compares those. Values are ordered as torch.argmax orders them: NaN is the largest,
-0 equals 0, the first of equals wins. Bound by the launch: the logits are in the L2 cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantload.runtime.kernels.dependent_launch import LARGEST
from quantload.runtime.kernels.split_locks import prepare, split_locks

__all__ = ["next_token", "prepare"]

_BLOCK = 2048
_PROGRAMS = 1024  # for all rows together
_SMALLEST = tl.constexpr(-(1 << 63))


@triton.jit
def _next_token(
    logits,
    row_stride,
    vocabulary,
    tokens,
    positions,
    parts,
    locks,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    split, row = tl.program_id(0), tl.program_id(1)
    best = tl.full([BLOCK], _SMALLEST, tl.int64)
    for start in range(split * BLOCK, vocabulary, SPLITS * BLOCK):
        places = start + tl.arange(0, BLOCK)
        inside = places < vocabulary
        x = tl.load(logits + row.to(tl.int64) * row_stride + places, mask=inside, other=0.0)
        x = x.to(tl.float32)
        bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
        order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        order = tl.where(x != x, 0x7FFFFFFF, order)
        packed = (order.to(tl.int64) << 32) | (0x7FFFFFFF - places).to(tl.int64)
        best = tl.maximum(best, tl.where(inside, packed, _SMALLEST))
    tl.store(parts + row * SPLITS + split, tl.reduce(best, 0, LARGEST))
    tl.debug_barrier()
    before = tl.atomic_add(locks + row, 1, sem="acq_rel")
    if before == SPLITS - 1:
        found = tl.load(parts + row * SPLITS + tl.arange(0, SPLITS), cache_modifier=".cg")
        place = 0x7FFFFFFF - (tl.reduce(found, 0, LARGEST) & 0x7FFFFFFF)
        tl.store(tokens + row, place)
        tl.store(positions + row, tl.load(positions + row) + 1)
        tl.store(locks + row, 0)


@torch.library.custom_op("quantload::next_token", mutates_args=("tokens", "positions"))
def next_token(logits: Tensor, tokens: Tensor, positions: Tensor) -> None:
    """Write the most likely tokens of logits [B, V], and add 1 to the positions.

    Args:
        logits: [B, V] float; rows may lie apart.
        tokens: [B] int64, is written.
        positions: [B] int64, is written.
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, vocabulary = logits.shape
    most = max(1, _PROGRAMS // max(rows, 1))
    splits = min(triton.next_power_of_2(triton.cdiv(vocabulary, _BLOCK)), most, 128)
    splits = 1 << (splits.bit_length() - 1)
    parts = torch.empty(rows, splits, dtype=torch.int64, device=logits.device)
    _next_token[(splits, rows)](
        logits,
        logits.stride(0),
        vocabulary,
        tokens,
        positions,
        parts,
        split_locks(logits.device, rows),
        SPLITS=splits,
        BLOCK=_BLOCK,
        num_warps=8,
    )


@next_token.register_fake
def _(logits: Tensor, tokens: Tensor, positions: Tensor) -> None:
    return None
