"""How the GEMM with weights that are unpacked in registers is launched on sm_90, by a rule.

Letters: M tokens, N output features, K input features, C columns of a slice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

__all__ = ["Settings", "fits", "hopper_candidates", "hopper_rule"]

Settings = Mapping[str, int]
_RING = 72_000  # bytes of a program's ring, so that three programs share a processor


def _block_bytes(rows: int, tokens: int, columns: int, x_bytes: int) -> int:
    return columns * x_bytes * (rows + 2 * tokens)


def fits(settings: Settings, columns: int, shared: int, x_bytes: int) -> bool:
    """True if a program's ring fits into `shared` bytes; x has `x_bytes` bytes an element."""
    width = min(settings.get("columns", columns), columns)
    block = _block_bytes(settings["rows"], settings["tokens"], width, x_bytes)
    return settings["stages"] * (block + 8) + 1024 <= shared


def _tokens(m: int) -> int:
    return max(8, min(128, 1 << (m - 1).bit_length()))


def hopper_rule(
    m: int, n: int, k: int, columns: int, processors: int, shared: int, x_bytes: int
) -> dict[str, int]:
    """Return settings for shapes that were not measured.

    Args:
        m: Tokens.
        n: Output features.
        k: Input features.
        columns: C.
        processors: Of the device.
        shared: Bytes of shared memory that a program may use.
        x_bytes: Bytes of an element of x.
    """
    tokens = _tokens(m)
    rows, warps = (64, 4) if tokens <= 64 else (128, 8)
    block = _block_bytes(rows, tokens, columns, x_bytes)
    ring = _RING if tokens <= 64 else shared - 4096
    stages = max(2, min(8, ring // block))
    tiles, blocks = -(-n // rows) * -(-m // tokens), -(-k // (2 * columns))
    wanted = (3 if tokens <= 64 else 1) * processors // tiles
    splits = max(1, min(wanted, blocks // 4, 16))
    return {"rows": rows, "tokens": tokens, "warps": warps, "stages": stages, "splits": splits}


def hopper_candidates(
    m: int, n: int, k: int, columns: int, x_bytes: int
) -> Iterator[dict[str, int]]:
    """Yield settings worth measuring on a card with 227 KiB of shared memory and 132 processors."""
    names = ("rows", "tokens", "warps", "stages", "splits")
    blocks, seen = -(-k // (2 * columns)), set()
    wide = {_tokens(m), max(16, _tokens(m)), max(64, _tokens(m) // 2)} if m > 64 else {_tokens(m)}
    shapes = ((64, 4), (128, 4), (128, 8))
    for tokens, (rows, warps), stages, load in product(wide, shapes, (3, 4, 6, 8), (1, 2, 3, 4, 6)):
        tiles = -(-n // rows) * -(-m // tokens)
        splits = max(1, min(blocks // 2, 16, round(132 * load / tiles)))
        key = (rows, tokens, warps, stages, splits)
        found = dict(zip(names, key, strict=True))
        if key not in seen and fits(found, columns, 232_448, x_bytes):
            seen.add(key)
            yield found
