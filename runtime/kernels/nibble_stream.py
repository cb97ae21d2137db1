"""Few tokens times a weight of nibbles, read as one stream: a warp of its own keeps memory busy.

Programs stay on their multiprocessors and work through tiles of output features; one warp asks for
words, scales and inputs several steps ahead and across tiles, so that memory never waits for a tile
to end or to begin. Words of the first steps are asked for before the kernel in front has ended. As
in `nibble_parallel`, warps share out K: each has blocks of its own.

Grid: as many programs as fit, each for every so many tiles of BN output features. sm_90 only.
Limit: memory.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra import cuda

from quantload.runtime.kernels.nibble_groups import four_scales, four_zeros
from quantload.runtime.kernels.nibble_values import unpack4

__all__ = ["described_groups", "described_inputs", "described_words", "stream_kernel"]


def described_words(words: Tensor, tile: list[int]) -> TensorDescriptor:
    """Words [B, N, C] in tiles [S, BN, C]."""
    layout = gl.NVMMASharedLayout(2 * words.shape[2], element_bitwidth=16, rank=3)
    return TensorDescriptor(words, list(words.shape), list(words.stride()), tile, layout)


def described_groups(part: Tensor, tile: list[int]) -> TensorDescriptor:
    """Scales or zero points [B, N] int32 or int64 in tiles [S, BN]."""
    layout = gl.NVMMASharedLayout(0, element_bitwidth=8 * part.element_size(), rank=2)
    return TensorDescriptor(part, list(part.shape), list(part.stride()), tile, layout)


def described_inputs(x: Tensor, blocks: int, tile: list[int]) -> TensorDescriptor:
    """Inputs [M, K] as [M, B, 4 C] in tiles [XM, S, C]."""
    layout = gl.NVMMASharedLayout(2 * tile[2], element_bitwidth=16, rank=3)
    strides = [x.stride(0), 4 * tile[2], 1]
    return TensorDescriptor(x, [x.shape[0], blocks, 4 * tile[2]], strides, tile, layout)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _ask_weight(
    wd, sd, zd, w_tiles, s_tiles, z_tiles, bar, stage, row, n,
    KIND: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    tma.async_copy_global_to_shared(wd, [row, n, 0], bar, w_tiles.index(stage))
    if KIND != "none":
        tma.async_copy_global_to_shared(sd, [row, n], bar, s_tiles.index(stage))
    if FORM == "zero":
        tma.async_copy_global_to_shared(zd, [row, n], bar, z_tiles.index(stage))


@gluon.jit
def _ask_inputs(xd, x_tiles, bar, stage, row, C: gl.constexpr):
    for slot in gl.static_range(4):
        tma.async_copy_global_to_shared(
            xd, [0, row, slot * C], bar, x_tiles.index(stage * 4 + slot)
        )


@gluon.jit
def _produce(
    xd, wd, sd, zd, x_tiles, w_tiles, s_tiles, z_tiles, full, free, N, steps,
    S: gl.constexpr, BN: gl.constexpr, XM: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr,
    KIND: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """Ask for what each step of each tile needs, as stages become free."""
    OF_SCALES: gl.constexpr = sd.dtype.primitive_bitwidth // 8 if KIND != "none" else 0
    OF_GROUPS: gl.constexpr = OF_SCALES + (4 if FORM == "zero" else 0)
    BYTES: gl.constexpr = S * BN * (2 * C + OF_GROUPS) + S * XM * 8 * C
    tiles = (N + BN - 1) // BN
    mine = (tiles - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)
    total = mine * steps
    cuda.gdc_launch_dependents()
    for count in range(0, gl.minimum(total, STAGES)):
        bar = full.index(count)
        n = (gl.program_id(0) + count // steps * gl.num_programs(0)) * BN
        mbarrier.expect(bar, BYTES)
        _ask_weight(
            wd, sd, zd, w_tiles, s_tiles, z_tiles, bar, count, count % steps * S, n, KIND, FORM
        )
    cuda.gdc_wait()
    for count in range(0, gl.minimum(total, STAGES)):
        _ask_inputs(xd, x_tiles, full.index(count), count, count % steps * S, C)
    for count in range(STAGES, total):
        stage = count % STAGES
        n = (gl.program_id(0) + count // steps * gl.num_programs(0)) * BN
        mbarrier.wait(free.index(stage), count // STAGES & 1 ^ 1)
        bar = full.index(stage)
        row = count % steps * S
        mbarrier.expect(bar, BYTES)
        _ask_weight(wd, sd, zd, w_tiles, s_tiles, z_tiles, bar, stage, row, n, KIND, FORM)
        _ask_inputs(xd, x_tiles, bar, stage, row, C)


@gluon.jit
def _inputs(x_tiles, index, shape: gl.constexpr, right: gl.constexpr):
    """Load the inputs of a slice as [S, C, BM]; one row serves as all."""
    tile = x_tiles.index(index).permute([1, 2, 0]).load(right)
    if tile.shape[2] == shape[2]:
        return tile
    else:
        return tile.broadcast_to(shape)


@gluon.jit
def _consume(
    x_tiles, w_tiles, s_tiles, z_tiles, full, free, outer, bias, out, M, N, steps,
    S: gl.constexpr, BN: gl.constexpr, XM: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr,
    KIND: gl.constexpr, FORM: gl.constexpr, GROUP_SLICES: gl.constexpr, WARPS_K: gl.constexpr,
):  # fmt: skip
    warps: gl.constexpr = gl.num_warps()
    BM: gl.constexpr = 8 if XM < 8 else XM
    sums: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[WARPS_K, warps // WARPS_K, 1], instr_shape=[1, 16, 8]
    )
    left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums, k_width=2)
    right: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=sums, k_width=2)
    of_value: gl.constexpr = gl.SliceLayout(2, left)
    of_row: gl.constexpr = gl.SliceLayout(2, sums)
    tile_sums: gl.constexpr = gl.SliceLayout(0, sums)
    dtype: gl.constexpr = x_tiles.dtype
    tiles = (N + BN - 1) // BN
    none = gl.full([S, BN, BM], 0.0, gl.float32, layout=sums)
    count = 0
    for pn in range(gl.program_id(0), tiles, gl.num_programs(0)):
        acc = gl.full([S, BN, BM], 0.0, gl.float32, layout=sums)
        for _ in range(0, steps):
            stage = count % STAGES
            mbarrier.wait(full.index(stage), count // STAGES & 1)
            words = w_tiles.index(stage).load(left)
            raw = s_tiles.index(stage).load(of_row) if KIND != "none" else 0
            raw_zero = z_tiles.index(stage).load(of_value) if FORM == "zero" else 0
            x0 = _inputs(x_tiles, stage * 4, [S, C, BM], right)
            x1 = _inputs(x_tiles, stage * 4 + 1, [S, C, BM], right)
            x2 = _inputs(x_tiles, stage * 4 + 2, [S, C, BM], right)
            x3 = _inputs(x_tiles, stage * 4 + 3, [S, C, BM], right)
            mbarrier.arrive(free.index(stage), count=1)
            zeros = four_zeros(raw_zero, FORM, GROUP_SLICES)
            w0, w1, w2, w3 = unpack4(words, zeros, 0, FORM, dtype, False)
            s0, s1, s2, s3 = four_scales(raw, KIND, GROUP_SLICES)
            if KIND == "none":
                acc = mma_v2(w0, x0, acc)
                acc = mma_v2(w1, x1, acc)
                acc = mma_v2(w2, x2, acc)
                acc = mma_v2(w3, x3, acc)
            elif GROUP_SLICES == 1:
                acc += mma_v2(w0, x0, none) * s0
                acc += mma_v2(w1, x1, none) * s1
                acc += mma_v2(w2, x2, none) * s2
                acc += mma_v2(w3, x3, none) * s3
            elif GROUP_SLICES == 2:
                g = mma_v2(w0, x0, none)
                acc += mma_v2(w1, x1, g) * s0
                h = mma_v2(w2, x2, none)
                acc += mma_v2(w3, x3, h) * s2
            else:
                g = mma_v2(w0, x0, none)
                g = mma_v2(w1, x1, g)
                g = mma_v2(w2, x2, g)
                acc += mma_v2(w3, x3, g) * s0
            count += 1
        y = gl.reduce(acc, 0, _add)
        n = pn * BN + gl.arange(0, BN, layout=gl.SliceLayout(1, tile_sums))
        m = gl.arange(0, BM, layout=gl.SliceLayout(0, tile_sums))
        rows = gl.minimum(n, N - 1)
        if outer is not None:
            y = y * gl.expand_dims(gl.load(outer + rows), 1)
        if bias is not None:
            y = y + gl.expand_dims(gl.load(bias + rows).to(gl.float32), 1)
        place = out + gl.expand_dims(m, 0) * N + gl.expand_dims(n, 1)
        inside = (gl.expand_dims(n, 1) < N) & (gl.expand_dims(m, 0) < M)
        gl.store(place, y.to(dtype), mask=inside)


@gluon.jit(do_not_specialize=["M", "steps"])
def stream_kernel(
    xd, wd, sd, zd, outer, bias, out, M, N, steps,
    S: gl.constexpr, BN: gl.constexpr, XM: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr,
    KIND: gl.constexpr, FORM: gl.constexpr, GROUP_SLICES: gl.constexpr, WARPS_K: gl.constexpr,
):  # fmt: skip
    """Write out [M, N]; a step is S blocks of K, which WARPS_K warps share out.

    XM rows of inputs are brought: 1, which all columns of the tensor core share, or 8 or more.
    """
    w_tiles = gl.allocate_shared_memory(gl.int16, [STAGES, S, BN, C], wd.layout)
    x_tiles = gl.allocate_shared_memory(xd.dtype, [STAGES * 4, XM, S, C], xd.layout)
    if KIND != "none":
        s_tiles = gl.allocate_shared_memory(sd.dtype, [STAGES, S, BN], sd.layout)
    else:
        s_tiles = w_tiles
    if FORM == "zero":
        z_tiles = gl.allocate_shared_memory(gl.int32, [STAGES, S, BN], zd.layout)
    else:
        z_tiles = w_tiles
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(free.index(s), count=1)
    gl.warp_specialize(
        [
            (
                _consume,
                (x_tiles, w_tiles, s_tiles, z_tiles, full, free, outer, bias, out, M, N, steps,
                 S, BN, XM, C, STAGES, KIND, FORM, GROUP_SLICES, WARPS_K),
            ),
            (
                _produce,
                (xd, wd, sd, zd, x_tiles, w_tiles, s_tiles, z_tiles, full, free, N, steps,
                 S, BN, XM, C, STAGES, KIND, FORM),
            ),
        ],
        [1],
        [24],
    )  # fmt: skip
