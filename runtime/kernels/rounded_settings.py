"""How the product of rounded inputs is launched: measured settings, else a rule.

Letters: M tokens, N output features, K input features.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import triton

from quantload.runtime.kernels.rounded_weight import PackedRounded
from quantload.runtime.launch_settings import Settings, find

__all__ = ["candidates", "family", "fits", "is_hopper", "rule", "settings_of"]

_FUSED_TOKENS = 8
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

    Those with `fused` are of a product that rounds its input; it serves up to 8 tokens.
    """
    (n, k), device = packed.codes.shape, packed.codes.device
    shared = _card(device)[1]
    if is_hopper(packed):
        measured = find(family(packed), device, m=m, n=n, k=k)
        if measured is not None and fits(
            measured, m, group=packed.group, block_rows=packed.block_rows, shared=shared
        ):
            return measured
    return rule(packed, m)


def rule(packed: PackedRounded, m: int) -> Settings:
    """Settings of a launch that nobody measured."""
    processors = _card(packed.codes.device)[0]
    make = _rule_hopper if is_hopper(packed) else _rule_general
    return make(packed, m, processors)


def is_hopper(packed: PackedRounded) -> bool:
    """True if `rounded_hopper` serves: sm_90, and rows of whole 16 bytes."""
    return packed.codes.shape[1] % 16 == 0 and _card(packed.codes.device)[2]


def fits(found: Settings, m: int, *, group: int, block_rows: int, shared: int) -> bool:
    """True if measured settings serve; those of few tokens may be all that there is for many.

    Args:
        found: The settings.
        m: Tokens.
        group: As in `PackedRounded`.
        block_rows: As in `PackedRounded`.
        shared: Bytes of shared memory that a program may use.
    """
    if found.get("library") or found.get("fused"):
        return not group and (m <= _FUSED_TOKENS or not found.get("fused"))
    if found.get("wide"):
        return not group or block_rows % found["bn"] == 0
    if found["bm"] < 64 and not found["swap"]:
        return False  # the left side of a product is at least 64 rows
    is_for_many = found["bm"] >= 64 and found["splits"] == 1
    return (is_for_many or m <= max(256, 4 * found["bm"])) and _bytes(found) <= shared


def _bytes(s: Settings) -> int:
    """Shared memory of a program of `rounded_hopper`, and what it turns the result in."""
    ring = (s["bn"] + s["bm"]) * s["bk"] * s["stages"]
    return ring + (s["bn"] * s["bm"] * 2 if s["swap"] and s["bm"] >= 64 else 0) + 1024


def _rule_hopper(packed: PackedRounded, m: int, processors: int) -> Settings:
    """What was near the best on an H200 for the shapes of 8B and 70B models."""
    n, k = packed.codes.shape
    if m > 64:
        bn = 64 if triton.cdiv(n, 128) * triton.cdiv(m, 128) < processors else 128
        if packed.group and packed.block_rows % bn:
            return {"bn": 64, "bm": 64, "bk": packed.group, "stages": 1024 // packed.group,
                    "warps": 4, "splits": 1, "swap": 0, "exact": 1, "band": 8}  # fmt: skip
        stages = (8 if bn == 64 else 6) * 128 // (packed.group or 128)
        return {"wide": 1, "bn": bn, "stages": min(stages, 16), "band": 4, "registers": 208}
    bk, stages = (packed.group, min(16, 1024 // packed.group)) if packed.group else (256, 4)
    swap = int(m <= 32 or not packed.group)
    bm = max(8, triton.next_power_of_2(m)) if swap else 64
    # two programs for each processor, where their sums are small
    programs = processors * (2 if m <= 32 else 1)
    splits = max(1, min(round(programs / triton.cdiv(n, 64)), triton.cdiv(k, bk) // 2))
    return {"bn": 64, "bm": bm, "bk": bk, "stages": stages, "warps": 4, "splits": splits,
            "swap": swap, "exact": int(packed.codes.dtype != torch.int8), "band": 1}  # fmt: skip


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
    if m <= _FUSED_TOKENS and not group:
        yield from _fused_candidates(m, n, k)
    if m <= 128:
        yield from _narrow_candidates(m, n, k, floats=floats, group=group)
    if m > 64:
        yield from _wide_candidates(m, floats=floats, group=group)


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
    )  # fmt: skip
    if group:
        deep = 128 // group
        tiles = ((64, group, 8 * deep), (64, group, 12 * deep), (128, group, 6 * deep),
                 (128, group, 8 * deep))  # fmt: skip
    for bn, bk, stages in tiles:
        # more tiles of fewer tokens read W again, from the L2 cache, but need no parts of K
        for swap, height in ((1, bm), (1, bm // 2), (0, 64)) if m > 32 else ((1, bm),):
            if not swap and not group:
                continue
            waves = (1, 2, 4) if m <= 32 else (1, 2)
            programs = triton.cdiv(n, bn) * triton.cdiv(m, height)
            steps = triton.cdiv(k, bk)
            for splits in sorted(
                {max(1, min(round(132 * wave / programs), steps // 2)) for wave in waves}
            ):
                found = {"bn": bn, "bm": height, "bk": bk, "stages": stages, "warps": 4,
                         "splits": splits, "swap": swap, "exact": exact, "band": 1}  # fmt: skip
                if _bytes(found) <= _SHARED and bn * height <= 64 * 128:
                    yield found


def _wide_candidates(m: int, *, floats: bool, group: int) -> Iterator[Settings]:
    if floats and not group:
        yield {"library": 1}
    for bn, stages in ((64, 8), (128, 6), (256, 4)):
        if group and bn > 128:
            continue
        for band in (4, 16):
            yield {"wide": 1, "bn": bn, "stages": stages, "band": band, "registers": 208}
    if group:
        return
    for bn, bm, warps, stages in ((128, 128, 4, 4), (128, 256, 8, 3), (64, 128, 4, 4)):
        if bm <= m:
            yield {"bn": bn, "bm": bm, "bk": 128, "stages": stages, "warps": warps,
                   "splits": 1, "swap": 1, "exact": 0, "band": 8}  # fmt: skip
