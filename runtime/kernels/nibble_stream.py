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
    fetch,
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
FETCHED = gl.constexpr(16384)  # bytes of a piece of what the next product reads


def shared_bytes(
    *, blocks: int, units: int, tiles: int, slots: int, warps: int, beside: int
) -> int:
    """Return the bytes of shared memory of a program of `units` units of `tiles` tiles.

    `beside` warps share out the blocks of a tile.
    """
    of_block = 512 + 8 + units * tiles * 64  # x, its sums, scales
    return warps * slots * tiles * 2048 + blocks * of_block + units * tiles * beside * 64


def _multiply(sums: list[str], left: list[str], right: list[str]) -> str:
    names = (", ".join(part) for part in (sums, left, right, sums))
    c, a, b, d = names
    return (
        f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{{c}}}, {{{a}}}, {{{b}}}, {{{d}}};"
    )


def _half() -> str:
    """Return PTX that adds 32 columns of each of 4 slices to the sums of two groups, $0-$7.

    $8-$11 are words of row g, $12-$15 of row g + 8, $16-$31 x of the slices, $32-$39 sums before.
    """
    lines = ["{ .reg .b32 a<4>; .reg .b32 t;", *(f"mov.f32 ${i}, ${32 + i};" for i in range(8))]
    for slot in range(4):
        sums = [f"${4 * (slot // 2) + i}" for i in range(4)]
        for step in range(2):
            for i, word in enumerate((8 + 2 * step, 12 + 2 * step, 9 + 2 * step, 13 + 2 * step)):
                source = f"${word}"
                if slot:
                    lines.append(f"shr.b32 t, {source}, {4 * slot};")
                    source = "t"
                lines.append(f"lop3.b32 a{i}, {source}, 0x000f000f, 0x43004300, 0xea;")
            b = [f"${16 + 4 * slot + 2 * step + i}" for i in range(2)]
            lines.append(_multiply(sums, [f"a{i}" for i in range(4)], b))
    return " ".join([*lines, "}"])


def _excess() -> str:
    """Return PTX that adds -136 times the x of a half, $8-$23: $0-$7 sums, $24-$31 before."""
    lines = [
        "{ .reg .b32 a; mov.b32 a, 0xc308c308;",
        *(f"mov.f32 ${i}, ${24 + i};" for i in range(8)),
    ]
    for slot in range(4):
        sums = [f"${4 * (slot // 2) + i}" for i in range(4)]
        for step in range(2):
            b = [f"${8 + 4 * slot + 2 * step + i}" for i in range(2)]
            lines.append(_multiply(sums, ["a"] * 4, b))
    return " ".join([*lines, "}"])


def _inputs() -> str:
    """Return PTX that loads 16 registers of x: 8 columns of each of 4 slices, 128 bytes apart."""
    quads = [", ".join(f"${4 * n + i}" for i in range(4)) for n in range(4)]
    parts = [f"ld.shared.v4.b32 {{{quad}}}, [$16 + {128 * n}];" for n, quad in enumerate(quads)]
    return " ".join(["{", *parts, "}"])


HALF = gl.constexpr(_half())
HALF_OPS = gl.constexpr(",".join(["=&f"] * 8 + ["r"] * 24 + ["f"] * 8))
EXCESS = gl.constexpr(_excess())
EXCESS_OPS = gl.constexpr(",".join(["=&f"] * 8 + ["r"] * 16 + ["f"] * 8))
INPUTS = gl.constexpr(_inputs())
INPUTS_OPS = gl.constexpr(",".join(["=r"] * 16 + ["r"]))


@gluon.jit
def _inputs_at(at):
    return gl.inline_asm_elementwise(
        INPUTS, INPUTS_OPS, [at], dtype=(
            gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32,
            gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32,
        ), is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _plus_half(c, w0, w1, w2, w3, v0, v1, v2, v3, x):
    return gl.inline_asm_elementwise(
        HALF, HALF_OPS,
        [w0, w1, w2, w3, v0, v1, v2, v3,
         x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7],
         x[8], x[9], x[10], x[11], x[12], x[13], x[14], x[15],
         c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7]],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32,
               gl.float32, gl.float32, gl.float32, gl.float32),
        is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _excess_of(c, x):
    return gl.inline_asm_elementwise(
        EXCESS, EXCESS_OPS,
        [x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7],
         x[8], x[9], x[10], x[11], x[12], x[13], x[14], x[15],
         c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7]],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32,
               gl.float32, gl.float32, gl.float32, gl.float32),
        is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _plus_block(low, high, w, s, x0, x1, e0, e1, nothing, odd, there, EVEN: gl.constexpr):
    """Add a block to the sums of rows g and g + 8: both groups, each times its scale.

    Halves have sums of their own, so that products need not wait for each other as long.
    """
    none = (nothing, nothing, nothing, nothing, nothing, nothing, nothing, nothing)
    c = _plus_half(none, w[0], w[1], w[2], w[3], w[8], w[9], w[10], w[11], x0)
    d = _plus_half(none, w[4], w[5], w[6], w[7], w[12], w[13], w[14], w[15], x1)
    a, b = s
    if not EVEN:  # a block past the last one is the last one again
        a, b = gl.where(there, a, 0), gl.where(there, b, 0)
    c0, c4 = gl.where(odd, c[1] + d[1], c[0] + d[0]), gl.where(odd, c[5] + d[5], c[4] + d[4])
    c2, c6 = gl.where(odd, c[3] + d[3], c[2] + d[2]), gl.where(odd, c[7] + d[7], c[6] + d[6])
    low = low + (c0 + e0) * (a << 16).to(gl.float32, bitcast=True)
    low = low + (c4 + e1) * (a & -65536).to(gl.float32, bitcast=True)
    high = high + (c2 + e0) * (b << 16).to(gl.float32, bitcast=True)
    high = high + (c6 + e1) * (b & -65536).to(gl.float32, bitcast=True)
    return low, high


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
            one, two = _inputs_at(at + turned), _inputs_at(at + (64 - turned))
            sums, more = _excess_of(none, one), _excess_of(none, two)
            inside = (warp + j * NW < blocks).to(gl.int32)
            store_two(excess + block * 8, sums[0] + more[0], sums[4] + more[4], first & inside)


@gluon.jit(do_not_specialize=["blocks", "units", "ahead_pieces"])
def nibble_stream(  # noqa: C901 - what is not there is compiled out
    x, sums_in, words, scale, bias, out, squares_in, hidden, weight, scaled, squares, of_16,
    ahead, ahead_pieces, N, blocks, units, half_rows, norm_width, eps,
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
    ahead, or None, is fetched into L2 before the wait, ahead_pieces times 16 KB, at most one a
    thread.
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
    if ahead is not None:
        piece = pid + thread * programs
        source = ahead.to(gl.int64) + piece.to(gl.int64) * FETCHED
        fetch(source, thread * 0 + FETCHED, (piece < ahead_pieces).to(gl.int32))
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
            x0, x1 = _inputs_at(x_at + turned), _inputs_at(x_at + (64 - turned))
            e0, e1 = floats_at(excess + block * 8)
            scale_at = scales + block * (UNITS * R * TILE_SCALES) + unit * OF_UNIT + g * 4
            wait_for_all_but(thread, S - 1)
            one = ring + slot * (R * TILE_BYTES) + g * 128 + q * 16
            after = ()
            for r in gl.static_range(R):
                w = words_at(one + r * TILE_BYTES + turned, one + r * TILE_BYTES + (64 - turned))
                low, high = _plus_block(
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
