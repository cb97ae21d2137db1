"""AMD Quark: one tensor specification of its quantization config; see `quark_config.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quantload.errors import FormatMismatch, UnsupportedVariant, listed
from quantload.quant.grid import E2M1, E2M3, E3M2, E4M3, E5M2, INT4, INT8, Grid, uint_grid
from quantload.quant.scheme import Granularity, InputGranularity, InputScheme, ScaleKind

_GRIDS = {
    "fp8_e4m3": E4M3,
    "fp8_e5m2": E5M2,
    "int4": INT4,
    "uint4": uint_grid(4),
    "int8": INT8,
    "uint8": uint_grid(8),
    "fp4": E2M1,
    "fp6_e2m3": E2M3,
    "fp6_e3m2": E3M2,
}
_FLOATS = ("float32", "bfloat16", "float16")
_GRANULARITIES: dict[str, Granularity] = {
    "per_tensor": "tensor",
    "per_channel": "channel",
    "per_group": "group",
    "per_block": "block",
}
_INPUTS: dict[str, InputGranularity] = {
    "per_tensor": "tensor",
    "per_channel": "token",
    "per_token": "token",
    "per_group": "group",
}


@dataclass(frozen=True)
class Spec:
    """How a weight is quantized.

    Args:
        grid: Number grid of the codes.
        granularity: What shares one scale.
        group_size: Columns of a group; None for the whole row.
        block: Rows and columns of a block.
        symmetric: True if there is no zero point.
        scale: What scales are.
    """

    grid: Grid
    granularity: Granularity
    group_size: int | None = None
    block: tuple[int, int] | None = None
    symmetric: bool = True
    scale: ScaleKind = "float"

    @property
    def name(self) -> str:
        """Name for people and messages."""
        kind = {"e8m0": "mx", "e4m3": "nv"}.get(self.scale, "")
        return f"{kind}{self.grid.name}"


def parse_weight(value: Any, where: str) -> Spec | None:  # noqa: ANN401 - JSON
    """Parse the specification of a weight, or NVFP4's list of two; None if it is in full precision.

    Raises:
        UnsupportedVariant: It is none that quantload reads.
        FormatMismatch: It is malformed.
    """
    first, is_nvfp4 = _levels(value, where)
    if first is None:
        return None
    grid = _grid(first, where)
    if grid is None:
        return None
    if _flag(first, "is_dynamic", where):
        raise UnsupportedVariant(f"weights quantized while the model runs are not read: {where}")
    granularity = _choice(first, _GRANULARITIES, where)
    if not grid.is_integer and not grid.is_float8 and granularity != "group":
        raise UnsupportedVariant(f"`{first['dtype']}` weights {granularity}-wise: {where}")
    spec = Spec(
        grid=grid,
        granularity=granularity,
        group_size=_group_size(first, where) if granularity == "group" else None,
        block=_block(first, where) if granularity == "block" else None,
        symmetric=not grid.is_integer or _flag(first, "symmetric", where),
        scale="e4m3" if is_nvfp4 else _scale(first),
    )
    if grid.is_integer and (granularity == "block" or spec.scale == "e8m0"):
        raise UnsupportedVariant(
            f"`{first['dtype']}` weights by blocks or with e8m0 scales are not read: {where}"
        )
    return spec


def parse_input(value: Any, where: str) -> InputScheme | None:  # noqa: ANN401 - JSON
    """Parse the specification of a layer's input; None if it is in full precision.

    Raises:
        UnsupportedVariant: It is none that quantload knows.
        FormatMismatch: It is malformed.
    """
    first, is_nvfp4 = _levels(value, where)
    if first is None:
        return None
    grid = _grid(first, where)
    if grid is None:
        return None
    granularity = _choice(first, _INPUTS, where)
    scheme = InputScheme(
        grid=grid,
        granularity=granularity,
        group_size=_group_size(first, where) if granularity == "group" else None,
        dynamic=_flag(first, "is_dynamic", where),
        symmetric=not grid.is_integer or _flag(first, "symmetric", where),
        scale="e4m3" if is_nvfp4 else _scale(first),
    )
    return replace(scheme, dynamic=True) if is_nvfp4 else scheme


def _levels(value: Any, where: str) -> tuple[Mapping[str, Any] | None, bool]:  # noqa: ANN401 - JSON
    """Return the specification of the codes, and whether a second one quantizes the scales."""
    if value is None:
        return None, False
    levels = value if isinstance(value, list) else [value]
    for level in levels:
        if not isinstance(level, Mapping):
            raise FormatMismatch(
                f"`{level!r}` in the Quark quantization config is no specification of a tensor: "
                f"{where}"
            )
    if len(levels) == 1:
        return levels[0], False
    kinds = [(level.get("dtype"), level.get("qscheme")) for level in levels]
    if kinds != [("fp4", "per_group"), ("fp8_e4m3", "per_tensor")]:
        raise UnsupportedVariant(
            f"tensors quantized in several levels are not read, other than NVFP4: "
            f"{listed(f'{dtype} {qscheme}' for dtype, qscheme in kinds)}, {where}"
        )
    return levels[0], True


def _grid(spec: Mapping[str, Any], where: str) -> Grid | None:
    dtype = spec.get("dtype")
    if dtype == "mx":
        dtype = spec.get("mx_element_dtype")
    if dtype in _FLOATS:
        return None
    if not isinstance(dtype, str) or dtype not in _GRIDS:
        raise UnsupportedVariant(
            f"Quark dtype `{dtype!r}` is not read: {where}; expected one of "
            f"{listed(_GRIDS, limit=12)}"
        )
    return _GRIDS[dtype]


def _choice(spec: Mapping[str, Any], allowed: Mapping[str, Any], where: str) -> Any:  # noqa: ANN401
    qscheme = spec.get("qscheme")
    if not isinstance(qscheme, str) or qscheme not in allowed:
        raise UnsupportedVariant(
            f"Quark `qscheme` `{qscheme!r}` is not read: {where}; expected one of {listed(allowed)}"
        )
    return allowed[qscheme]


def _flag(spec: Mapping[str, Any], key: str, where: str) -> bool:
    value = spec.get(key)
    if value is not None and not isinstance(value, bool):
        raise FormatMismatch(
            f"`{key}` of the Quark quantization config is `{value!r}`, expected true or false: "
            f"{where}"
        )
    return bool(value)


def _group_size(spec: Mapping[str, Any], where: str) -> int | None:
    size = spec.get("group_size")
    if size == -1:
        return None
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise FormatMismatch(
            f"`group_size` of the Quark quantization config is `{size!r}`, expected a positive "
            f"number: {where}"
        )
    return size


def _block(spec: Mapping[str, Any], where: str) -> tuple[int, int]:
    sizes = spec.get("block_size")
    if (
        not isinstance(sizes, list)
        or len(sizes) != 2
        or not all(isinstance(size, int) and size > 0 for size in sizes)
    ):
        raise FormatMismatch(
            f"`block_size` of the Quark quantization config is `{sizes!r}`, expected [rows, "
            f"columns]: {where}"
        )
    return sizes[0], sizes[1]


def _scale(spec: Mapping[str, Any]) -> ScaleKind:
    is_exponent = "e8m0" in (spec.get("scale_format"), spec.get("scale_type"))
    is_exponent |= spec.get("scale_type") == "float8_e8m0fnu" or spec.get("dtype") == "mx"
    return "e8m0" if is_exponent else "float"
