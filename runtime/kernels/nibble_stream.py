"""Few tokens times a weight of nibbles, read as one stream: a warp of its own keeps memory busy.

Programs stay on their multiprocessors and work through tiles of output features; one warp asks for
words, scales and inputs several steps ahead and across tiles, so that memory never waits for a tile
to end or to begin. Words of the first steps are asked for before the kernel in front has ended. As
in `nibble_parallel`, each warp has blocks of K of its own.

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

from quantload.runtime.kernels.nibble_async import _values0, _values1, _values2, _values3

__all__ = ["described_inputs", "described_scales", "described_words", "stream_kernel"]


def described_words(words: Tensor, tile: list[int]) -> TensorDescriptor:
    """Words [B, N, C] in tiles [S, BN, C]."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    return TensorDescriptor(words, list(words.shape), list(words.stride()), tile, layout)


def described_scales(scale: Tensor, tile: list[int]) -> TensorDescriptor:
    """Scales [B, N] in tiles [S, BN]."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor(scale, list(scale.shape), list(scale.stride()), tile, layout)


def described_inputs(x: Tensor, blocks: int, tile: list[int]) -> TensorDescriptor:
    """Inputs [M, K] as [M, B, 256] in tiles [BM, S, 64]."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    strides = [x.stride(0), 256, 1]
    return TensorDescriptor(x, [x.shape[0], blocks, 256], strides, tile, layout)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _ask_words(wd, sd, w_tiles, s_tiles, bar, stage, step, pn, S: gl.constexpr, BN: gl.constexpr):
    tma.async_copy_global_to_shared(wd, [step * S, pn * BN, 0], bar, w_tiles.index(stage))
    tma.async_copy_global_to_shared(sd, [step * S, pn * BN], bar, s_tiles.index(stage))


@gluon.jit
def _ask_inputs(xd, x_tiles, bar, stage, step, S: gl.constexpr):
    for slot in gl.static_range(4):
        tma.async_copy_global_to_shared(
            xd, [0, step * S, slot * 64], bar, x_tiles.index(stage * 4 + slot)
        )


@gluon.jit
def _produce(
    xd, wd, sd, x_tiles, w_tiles, s_tiles, full, free, N, steps,
    S: gl.constexpr, BN: gl.constexpr, XM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Ask for what each step of each tile needs, as stages become free."""
    BYTES: gl.constexpr = S * BN * 132 + S * XM * 512
    tiles = (N + BN - 1) // BN
    mine = (tiles - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)
    total = mine * steps
    cuda.gdc_launch_dependents()
    for count in range(0, gl.minimum(total, STAGES)):
        bar = full.index(count)
        pn = gl.program_id(0) + count // steps * gl.num_programs(0)
        mbarrier.expect(bar, BYTES)
        _ask_words(wd, sd, w_tiles, s_tiles, bar, count, count % steps, pn, S, BN)
    cuda.gdc_wait()
    for count in range(0, gl.minimum(total, STAGES)):
        _ask_inputs(xd, x_tiles, full.index(count), count, count % steps, S)
    for count in range(STAGES, total):
        stage = count % STAGES
        pn = gl.program_id(0) + count // steps * gl.num_programs(0)
        mbarrier.wait(free.index(stage), count // STAGES & 1 ^ 1)
        bar = full.index(stage)
        mbarrier.expect(bar, BYTES)
        _ask_words(wd, sd, w_tiles, s_tiles, bar, stage, count % steps, pn, S, BN)
        _ask_inputs(xd, x_tiles, bar, stage, count % steps, S)


@gluon.jit
def _inputs(x_tiles, index, S: gl.constexpr, right: gl.constexpr):
    """Load the inputs of a slice as [S, 64, 8]; one row serves as all."""
    tile = x_tiles.index(index).permute([1, 2, 0]).load(right)
    if tile.shape[2] == 8:
        return tile
    else:
        return tile.broadcast_to([S, 64, 8])


@gluon.jit
def _consume(
    x_tiles, w_tiles, s_tiles, full, free, outer, bias, out, M, N, steps,
    S: gl.constexpr, BN: gl.constexpr, XM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    warps: gl.constexpr = gl.num_warps()
    sums: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[warps, 1, 1], instr_shape=[1, 16, 8]
    )
    left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums, k_width=2)
    right: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=sums, k_width=2)
    of_row: gl.constexpr = gl.SliceLayout(2, sums)
    tile_sums: gl.constexpr = gl.SliceLayout(0, sums)
    tiles = (N + BN - 1) // BN
    BM: gl.constexpr = 8
    zero = gl.full([S, BN, BM], 0.0, gl.float32, layout=sums)
    count = 0
    for pn in range(gl.program_id(0), tiles, gl.num_programs(0)):
        acc = gl.full([S, BN, BM], 0.0, gl.float32, layout=sums)
        for _ in range(0, steps):
            stage = count % STAGES
            mbarrier.wait(full.index(stage), count // STAGES & 1)
            words = w_tiles.index(stage).load(left)
            raw = s_tiles.index(stage).load(of_row)
            x0 = _inputs(x_tiles, stage * 4, S, right)
            x1 = _inputs(x_tiles, stage * 4 + 1, S, right)
            x2 = _inputs(x_tiles, stage * 4 + 2, S, right)
            x3 = _inputs(x_tiles, stage * 4 + 3, S, right)
            mbarrier.arrive(free.index(stage), count=1)
            s0 = gl.expand_dims((raw << 16).to(gl.float32, bitcast=True), 2)
            s1 = gl.expand_dims((raw & -65536).to(gl.float32, bitcast=True), 2)
            g = mma_v2(_values0(words), x0, zero)
            acc += mma_v2(_values1(words), x1, g) * s0
            h = mma_v2(_values2(words), x2, zero)
            acc += mma_v2(_values3(words), x3, h) * s1
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
        gl.store(place, y.to(gl.bfloat16), mask=inside)


@gluon.jit(do_not_specialize=["M", "steps"])
def stream_kernel(
    xd, wd, sd, outer, bias, out, M, N, steps,
    S: gl.constexpr, BN: gl.constexpr, XM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Write out [M, N]; a step is S blocks of K.

    XM rows of inputs are brought: 1, which all columns of the tensor core share, or 8.
    """
    w_tiles = gl.allocate_shared_memory(gl.int16, [STAGES, S, BN, 64], wd.layout)
    s_tiles = gl.allocate_shared_memory(gl.int32, [STAGES, S, BN], sd.layout)
    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 4, XM, S, 64], xd.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(free.index(s), count=1)
    gl.warp_specialize(
        [
            (
                _consume,
                (x_tiles, w_tiles, s_tiles, full, free, outer, bias, out, M, N, steps,
                 S, BN, XM, STAGES),
            ),
            (
                _produce,
                (xd, wd, sd, x_tiles, w_tiles, s_tiles, full, free, N, steps,
                 S, BN, XM, STAGES),
            ),
        ],
        [1],
        [24],
    )  # fmt: skip
