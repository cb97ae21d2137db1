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

__all__ = ["candidates", "family", "is_hopper", "rule", "settings_of"]

_HOPPER_GROUP = 128


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
    """Return the settings of a launch: measured ones, else the rule's."""
    (n, k), device = packed.codes.shape, packed.codes.device
    shared = _card(device)[1]
    if is_hopper(packed):
        measured = find(family(packed), device, m=m, n=n, k=k)
        if measured is not None and _fits(packed, measured, m, shared):
            return measured
    return rule(packed, m)


def rule(packed: PackedRounded, m: int) -> Settings:
    """Settings of a launch that nobody measured."""
    processors = _card(packed.codes.device)[0]
    make = _rule_hopper if is_hopper(packed) else _rule_general
    return make(packed, m, processors)


def is_hopper(packed: PackedRounded) -> bool:
    """True if `rounded_hopper` serves: sm_90, rows of whole 16 bytes, groups of 128."""
    aligned = packed.codes.shape[1] % 16 == 0
    return aligned and packed.group in (0, _HOPPER_GROUP) and _card(packed.codes.device)[2]


def _fits(packed: PackedRounded, found: Settings, m: int, shared: int) -> bool:
    if found.get("library"):
        return not packed.group
    return _bytes(found) <= shared and not (found["bm"] < 64 and not found["swap"])


def _bytes(s: Settings) -> int:
    """Shared memory of a program of `rounded_hopper`, and what it turns the result in."""
    ring = (s["bn"] + s["bm"]) * s["bk"] * s["stages"]
    return ring + (s["bn"] * s["bm"] * 2 if s["swap"] and s["bm"] >= 64 else 0) + 1024


def _rule_hopper(packed: PackedRounded, m: int, processors: int) -> Settings:
    """Small tiles and parts of K until every processor has two programs; then large tiles."""
    n, k = packed.codes.shape
    floats = packed.codes.dtype != torch.int8
    if m <= 64:
        bm = max(8, triton.next_power_of_2(m))
        steps, tiles = triton.cdiv(k, 128), triton.cdiv(n, 64)
        splits = max(1, min(2 * processors // tiles, steps // 4, 16))
        return {"bn": 64, "bm": bm, "bk": 128, "stages": 6, "warps": 4, "splits": splits,
                "swap": 1, "exact": int(floats), "band": 1}  # fmt: skip
    if packed.group:
        return {"bn": 128, "bm": 128, "bk": 128, "stages": 4, "warps": 8, "splits": 1,
                "swap": 0, "exact": 1, "band": 8}  # fmt: skip
    if triton.cdiv(n, 128) * triton.cdiv(m, 256) >= processors:
        return {"bn": 128, "bm": 256, "bk": 128, "stages": 3, "warps": 8, "splits": 1,
                "swap": 1, "exact": 0, "band": 8}  # fmt: skip
    return {"bn": 128, "bm": 128, "bk": 128, "stages": 4, "warps": 8, "splits": 1,
            "swap": 1, "exact": int(floats), "band": 8}  # fmt: skip


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
    """Yield settings of `rounded_hopper` worth measuring, for processors of an H100 or H200."""
    steps = triton.cdiv(k, 128)
    if m <= 128:
        bm = max(8, triton.next_power_of_2(m))
        for bn, bk, stages in (
            (64, 128, 4), (64, 128, 8), (64, 256, 4), (128, 128, 4), (128, 128, 6),
        ):  # fmt: skip
            if group and bk != group:
                continue
            splits = {
                max(1, min(round(132 * waves / triton.cdiv(n, bn)), steps // 2))
                for waves in (1, 2, 4)
            }
            for count in sorted(splits):
                yield {"bn": bn, "bm": bm, "bk": bk, "stages": stages, "warps": 4,
                       "splits": count, "swap": 1, "exact": int(floats), "band": 1}  # fmt: skip
        return
    if floats and not group:
        yield {"library": 1}
    for bn, bm, warps, stages, swap in (
        (128, 128, 8, 4, 1), (128, 128, 4, 4, 1), (128, 256, 8, 3, 1), (256, 128, 8, 3, 1),
        (128, 64, 4, 4, 1), (64, 128, 4, 4, 1), (128, 128, 8, 6, 0), (128, 128, 8, 4, 0),
        (128, 64, 4, 4, 0), (64, 128, 8, 4, 0), (256, 128, 8, 4, 0), (128, 256, 8, 4, 0),
    ):  # fmt: skip
        if group and (swap or bn * bm > 64 * 32 * warps):
            continue
        for splits in (1, 2) if m <= 256 else (1,):
            # three accumulators in registers, where sums are promoted
            can_promote = bn * bm <= 64 * 32 * warps
            for exact in (1,) if group else (0, 1) if floats and can_promote else (0,):
                yield {"bn": bn, "bm": bm, "bk": 128, "stages": stages, "warps": warps,
                       "splits": splits, "swap": swap, "exact": exact, "band": 8}  # fmt: skip
