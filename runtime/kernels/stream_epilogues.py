"""What streamed products of one token do with their sums: norm behind them, gated unit, residual.

    factor    1 / rms of the stream, from the sums of squares of its parts of 16
    GLU       silu(gate) * up
    RESIDUAL  hidden + y; that times the weight of the next norm; of each 16 the sum of squares

Each can also tell the largest magnitude of each 16 of what the next product reads, which then
quantizes that without looking at it first; or their sum, which a product of nibbles needs.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra import libdevice

from quantload.runtime.kernels.warp_streams import highest, sum_of_parts, summed

__all__ = [
    "of_rows",
    "rms_factor",
    "squares_of_lane",
    "sum_of_rows",
    "write_gated",
    "write_plain",
    "write_residual",
]


@gluon.jit
def of_rows(place, first, count, thread, STEPS: gl.constexpr, T: gl.constexpr):
    """Load what a thread needs for its rows at the end, long before: nobody waits for it then."""
    found = ()
    for u in gl.static_range(STEPS):
        new = gl.load(place + first + gl.minimum(u * T + thread, count - 1))
        found = found + (new,)  # type: ignore[assignment]  # noqa: RUF005
    return found


@gluon.jit
def squares_of_lane(squares, width, lane, TILES: gl.constexpr):
    """Return a lane's part of the sum over squares of 16 each."""
    total = lane * 0.0
    for u in gl.static_range(TILES // 32):
        tile = lane + 32 * u
        total = total + gl.load(squares + tile, mask=tile < width // 16, other=0.0)
    return total


@gluon.jit
def rms_factor(part, width, eps):
    """Return 1 / rms of lanes' parts of a sum of squares, in every lane."""
    return gl.rsqrt(summed(part, 32) / width + eps)


@gluon.jit
def sum_of_rows(part, bias, row, factor, R: gl.constexpr, NW: gl.constexpr):
    """Return results of rows: the sum of all warps' parts times a factor, with a bias."""
    y = sum_of_parts(part, R * 64, NW) * factor
    if bias is not None:
        y = y + gl.load(bias + row).to(gl.float32)
    return y


@gluon.jit
def _write_parts(parts, values, row, inside, PEAKS: gl.constexpr):
    """Write of each 16 values the largest magnitude, or the sum."""
    x = values.to(gl.float32)
    found = highest(gl.abs(x), 16) if PEAKS else summed(x, 16)
    gl.store(parts + row // 16, found, mask=inside & (row % 16 == 0))


@gluon.jit
def write_plain(y, out, row, inside):
    """Write results as they are."""
    gl.store(out + row, y.to(gl.bfloat16), mask=inside)


@gluon.jit
def write_gated(gate, up, out, parts, row, inside, PEAKS: gl.constexpr):
    """Write silu(gate) * up with the roundings of a model's own code."""
    gate, up = gate.to(gl.bfloat16).to(gl.float32), up.to(gl.bfloat16).to(gl.float32)
    act = gl.div_rn(gate, 1.0 + libdevice.exp(-gate)).to(gl.bfloat16).to(gl.float32)
    values = (act * up).to(gl.bfloat16)
    gl.store(out + row, values, mask=inside)
    _write_parts(parts, values, row, inside, PEAKS)


@gluon.jit
def write_residual(
    y, before, weight, out, scaled, squares, parts, row, inside,
    OFFSET: gl.constexpr, PEAKS: gl.constexpr,
):  # fmt: skip
    """Write the sum with the stream, that times the norm's weight, and what belongs to it."""
    h, w = before.to(gl.float32), weight.to(gl.float32)
    if OFFSET:
        w = 1.0 + w
    h = (h + y.to(gl.bfloat16).to(gl.float32)).to(gl.bfloat16)
    gl.store(out + row, h, mask=inside)
    h = h.to(gl.float32)
    gl.store(squares + row // 16, summed(h * h, 16), mask=inside & (row % 16 == 0))
    values = (h * w).to(gl.bfloat16)
    gl.store(scaled + row, values, mask=inside)
    _write_parts(parts, values, row, inside, PEAKS)
