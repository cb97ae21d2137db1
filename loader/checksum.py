"""A checksum that does not depend on how its bytes were cut into pieces.

The sum, modulo 2^64, of the little-endian 64-bit words of a file, a word being eight bytes from a
multiple of eight on. Bytes of other writers count as zeros. It finds what a power failure does:
blocks that were never written. It is no defence against intent.
"""

from __future__ import annotations

import numpy as np

WORD = (1 << 64) - 1  # sums are kept modulo 2^64


def sum_of_words(data: memoryview, position: int) -> int:
    """Return the checksum of some bytes of a file.

    Args:
        data: Bytes.
        position: Of the first of them in the file.
    """
    lead = min(-position % 8, len(data))
    whole = (len(data) - lead) // 8 * 8
    total = _partial(data[:lead], position % 8) + _partial(data[lead + whole :], 0)
    if whole:
        words = np.frombuffer(data, dtype="<u8", count=whole // 8, offset=lead)
        total += int(np.add.reduce(words, dtype=np.uint64))
    return total & WORD


def _partial(data: memoryview, place: int) -> int:
    """Return the part of a word that a few bytes make from byte `place` on."""
    return int.from_bytes(data, "little") << (8 * place)
