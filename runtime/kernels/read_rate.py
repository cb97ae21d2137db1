"""How fast a card reads its memory: the limit that decoding is held against.

Grid: one program for each 256 KiB of the buffer. Each sums its part, so that nothing can be left
out; bound by reads alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quantload.runtime.kernels.dependent_launch import SUM

_BLOCK = 4096  # int32 of one load
_LOADS = 16
_BYTES = 1 << 30
_TRIALS = 20


@triton.jit
def _sum_parts(data, out, BLOCK: tl.constexpr, LOADS: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK * LOADS
    offsets = tl.arange(0, BLOCK)
    total = tl.full([BLOCK], 0, tl.int32)
    for number in range(LOADS):
        total += tl.load(data + start + number * BLOCK + offsets)
    tl.store(out + tl.program_id(0), tl.reduce(total, 0, SUM))


def sum_parts(data: torch.Tensor) -> torch.Tensor:
    """Return the sums [programs] int32 of the parts of data [...] int32, whole parts only."""
    programs = data.numel() // (_BLOCK * _LOADS)
    out = torch.empty(programs, dtype=torch.int32, device=data.device)
    if programs:
        _sum_parts[(programs,)](data, out, BLOCK=_BLOCK, LOADS=_LOADS, num_warps=8)
    return out


def read_rate(device: torch.device) -> float:
    """Return the bytes a second of the best of some reads of 1 GiB."""
    data = torch.ones(_BYTES // 4, dtype=torch.int32, device=device)
    sum_parts(data)
    times: list[float] = []
    for _ in range(_TRIALS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        sum_parts(data)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return _BYTES / min(times)


__all__ = ["read_rate", "sum_parts"]
