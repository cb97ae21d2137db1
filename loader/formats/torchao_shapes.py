"""Which elements of a torchao weight share one scale, and how the parts of a weight are laid out.

The weight is [N, K], or [E, N, K] of E experts. `block_size` has one number for each dimension,
which divides it; -1 is all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from quantload.loader.checkpoint import TensorEntry
from quantload.loader.formats.torchao_stored import Stored
from quantload.quant.grid import E4M3, E5M2, INT8, Grid, int_grid
from quantload.quant.scheme import InputScheme, WeightScheme, ZeroKind

FLOAT8 = {grid.storage: grid for grid in (E4M3, E5M2)}
Sizes = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the parts of one weight become a `QuantTensor`.

    Args:
        shape: (N, K) or (E, N, K).
        block: Rows and columns that share one scale, of [N, K] or [E * N, K].
        weight: The same as a scheme.
        evaluation: dtype of the arithmetic.
        result: dtype that values are rounded to; None if they stay in that of the arithmetic.
        input: How the input is quantized.
        codes: Part with the codes.
        scale: Part with the scales.
        zero: Part with zero points or offsets, "" if there is none.
        use: Whether `zero` is subtracted from codes, or added to values.
        is_packed: True if a byte holds two codes of four bits.
        is_turned: True if scales and offsets are [..., G, N].
        middle: What is subtracted from stored codes to get those of the grid.
        inner: Part with a factor of each input feature, "" if there is none.
        input_scale: Part with the fixed scale of inputs, "" if there is none.
        input_zero: Part with the fixed zero point of inputs, "" if there is none.
    """

    shape: Sizes
    block: tuple[int, int]
    weight: WeightScheme
    evaluation: torch.dtype
    result: torch.dtype | None
    input: InputScheme | None = None
    codes: str = "qdata"
    scale: str = "scale"
    zero: str = ""
    use: Literal["zero", "offset"] = "zero"
    is_packed: bool = False
    is_turned: bool = False
    middle: int = 0
    inner: str = ""
    input_scale: str = ""
    input_zero: str = ""

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts that the weight is made of."""
        parts = (self.codes, self.scale, self.zero, self.inner, self.input_scale, self.input_zero)
        return tuple(part for part in parts if part)

    @property
    def rows(self) -> int:
        """N, or E * N."""
        return self.shape[0] * self.shape[1] if len(self.shape) == 3 else self.shape[0]

    @property
    def columns(self) -> int:
        """K."""
        return self.shape[-1]


@dataclass(frozen=True)
class Sharing:
    """Which elements share one scale.

    Args:
        shape: (N, K) or (E, N, K).
        sizes: One for each dimension, which divides it.
        block: Rows and columns of [N, K] or [E * N, K].
    """

    shape: Sizes
    sizes: Sizes
    block: tuple[int, int]

    @property
    def counts(self) -> Sizes:
        """How many scales there are along each dimension."""
        return tuple(n // size for n, size in zip(self.shape, self.sizes, strict=True))

    def scheme(self, grid: Grid, *, symmetric: bool = True, zero: ZeroKind = "int") -> WeightScheme:
        """Return the scheme of a weight whose scales are shared so."""
        rows, columns = self.block
        whole = self.shape[-1]
        group_size, block = None, None
        if columns == whole and (rows == 1 or rows % self.shape[-2] == 0):
            granularity: Literal["channel", "tensor", "group", "block"]
            granularity = "channel" if rows == 1 else "tensor"
        elif rows == 1:
            granularity, group_size = "group", columns
        else:
            granularity, block = "block", self.block
        return WeightScheme(
            grid=grid,
            granularity=granularity,
            symmetric=symmetric,
            group_size=group_size,
            block=block,
            zero=zero,
        )

    def check(self, stored: Stored, entry: TensorEntry) -> None:
        """Demand that a part has one element for each block; dimensions of one may be left out.

        Raises:
            FormatMismatch: It has not.
        """
        squeezed = tuple(count for count in self.counts if count != 1)
        if entry.shape not in (self.counts, squeezed, squeezed or (1,)):
            raise stored.wrong(entry, f"shape `{entry.shape}`", f"`{self.counts}`")


def shape_of(stored: Stored, codes: TensorEntry) -> Sizes:
    """Return the shape of the codes: two dimensions, or three for experts."""
    if len(codes.shape) not in (2, 3) or 0 in codes.shape:
        raise stored.refused(f"a weight of shape `{codes.shape}`")
    return codes.shape


def sharing_of(stored: Stored, shape: Sizes, sizes: Sizes) -> Sharing:
    """Return which elements share one scale.

    Raises:
        FormatMismatch: Sizes that do not divide the shape.
        UnsupportedVariant: Some of the experts share scales, but not all.
    """
    sizes = tuple(n if size == -1 else size for n, size in zip(shape, sizes, strict=True))
    if any(size < 1 or n % size for n, size in zip(shape, sizes, strict=True)):
        raise stored.wrong_attribute("block_size", f"sizes that divide `{shape}`")
    rows, columns = sizes[-2:]
    if len(shape) == 3 and sizes[0] != 1:
        if sizes[0] != shape[0] or rows != shape[1]:
            raise stored.refused(f"scales shared by {sizes[0]} of {shape[0]} experts")
        rows *= shape[0]
    return Sharing(shape, sizes, (rows, columns))


def inner_of(stored: Stored, columns: int) -> str:
    """Return the part that inputs are multiplied by, "" if there is none.

    Raises:
        FormatMismatch: It has not one element for each input feature.
    """
    if "act_pre_scale" not in stored:
        return ""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    entry = stored.part("act_pre_scale", dtypes)
    if entry.num_elements not in (1, columns):
        raise stored.wrong(entry, f"shape `{entry.shape}`", f"`({columns},)`")
    return "act_pre_scale"


# -- inputs ----------------------------------------------------------------------------------------


def input_of(stored: Stored, key: str) -> InputScheme | None:
    """Return how inputs are quantized while the model runs; None if they are not.

    Args:
        stored: The weight.
        key: Attribute that says so.

    Raises:
        UnsupportedVariant: In a way that is not read.
    """
    value = stored.data.get(key)
    if value is None:
        return None
    kind = value.get("_type") if isinstance(value, Mapping) else None
    data = value.get("_data") if isinstance(value, Mapping) else None
    if not isinstance(data, Mapping) or kind not in _INPUT_GRIDS:
        raise stored.refused(f"activation quantization `{value}`")
    granularity = data.get("granularity")
    name = granularity.get("_type") if isinstance(granularity, Mapping) else granularity
    grid = _INPUT_GRIDS[kind](stored, data)
    symmetric = _inner(data.get("mapping_type")) not in ("ASYMMETRIC", 3)
    match name:
        case "PerRow" | "PerToken":
            return InputScheme(grid=grid, granularity="token", symmetric=symmetric)
        case "PerTensor":
            return InputScheme(grid=grid, granularity="tensor", symmetric=symmetric)
        case "PerBlock":
            size = _last_size(granularity)
            if size is not None:
                return InputScheme(grid=grid, granularity="group", group_size=size)
    raise stored.refused(f"activation quantization `{granularity}`")


def _int8_input(_: Stored, data: Mapping[str, object]) -> Grid:
    return int_grid(7) if data.get("reduce_range") is True else INT8


def _float8_input(stored: Stored, data: Mapping[str, object]) -> Grid:
    for bound in ("hp_value_lb", "hp_value_ub"):
        if data.get(bound) is not None:
            raise stored.refused(f"a bound `{bound}` of activations")
    name = _inner(data.get("float8_dtype", "float8_e4m3fn"))
    grid = FLOAT8.get(getattr(torch, str(name), torch.float32))
    if grid is None:
        raise stored.refused(f"activation dtype `{name}`")
    return grid


_INPUT_GRIDS = {
    "QuantizeTensorToInt8Kwargs": _int8_input,
    "QuantizeTensorToFloat8Kwargs": _float8_input,
}


def _inner(value: object) -> object:
    """Return what is in {"_type", "_data"}."""
    return value.get("_data") if isinstance(value, Mapping) else value


def _last_size(granularity: object) -> int | None:
    """Return N of `PerBlock([1, N])`."""
    data = _inner(granularity)
    sizes = data.get("block_size") if isinstance(data, Mapping) else None
    if not isinstance(sizes, list | tuple) or not sizes or not isinstance(sizes[-1], int):
        return None
    return sizes[-1] if all(size == 1 for size in sizes[:-1]) and sizes[-1] > 0 else None
