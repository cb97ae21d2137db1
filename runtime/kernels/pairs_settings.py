"""How the GEMM with weights that are unpacked in registers is launched on sm_90, by a rule.

Letters: M tokens, N output features, K input features, C columns of a slice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

__all__ = ["Settings", "fits", "hopper_candidates", "hopper_rule"]

Settings = Mapping[str, int]
_RING = 72_000  # bytes of a program's ring, so that three programs share a processor
_WIDE_RING = 150_000


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
    rows, tokens = _tile(m, n, processors)
    width = columns if tokens <= 32 else min(columns, 64)
    block = _block_bytes(rows, tokens, width, x_bytes)
    stages = max(2, min(8, (_RING if tokens <= 64 else _WIDE_RING) // block))
    tiles, blocks = -(-n // rows) * -(-m // tokens), -(-k // (2 * columns))
    wanted = round((2.5 if tokens <= 64 else 1) * processors / tiles)
    splits = max(1, min(wanted, blocks // 2, 16))
    names = ("rows", "tokens", "warps", "stages", "splits", "columns")
    return dict(zip(names, (rows, tokens, 4, stages, splits, width), strict=True))


def _tile(m: int, n: int, processors: int) -> tuple[int, int]:
    """Return rows of W and tokens of a tile: small ones where there are few."""
    tokens = _tokens(m)
    if tokens <= 32:
        return 64, tokens
    is_small = -(-n // 64) * -(-m // 64) <= 3 * processors
    if is_small or tokens == 64:
        return (64 if is_small else 128), 64
    return (64 if -(-n // 64) * -(-m // 128) <= processors else 128), 128


def hopper_candidates(
    m: int, n: int, k: int, columns: int, x_bytes: int
) -> Iterator[dict[str, int]]:
    """Yield settings worth measuring on a card with 227 KiB of shared memory and 132 processors."""
    names = ("rows", "tokens", "warps", "stages", "splits", "columns")
    blocks, seen = -(-k // (2 * columns)), set()
    sizes = {_tokens(m), 64, 128} if m > 64 else {_tokens(m)}
    widths = {columns, min(columns, 64), 32} if m > 64 else {columns, min(columns, 64)}
    shapes = ((64, 4), (128, 4), (128, 8)) if m > 64 else ((64, 4), (128, 4))
    for tokens, (rows, warps), width in product(sorted(sizes), shapes, sorted(widths)):
        tiles = -(-n // rows) * -(-m // tokens)
        for stages, load in product((2, 3, 4, 6, 8), (1, 2, 3, 4, 6)):
            splits = max(1, min(blocks // 2, 16, round(132 * load / tiles)))
            key = (rows, tokens, warps, stages, splits, width)
            found = dict(zip(names, key, strict=True))
            if key not in seen and fits(found, columns, 232_448, x_bytes):
                seen.add(key)
                yield found
