"""Attention of one token a row, each warp with keys of its own: no barrier before the end.

What `decode_attention.py` computes, for the plainest heads only. At a few rows its time is that of
its instructions, 3,700 a warp with 60 barriers for one token, not of its bytes. Here a warp has 16
keys at a time and needs 1,700:

    scores   products of queries, a row for each, and keys. 16 bytes of a key, as they lie, are what
             a lane holds of the right operand of two `mma.m16n8k16`, as the order of columns is
             free; rotary is within a lane, whose columns 32 i + 8 q + e of i and i + 2 are partners
    output   products of weights, in the registers that the first products left them in, and values:
             `prmt` puts a value of two keys into a register

The warps of a program meet in shared memory, and the last program of a head adds up what all of
them left, in their order, so the result is the same every time (`attention_pieces.py`). The first
keys and values, and the rotary tables, are asked for before the kernel ahead has ended. Tensors are
[warp, g, q, e]: element e of lane 4 g + q.

Serves: D = R = 128 in halves, bfloat16, up to 8 query heads a key head; no norm, window, bound,
sink or codes. Grid: B * KV * SPLITS programs, one for each processor at least. Masked: keys past
the length. Limit: latency.

Letters: B rows, KV key heads, G query heads that share one, D head size, R rotary columns,
L length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quantload.runtime.kernels.attention_pieces import add_up, added, larger, leave_piece
from quantload.runtime.kernels.dependent_launch import launches_early, processors

__all__ = ["attention_of_warps", "candidates", "launch", "serves", "settings_for"]

_D = 128
_GROUPS = (1, 2, 4, 8)
_KEYS = 16  # of a warp in a round


def _scores() -> str:
    """Return PTX: $0-$7 are sums of two tiles of 8 keys, $8-$23 queries, $24-$55 the keys."""
    lines = ["{ .reg .b32 z; mov.b32 z, 0;", *(f"mov.b32 ${i}, 0;" for i in range(8))]
    for at in range(0, 16, 2):
        for tile in range(2):
            sums = ", ".join(f"${4 * tile + n}" for n in range(4))
            key = 24 + 16 * tile + at
            lines.append(
                "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                f"{{{sums}}}, {{${8 + at}, z, ${9 + at}, z}}, {{${key}, ${key + 1}}}, {{{sums}}};"
            )
    return " ".join([*lines, "}"])


def _output() -> str:
    """Return PTX that adds weights times values.

    $0-$7 and $8-$15 are columns 2 q and 2 q + 1 of 8 products, $16-$19 the weights, $20-$35 values
    of keys 2 q, 2 q + 1, 2 q + 8 and 2 q + 9, $36-$51 the sums before.
    """
    lines = ["{ .reg .b32 b<2>; .reg .f32 c<2>; .reg .f32 z; mov.b32 z, 0;"]
    for j in range(8):
        select = "0x7632" if j % 2 else "0x5410"
        for half in range(2):
            one, two = 20 + 8 * half + j // 2, 24 + 8 * half + j // 2
            lines.append(f"prmt.b32 b{half}, ${one}, ${two}, {select};")
        lines.append(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            f"{{${j}, ${8 + j}, c0, c1}}, {{$16, $17, $18, $19}}, {{b0, b1}}, "
            f"{{${36 + j}, ${44 + j}, z, z}};"
        )
    return " ".join([*lines, "}"])


_TURN = "{ .reg .b32 a; .reg .b32 b; mul.rn.bf16x2 a, $1, $3; mul.rn.bf16x2 b, $2, $4; "
TURN = gl.constexpr(_TURN + "add.rn.bf16x2 $0, a, b; }")
TURN_BACK = gl.constexpr(_TURN + "sub.rn.bf16x2 $0, a, b; }")
SCORES = gl.constexpr(_scores())
SCORES_OPS = gl.constexpr(",".join(["=&f"] * 8 + ["r"] * 48))
OUTPUT = gl.constexpr(_output())
OUTPUT_OPS = gl.constexpr(",".join(["=&f"] * 16 + ["r"] * 20 + ["f"] * 16))


@gluon.jit
def _turned(x, c, s):
    """Rotary of halves: two products and their sum, each rounded to bfloat16."""
    y0, y1 = _turn(x[0], x[2], c[0], s[0], TURN_BACK), _turn(x[1], x[3], c[1], s[1], TURN_BACK)
    y2, y3 = _turn(x[2], x[0], c[2], s[2], TURN), _turn(x[3], x[1], c[3], s[3], TURN)
    return y0, y1, y2, y3


@gluon.jit
def _turn(x, y, c, s, TEXT: gl.constexpr):
    return gl.inline_asm_elementwise(
        TEXT, "=r,r,r,r,r", [x, y, c, s], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def _four(place):
    return gl.load(place), gl.load(place + 32), gl.load(place + 64), gl.load(place + 96)


@gluon.jit
def _store_four(place, a, b, c, d, first, second, third):
    gl.store(place, a)
    gl.store(place + first, b)
    gl.store(place + second, c)
    gl.store(place + third, d)


@gluon.jit
def _keys_of(place, key, stride, limit):
    """Load a tile of 8 keys; zeros from `limit` on."""
    at = place + key.to(gl.int64) * stride
    seen = key < limit
    a, b = gl.load(at, mask=seen, other=0.0), gl.load(at + 32, mask=seen, other=0.0)
    c, d = gl.load(at + 64, mask=seen, other=0.0), gl.load(at + 96, mask=seen, other=0.0)
    return a, b, c, d


@gluon.jit
def _values_of(place, key, stride, limit):
    """Load both halves of the values of a lane's four keys."""
    a0, b0 = _value_of(place, key, stride, limit)
    a1, b1 = _value_of(place, key + 1, stride, limit)
    a8, b8 = _value_of(place, key + 8, stride, limit)
    a9, b9 = _value_of(place, key + 9, stride, limit)
    return (a0, a1, a8, a9), (b0, b1, b8, b9)


@gluon.jit
def _value_of(place, key, stride, limit):
    at = place + key.to(gl.int64) * stride
    return gl.load(at, mask=key < limit, other=0.0), gl.load(at + 64, mask=key < limit, other=0.0)


@gluon.jit
def _scored(asked, k0, k1):
    (s,) = gl.inline_asm_elementwise(
        SCORES, SCORES_OPS,
        [asked[0], asked[1], asked[2], asked[3], k0[0], k0[1], k0[2], k0[3],
         k1[0], k1[1], k1[2], k1[3]],
        dtype=(gl.float32,), is_pure=True, pack=8,
    )  # fmt: skip
    return s


@gluon.jit
def _weighted(p, v, a, b):
    return gl.inline_asm_elementwise(
        OUTPUT, OUTPUT_OPS, [p, v[0], v[1], v[2], v[3], a, b],
        dtype=(gl.float32, gl.float32), is_pure=True, pack=8,
    )  # fmt: skip


@gluon.jit
def _own_score(a, b):
    """Product of each query with the new key."""
    total = a[0].to(gl.float32) * b[0].to(gl.float32) + a[1].to(gl.float32) * b[1].to(gl.float32)
    total = total + a[2].to(gl.float32) * b[2].to(gl.float32)
    total = total + a[3].to(gl.float32) * b[3].to(gl.float32)
    return gl.reduce(gl.reduce(total, 3, added), 2, added)


@gluon.jit
def attention_of_warps(
    q, k, v, cos, sin, keys, values, positions, locks, out, part, stats, peaks, sums,
    q_stride, k_stride, v_stride, row_stride, head_stride, place_stride, pairs, kv_heads, scale,
    G: gl.constexpr, SPLITS: gl.constexpr, EARLY: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Write out [B, KV * G * D] and the new keys and values; see `decode_attention`.

    part is [B * KV, SPLITS, G, D] float32, stats [B * KV, SPLITS, G, 2]. peaks, if there, gets the
    largest magnitude of each key head's part of `out`, [B * KV] float32; sums, if there, those of
    16 columns each, [B * KV * G * D / 16] float32.
    """
    NW: gl.constexpr = num_warps
    D: gl.constexpr = 128
    L4: gl.constexpr = gl.BlockedLayout([1, 1, 1, 8], [1, 8, 4, 1], [NW, 1, 1, 1], [3, 2, 1, 0])
    L2: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, L4))
    program = gl.program_id(0)
    if EARLY:
        gdc_launch_dependents()
    split, pair = program % SPLITS, gl.minimum(program // SPLITS, pairs - 1)
    b, h = pair // kv_heads, pair % kv_heads
    w2 = gl.expand_dims(gl.arange(0, NW, layout=gl.SliceLayout(1, L2)), 1)
    g2 = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(0, L2)), 0)
    w = gl.expand_dims(gl.expand_dims(w2, 2), 3)
    g = gl.expand_dims(gl.expand_dims(g2, 2), 3)
    q1 = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L4))))
    qq = gl.expand_dims(gl.expand_dims(gl.expand_dims(q1, 0), 1), 3)
    e1 = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L4))))
    e = gl.expand_dims(gl.expand_dims(gl.expand_dims(e1, 0), 1), 2)

    # neither a length nor what the cache holds of earlier steps is an earlier kernel's result
    now = gl.load(positions + b).to(gl.int32)
    ROUND: gl.constexpr = 16 * NW
    size = (now + SPLITS * ROUND - 1) // (SPLITS * ROUND) * ROUND
    size = gl.maximum(size, ROUND)
    active = gl.maximum((now + size - 1) // size, 1)
    split = gl.where(program < pairs * SPLITS, split, SPLITS)  # the others have no part
    low = split * size
    high = gl.minimum(low + size, now)
    head = b.to(gl.int64) * row_stride + h.to(gl.int64) * head_stride
    k_place = keys + head + qq * 8 + e
    v_place = values + head + g * 8 + e
    key = low + w * 16 + g
    value = low + w * 16 + 2 * qq
    k0 = _keys_of(k_place, key, place_stride, high)
    k1 = _keys_of(k_place, key + 8, place_stride, high)
    v0, v1 = _values_of(v_place, value, place_stride, high)
    turn = now * D + qq * 8 + e
    c, s = _four(cos + turn), _four(sin + turn)
    if EARLY:
        gdc_wait()

    if split < active:
        x = _four(q + b * q_stride + (h * G + gl.minimum(g, G - 1)) * D + qq * 8 + e)
        y = _four(k + b * k_stride + h * D + qq * 8 + e)
        asked, new = _turned(x, c, s), _turned(y, c, s)
        new_v = v + b * v_stride + h * D + 16 * qq + e
        n0, o0 = gl.load(new_v), gl.load(new_v + 8)
        n1, o1 = gl.load(new_v + 64), gl.load(new_v + 72)
        if split == 0:  # the first of them keeps the new token
            at = head + now.to(gl.int64) * place_stride
            _store_four(keys + at + qq * 8 + e, new[0], new[1], new[2], new[3], 32, 64, 96)
            _store_four(values + at + 16 * qq + e, n0, o0, n1, o1, 8, 64, 72)
        # the new token is what the first warp begins with
        is_first = (w2 + split * NW == 0) & (g2 >= 0)
        none = gl.full([NW, 8], 0.0, gl.float32, layout=L2)
        m = gl.where(is_first, _own_score(asked, new) * scale + none, float("-inf"))
        total = gl.where(is_first, none + 1.0, 0.0)
        nothing = gl.full([NW, 8, 4, 8], 0.0, gl.float32, layout=L4)
        begins = gl.expand_dims(gl.expand_dims(total, 2), 3)
        a0, b0 = nothing + n0.to(gl.float32) * begins, nothing + o0.to(gl.float32) * begins
        a1, b1 = nothing + n1.to(gl.float32) * begins, nothing + o1.to(gl.float32) * begins
        of_score = 8 * (e // 4) + 2 * qq + e % 2
        for start in range(low, high, ROUND):
            key = start + w * 16 + g
            value = start + w * 16 + 2 * qq
            found = _scored(asked, k0, k1) * scale
            there = (e % 4 < 2) & (start + w * 16 + of_score < high)
            found = gl.where(there, found, float("-inf"))
            higher = gl.maximum(m, gl.reduce(gl.reduce(found, 3, larger), 2, larger))
            safe = gl.where(higher == float("-inf"), 0.0, higher)
            p = gl.exp(found - gl.expand_dims(gl.expand_dims(safe, 2), 3))
            shrink = gl.exp(m - safe)
            total = total * shrink + gl.reduce(gl.reduce(p, 3, added), 2, added)
            wide = gl.expand_dims(gl.expand_dims(shrink, 2), 3)
            weight = p.to(gl.bfloat16)
            a0, b0 = _weighted(weight, v0, a0 * wide, b0 * wide)
            a1, b1 = _weighted(weight, v1, a1 * wide, b1 * wide)
            m = higher
            k0 = _keys_of(k_place, key + ROUND, place_stride, high)
            k1 = _keys_of(k_place, key + 8 + ROUND, place_stride, high)
            v0, v1 = _values_of(v_place, value + ROUND, place_stride, high)

        parts = pair * SPLITS
        leave_piece(
            m, total, a0, b0, a1, b1, part + (parts + split).to(gl.int64) * (G * D),
            stats + (parts + split) * (2 * G), L2, G, NW,
        )  # fmt: skip
        gl.thread_barrier()
        arrived = gl.atomic_add(locks + pair, 1, sem="acq_rel")
        if arrived == active - 1:
            gl.store(locks + pair, 0)
            add_up(
                part + parts.to(gl.int64) * (G * D), stats + parts * (2 * G),
                out + pair.to(gl.int64) * (G * D), None if peaks is None else peaks + pair,
                None if sums is None else sums + pair * (G * D // 16), active, G, SPLITS, NW,
            )  # fmt: skip


# -- launching -------------------------------------------------------------------------------------


def serves(
    sizes: list[int], *, plain: bool, interleaved: bool, rotary: Tensor, keys: Tensor, q: Tensor
) -> bool:
    """True for the heads named above.

    Args:
        sizes: Query heads, key heads, head size, window.
        plain: No norms, bound or sinks.
        interleaved: See `HeadRule`.
        rotary: Cosines [L, R].
        keys: [B, KV, L, D].
        q: [B, H * D].
    """
    heads, kv_heads, width, window = sizes
    known = width == _D and rotary.shape[1] == _D and not interleaved and not window and plain
    in_bf16 = q.dtype == keys.dtype == torch.bfloat16
    return known and in_bf16 and heads // kv_heads in _GROUPS and q.device.type == "cuda"


def settings_for(pairs: int, length: int) -> Mapping[str, int]:
    """Return settings that were fast on an H200: B * KV pairs, places in the cache."""
    splits = max(1, min(128, length // 8) // pairs)
    return {"splits": 1 << (splits.bit_length() - 1), "warps": 4}


def candidates(pairs: int, length: int) -> Iterator[Mapping[str, int]]:
    """Yield launch settings to be measured."""
    for splits in (1, 2, 4, 8, 16, 32):
        for warps in (1, 2, 4, 8):
            if pairs * splits <= 1024 and splits * warps * _KEYS < 2 * max(length, _KEYS):
                yield {"splits": splits, "warps": warps}


def _programs(needed: int, device: torch.device) -> int:
    """Return programs so that each processor has one, or as many as needed.

    Programs of the next kernel come two to a processor that has none, and all wait for those then.
    """
    return max(needed, processors(device)) if launches_early(device) else needed


def launch(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor,
    positions: Tensor, locks: Tensor, out: Tensor, peaks: Tensor | None, sums: Tensor | None,
    *, group: int, scale: float, splits: int, warps: int,
) -> None:  # fmt: skip
    """Write `out`; arguments as in `attention_of_warps`."""
    kv_heads = keys.shape[1]
    pairs, pieces = len(q) * kv_heads, len(q) * kv_heads * splits
    part = torch.empty(pieces * group * (_D + 2), dtype=torch.float32, device=q.device)
    early = launches_early(q.device)
    attention_of_warps[(_programs(pairs * splits, q.device),)](
        q, k, v, cos, sin, keys, values, positions, locks, out,
        part, part[pieces * group * _D :], peaks, sums,
        q.stride(0), k.stride(0), v.stride(0), keys.stride(0), keys.stride(1), keys.stride(2),
        pairs, kv_heads, scale, G=group, SPLITS=splits, EARLY=early, num_warps=warps,
        **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
