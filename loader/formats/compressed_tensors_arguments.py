"""compressed-tensors `QuantizationArgs`: how a config describes one weight or one input.

    num_bits, type      int of 2 to 8 bits; float of 8 (e4m3), 6 (e2m3) and 4 bits (e2m1)
    strategy            weights: tensor, channel, group, block, tensor_group;
                        inputs: tensor, token, group, tensor_group
                        left out: tensor without a group size, channel for -1, else group
    symmetric           true if left out
    group_size          columns, or features of an input, that share a scale
    block_structure     [rows, columns] or "128x128"
    dynamic             inputs: true, false (the checkpoint holds scales), or "local": the scale of
                        the tensor is in the checkpoint, those of its groups are not
    actorder            group, dynamic: columns find their group in `weight_g_idx` (until 0.19);
                        weight, static: columns are in order again
    scale_dtype         torch.uint8 for scales 2^(byte - 127)

What scales are follows from the format, see `SCALE_KINDS`; without a format, the format is the
first that fits, as in `infer_format`.

Source: compressed-tensors 0.20.1, `quantization/quant_args.py`, `compressors/format.py` and
`can_compress` of each compressor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, get_args

from quantload.errors import FormatMismatch, UnsupportedVariant
from quantload.quant.grid import E2M1, E2M3, E4M3, INT8, Grid, int_grid
from quantload.quant.scheme import (
    Granularity,
    InputGranularity,
    InputScheme,
    ScaleKind,
    Scheme,
    WeightScheme,
)

PACKED, INT, FLOAT, NAIVE = "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"
NVFP4, MXFP4 = "nvfp4-pack-quantized", "mxfp4-pack-quantized"
MXFP6, MXFP8 = "mxfp6-pack-quantized", "mxfp8-quantized"
DENSE = "dense"
READ_FORMATS = (PACKED, INT, FLOAT, NAIVE, NVFP4, MXFP4, MXFP6, MXFP8, DENSE)
SCALE_KINDS: dict[str, ScaleKind] = {NVFP4: "e4m3", MXFP4: "e8m0", MXFP6: "e8m0", MXFP8: "e8m0"}

_FLOATS = {4: E2M1, 6: E2M3, 8: E4M3}
# The only grids and group sizes of the formats that have scales of their own kind.
_FIXED = {NVFP4: (E2M1, 16), MXFP4: (E2M1, 32), MXFP6: (E2M3, 32), MXFP8: (E4M3, 32)}
_SCALE_DTYPES = {"e4m3": "torch.float8_e4m3fn", "e8m0": "torch.uint8"}


# -- reading ---------------------------------------------------------------------------------------


def infer_format(arguments: Mapping[str, Any], *, has_inputs: bool) -> str:
    """Return the format that the library takes where the config leaves it out.

    Args:
        arguments: `weights` of a group.
        has_inputs: True if the group quantizes inputs.
    """
    bits, is_float = arguments.get("num_bits", 8), arguments.get("type", "int") == "float"
    group_size = arguments.get("group_size")
    if not is_float:
        return INT if has_inputs else PACKED
    for name, (grid, size) in _FIXED.items():
        fits = bits == grid.bits and group_size == size
        if fits and (name != MXFP8 or str(arguments.get("scale_dtype")).endswith("uint8")):
            return name
    return FLOAT if has_inputs else NAIVE


def parse_weight(arguments: Mapping[str, Any], layout: str, where: str) -> WeightScheme:
    """Parse `weights` of a group.

    Args:
        arguments: The object.
        layout: Format of the group.
        where: Name of the group, for messages.

    Raises:
        UnsupportedVariant: It needs something that quantload does not read.
        FormatMismatch: It is malformed, or contradicts the format.
    """
    strategy = _strategy(arguments, where)
    granularity: Granularity = "group" if strategy == "tensor_group" else strategy
    if granularity not in get_args(Granularity):
        raise UnsupportedVariant(f"weight strategy `{strategy}` is not read, in group `{where}`")
    weight = WeightScheme(
        grid=_grid(arguments, where),
        granularity=granularity,
        symmetric=_flag(arguments, "symmetric", where, default=True),
        group_size=_group_size(arguments, where) if granularity == "group" else None,
        block=_block(arguments.get("block_structure"), where) if granularity == "block" else None,
        scale=SCALE_KINDS.get(layout, "float"),
        act_order=_act_order(arguments.get("actorder"), where),
    )
    _check_format(weight, layout, where)
    return weight


def parse_input(arguments: Mapping[str, Any], where: str) -> InputScheme:
    """Parse `input_activations` of a group; arguments and errors as in `parse_weight`."""
    strategy: Any = arguments.get("strategy") or _inferred_strategy(arguments.get("group_size"))
    is_nvfp4 = strategy == "tensor_group"
    granularity: InputGranularity = "group" if is_nvfp4 else strategy
    if not isinstance(strategy, str) or granularity not in get_args(InputGranularity):
        raise UnsupportedVariant(f"input strategy `{strategy}` is not read, in group `{where}`")
    grid = _grid(arguments, where)
    has_exponents = str(arguments.get("scale_dtype")).endswith("uint8") or grid == E2M3
    return InputScheme(
        grid=grid,
        granularity=granularity,
        group_size=_group_size(arguments, where) if granularity == "group" else None,
        dynamic=arguments.get("dynamic") == "local"
        or _flag(arguments, "dynamic", where, default=False),
        symmetric=_flag(arguments, "symmetric", where, default=True),
        scale="e4m3" if is_nvfp4 else "e8m0" if has_exponents else "float",
    )


def _strategy(arguments: Mapping[str, Any], where: str) -> Any:  # noqa: ANN401 - JSON
    strategy = arguments.get("strategy")
    if strategy is None:
        return _inferred_strategy(arguments.get("group_size"))
    if not isinstance(strategy, str):
        raise FormatMismatch(f"`strategy` is `{strategy}`, expected a name, in group `{where}`")
    return strategy.lower()


def _inferred_strategy(group_size: Any) -> Granularity:  # noqa: ANN401 - JSON
    """As the library does where `strategy` is left out."""
    if group_size is None:
        return "tensor"
    return "channel" if group_size == -1 else "group"


def _check_format(weight: WeightScheme, layout: str, where: str) -> None:
    if layout in _FIXED:
        grid, size = _FIXED[layout]
        fits = weight.grid == grid and weight.group_size == size and weight.symmetric
        expected = f"symmetric `{grid.name}` in groups of {size}"
    elif layout in (PACKED, INT):
        fits, expected = weight.grid.is_integer, "integers"
    else:
        fits = weight.grid == E4M3 or (layout == NAIVE and weight.grid.is_integer)
        expected = "`e4m3`" if layout == FLOAT else "`e4m3` or integers"
    if not fits:
        group = f" in groups of {weight.group_size}" if weight.group_size else ""
        raise FormatMismatch(
            f"format `{layout}` of config group `{where}` holds {expected}, but the group says "
            f"`{weight.grid.name}`{group}{'' if weight.symmetric else ', not symmetric'}"
        )


def _grid(arguments: Mapping[str, Any], where: str) -> Grid:
    bits, kind = arguments.get("num_bits", 8), arguments.get("type", "int")
    if isinstance(bits, int) and not isinstance(bits, bool):
        if kind == "float" and bits in _FLOATS:
            return _FLOATS[bits]
        if kind == "int" and 2 <= bits <= 8:
            return int_grid(bits)
    raise UnsupportedVariant(f"{bits}-bit `{kind}` values are not read, in config group `{where}`")


def _flag(arguments: Mapping[str, Any], key: str, where: str, *, default: bool) -> bool:
    value = arguments.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise FormatMismatch(
            f"`{key}` is `{value!r}`, expected true or false, in config group `{where}`"
        )
    return value


def _act_order(value: Any, where: str) -> bool:  # noqa: ANN401 - JSON
    if value is None or isinstance(value, bool):
        return value is True
    if value not in ("group", "dynamic", "weight", "static"):
        raise UnsupportedVariant(f"`actorder` is `{value}`, which is not read, in group `{where}`")
    return value in ("group", "dynamic")


def _group_size(arguments: Mapping[str, Any], where: str) -> int:
    size = arguments.get("group_size")
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise FormatMismatch(
            f"`group_size` is `{size}`, expected a positive number, in config group `{where}`"
        )
    return size


def _block(value: Any, where: str) -> tuple[int, int]:  # noqa: ANN401 - JSON
    """Read [128, 128] or "128x128"."""
    match = re.fullmatch(r"(\d+)x(\d+)", value) if isinstance(value, str) else None
    sizes = [int(match[1]), int(match[2])] if match else value
    if (
        not isinstance(sizes, list)
        or len(sizes) != 2
        or not all(isinstance(s, int) and not isinstance(s, bool) and s > 0 for s in sizes)
    ):
        raise FormatMismatch(
            f"`block_structure` is `{value}`, expected [rows, columns], in config group `{where}`"
        )
    return sizes[0], sizes[1]


# -- writing ---------------------------------------------------------------------------------------


def written_format(scheme: Scheme) -> str:
    """Return the layout in which a scheme is written."""
    assert scheme.weight is not None, "full precision has no layout"
    weight = scheme.weight
    for name, (grid, size) in _FIXED.items():
        if (weight.grid, weight.group_size, weight.scale) == (grid, size, SCALE_KINDS[name]):
            return name
    if weight.grid == E4M3:
        return FLOAT
    # NOTE: the library infers int-quantized wherever inputs are quantized. Packed codes take half
    # the space or less, and vLLM 0.33 has kernels for fewer than 8 bits in this format only.
    return INT if weight.grid == INT8 and scheme.input is not None else PACKED


def weight_arguments(weight: WeightScheme) -> dict[str, Any]:
    """Return what the config says of a weight."""
    return {
        **_number_arguments(weight.grid),
        "symmetric": weight.symmetric,
        "strategy": "tensor_group" if weight.scale == "e4m3" else weight.granularity,
        "group_size": weight.group_size,
        "block_structure": list(weight.block) if weight.block else None,
        "dynamic": False,
        "actorder": "group" if weight.act_order else None,
        "observer": "minmax",
        "observer_kwargs": {},
        **_scale_arguments(weight.scale),
    }


def input_arguments(scheme: InputScheme | None) -> dict[str, Any] | None:
    """Return what the config says of an input."""
    if scheme is None:
        return None
    is_nvfp4 = scheme.scale == "e4m3"
    return {
        **_number_arguments(scheme.grid),
        "symmetric": scheme.symmetric,
        "strategy": "tensor_group" if is_nvfp4 else scheme.granularity,
        "group_size": scheme.group_size,
        "block_structure": None,
        "dynamic": "local" if is_nvfp4 and scheme.dynamic else scheme.dynamic,
        "actorder": None,
        "observer": None,
        "observer_kwargs": {},
        **_scale_arguments(scheme.scale),
    }


def _number_arguments(grid: Grid) -> dict[str, Any]:
    return {"num_bits": grid.bits, "type": "int" if grid.is_integer else "float"}


def _scale_arguments(kind: ScaleKind) -> dict[str, str]:
    return {} if kind == "float" else {"scale_dtype": _SCALE_DTYPES[kind]}
