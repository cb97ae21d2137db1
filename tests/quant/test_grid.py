"""Grids against tables decoded bit by bit."""

import narrow_floats as nf
import numpy as np
import pytest
import torch
from oracles import as_numpy, e2m1_values, e4m3_values, e5m2_values, nearest_codes, same_bits

from quantload.errors import ConfigError
from quantload.quant.grid import (
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    INT4,
    INT8,
    grid_named,
    int_grid,
    table_grid,
    uint_grid,
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ALL_BYTES = torch.arange(256, dtype=torch.uint8)
FLOAT8 = [(E4M3, e4m3_values()), (E5M2, e5m2_values())]
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("grid", "table"), FLOAT8)
def test_all_256_codes_of_float8(grid, table, dtype):
    values = grid.values(ALL_BYTES.view(grid.storage), dtype)
    assert same_bits(values, torch.from_numpy(table).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_16_codes_of_e2m1(dtype):
    values = E2M1.values(ALL_BYTES[:16], dtype)
    assert same_bits(values, torch.from_numpy(e2m1_values()).to(dtype))
    assert values[8].item() == 0.0
    assert values[8].signbit()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", range(2, 9))
def test_integer_codes_are_their_values(bits, dtype):
    for grid, low in ((int_grid(bits), -(2 ** (bits - 1))), (uint_grid(bits), 0)):
        numbers = list(range(low, low + 2**bits))
        codes = torch.tensor(numbers, dtype=grid.storage)
        assert (grid.low, grid.high) == (numbers[0], numbers[-1])
        assert grid.values(codes, dtype).tolist() == numbers
        assert grid.round(torch.tensor(numbers, dtype=dtype)).tolist() == numbers


@pytest.mark.parametrize(("grid", "table"), [(E2M3, nf.E2M3), (E3M2, nf.E3M2), (E2M1, nf.E2M1)])
def test_all_codes_of_narrow_floats(grid, table):
    values = grid.values(ALL_BYTES[: len(table)], torch.float32)
    assert same_bits(values, torch.from_numpy(table))
    assert (grid.bits, grid.high) == (len(table).bit_length() - 1, table.max())


def test_values_of_a_table():
    grid = table_grid("nf4", NF4)
    codes = torch.tensor([[0, 7, 15], [1, 14, 8]], dtype=torch.uint8)
    assert grid.values(codes, torch.float32).tolist() == [
        [-1.0, 0.0, 1.0],
        [-0.6961928009986877, 0.7229568362236023, 0.07958029955625534],
    ]
    assert grid.values(codes.t(), torch.bfloat16).shape == (3, 2)
    assert (grid.bits, grid.low, grid.high) == (4, -1.0, 1.0)


def all_finite(dtype):
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return bits[bits.isfinite()]


def around_ties(table):
    """float32 values of a grid, the middles between neighbours, and what lies just beside those."""
    magnitudes = table[: len(table) // 2]
    magnitudes = magnitudes[np.isfinite(magnitudes)].astype(np.float32)
    middles = (magnitudes[:-1] + magnitudes[1:]) / 2
    beside = [np.nextafter(middles, np.float32(way)) for way in (-np.inf, np.inf)]
    beyond = np.float32([magnitudes[-1] * 1.01, 1e30, np.finfo(np.float32).max, 1e-45, 1e-38])
    positive = np.concatenate([magnitudes, middles, *beside, beyond])
    return torch.from_numpy(np.concatenate([positive, -positive]))


@pytest.mark.parametrize(("grid", "table"), FLOAT8)
def test_rounding_to_float8(grid, table):
    for numbers in (
        all_finite(torch.float16),
        all_finite(torch.bfloat16),
        around_ties(table),
        torch.randn(10_000) * grid.high / 2,
    ):
        codes = torch.from_numpy(nearest_codes(as_numpy(numbers), table)).to(torch.uint8)
        assert same_bits(grid.round(numbers), codes.view(grid.storage))
        nearest = torch.from_numpy(table[codes.numpy()]).to(numbers.dtype)
        assert same_bits(grid.nearest(numbers), nearest)


@pytest.mark.parametrize(("grid", "table"), [(E2M1, nf.E2M1), (E2M3, nf.E2M3), (E3M2, nf.E3M2)])
def test_rounding_to_narrow_floats(grid, table):
    steps = torch.linspace(-1.1, 1.1, 20_001) * grid.high
    for numbers in (
        all_finite(torch.float16),
        all_finite(torch.bfloat16),
        around_ties(table),
        steps,
        steps.to(torch.bfloat16).reshape(3, -1),
    ):
        expected = nearest_codes(as_numpy(numbers), table)
        codes = torch.from_numpy(expected).to(torch.uint8)
        assert same_bits(grid.round(numbers), codes)
        nearest = torch.from_numpy(table[expected]).to(numbers.dtype)
        assert same_bits(grid.nearest(numbers), nearest)


def test_the_code_of_nan_stays_inside_the_grid():
    numbers = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf])
    for grid in (E2M1, E2M3):
        codes = grid.round(numbers)
        assert codes.max() < 1 << grid.bits
        assert grid.values(codes[2:], torch.float32).tolist() == [grid.high, grid.low]
        assert grid.nearest(numbers).isnan().tolist() == [True, True, False, False]


def test_tables_without_a_formula_are_not_rounded_to():
    with pytest.raises(AssertionError, match="rounding to the table grid nf4 is not built"):
        table_grid("nf4", NF4).round(torch.zeros(1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_to_integers_goes_to_even_and_clamps(dtype):
    numbers = torch.tensor(
        [-1e4, -8.5, -8.0, -2.5, -1.5, -0.5, -0.25, 0.5, 1.5, 2.5, 6.5, 7.5, 1e4], dtype=dtype
    )
    expected = [-8, -8, -8, -2, -2, 0, 0, 0, 2, 2, 6, 7, 7]
    assert INT4.round(numbers).tolist() == expected
    assert INT4.nearest(numbers).tolist() == expected
    assert INT4.nearest(numbers)[5:8].signbit().tolist() == [True, True, False]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grid", [INT8, E4M3, E5M2])
def test_nan_has_no_nearest_value(grid, dtype):
    numbers = torch.tensor([torch.nan, 1.0, -torch.inf], dtype=dtype)
    assert grid.nearest(numbers).isnan().tolist() == [True, False, False]
    assert grid.nearest(numbers)[1:].tolist() == [1.0, grid.low]


@pytest.mark.parametrize("grid", [INT8, E4M3])
def test_rounding_leaves_its_argument_alone(grid):
    numbers = torch.tensor([1000.3, 0.4])
    grid.round(numbers)
    grid.nearest(numbers)
    assert numbers.tolist() == torch.tensor([1000.3, 0.4]).tolist()


def test_kinds_of_grids():
    assert [grid.is_integer for grid in (INT4, E4M3, E2M1)] == [True, False, False]
    assert [grid.is_float8 for grid in (INT4, E4M3, E5M2, E2M1)] == [False, True, True, False]
    assert [grid.bits for grid in (INT4, INT8, E4M3, E5M2, E2M1)] == [4, 8, 8, 8, 4]
    assert table_grid("two", (0.0, 1.0)).bits == 1


@pytest.mark.parametrize(
    "grid", [E4M3, E5M2, E2M1, E2M3, E3M2, INT4, int_grid(6), uint_grid(3), uint_grid(8)]
)
def test_grids_by_name(grid):
    assert grid_named(grid.name) == grid


@pytest.mark.parametrize(
    "name", ["nf4", "fp4", "int", "uint", "int9", "int45", "sint4", "e4m3fn", ""]
)
def test_no_grid_has_such_a_name(name):
    with pytest.raises(ConfigError, match=f"`{name}` alone"):
        grid_named(name)


@pytest.mark.gpu
@pytest.mark.parametrize("grid", [E2M1, E2M3, E3M2, table_grid("nf4", NF4)])
def test_values_in_a_cuda_graph(grid):
    """Nothing is copied from the host."""
    codes = torch.arange(len(grid.table), dtype=torch.uint8)
    fixed = torch.zeros_like(codes, device="cuda")
    grid.values(fixed, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values = grid.values(fixed, torch.bfloat16)
    fixed.copy_(codes)
    graph.replay()
    assert same_bits(values.cpu(), grid.values(codes, torch.bfloat16))
