"""How the product of rounded inputs is launched: measured settings, else a rule.

Letters: M tokens, N output features, K input features.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch
import triton

from quantload.runtime.kernels.rounded_weight import PackedRounded
from quantload.runtime.launch_settings import Settings, find

__all__ = ["candidates", "family", "fits", "is_hopper", "rule", "settings_of", "suits_library"]

_GROUP = 128  # columns of a group in `rounded_hopper`
_FINE = 32  # and of one of which a step has four
_FUSED_TOKENS = 8
_LIBRARY_TOKENS = 64  # of blocks; of fewer it was never the fastest
_SHARED = 232448 - 1024  # bytes that a program may use on sm_90


@functools.cache
def _card(device: torch.device) -> tuple[int, int, bool]:
    """Return processors, bytes of shared memory a program may use, and if it is Hopper."""
    if device.type != "cuda":
        return 8, 1 << 20, False  # the interpreter; few processors, so that small tests split K
    properties = torch.cuda.get_device_properties(device)
    shared: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return properties.multi_processor_count, shared, properties.major == 9


def family(packed: PackedRounded) -> str:
    """Name under which measured settings are kept."""
    grid = "int8" if packed.codes.dtype == torch.int8 else "e4m3"
    return f"rounded {grid} g{packed.group}" if packed.group else f"rounded {grid}"


def settings_of(packed: PackedRounded, m: int) -> Settings:
    """Return the settings of a launch: measured ones, else the rule's.

    Those with `fused` are of a product that rounds its input, those with `library` of cuBLASLt;
    they do not serve every call.
    """
    (n, k), device = packed.codes.shape, packed.codes.device
    if not is_hopper(packed):
        return rule(packed, m)
    measured = find(family(packed), device, m=m, n=n, k=k)
    if measured is not None and fits(
        measured, m, group=packed.group, block_rows=packed.block_rows, shared=_card(device)[1]
    ):
        return measured
    if not packed.group and packed.codes.dtype != torch.int8:
        steps, splits = triton.cdiv(k, 256), _parts(_card(device)[0], triton.cdiv(n, 64), k)
        if m == 1 and triton.cdiv(steps, splits) * 256 <= 4096:
            return {"fused": 1, "bn": 64, "bk": 256, "stages": 4, "warps": 4, "splits": splits}
        if m >= 256 and triton.cdiv(n, 64) * triton.cdiv(m, 128) > _card(device)[0]:
            return {"library": 1}
    if packed.group and m >= 4 * _LIBRARY_TOKENS and suits_library(packed, m, torch.bfloat16):
        return {"library": 1}
    return rule(packed, m)


def rule(packed: PackedRounded, m: int) -> Settings:
    """Settings that nobody measured, of kernels that serve every call."""
    processors = _card(packed.codes.device)[0]
    if not is_hopper(packed):
        return _rule_general(packed, m, processors)
    make = _rule_rows
    if packed.group:
        make = _rule_fine if packed.group == _FINE else _rule_groups
    return make(packed, m, processors)


def is_hopper(packed: PackedRounded) -> bool:
    """True if `rounded_hopper` serves: sm_90, rows of whole 16 bytes, blocks of whole tiles."""
    are_blocks = packed.group == _GROUP and packed.block_rows % 64 == 0
    are_tiles = packed.group in (0, _FINE) or are_blocks
    return are_tiles and packed.codes.shape[1] % 16 == 0 and _card(packed.codes.device)[2]


def suits_library(packed: PackedRounded, m: int, dtype: torch.dtype) -> bool:
    """True if cuBLASLt, through torch, multiplies m tokens into results of a dtype.

    Of scales in blocks it serves those of 128 x 128, from CUDA 12.9 on, on sm_90 only.
    """
    n, k = packed.codes.shape
    if dtype != torch.bfloat16 or n % 16:
        return False
    if not packed.group:
        return True
    is_long = m >= (_LIBRARY_TOKENS if m % 4 == 0 else 4 * _LIBRARY_TOKENS)  # else it is copied
    is_aligned = n % 128 == 0 and k % 512 == 0 and is_long
    return is_aligned and packed.group == packed.block_rows == _GROUP and _library_has_blocks()


@functools.cache
def _library_has_blocks() -> bool:
    version = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    return version >= (12, 9)


def fits(found: Settings, m: int, *, group: int, block_rows: int, shared: int) -> bool:
    """True if measured settings serve; those of few tokens may be all that there is for many.

    Args:
        found: The settings.
        m: Tokens.
        group: As in `PackedRounded`.
        block_rows: As in `PackedRounded`.
        shared: Bytes of shared memory that a program may use.
    """
    if found.get("library"):
        return not group or m >= _LIBRARY_TOKENS
    if found.get("fused"):
        return not group and m <= _FUSED_TOKENS
    if group == _FINE and not found.get("swap"):
        return False
    if found.get("parts"):
        is_ring = found["stages"] >= 3 and (found["halves"] == 2 or found["stages"] % 2 == 0)
        return group == _GROUP and found["parts"] <= block_rows and is_ring
    if group == _GROUP and block_rows % found["bn"]:
        return False
    if found.get("wide"):
        return True
    if found["bm"] < 64 and not found["swap"]:
        return False  # the left side of a product is at least 64 rows
    is_for_many = found["bm"] >= 64 and found["splits"] == 1
    return (is_for_many or m <= max(256, 4 * found["bm"])) and _bytes(found) <= shared


def _bytes(s: Settings) -> int:
    """Shared memory of a program of `rounded_hopper`, and what it turns the result in."""
    ring = (s["bn"] + s["bm"]) * s["bk"] * s["stages"]
    return ring + (s["bn"] * s["bm"] * 2 if s["swap"] and s["bm"] >= 64 else 0) + 1024


# What was the best, or near it, on an H200 for shapes of 8B and 70B models. A ring of 128 KiB fills
# a processor, so that what is read again, and how full the last wave is, decide.


def _parts(processors: int, tiles: int, k: int) -> int:
    """Parts of K that give each processor a program, of two steps of 256 at least."""
    steps: int = triton.cdiv(k, 256)
    return max(1, min(round(processors / tiles), steps // 2))


def _tile(
    bn: int, bm: int, bk: int, stages: int, splits: int = 1, *, exact: int, swap: int = 1,
    warps: int = 4, band: int = 1,
) -> Settings:  # fmt: skip
    return {"bn": bn, "bm": bm, "bk": bk, "stages": stages, "warps": warps, "splits": splits,
            "swap": swap, "exact": exact, "band": band}  # fmt: skip


def _wide(bn: int, stages: int) -> Settings:
    return {"wide": 1, "bn": bn, "stages": stages, "band": 4, "registers": 208}


def _rule_rows(packed: PackedRounded, m: int, processors: int) -> Settings:
    """A scale a row and a token."""
    n, k = packed.codes.shape
    exact, tiles = int(packed.codes.dtype != torch.int8), triton.cdiv(n, 64)
    if m <= 16 and triton.cdiv(n, 128) >= processors:
        return _tile(128, max(8, triton.next_power_of_2(m)), 128, 6, exact=exact)
    if m <= 64:
        bm = max(8, triton.next_power_of_2(m))
        if m > 16 and 2 * tiles <= processors:  # W is read twice, but its sums are whole
            return _tile(64, bm // 2, 256, 4, exact=exact)
        return _tile(64, bm, 256, 4, _parts(processors, tiles, k), exact=exact)
    if m <= 128:
        if 2 * tiles <= processors:
            return _tile(64, 64, 256, 4, exact=exact)
        if 2 * triton.cdiv(n, 128) <= processors:
            return _tile(128, 64, 128, 6, exact=exact)
        return _tile(64, 128, 128, 4, exact=0, band=8)
    if tiles * triton.cdiv(m, 128) <= processors:
        return _wide(64, 8)
    if m >= 1024 and k >= 2 * n:
        return _wide(256, 4)
    waves = triton.cdiv(n, 128) * triton.cdiv(m, 256) / processors
    if m >= 1024 and waves / math.ceil(waves) > 0.85:
        return _tile(128, 256, 128, 3, exact=0, warps=8, band=8)
    return _tile(128, 128, 128, 4, exact=0, band=8)


def _rule_groups(packed: PackedRounded, m: int, processors: int) -> Settings:
    """Scales of groups of 128 columns."""
    n, k = packed.codes.shape
    tiles, wide = triton.cdiv(n, 64), packed.block_rows % 128 == 0
    if m <= 16:
        bm = max(8, triton.next_power_of_2(m))
        if wide and triton.cdiv(n, 128) >= processors:
            return _tile(128, bm, 128, 6, exact=1)
        parts = _parts(processors * (2 if m <= 8 else 1), tiles, k)
        return _tile(64, bm, 128, 8, parts, exact=1)
    if m <= 64:
        return _tile(64, 64, 128, 8, _parts(processors, tiles, k), exact=1, swap=0)
    if tiles * triton.cdiv(m, 64) <= processors:
        return _tile(64, 64, 128, 8, exact=1, swap=0)
    if m <= 128 and wide and triton.cdiv(n, 128) * 2 <= processors:
        return _tile(128, 64, 128, 6, exact=1, swap=0)
    if tiles * triton.cdiv(m, 128) <= processors or not wide:
        return _wide(64, 8)
    if m <= 128:
        return _wide(128, 6)
    return _tile(128, 128, 128, 4, exact=1, swap=0, warps=8, band=8)


def _rule_fine(packed: PackedRounded, m: int, processors: int) -> Settings:
    """Scales of groups of 32 columns: two programs a processor hide each other's waiting."""
    n, k = packed.codes.shape
    bm = min(64, max(8, triton.next_power_of_2(m)))
    tiles = triton.cdiv(n, 64) * triton.cdiv(m, bm)
    parts = max(1, min(2 * processors // tiles, triton.cdiv(k, 128) // 4))
    return _tile(64, bm, 128, 6 if bm <= 32 else 5, parts, exact=1, band=8 if m > bm else 1)


def _rule_general(packed: PackedRounded, m: int, processors: int) -> Settings:
    n, k = packed.codes.shape
    bk = packed.group or 128
    bm = min(max(16, triton.next_power_of_2(m)), 128 if m > 64 else 64)
    bn = 128 if m > 64 else 64
    programs = triton.cdiv(n, bn) * triton.cdiv(m, bm)
    splits = max(1, min(2 * processors // programs, triton.cdiv(k, bk) // 4, 16))
    warps = 8 if bn * bm > 64 * 128 else 4
    return {"bn": bn, "bm": bm, "bk": bk, "stages": 3, "warps": warps, "splits": splits}


def candidates(m: int, n: int, k: int, *, floats: bool, group: int) -> Iterator[Settings]:
    """Yield settings of a product worth measuring, for processors of an H100 or H200."""
    if group == _FINE:
        yield from _fine_candidates(m, n, k)
    if group not in (0, _GROUP):
        return
    if m <= _FUSED_TOKENS and not group:
        yield from _fused_candidates(m, n, k)
    if m <= 128:
        yield from _narrow_candidates(m, n, k, floats=floats, group=group)
    if m > 64:
        yield from _wide_candidates(m, floats=floats, group=group)
    elif floats and m > 16 and not group:
        yield {"library": 1}
    if group and 16 < m <= 512:
        yield from _parts_candidates(m, n, k)


def _fused_candidates(m: int, n: int, k: int) -> Iterator[Settings]:
    for bn, bk, stages in ((64, 256, 4), (64, 256, 6), (64, 128, 8), (128, 128, 6)):
        steps = triton.cdiv(k, bk)
        for splits in sorted(
            {max(1, min(round(132 * wave / triton.cdiv(n, bn)), steps // 2)) for wave in (1, 2, 4)}
        ):
            if triton.cdiv(steps, splits) * bk <= (4096 if m == 1 else 1024):  # registers
                yield {"fused": 1, "bn": bn, "bk": bk, "stages": stages, "warps": 4,
                       "splits": splits}  # fmt: skip


def _narrow_candidates(m: int, n: int, k: int, *, floats: bool, group: int) -> Iterator[Settings]:
    bm, exact = max(8, triton.next_power_of_2(m)), int(floats)
    tiles: tuple[tuple[int, int, int], ...] = (
        (64, 256, 4), (64, 256, 6), (64, 512, 2), (128, 256, 3), (128, 128, 6), (64, 128, 8),
        # two or three programs to a processor, and one of many rows
        (64, 256, 3), (64, 128, 6), (64, 128, 4), (128, 128, 4), (256, 128, 4),
    )  # fmt: skip
    if group:
        tiles = ((64, 128, 8), (64, 128, 6), (128, 128, 6), (128, 128, 4))
    for bn, bk, stages in tiles:
        # more tiles of fewer tokens read W again, from the L2 cache, but need no parts of K
        for swap, height in ((1, bm), (1, bm // 2), (0, 64)) if m > 32 else ((1, bm),):
            if not swap and not group:
                continue
            warps = 8 if bn > 128 else 4
            waves = (1, 2, 4) if m <= 32 else (1, 2)
            programs = triton.cdiv(n, bn) * triton.cdiv(m, height)
            steps = triton.cdiv(k, bk)
            for splits in sorted(
                {max(1, min(round(132 * wave / programs), steps // 2)) for wave in waves}
            ):
                found = {"bn": bn, "bm": height, "bk": bk, "stages": stages, "warps": warps,
                         "splits": splits, "swap": swap, "exact": exact, "band": 1}  # fmt: skip
                if _bytes(found) <= _SHARED and bn * height <= 64 * 32 * warps:
                    yield found


def _fine_candidates(m: int, n: int, k: int) -> Iterator[Settings]:
    most = max(8, triton.next_power_of_2(m))
    for bm in sorted({min(64, most), min(32, most)} if m <= 256 else {64}):
        for stages in (4, 6, 8):
            for share in (1, 2, 4):
                tiles = triton.cdiv(n, 64) * triton.cdiv(m, bm)
                splits = max(1, min(round(132 * share / tiles), triton.cdiv(k, 128) // 4))
                if share == 1 or splits > 1:
                    yield _tile(64, bm, 128, stages, splits, exact=1, band=8 if m > bm else 1)


def _parts_candidates(m: int, n: int, k: int) -> Iterator[Settings]:
    """Tiles of `rounded_parts` whose rounds of programs are all but full."""
    halves, steps = 1 if m <= 64 else 2, triton.cdiv(k, _GROUP)
    for rows in (32, 48, 64, 80, 96, 112, 128):
        tiles = triton.cdiv(n, rows) * triton.cdiv(m, 64 * halves)
        for splits in (1, 2, 3, 4):
            for together in (1, 2):
                rounds = tiles * splits / 132
                is_full = rounds / math.ceil(rounds) > 0.8 and (splits == 1 or rounds <= together)
                if not is_full or steps // splits < 4 or (together == 2 and rows > 64):
                    continue
                room = _SHARED // together - 2048 - (rows * 256 if halves == 1 else 0)
                stages = min(8, room // ((rows + 64 * halves) * _GROUP))
                stages -= stages % 2 if halves == 1 else 0  # see `rounded_parts`
                if stages >= 3:
                    yield {"parts": rows, "halves": halves, "stages": stages, "splits": splits,
                           "beside": together - 1}  # fmt: skip


def _wide_candidates(m: int, *, floats: bool, group: int) -> Iterator[Settings]:
    if floats:
        yield {"library": 1}
    for bn, stages in ((64, 8), (128, 6), (256, 4)):
        if group and bn > 128:
            continue
        for band in (4, 16):
            yield {"wide": 1, "bn": bn, "stages": stages, "band": band, "registers": 208}
        # steps of all tiles shared out evenly: no last round of tiles
        yield {"wide": 1, "bn": bn, "stages": stages, "band": 4, "registers": 208, "shared": 1}
    if group:
        yield _tile(128, 128, 128, 4, exact=1, swap=0, warps=8, band=8)
        return
    for bn, bm, warps, stages in (
        (128, 128, 4, 4), (128, 256, 8, 3), (64, 128, 4, 4), (256, 128, 8, 3), (128, 128, 8, 6),
    ):  # fmt: skip
        found = {"bn": bn, "bm": bm, "bk": 128, "stages": stages, "warps": warps,
                 "splits": 1, "swap": 1, "exact": 0, "band": 8}  # fmt: skip
        if bm <= m and _bytes(found) <= _SHARED:
            yield found
