"""The schemes that compressed-tensors has a name for; `config_groups: {"NVFP4": ["Linear"]}`.

Source: compressed-tensors 0.20.1, `quantization/quant_scheme.py`; a test holds them equal.
"""

from __future__ import annotations

from typing import Literal

from quantload.quant.grid import E2M1, E2M3, E4M3, INT8, int_grid
from quantload.quant.scheme import (
    DENSE,
    PRESETS,
    InputScheme,
    Scheme,
    WeightScheme,
    scheme_of,
)

_TOKENS_INT8 = InputScheme(grid=INT8, granularity="token")
_TOKENS_FP8 = InputScheme(grid=E4M3, granularity="token")


def _ints(bits: int) -> WeightScheme:
    return WeightScheme(grid=int_grid(bits), granularity="group", group_size=128)


def _microscaling(bits: Literal[4, 6, 8]) -> WeightScheme:
    grid = {4: E2M1, 6: E2M3, 8: E4M3}[bits]
    return WeightScheme(grid=grid, granularity="group", group_size=32, scale="e8m0")


def _microscaled_input(bits: Literal[4, 8]) -> InputScheme:
    grid = E2M1 if bits == 4 else E4M3
    return InputScheme(grid=grid, granularity="group", group_size=32, scale="e8m0")


_NVFP4 = WeightScheme(grid=E2M1, granularity="group", group_size=16, scale="e4m3")
_NVFP4_INPUT = InputScheme(grid=E2M1, granularity="group", group_size=16, scale="e4m3")
_FP8_GROUPS = InputScheme(grid=E4M3, granularity="group", group_size=128)
_FP8_STATIC = InputScheme(grid=E4M3, granularity="tensor", dynamic=False)

_WITH_INPUTS: dict[str, tuple[WeightScheme, InputScheme | None]] = {
    "W4AFP8": (_ints(4), _TOKENS_FP8),
    "FP8": (WeightScheme(grid=E4M3, granularity="tensor"), _FP8_STATIC),
    "NVFP4A16": (_NVFP4, None),
    "NVFP4": (_NVFP4, _NVFP4_INPUT),
    "MXFP4A16": (_microscaling(4), None),
    "MXFP4": (_microscaling(4), _microscaled_input(4)),
    "MXFP4XFP8": (_microscaling(4), _FP8_GROUPS),
    "MXFP6A16": (_microscaling(6), None),
    "MXFP6A8": (_microscaling(6), _microscaled_input(8)),
    "MXFP8A16": (_microscaling(8), None),
    "MXFP8": (_microscaling(8), _microscaled_input(8)),
    **{
        f"W{bits}A4": (_ints(bits), InputScheme(grid=int_grid(4), granularity="token"))
        for bits in (2, 3, 4)
    },
    **{f"W{bits}A8": (_ints(bits), _TOKENS_INT8) for bits in range(2, 8)},
    **{f"W{bits}A16": (_ints(bits), None) for bits in range(2, 9)},
}

NAMED_SCHEMES: dict[str, Scheme] = {
    "UNQUANTIZED": DENSE,
    "INT8": PRESETS["W8A8"],
    **{name: Scheme(name=name, weight=w, input=i) for name, (w, i) in _WITH_INPUTS.items()},
    **{name: scheme for name, scheme in PRESETS.items() if scheme.weight is not None},
}


def named_scheme(weight: WeightScheme, input: InputScheme | None) -> Scheme:
    """Return a scheme under the name that the field has for it, if it has one.

    Args:
        weight: How the weight is quantized.
        input: How the input is quantized.
    """
    scheme = scheme_of(weight, input)
    if scheme.name in PRESETS:
        return scheme
    for name, (known, known_input) in _WITH_INPUTS.items():
        kinds = {weight.granularity, known.granularity}
        alike = (weight.grid, weight.symmetric, weight.scale) == (
            known.grid,
            known.symmetric,
            known.scale,
        )
        if alike and input == known_input and (len(kinds) == 1 or kinds == {"group", "channel"}):
            return Scheme(name=name, weight=weight, input=input)
    return scheme
