"""The product of rounded tokens with blocks of 128 columns on sm_90, in tiles that fill the card.

    y = sum over groups g of (x_g @ W_g^T) * x_scale[m, g] * w_scale[n, g]

What `rounded_wide` does with a scale a group, for fewer tokens and with tiles of 16, 32, 48, ..
rows of W: 6144 rows are 128 tiles of 48, one for nearly each of 132 processors, where tiles of 64
leave a quarter idle. A tile that is no power of two is multiplied in parts that are (48 = 32 + 16),
each with a ring and sums of its own; a tile may lie in two blocks of rows.

One warp fetches; two groups of four multiply. They have 64 tokens each; or (TURNS, of up to 64
tokens) they take steps of K in turns and add their sums at the end. So while one promotes its
products, the other multiplies. Tiles of W are asked for before the kernel ahead has ended. K is cut
among programs where SPLIT; the last of a tile adds the parts in order: equal inputs, equal bits.

Error: as `rounded`. Grid: programs, which take one item (a part of K of a tile) after another.
Masked: rows past M and N; TMA fills with zeros past M, N and K. Limit: memory up to 128 tokens,
then what comes from the L2 cache.

Letters: M tokens, N output features, K input features, BN rows of a tile of W.
"""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quantload.runtime.kernels.rounded_hopper import layout_of_tile
from quantload.runtime.kernels.rounded_parts_sums import finish, promoted, sum_of_splits
from quantload.runtime.kernels.rounded_scratch import scratch
from quantload.runtime.kernels.rounded_weight import PackedRounded
from quantload.runtime.launch_settings import Settings

__all__ = ["launch_parts", "parts_of", "ring_bytes", "rounded_gemm_parts"]

_HALF = 64  # tokens of a group of warps
_BK = 128
_BESIDE = 80  # registers of a thread at the start, where two programs share a processor


@gluon.jit
def _item(item, tiles_m, steps, splits, BM: gl.constexpr, BN: gl.constexpr):
    """First row of W and of x of an item, its first step, and the one behind its last."""
    tile = item // splits
    split = item % splits
    first, stop = split * steps // splits, (split + 1) * steps // splits
    return tile // tiles_m * BN, tile % tiles_m * BM, first, stop


@gluon.jit
def _ask_w(descs, rings, bar, place, n, step):
    """Ask for the parts of a tile of W."""
    row = n
    for part in gl.static_range(len(rings)):
        at = [row, step * descs[part].block_type.shape[1]]
        tma.async_copy_global_to_shared(descs[part], at, bar, rings[part].index(place))
        row += descs[part].block_type.shape[0]


@gluon.jit
def _ask_x(x_desc, x_ring, bar, place, m, step, HALVES: gl.constexpr):
    """Ask for the halves of a tile of x."""
    ROWS: gl.constexpr = x_desc.block_type.shape[0]
    for half in gl.static_range(HALVES):
        at = [m + half * ROWS, step * x_desc.block_type.shape[1]]
        tma.async_copy_global_to_shared(x_desc, at, bar, x_ring.index(HALVES * place + half))


@gluon.jit
def _fetch(
    descs, x_desc, rings, x_ring, ready, free,
    M, N, steps, splits, items, BN: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Bring the tiles of all steps of a program's items."""
    BM: gl.constexpr = HALVES * x_desc.block_type.shape[0]
    SIZE: gl.constexpr = (BN + BM) * x_desc.block_type.shape[1]
    tiles_m = gl.cdiv(M, BM)
    start = gl.program_id(0)
    n, m, first, stop = _item(start, tiles_m, steps, splits, BM, BN)
    lead = gl.minimum(stop - first, STAGES)
    for place in range(lead):  # W does not depend on the kernel ahead
        mbarrier.expect(ready.index(place), SIZE)
        _ask_w(descs, rings, ready.index(place), place, n, first + place)
    gdc_wait()
    for place in range(lead):
        _ask_x(x_desc, x_ring, ready.index(place), place, m, first + place, HALVES)
    done = lead
    for item in range(start, items, gl.num_programs(0)):
        n, m, first, stop = _item(item, tiles_m, steps, splits, BM, BN)
        # NOTE: not a count that the loop sets to zero: Triton 3.6 keeps its first value
        skipped = gl.where(item == start, lead, 0)
        for step in range(first + skipped, stop):
            place = done % STAGES
            bar = ready.index(place)
            mbarrier.wait(free.index(place), ((done // STAGES) & 1) ^ 1)
            mbarrier.expect(bar, SIZE)
            _ask_w(descs, rings, bar, place, n, step)
            _ask_x(x_desc, x_ring, bar, place, m, step, HALVES)
            done += 1


@gluon.jit
def _nothing(rings, COLUMNS: gl.constexpr, TILES: gl.constexpr):
    """Zeros for each part of a tile."""
    found = ()
    for part in gl.static_range(len(rings)):
        zeros = gl.zeros([64, COLUMNS[part]], gl.float32, layout=TILES[part])
        found = found + (zeros,)  # type: ignore[assignment]  # noqa: RUF005
    return found


@gluon.jit
def _products(x, rings, place, nothing):
    """Start the products of a step, one for each part."""
    found = ()
    for part in gl.static_range(len(rings)):
        w = rings[part].index(place).permute((1, 0))
        one = warpgroup_mma(x, w, nothing[part], use_acc=False, is_async=True)
        found = found + (one,)  # type: ignore[assignment]  # noqa: RUF005
    return found


@gluon.jit
def _waited(found):
    if len(found) == 3:
        a, b, c = warpgroup_mma_wait(0, deps=[found[0], found[1], found[2]])
        return (a, b, c)
    elif len(found) == 2:
        a, b = warpgroup_mma_wait(0, deps=[found[0], found[1]])
        return (a, b)
    else:
        return (warpgroup_mma_wait(0, deps=[found[0]]),)


@gluon.jit
def _multiply(
    INDEX: gl.constexpr, w_scale, x_scale, bias, out, partial, locks,
    rings, x_ring, ready, free, meeting, met,
    M, N, steps, splits, items, groups, block_rows, blocks,
    BN: gl.constexpr, COLUMNS: gl.constexpr, TILES: gl.constexpr, HALVES: gl.constexpr,
    STAGES: gl.constexpr, STRADDLES: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Multiply one half of the tokens of each item, or every other step of it."""
    HALF: gl.constexpr = x_ring.shape[1]
    TURNS: gl.constexpr = HALVES == 1
    STRIDE: gl.constexpr = 2 if TURNS else 1
    own: gl.constexpr = INDEX if TURNS else 0
    half: gl.constexpr = 0 if TURNS else INDEX
    nothing = _nothing(rings, COLUMNS, TILES)
    tiles_m = gl.cdiv(M, HALVES * HALF)
    gdc_wait()
    done = 0
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        n_start, m_start, first, stop = _item(item, tiles_m, steps, splits, HALVES * HALF, BN)
        m = m_start + half * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, TILES[0]))
        row = n_start // block_rows
        edge = (row + 1) * block_rows
        x_scales = x_scale + m * groups
        low_scales = w_scale + row * groups
        high_scales = w_scale + gl.minimum(row + 1, blocks - 1) * groups
        # each place of the ring is one group's, over all items: STAGES is even
        begin = first + (done + own) % STRIDE
        early = gl.minimum(begin, steps - 1)
        x_part = gl.load(x_scales + early, mask=m < M, other=0.0)
        w_low = gl.load(low_scales + early)
        w_high = gl.load(high_scales + early) if STRADDLES else w_low
        totals = nothing
        for step in range(begin, stop, STRIDE):
            at = done + (step - first)
            place = at % STAGES
            mbarrier.wait(ready.index(place), (at // STAGES) & 1)
            found = _products(x_ring.index(HALVES * place + half), rings, place, nothing)
            ahead = gl.minimum(step + STRIDE, steps - 1)
            x_next = gl.load(x_scales + ahead, mask=m < M, other=0.0)
            low_next = gl.load(low_scales + ahead)
            high_next = gl.load(high_scales + ahead) if STRADDLES else low_next
            found = _waited(found)
            mbarrier.arrive(free.index(place), count=1)
            totals = promoted(
                totals, found, x_part, w_low, w_high, n_start, edge, COLUMNS, TILES, STRADDLES
            )
            x_part, w_low, w_high = x_next, low_next, high_next
        done += stop - first
        if TURNS:
            # the second group's sums join those of the first, through shared memory
            if INDEX == 1:
                mbarrier.wait(met.index(1), (turn & 1) ^ 1)
                for part in gl.static_range(len(totals)):
                    meeting[part].store(totals[part])
                gl.thread_barrier()
                mbarrier.arrive(met.index(0), count=1)
            else:
                mbarrier.wait(met.index(0), turn & 1)
                sums = ()
                for part in gl.static_range(len(totals)):
                    more = meeting[part].load(TILES[part])
                    sums = sums + (totals[part] + more,)  # type: ignore[assignment]  # noqa: RUF005
                gl.thread_barrier()
                mbarrier.arrive(met.index(1), count=1)
                totals = sums
            turn += 1
        if INDEX == 0 or not TURNS:
            if SPLIT:
                place_of = item // splits * HALVES + half
                totals, is_last = sum_of_splits(
                    totals, partial, locks + place_of, place_of, item % splits, splits, BN,
                    COLUMNS, TILES,
                )  # fmt: skip
                if is_last:
                    finish(totals, bias, out, m, n_start, M, N, COLUMNS, TILES)
            else:
                finish(totals, bias, out, m, n_start, M, N, COLUMNS, TILES)


@gluon.jit(do_not_specialize=["M", "steps", "splits", "items", "groups", "block_rows", "blocks"])
def rounded_gemm_parts(
    w0_desc, w1_desc, w2_desc, x_desc, w_scale, x_scale, bias, out, partial, locks,
    M, N, steps, splits, items, groups, block_rows, blocks,
    HALVES: gl.constexpr, STAGES: gl.constexpr, STRADDLES: gl.constexpr, SPLIT: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Multiply; see the top of this file.

    Args:
        w0_desc: [rows, 128] of W's codes, the first part of a tile.
        w1_desc: The second part, or None.
        w2_desc: The third part, or None.
        x_desc: [64, 128] of x's codes.
        w_scale: [blocks, groups].
        x_scale: [M, groups].
        bias: [N] or None.
        out: [M, N].
        partial: [tiles * HALVES, splits, 64 * BN] sums, with SPLIT.
        locks: [tiles * HALVES] counters, with SPLIT.
        M: Tokens.
        N: Output features.
        steps: ceil(K / 128).
        splits: Parts of K, at most `steps`.
        items: Tiles times splits.
        groups: Groups of columns.
        block_rows: Rows that share a scale; BN at least.
        blocks: Blocks of rows.
        HALVES: 64 tokens each of a tile; with 1 groups of warps take turns.
        STAGES: Places of the ring, 3 at least; even where groups take turns, so that a place is
            always the same group's: who waits tells two rounds of a place apart, but not three.
        STRADDLES: A tile may lie in two blocks of rows.
        SPLIT: splits > 1.
        REGISTERS: Of a thread of the second group.
    """
    HALF: gl.constexpr = x_desc.block_type.shape[0]
    BK: gl.constexpr = x_desc.block_type.shape[1]
    P0: gl.constexpr = w0_desc.block_type.shape[0]
    P1: gl.constexpr = 0 if w1_desc is None else w1_desc.block_type.shape[0]
    P2: gl.constexpr = 0 if w2_desc is None else w2_desc.block_type.shape[0]
    BN: gl.constexpr = P0 + P1 + P2
    COLUMNS: gl.constexpr = (P0, P1, P2)
    TILES: gl.constexpr = (_layout(P0), _layout(P1), _layout(P2))
    TURNS: gl.constexpr = HALVES == 1
    dtype: gl.constexpr = x_desc.dtype
    x_ring = gl.allocate_shared_memory(dtype, [HALVES * STAGES, HALF, BK], x_desc.layout)
    descs = (w0_desc,)
    if P1:
        descs = descs + (w1_desc,)  # type: ignore[assignment]  # noqa: RUF005
    if P2:
        descs = descs + (w2_desc,)  # type: ignore[assignment]  # noqa: RUF005
    rings = ()
    for part in gl.static_range(len(descs)):
        ring = gl.allocate_shared_memory(dtype, [STAGES, COLUMNS[part], BK], descs[part].layout)
        rings = rings + (ring,)  # type: ignore[assignment]  # noqa: RUF005
    meeting = ()
    if TURNS:
        PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        for part in gl.static_range(len(descs)):
            room = gl.allocate_shared_memory(gl.float32, [HALF, COLUMNS[part]], PLAIN)
            meeting = meeting + (room,)  # type: ignore[assignment]  # noqa: RUF005
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    met = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(free.index(slot), count=1 if TURNS else 2)
    for slot in gl.static_range(2):
        mbarrier.init(met.index(slot), count=1)
    gdc_launch_dependents()
    gl.warp_specialize(
        [
            (_multiply, (
                0, w_scale, x_scale, bias, out, partial, locks,
                rings, x_ring, ready, free, meeting, met,
                M, N, steps, splits, items, groups, block_rows, blocks,
                BN, COLUMNS, TILES, HALVES, STAGES, STRADDLES, SPLIT,
            )),
            (_multiply, (
                1, w_scale, x_scale, bias, out, partial, locks,
                rings, x_ring, ready, free, meeting, met,
                M, N, steps, splits, items, groups, block_rows, blocks,
                BN, COLUMNS, TILES, HALVES, STAGES, STRADDLES, SPLIT,
            )),
            (_fetch, (
                descs, x_desc, rings, x_ring, ready, free,
                M, N, steps, splits, items, BN, HALVES, STAGES,
            )),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


@gluon.constexpr_function
def _layout(columns):
    """How sums of a part lie in registers."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, max(columns, 8), 32]
    )


@functools.cache
def parts_of(rows: int) -> tuple[int, ...]:
    """Powers of two, the largest first, that a tile of up to 128 rows of W is multiplied in."""
    return tuple(1 << bit for bit in range(7, 3, -1) if rows >> bit & 1)


def ring_bytes(s: Settings) -> int:
    """Shared memory of a program."""
    meeting = 0 if s["halves"] == 2 else s["parts"] * _HALF * 4
    return (s["parts"] + s["halves"] * _HALF) * _BK * s["stages"] + meeting + 1024


def _descriptor(codes: Tensor, rows: int) -> TensorDescriptor:
    """Describe how the copy engine reads tiles of `rows` x 128 codes."""
    layout = layout_of_tile(rows, _BK, False)
    return TensorDescriptor(codes, list(codes.shape), [codes.shape[1], 1], [rows, _BK], layout)


def launch_parts(
    codes: Tensor, scales: Tensor, packed: PackedRounded, bias: Tensor | None, out: Tensor,
    s: Settings,
) -> None:  # fmt: skip
    """Multiply with the given settings into out [M, N]; see `PackedRounded` and `rounded`.

    Args:
        codes: [M, K] e4m3.
        scales: [M, G] float32.
        packed: W, with groups of 128 columns.
        bias: [N] or None.
        out: [M, N].
        s: `parts` rows of W in a tile, `halves` of 64 tokens in it, `stages` of the ring, `splits`
            of K, and `beside`: 1 where two programs are to share a processor.
    """
    (m, k), n, bn = codes.shape, out.shape[1], s["parts"]
    steps, sizes, halves = triton.cdiv(k, _BK), parts_of(s["parts"]), s["halves"]
    splits, tiles = min(s["splits"], steps), triton.cdiv(n, bn) * triton.cdiv(m, halves * _HALF)
    processors = torch.cuda.get_device_properties(codes.device).multi_processor_count
    items, together = tiles * splits, 2 if s["beside"] else 1
    partial, locks = scratch(out.device, tiles * halves, bn * _HALF, splits, False)
    weights = [_descriptor(packed.codes, rows) for rows in sizes]
    more = {"maxnreg": _BESIDE} if s["beside"] else {}
    rounded_gemm_parts[(min(items, together * processors),)](
        *weights, *[None] * (3 - len(weights)), _descriptor(codes, _HALF), packed.scale, scales,
        bias, out, partial, locks,
        m, n, steps, splits, items, scales.shape[1], packed.block_rows, len(packed.scale),
        HALVES=halves, STAGES=s["stages"], STRADDLES=packed.block_rows % bn > 0, SPLIT=splits > 1,
        REGISTERS=104 if s["beside"] else 232, num_warps=4, launch_pdl=True, **more,
    )  # fmt: skip
