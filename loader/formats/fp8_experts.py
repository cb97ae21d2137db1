"""FP8 experts of a block in one parameter.

    P                     e4m3 or e5m2 [E, N, K], without `.weight`
    P_scale_inv, P_scale, a multiplier as in `float8.py`, of
    P_weight_scale, ...   (), (1,)                              all experts
                          (E,), (E, 1), (E, 1, 1)               an expert
                          (E, N, 1)                             a row
                          (E, ceil(N / bn), ceil(K / bk))       a block, if the config has blocks
                          (E, 1, K)                             a column: the parameter has input
                                                                features first, as Llama 4 in FBGEMM

Source: `FP8Experts` and `FbgemmFp8Llama4TextExperts` of transformers 5.24.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quantload.errors import FormatMismatch, MissingTensor
from quantload.loader.checkpoint import Checkpoint, TensorEntry
from quantload.loader.formats.finite import refuse_nonfinite
from quantload.loader.formats.float8 import (
    EXPONENT_DTYPES,
    FLOAT8_GRIDS,
    SCALE_DTYPES,
    SCALE_LEAVES,
    Block,
    as_scale,
    refuse_lost_scales,
)
from quantload.loader.safetensors_header import NAMES
from quantload.loader.source import Block as StoredBlock
from quantload.loader.source import SourceWeight
from quantload.quant.grid import Grid
from quantload.quant.qtensor import Evaluation, QuantTensor
from quantload.quant.scheme import InputScheme, ScaleKind, WeightScheme, scheme_of

_SCALES = ("_scale_inv", "_scale", "_weight_scale_inv", "_weight_scale")
_INPUT_SCALES = ("_input_scale", "_activation_scale")


@dataclass(frozen=True, kw_only=True)
class ExpertsFacts:
    """What holds for all experts of a checkpoint.

    Args:
        grid: Number format of the codes.
        block: Rows and columns of a block; None if there are none.
        input: How inputs are quantized.
        decided_by: The entry of the quantization config that decided.
        dtype: dtype that weights dequantize to.
    """

    grid: Grid
    block: Block | None
    input: InputScheme | None
    decided_by: str
    dtype: torch.dtype


def expert_weights(checkpoint: Checkpoint, facts: ExpertsFacts) -> Iterator[SourceWeight]:
    """Describe the FP8 parameters of a checkpoint that hold the weights of several experts.

    Raises:
        MissingTensor: One has no scale.
        FormatMismatch: Parameter and scale do not fit each other.
    """
    for entry in checkpoint.tensors.values():
        _refuse_lone_scale(entry, checkpoint)
        is_weight = entry.name.endswith(".weight")
        if len(entry.shape) == 3 and entry.dtype in FLOAT8_GRIDS and not is_weight:
            yield _describe(entry, checkpoint, facts)


def _refuse_lone_scale(entry: TensorEntry, checkpoint: Checkpoint) -> None:
    module, _, leaf = entry.name.rpartition(".")
    if not module.endswith("experts") or leaf in SCALE_LEAVES:
        return
    if not leaf.endswith(_SCALES) or leaf.endswith(_INPUT_SCALES):
        return
    ending = max((end for end in _SCALES if leaf.endswith(end)), key=len)
    parameter = checkpoint.tensors.get(entry.name.removesuffix(ending))
    if parameter is None:
        raise MissingTensor(
            f"tensor `{entry.name.removesuffix(ending)}` is missing in `{checkpoint.name}`: "
            f"`{entry.name}` is a scale of it"
        )
    if parameter.dtype not in FLOAT8_GRIDS:
        raise FormatMismatch(
            f"tensor `{parameter.name}` is `{parameter.dtype}`, expected FP8 beside its scale "
            f"`{entry.name}`, in `{checkpoint.name}`",
            hint="codes were cast, or the scale is left over from another export",
        )


def _describe(entry: TensorEntry, checkpoint: Checkpoint, facts: ExpertsFacts) -> SourceWeight:
    scale = _scale_of(entry, checkpoint)
    if entry.dtype != facts.grid.storage:
        raise FormatMismatch(
            f"tensor `{entry.name}` is `{entry.dtype}`, expected `{facts.grid.storage}`, in "
            f"`{checkpoint.name}`"
        )
    found = _granularity(entry.shape, scale, facts)
    if scale.dtype not in SCALE_DTYPES or found is None:
        raise FormatMismatch(
            f"tensor `{scale.name}` is `{scale.dtype}` of shape `{scale.shape}`, expected scales "
            f"of experts `{entry.shape}`"
            + (f" in blocks of `{facts.block}`" if facts.block else "")
            + f", in `{checkpoint.name}`"
        )
    weight, is_transposed = found
    experts, rows, columns = entry.shape
    inputs = {f"experts{ending}": entry.name + ending for ending in _INPUT_SCALES}
    return SourceWeight(
        module=entry.name,
        shape=(columns, rows) if is_transposed else (rows, columns),
        scheme=scheme_of(weight, facts.input),
        encoding=f"{weight.grid.name} of {experts} experts, scales {NAMES[scale.dtype]}",
        dtype=facts.dtype,
        leaves={
            "weight": entry.name,
            "weight_scale": scale.name,
            **{leaf: name for leaf, name in inputs.items() if name in checkpoint.tensors},
        },
        decided_by=facts.decided_by,
        parameter=entry.name,
        experts=experts,
        is_transposed=is_transposed,
    )


def _scale_of(entry: TensorEntry, checkpoint: Checkpoint) -> TensorEntry:
    names = [entry.name + ending for ending in _SCALES]
    found = [name for name in names if name in checkpoint.tensors]
    if not found:
        raise MissingTensor(
            f"no scale for tensor `{entry.name}` in `{checkpoint.name}`: expected `{names[0]}` or "
            f"`{names[1]}`"
        )
    if len(found) > 1:
        raise FormatMismatch(
            f"tensor `{entry.name}` has both `{found[0]}` and `{found[1]}`, expected one scale, in "
            f"`{checkpoint.name}`",
            hint="one of the two is left over from another export",
        )
    return checkpoint.tensors[found[0]]


def _granularity(
    shape: tuple[int, ...], scale: TensorEntry, facts: ExpertsFacts
) -> tuple[WeightScheme, bool] | None:
    """Return what shares one scale, and whether input features come first."""
    experts, rows, columns = shape
    grid = facts.grid
    kind: ScaleKind = "e8m0" if scale.dtype in EXPONENT_DTYPES else "float"
    if facts.block is not None:
        blocks = -(-rows // facts.block[0]), -(-columns // facts.block[1])
        if scale.shape != (experts, *blocks):
            return None
        if facts.block[0] == 1:
            size = facts.block[1]
            return WeightScheme(grid=grid, granularity="group", group_size=size, scale=kind), False
        return WeightScheme(grid=grid, granularity="block", block=facts.block, scale=kind), False
    if scale.shape in ((), (1,), (experts,), (experts, 1), (experts, 1, 1)):
        return WeightScheme(grid=grid, granularity="tensor", scale=kind), False
    if scale.shape in ((experts, rows, 1), (experts, 1, columns)):
        is_transposed = scale.shape[2] != 1
        return WeightScheme(grid=grid, granularity="channel", scale=kind), is_transposed
    return None


def blocks_of_experts(checkpoint: Checkpoint, weight: SourceWeight) -> dict[str, StoredBlock]:
    """Return what elements of the tensors of each expert stand for; see `Reader.blocks_of`."""
    assert weight.scheme is not None, "a quantized weight has a scheme"
    assert weight.scheme.weight is not None, "a quantized weight has a weight scheme"
    scheme, is_transposed = weight.scheme.weight, weight.is_transposed
    rows, columns = scheme.block_of(*weight.shape)
    scale = checkpoint.tensors[weight.leaves["weight_scale"]]
    has_own = scheme.granularity != "tensor" and len(scale.shape) == 3
    found = StoredBlock(rows, 0 if columns == weight.shape[1] else columns, is_transposed)
    return {
        "weight": StoredBlock(1, 1, is_transposed),
        "weight_scale": found if has_own else StoredBlock(0, 0),
    }


def read_experts(
    checkpoint: Checkpoint, weight: SourceWeight, evaluation: Evaluation
) -> QuantTensor:
    """Read the experts of a parameter that `expert_weights` described: [E * N, K].

    Raises:
        NonFiniteWeight: Codes or scales hold NaN or infinity.
        FormatMismatch: All scales are zero, but codes are not.
    """
    assert weight.scheme is not None, "a quantized weight has a scheme"
    assert weight.scheme.weight is not None, "a quantized weight has a weight scheme"
    codes, scale = (checkpoint.read(weight.leaves[leaf]) for leaf in ("weight", "weight_scale"))
    scale = as_scale(scale)
    refuse_nonfinite(codes, weight.leaves["weight"], checkpoint.name)
    refuse_nonfinite(scale, weight.leaves["weight_scale"], checkpoint.name)
    refuse_lost_scales(codes, scale, weight.leaves["weight_scale"], checkpoint.name)
    if weight.is_transposed:
        codes = codes.transpose(1, 2).contiguous()
    rows, columns = weight.shape
    block = weight.scheme.weight.block_of(rows, columns)
    spread, block = _of_rows(scale, weight.experts, rows, block)
    return QuantTensor(
        grid=weight.scheme.weight.grid,
        codes=codes.reshape(weight.experts * rows, columns),
        scale=spread,
        block=block,
        evaluation=evaluation,
    )


def _of_rows(scale: Tensor, experts: int, rows: int, block: Block) -> tuple[Tensor, Block]:
    """Return scales [R, G] of the experts' rows one below the other, and their block.

    Where an expert ends inside a block, blocks become rows.
    """
    blocks = -(-rows // block[0])
    if scale.numel() == 1:
        scale = scale.reshape(1).expand(experts)
    scale = scale.reshape(experts, blocks, -1)
    if rows % block[0]:
        scale = scale.repeat_interleave(block[0], dim=1)[:, :rows]
        block = (1, block[1])
    return scale.reshape(-1, scale.shape[2]), block
