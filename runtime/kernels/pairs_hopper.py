"""GEMM with weights that are unpacked in registers, on sm_90: TMA rings, wgmma, PDL.

    y[m, n] = x_scale[m] * outer[n] * sum over groups g of
                  scale[g, r] * sum over k in g of (value[n, k] - zero[g, r]) * x[m, k]  + bias[n]

W comes in words of two codes from two slices of C columns: int16 words of two bytes (`byte_layout`,
x bfloat16 or float16) or bytes of two nibbles (`nibble_rounded_layout`, x int8 or e4m3). A program
has a ring of STAGES units of 2 CS columns of W and of x, that the copy engine fills. It asks for
its first units of W before the kernel ahead of it has ended (weights do not change), waits for
that kernel, asks for x, and then unpacks a unit of W into the registers that the tensor core takes
its left operand from, while the others arrive. K is cut among programs where there are few tiles:
the last of a tile sums the parts in order.

Written in Gluon (Triton's language of explicit layouts): `tl.load` issues copies of 16 bytes a
thread, and asks for W and x together.

Grid: (tiles, parts of K). Masked: rows past M and N; TMA fills with zeros past M and K. Rows of x
are a multiple of 16 bytes apart. Limit: memory up to about 64 tokens, tensor cores above.

Letters: M tokens, N output features, K input features, G groups of columns, R blocks of rows (r is
that of n), C columns of a slice, CS columns of it that are a step, BN, BM rows of W and tokens of a
tile.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, type-arg"
from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quantload.runtime.kernels.byte_unpack import scale_values, unpack2
from quantload.runtime.kernels.nibble_rounded_layout import unpack_pair
from quantload.runtime.kernels.pairs_result import finished, store_tile
from quantload.runtime.kernels.split_locks import split_locks
from quantload.runtime.launch_settings import Settings

__all__ = ["launch_hopper", "pairs_gemm_hopper"]


@gluon.jit
def _ask_w(w_desc, w_ring, ready, n, N, unit, place, C: gl.constexpr, wanted):
    CS: gl.constexpr = w_desc.block_type.shape[1]
    at = [unit // (C // CS) * N + n, unit % (C // CS) * CS]
    tma.async_copy_global_to_shared(w_desc, at, ready.index(place), w_ring.index(place), wanted)


@gluon.jit
def _ask_x(x_desc, x_ring, ready, m, unit, place, C: gl.constexpr, wanted):
    CS: gl.constexpr = x_desc.block_type.shape[1]
    k = unit // (C // CS) * (2 * C) + unit % (C // CS) * CS
    for slot in gl.static_range(2):
        tma.async_copy_global_to_shared(
            x_desc, [m, k + slot * C], ready.index(place), x_ring.index(2 * place + slot), wanted
        )


@gluon.jit
def _values(words, zero, FORM: gl.constexpr, dtype: gl.constexpr):
    """The two tiles of operands of a tile of words."""
    if dtype == gl.bfloat16 or dtype == gl.float16:
        return unpack2(words, zero, FORM, dtype, False)
    else:
        return unpack_pair(words, FORM, False)


@gluon.jit
def _group(index, SLICES: gl.constexpr, G):
    return gl.minimum(index // SLICES, G - 1)


@gluon.jit
def _scales(scale, index, r, R, SLICES: gl.constexpr, G):
    """Load the scales of a slice."""
    if scale is None:
        return 0.0
    else:
        return gl.load(scale + _group(index, SLICES, G) * R + r)


@gluon.jit(do_not_specialize=("M", "blocks", "splits", "G", "R", "block_rows", "x_step"))
def pairs_gemm_hopper(  # noqa: C901 - what is not there is compiled out
    w_desc, x_desc, scale, zero, x_scale, outer, bias, out, partial, locks,
    M, N, blocks, splits, G, R, block_rows, x_step,
    C: gl.constexpr, FORM: gl.constexpr, SLICES: gl.constexpr, PAIRED: gl.constexpr,
    STAGES: gl.constexpr, SPLIT: gl.constexpr, BAND: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Multiply; see the top of this file.

    Args:
        w_desc: [BN, CS] of W's words [B * N, C].
        x_desc: [BM, CS] of x [M, K].
        scale: [G, R], or None.
        zero: [G, R] int8, or [1, R] where there is no `scale`, or None.
        x_scale: [M] or [1] float32 with steps of x_step, or None.
        outer: [N] float32, or None.
        bias: [N], or None.
        out: [M, N].
        partial: [tiles, splits, BN * BM] float32, with SPLIT.
        locks: [tiles] int32, zeros, with SPLIT.
        M: Tokens.
        N: Output features.
        blocks: B.
        splits: Parts of K, at most `blocks`.
        G: Groups of columns.
        R: Blocks of rows.
        block_rows: Rows that share a scale.
        x_step: See x_scale.
        C: Columns of a slice.
        FORM: Of the codes, as the layouts have it.
        SLICES: Slices of a group.
        PAIRED: Both slices of a block are of one group.
        STAGES: Places of the ring.
        SPLIT: splits > 1.
        BAND: Tiles of W that are taken with all tokens before the next ones.
        num_warps: Of a program.
    """
    BN: gl.constexpr = w_desc.block_type.shape[0]
    CS: gl.constexpr = w_desc.block_type.shape[1]
    PER_BLOCK: gl.constexpr = C // CS  # units of a block
    BM: gl.constexpr = x_desc.block_type.shape[0]
    dtype: gl.constexpr = x_desc.dtype
    INT: gl.constexpr = dtype == gl.int8
    SUM: gl.constexpr = gl.int32 if INT else gl.float32
    WIDTH: gl.constexpr = 2 if w_desc.dtype == gl.int16 else 4
    WIDE: gl.constexpr = min(BM, 128 if INT else 256)
    TILE: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, WIDE, 8 * WIDTH]
    )
    LEFT: gl.constexpr = gl.DotOperandLayout(0, TILE, WIDTH)
    N_AXIS: gl.constexpr = gl.SliceLayout(1, TILE)
    M_AXIS: gl.constexpr = gl.SliceLayout(0, TILE)

    tile, split = gl.program_id(0), gl.program_id(1)
    tiles_m = gl.cdiv(M, BM)
    band = tile // (BAND * tiles_m)
    height = gl.minimum(gl.cdiv(N, BN) - band * BAND, BAND)
    inside = tile % (BAND * tiles_m)
    n_start = (band * BAND + inside % height) * BN
    m_start = inside // height * BM
    first = split * blocks // splits * PER_BLOCK
    count = (split + 1) * blocks // splits * PER_BLOCK - first

    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BN, CS], w_desc.layout)
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [2 * STAGES, BM, CS], x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
    gdc_launch_dependents()
    SIZE: gl.constexpr = w_desc.block_type.nbytes + 2 * x_desc.block_type.nbytes
    for slot in gl.static_range(STAGES):
        mbarrier.expect(ready.index(slot), SIZE, pred=slot < count)
        _ask_w(w_desc, w_ring, ready, n_start, N, first + slot, slot, C, slot < count)
    # scales and zero points do not change either
    n = n_start + gl.arange(0, BN, layout=N_AXIS)
    m = m_start + gl.arange(0, BM, layout=M_AXIS)
    r = gl.minimum(n, N - 1) // block_rows
    s0 = _scales(scale, 2 * (first // PER_BLOCK), r, R, SLICES, G)
    s1 = _scales(scale, 2 * (first // PER_BLOCK) + 1, r, R, SLICES, G)
    zero_at = None
    z0 = None
    if zero is not None:
        of_left = gl.arange(0, BN, layout=gl.SliceLayout(1, LEFT))
        zero_at = zero + gl.minimum(n_start + of_left, N - 1) // block_rows
        z0 = gl.load(zero_at + _group(2 * (first // PER_BLOCK), SLICES, G) * R)
    gdc_wait()
    for slot in gl.static_range(STAGES):
        _ask_x(x_desc, x_ring, ready, m_start, first + slot, slot, C, slot < count)

    # sums of a step apart
    GROUPED: gl.constexpr = not (scale is None and (INT or WIDTH == 2))
    nothing = gl.zeros([BN, BM], SUM, layout=TILE)
    total = gl.zeros([BN, BM], gl.float32 if GROUPED else SUM, TILE)
    for step in range(count):
        place = step % STAGES
        s0_now, s1_now = s0, s1
        following = (first + step + 1) // PER_BLOCK * 2
        s0 = _scales(scale, following, r, R, SLICES, G)
        if not PAIRED:
            s1 = _scales(scale, following + 1, r, R, SLICES, G)
        mbarrier.wait(ready.index(place), (step // STAGES) & 1)
        words = w_ring.index(place).load(LEFT)
        w0, w1 = _values(words, z0, FORM, dtype)
        if zero is not None and scale is not None:
            if not PAIRED:
                present = (first + step) // PER_BLOCK * 2 + 1
                z1 = gl.load(zero_at + _group(present, SLICES, G) * R)
                _, w1 = _values(words, z1, FORM, dtype)
            z0 = gl.load(zero_at + _group(following, SLICES, G) * R)
        x0 = x_ring.index(2 * place).permute((1, 0))
        x1 = x_ring.index(2 * place + 1).permute((1, 0))
        if not GROUPED:
            total = warpgroup_mma(w0, x0, total, is_async=True)
            total = warpgroup_mma(w1, x1, total, is_async=True)
            total = warpgroup_mma_wait(0, deps=[total])
        elif PAIRED:
            part = warpgroup_mma(w0, x0, nothing, use_acc=False, is_async=True)
            part = warpgroup_mma(w1, x1, part, is_async=True)
            part = warpgroup_mma_wait(0, deps=[part]).to(gl.float32)
            if scale is not None:
                part *= gl.expand_dims(scale_values(s0_now), 1)
            total += part
        else:
            even = warpgroup_mma(w0, x0, nothing, use_acc=False, is_async=True)
            odd = warpgroup_mma(w1, x1, nothing, use_acc=False, is_async=True)
            even = warpgroup_mma_wait(1, deps=[even]).to(gl.float32)
            total += even * gl.expand_dims(scale_values(s0_now), 1)
            odd = warpgroup_mma_wait(0, deps=[odd]).to(gl.float32)
            total += odd * gl.expand_dims(scale_values(s1_now), 1)
        gl.thread_barrier()  # all warps have read the place
        late = step + STAGES
        mbarrier.expect(ready.index(place), SIZE, pred=late < count)
        _ask_w(w_desc, w_ring, ready, n_start, N, first + late, place, C, late < count)
        _ask_x(x_desc, x_ring, ready, m_start, first + late, place, C, late < count)
    total = total.to(gl.float32)
    is_last = True
    if SPLIT:
        base = partial + (tile * splits).to(gl.int64) * (BN * BM)
        base += gl.expand_dims(gl.arange(0, BN, layout=N_AXIS), 1) * BM
        base += gl.expand_dims(gl.arange(0, BM, layout=M_AXIS), 0)
        gl.store(base + split * (BN * BM), total)
        gl.thread_barrier()
        is_last = gl.atomic_add(locks + tile, 1, sem="acq_rel") == splits - 1
    if is_last:
        if SPLIT:
            total = gl.zeros([BN, BM], gl.float32, layout=TILE)
            for part_of_k in range(splits):
                total += gl.load(base + part_of_k * (BN * BM), cache_modifier=".cg")
            gl.store(locks + tile, 0)
        y = finished(total, x_scale, outer, bias, n, m, M, N, x_step)
        store_tile(y, out, n_start, m_start, n, m, M, N, num_warps)


@functools.cache
def _layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], _TYPES[dtype])


_TYPES = {
    torch.int16: gl.int16,
    torch.int8: gl.int8,
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float8_e4m3fn: gl.float8e4nv,
}


def _for_tma(x: Tensor) -> Tensor:
    """[M, K or a little more]: rows of a multiple of 16 bytes, zeros past K."""
    per_line = 16 // x.element_size()
    missing = -x.shape[1] % per_line
    if missing:
        bits = x.contiguous().view(torch.int8) if x.element_size() == 1 else x
        return torch.nn.functional.pad(bits, (0, missing)).view(x.dtype)
    is_laid_out = x.stride(1) == 1 and x.stride(0) >= x.shape[1] and not x.stride(0) % per_line
    if is_laid_out and not x.data_ptr() % 16:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def launch_hopper(
    x: Tensor,
    words: Tensor,
    out: Tensor,
    *,
    scale: Tensor | None,
    zero: Tensor | None,
    x_scale: Tensor | None,
    outer: Tensor | None,
    bias: Tensor | None,
    form: str,
    block_rows: int,
    slices_per_group: int,
    settings: Settings,
) -> None:
    """Multiply x [M, K] with words [B, N, C] into out [M, N].

    The settings are rows and tokens of a tile, warps, stages, splits, and maybe `columns`, CS. The
    other arguments are as in `PackedBytes` and `PackedForBytes`.
    """
    x = _for_tma(x)
    (m, k), (blocks, n, columns) = x.shape, words.shape
    if words.dtype == torch.uint8:
        words = words.view(torch.int8)
    rows, tokens = settings["rows"], settings["tokens"]
    tiles, splits = -(-n // rows) * -(-m // tokens), min(settings["splits"], blocks)
    partial = locks = None
    if splits > 1:
        size = tiles * splits * rows * tokens
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
        locks = split_locks(x.device, tiles)
    of_groups = scale if scale is not None else zero
    groups, row_blocks = (1, 1) if of_groups is None else of_groups.shape
    width = min(settings.get("columns", columns), columns)
    w_tile, x_tile = [rows, width], [tokens, width]
    w_desc = TensorDescriptor(
        words, [blocks * n, columns], [columns, 1], w_tile, _layout(*w_tile, words.dtype)
    )
    x_desc = TensorDescriptor(x, [m, k], [x.stride(0), 1], x_tile, _layout(*x_tile, x.dtype))
    paired = scale is None or slices_per_group % 2 == 0
    pairs_gemm_hopper[(tiles, splits)](
        w_desc, x_desc, scale, zero, x_scale, outer, bias, out, partial, locks,
        m, n, blocks, splits, groups, row_blocks, block_rows,
        0 if x_scale is None or x_scale.numel() == 1 else 1,
        C=columns, FORM=form, SLICES=1 if scale is None else slices_per_group,
        PAIRED=paired, STAGES=settings["stages"],
        SPLIT=splits > 1,
        BAND=8, num_warps=settings["warps"], launch_pdl=True,
    )  # fmt: skip
