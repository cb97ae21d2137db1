"""Which nibble kernel runs for a number of tokens, and in which tiles: measured, else by a rule."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from quantload.runtime import launch_settings

if TYPE_CHECKING:
    from quantload.runtime.kernels.nibble_weight import NibbleWeight

__all__ = [
    "Plan",
    "by_rule",
    "candidates",
    "card_of",
    "fitted",
    "kernel_name",
    "overlaps",
    "plan_for",
]

# tiles of "wide" (rows, tokens, stages, step): us that a round of them takes an H200, 4096 columns
_WIDE_INT = {(128, 256, 3, 32): 41.0, (128, 128, 2, 64): 21.2, (128, 64, 4, 64): 12.2}
_WIDE = {(128, 128, 5, 32): 23.5, (128, 64, 4, 64): 16.0}
_MOST_UNPACKED = 2048  # tokens; of more, unpacking once for cuBLAS takes less
_PROCESSORS = 132  # of the cards that settings are searched on; others search a bit beside
_Path = Literal["decode", "mid", "dense", "gemv", "parallel", "overlap", "wide"]
_PATHS: tuple[_Path, ...] = ("decode", "mid", "dense", "gemv", "parallel", "overlap", "wide")


@dataclass(frozen=True)
class Plan:
    """How a product is launched.

    Args:
        path: "decode", "mid", "dense", "gemv", "parallel", "overlap" or "wide".
        rows: Output features of a tile.
        tokens: Tokens of a tile.
        splits: Parts of K.
        stages: Steps of the loop whose loads are in flight.
        warps: Warps of a program.
        after: Scales meet sums instead of values.
        tma: "decode": words come by the copy engine.
        unroll: Blocks of one round of the loop; of "decode" as many as make 256 columns.
        step: "mid": columns of a slice in one step.
        swizzle: Tiles of rows that run beside each other.
        early: The kernel may start before the one before has ended (sm_90).
        prefetch: Blocks of words that are asked for before that one has ended.
        shared: "overlap": programs of a multiprocessor that share out the steps of all tiles
            evenly; 0 for a program a tile. "wide": 1 if the programs do so, 0 if they take one
            tile after another.
    """

    path: _Path
    rows: int = 64
    tokens: int = 16
    splits: int = 1
    stages: int = 3
    warps: int = 4
    after: bool = True
    tma: bool = False
    unroll: int = 1
    step: int = 32
    swizzle: int = 1
    early: bool = True
    prefetch: int = 0
    shared: int = 0

    @classmethod
    def from_settings(cls, settings: Mapping[str, int]) -> Plan:
        """Return the plan of an entry of a table; `path` is a place in a fixed list."""
        fields: dict[str, Any] = dict(settings)
        path = _PATHS[fields.pop("path", 0)]
        flags = {
            name: bool(fields.pop(name)) for name in ("after", "tma", "early") if name in fields
        }
        return cls(path=path, **fields, **flags)

    def settings(self) -> dict[str, int]:
        """Return the entry of a table: what differs from the defaults, and the path."""
        default = Plan(self.path)
        changed = {
            name: int(value)
            for name, value in vars(self).items()
            if name != "path" and value != getattr(default, name)
        }
        return {"path": _PATHS.index(self.path), **changed}


def kernel_name(weight: NibbleWeight) -> str:
    """Return the name under which launch settings of such weights are kept."""
    group = "channel" if weight.group >= weight.features else f"g{weight.group}"
    form = "int" if weight.form == "uint" else weight.form
    return f"nibble {form} {group}"


def plan_for(weight: NibbleWeight, tokens: int, device: torch.device) -> Plan:
    """Return how to multiply `tokens` tokens."""
    blocks, rows, columns = weight.words.shape
    settings = launch_settings.find(
        kernel_name(weight), device, m=tokens, n=rows, k=weight.features
    )
    card = card_of(device)
    if settings is not None:
        plan = Plan.from_settings(settings)
    else:
        plan = by_rule(tokens, (blocks, rows, columns), card)
        if plan.path == "mid" or (plan.path == "dense" and tokens <= _MOST_UNPACKED):
            plan = _of_many(plan, weight, tokens, card)
    if not _is_served(plan, weight):
        plan = by_rule(tokens, (blocks, rows, columns), card, plain=True)
    if plan.path == "mid":
        plan = _busy(plan, tokens, rows, blocks, card.processors)
    return fitted(plan, weight)


def overlaps(weight: NibbleWeight) -> bool:
    """True if the kernel in which unpacking and products overlap serves the weight."""
    if weight.is_folded:
        return True
    of_pairs = weight.group == 2 * weight.words.shape[2] and weight.group < weight.features
    is_served = weight.form in ("int", "zero") and weight.kind == "bf16"
    return is_served and of_pairs and weight.dtype == torch.bfloat16


def _of_many(plan: Plan, weight: NibbleWeight, tokens: int, card: Card) -> Plan:
    """Return the plan of hundreds of tokens for a weight: overlapping where tiles are enough."""
    wide = None
    if card.has_copy_engine and overlaps(weight):
        wide = _in_fewest_rounds(weight, tokens, card.processors)
    if wide is None and weight.is_folded and plan.path == "mid":
        return replace(plan, stages=4, step=32)  # scales take some of the shared memory
    return wide or plan


def _in_fewest_rounds(weight: NibbleWeight, tokens: int, processors: int) -> Plan | None:
    """Return the "wide" plan whose rounds of tiles take the least time.

    None where each would leave more than three of five processors without a tile.
    """
    times: dict[tuple[int, int, int, int], float] = {}
    for tile, us in (_WIDE_INT if weight.form == "int" else _WIDE).items():
        tiles = -(-weight.rows // tile[0]) * -(-tokens // tile[1])
        if 5 * tiles >= 2 * processors:
            times[tile] = us * -(-tiles // processors)
    if not times:
        return None
    rows, size, stages, step = min(times, key=times.__getitem__)
    return Plan("wide", rows=rows, tokens=size, stages=stages, step=step, swizzle=8)


def _busy(plan: Plan, tokens: int, rows: int, blocks: int, processors: int) -> Plan:
    """Double the parts of K while half of the processors would have nothing to do."""
    tiles = -(-rows // plan.rows) * -(-tokens // plan.tokens)
    splits = plan.splits
    while 2 * tiles * splits <= processors and 8 * splits <= blocks:
        splits *= 2
    return replace(plan, splits=splits)


def _is_served(plan: Plan, weight: NibbleWeight) -> bool:
    """True if the kernel of a plan reads weights of this kind, and inputs of this width."""
    if plan.path in ("decode", "dense"):
        return True
    if weight.is_folded and plan.path == "gemv":
        return False
    is_aligned = weight.columns is not None or weight.features % 8 == 0
    return weight.offset is None and (is_aligned or plan.path not in ("mid", "overlap", "wide"))


def fitted(plan: Plan, weight: NibbleWeight) -> Plan:
    """Return the plan with as many parts of K, and blocks of a round, as the weight has."""
    blocks, _, columns = weight.words.shape
    if plan.path != "decode":
        return replace(plan, splits=max(1, min(plan.splits, blocks)))
    unroll = max(plan.unroll, 64 // columns)
    while blocks % unroll:
        unroll //= 2
    return replace(plan, unroll=unroll, splits=max(1, min(plan.splits, blocks // unroll)))


@dataclass(frozen=True)
class Card:
    """What a rule asks of a card.

    Args:
        has_copy_engine: Compute capability 9.0 or more.
        processors: Multiprocessors.
        shared: Bytes of shared memory that a program may use.
    """

    has_copy_engine: bool = False
    processors: int = 132
    shared: int = 232448


def by_rule(tokens: int, words: tuple[int, int, int], card: Card, *, plain: bool = False) -> Plan:
    """Return a plan that was good on the shapes that were measured.

    Args:
        tokens: M.
        words: B, N and C of the words.
        card: Where it runs.
        plain: Only "decode" and "dense", which serve everything.
    """
    blocks, rows, columns = words
    elements = rows * blocks * 4 * columns
    if tokens >= (256 if elements <= 1 << 24 else 512):
        return Plan("dense")
    if tokens <= 16:
        small = elements <= 1 << 25 and not plain
        return _small(tokens, elements, columns) if small else _few(tokens, rows, blocks, card)
    if tokens > 64 and card.has_copy_engine and not plain:
        return Plan(
            "mid", rows=128, tokens=128, warps=8, stages=3, step=64, after=False, swizzle=8
        )  # fmt: skip
    return without_copy_engine(tokens, words, card)


def without_copy_engine(tokens: int, words: tuple[int, int, int], card: Card) -> Plan:
    """Return a plan of more than 16 tokens for any card and any place of the inputs."""
    blocks, rows, _ = words
    is_wide = tokens <= 32 and rows >= 128 * card.processors
    tile = 128 if is_wide else 64
    tiles = -(-rows // tile) * -(-tokens // 64)
    wanted = (3 if tokens <= 32 else 2) * card.processors // tiles
    splits = max(1, min(wanted, blocks // 2))
    stages = 3 if card.shared >= 150_000 else 2
    return Plan(
        "decode", rows=tile, tokens=32 if tokens <= 32 else 64, splits=splits,
        stages=stages, warps=8 if is_wide else 4, swizzle=8,
    )  # fmt: skip


def _small(tokens: int, elements: int, columns: int) -> Plan:
    """A few megabytes and up to 16 tokens: the warps of a program share out K."""
    if elements <= 1 << 24:  # the wider tile is no slower for one token
        rows, tokens, prefetch = 16, 16, 0
    else:
        rows, tokens, prefetch = (16, 8, 8) if tokens <= 8 else (32, 16, 0)
    return Plan(
        "parallel", rows=rows, tokens=tokens, unroll=256 // columns, warps=4, prefetch=prefetch
    )


def _few(tokens: int, rows: int, blocks: int, card: Card) -> Plan:
    """Up to 16 tokens: without parts of K where there are tiles enough."""
    tiles = -(-rows // 64)
    if tiles >= 3 * card.processors:
        if tokens <= 8:
            return Plan("decode", tokens=8, stages=5, warps=2, prefetch=4)
        return Plan("decode", tokens=16)
    if tokens <= 8:
        splits = max(1, min(blocks, 6 * card.processors // (2 * tiles)))
        return Plan("decode", rows=32, tokens=8, splits=splits, warps=2)
    splits = max(1, min(blocks, 4 * card.processors // tiles))
    return Plan("decode", tokens=16, splits=splits)


@functools.cache
def card_of(device: torch.device) -> Card:
    """Return what `device` offers; an H200 without its copy engine where there is no card."""
    if device.type != "cuda":
        return Card()
    found = torch.cuda.get_device_properties(device)
    shared = 232448 if found.major >= 9 else 166912 if found.minor == 0 else 101376
    return Card(found.major >= 9, found.multi_processor_count, shared)


def candidates(m: int, n: int, k: int) -> Iterator[dict[str, int]]:
    """Yield settings that are worth measuring."""
    for plan in _candidates(m, n, k):
        yield plan.settings()


def _candidates(m: int, n: int, k: int) -> Iterator[Plan]:
    if m <= 16:
        yield from _for_few(m, n, k)
    elif m <= 64:
        yield from _for_tens(m, n, k)
    else:
        yield from _for_many(m, n)
        yield Plan("dense")


def _for_few(m: int, n: int, k: int) -> Iterator[Plan]:
    """Up to 16 tokens; a round of 16 or 32 columns a slice has more blocks than one of 64."""
    if m == 1:
        for warps, unroll in ((2, 4), (4, 4), (2, 16)):
            yield Plan("gemv", rows=8, unroll=unroll, warps=warps)
    for tokens in (8, 16) if m <= 8 else (16,):
        for rows, warps, unroll in ((16, 4, 4), (32, 4, 4), (16, 8, 8), (32, 4, 8), (32, 4, 16)):
            for prefetch in (0, 8):
                yield Plan(
                    "parallel", rows=rows, tokens=tokens, unroll=unroll, warps=warps,
                    prefetch=prefetch,
                )  # fmt: skip
        if tokens == 16 and m <= 8:
            continue  # the wider tile only ever won with parts of K among the warps of a program
        for rows, warps, stages, tma in (
            (32, 2, 3, False), (32, 1, 3, True), (64, 2, 3, False), (64, 2, 5, False),
            (64, 4, 3, False), (64, 4, 5, False), (64, 4, 5, True), (128, 4, 3, True),
            (128, 4, 4, False), (128, 4, 5, True),
        ):  # fmt: skip
            for splits in _some_splits(-(-n // rows), k // 256, warps):
                yield Plan(
                    "decode", rows=rows, tokens=tokens, splits=splits, stages=stages, warps=warps,
                    tma=tma,
                )  # fmt: skip
                if splits == 1 and warps == 2:  # small programs, many of them
                    yield Plan(
                        "decode", rows=rows, tokens=tokens, stages=stages, warps=warps, prefetch=4
                    )  # fmt: skip


def _for_tens(m: int, n: int, k: int) -> Iterator[Plan]:
    """Up to 64 tokens; tiles of the copy engine hold 64 at least where they overlap."""
    tokens, most = 32 if m <= 32 else 64, k // 512
    for rows, warps, stages in ((64, 4, 3), (128, 8, 3), (64, 4, 4), (128, 4, 3), (128, 4, 4)):
        for splits in _some_splits(-(-n // rows), most, warps):
            yield Plan(
                "decode", rows=rows, tokens=tokens, splits=splits, stages=stages, warps=warps
            )
    for rows, stages, step in ((128, 4, 32), (64, 4, 32), (64, 3, 64)):
        for splits in _some_splits(-(-n // rows), most, 4):
            yield Plan(
                "mid", rows=rows, tokens=tokens, splits=splits, stages=stages, step=step,
                after=False,
            )  # fmt: skip
    # two programs of four warps to a processor, or one of eight; steps shared out or not
    for warps, stages, step in ((4, 4, 32), (8, 4, 32), (8, 3, 64)):
        for shared in (0, 1, 2) if warps == 4 else (0, 1):
            yield Plan(
                "overlap", rows=128, tokens=tokens, stages=stages, warps=warps, step=step,
                shared=shared,
            )  # fmt: skip
    for (rows, stages, step), shared in itertools.product(
        ((128, 4, 64), (128, 8, 32), (256, 3, 64), (256, 5, 32)), (0, 1)
    ):
        yield Plan("wide", rows=rows, tokens=tokens, stages=stages, step=step, shared=shared)


def _for_many(m: int, n: int) -> Iterator[Plan]:
    for rows, tokens, warps, stages, step in (
        (128, 128, 8, 3, 64), (128, 256, 8, 3, 32), (128, 64, 4, 4, 32), (64, 64, 4, 4, 64),
        (64, 128, 4, 4, 32),
    ):  # fmt: skip
        tiles = -(-n // rows) * -(-m // tokens)
        for splits in (1, 2) if tiles < _PROCESSORS else (1,):
            yield Plan(
                "mid", rows=rows, tokens=tokens, splits=splits, stages=stages, warps=warps,
                step=step, after=False, swizzle=8,
            )  # fmt: skip
    overlap = ((128, 2, 64), (128, 4, 32), (64, 4, 32), (64, 3, 64), (256, 2, 32), (256, 3, 32))
    for (tokens, stages, step), shared in itertools.product(overlap, (0, 1)):
        if tokens < 2 * m:
            yield Plan(
                "overlap", rows=128, tokens=tokens, stages=stages, warps=8, step=step, swizzle=8,
                shared=shared,
            )  # fmt: skip
    wide = (
        (256, 128, 4, 32), (256, 64, 3, 64), (128, 128, 2, 64), (128, 128, 5, 32),
        (128, 64, 4, 64), (128, 256, 3, 32),
    )  # fmt: skip
    for (rows, tokens, stages, step), shared in itertools.product(wide, (0, 1)):
        if tokens < 2 * m:
            yield Plan(
                "wide", rows=rows, tokens=tokens, stages=stages, step=step, swizzle=8,
                shared=shared,
            )  # fmt: skip


def _some_splits(tiles: int, most: int, warps: int) -> list[int]:
    """Parts of K that make 4 to 24 warps a multiprocessor of programs of `warps` warps."""
    wanted = (_PROCESSORS * each // (warps * tiles) for each in (4, 8, 12, 16, 24))
    return sorted({max(1, min(each, most)) for each in wanted})
