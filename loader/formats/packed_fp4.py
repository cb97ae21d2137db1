"""MXFP4: e2m1 codes two in a byte, and a power of two for every 32 columns.

    codes    uint8 [N, K/2], or the same bytes as int8; column 2i in the low nibble of byte i,
             column 2i + 1 in the high one; bit 3 of a nibble is the sign
    scale    e8m0 [N, ceil(K/32)], or the same bytes as uint8: 2^(byte - 127), 255 is NaN
    value    e2m1(code) * scale; exact in bfloat16 and float32 but at the ends of their range

Source: OCP Microscaling Formats 1.0; `convert_moe_packed_tensors` and `Fp8Dequantize` of
transformers 5.24.0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantload.loader.checkpoint import Checkpoint, TensorEntry
from quantload.loader.formats.finite import refuse_nonfinite
from quantload.loader.formats.float8 import EXPONENT_DTYPES, SCALE_LEAVES, as_scale
from quantload.loader.formats.module_leaves import ModuleLeaves
from quantload.loader.safetensors_header import NAMES
from quantload.loader.source import SourceWeight
from quantload.quant.grid import E2M1
from quantload.quant.packing import unpack_bytes
from quantload.quant.qtensor import Evaluation, QuantTensor
from quantload.quant.scheme import InputScheme, WeightScheme, scheme_of

GROUP_SIZE = 32
MXFP4 = WeightScheme(grid=E2M1, granularity="group", group_size=GROUP_SIZE, scale="e8m0")
BYTE_DTYPES = (torch.uint8, torch.int8)


def is_packed_fp4(weight: TensorEntry, scale: TensorEntry) -> bool:
    """True if two tensors can be nothing but the codes and the scales of an MXFP4 weight."""
    if weight.dtype not in BYTE_DTYPES or scale.dtype not in EXPONENT_DTYPES:
        return False
    if len(weight.shape) != 2:
        return False
    columns = 2 * weight.shape[1]
    return scale.shape == (weight.shape[0], -(-columns // GROUP_SIZE))


def fp4_weight(
    leaves: ModuleLeaves, scale_leaf: str, *, input: InputScheme | None, decided_by: str
) -> SourceWeight:
    """Describe the weight of a module for which `is_packed_fp4` is true."""
    entry, scale = leaves["weight"], leaves[scale_leaf]
    return SourceWeight(
        module=leaves.module,
        shape=(entry.shape[0], 2 * entry.shape[1]),
        scheme=scheme_of(MXFP4, input),
        encoding=f"e2m1, groups of {GROUP_SIZE}, scales {NAMES[scale.dtype]}",
        dtype=torch.bfloat16,
        leaves=leaves.names,
        decided_by=decided_by,
    )


def read_fp4(checkpoint: Checkpoint, weight: SourceWeight) -> QuantTensor:
    """Read a weight that `fp4_weight` described.

    Raises:
        NonFiniteWeight: A scale is NaN.
    """
    scale_name = next(weight.leaves[leaf] for leaf in SCALE_LEAVES if leaf in weight.leaves)
    scale = as_scale(checkpoint.read(scale_name))
    refuse_nonfinite(scale, scale_name, checkpoint.name)
    return decode_fp4(checkpoint.read(weight.leaves["weight"]), scale)


def decode_fp4(
    packed: Tensor,
    scale: Tensor,
    evaluation: Evaluation = Evaluation(torch.bfloat16),  # noqa: B008  # frozen
) -> QuantTensor:
    """Return the canonical form of an MXFP4 weight.

    Args:
        packed: [N, K/2] uint8 or int8.
        scale: [N, ceil(K/32)] e8m0 or uint8.
        evaluation: How the producer turns codes into values.
    """
    columns = 2 * packed.shape[1]
    return QuantTensor(
        grid=E2M1,
        codes=unpack_bytes(packed.view(torch.uint8), E2M1.bits, columns),
        scale=as_scale(scale),
        block=(1, GROUP_SIZE),
        evaluation=evaluation,
    )
