"""What a warp needs to stream a weight through shared memory of its own, as functions of threads.

A kernel of this kind has one tensor element a thread, lays its shared memory out itself and counts
bytes from its start: it allocates one tensor, the only one, so that it starts where shared memory
does (who launches it checks that no more was allocated). A warp has a ring of slots:

    ask     for an item, to a slot: every lane for 16 bytes at a time (`copy_tile`, `commit`)
    wait    for the oldest item (`wait_for_all_but`)
    use     read it into registers; when all lanes have (`sync`), ask for the next there

(The copy engine is no help: copies of 2 KB were slower, and deeper rings of them slower still.)
No other warp is waited for. The layout is that of fragments of `mma.m16n8k16`: lane 4 g + q holds
16 bytes at q * 16 and q * 16 + 64 of rows g and g + 8, rows being 128 bytes. Rows g of odd numbers
read the two in the other order, so that 8 lanes meet all 32 banks; so must columns g of the right
operand, and the result is in a column of the row's parity.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = [
    "commit",
    "copy_16",
    "copy_rows",
    "copy_tile",
    "float_at",
    "floats_at",
    "highest",
    "load_16",
    "rows_at",
    "shared_start",
    "store_16",
    "store_one",
    "store_rows",
    "store_two",
    "sum_of_parts",
    "summed",
    "sync",
    "wait_for_all_but",
    "words_at",
]

_IF = "{ .reg .pred p; mov.b32 $0, 0; setp.ne.b32 p, "
START = gl.constexpr("mov.u32 $0, global_smem;")
SYNC = gl.constexpr("{ mov.b32 $0, $1; bar.warp.sync 0xffffffff; }")
COMMIT = gl.constexpr("{ mov.b32 $0, $1; cp.async.commit_group; }")
WAITS = gl.constexpr(
    tuple(
        f"{{ mov.b32 $0, $1; cp.async.wait_group {left}; bar.warp.sync 0xffffffff; }}"
        for left in range(7)
    )
)
COPY_16 = gl.constexpr(_IF + "$3, 0; @p cp.async.cg.shared.global [$1], [$2], 16; }")
COPY_TILE = gl.constexpr(
    _IF + "$3, 0; @p cp.async.cg.shared.global [$1], [$2], 16; "
    "@p cp.async.cg.shared.global [$1 + 512], [$2 + 512], 16; "
    "@p cp.async.cg.shared.global [$1 + 1024], [$2 + 1024], 16; "
    "@p cp.async.cg.shared.global [$1 + 1536], [$2 + 1536], 16; }"
)
COPY_ROWS = gl.constexpr(
    "{ .reg .pred p; .reg .b64 a; mov.b32 $0, 0; setp.ne.b32 p, $4, 0; mov.b64 a, $2; "
    "@p cp.async.cg.shared.global [$1], [a], 16; add.s64 a, a, $3; "
    "@p cp.async.cg.shared.global [$1 + 512], [a], 16; add.s64 a, a, $3; "
    "@p cp.async.cg.shared.global [$1 + 1024], [a], 16; add.s64 a, a, $3; "
    "@p cp.async.cg.shared.global [$1 + 1536], [a], 16; }"
)
LOAD_16 = gl.constexpr("{ ld.global.v4.b32 {$0, $1, $2, $3}, [$4]; }")
STORE_16 = gl.constexpr(
    "{ .reg .pred p; mov.b32 $0, 0; setp.ne.b32 p, $6, 0; "
    "@p st.shared.v4.b32 [$1], {$2, $3, $4, $5}; }"
)
WORDS = gl.constexpr(
    "{ ld.shared.v4.b32 {$0, $1, $2, $3}, [$16]; ld.shared.v4.b32 {$4, $5, $6, $7}, [$17]; "
    "ld.shared.v4.b32 {$8, $9, $10, $11}, [$16 + 1024]; "
    "ld.shared.v4.b32 {$12, $13, $14, $15}, [$17 + 1024]; }"
)
WORDS_OPS = gl.constexpr(",".join(["=r"] * 16 + ["r", "r"]))
ROWS = gl.constexpr("{ ld.shared.b32 $0, [$2]; ld.shared.b32 $1, [$2 + 32]; }")
TWO = gl.constexpr("{ ld.shared.v2.b32 {$0, $1}, [$2]; }")
ONE = gl.constexpr("{ ld.shared.b32 $0, [$1]; }")
PUT_ONE = gl.constexpr(_IF + "$3, 0; @p st.shared.b32 [$1], $2; }")
PUT_TWO = gl.constexpr(_IF + "$4, 0; @p st.shared.b32 [$1], $2; @p st.shared.b32 [$1 + 4], $3; }")
PUT_ROWS = gl.constexpr(_IF + "$4, 0; @p st.shared.b32 [$1], $2; @p st.shared.b32 [$1 + 32], $3; }")
LANE_16 = gl.constexpr("shfl.sync.bfly.b32 $0, $1, 16, 0x1f, 0xffffffff;")
LANE_8 = gl.constexpr("shfl.sync.bfly.b32 $0, $1, 8, 0x1f, 0xffffffff;")
LANE_4 = gl.constexpr("shfl.sync.bfly.b32 $0, $1, 4, 0x1f, 0xffffffff;")
LANE_2 = gl.constexpr("shfl.sync.bfly.b32 $0, $1, 2, 0x1f, 0xffffffff;")
LANE_1 = gl.constexpr("shfl.sync.bfly.b32 $0, $1, 1, 0x1f, 0xffffffff;")


@gluon.jit
def shared_start(thread):
    """Return where shared memory starts."""
    return gl.inline_asm_elementwise(START, "=r,r", [thread], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def sync(thread):
    """Let no lane of a warp pass before all of them are here."""
    gl.inline_asm_elementwise(SYNC, "=r,r", [thread], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def commit(thread):
    """End a group of copies that are waited for together; empty groups count."""
    gl.inline_asm_elementwise(COMMIT, "=r,r", [thread], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_for_all_but(thread, LEFT: gl.constexpr):
    """Wait until at most LEFT groups are under way, up to 6, for all lanes of a warp."""
    TEXT: gl.constexpr = WAITS[LEFT]
    gl.inline_asm_elementwise(TEXT, "=r,r", [thread], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def copy_16(to, source, wanted):
    """Ask for 16 bytes."""
    gl.inline_asm_elementwise(
        COPY_16, "=r,r,l,r", [to, source, wanted], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def copy_tile(to, source, wanted):
    """Ask for 2 KB that lie together: 4 times 16 bytes a lane, at `source`."""
    gl.inline_asm_elementwise(
        COPY_TILE, "=r,r,l,r", [to, source, wanted], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def copy_rows(to, source, four_rows, wanted):
    """Ask for 128 bytes of 16 rows: a lane's 16 bytes of 4 rows, `four_rows` bytes apart."""
    gl.inline_asm_elementwise(
        COPY_ROWS, "=r,r,l,l,r", [to, source, four_rows, wanted],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def load_16(source):
    """Return 4 registers from memory."""
    return gl.inline_asm_elementwise(
        LOAD_16, "=r,=r,=r,=r,l", [source], dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def store_16(to, value, wanted):
    """Put 4 registers into shared memory."""
    gl.inline_asm_elementwise(
        STORE_16, "=r,r,r,r,r,r,r", [to, value[0], value[1], value[2], value[3], wanted],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def words_at(one, other):
    """Return 16 registers of a tile of 16 rows: 16 bytes at `one`, at `other`, and 8 rows below."""
    return gl.inline_asm_elementwise(
        WORDS, WORDS_OPS, [one, other], dtype=(
            gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32,
            gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32,
        ), is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def rows_at(at):
    """Return the words of rows g and g + 8, for `at` that of row g, rows being 4 bytes."""
    return gl.inline_asm_elementwise(
        ROWS, "=r,=r,r", [at], dtype=(gl.int32, gl.int32), is_pure=False, pack=1
    )


@gluon.jit
def floats_at(at):
    """Return two floats beside each other."""
    return gl.inline_asm_elementwise(
        TWO, "=f,=f,r", [at], dtype=(gl.float32, gl.float32), is_pure=False, pack=1
    )


@gluon.jit
def float_at(at):
    """Return a float."""
    return gl.inline_asm_elementwise(ONE, "=f,r", [at], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def store_one(at, one, wanted):
    """Store a float."""
    gl.inline_asm_elementwise(
        PUT_ONE, "=r,r,f,r", [at, one, wanted], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def store_two(at, one, two, wanted):
    """Store two floats beside each other."""
    gl.inline_asm_elementwise(
        PUT_TWO, "=r,r,f,f,r", [at, one, two, wanted], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def store_rows(at, low, high, wanted):
    """Store the floats of rows g and g + 8."""
    gl.inline_asm_elementwise(
        PUT_ROWS, "=r,r,f,f,r", [at, low, high, wanted], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def sum_of_parts(at, FAR: gl.constexpr, NW: gl.constexpr):
    """Return the sum over NW warps of floats FAR bytes apart, in the order of warps."""
    total = float_at(at)
    for w in gl.static_range(1, NW):
        total = total + float_at(at + w * FAR)
    return total


@gluon.jit
def _other(x, TEXT: gl.constexpr):
    return gl.inline_asm_elementwise(TEXT, "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def summed(x, LANES: gl.constexpr):
    """Return the sum over each 8, 16 or 32 lanes, in all of them."""
    if LANES == 32:
        x = x + _other(x, LANE_16)
    if LANES >= 16:
        x = x + _other(x, LANE_8)
    x = x + _other(x, LANE_4)
    x = x + _other(x, LANE_2)
    return x + _other(x, LANE_1)


@gluon.jit
def highest(x, LANES: gl.constexpr):
    """Return the largest of each 16 or 32 lanes, in all of them."""
    if LANES == 32:
        x = gl.maximum(x, _other(x, LANE_16))
    x = gl.maximum(x, _other(x, LANE_8))
    x = gl.maximum(x, _other(x, LANE_4))
    x = gl.maximum(x, _other(x, LANE_2))
    return gl.maximum(x, _other(x, LANE_1))
