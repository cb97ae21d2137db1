"""What programs of `decode_attention_warps.py` leave of a head, and their sum.

A piece is of a part of the keys: the largest score m of each query, the sum of exp(score - m), and
values weighted alike. Pieces of the warps of a program meet in shared memory, behind one barrier;
those of programs in memory, where the last one loads all at once: 16 of them are one round trip.
Tensors are [warp, g, q, e] as there.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["add_up", "added", "larger", "leave_piece"]


@gluon.jit
def larger(a, b):
    """Return the larger one, to reduce by."""
    return gl.maximum(a, b)


@gluon.jit
def added(a, b):
    """Return the sum, to reduce by."""
    return a + b


@gluon.jit
def _room(shape: gl.constexpr, layout: gl.constexpr):
    return gl.allocate_shared_memory(gl.float32, shape, layout)


@gluon.jit
def leave_piece(
    m, total, a0, b0, a1, b1, part, stats, L2: gl.constexpr, G: gl.constexpr, NW: gl.constexpr
):  # fmt: skip
    """Write the piece of a program: part [G, D] and stats [G, 2].

    m and total are [NW, 8], of L2; a0 and b0 hold columns 16 q + e and 8 on, a1 and b1 those 64 on.
    """
    D: gl.constexpr = 128
    # a thread has what all warps have of its columns
    L: gl.constexpr = gl.BlockedLayout([NW, 1, 1, 1], [1, 1, 4, 8], [1, NW, 1, 1], [3, 2, 1, 0])
    LS: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, L))
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    wide: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    # each is a tensor of its own: between stores to parts of one the compiler puts barriers
    one, two = _room([NW, 8], plain), _room([NW, 8], plain)
    four = (
        _room([NW, 8, 4, 8], wide), _room([NW, 8, 4, 8], wide),
        _room([NW, 8, 4, 8], wide), _room([NW, 8, 4, 8], wide),
    )  # fmt: skip
    one.store(m)
    two.store(total)
    four[0].store(a0)
    four[1].store(b0)
    four[2].store(a1)
    four[3].store(b1)
    gl.thread_barrier()
    of_warps = one.slice(0, G, 1).load(LS)
    top = gl.reduce(of_warps, 0, larger)
    weight = gl.exp(of_warps - gl.expand_dims(top, 0))
    total = gl.reduce(two.slice(0, G, 1).load(LS) * weight, 0, added)
    g1 = gl.arange(0, G, layout=gl.SliceLayout(0, LS))
    gl.store(stats + g1 * 2, top)
    gl.store(stats + g1 * 2 + 1, total)
    LP: gl.constexpr = gl.SliceLayout(0, L)
    g = gl.arange(0, G, layout=gl.SliceLayout(1, gl.SliceLayout(2, LP)))
    q = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, LP)))
    e = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, LP)))
    column = gl.expand_dims(gl.expand_dims(q, 0), 2) * 16 + gl.expand_dims(gl.expand_dims(e, 0), 1)
    to = part + gl.expand_dims(gl.expand_dims(g, 1), 2) * D + column
    weights = gl.expand_dims(gl.expand_dims(weight, 2), 3)
    for i in gl.static_range(4):
        values = four[i].slice(0, G, 1).load(L)
        gl.store(to + (64 * (i // 2) + 8 * (i % 2)), gl.reduce(values * weights, 0, added))


@gluon.jit
def add_up(
    part, stats, out, peak, sums, count, G: gl.constexpr, MOST: gl.constexpr, NW: gl.constexpr
):  # fmt: skip
    """Add `count` pieces of a head up, of at most MOST, in their order.

    part is [MOST, G, D], stats [MOST, G, 2], out [G, D]; peak [1] and sums [G * D / 16] or None.
    """
    D: gl.constexpr = 128
    STEP: gl.constexpr = MOST if MOST < 16 else 16
    L: gl.constexpr = gl.BlockedLayout([STEP, 1, 4], [1, 1, 32], [1, NW, 1], [2, 1, 0])
    LP: gl.constexpr = gl.SliceLayout(2, L)
    LO: gl.constexpr = gl.SliceLayout(0, L)
    g2 = gl.expand_dims(gl.arange(0, G, layout=gl.SliceLayout(0, LP)), 0)
    d1 = gl.arange(0, D, layout=gl.SliceLayout(0, LO))
    g3, d = gl.expand_dims(g2, 2), gl.expand_dims(gl.expand_dims(d1, 0), 0)
    one = gl.expand_dims(gl.arange(0, STEP, layout=gl.SliceLayout(1, LP)), 1)
    m = gl.full([G], float("-inf"), gl.float32, layout=gl.SliceLayout(0, LP))
    total = gl.full([G], 0.0, gl.float32, layout=gl.SliceLayout(0, LP))
    y = gl.full([G, D], 0.0, gl.float32, layout=LO)
    for step in gl.static_range(MOST // STEP):
        p = step * STEP + one
        at = stats + (p * G + g2) * 2
        of_piece = gl.load(at, mask=p < count, other=float("-inf"), cache_modifier=".cg")
        more = gl.load(at + 1, mask=p < count, other=0.0, cache_modifier=".cg")
        p3 = gl.expand_dims(p, 2)
        values = gl.load(
            part + (p3 * G + g3) * D + d, mask=p3 < count, other=0.0, cache_modifier=".cg"
        )
        higher = gl.maximum(m, gl.reduce(of_piece, 0, larger))
        weight = gl.exp(of_piece - gl.expand_dims(higher, 0))
        shrink = gl.exp(m - higher)
        total = total * shrink + gl.reduce(more * weight, 0, added)
        of_y = gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, LO)), 1)
        y = y * of_y + gl.reduce(values * gl.expand_dims(weight, 2), 0, added)
        m = higher
    found = (y / gl.expand_dims(gl.convert_layout(total, gl.SliceLayout(1, LO)), 1)).to(gl.bfloat16)
    g_out = gl.expand_dims(gl.arange(0, G, layout=gl.SliceLayout(1, LO)), 1)
    gl.store(out + g_out * D + gl.expand_dims(d1, 0), found)
    values = found.to(gl.float32)
    if sums is not None:
        of_16 = gl.reduce(gl.reshape(values, [G, D // 16, 16]), 2, added)
        # where they belong, in the layout that they have
        place = g_out * (D // 16) + gl.expand_dims(d1, 0) // 16
        place = gl.reduce(gl.reshape(place, [G, D // 16, 16]), 2, larger)
        gl.store(sums + place, of_16)
    if peak is not None:
        gl.store(peak, gl.reduce(gl.reduce(gl.abs(values), 1, larger), 0, larger))
