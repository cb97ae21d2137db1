"""Number grids: the sets of values that a code can stand for, by name.

int2 .. int8     signed integers, two's complement range, stored as int8
uint2 .. uint8   unsigned integers, stored as uint8
e4m3, e5m2       OCP FP8 (finite e4m3 as in `float8_e4m3fn`), stored in torch's own dtype
e2m1             OCP FP4, code 0..15 with the sign in bit 3, stored as uint8
e2m3, e3m2       OCP FP6, code 0..63 with the sign in bit 5, stored as uint8
table            any 16 values (nf4, fp4 of bitsandbytes), code 0..15, stored as uint8
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from quantload.errors import ConfigError

_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M3_MAGNITUDES = (
    *(mantissa / 8 for mantissa in range(8)),
    *((1 + mantissa / 8) * 2.0**exponent for exponent in range(3) for mantissa in range(8)),
)
_E3M2_MAGNITUDES = (
    *(mantissa / 16 for mantissa in range(4)),
    *((1 + mantissa / 4) * 2.0**exponent for exponent in range(-2, 5) for mantissa in range(4)),
)
_FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_EXPONENT = 0x7F800000  # its bits in a float32
_NARROW = {"e2m1": (1, 0), "e2m3": (3, 0), "e3m2": (2, -2)}  # mantissa bits, smallest exponent


@dataclass(frozen=True)
class Grid:
    """A set of numbers and how their codes are stored.

    Args:
        name: Name in the field's notation, for example "int4" or "e4m3".
        bits: Bits of one code.
        low: Smallest value.
        high: Largest value.
        storage: dtype that holds one code per element.
        table: For grids without a formula, the value of code 0, 1, 2, ...
    """

    name: str
    bits: int
    low: float
    high: float
    storage: torch.dtype
    table: tuple[float, ...] | None = None

    @property
    def is_integer(self) -> bool:
        """True if every value is an integer and codes are the values themselves."""
        return self.table is None and self.storage in (torch.int8, torch.uint8)

    @property
    def is_float8(self) -> bool:
        """True if codes are stored in one of torch's FP8 dtypes."""
        return self.storage in _FLOAT8.values()

    def values(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the value of every code, in a new tensor of `dtype`; shape kept."""
        if self.table is None:
            return codes.to(dtype)
        table = _on_device(self.table, dtype, codes.device)
        return table.index_select(0, codes.reshape(-1).to(torch.int32)).reshape(codes.shape)

    def nearest(self, scaled: Tensor) -> Tensor:
        """Clamp to the range and round to the nearest value, ties to even; NaN stays NaN.

        Args:
            scaled: [...] any float dtype.

        Returns:
            [...] values of the grid in the same dtype, in a new tensor. The sign of a zero is kept.
        """
        clamped = self._clamped(scaled)
        if self.table is not None:
            return self._nearest_narrow(clamped)
        return clamped.to(self.storage).to(scaled.dtype) if self.is_float8 else clamped.round_()

    def round(self, scaled: Tensor) -> Tensor:
        """Return the codes of the nearest values, see `nearest`.

        Args:
            scaled: [...] any float dtype. The code of NaN in an integer grid or in one of fewer
                than 8 bits means nothing.

        Returns:
            [...] codes in the grid's storage dtype.
        """
        clamped = self._clamped(scaled)
        if self.table is not None:
            return self._narrow_codes(self._nearest_narrow(clamped))
        return (clamped if self.is_float8 else clamped.round_()).to(self.storage)

    def _clamped(self, scaled: Tensor) -> Tensor:
        has_formula = self.table is None or self.name in _NARROW
        assert has_formula, f"rounding to the table grid {self.name} is not built"
        return scaled.clamp(self.low, self.high)

    def _nearest_narrow(self, clamped: Tensor) -> Tensor:
        """Round to a float of few bits: to a multiple of the step at the number's exponent."""
        mantissa_bits, smallest = _NARROW[self.name]
        sums = clamped.abs().to(torch.float32)
        # A sum with 2^(exponent + 23 - mantissa bits) has this step as its own: the addition
        # rounds, ties to even, and the subtraction is exact.
        rounder = (sums.view(torch.int32) & _EXPONENT).clamp_(min=(127 + smallest) << 23)
        rounder = rounder.add_((23 - mantissa_bits) << 23).view(torch.float32)
        return sums.add_(rounder).sub_(rounder).to(clamped.dtype).copysign_(clamped)

    def _narrow_codes(self, values: Tensor) -> Tensor:
        """Codes of values of the grid: their places among the multiples of its smallest step."""
        places, per_unit = _places(self, values.device)
        multiples = (values.abs() * per_unit).to(torch.int32)
        multiples = multiples.clamp_(0, places.numel() - 1)  # NaN is no number
        codes = places.index_select(0, multiples.reshape(-1))
        signs = values.signbit().to(torch.uint8) << (self.bits - 1)
        return codes.reshape(values.shape).bitwise_or_(signs)


def _on_device(table: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a table as a tensor, without a copy from the host: CUDA graphs allow none."""
    if device.type == "cpu":
        return torch.tensor(table, dtype=dtype)
    return torch.cat([torch.full((1,), value, dtype=dtype, device=device) for value in table])


@cache
def _places(grid: Grid, device: torch.device) -> tuple[Tensor, float]:
    """The code of each multiple of a narrow float's smallest step, and how many steps make 1."""
    assert grid.table is not None, "narrow floats have a table"
    mantissa_bits, smallest = _NARROW[grid.name]
    per_unit = 2.0 ** (mantissa_bits - smallest)
    places = torch.zeros(int(grid.high * per_unit) + 1, dtype=torch.uint8)
    for code, value in enumerate(grid.table[: len(grid.table) // 2]):
        places[int(value * per_unit)] = code
    return places.to(device), per_unit


def int_grid(bits: int) -> Grid:
    """Signed integers of `bits` bits: -2^(bits-1) .. 2^(bits-1) - 1."""
    half = 1 << (bits - 1)
    return Grid(f"int{bits}", bits, -half, half - 1, torch.int8)


@cache
def uint_grid(bits: int) -> Grid:
    """Unsigned integers of `bits` bits: 0 .. 2^bits - 1."""
    return Grid(f"uint{bits}", bits, 0, (1 << bits) - 1, torch.uint8)


def table_grid(name: str, table: tuple[float, ...]) -> Grid:
    """A grid given by the values of its codes, for example nf4."""
    bits = (len(table) - 1).bit_length()
    return Grid(name, bits, min(table), max(table), torch.uint8, table)


def grid_named(name: str) -> Grid:
    """Return the grid with a name of this module's list.

    Raises:
        ConfigError: There is none, as of a table, whose name says nothing of its values.
    """
    for grid in (E4M3, E5M2, E2M1, E2M3, E3M2):
        if name == grid.name:
            return grid
    for kind, make in (("uint", uint_grid), ("int", int_grid)):
        bits = name.removeprefix(kind)
        if bits != name and bits in tuple("2345678"):
            return make(int(bits))
    raise ConfigError(f"no grid has the name `{name}` alone, expected one such as `int4` or `e4m3`")


E4M3 = Grid("e4m3", 8, -448.0, 448.0, torch.float8_e4m3fn)
E5M2 = Grid("e5m2", 8, -57344.0, 57344.0, torch.float8_e5m2)
E2M1 = table_grid("e2m1", _E2M1_MAGNITUDES + tuple(-m for m in _E2M1_MAGNITUDES))
E2M3 = table_grid("e2m3", _E2M3_MAGNITUDES + tuple(-m for m in _E2M3_MAGNITUDES))
E3M2 = table_grid("e3m2", _E3M2_MAGNITUDES + tuple(-m for m in _E3M2_MAGNITUDES))
INT4 = int_grid(4)
INT8 = int_grid(8)
