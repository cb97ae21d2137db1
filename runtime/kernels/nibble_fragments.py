"""Products of nibbles as they lie in fragments of `mma.m16n8k16`, for `nibble_stream.py`.

A word holds a nibble of each of 4 slices of a block; one `lop3` makes 128 + code of two of them.
What is too much is 136 times the sum of x. Registers of x are those of the right operand.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["excess_of", "inputs_at", "plus_block"]


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
def inputs_at(at):
    """Load the x of a half of a block: 8 columns of each of 4 slices."""
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
def excess_of(c, x):
    """Add -136 times the sum of a half of x to sums."""
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
def plus_block(low, high, w, s, x0, x1, e0, e1, nothing, odd, there, EVEN: gl.constexpr):
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
