"""What the parts of each torchao tensor class are; see `loader/formats/torchao.py` for the bytes.

A layout is made from headers and attributes alone.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from quantload.loader.checkpoint import TensorEntry
from quantload.loader.formats.torchao_config import Rule
from quantload.loader.formats.torchao_shapes import (
    FLOAT8,
    Layout,
    inner_of,
    input_of,
    shape_of,
    sharing_of,
)
from quantload.loader.formats.torchao_stored import Stored
from quantload.loader.source import FLOAT_DTYPES
from quantload.quant.grid import INT8, Grid, int_grid
from quantload.quant.scheme import InputScheme

INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def affine(
    stored: Stored, codes: TensorEntry, grid: Grid, input: InputScheme | None, *, symmetric: bool
) -> Layout:
    """(code - zero_point) * scale, in the wider of the weight's and the scale's dtype.

    Args:
        stored: Has the parts `scale` and, perhaps, `zero_point`.
        codes: Header of the codes, one an element.
        grid: What a code stands for.
        input: How the input is quantized.
        symmetric: True if the config asks for no zero points.
    """
    shape = shape_of(stored, codes)
    sharing = sharing_of(stored, shape, stored.sizes("block_size", len(shape)))
    scale = stored.part("scale", FLOAT_DTYPES)
    sharing.check(stored, scale)
    zero, is_float = "", False
    if "zero_point" in stored or not symmetric:
        entry = stored.part("zero_point", (*INTEGERS, *FLOAT_DTYPES))
        sharing.check(stored, entry)
        zero, is_float = "zero_point", entry.dtype.is_floating_point
    result = stored.dtype("dtype")
    evaluation = torch.promote_types(result, scale.dtype)
    if is_float and evaluation != result:
        raise stored.refused("a zero point that is rounded before it meets its scale")
    return Layout(
        shape=shape,
        block=sharing.block,
        weight=sharing.scheme(
            grid, symmetric=symmetric and not is_float, zero="float" if is_float else "int"
        ),
        evaluation=evaluation,
        result=result,
        input=input,
        zero=zero,
        inner=inner_of(stored, shape[-1]),
    )


def float8(stored: Stored, _: Rule | None) -> Layout:
    """Return the layout of a `Float8Tensor`."""
    codes = stored.part("qdata", tuple(FLOAT8))
    shape = shape_of(stored, codes)
    is_whole = not stored.attribute("block_size")
    sizes = shape if is_whole else stored.sizes("block_size", len(shape))
    sharing = sharing_of(stored, shape, sizes)
    scale = stored.part("scale", (torch.float32, torch.bfloat16, torch.float16))
    sharing.check(stored, scale)
    return Layout(
        shape=shape,
        block=sharing.block,
        weight=sharing.scheme(FLOAT8[codes.dtype]),
        evaluation=torch.float32,
        result=stored.dtype("dtype"),
        input=input_of(stored, "act_quant_kwargs"),
    )


def int8(stored: Stored, _: Rule | None) -> Layout:
    """Return the layout of an `Int8Tensor`."""
    codes = stored.part("qdata", (torch.int8,))
    layout = affine(stored, codes, INT8, input_of(stored, "act_quant_kwargs"), symmetric=True)
    fixed = [part for part in ("act_quant_scale", "act_quant_zero_point") if part in stored]
    if not fixed:
        return layout
    stored.part("act_quant_scale", FLOAT_DTYPES)
    if any(stored.parts[part].num_elements != 1 for part in fixed):
        raise stored.refused("a fixed scale of inputs that is not one number")
    grid = INT8 if layout.input is None else layout.input.grid
    is_shifted = len(fixed) == 2
    return replace(
        layout,
        input=InputScheme(grid=grid, granularity="tensor", dynamic=False, symmetric=not is_shifted),
        input_scale=fixed[0],
        input_zero=fixed[1] if is_shifted else "",
    )


def intx(stored: Stored, rule: Rule | None) -> Layout:
    """Return the layout of an `IntxUnpackedToInt8Tensor`."""
    codes = stored.part("qdata", (torch.int8,))
    target = stored.attribute("target_dtype")
    bits = {f"int{bits}": bits for bits in range(1, 9)}.get(str(target))
    if bits is None:
        raise stored.wrong_attribute("target_dtype", "one of int1 to int8")
    activation = stored.attribute("activation_quantization")
    if stored.attribute("apply_int8_act_asym_per_token_quant") is True:  # torchao 0.13
        activation = "int8_asym_per_token"
    if activation not in (None, "int8_asym_per_token"):
        raise stored.refused(f"activation quantization `{activation}`")
    token = InputScheme(grid=INT8, granularity="token", symmetric=False)
    symmetric = rule is None or rule.is_symmetric
    input = token if activation else None
    return affine(stored, codes, int_grid(bits), input, symmetric=symmetric)


def int4(stored: Stored, _: Rule | None) -> Layout:
    """Return the layout of an `Int4Tensor`."""
    codes = stored.part("qdata", (torch.int8, torch.uint8))
    packed = shape_of(stored, codes)
    shape = (*packed[:-1], 2 * packed[-1])
    if stored.attribute("shape") is not None and stored.sizes("shape", len(shape)) != shape:
        raise stored.wrong(codes, f"shape `{packed}`", "two codes a byte of its `shape`")
    activation = stored.dtype("activation_dtype", default=torch.bfloat16)
    if activation not in FLOAT_DTYPES:
        raise stored.refused(f"a `{stored.kind}` for inputs in `{activation}`")
    sizes = stored.sizes("block_size", len(shape))
    sharing = sharing_of(stored, shape, sizes)
    if any(size != 1 for size in sizes[:-1]):
        raise stored.wrong_attribute("block_size", "groups of columns")
    counts = (*sharing.counts[:-2], sharing.counts[-1], sharing.counts[-2])
    for part in ("scale", "zero_point"):
        entry = stored.part(part, FLOAT_DTYPES)
        if entry.shape != counts:
            raise stored.wrong(entry, f"shape `{entry.shape}`", f"`{counts}`")
    return Layout(
        shape=shape,
        block=sharing.block,
        weight=sharing.scheme(int_grid(4), symmetric=False, zero="offset"),
        evaluation=torch.float32,
        result=None,
        zero="zero_point",
        use="offset",
        is_packed=True,
        is_turned=True,
        inner=inner_of(stored, shape[-1]),
    )
