"""Hypothesis strategies for quantized tensors: structure is drawn, contents come from a seed."""

from dataclasses import replace

import numpy as np
import torch
from hypothesis import strategies as st

from quantload.quant import grid as grids
from quantload.quant.qtensor import Evaluation, QuantTensor

WORKING = (torch.float32, torch.float16, torch.bfloat16)
SCALE_DTYPES = (*WORKING, torch.float8_e4m3fn, torch.float8_e8m0fnu)
ZERO_DTYPES = (torch.int8, torch.uint8, *WORKING)
ALL_GRIDS = (
    *(grids.int_grid(bits) for bits in range(2, 9)),
    *(grids.uint_grid(bits) for bits in range(2, 9)),
    grids.E4M3,
    grids.E5M2,
    grids.E2M1,
    grids.table_grid("t16", tuple(float(np.float32(0.37 * i**1.5 - 6)) for i in range(16))),
)


@st.composite
def block_sizes(draw, length):
    """A number of rows or columns that share a scale: one, all, some, or more than there are."""
    return draw(st.sampled_from([1, length, length + 3]) | st.integers(1, max(1, length)))


@st.composite
def kinds(draw):
    """What members of a stack have in common: an empty tensor's worth of decisions."""
    columns = draw(st.integers(1, 24))
    ordered = draw(st.booleans())
    return {
        "grid": draw(st.sampled_from(ALL_GRIDS)),
        "columns": columns,
        "evaluation": Evaluation(
            dtype=draw(st.sampled_from(WORKING)),
            outer=draw(st.sampled_from(["scale*", "scale/", "value*", "value/"])),
        ),
        "scale": draw(st.sampled_from(SCALE_DTYPES)),
        "form": draw(st.sampled_from(["plain", "zero", "offset"])),
        "shift": draw(st.sampled_from(ZERO_DTYPES)),
        "outer": draw(st.sampled_from([None, *WORKING])),
        "group_of": draw(st.lists(st.integers(0, 3), min_size=columns, max_size=columns))
        if ordered
        else None,
        "special": draw(st.booleans()),
    }


@st.composite
def members(draw, kind):
    """A tensor of a kind, with rows, blocks and contents of its own."""
    rows, columns = draw(st.integers(1, 14)), kind["columns"]
    block = draw(block_sizes(rows)), draw(block_sizes(columns))
    groups = -(-columns // block[1]) if kind["group_of"] is None else 4
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = -(-rows // block[0]), groups
    tensor = QuantTensor(
        grid=kind["grid"],
        codes=_codes(random, kind["grid"], (rows, columns)),
        scale=_numbers(random, shape, kind["scale"], special=kind["special"]),
        block=block,
        evaluation=kind["evaluation"],
        group_of=None
        if kind["group_of"] is None
        else torch.tensor(kind["group_of"], dtype=torch.int32),
    )
    if kind["form"] != "plain":
        dtype = kind["shift"]
        if kind["form"] == "offset" and not dtype.is_floating_point:
            dtype = torch.float16
        part = _numbers(random, shape, dtype, special=kind["special"])
        tensor = replace(tensor, **{kind["form"]: part})
    if kind["outer"] is not None:
        height = draw(st.sampled_from([None, 1, rows]))
        if height is not None:
            outer = _numbers(random, (height, 1), kind["outer"], special=kind["special"])
            tensor = replace(tensor, outer=outer)
    return tensor


@st.composite
def quant_tensors(draw):
    """Any quantized tensor."""
    return draw(members(draw(kinds())))


@st.composite
def stackable(draw):
    """Up to four tensors of one kind."""
    kind = draw(kinds())
    return draw(st.lists(members(kind), min_size=1, max_size=4))


@st.composite
def cuts(draw, length):
    """A non-empty range start..stop."""
    start = draw(st.integers(0, length - 1))
    return start, draw(st.integers(start + 1, length))


def _codes(random, grid, shape):
    if grid.is_float8:
        return torch.from_numpy(random.integers(0, 256, shape, dtype=np.uint8)).view(grid.storage)
    if grid.table is not None:
        return torch.from_numpy(random.integers(0, 16, shape, dtype=np.uint8))
    codes = random.integers(int(grid.low), int(grid.high) + 1, shape)
    return torch.from_numpy(codes).to(grid.storage)


def _numbers(random, shape, dtype, *, special):
    """Numbers of many sizes and both signs; special ones are zeros, NaN, infinities, subnormals."""
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        return torch.from_numpy(random.integers(limits.min, limits.max + 1, shape)).to(dtype)
    if dtype.itemsize == 1:
        return torch.from_numpy(random.integers(0, 256, shape, dtype=np.uint8)).view(dtype)
    numbers = random.standard_normal(shape) * 10.0 ** random.integers(-4, 3, shape)
    if special:
        odd = [0.0, -0.0, np.nan, np.inf, -np.inf, 6e-8, 1e-40, 65504.0, 3e38]
        numbers = np.where(random.random(shape) < 0.3, random.choice(odd, shape), numbers)
    return torch.from_numpy(numbers).to(dtype)
