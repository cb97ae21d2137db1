"""Schemes: how one weight, and the input it meets, are quantized.

Names and parameters of the presets are those of compressed-tensors 0.20.1
(`quantization/quant_scheme.py`); a test holds them equal.

    W4A16       bits of weights and inputs; 16 leaves inputs as they are
    FP8, FP8_DYNAMIC, FP8_BLOCK     e4m3 with scales of floats
    NVFP4       e2m1, an e4m3 scale for 16 columns, one float for the tensor
    MXFP4, MXFP6, MXFP8             e2m1, e2m3 or e4m3, a power of two for 32 columns

A scheme is written NAME or NAME:gSIZE (group size) or NAME:channel, for example `W4A16:g64`. The
groups of NVFP4 and MX formats have one size only.
`dense` is full precision, `same` is what the source has, with equal values. `keep` is not a scheme:
it is the decision for full precision.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import NoneType
from typing import Literal

from quantload.arguments import as_pair, check_type
from quantload.errors import ConfigError, UnknownScheme
from quantload.quant.grid import E2M1, E2M3, E4M3, INT8, Grid, int_grid

SERVED_GROUP_SIZES = (128, 64, 32)  # what serving engines have kernels for

Granularity = Literal["tensor", "channel", "group", "block"]
InputGranularity = Literal["tensor", "token", "group"]
ScaleKind = Literal["float", "e8m0", "e4m3"]
ZeroKind = Literal["int", "float", "offset"]

_SCALES_IN_WORDS = {"e8m0": "powers of two as scales", "e4m3": "e4m3 scales and one of the tensor"}


@dataclass(frozen=True, kw_only=True)
class WeightScheme:
    """How a weight [N, K] is quantized.

    Args:
        grid: Number grid of the codes.
        granularity: What shares one scale: the tensor, a row (channel), `group_size` columns of a
            row (group), or `block` rows by columns (block).
        symmetric: True if there is no zero point.
        group_size: Columns per scale, for granularity "group".
        block: Rows and columns per scale, for granularity "block".
        scale: What scales are: floats; powers of two (e8m0, as in MX formats); or e4m3 with one
            float for the tensor (as in NVFP4).
        act_order: True if columns find their group by number instead of by place.
        zero: What zero points are, if there are some: integers, floats, or an offset in units of a
            weight.
    """

    grid: Grid
    granularity: Granularity
    symmetric: bool = True
    group_size: int | None = None
    block: tuple[int, int] | None = None
    scale: ScaleKind = "float"
    act_order: bool = False
    zero: ZeroKind = "int"

    def __post_init__(self) -> None:
        if self.block is not None:
            block = as_pair("block", self.block, expected="(rows, columns), or None")
            object.__setattr__(self, "block", block)

    @property
    def sharing(self) -> str:
        """What shares one scale, for people: "groups of 64", "one scale a row"."""
        match self.granularity:
            case "group":
                return f"groups of {self.group_size}"
            case "block":
                assert self.block is not None, "a block scheme has a block"
                return f"blocks of {self.block[0]} x {self.block[1]}"
            case granularity:
                return f"one scale a {'row' if granularity == 'channel' else granularity}"

    @property
    def in_words(self) -> str:
        """What shares a scale and what scales are, for people: "int4, group 128, zero points"."""
        parts = [self.grid.name, self.granularity]
        if self.granularity == "group":
            parts[1] = f"group {self.group_size}"
        if self.block is not None:
            parts[1] = f"block {self.block[0]}x{self.block[1]}"
        parts += [] if self.symmetric else ["zero points"]
        parts += [_SCALES_IN_WORDS[self.scale]] if self.scale != "float" else []
        return ", ".join(parts)

    @property
    def shares_range(self) -> bool:
        """True if one value of the tensor comes from the range of all of it.

        That of NVFP4 is also one for all members of a fused group.
        """
        return self.granularity == "tensor" or self.scale == "e4m3"

    def block_of(self, rows: int, columns: int) -> tuple[int, int]:
        """Return how many rows and columns of a [rows, columns] weight share one scale."""
        match self.granularity:
            case "tensor":
                return rows, columns
            case "channel":
                return 1, columns
            case "group":
                assert self.group_size is not None, "a group scheme has a group size"
                return 1, self.group_size
            case "block":
                assert self.block is not None, "a block scheme has a block"
                return self.block


@dataclass(frozen=True, kw_only=True)
class InputScheme:
    """How the input of a linear layer is quantized while it runs.

    Args:
        grid: Number grid of the codes.
        granularity: What shares one scale: everything, a token, or `group_size` of its features.
        group_size: Features per scale, for granularity "group".
        dynamic: True if scales are computed from the input; False if the checkpoint holds them.
        symmetric: True if there is no zero point.
        scale: What scales are, as in `WeightScheme`; with "e4m3" the checkpoint holds the float for
            the tensor.
    """

    grid: Grid
    granularity: InputGranularity
    group_size: int | None = None
    dynamic: bool = True
    symmetric: bool = True
    scale: ScaleKind = "float"

    @property
    def in_words(self) -> str:
        """What shares a scale and what scales are, for people: "int8 per token, dynamic"."""
        size = f" {self.group_size}" if self.granularity == "group" else ""
        parts = [f"{self.grid.name} per {self.granularity}{size}"]
        parts += [] if self.symmetric else ["zero points"]
        parts += [_SCALES_IN_WORDS[self.scale]] if self.scale != "float" else []
        return ", ".join([*parts, "dynamic" if self.dynamic else "static"])

    @property
    def needs_scale(self) -> bool:
        """True if the checkpoint holds a number for the input of each layer.

        It is the fixed scale, or the global scale of e4m3 scales.
        """
        return not self.dynamic or self.scale == "e4m3"


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How a layer is quantized; `weight=None` is full precision ("dense").

    Args:
        name: Preset name, for example "W4A16".
        weight: How the weight is quantized.
        input: How the input is quantized; None leaves it in full precision.
        is_size_asked: True if the user named the group size; the same scheme all the same.
    """

    name: str
    weight: WeightScheme | None = None
    input: InputScheme | None = None
    is_size_asked: bool = field(default=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_type("name", self.name, str, expected="the name of a scheme")
        kinds = (("weight", WeightScheme), ("input", InputScheme))
        for part, kind in kinds:
            expected = f"an object of `{kind.__name__}`, or None for full precision"
            hint = "`parse_scheme` makes schemes from names such as `W4A16:g64`"
            check_type(part, getattr(self, part), (kind, NoneType), expected=expected, hint=hint)

    def __str__(self) -> str:
        if self.weight is None or self == PRESETS.get(self.name):
            return self.name
        if self.weight.granularity == "group":
            return f"{self.name}:g{self.weight.group_size}"
        return f"{self.name}:{self.weight.granularity}"

    @property
    def in_words(self) -> str:
        """What is quantized and how, for people."""
        if self.weight is None:
            is_same = self.name == "same"
            return (
                "as in the source, same values" if is_same else "full precision: dequantize or copy"
            )
        text = f"weights {self.weight.in_words}"
        return text if self.input is None else f"{text}; inputs {self.input.in_words}"

    def fitted(self, columns: int) -> Scheme | None:
        """Return the scheme that fits a weight with this many columns.

        Where the group size does not divide `columns`, the largest of 128, 64 and 32 that does is
        taken, unless the format has one size only. None if there is none.
        """
        if self.weight is None or self.weight.granularity != "group":
            return self
        assert self.weight.group_size is not None, "a group scheme has a group size"
        others = SERVED_GROUP_SIZES if self.weight.scale == "float" else ()
        for size in (self.weight.group_size, *others):
            if columns % size == 0:
                return replace(self, weight=replace(self.weight, group_size=size))
        return None


# -- presets ---------------------------------------------------------------------------------------


def _groups(bits: int, *, symmetric: bool = True) -> WeightScheme:
    return WeightScheme(
        grid=int_grid(bits), granularity="group", group_size=128, symmetric=symmetric
    )


def _microscaled(grid: Grid) -> WeightScheme:
    return WeightScheme(grid=grid, granularity="group", group_size=32, scale="e8m0")


def _microscaled_input(grid: Grid) -> InputScheme:
    return InputScheme(grid=grid, granularity="group", group_size=32, scale="e8m0")


_TOKENS_INT4 = InputScheme(grid=int_grid(4), granularity="token")
_TOKENS_INT8 = InputScheme(grid=INT8, granularity="token")
_TOKENS_FP8 = InputScheme(grid=E4M3, granularity="token")
_GROUPS_FP8 = InputScheme(grid=E4M3, granularity="group", group_size=128)
_STATIC_FP8 = InputScheme(grid=E4M3, granularity="tensor", dynamic=False)
_NVFP4 = WeightScheme(grid=E2M1, granularity="group", group_size=16, scale="e4m3")
_NVFP4_INPUT = InputScheme(grid=E2M1, granularity="group", group_size=16, scale="e4m3")

_QUANTIZED: dict[str, tuple[WeightScheme, InputScheme | None]] = {
    **{f"W{bits}A16": (_groups(bits), None) for bits in range(2, 9)},
    "W4A16_ASYM": (_groups(4, symmetric=False), None),
    **{f"W{bits}A8": (_groups(bits), _TOKENS_INT8) for bits in range(2, 8)},
    "W8A8": (WeightScheme(grid=INT8, granularity="channel"), _TOKENS_INT8),
    **{f"W{bits}A4": (_groups(bits), _TOKENS_INT4) for bits in range(2, 5)},
    "W4AFP8": (_groups(4), _TOKENS_FP8),
    "FP8": (WeightScheme(grid=E4M3, granularity="tensor"), _STATIC_FP8),
    "FP8_DYNAMIC": (WeightScheme(grid=E4M3, granularity="channel"), _TOKENS_FP8),
    "FP8_BLOCK": (WeightScheme(grid=E4M3, granularity="block", block=(128, 128)), _GROUPS_FP8),
    "NVFP4A16": (_NVFP4, None),
    "NVFP4": (_NVFP4, _NVFP4_INPUT),
    "MXFP4A16": (_microscaled(E2M1), None),
    "MXFP4": (_microscaled(E2M1), _microscaled_input(E2M1)),
    "MXFP4XFP8": (_microscaled(E2M1), _GROUPS_FP8),
    "MXFP6A16": (_microscaled(E2M3), None),
    "MXFP6A8": (_microscaled(E2M3), _microscaled_input(E4M3)),
    "MXFP8A16": (_microscaled(E4M3), None),
    "MXFP8": (_microscaled(E4M3), _microscaled_input(E4M3)),
}

DENSE = Scheme(name="dense")
SAME = Scheme(name="same")  # what the source has, with the same values
ALIASES = {"INT8": "W8A8"}

PRESETS: dict[str, Scheme] = {
    "dense": DENSE,
    "same": SAME,
    **{
        name: Scheme(name=name, weight=weight, input=input)
        for name, (weight, input) in _QUANTIZED.items()
    },
}


@lru_cache(maxsize=1024)  # asked for each of thousands of modules
def scheme_of(weight: WeightScheme, input: InputScheme | None, *, name: str = "") -> Scheme:
    """Return the scheme with its preset's name, if it is one or differs in what shares a scale.

    Args:
        weight: How the weight is quantized.
        input: How the input is quantized.
        name: Name of a scheme that is none of the presets; "" makes one of grid and input.
    """
    for preset in PRESETS.values():
        if preset.weight is not None and preset.input == input and _is_like(weight, preset.weight):
            return Scheme(name=preset.name, weight=weight, input=input)
    if not name:
        name = weight.grid.name + (f", input {input.grid.name}" if input else "")
    return Scheme(name=name, weight=weight, input=input)


def _is_like(weight: WeightScheme, preset: WeightScheme) -> bool:
    """True if a weight is written as the preset and a suffix, `:g64` or `:channel`."""
    if (weight.grid, weight.symmetric, weight.scale) != (
        preset.grid,
        preset.symmetric,
        preset.scale,
    ):
        return False
    if weight.scale != "float":
        return (weight.granularity, weight.group_size) == (preset.granularity, preset.group_size)
    return weight.granularity == preset.granularity or (weight.granularity, preset.granularity) == (
        "channel",
        "group",
    )


# -- names -----------------------------------------------------------------------------------------


def parse_scheme(text: str, *, group_size: int | None = None) -> Scheme:
    """Return the scheme that `text` names.

    Args:
        text: "W4A16", "W4A16:g64", "W4A16:channel", "dense", in any case.
        group_size: Group size, as an alternative to the suffix.

    Raises:
        UnknownScheme: No preset has this name.
        ConfigError: The suffix makes no sense for this scheme.
    """
    name, colon, suffix = (part.strip().lower() for part in text.partition(":"))
    by_lower = {preset.lower(): preset for preset in PRESETS}
    by_lower |= {alias.lower(): preset for alias, preset in ALIASES.items()}
    if name not in by_lower:
        near = difflib.get_close_matches(name, by_lower, n=1, cutoff=0.5)
        hint = f"did you mean `{by_lower[near[0]]}`? " if near else ""
        raise UnknownScheme(
            f"no such scheme: `{text}`",
            hint=f"{hint}`quantload schemes` lists all; `keep` is full precision",
        )
    scheme = PRESETS[by_lower[name]]
    if group_size is not None:
        if suffix and suffix != f"g{group_size}":
            raise ConfigError(
                f"two group sizes for one scheme: `{text}` and `group_size = {group_size}`"
            )
        return _with_suffix(scheme, f"g{group_size}", f"{text}, group_size = {group_size}")
    return _with_suffix(scheme, suffix, text) if colon else scheme


def _with_suffix(scheme: Scheme, suffix: str, text: str) -> Scheme:
    weight = scheme.weight
    if weight is None or weight.granularity != "group":
        raise ConfigError(
            f"scheme `{scheme.name}` takes no group size: found `{text}`",
            hint="only group-wise schemes such as `W4A16` take `:g64` or `:channel`",
        )
    if weight.scale != "float" and suffix != f"g{weight.group_size}":
        raise ConfigError(
            f"scheme `{scheme.name}` has groups of {weight.group_size} only: found `{text}`",
            hint="leave the group size out",
        )
    if suffix == "channel":
        return replace(scheme, weight=replace(weight, granularity="channel", group_size=None))
    match = re.fullmatch(r"g([1-9]\d*)", suffix)
    if match is None:
        raise ConfigError(
            f"unknown scheme suffix: `{suffix}` in `{text}`, "
            "expected `g` and a number, or `channel`",
            hint=f"for example `{scheme.name}:g64`",
        )
    size = int(match.group(1))
    if size < 16 or size & (size - 1):
        raise ConfigError(
            f"group size `{size}` in `{text}` is not served by any engine, expected a power of two "
            "of at least 16",
            hint="use 32, 64 or 128",
        )
    return replace(scheme, weight=replace(weight, group_size=size), is_size_asked=True)
