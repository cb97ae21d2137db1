"""What becomes of the products of a tile that is multiplied in parts: `rounded_parts`.

A part is [64 tokens, columns] float32; COLUMNS are those of each part, TILES their layouts.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["finish", "promoted", "sum_of_splits"]


@gluon.constexpr_function
def _before(part, columns):
    """Rows of W in the parts before one."""
    return sum(columns[:part])


@gluon.jit
def _columns(n_start, part: gl.constexpr, COLUMNS: gl.constexpr, TILES: gl.constexpr):
    """Rows of W that a part of a tile has."""
    before: gl.constexpr = _before(part, COLUMNS)
    return n_start + before + gl.arange(0, COLUMNS[part], layout=gl.SliceLayout(0, TILES[part]))


@gluon.jit
def promoted(
    totals, found, x_part, w_low, w_high, n_start, edge,
    COLUMNS: gl.constexpr, TILES: gl.constexpr, STRADDLES: gl.constexpr,
):  # fmt: skip
    """Add products, times the scales of their step, to the sums."""
    sums = ()
    for part in gl.static_range(len(totals)):
        if STRADDLES:
            n = _columns(n_start, part, COLUMNS, TILES)
            of_w = gl.expand_dims(gl.where(n < edge, w_low, w_high), 0)
            rows = gl.convert_layout(x_part, gl.SliceLayout(1, TILES[part]), assert_trivial=True)
            total = totals[part] + found[part] * (gl.expand_dims(rows, 1) * of_w)
        else:
            rows = gl.convert_layout(
                x_part * w_low, gl.SliceLayout(1, TILES[part]), assert_trivial=True
            )
            total = totals[part] + found[part] * gl.expand_dims(rows, 1)
        sums = sums + (total,)  # type: ignore[assignment]  # noqa: RUF005
    return sums


@gluon.jit
def _places(start, part: gl.constexpr, COLUMNS: gl.constexpr, TILES: gl.constexpr):
    """Pointers to where a part [64, columns] lies of a tile at `start`."""
    before: gl.constexpr = _before(part, COLUMNS)
    width: gl.constexpr = COLUMNS[part]
    m = gl.arange(0, 64, layout=gl.SliceLayout(1, TILES[part]))
    n = gl.arange(0, width, layout=gl.SliceLayout(0, TILES[part]))
    return start + before * 64 + gl.expand_dims(m, 1) * width + gl.expand_dims(n, 0)


@gluon.jit
def sum_of_splits(
    totals, partial, lock, place, split, splits, BN: gl.constexpr,
    COLUMNS: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    """Put sums beside those of the other parts of K; the last program gets all, added in order."""
    start = partial + place.to(gl.int64) * splits * (64 * BN)
    for part in gl.static_range(len(totals)):
        gl.store(_places(start + split * (64 * BN), part, COLUMNS, TILES), totals[part])
    gl.thread_barrier()
    is_last = gl.atomic_add(lock, 1, sem="acq_rel") == splits - 1
    if is_last:
        sums = ()
        for part in gl.static_range(len(totals)):
            total = gl.zeros([64, COLUMNS[part]], gl.float32, layout=TILES[part])
            for of in range(splits):
                found = _places(start + of * (64 * BN), part, COLUMNS, TILES)
                total += gl.load(found, cache_modifier=".cg")
            sums = sums + (total,)  # type: ignore[assignment]  # noqa: RUF005
        totals = sums
        gl.store(lock, 0)
    return totals, is_last


@gluon.jit
def finish(
    totals, bias, out, m, n_start, M, N, COLUMNS: gl.constexpr, TILES: gl.constexpr
):  # fmt: skip
    """Add the bias; store."""
    for part in gl.static_range(len(totals)):
        n = _columns(n_start, part, COLUMNS, TILES)
        y = totals[part]
        if bias is not None:
            more = gl.load(bias + n, mask=n < N, other=0.0).to(gl.float32)
            y += gl.expand_dims(more, 0)
        rows = gl.expand_dims(
            gl.convert_layout(m, gl.SliceLayout(1, TILES[part]), assert_trivial=True), 1
        )
        place = out + rows.to(gl.int64) * N + gl.expand_dims(n, 0)
        mask = (rows < M) & gl.expand_dims(n < N, 0)
        gl.store(place, y.to(out.dtype.element_ty), mask=mask)
