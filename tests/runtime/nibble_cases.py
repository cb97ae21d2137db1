"""Weights of up to four bits in every form, and their values in float64 by their formulas."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from quantload.quant.grid import E2M1, INT4, Grid, int_grid, table_grid, uint_grid
from quantload.quant.qtensor import Evaluation, QuantTensor

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
UNIT = {BF16: 2.0**-8, F16: 2.0**-11, F32: 2.0**-24}  # largest relative error of rounding
NF4 = table_grid("nf4", tuple(math.tanh((code - 7.3) / 5) for code in range(16)))


@dataclass(frozen=True)
class Case:
    """A kind of weight: columns of a group (0: all), dtypes of the parts, use of `outer`."""

    grid: Grid
    group: int
    zero: torch.dtype | None = None
    offset: torch.dtype | None = None
    outer: tuple[str, str] | None = None
    scale: torch.dtype = BF16
    act_order: bool = False


CASES = {
    "int4-g128": Case(INT4, 128),
    "int4-g64": Case(INT4, 64, scale=F16),
    "int4-g32": Case(INT4, 32),
    "int4-g16": Case(INT4, 16),
    "int4-g256": Case(INT4, 256),
    "int4-channel": Case(INT4, 0, scale=F32),
    "int4-g128-zero": Case(INT4, 128, zero=torch.int8),
    "int4-g32-zero": Case(INT4, 32, zero=torch.int32),
    "int4-channel-zero": Case(INT4, 0, zero=torch.int8),
    "int4-g128-act-order": Case(INT4, 128, act_order=True),
    "int4-g32-zero-act-order": Case(INT4, 32, zero=torch.int8, act_order=True),
    "int4-g128-outer": Case(INT4, 128, outer=("scale*", "row")),
    "int2-g64": Case(int_grid(2), 64),
    "int3-g128-zero": Case(int_grid(3), 128, zero=torch.int8),
    "uint4-g64": Case(uint_grid(4), 64),
    "uint4-g128-zero": Case(uint_grid(4), 128, zero=torch.uint8, scale=F16),
    "uint4-g64-offset": Case(uint_grid(4), 64, offset=F16, scale=F16),
    "uint4-g128-zero-float": Case(uint_grid(4), 128, zero=F16, scale=F16),
    "uint4-channel-offset": Case(uint_grid(4), 0, offset=F32, scale=F32),
    "uint2-g32-offset-outer": Case(uint_grid(2), 32, offset=F32, outer=("scale*", "row")),
    "uint2-g32-offset-outer-values": Case(uint_grid(2), 32, offset=F32, outer=("value/", "row")),
    "mxfp4": Case(E2M1, 32, scale=torch.float8_e8m0fnu),
    "nvfp4": Case(E2M1, 16, scale=torch.float8_e4m3fn, outer=("scale/", "tensor")),
    "nf4-g64": Case(NF4, 64, scale=F32),
}


def make_weight(case: Case, n: int, k: int, *, seed: int = 0) -> QuantTensor:
    """A random weight [n, k] whose codes take every value of the grid."""
    generator = torch.Generator().manual_seed(seed)
    grid, group = case.grid, case.group or k
    shape = (n, -(-k // group))

    def uniform(size, low, high):
        return torch.rand(size, generator=generator) * (high - low) + low

    low, high = (grid.low, grid.high) if grid.table is None else (0, 15)
    codes = torch.randint(int(low), int(high) + 1, (n, k), generator=generator).to(grid.storage)
    zero = offset = outer = group_of = None
    if case.zero is not None:
        zero = uniform(shape, grid.low, grid.high)
        zero = (zero if case.zero.is_floating_point else zero.round()).to(case.zero)
    if case.offset is not None:
        offset = uniform(shape, -0.2, 0.2).to(case.offset)
    if case.outer is not None:
        outer = uniform((n if case.outer[1] == "row" else 1, 1), 0.5, 3.0)
    if case.act_order:
        group_of = (torch.arange(k) // group)[torch.randperm(k, generator=generator)].int()
    return QuantTensor(
        grid=grid,
        codes=codes,
        scale=uniform(shape, 0.005, 0.02).to(case.scale),
        block=(1, group),
        evaluation=Evaluation(F32, case.outer[0] if case.outer else "scale*"),
        zero=zero,
        offset=offset,
        outer=outer,
        group_of=group_of,
    )


def oracle(weight: QuantTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight [n, k] in float64 by the formulas of QuantTensor, and the size of its terms."""
    group = torch.arange(weight.shape[1], device=weight.device) // weight.block[1]
    if weight.group_of is not None:
        group = weight.group_of.long()

    def spread(part):
        return 0.0 if part is None else part.float().double()[:, group]

    if weight.grid.table is None:
        value = weight.codes.float().double()
    else:
        table = torch.tensor(weight.grid.table, dtype=torch.float64, device=weight.device)
        value = table[weight.codes.long()]
    scale, zero, offset = spread(weight.scale), spread(weight.zero), spread(weight.offset)
    factor = 1.0 if weight.outer is None else weight.outer.double()
    if weight.evaluation.outer.endswith("/"):
        factor = 1 / factor
    if weight.evaluation.outer.startswith("scale"):
        scale, factor = scale * factor, 1.0
    values = ((value - zero) * scale + offset) * factor
    sizes = ((value.abs() + abs(zero)) * abs(scale) + abs(offset)) * abs(factor)
    return values, sizes


def allowed(x, weight: QuantTensor, *, rounds_values: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The product in float64, and the error that float32 sums and x's dtype explain.

    Args:
        x: [M, K].
        weight: W, on x's device.
        rounds_values: W itself is rounded to x's dtype, in two steps at most.
    """
    values, sizes = oracle(weight)
    exact = x.double() @ values.t()
    size = x.double().abs() @ sizes.t()
    of_sums = (64 + weight.shape[1] / 16) * 2.0**-23
    of_values = 0.0
    if rounds_values or weight.grid.name == "nf4":
        of_values = 2 * UNIT[x.dtype]
    return exact, size * (of_sums + of_values) + exact.abs() * UNIT[x.dtype] + 1e-30
