"""One token times a weight of e4m3 codes, each warp with a ring of its own in shared memory.

    y[n] = sum over k of code[n, k] * x_code[k], times w_scale[n] * x_scale

As `nibble_stream.py`, but rows of a block are not side by side. x becomes codes on its way in, from
values whose largest magnitude the kernel ahead has told in parts: nobody needs to quantize it
before. Codes of both sides become float16 with one conversion a pair; their products are exact,
sums float32 (the FP8 products of sm_90 add with about 14 bits).

    GLU       silu(gate) * up, and the largest magnitude of each 16
    RESIDUAL  hidden + y; that times the weight of the next norm; of each 16 the sum of squares of
              the first and the largest magnitude of the second
    NORMED    x_scale is divided by the rms of the stream: the norm behind the product, which
              changes no code, since it scales the largest magnitude alike

Grid: programs of up to UNITS * R tiles of 16 rows. Masked: blocks of 128 columns past K. Limit:
memory.
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
    copy_rows,
    highest,
    shared_start,
    store_rows,
    sync,
    wait_for_all_but,
    words_at,
)

__all__ = ["rounded_stream", "shared_bytes"]

TILE_BYTES = gl.constexpr(2048)  # of 16 rows of a block
LARGEST = gl.constexpr(448.0)


def shared_bytes(
    *, blocks: int, units: int, tiles: int, slots: int, warps: int, beside: int
) -> int:
    """Return the bytes of shared memory of a program; arguments as in `nibble_stream`."""
    return warps * slots * tiles * 2048 + blocks * 256 + units * tiles * beside * 64


def _tile() -> str:
    """Return PTX that adds 128 columns to $0-$3.

    $4-$11 are codes of row g, $12-$19 of row g + 8, $20-$35 x in float16, $36-$39 the sums before.
    """
    lines = ["{ .reg .b32 a<4>; .reg .b16 l; .reg .b16 h;"]
    lines += [f"mov.f32 ${i}, ${36 + i};" for i in range(4)]
    for i in range(8):
        for source, low, high in ((f"${4 + i}", "a0", "a2"), (f"${12 + i}", "a1", "a3")):
            lines.append(f"mov.b32 {{l, h}}, {source};")
            lines.append(f"cvt.rn.f16x2.e4m3x2 {low}, l;")
            lines.append(f"cvt.rn.f16x2.e4m3x2 {high}, h;")
        lines.append(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0, $1, $2, $3}, "
            f"{{a0, a1, a2, a3}}, {{${20 + 2 * i}, ${21 + 2 * i}}}, {{$0, $1, $2, $3}};"
        )
    return " ".join([*lines, "}"])


TILE = gl.constexpr(_tile())
TILE_OPS = gl.constexpr(",".join(["=&f"] * 4 + ["r"] * 32 + ["f"] * 4))
INPUTS = gl.constexpr(
    "{ ld.shared.v4.b32 {$0, $1, $2, $3}, [$16]; ld.shared.v4.b32 {$4, $5, $6, $7}, [$16 + 128]; "
    "ld.shared.v4.b32 {$8, $9, $10, $11}, [$17]; "
    "ld.shared.v4.b32 {$12, $13, $14, $15}, [$17 + 128]; }"
)
INPUTS_OPS = gl.constexpr(",".join(["=r"] * 16 + ["r", "r"]))
LOAD_8 = gl.constexpr("{ ld.global.v2.b32 {$0, $1}, [$2]; }")
TO_CODES = gl.constexpr(
    "{ .reg .b16 l; .reg .b16 h; cvt.rn.satfinite.e4m3x2.f32 l, $2, $1; "
    "cvt.rn.satfinite.e4m3x2.f32 h, $4, $3; mov.b32 $0, {l, h}; }"
)
PUT_CODES = gl.constexpr(
    "{ .reg .pred p; .reg .b16 l; .reg .b16 h; .reg .b32 a; .reg .b32 b; mov.b32 $0, 0; "
    "setp.ne.b32 p, $3, 0; mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 a, l; "
    "cvt.rn.f16x2.e4m3x2 b, h; @p st.shared.v2.b32 [$1], {a, b}; }"
)


@gluon.jit
def _inputs_at(one, other):
    return gl.inline_asm_elementwise(
        INPUTS, INPUTS_OPS, [one, other], dtype=(
            gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32,
            gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32,
        ), is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _plus_tile(c, w, x):
    return gl.inline_asm_elementwise(
        TILE, TILE_OPS,
        [w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7],
         w[8], w[9], w[10], w[11], w[12], w[13], w[14], w[15],
         x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7],
         x[8], x[9], x[10], x[11], x[12], x[13], x[14], x[15], c[0], c[1], c[2], c[3]],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _ask(
    item, slot, items, first_unit, blocks, K, half_rows, place, wk, wn, lane, ring,
    J: gl.constexpr, R: gl.constexpr, WK: gl.constexpr, WN: gl.constexpr, GLU: gl.constexpr,
):  # fmt: skip
    """Ask for an item, to be found in a slot; for nothing past the last one."""
    wanted = (item < items).to(gl.int32)
    block = gl.minimum(wk + item % J * WK, blocks - 1).to(gl.int64)
    unit = (first_unit + wn + item // J * WN).to(gl.int64)
    to = ring + slot * (R * TILE_BYTES) + lane * 16
    four = (lane * 0).to(gl.int64) + K * 4
    if GLU:
        source = place + unit * 16 * K + block * 128
        copy_rows(to, source, four, wanted)
        copy_rows(to + TILE_BYTES, source + half_rows * K, four, wanted)
    else:
        source = place + unit * (16 * R) * K + block * 128
        for r in gl.static_range(R):
            copy_rows(to + r * TILE_BYTES, source + K * (16 * r), four, wanted)
    commit(lane)


@gluon.jit
def _if(there, new, old):
    a, b = gl.where(there, new[0], old[0]), gl.where(there, new[1], old[1])
    c, d = gl.where(there, new[2], old[2]), gl.where(there, new[3], old[3])
    return a, b, c, d


@gluon.jit
def _peak_of(peaks, lane, COUNT: gl.constexpr):
    """Return the largest of COUNT floats, in every lane."""
    peak = lane * 0.0
    for u in gl.static_range((COUNT + 31) // 32):
        at = lane + 32 * u
        peak = gl.maximum(peak, gl.load(peaks + at, mask=at < COUNT, other=0.0))
    return highest(peak, 32)


@gluon.jit
def _codes_of(pairs, inverse):
    """Return the codes of 4 values, two bfloat16 each, times `inverse`."""
    a, b = pairs
    v0 = (a << 16).to(gl.float32, bitcast=True) * inverse
    v1 = (a & -65536).to(gl.float32, bitcast=True) * inverse
    v2 = (b << 16).to(gl.float32, bitcast=True) * inverse
    v3 = (b & -65536).to(gl.float32, bitcast=True) * inverse
    return gl.inline_asm_elementwise(
        TO_CODES, "=r,f,f,f,f", [v0, v1, v2, v3], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _ask_inputs(x, blocks, warp, lane, JX: gl.constexpr, NW: gl.constexpr, VALUES: gl.constexpr):
    """Load what a lane has of x, 4 columns of each of a warp's JX blocks, all at once."""
    found = ()
    for j in gl.static_range(JX):
        at = gl.minimum(warp + j * NW, blocks - 1) * 32 + lane
        if VALUES:
            place = x.to(gl.int64) + at.to(gl.int64) * 8
            new = gl.inline_asm_elementwise(
                LOAD_8, "=r,=r,l", [place], dtype=(gl.int32, gl.int32), is_pure=False, pack=1
            )
        else:
            new = (gl.load(x + at), at)
        found = found + (new,)  # type: ignore[assignment]  # noqa: RUF005
    return found


@gluon.jit
def _keep_inputs(
    found, inputs, inverse, blocks, warp, lane,
    JX: gl.constexpr, NW: gl.constexpr, VALUES: gl.constexpr,
):  # fmt: skip
    """Put x into shared memory, as float16 of its codes."""
    # column c of a block: half c / 64, part c / 16 % 4, of that the first or second 8 columns
    spot = lane // 2 % 2 * 128 + lane // 16 * 64 + lane // 4 % 4 * 16 + lane % 2 * 8
    for j in gl.static_range(JX):
        block = warp + j * NW
        inside = (block < blocks).to(gl.int32)
        four = _codes_of(found[j], inverse) if VALUES else found[j][0]
        gl.inline_asm_elementwise(
            PUT_CODES, "=r,r,r,r", [inputs + block * 256 + spot, four, inside],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["blocks", "units"])
def rounded_stream(  # noqa: C901 - what is not there is compiled out
    x, x_scale, peaks_in, squares_in, codes, w_scale, bias, out, hidden, weight, scaled, squares,
    of_16, K, blocks, units, half_rows, norm_width, eps,
    UNITS: gl.constexpr, J: gl.constexpr, JX: gl.constexpr, R: gl.constexpr, S: gl.constexpr,
    WK: gl.constexpr, GLU: gl.constexpr, RESIDUAL: gl.constexpr, OFFSET: gl.constexpr,
    NORMED: gl.constexpr, PEAKS: gl.constexpr, PEAKS_IN: gl.constexpr, TILES_IN: gl.constexpr,
    EVEN: gl.constexpr, LATE: gl.constexpr, EARLY: gl.constexpr, SIZE: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Write out [N], or [N / 2] with GLU; see the top of this file.

    x is [K] bfloat16 with peaks_in [PEAKS_IN] float32; or, if PEAKS_IN is 0, [K / 4] int32 of codes
    with x_scale [1]. codes are [N, K] bytes, w_scale [N] float32; blocks is K / 128. The rest is as
    in `nibble_stream`.
    """
    NW: gl.constexpr = num_warps
    T: gl.constexpr = 32 * NW
    WN: gl.constexpr = NW // WK
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    ROWS: gl.constexpr = 16 if GLU else 16 * R
    STEPS: gl.constexpr = (UNITS * ROWS + T - 1) // T
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
    # shared memory: rings, x, sums of rows
    ring = start + warp * (S * R * TILE_BYTES)
    inputs = start + NW * S * R * TILE_BYTES
    parts = inputs + blocks * 256
    programs = gl.num_programs(0)
    first_unit = pid * units // programs
    mine = (pid + 1) * units // programs - first_unit
    items = (mine - wn + (WN - 1)) // WN * J  # none of a warp whose first unit is not there
    wide = K.to(gl.int64)
    place = codes.to(gl.int64) + (lane // 8).to(gl.int64) * wide + (lane % 8 * 16).to(gl.int64)
    for u in gl.static_range(S):
        _ask(u, u, items, first_unit, blocks, wide, half_rows, place, wk, wn, lane, ring,
             J, R, WK, WN, GLU)  # fmt: skip
    weights = ()
    if RESIDUAL:
        weights = of_rows(weight, first_unit * ROWS, mine * ROWS, thread, STEPS, T)
    scales = of_rows(w_scale, first_unit * ROWS, mine * ROWS, thread, STEPS, T)
    of_up = scales
    if GLU:
        of_up = of_rows(w_scale + half_rows, first_unit * ROWS, mine * ROWS, thread, STEPS, T)
    if EARLY:
        gdc_wait()
    found = _ask_inputs(x, blocks, warp, lane, JX, NW, PEAKS_IN > 0)
    before = ()
    if RESIDUAL:
        before = of_rows(hidden, first_unit * ROWS, mine * ROWS, thread, STEPS, T)
    nothing = gl.full([T], 0.0, gl.float32, layout=ONE)
    inverse = nothing
    if PEAKS_IN:
        peak = _peak_of(peaks_in, lane, PEAKS_IN)
        inverse = gl.where(peak > 0, LARGEST / peak, 0.0)
        factor = peak / LARGEST
    else:
        factor = gl.load(x_scale) + nothing
    part_of_squares = nothing
    if NORMED:
        part_of_squares = squares_of_lane(squares_in, norm_width, lane, TILES_IN)
    _keep_inputs(found, inputs, inverse, blocks, warp, lane, JX, NW, PEAKS_IN > 0)
    gl.thread_barrier()
    item = 0
    slot = 0
    none = (nothing, nothing, nothing, nothing)
    for turn in range(0, (mine + WN - 1) // WN):
        unit = wn + turn * WN
        sums = ()
        for _ in gl.static_range(R):
            sums = sums + (none,)  # type: ignore[assignment]  # noqa: RUF005
        for step in range(0, J):
            block = wk + step * WK
            there = block < blocks
            x_at = inputs + gl.minimum(block, blocks - 1) * 256 + q * 16
            xs = _inputs_at(x_at + turned, x_at + (64 - turned))
            wait_for_all_but(thread, S - 1)
            one = ring + slot * (R * TILE_BYTES) + g * 128 + q * 16
            after = ()
            for r in gl.static_range(R):
                w = words_at(one + r * TILE_BYTES + turned, one + r * TILE_BYTES + (64 - turned))
                new = _plus_tile(sums[r], w, xs)
                if not EVEN:  # a block past the last one is the last one again
                    new = _if(there, new, sums[r])
                after = after + (new,)  # type: ignore[assignment]  # noqa: RUF005
            sums = after
            sync(thread)
            _ask(item + S, slot, items, first_unit, blocks, wide, half_rows, place, wk, wn, lane,
                 ring, J, R, WK, WN, GLU)  # fmt: skip
            item += 1
            slot += 1
            if slot == S:
                slot = 0
        for r in gl.static_range(R):
            to = parts + ((unit * WK + wk) * R + r) * 64 + g * 4
            low = gl.where(odd, sums[r][1], sums[r][0])
            high = gl.where(odd, sums[r][3], sums[r][2])
            store_rows(to, low, high, ((q == 0) & (unit < mine)).to(gl.int32))
    if EARLY and LATE:
        gdc_launch_dependents()
    if NORMED:
        factor = factor * rms_factor(part_of_squares, norm_width, eps)
    factor = factor + (factor - factor)  # what is not finite makes NaN, whatever its codes are
    gl.thread_barrier()
    for u in gl.static_range(STEPS):
        index = u * T + thread
        inside = index < mine * ROWS
        index = gl.minimum(index, mine * ROWS - 1)
        row = first_unit * ROWS + index
        part = parts + index // ROWS * (WK * R * 64) + index % ROWS * 4
        y = sum_of_rows(part, bias, row, factor * scales[u], R, WK)
        if GLU:
            up = sum_of_rows(part + 64, bias, half_rows + row, factor * of_up[u], R, WK)
            write_gated(y, up, out, of_16, row, inside, PEAKS)
        elif RESIDUAL:
            write_residual(
                y, before[u], weights[u], out, scaled, squares, of_16, row, inside, OFFSET, PEAKS
            )
        else:
            write_plain(y, out, row, inside)
