"""compressed-tensors: from a canonical weight to the tensors of a module."""

from __future__ import annotations

import torch
from torch import Tensor

from quantload.loader.formats.compressed_tensors_arguments import (
    MXFP4,
    MXFP6,
    NVFP4,
    PACKED,
    written_format,
)
from quantload.loader.formats.compressed_tensors_shapes import (
    packs_zero_points,
    scale_shape,
    weight_of,
)
from quantload.loader.output_files import Leaf
from quantload.quant.grid import Grid
from quantload.quant.packing import pack_dense, words_dense
from quantload.quant.qtensor import QuantTensor
from quantload.quant.scheme import InputScheme, Scheme, WeightScheme

_SCALE_DTYPES = {"e8m0": torch.uint8, "e4m3": torch.float8_e4m3fn}


def layout(scheme: Scheme, shape: tuple[int, int], scale_dtype: torch.dtype) -> dict[str, Leaf]:
    """Return the tensors that a quantized weight becomes, before anything is computed.

    Args:
        scheme: How it is quantized.
        shape: (N, K).
        scale_dtype: dtype of float scales; scales of another kind have their own.
    """
    weight, format_name = weight_of(scheme), written_format(scheme)
    rows, columns = shape
    blocks = scale_shape(weight, shape)
    grid_shape = blocks if weight.granularity != "tensor" else (1,)
    scale = Leaf(_SCALE_DTYPES.get(weight.scale, scale_dtype), grid_shape)
    bits = weight.grid.bits
    if format_name == PACKED:
        leaves = {"weight_packed": Leaf(torch.int32, (rows, words_dense(columns, bits)))}
    elif format_name in (NVFP4, MXFP4, MXFP6):
        leaves = {"weight_packed": Leaf(torch.uint8, (rows, columns * bits // 8))}
    else:
        leaves = {"weight": Leaf(weight.grid.storage, shape)}
    leaves["weight_scale"] = scale
    if format_name == PACKED:
        leaves["weight_shape"] = Leaf(torch.int64, (2,))
    if format_name == NVFP4:
        leaves["weight_global_scale"] = Leaf(torch.float32, (1,))
    if not weight.symmetric:
        leaves["weight_zero_point"] = Leaf(weight.grid.storage, grid_shape)
        if format_name == PACKED and packs_zero_points(weight):
            packed_shape = (words_dense(rows, bits), blocks[1])
            leaves["weight_zero_point"] = Leaf(torch.int32, packed_shape)
    if weight.act_order:
        leaves["weight_g_idx"] = Leaf(torch.int32, (columns,))
    return leaves | _input_layout(scheme.input, scale_dtype)


def _input_layout(input: InputScheme | None, scale_dtype: torch.dtype) -> dict[str, Leaf]:
    if input is None or not input.needs_scale:
        return {}
    if input.scale == "e4m3":
        return {"input_global_scale": Leaf(torch.float32, (1,))}
    leaves = {"input_scale": Leaf(scale_dtype, (1,))}
    if not input.symmetric:
        leaves["input_zero_point"] = Leaf(input.grid.storage, (1,))
    return leaves


def encode(tensor: QuantTensor, scheme: Scheme) -> dict[str, Tensor]:
    """Turn a canonical weight into the tensors of `layout`, by leaf.

    Args:
        tensor: On the scheme's grid, in its blocks, with scales of its kind and integer zero
            points; see `compressed_tensors_lossless` for any other. With the fixed scale of its
            input, if the scheme has one, see `with_input_scale` of `quant/activation`.
        scheme: How it is quantized.
    """
    weight, format_name, bits = weight_of(scheme), written_format(scheme), tensor.grid.bits
    scale = tensor.scale if weight.granularity != "tensor" else tensor.scale.reshape(1)
    leaves = {"weight_scale": scale.view(torch.uint8) if weight.scale == "e8m0" else scale}
    if format_name == PACKED:
        leaves["weight_packed"] = pack_dense(tensor.codes, bits, signed=True)
        leaves["weight_shape"] = torch.tensor(tensor.shape, dtype=torch.int64)
    elif format_name in (NVFP4, MXFP4, MXFP6):
        leaves["weight_packed"] = pack_dense(tensor.codes, bits).view(torch.uint8)
    else:
        leaves["weight"] = tensor.codes
    if tensor.outer is not None:
        leaves["weight_global_scale"] = tensor.outer.reshape(1)
    if tensor.zero is not None:
        leaves["weight_zero_point"] = _encoded_zero(tensor.zero, tensor.grid, weight, format_name)
    if weight.act_order:
        leaves["weight_g_idx"] = _group_numbers(tensor)
    return leaves | _input_leaves(tensor, scheme.input)


def _input_leaves(tensor: QuantTensor, input: InputScheme | None) -> dict[str, Tensor]:
    if input is None or not input.needs_scale:
        return {}
    assert tensor.input_scale is not None, "what meets a fixed input scale has it"
    scale, is_divisor = tensor.input_scale, tensor.evaluation.input == "/"
    if input.scale == "e4m3":
        scale = scale.to(torch.float32)
        return {"input_global_scale": (scale if is_divisor else 1 / scale).reshape(1)}
    leaves = {"input_scale": (1 / scale if is_divisor else scale).reshape(1)}
    if not input.symmetric:
        assert tensor.input_zero is not None, "a fixed scale without symmetry has a zero point"
        leaves["input_zero_point"] = tensor.input_zero.to(input.grid.storage).reshape(1)
    return leaves


def _encoded_zero(zero: Tensor, grid: Grid, weight: WeightScheme, format_name: str) -> Tensor:
    if weight.granularity == "tensor":
        return zero.reshape(1)
    if format_name != PACKED or not packs_zero_points(weight):
        return zero
    fields = _transposed(_unsigned(zero, grid))
    return _transposed(pack_dense(fields, grid.bits))


def _group_numbers(tensor: QuantTensor) -> Tensor:
    if tensor.group_of is not None:
        return tensor.group_of
    return (torch.arange(tensor.shape[1]) // tensor.block[1]).to(torch.int32)


def _unsigned(codes: Tensor, grid: Grid) -> Tensor:
    return codes.view(torch.uint8) + (1 << (grid.bits - 1))


def _transposed(tensor: Tensor) -> Tensor:
    # NOTE: `contiguous` keeps the odd strides of a column of one element; packing views bytes.
    return tensor.T.clone(memory_format=torch.contiguous_format)
