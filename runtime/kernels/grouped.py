"""Grouped product with quantized weights: rows of all experts, each times its expert's weight.

    y[p, n] = outer[e, n] * sum over groups g of scale[e, g, n]
                  * sum over k in g of (value(code[e, n, k]) - zero[e, g, n]) * x[row of p, k]
              + bias[e, n]                                       e the expert of pair p

and for the product of gate and up

    y[p, i] = min(act(min(gate, gate_limit)), act_limit) * (clamp(up, up_limit) + shift)

A program has BN rows of an expert's weight and a block of up to BM of its pairs: the transposed
product, since the wide side of a tensor-core product should be the weight. Rows of gate and up
alternate in eights, so that both are in the registers of one thread. Values of codes are exact in
bfloat16, scales meet float32 sums; blocks of 128 pairs, and of 64 where settings say so, round the
product of value and scale to bfloat16 instead (not AFTER), as PyTorch does when it dequantizes: by
2^-9 of it. Which pairs are a block's is read from `route`, or, for few pairs (DIRECT), found by
each program itself: pair number `block` leads if it is number 0, BM, 2 BM, ... of its expert, else
the program ends. Every output is summed in one fixed order.

Grid: (tiles of N, blocks). Masked: places of a block without a pair, columns past K; rows past N
repeat the last row and are not stored. Limit: memory up to some tens of pairs an expert.

Letters: S pairs, E experts here, N rows and K columns of an expert's weight, C columns of a slice,
B blocks of slices, G groups of columns.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from quantload.runtime.kernels.byte_unpack import unpack2
from quantload.runtime.kernels.dependent_launch import let_next_start, wait_for_previous
from quantload.runtime.kernels.grouped_scales import (
    ask_for,
    four_scales,
    four_zeros,
    group_row,
    plus_four,
    plus_two,
    raw_groups,
)
from quantload.runtime.kernels.nibble_folded import values4
from quantload.runtime.kernels.nibble_layout import table_registers

__all__ = ["grouped_kernel", "input_slices", "prefetch"]


@triton.jit
def _add(a, b):
    return a + b


@triton.jit
def _led_block(index, block, S, first, E, BM: tl.constexpr, SP: tl.constexpr):
    """Return the expert (or -1), the pairs [BM] and which of them exist, of the block of a pair."""
    at = tl.arange(0, SP)
    ids = (tl.load(index + at, mask=at < S, other=first - 1) - first).to(tl.int32)
    e = (tl.load(index + block) - first).to(tl.int32)
    same = (ids == e) & (at < S)
    before = tl.reduce((same & (at < block)).to(tl.int32), 0, _add)
    rank = tl.associative_scan(same.to(tl.int32), 0, _add) - 1 - before
    places = tl.arange(0, BM)
    hit = same[:, None] & (rank[:, None] == places[None, :])
    pairs = tl.reduce(tl.where(hit, at[:, None], 0), 0, _add)
    count = tl.reduce(same.to(tl.int32), 0, _add) - before
    leads = (e >= 0) & (e < E) & (before % BM == 0)
    return tl.where(leads, e, -1), pairs, places < count


@triton.jit
def _listed_block(order, blocks, block, capacity, BM: tl.constexpr):
    """Return the same of a block that `route` made."""
    e = tl.load(blocks + block)
    start = tl.load(blocks + capacity + block)
    stop = tl.load(blocks + 2 * capacity + block)
    places = tl.arange(0, BM)
    inside = (start + places < stop) & (e >= 0)
    return e, tl.load(order + start + places, mask=inside, other=0), inside


@triton.jit
def prefetch(address, BYTES: tl.constexpr):
    """Ask for BYTES at each of some addresses, so that they are in the L2 cache."""
    place = address.to(tl.int64)
    size = tl.full(place.shape, BYTES, tl.int32)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
        args=[place, size], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def input_slices(place, inside, k, K, C: tl.constexpr, SLOTS: tl.constexpr, EVEN: tl.constexpr):
    """Load the inputs [.., C, BM] of the slices of a block, of which those from K on are zero."""
    if EVEN:
        x0 = tl.load(place, mask=inside, other=0.0)
        x1 = tl.load(place + C, mask=inside, other=0.0)
        if SLOTS == 2:
            return x0, x1
        else:
            x2 = tl.load(place + 2 * C, mask=inside, other=0.0)
            return x0, x1, x2, tl.load(place + 3 * C, mask=inside, other=0.0)
    else:
        x0 = tl.load(place, mask=inside & (k < K), other=0.0)
        x1 = tl.load(place + C, mask=inside & (k < K - C), other=0.0)
        if SLOTS == 2:
            return x0, x1
        else:
            x2 = tl.load(place + 2 * C, mask=inside & (k < K - 2 * C), other=0.0)
            return x0, x1, x2, tl.load(place + 3 * C, mask=inside & (k < K - 3 * C), other=0.0)


@triton.jit
def _activated(x, alpha, ACT: tl.constexpr, INTERPRETED: tl.constexpr):
    if ACT == "silu":
        return x / (1.0 + tl.exp(-alpha * x))
    elif ACT == "gelu":
        part = x * 0.70710678118654752440
        return x * 0.5 * (1.0 + (tl.erf(part) if INTERPRETED else libdevice.erf(part)))
    elif ACT == "gelu_tanh":
        # x * (1 + tanh(t)) / 2 = x / (1 + exp(-2 t))
        inner = 0.79788456080286535588 * (x + 0.044715 * (x * x * x))
        return x / (1.0 + tl.exp(-2.0 * inner))
    elif ACT == "relu2":
        return tl.where(x <= 0.0, 0.0, x * x)
    elif ACT == "relu":
        return tl.where(x <= 0.0, 0.0, x)
    else:
        tl.static_assert(ACT == "none", "unknown activation")
        return x


@triton.jit
def _column(n, width, ROWS: tl.constexpr):
    """Return where the result of packed row n belongs, and whether it is no padding."""
    if ROWS == "plain":
        return n, n < width
    else:
        part = (n // 8) % 2
        inner = (n // 16) * 8 + n % 8
        if ROWS == "halves":
            return part * (width // 2) + inner, inner < width // 2
        else:
            return 2 * inner + part, inner < width // 2


@triton.jit
def _finished(
    acc, held, tile, N, width, outer, bias, alpha, gate_limit, act_limit, up_limit, shift,
    BN: tl.constexpr, BM: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr,
    ROWS: tl.constexpr, LIMITED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Turn sums of rows from `tile` on into results; return them, their columns, which exist."""
    n = tile + tl.arange(0, BN)
    rows = tl.minimum(n, N - 1)
    if outer is not None:
        acc *= tl.load(outer + held * N + rows)[:, None]
    if bias is not None:
        acc += tl.load(bias + held * N + rows)[:, None]
    if GATED:
        pair = tl.permute(tl.reshape(acc, (BN // 16, 2, 8, BM)), (0, 2, 3, 1))
        gate, up = tl.split(pair)
        if LIMITED:
            gate = tl.where(gate > gate_limit, gate_limit, gate)
            up = tl.where(up > up_limit, up_limit, tl.where(up < -up_limit, -up_limit, up))
        gate = _activated(gate, alpha, ACT, INTERPRETED)
        if LIMITED:
            gate = tl.where(gate > act_limit, act_limit, gate)
            up += shift
        columns = tile // 2 + tl.arange(0, BN // 2)
        return tl.reshape(gate * up, (BN // 2, BM)), columns, columns < width
    else:
        columns, is_column = _column(n, width, ROWS)
        return _activated(acc, alpha, ACT, INTERPRETED), columns, is_column


@triton.jit
def _place(
    step, rows, of_step, N, B, blocks_per_group, GROUPS: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """Return where what a step meets is: [BN], or [PARTS, BN] where it has parts."""
    if PARTS == 1:
        return group_row(step, blocks_per_group, GROUPS) * N + rows
    else:
        row = group_row(tl.minimum(step * PARTS + of_step, B - 1), blocks_per_group, GROUPS)
        return (row * N)[:, None] + rows[None, :]


@triton.jit
def _ask(
    part, step, tile, of_step, N, B, blocks_per_group,
    IS_THERE: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr, ASK: tl.constexpr,
):  # fmt: skip
    """Ask for the first line of what a step meets; loads of 4 bytes and more are pipelined."""
    if IS_THERE and ASK:  # noqa: SIM102 - only then is `part` a pointer
        if part.dtype.element_ty.primitive_bitwidth < 32:
            b = tl.minimum(step * PARTS + of_step, B - 1)
            row = group_row(b, blocks_per_group, GROUPS)
            ask_for(part, row * N + tl.minimum(tile, N - 1), IS_THERE)


@triton.jit
def _multiply(
    x, words, scale, zero, outer, bias, table, out, held, pairs, inside, tile,
    N, K, B, stride_x, width, rows_per_input, blocks_per_group,
    alpha, gate_limit, act_limit, up_limit, shift,
    BN: tl.constexpr, BM: tl.constexpr, C: tl.constexpr, FORM: tl.constexpr, SLOTS: tl.constexpr,
    KIND: tl.constexpr, GROUPS: tl.constexpr, AFTER: tl.constexpr, EVEN: tl.constexpr,
    GATED: tl.constexpr, ACT: tl.constexpr, ROWS: tl.constexpr, LIMITED: tl.constexpr,
    PARTS: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Write the results of the pairs [BM] of a block for TILES tiles of rows of its expert."""
    dtype: tl.constexpr = x.dtype.element_ty
    ASK: tl.constexpr = not INTERPRETED
    steps = (B + PARTS - 1) // PARTS
    n = tl.arange(0, BN)
    c = tl.arange(0, C)
    part = tl.arange(0, PARTS)
    x_rows = x + (pairs // rows_per_input).to(tl.int64) * stride_x
    registers = table_registers(table, FORM, INTERPRETED)
    if PARTS == 1:
        acc = tl.full((BN, BM), 0.0, tl.float32)
        x_at = x_rows[None, :] + c[:, None]
        mask = inside[None, :]
    else:
        acc = tl.full((PARTS, BN, BM), 0.0, tl.float32)
        x_at = x_rows[None, None, :] + (part * (SLOTS * C))[:, None, None] + c[None, :, None]
        mask = inside[None, None, :]
    tiles = tl.minimum(TILES, (N - tile + BN - 1) // BN)
    for i in tl.range(0, tiles * steps, num_stages=STAGES):
        step, here = _at(i, steps, tile, BN, TILES)
        rows = tl.minimum(here + n, N - 1)
        if PARTS == 1:
            words_at = words + step * N * C + rows[:, None] * C + c[None, :]
            packed = tl.load(words_at, eviction_policy="evict_first")
            k = step * (SLOTS * C) + c[:, None]
        else:
            b = step * PARTS + part
            words_at = words + (b * N)[:, None, None] * C + rows[None, :, None] * C
            packed = tl.load(
                words_at + c[None, None, :], mask=(b < B)[:, None, None], other=0,
                eviction_policy="evict_first",
            )  # fmt: skip
            k = (b * (SLOTS * C))[:, None, None] + c[None, :, None]
        inputs = input_slices(x_at + step * (PARTS * SLOTS * C), mask, k, K, C, SLOTS, EVEN)
        # scales of a step to come are on their way while this one is multiplied
        then, there = _at(tl.minimum(i + 2, tiles * steps - 1), steps, tile, BN, TILES)
        _ask(scale, then, there, part, N, B, blocks_per_group, KIND != "none", GROUPS, PARTS, ASK)
        _ask(zero, then, there, part, N, B, blocks_per_group, FORM == "zero", GROUPS, PARTS, ASK)
        place = _place(step, rows, part, N, B, blocks_per_group, GROUPS, PARTS)
        scales = four_scales(raw_groups(scale, place, KIND != "none"), KIND, GROUPS, PARTS)
        if SLOTS == 4:
            raw_zero = raw_groups(zero, place, FORM == "zero")
            zeros = four_zeros(raw_zero, FORM, GROUPS, PARTS)
            block = step if PARTS == 1 else tl.minimum(step * PARTS + part, B - 1)
            values = values4(
                packed, zeros, registers, scale, block, rows, 0, N, FORM, dtype, INTERPRETED
            )
            acc = plus_four(acc, values, inputs, scales, KIND, GROUPS, AFTER)
        else:
            values = unpack2(packed, None, FORM, dtype, INTERPRETED)
            acc = plus_two(acc, values, inputs, scales, KIND, GROUPS, AFTER)
        if step == steps - 1:
            sums = acc if PARTS == 1 else tl.reduce(acc, 0, _add)
            y, columns, is_column = _finished(
                sums, held, here, N, width, outer, bias, alpha, gate_limit, act_limit, up_limit,
                shift, BN, BM, GATED, ACT, ROWS, LIMITED, INTERPRETED,
            )  # fmt: skip
            target = out + pairs.to(tl.int64)[None, :] * width + columns[:, None]
            is_there = inside[None, :] & is_column[:, None]
            tl.store(target, y.to(out.dtype.element_ty), mask=is_there)
            acc = tl.full(acc.shape, 0.0, tl.float32)


@triton.jit
def _at(i, steps, tile, BN: tl.constexpr, TILES: tl.constexpr):
    """Return the step along K, and the first row, of iteration i over tiles and steps."""
    if TILES == 1:
        return i, tile
    else:
        return i % steps, tile + i // steps * BN


# counts that change from call to call, or from layer to layer, share a compiled kernel
_SHARED = (
    "S", "first", "E", "B", "G", "rows_per_input", "blocks_per_group", "capacity",
)  # fmt: skip


@triton.jit(do_not_specialize=_SHARED)
def grouped_kernel(
    x, words, scale, zero, outer, bias, table, index, order, blocks, out,
    S, first, E, N, K, B, G, stride_x, width, rows_per_input, blocks_per_group, capacity,
    alpha, gate_limit, act_limit, up_limit, shift,
    BN: tl.constexpr, BM: tl.constexpr, C: tl.constexpr, SP: tl.constexpr, FORM: tl.constexpr,
    SLOTS: tl.constexpr, KIND: tl.constexpr, GROUPS: tl.constexpr, AFTER: tl.constexpr,
    EVEN: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr, ROWS: tl.constexpr,
    LIMITED: tl.constexpr, EARLY: tl.constexpr, BEFORE: tl.constexpr, HALF: tl.constexpr,
    PARTS: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Write out [S, width].

    SP pairs are looked through by a program to find its own, 0 if `route` did. SLOTS (4 or 2) codes
    are in a word. GROUPS is 4 if the slices of a block share a scale, 2 or 1 if there are two or
    four groups. AFTER: scales meet sums; else values, rounded to their dtype. EVEN: K is whole
    steps. BEFORE: routing and first weights are read before the input is there. HALF: blocks of at
    most BM / 2 pairs have code of their own. PARTS blocks of slices are multiplied in a step, each
    by a warp of its own: a product of three axes. A program ends TILES tiles of rows, in one loop.
    """
    if not BEFORE:
        wait_for_previous(EARLY)
        let_next_start(EARLY)  # not sooner: the next one reads the routing before it waits
    block = tl.program_id(1)
    if SP:
        e, pairs, inside = _led_block(index, block, S, first, E, BM, SP)
        few = False
    else:
        e, pairs, inside = _listed_block(order, blocks, block, capacity, BM)
        start = tl.load(blocks + capacity + block)
        few = tl.load(blocks + 2 * capacity + block) - start <= BM // 2
    tile = tl.program_id(0) * (BN * TILES)
    held = tl.maximum(e, 0).to(tl.int64)
    words += held * B * N * C
    if BEFORE:
        if EARLY and (e >= 0) & (tile + BN <= N):
            soon = tl.minimum(tl.arange(0, 4), B - 1).to(tl.int64)
            prefetch(words + tile * C + soon * (N * C), BN * C * 2)
        wait_for_previous(EARLY)
        let_next_start(EARLY)
    if e < 0:
        return
    if scale is not None:
        scale += held * G * N
    if FORM == "zero":
        zero += held * G * N
    if HALF and few:
        _, some, here = _listed_block(order, blocks, block, capacity, BM // 2)
        _multiply(
            x, words, scale, zero, outer, bias, table, out, held, some, here, tile,
            N, K, B, stride_x, width, rows_per_input, blocks_per_group,
            alpha, gate_limit, act_limit, up_limit, shift,
            BN, BM // 2, C, FORM, SLOTS, KIND, GROUPS, AFTER, EVEN, GATED, ACT, ROWS, LIMITED,
            PARTS, TILES, STAGES, INTERPRETED,
        )  # fmt: skip
    else:
        _multiply(
            x, words, scale, zero, outer, bias, table, out, held, pairs, inside, tile,
            N, K, B, stride_x, width, rows_per_input, blocks_per_group,
            alpha, gate_limit, act_limit, up_limit, shift,
            BN, BM, C, FORM, SLOTS, KIND, GROUPS, AFTER, EVEN, GATED, ACT, ROWS, LIMITED,
            PARTS, TILES, STAGES, INTERPRETED,
        )  # fmt: skip
