"""`AffineQuantizedTensor`, torchao's one class before 0.14, in its plain layout; pickled only.

    tensor_impl             PlainAQTTensorImpl: int_data int8 or uint8, scale, zero_point
    block_size              as in later classes
    quant_min, quant_max    range of the codes; null: that of their dtype
    zero_point_domain       INT     (code - zero_point) * scale
                            NONE    code * scale
                            FLOAT   (code - middle) * scale + zero_point, each step rounded to the
                                    weight's dtype; middle = 2^(bits - 1)

`LinearActivationQuantizedTensor` has one as `original_weight_tensor`, and the function that
quantizes inputs.

Source: torchao 0.13 `dtypes/affine_quantized_tensor.py`, `dtypes/uintx/plain_layout.py`,
`quantization/quant_primitives.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from quantload.loader.formats.torchao_config import Rule
from quantload.loader.formats.torchao_layouts import affine
from quantload.loader.formats.torchao_shapes import Layout, shape_of, sharing_of
from quantload.loader.formats.torchao_stored import Stored
from quantload.quant.grid import INT8, Grid, int_grid, uint_grid
from quantload.quant.scheme import InputScheme

_PARTS = {"int_data": "qdata", "scale": "scale", "zero_point": "zero_point"}
_FLOAT_DOMAIN = ("FLOAT", 2)  # by number where it was pickled
_FUNCTIONS = {
    "_int8_symm_per_token_reduced_range_quant": InputScheme(grid=INT8, granularity="token"),
    "_int8_asymm_per_token_quant": InputScheme(grid=INT8, granularity="token", symmetric=False),
}


def affine_quantized(stored: Stored, rule: Rule | None) -> Layout:
    """Return the layout of an `AffineQuantizedTensor`."""
    return _layout(stored, rule, stored.data, "", None)


def linear_activation(stored: Stored, rule: Rule | None) -> Layout:
    """Return the layout of a `LinearActivationQuantizedTensor`."""
    function = stored.data.get("input_quant_func")
    name = function.get("_type") if isinstance(function, Mapping) else function
    if name not in _FUNCTIONS:
        raise stored.refused(f"activation quantization `{name}`")
    weight = stored.data.get("original_weight_tensor")
    data = weight.get("_data") if isinstance(weight, Mapping) else None
    return _layout(stored, rule, data, "original_weight_tensor.", _FUNCTIONS[str(name)])


def _layout(
    stored: Stored, rule: Rule | None, data: object, start: str, input: InputScheme | None
) -> Layout:
    impl = data.get("tensor_impl") if isinstance(data, Mapping) else None
    if not isinstance(data, Mapping) or not isinstance(impl, Mapping):
        raise stored.refused(f"this form of a `{stored.kind}`")
    if impl.get("_type") != "PlainAQTTensorImpl":
        raise stored.refused(f"layout `{impl.get('_type')}` of a `{stored.kind}`")
    place = f"{start}tensor_impl."
    inside = {part.removeprefix(place): entry for part, entry in stored.parts.items()}
    parts = {_PARTS.get(part, part): entry for part, entry in inside.items()}
    plain = replace(stored, data=data, parts=parts)
    layout = _plain_layout(plain, rule, input)
    return replace(
        layout,
        codes=f"{place}int_data",
        scale=f"{place}scale",
        zero=f"{place}zero_point" if layout.zero else "",
    )


def _plain_layout(stored: Stored, rule: Rule | None, input: InputScheme | None) -> Layout:
    codes = stored.part("qdata", (torch.int8, torch.uint8))
    grid = _grid(stored, codes.dtype)
    zero = stored.parts.get("zero_point")
    if zero is None or not zero.dtype.is_floating_point:
        symmetric = zero is None or (grid.low < 0 and (rule is None or rule.is_symmetric))
        return affine(stored, codes, grid, input, symmetric=symmetric)
    domain = stored.attribute("zero_point_domain")
    if domain not in _FLOAT_DOMAIN:
        raise stored.refused(f"zero point domain `{domain}` of floats")
    shape = shape_of(stored, codes)
    sharing = sharing_of(stored, shape, stored.sizes("block_size", len(shape)))
    dtype = stored.dtype("dtype")
    for part in ("scale", "zero_point"):
        sharing.check(stored, stored.part(part, (dtype,)))
    return Layout(
        shape=shape,
        block=sharing.block,
        weight=sharing.scheme(int_grid(grid.bits), symmetric=False, zero="offset"),
        evaluation=dtype,
        result=dtype,
        input=input,
        zero="zero_point",
        use="offset",
        middle=0 if grid.low < 0 else 1 << (grid.bits - 1),
    )


def _grid(stored: Stored, dtype: torch.dtype) -> Grid:
    """Return the grid of codes in a range."""
    info = torch.iinfo(dtype)
    low, high = stored.attribute("quant_min"), stored.attribute("quant_max")
    low, high = info.min if low is None else low, info.max if high is None else high
    for bits in range(1, 9):
        half = 1 << (bits - 1)
        if (low, high) == (0, 2 * half - 1) and dtype == torch.uint8:
            return uint_grid(bits)
        if high == half - 1 and low in (-half, 1 - half) and dtype == torch.int8:
            return int_grid(bits)
    raise stored.refused(f"a range of codes from `{low}` to `{high}` in `{dtype}`")
