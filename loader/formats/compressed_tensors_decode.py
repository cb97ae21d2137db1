"""compressed-tensors: from the tensors of a module to its canonical weight."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quantload.errors import FormatMismatch
from quantload.loader.formats.compressed_tensors_shapes import is_padded, scale_shape, weight_of
from quantload.loader.formats.finite import refuse_nonfinite
from quantload.loader.formats.float8 import as_scale
from quantload.loader.formats.int_fields import signed
from quantload.loader.source import SourceWeight
from quantload.quant.grid import Grid
from quantload.quant.packing import unpack_bytes, unpack_dense, unpack_padded
from quantload.quant.qtensor import Evaluation, QuantTensor


def decode_parts(
    parts: Mapping[str, Tensor],
    weight: SourceWeight,
    *,
    version: tuple[int, ...] | None,
    checkpoint_name: str,
) -> QuantTensor:
    """Return the canonical form of a weight.

    Args:
        parts: Its tensors by leaf, without `weight_shape`.
        weight: Its description.
        version: Version of the config.
        checkpoint_name: For messages.

    Raises:
        NonFiniteWeight: Codes or scales hold NaN or infinity.
        FormatMismatch: Values contradict the scheme.
        UnsupportedVariant: The layout of packed fields is not known.
    """
    assert weight.scheme is not None, "only quantized weights are decoded"
    for leaf, part in parts.items():
        refuse_nonfinite(_as_floats(leaf, part, weight), weight.leaves[leaf], checkpoint_name)
    scheme = weight_of(weight.scheme)
    rows, columns = weight.shape
    grid_shape = scale_shape(scheme, weight.shape)
    if "weight_g_idx" in parts:  # of some columns, groups are those of all
        grid_shape = grid_shape[0], parts["weight_scale"].shape[-1]
    codes, zero = _codes(parts, weight, version), _zero(parts, weight, version)
    scale = _as_floats("weight_scale", parts["weight_scale"], weight).reshape(grid_shape)
    outer = parts.get("weight_global_scale")
    _check_values(codes, scale, zero, outer, weight, checkpoint_name)
    return QuantTensor(
        grid=scheme.grid,
        codes=codes,
        scale=scale,
        zero=None if scheme.symmetric or zero is None else zero.reshape(grid_shape),
        outer=None if outer is None else outer.reshape(1, 1),
        block=scheme.block_of(rows, columns),
        group_of=_group_of_columns(parts.get("weight_g_idx"), weight, grid_shape[1]),
        evaluation=_evaluation(weight.dtype, outer),
    )


def _as_floats(leaf: str, part: Tensor, weight: SourceWeight) -> Tensor:
    """Return exponents of scales as what they mean; all other tensors as they are."""
    assert weight.scheme is not None, "only quantized weights are decoded"
    is_exponent = leaf == "weight_scale" and weight_of(weight.scheme).scale == "e8m0"
    return as_scale(part) if is_exponent else part


def _evaluation(dtype: torch.dtype, outer: Tensor | None) -> Evaluation:
    if outer is None:
        return Evaluation(dtype=dtype)
    # NOTE: torch rounds bfloat16 / float32 [1] to float32, but bfloat16 / float32 [] to bfloat16.
    working = torch.float32 if outer.ndim else dtype
    return Evaluation(dtype=working, outer="scale/", result=dtype, scale=torch.float32)


# -- codes and zero points -------------------------------------------------------------------------


def _codes(
    parts: Mapping[str, Tensor], weight: SourceWeight, version: tuple[int, ...] | None
) -> Tensor:
    assert weight.scheme is not None, "only quantized weights are decoded"
    grid, columns = weight_of(weight.scheme).grid, weight.shape[1]
    if "weight" in parts:
        return parts["weight"]
    packed = parts["weight_packed"]
    if packed.dtype == torch.uint8:
        return unpack_bytes(packed, grid.bits, columns)
    padded = is_padded(packed.shape[1], columns, grid.bits, version)
    return _unpacked(packed, grid, columns, padded=padded)


def _zero(
    parts: Mapping[str, Tensor], weight: SourceWeight, version: tuple[int, ...] | None
) -> Tensor | None:
    assert weight.scheme is not None, "only quantized weights are decoded"
    zero, scheme = parts.get("weight_zero_point"), weight_of(weight.scheme)
    if zero is None or zero.dtype != torch.int32:
        return zero
    words, bits = parts["weight_packed"].shape[1], scheme.grid.bits
    blocks, _ = scale_shape(scheme, weight.shape)
    padded = is_padded(words, weight.shape[1], bits, version)
    return _transposed(_unpacked(_transposed(zero), scheme.grid, blocks, padded=padded))


def _unpacked(words: Tensor, grid: Grid, columns: int, *, padded: bool) -> Tensor:
    unpack = unpack_padded if padded else unpack_dense
    return signed(unpack(words, grid.bits, columns), grid.bits)


def _transposed(tensor: Tensor) -> Tensor:
    # NOTE: `contiguous` keeps the odd strides of a column of one element; packing views bytes.
    return tensor.T.clone(memory_format=torch.contiguous_format)


# -- checks of values ------------------------------------------------------------------------------


def _check_values(
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    outer: Tensor | None,
    weight: SourceWeight,
    checkpoint_name: str,
) -> None:
    assert weight.scheme is not None, "only quantized weights are decoded"
    scheme, leaves = weight_of(weight.scheme), weight.leaves
    where = f", in `{checkpoint_name}`"
    code_leaf = "weight" if "weight" in leaves else "weight_packed"
    are_fields = "weight_packed" in leaves  # of as many bits as the grid has: all of them fit
    for leaf, part in ((code_leaf, codes), ("weight_zero_point", zero)):
        if part is None or part.dtype != torch.int8 or (part is codes and are_fields):
            continue
        if not _fits(part, scheme.grid):
            raise FormatMismatch(
                f"tensor `{leaves[leaf]}` has values from {int(part.min())} to {int(part.max())}, "
                f"expected `{scheme.grid.name}`{where}"
            )
    if zero is not None and scheme.symmetric and bool(zero.to(torch.float32).any()):
        raise FormatMismatch(
            f"tensor `{leaves['weight_zero_point']}` is not all zero, but the config says that "
            f"`{weight.scheme}` is symmetric{where}"
        )
    if outer is not None and not bool(outer.all()):
        raise FormatMismatch(
            f"tensor `{leaves['weight_global_scale']}` is zero, expected a divisor{where}"
        )
    if not bool(scale.to(torch.float32).any()) and bool(codes.view(torch.uint8).any()):
        raise FormatMismatch(
            f"all scales of tensor `{leaves['weight_scale']}` are zero, but the codes are not"
            f"{where}",
            hint="the tool that wrote it left its scales out; quantize the model again",
        )


def _fits(codes: Tensor, grid: Grid) -> bool:
    if not grid.is_integer or grid.bits == 8 or codes.numel() == 0:
        return True
    return bool(codes.min() >= grid.low) and bool(codes.max() <= grid.high)


def _group_of_columns(groups: Tensor | None, weight: SourceWeight, count: int) -> Tensor | None:
    if groups is None or bool((groups == -1).all()):
        return None
    if not bool(((groups >= 0) & (groups < count)).all()):
        raise FormatMismatch(
            f"tensor `{weight.leaves['weight_g_idx']}` has values from {int(groups.min())} to "
            f"{int(groups.max())}, expected {weight.shape[1]} numbers of {count} groups"
        )
    return groups.to(torch.int32)
