"""How the GEMM with weights that are unpacked in registers is launched on sm_90, by a rule.

Letters: M tokens, N output features, K input features, C columns of a slice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

__all__ = ["Settings", "fits", "hopper_candidates", "hopper_rule"]

Settings = Mapping[str, int]


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
    m: int,
    n: int,
    k: int,
    *,
    columns: int,
    processors: int,
    shared: int,
    x_bytes: int,
    sums: int,
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
        sums: Sums of a step that a program holds besides the whole: 0, 1 or 2.
    """
    rows, tokens, warps = _tile(m, n, processors, sums)
    tiles, blocks = -(-n // rows) * -(-m // tokens), -(-k // (2 * columns))
    if tokens <= 32 or (tokens == 64 and x_bytes == 1):
        width = columns
    elif (rows, tokens, warps) == (128, 128, 4) and tiles > processors:
        width = min(columns, 32)  # so that two programs share a processor
    else:
        width = min(columns, 64)
    ring = 72_000 if tokens <= 32 else 100_000 if tokens == 64 or width <= 32 else 150_000
    stages = max(2, min(8, ring // _block_bytes(rows, tokens, width, x_bytes)))
    if sums == 2 and tokens == 128:
        stages = min(stages, 3)
    load = 2.5 if tokens <= 32 else 1.5 if tokens == 64 else 1
    splits = max(1, min(round(load * processors / tiles), blocks // 2, 16))
    names = ("rows", "tokens", "warps", "stages", "splits", "columns")
    found = dict(zip(names, (rows, tokens, warps, stages, splits, width), strict=True))
    while found["stages"] > 2 and not fits(found, columns, shared, x_bytes):
        found["stages"] -= 1
    return found


def _tile(m: int, n: int, processors: int, sums: int) -> tuple[int, int, int]:
    """Return rows of W, tokens and warps: small tiles where there are few, or where sums are many.

    More than 128 x 128 sums do not fit into the registers of four warps.
    """
    tokens = _tokens(m)
    if tokens <= 32:
        return 64, tokens, 4
    is_small = -(-n // 64) * -(-m // 64) <= 3 * processors
    if is_small or tokens == 64:
        return (64 if is_small or sums == 2 else 128), 64, 4
    if sums == 2:
        return 64, 128, 4
    if sums == 1:
        return 128, 128, 8
    return (64 if -(-n // 64) * -(-m // 128) <= processors else 128), 128, 4


def hopper_candidates(
    m: int, n: int, k: int, columns: int, x_bytes: int
) -> Iterator[dict[str, int]]:
    """Yield settings worth measuring on a card with 227 KiB of shared memory and 132 processors."""
    names = ("rows", "tokens", "warps", "stages", "splits", "columns")
    blocks, seen = -(-k // (2 * columns)), set()
    sizes = {_tokens(m), 64, 128} if m > 64 else {_tokens(m)}
    if m > 128:
        sizes.add(256)
    widths = {columns, min(columns, 64), 32} if m > 64 else {columns, min(columns, 64)}
    shapes = ((64, 4), (128, 4), (128, 8), (256, 8)) if m > 64 else ((64, 4), (128, 4))
    for tokens, (rows, warps), width in product(sorted(sizes), shapes, sorted(widths)):
        if rows * tokens > 128 * 32 * warps:  # sums that a thread holds: 128
            continue
        tiles = -(-n // rows) * -(-m // tokens)
        for stages, load in product((2, 3, 4, 6, 8), (1, 2, 3, 4, 6)):
            splits = max(1, min(blocks // 2, 16, round(132 * load / tiles)))
            key = (rows, tokens, warps, stages, splits, width)
            found = dict(zip(names, key, strict=True))
            if key not in seen and fits(found, columns, 232_448, x_bytes):
                seen.add(key)
                yield found
