"""One token times a weight of nibbles, each warp with a ring of its own in shared memory.

    y[n] = sum over g of scale[g, n] * (sum over k in g of (128 + code[n, k]) x[k] - 136 sum of x)

The layout [blocks, N, 64] puts 16 rows of a block side by side, 2 KB. A warp asks for R such tiles
at a time, to a slot of its ring (`warp_streams.py`), and what a lane then reads is what it holds of
the left operand of `mma.m16n8k16`, after one `lop3` a pair of codes, which makes 128 + code of it.
What is too much, 136 times the sum of x of a group, is known before the first tile.

Of a program's NW warps, WK share out the blocks of a tile; the others have tiles of their own, so
that what is read at a time lies together. Sums of rows meet behind the last tile. Weights and
scales are asked for before the kernel ahead has ended: a small product is in shared memory when its
input comes. Besides y the kernel writes what follows a product in a decoder's layer:

    GLU       silu(gate) * up, gate the first half of the rows, up the second
    RESIDUAL  hidden + y; that times the weight of the next norm; of each 16 the sum of squares
    NORMED    y divided by the rms of the stream, from those sums: the norm behind the product,
              which is the same number but for roundings

Error: values are exact, sums float32, of numbers up to 30 times as large as the result's.
Grid: programs of up to UNITS * R tiles. Masked: blocks past K. Limit: memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quantload.runtime.kernels.nibble_fragments import excess_of, inputs_at, plus_block
from quantload.runtime.kernels.stream_epilogues import (
    of_rows,
    rms_factor,
    squares_of_lane,
    sum_of_rows,
    write_gated,
    write_plain,
    write_residual,
)
from quantload.runtime.kernels.warp_streams import (
    commit,
    copy_16,
    copy_tile,
    floats_at,
    load_16,
    rows_at,
    shared_start,
    store_16,
    store_one,
    store_rows,
    store_two,
    summed,
    sync,
    wait_for_all_but,
    words_at,
)

__all__ = ["nibble_stream", "shared_bytes"]

TILE_BYTES = gl.constexpr(2048)  # of 16 rows of a block
TILE_SCALES = gl.constexpr(64)


def shared_bytes(
    *, blocks: int, units: int, tiles: int, slots: int, warps: int, beside: int
) -> int:
    """Return the bytes of shared memory of a program of `units` units of `tiles` tiles.

    `beside` warps share out the blocks of a tile.
    """
    of_block = 512 + 8 + units * tiles * 64  # x, its sums, scales
    return warps * slots * tiles * 2048 + blocks * of_block + units * tiles * beside * 64


@gluon.jit
def _ask(
    item, slot, items, first_unit, blocks, N, half_rows, place, wk, wn, lane, ring,
    J: gl.constexpr, R: gl.constexpr, WK: gl.constexpr, WN: gl.constexpr, GLU: gl.constexpr,
):  # fmt: skip
    """Ask for the words of an item, to be found in a slot; for none past the last one."""
    wanted = (item < items).to(gl.int32)
    block = gl.minimum(wk + item % J * WK, blocks - 1).to(gl.int64)
    unit = first_unit + wn + item // J * WN
    to = ring + slot * (R * TILE_BYTES) + lane * 16
    if GLU:
        source = place + (block * N + unit * 16) * 128
        copy_tile(to, source, wanted)
        copy_tile(to + TILE_BYTES, source + half_rows * 128, wanted)
    else:
        source = place + (block * N + unit * (16 * R)) * 128
        for r in gl.static_range(R):
            copy_tile(to + r * TILE_BYTES, source + r * TILE_BYTES, wanted)
    commit(lane)


@gluon.jit
def _ask_scales(
    scales, scale, units, first_unit, blocks, N, half_rows, thread,
    UNITS: gl.constexpr, R: gl.constexpr, T: gl.constexpr, GLU: gl.constexpr,
):  # fmt: skip
    """Ask for the scales of all rows of a program: of each block [UNITS * R * 16], gates first."""
    LINE: gl.constexpr = UNITS * R * 4  # of 16 bytes, of a block
    PART: gl.constexpr = UNITS * 4 if GLU else LINE
    for begin in range(0, blocks * LINE, T):
        at = begin + thread
        block, of_line = at // LINE, at % LINE
        part, of_part = of_line // PART, of_line % PART
        row = first_unit * (16 if GLU else 16 * R) + part * half_rows
        source = scale + (block.to(gl.int64) * N + row) * 4 + of_part * 16
        there = of_part < units * (4 if GLU else 4 * R)
        copy_16(scales + at * 16, source, ((at < blocks * LINE) & there).to(gl.int32))
    commit(thread)


@gluon.jit
def _ask_inputs(x, blocks, warp, lane, JX: gl.constexpr, NW: gl.constexpr):
    """Load a warp's JX blocks of x, all at once."""
    found = ()
    for j in gl.static_range(JX):
        at = gl.minimum(warp + j * NW, blocks - 1) * 512 + lane * 16
        new = load_16(x.to(gl.int64) + at.to(gl.int64))
        found = found + (new,)  # type: ignore[assignment]  # noqa: RUF005
    return found


@gluon.jit
def _keep_inputs(
    found, sums_in, inputs, excess, blocks, warp, lane, q, turned, nothing, first,
    JX: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """Put x into shared memory, and -136 times the sum of x of each group.

    The sums are those of 8 parts each that the kernel ahead told, or are made here.
    """
    for j in gl.static_range(JX):
        block = warp + j * NW
        inside = (block < blocks).to(gl.int32)
        store_16(inputs + block * 512 + lane * 16, found[j], inside)
    if sums_in is not None:
        # 16 lanes have a part of a block each, the first and the second 8 are of a group
        for j in gl.static_range((JX + 1) // 2):
            block = (warp + (2 * j + lane // 16) * NW).to(gl.int32)
            inside = block < blocks
            part = gl.load(sums_in + block * 16 + lane % 16, mask=inside, other=0.0)
            sums = summed(part, 8) * -136.0
            here = (inside & (lane % 8 == 0)).to(gl.int32)
            store_one(excess + block * 8 + lane // 8 % 2 * 4, sums, here)
    else:
        sync(lane)
        none = (nothing, nothing, nothing, nothing, nothing, nothing, nothing, nothing)
        for j in gl.static_range(JX):
            block = gl.minimum(warp + j * NW, blocks - 1)
            at = inputs + block * 512 + q * 16
            one, two = inputs_at(at + turned), inputs_at(at + (64 - turned))
            sums, more = excess_of(none, one), excess_of(none, two)
            inside = (warp + j * NW < blocks).to(gl.int32)
            store_two(excess + block * 8, sums[0] + more[0], sums[4] + more[4], first & inside)


@gluon.jit(do_not_specialize=["blocks", "units"])
def nibble_stream(  # noqa: C901 - what is not there is compiled out
    x, sums_in, words, scale, bias, out, squares_in, hidden, weight, scaled, squares, of_16,
    N, blocks, units, half_rows, norm_width, eps,
    UNITS: gl.constexpr, J: gl.constexpr, JX: gl.constexpr, R: gl.constexpr, S: gl.constexpr,
    WK: gl.constexpr, GLU: gl.constexpr, RESIDUAL: gl.constexpr, OFFSET: gl.constexpr,
    NORMED: gl.constexpr, PEAKS: gl.constexpr, TILES_IN: gl.constexpr, EVEN: gl.constexpr,
    LATE: gl.constexpr, EARLY: gl.constexpr, SIZE: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Write out [N], or [N / 2] with GLU; see the top of this file.

    x [K], sums_in [K / 16] float32 of its parts or None, words [blocks, N, 64], scale [blocks, N]
    int32 (two bfloat16), bias [N] or None; with NORMED squares_in [norm_width / 16] float32; with
    RESIDUAL hidden and weight [N], out is the new stream, scaled [N] that times the weight, squares
    [N / 16]. of_16 [N / 16] float32, or of N / 2 with GLU: largest magnitudes with PEAKS, or sums.
    blocks is K / 256, units are groups of R tiles, at most UNITS of them a program's, J =
    ceil(blocks / WK), JX = ceil(blocks / warps). S slots; EVEN: WK divides blocks; LATE: the next
    kernel starts behind the loop; EARLY: launched before the one ahead has ended; SIZE KB of shared
    memory.
    """
    NW: gl.constexpr = num_warps
    T: gl.constexpr = 32 * NW
    WN: gl.constexpr = NW // WK
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    ROWS: gl.constexpr = 16 if GLU else 16 * R
    STEPS: gl.constexpr = (UNITS * ROWS + T - 1) // T
    FAR: gl.constexpr = UNITS * TILE_SCALES if GLU else TILE_SCALES  # between scales of two tiles
    OF_UNIT: gl.constexpr = TILE_SCALES if GLU else R * TILE_SCALES
    pid = gl.program_id(0)
    if EARLY and not LATE:
        gdc_launch_dependents()
    thread = gl.arange(0, T, layout=ONE)
    whole = gl.allocate_shared_memory(gl.int32, [SIZE, 256], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    whole.index(SIZE - 1).store(gl.arange(0, 256, layout=ONE))  # past all else, so that it exists
    start = shared_start(thread)
    warp, lane = thread // 32, thread % 32
    wk, wn = warp % WK, warp // WK
    g, q = lane // 4, lane % 4
    odd, turned = g % 2 == 1, g % 2 * 64
    first = (lane == 0).to(gl.int32)
    # shared memory: rings, scales, x, its sums, sums of rows
    ring = start + warp * (S * R * TILE_BYTES)
    scales = start + NW * S * R * TILE_BYTES
    inputs = scales + blocks * (UNITS * R * TILE_SCALES)
    excess = inputs + blocks * 512
    parts = excess + blocks * 8
    programs = gl.num_programs(0)
    first_unit = pid * units // programs
    mine = (pid + 1) * units // programs - first_unit
    items = (mine - wn + (WN - 1)) // WN * J  # none of a warp whose first unit is not there
    place = words.to(gl.int64) + (lane * 16).to(gl.int64)
    _ask_scales(
        scales, scale.to(gl.int64), mine, first_unit, blocks, N, half_rows, thread,
        UNITS, R, T, GLU,
    )  # fmt: skip
    for u in gl.static_range(S):
        _ask(u, u, items, first_unit, blocks, N, half_rows, place, wk, wn, lane, ring,
             J, R, WK, WN, GLU)  # fmt: skip
    weights = ()
    if RESIDUAL:
        weights = of_rows(weight, first_unit * ROWS, mine * ROWS, thread, STEPS, T)
    if EARLY:
        gdc_wait()
    found = _ask_inputs(x, blocks, warp, lane, JX, NW)
    before = ()
    if RESIDUAL:
        before = of_rows(hidden, first_unit * ROWS, mine * ROWS, thread, STEPS, T)
    nothing = gl.full([T], 0.0, gl.float32, layout=ONE)
    part_of_squares = nothing
    if NORMED:
        part_of_squares = squares_of_lane(squares_in, norm_width, lane, TILES_IN)
    _keep_inputs(
        found, sums_in, inputs, excess, blocks, warp, lane, q, turned, nothing, first, JX, NW
    )
    wait_for_all_but(thread, S)  # scales are there
    gl.thread_barrier()
    item = 0
    slot = 0
    for turn in range(0, (mine + WN - 1) // WN):
        unit = wn + turn * WN
        sums = ()
        for _ in gl.static_range(R):
            sums = sums + ((nothing, nothing),)  # type: ignore[assignment]  # noqa: RUF005
        for step in range(0, J):
            block = gl.minimum(wk + step * WK, blocks - 1)
            x_at = inputs + block * 512 + q * 16
            x0, x1 = inputs_at(x_at + turned), inputs_at(x_at + (64 - turned))
            e0, e1 = floats_at(excess + block * 8)
            scale_at = scales + block * (UNITS * R * TILE_SCALES) + unit * OF_UNIT + g * 4
            wait_for_all_but(thread, S - 1)
            one = ring + slot * (R * TILE_BYTES) + g * 128 + q * 16
            after = ()
            for r in gl.static_range(R):
                w = words_at(one + r * TILE_BYTES + turned, one + r * TILE_BYTES + (64 - turned))
                low, high = plus_block(
                    sums[r][0], sums[r][1], w, rows_at(scale_at + r * FAR), x0, x1, e0, e1,
                    nothing, odd, wk + step * WK < blocks, EVEN,
                )  # fmt: skip
                after = after + ((low, high),)  # type: ignore[assignment]  # noqa: RUF005
            sums = after
            sync(thread)
            _ask(item + S, slot, items, first_unit, blocks, N, half_rows, place, wk, wn, lane,
                 ring, J, R, WK, WN, GLU)  # fmt: skip
            item += 1
            slot += 1
            if slot == S:
                slot = 0
        for r in gl.static_range(R):
            to = parts + ((unit * WK + wk) * R + r) * 64 + g * 4
            store_rows(to, sums[r][0], sums[r][1], ((q == 0) & (unit < mine)).to(gl.int32))
    if EARLY and LATE:
        gdc_launch_dependents()
    factor = nothing + 1.0
    if NORMED:
        factor = rms_factor(part_of_squares, norm_width, eps)
    gl.thread_barrier()
    for u in gl.static_range(STEPS):
        index = u * T + thread
        inside = index < mine * ROWS
        index = gl.minimum(index, mine * ROWS - 1)
        row = first_unit * ROWS + index
        part = parts + index // ROWS * (WK * R * 64) + index % ROWS * 4
        y = sum_of_rows(part, bias, row, factor, R, WK)
        if GLU:
            up = sum_of_rows(part + 64, bias, half_rows + row, factor, R, WK)
            write_gated(y, up, out, of_16, row, inside, PEAKS)
        elif RESIDUAL:
            write_residual(
                y, before[u], weights[u], out, scaled, squares, of_16, row, inside, OFFSET, PEAKS
            )
        else:
            write_plain(y, out, row, inside)
