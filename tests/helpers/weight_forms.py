"""Weights of every form that a `QuantTensor` has, random, with their values in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from quantload.quant.grid import E2M1, E4M3, E5M2, INT4, INT8, Grid, int_grid, table_grid, uint_grid
from quantload.quant.qtensor import Evaluation, QuantTensor

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
NF4 = table_grid("nf4", tuple(math.tanh((code - 7.3) / 5) for code in range(16)))


@dataclass(frozen=True)
class Case:
    """A kind of weight; `zero`, `offset` are dtypes, `outer` is a use, and "tensor" or "row"."""

    grid: Grid
    block: tuple[int, int]  # 0: all rows, all columns
    zero: torch.dtype | None = None
    offset: torch.dtype | None = None
    outer: tuple[str, str] | None = None
    scale: torch.dtype = BF16
    act_order: bool = False


CASES = {
    "int4-g128": Case(INT4, (1, 128)),
    "int4-g64-zero": Case(INT4, (1, 64), zero=torch.int8),
    "int4-g32-act-order": Case(INT4, (1, 32), zero=torch.int8, act_order=True),
    "int4-g24-f16": Case(INT4, (1, 24), scale=F16),
    "int4-g10": Case(INT4, (1, 10), zero=torch.int8, scale=F32),
    "int4-channel": Case(INT4, (1, 0)),
    "int4-g32-zero-int32": Case(INT4, (1, 32), zero=torch.int32),
    "int2-g64": Case(int_grid(2), (1, 64)),
    "int3-tensor-zero": Case(int_grid(3), (0, 0), zero=torch.int8),
    "uint4-g32-zero": Case(uint_grid(4), (1, 32), zero=torch.uint8, scale=F16),
    "uint4-g64-offset": Case(uint_grid(4), (1, 64), offset=F16, scale=F16),
    "uint4-g32-zero-float": Case(uint_grid(4), (1, 32), zero=F16, scale=F16),
    "uint4-channel-offset": Case(uint_grid(4), (1, 0), offset=F32, scale=F32),
    "uint2-g16-offset-outer": Case(uint_grid(2), (1, 16), offset=F32, outer=("scale*", "row")),
    "uint2-g16-offset-outer-values": Case(
        uint_grid(2), (1, 16), offset=F32, outer=("value/", "row")
    ),
    "int5-g32": Case(int_grid(5), (1, 32)),
    "int8-channel": Case(INT8, (1, 0), scale=F32),
    "int8-g128-zero": Case(INT8, (1, 128), zero=torch.int8),
    "uint8-g40-zero-act-order": Case(uint_grid(8), (1, 40), zero=torch.uint8, act_order=True),
    "uint8-block-offset": Case(uint_grid(8), (8, 48), offset=F32, scale=F32),
    "uint8-zero-int8": Case(uint_grid(8), (1, 64), zero=torch.int8),
    "e4m3-tensor-outer": Case(E4M3, (0, 0), outer=("value*", "row"), scale=F32),
    "e4m3-channel": Case(E4M3, (1, 0), scale=F32),
    "e4m3-block": Case(E4M3, (128, 128), scale=F32),
    "e4m3-block-zero": Case(E4M3, (3, 32), zero=F32, scale=F32),
    "e5m2-channel": Case(E5M2, (1, 0), scale=F32),
    "e2m1-g16-outer": Case(E2M1, (1, 16), scale=torch.float8_e4m3fn, outer=("scale/", "tensor")),
    "e2m1-g32-e8m0": Case(E2M1, (1, 32), scale=torch.float8_e8m0fnu),
    "nf4-g64": Case(NF4, (1, 64), scale=F32),
}


def make_weight(case: Case, n: int, k: int, *, seed: int = 0) -> QuantTensor:
    """A random weight [n, k] whose codes take every value of the grid."""
    generator = torch.Generator().manual_seed(seed)
    grid, block = case.grid, (case.block[0] or n, case.block[1] or k)
    shape = (-(-n // block[0]), -(-k // block[1]))

    def uniform(size, low, high):
        return torch.rand(size, generator=generator) * (high - low) + low

    def integers(size, low, high):
        return torch.randint(int(low), int(high) + 1, size, generator=generator)

    if grid.is_float8:
        codes = (torch.randn((n, k), generator=generator) * 30).to(grid.storage)
    elif grid.table is not None:
        codes = integers((n, k), 0, len(grid.table) - 1).to(grid.storage)
    else:
        codes = integers((n, k), grid.low, grid.high).to(grid.storage)
    zero = offset = outer = group_of = None
    if case.zero is not None:
        zero = uniform(shape, grid.low, grid.high)
        zero = (zero if case.zero.is_floating_point else zero.round()).to(case.zero)
    if case.offset is not None:
        offset = uniform(shape, -0.2, 0.2).to(case.offset)
    if case.outer is not None:
        outer = uniform((n if case.outer[1] == "row" else 1, 1), 0.5, 3.0)
    if case.act_order:
        group_of = (torch.arange(k) // block[1])[torch.randperm(k, generator=generator)]
    return QuantTensor(
        grid=grid,
        codes=codes,
        scale=uniform(shape, 0.005, 0.02).to(case.scale),
        block=block,
        evaluation=Evaluation(F32, case.outer[0] if case.outer else "scale*"),
        zero=zero,
        offset=offset,
        outer=outer,
        group_of=None if group_of is None else group_of.int(),
    )


def oracle(weight: QuantTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight [n, k] in float64 by the formulas of QuantTensor, and the size of its terms."""
    n, k = weight.shape
    device = weight.device
    row = torch.arange(n, device=device)[:, None] // weight.block[0]
    group = torch.arange(k, device=device) // weight.block[1]
    if weight.group_of is not None:
        group = weight.group_of.long()

    def spread(part):
        return 0.0 if part is None else part.float().double()[row, group[None, :]]

    if weight.grid.table is None:
        value = weight.codes.float().double()
    else:
        table = torch.tensor(weight.grid.table, dtype=torch.float64, device=device)
        value = table[weight.codes.long()]
    scale, zero, offset = spread(weight.scale), spread(weight.zero), spread(weight.offset)
    factor = 1.0 if weight.outer is None else weight.outer.double()
    if weight.evaluation.outer.endswith("/"):
        factor = 1 / factor
    if weight.evaluation.outer.startswith("scale"):
        scale = scale * factor
        factor = 1.0
    values = ((value - zero) * scale + offset) * factor
    sizes = ((value.abs() + abs(zero)) * scale + abs(offset)) * abs(factor)
    return values, sizes
