"""Rows of a weight in chunks, so that the temporaries of a computation stay small."""

from __future__ import annotations

from collections.abc import Iterator

import torch

# Measured: below this, on a busy machine, threads wait for each other at the end of every operation
# for longer than the operation takes; above, temporaries leave the cache.
_ELEMENTS = 1 << 23


def row_chunks(
    shape: tuple[int, int], device: torch.device, *, multiple: int = 1
) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) over the rows of a tensor [N, K].

    On a CPU a chunk is a few rows; elsewhere, where launches cost more than memory, all of them.

    Args:
        shape: (N, K).
        device: Where the tensor is.
        multiple: Every chunk but the last has a multiple of this many rows.
    """
    rows, columns = shape
    step = rows
    if device.type == "cpu":
        step = max(1, _ELEMENTS // max(1, columns * multiple)) * multiple
    for start in range(0, rows, max(1, step)):
        yield start, min(rows, start + step)
