"""Schemes: how one weight, and the input it meets, are quantized.

Names and defaults of the presets are those of compressed-tensors 0.20.1
(`quantization/quant_scheme.py`); a test holds them equal.

A scheme is written NAME or NAME:gSIZE (group size) or NAME:channel, for example `W4A16:g64`.
`dense` is full precision, `same` is what the source has, with equal values. `keep` is not a scheme:
it is the decision for full precision.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from typing import Literal

from quantload.errors import ConfigError, UnknownScheme, listed
from quantload.quant.grid import E4M3, INT8, Grid, int_grid

SERVED_GROUP_SIZES = (128, 64, 32)  # what serving engines have kernels for

Granularity = Literal["tensor", "channel", "group", "block"]
InputGranularity = Literal["tensor", "token", "group"]
ScaleKind = Literal["float", "e8m0", "e4m3"]
ZeroKind = Literal["int", "float", "offset"]


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


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How a layer is quantized; `weight=None` is full precision ("dense").

    Args:
        name: Preset name, for example "W4A16".
        weight: How the weight is quantized.
        input: How the input is quantized; None leaves it in full precision.
    """

    name: str
    weight: WeightScheme | None = None
    input: InputScheme | None = None

    def __str__(self) -> str:
        if self.weight is None or self == PRESETS.get(self.name):
            return self.name
        if self.weight.granularity == "group":
            return f"{self.name}:g{self.weight.group_size}"
        return f"{self.name}:{self.weight.granularity}"

    def fitted(self, columns: int) -> Scheme | None:
        """Return the scheme that fits a weight with this many columns.

        Where the group size does not divide `columns`, the largest of 128, 64 and 32 that does is
        taken. None if there is none.
        """
        if self.weight is None or self.weight.granularity != "group":
            return self
        assert self.weight.group_size is not None, "a group scheme has a group size"
        for size in (self.weight.group_size, *SERVED_GROUP_SIZES):
            if columns % size == 0:
                return replace(self, weight=replace(self.weight, group_size=size))
        return None


def _weight_only(name: str, bits: int, *, symmetric: bool = True) -> Scheme:
    return Scheme(
        name=name,
        weight=WeightScheme(
            grid=int_grid(bits), granularity="group", group_size=128, symmetric=symmetric
        ),
    )


DENSE = Scheme(name="dense")
SAME = Scheme(name="same")  # what the source has, with the same values

PRESETS: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        DENSE,
        SAME,
        _weight_only("W4A16", 4),
        _weight_only("W4A16_ASYM", 4, symmetric=False),
        _weight_only("W8A16", 8),
        Scheme(
            name="W8A8",
            weight=WeightScheme(grid=INT8, granularity="channel"),
            input=InputScheme(grid=INT8, granularity="token"),
        ),
        Scheme(
            name="FP8_DYNAMIC",
            weight=WeightScheme(grid=E4M3, granularity="channel"),
            input=InputScheme(grid=E4M3, granularity="token"),
        ),
        Scheme(
            name="FP8_BLOCK",
            weight=WeightScheme(grid=E4M3, granularity="block", block=(128, 128)),
            input=InputScheme(grid=E4M3, granularity="group", group_size=128),
        ),
    )
}


def scheme_of(weight: WeightScheme, input: InputScheme | None, *, name: str = "") -> Scheme:
    """Return the scheme with its preset's name, if it is one or differs in the group size only.

    Args:
        weight: How the weight is quantized.
        input: How the input is quantized.
        name: Name of a scheme that is none of the presets; "" makes one of grid and input.
    """
    for preset in PRESETS.values():
        if preset.weight is None or preset.input != input:
            continue
        same = _kind(weight) == _kind(preset.weight)
        kinds = {weight.granularity, preset.weight.granularity}
        if same and (len(kinds) == 1 or (kinds == {"group", "channel"} and input is None)):
            return Scheme(name=preset.name, weight=weight, input=input)
    if not name:
        name = weight.grid.name + (f", input {input.grid.name}" if input else "")
    return Scheme(name=name, weight=weight, input=input)


def _kind(weight: WeightScheme) -> tuple[Grid, bool, ScaleKind]:
    return weight.grid, weight.symmetric, weight.scale


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
    if name not in by_lower:
        near = difflib.get_close_matches(name, by_lower, n=1, cutoff=0.5)
        hint = f"did you mean `{by_lower[near[0]]}`? " if near else ""
        raise UnknownScheme(
            f"no such scheme: `{text}`",
            hint=f"{hint}schemes are {listed(PRESETS, limit=20)}; `keep` is full precision",
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
    return replace(scheme, weight=replace(weight, group_size=size))
