"""Quantized weights of any source, written as compressed-tensors with the very same values.

    planned_scheme, why_not_planned     from headers alone: what a weight would become
    lossless_layout                     its tensors, before anything is read
    lossless_scheme, why_not_lossless   from the weight itself
    encode_lossless                     the tensors; refuses what would come out differently

compressed-tensors computes `(code - zero) * scale` in the dtype of the scale. So

* scales are stored in the dtype in which the source computes, and a factor or divisor of them
  (`outer`) is multiplied in beforehand, as the source does at each use;
* unsigned codes and their zero points both lose 2^(b-1): the difference is the same;
* zero points that are whole numbers of the grid become integers, whatever dtype they had;
* groups that do not divide the columns become smaller ones that do;
* MX formats take scales that are powers of two, and compute in bfloat16;
* NVFP4 divides by its global scale. One that the source multiplies by is replaced by its
  reciprocal or a neighbour of that: scales may differ in their last bit, finished values may not.

Whether that reproduces the source is computed, not believed: `encode_lossless` compares all values.
Equal means equal as numbers (zeros may differ in sign), in the dtype to which the source rounds
its finished values, which compressed-tensors may leave wider; for NVFP4 in bfloat16, to which
compressed-tensors rounds them, where the source may leave them wider.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from quantload.errors import NotLossless, ShapeError
from quantload.loader.checkpoint import TensorEntry
from quantload.loader.formats.compressed_tensors_canonical import canonical
from quantload.loader.formats.compressed_tensors_encode import encode, layout
from quantload.loader.formats.compressed_tensors_shapes import weight_of
from quantload.loader.output_files import Leaf
from quantload.loader.source import FLOAT_DTYPES, SourceWeight
from quantload.quant.chunks import row_chunks
from quantload.quant.grid import E2M1, E2M3, E4M3, Grid, int_grid
from quantload.quant.qtensor import QuantTensor
from quantload.quant.scheme import InputScheme, ScaleKind, Scheme, WeightScheme, scheme_of

_MICROSCALED = (E2M1, E2M3, E4M3)
_INPUT_GRIDS = (E2M1, E2M3, E4M3)
_SMALLEST_GROUP = 8  # of groups made smaller to divide the columns


# -- from headers ----------------------------------------------------------------------------------


def planned_scheme(weight: SourceWeight, *, act_order: bool = False) -> Scheme:
    """Return the scheme in which a weight would be written with the same values.

    Values may still stand against it: zero points that are no whole numbers or off the grid, a
    global scale without an equal divisor, an order of evaluation that rounds otherwise.

    Args:
        weight: As its format describes it.
        act_order: Accept `weight_g_idx`, which compressed-tensors reads until 0.19.

    Raises:
        NotLossless: compressed-tensors has nothing of this kind.
    """
    if weight.scheme is None or weight.scheme.weight is None:
        raise NotLossless(f"module `{weight.module}` is not quantized")
    if not weight.is_matrix:
        kind = f"{weight.experts} experts" if weight.experts else "input features first"
        raise NotLossless(f"parameter `{weight.parameter_name}` holds {kind}")
    stored = weight.scheme.weight
    if stored.zero == "offset" and not stored.symmetric:
        raise NotLossless("its groups have offsets in units of a weight, not zero points")
    symmetric = stored.symmetric and (not stored.grid.is_integer or stored.grid.low < 0)
    target = _expressed(
        replace(stored, symmetric=symmetric, zero="int"), weight.shape, act_order=act_order
    )
    return scheme_of(target, _kept_input(weight.scheme.input, weight.leaves))


def why_not_planned(weight: SourceWeight, *, act_order: bool = False) -> str | None:
    """Say why a weight cannot be written with the same values; None if headers allow it."""
    try:
        planned_scheme(weight, act_order=act_order)
    except NotLossless as error:
        return str(error)
    return None


def lossless_layout(
    weight: SourceWeight, scheme: Scheme, tensors: Mapping[str, TensorEntry]
) -> dict[str, Leaf]:
    """Return the tensors that `encode_lossless` will make of a weight, by leaf.

    Args:
        weight: As its format describes it.
        scheme: Its `planned_scheme`.
        tensors: Headers of the source, by tensor name.
    """
    leaves = layout(scheme, weight.shape, _scale_dtype(weight, tensors))
    divisor = tensors.get(weight.leaves.get("weight_global_scale", ""))
    if divisor is not None and "weight_global_scale" in leaves:
        leaves["weight_global_scale"] = Leaf(torch.float32, divisor.shape and (1,))
    if "input_scale" in leaves:
        leaves["input_scale"] = Leaf(tensors[weight.leaves["input_scale"]].dtype, (1,))
    return leaves


def _scale_dtype(weight: SourceWeight, tensors: Mapping[str, TensorEntry]) -> torch.dtype:
    """Return a dtype that loses nothing: neither of stored scales nor of the source's values."""
    dtype = weight.dtype
    for leaf, name in weight.leaves.items():
        stored = tensors[name].dtype
        if "scale" in leaf and not leaf.startswith("input") and stored in FLOAT_DTYPES:
            dtype = torch.promote_types(dtype, stored)
    return dtype


def _kept_input(input: InputScheme | None, leaves: Mapping[str, str]) -> InputScheme | None:
    """Return the input scheme if the config can say it and its scales are there, else None."""
    if input is None or not (input.grid.is_integer or input.grid in _INPUT_GRIDS):
        return None
    if input.grid.is_integer and input.grid.low == 0:
        return None
    if input.scale == "e4m3":
        is_there = {"input_global_scale", "input_scale"} & leaves.keys()
        return input if is_there and input.group_size == 16 else None
    if input.dynamic:
        return input
    needed = {"input_scale"} if input.symmetric else {"input_scale", "input_zero_point"}
    return input if needed <= leaves.keys() and input.granularity == "tensor" else None


# -- what compressed-tensors has -------------------------------------------------------------------


def _expressed(weight: WeightScheme, shape: tuple[int, int], *, act_order: bool) -> WeightScheme:
    """Return a scheme as compressed-tensors can express it; see `planned_scheme`."""
    if weight.act_order and not act_order:
        raise NotLossless(
            "its columns are ordered by activation, and compressed-tensors reads no "
            "`weight_g_idx` since 0.20"
        )
    kind = _scale_kind(weight)
    group_size = _dividing(weight, shape[1])
    return replace(weight, grid=_expressed_grid(weight.grid), scale=kind, group_size=group_size)


def _expressed_grid(grid: Grid) -> Grid:
    if grid.is_integer and 2 <= grid.bits <= 8:
        return int_grid(grid.bits)
    if grid not in (E4M3, E2M1, E2M3):
        raise NotLossless(f"compressed-tensors has no weights on the grid `{grid.name}`")
    return grid


def _scale_kind(weight: WeightScheme) -> ScaleKind:
    """Return the kind of scales that the format of a grid has."""
    if weight.grid == E4M3 and weight.scale == "e8m0" and weight.group_size == 32:
        return "e8m0"
    if weight.grid not in (E2M1, E2M3):
        return "float"
    sizes = {("e2m1", "e4m3"): 16, ("e2m1", "e8m0"): 32, ("e2m3", "e8m0"): 32}
    size = sizes.get((weight.grid.name, weight.scale))
    if size is None or weight.group_size != size or not weight.symmetric:
        raise NotLossless(
            f"compressed-tensors has no `{weight.grid.name}` weights with {weight.scale} scales in "
            f"groups of {weight.group_size}"
        )
    return weight.scale


def _dividing(weight: WeightScheme, columns: int) -> int | None:
    """Return a group size that divides the columns."""
    size = weight.group_size
    if size is None or columns % size == 0:
        return size
    smaller = next((s for s in range(size, 0, -1) if size % s == columns % s == 0), 1)
    if smaller < _SMALLEST_GROUP or weight.grid in (E2M1, E2M3) or weight.act_order:
        raise NotLossless(f"groups of {size} do not divide its {columns} columns")
    return smaller


# -- from the weight -------------------------------------------------------------------------------


def lossless_scheme(
    tensor: QuantTensor, input: InputScheme | None = None, *, act_order: bool = False
) -> Scheme:
    """Return the scheme in which a weight can be written with the same values.

    Args:
        tensor: Canonical weight [N, K].
        input: How its input is quantized.
        act_order: Accept `weight_g_idx`, which compressed-tensors reads until 0.19.

    Raises:
        NotLossless: compressed-tensors has nothing of this kind.
    """
    scheme = scheme_of(_expressed(_stored(tensor), tensor.shape, act_order=act_order), input)
    reason = why_not_lossless(tensor, scheme)
    if reason is not None:
        raise NotLossless(reason)
    return scheme


def _stored(tensor: QuantTensor) -> WeightScheme:
    """Return the scheme that a canonical weight shows."""
    (rows, columns), grid = tensor.shape, tensor.grid
    folded = tensor if tensor.scale.dtype == torch.float8_e4m3fn else tensor.folded()
    height, width = folded.block
    weight = WeightScheme(grid=grid, granularity="tensor", symmetric=_is_symmetric(tensor))
    if tensor.scale.dtype == torch.float8_e8m0fnu and grid in _MICROSCALED:
        weight = replace(weight, scale="e8m0")
    if tensor.scale.dtype == torch.float8_e4m3fn and grid == E2M1:
        weight = replace(weight, scale="e4m3")
    if tensor.group_of is not None:
        return replace(weight, granularity="group", group_size=width, act_order=True)
    if width >= columns and (height == 1 or height >= rows) and weight.scale == "float":
        return replace(weight, granularity="channel" if height == 1 else "tensor")
    if height == 1:
        return replace(weight, granularity="group", group_size=width)
    return replace(weight, granularity="block", block=(height, width))


def _is_symmetric(tensor: QuantTensor) -> bool:
    middle = 1 << (tensor.grid.bits - 1)
    is_unsigned = tensor.grid.is_integer and tensor.grid.low == 0
    if tensor.zero is None:
        return not is_unsigned and tensor.offset is None
    return bool((tensor.zero.to(torch.float32) == (middle if is_unsigned else 0)).all())


def why_not_lossless(tensor: QuantTensor, scheme: Scheme) -> str | None:
    """Say why a weight cannot be written in a scheme with the same values; None if it can."""
    try:
        _checked(tensor, scheme)
    except NotLossless as error:
        return str(error)
    return None


def encode_lossless(
    tensor: QuantTensor, scheme: Scheme, planned: Mapping[str, Leaf] | None = None
) -> dict[str, Tensor]:
    """Return the tensors of a weight, by leaf; compressed-tensors gets the source's values of them.

    Args:
        tensor: Canonical weight [N, K] of any source.
        scheme: Its `planned_scheme` or `lossless_scheme`.
        planned: Its `lossless_layout`, which the tensors then have. None takes the dtype in which
            the source computes for the scales.

    Raises:
        NotLossless: Values would differ, or what is planned cannot hold them.
    """
    scale_dtype = None
    if planned is not None and weight_of(scheme).scale == "float":
        scale_dtype = planned["weight_scale"].dtype
    written = _checked(tensor, scheme, scale_dtype)
    leaves = encode(_with_input_of(written, tensor), scheme)
    if "weight_global_scale" in leaves and written.evaluation.dtype != torch.float32:
        leaves["weight_global_scale"] = leaves["weight_global_scale"].reshape(())
    made = {leaf: Leaf(part.dtype, tuple(part.shape)) for leaf, part in leaves.items()}
    if planned is not None and made != dict(planned):
        raise NotLossless(f"its tensors are {made}, planned were {dict(planned)}")
    return leaves


def _with_input_of(written: QuantTensor, tensor: QuantTensor) -> QuantTensor:
    return replace(
        written,
        input_scale=tensor.input_scale,
        input_zero=tensor.input_zero,
        evaluation=replace(written.evaluation, input=tensor.evaluation.input),
    )


def _checked(
    tensor: QuantTensor, scheme: Scheme, scale_dtype: torch.dtype | None = None
) -> QuantTensor:
    """Return the weight as compressed-tensors will read it, with equal values."""
    try:
        written = canonical(tensor, scheme, scale_dtype)
    except ShapeError as error:
        raise NotLossless(str(error)) from error
    kind = weight_of(scheme).scale
    differing = sum(
        _count_differing(tensor.rows(a, b), written.rows(a, b), kind)
        for a, b in row_chunks(tensor.shape, tensor.device)
    )
    if differing:
        total = tensor.codes.numel()
        raise NotLossless(
            f"{differing} of {total} values would differ: the source computes in another order or "
            f"dtype than compressed-tensors does for `{weight_of(scheme).grid.name}`"
        )
    return written


def _count_differing(tensor: QuantTensor, written: QuantTensor, kind: ScaleKind) -> int:
    ours, theirs = written.dequantize(), tensor.dequantize()
    if kind == "e4m3":
        theirs = theirs.to(ours.dtype)
    elif kind == "float":
        ours = ours.to(theirs.dtype)
    wide = torch.promote_types(ours.dtype, theirs.dtype)
    return int((ours.to(wide) != theirs.to(wide)).sum())
