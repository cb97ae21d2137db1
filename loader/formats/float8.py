"""FP8 weights with a scale tensor: what the formats of many tools have in common.

    weight   e4m3 (`float8_e4m3fn`) or e5m2 [N, K], output features first
    scale    w = q * s, evaluated in float32; a multiplier also where it is called
             `weight_scale_inv`. Only GPTQModel means a divisor: w = q / s

    shape of the scale                          one scale for
    (), (1,), (1, 1)                            the tensor
    (N,), (N, 1)                                a row (channel)
    (ceil(N / bn), ceil(K / bk)), or with       a block of bn rows and bk columns; the last of each
    ones: (ceil(N / bn), 1, ceil(K / bk), 1)    axis may be partial. With bn = 1: a group

    dtype of the scale: float, or 2^(byte - 127) as e8m0 or uint8, where byte 255 is NaN

The block size comes from the config, never from the shapes: 100 rows in 4 blocks are blocks of 32,
not of 25. A float8 tensor without its scale is refused.

`float8_weight` and `read_float8` are one weight from header to canonical form; `float8_scheme`,
`as_scale` and `decode_float8` are their pure parts, for formats that name or shape their tensors
differently. A producer that rounds the values to its model's dtype says so in the `Evaluation`.

Source: `Fp8Dequantize` of transformers 5.24.0, `weight_dequant` of DeepSeek-V3's `kernel.py`, OCP
Microscaling Formats 1.0 for e8m0.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from quantload.errors import FormatMismatch, UnsupportedVariant
from quantload.loader.checkpoint import Checkpoint, TensorEntry
from quantload.loader.formats.finite import refuse_nonfinite
from quantload.loader.formats.module_leaves import ModuleLeaves
from quantload.loader.safetensors_header import NAMES
from quantload.loader.source import FLOAT_DTYPES, SourceWeight
from quantload.quant.grid import E4M3, E5M2, Grid
from quantload.quant.qtensor import Evaluation, QuantTensor
from quantload.quant.scheme import InputScheme, ScaleKind, WeightScheme, scheme_of

FLOAT8_GRIDS: dict[torch.dtype, Grid] = {grid.storage: grid for grid in (E4M3, E5M2)}
EXPONENT_DTYPES = (torch.float8_e8m0fnu, torch.uint8)
SCALE_DTYPES = (*FLOAT_DTYPES, *EXPONENT_DTYPES)
SCALE_LEAVES = ("weight_scale", "weight_scale_inv", "scale", "qscale_weight")
INPUT_SCALE_LEAVES = ("input_scale", "activation_scale", "qscale_act")

Block = tuple[int, int]


def float8_weight(
    leaves: ModuleLeaves,
    scale_leaf: str,
    *,
    block: Block | None,
    input: InputScheme | None,
    decided_by: str,
    grid: Grid = E4M3,
    dtype: torch.dtype = torch.float32,
) -> SourceWeight:
    """Describe the FP8 weight of a module from its headers.

    Args:
        leaves: Tensors of the module; `weight` and `scale_leaf` are there. All are consumed.
        scale_leaf: Leaf that holds the scales.
        block: Rows and columns of a block; None if a scale belongs to the tensor or to a row.
        input: How the input is quantized.
        decided_by: The entry of the quantization config that decided.
        grid: Number format of the codes.
        dtype: dtype that it dequantizes to.

    Raises:
        FormatMismatch: dtypes or shapes do not fit each other or the block.
        UnsupportedVariant: The weight has not two dimensions.
    """
    because = "the config says FP8" + (f" in blocks of {block[0]} x {block[1]}" if block else "")
    entry = leaves.expect("weight", dtypes=(grid.storage,), because=because)
    scale = leaves.expect(scale_leaf, dtypes=SCALE_DTYPES, because=because)
    if len(entry.shape) != 2:
        raise UnsupportedVariant(
            f"tensor `{entry.name}` has {len(entry.shape)} dimensions, expected 2, in "
            f"`{leaves.checkpoint_name}`"
        )
    shape = (entry.shape[0], entry.shape[1])
    weight = float8_scheme(shape, scale.shape, block, grid=grid, scale_dtype=scale.dtype)
    if weight is None:
        raise FormatMismatch(
            f"tensor `{scale.name}` has shape `{scale.shape}`, expected {_expected(shape, block)} "
            f"for a weight of `{shape}`, in `{leaves.checkpoint_name}`",
            hint=because,
        )
    return SourceWeight(
        module=leaves.module,
        shape=shape,
        scheme=scheme_of(weight, input),
        encoding=_encoding(weight, scale),
        dtype=dtype,
        leaves=leaves.names,
        decided_by=decided_by,
    )


@lru_cache(maxsize=4096)  # a checkpoint has few shapes
def float8_scheme(
    shape: tuple[int, int],
    scale: tuple[int, ...],
    block: Block | None,
    *,
    grid: Grid = E4M3,
    scale_dtype: torch.dtype = torch.float32,
) -> WeightScheme | None:
    """Return what shares one scale, or None if the shape of the scale fits nothing.

    Args:
        shape: (N, K).
        scale: Shape of the scale tensor.
        block: Rows and columns of a block, or None.
        grid: Number format of the codes.
        scale_dtype: dtype of the scale tensor.
    """
    rows, columns = shape
    kind: ScaleKind = "e8m0" if scale_dtype in EXPONENT_DTYPES else "float"
    if block is None:
        if scale in ((), (1,), (1, 1)):
            return WeightScheme(grid=grid, granularity="tensor", scale=kind)
        if scale in ((rows,), (rows, 1)):
            return WeightScheme(grid=grid, granularity="channel", scale=kind)
        return None
    blocks, groups = -(-rows // block[0]), -(-columns // block[1])
    spelled: tuple[tuple[int, ...], ...] = ((blocks, groups), (blocks, 1, groups, 1))
    if blocks == groups == 1:
        spelled += ((), (1,))
    if scale not in spelled:
        return None
    if block[0] == 1:
        return WeightScheme(grid=grid, granularity="group", group_size=block[1], scale=kind)
    return WeightScheme(grid=grid, granularity="block", block=block, scale=kind)


def _expected(shape: tuple[int, int], block: Block | None) -> str:
    if block is None:
        return f"`(1,)` or `({shape[0]}, 1)` without a block size"
    return f"`({-(-shape[0] // block[0])}, {-(-shape[1] // block[1])})` in blocks of `{block}`"


def _encoding(weight: WeightScheme, scale: TensorEntry) -> str:
    return f"{weight.grid.name}, {weight.sharing}, scales {NAMES[scale.dtype]}"


def decode_float8(
    codes: Tensor,
    scale: Tensor,
    weight: WeightScheme,
    evaluation: Evaluation = Evaluation(torch.float32),  # noqa: B008  # frozen
) -> QuantTensor:
    """Return the canonical form of an FP8 weight.

    Args:
        codes: [N, K] in `weight.grid.storage`.
        scale: As many scales as `weight` asks for, in any shape; e8m0 also as uint8.
        weight: What shares one scale, see `float8_scheme`.
        evaluation: How the producer turns codes into values.
    """
    rows, columns = codes.shape
    block = weight.block_of(rows, columns)
    return QuantTensor(
        grid=weight.grid,
        codes=codes,
        scale=as_scale(scale).reshape(-(-rows // block[0]), -(-columns // block[1])),
        block=block,
        evaluation=evaluation,
    )


def as_scale(scale: Tensor) -> Tensor:
    """Return exponents stored as uint8 as what they mean: e8m0, by their bits."""
    return scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale


def scale_leaf_of(leaves: ModuleLeaves) -> str | None:
    """Return the leaf that holds the scales of a module, None if there is none.

    Raises:
        FormatMismatch: There are two.
    """
    found = [leaf for leaf in SCALE_LEAVES if leaf in leaves]
    if len(found) > 1:
        raise FormatMismatch(
            f"module `{leaves.module}` has both `{found[0]}` and `{found[1]}`, expected one scale "
            f"of its weight, in `{leaves.checkpoint_name}`",
            hint="one of the two is left over from another export",
        )
    return found[0] if found else None


def refuse_lost_scales(codes: Tensor, scale: Tensor, name: str, checkpoint_name: str) -> None:
    """Refuse scales that are all zero where codes are not.

    Raises:
        FormatMismatch: They are.
    """
    if not bool(scale.to(torch.float32).any()) and bool(codes.view(torch.uint8).any()):
        raise FormatMismatch(
            f"all scales of tensor `{name}` are zero, but the codes are not, in "
            f"`{checkpoint_name}`",
            hint="the file is damaged or was written before it was complete",
        )


def read_float8(
    checkpoint: Checkpoint,
    weight: SourceWeight,
    evaluation: Evaluation = Evaluation(torch.float32),  # noqa: B008  # frozen
) -> QuantTensor:
    """Read a weight that `float8_weight` described.

    Args:
        checkpoint: Has its tensors.
        weight: Its description.
        evaluation: How the producer turns codes into values.

    Raises:
        NonFiniteWeight: Codes or scales hold NaN or infinity.
        FormatMismatch: All scales are zero, but codes are not.
    """
    assert weight.scheme is not None, "a quantized weight has a scheme"
    assert weight.scheme.weight is not None, "a quantized weight has a weight scheme"
    codes = checkpoint.read(weight.leaves["weight"])
    scale_name = next(weight.leaves[leaf] for leaf in SCALE_LEAVES if leaf in weight.leaves)
    scale = as_scale(checkpoint.read(scale_name))
    refuse_nonfinite(codes, weight.leaves["weight"], checkpoint.name)
    refuse_nonfinite(scale, scale_name, checkpoint.name)
    for leaf in INPUT_SCALE_LEAVES:
        if leaf in weight.leaves:
            name = weight.leaves[leaf]
            refuse_nonfinite(checkpoint.read(name), name, checkpoint.name)
    refuse_lost_scales(codes, scale, scale_name, checkpoint.name)
    return decode_float8(codes, scale, weight.scheme.weight, evaluation)
