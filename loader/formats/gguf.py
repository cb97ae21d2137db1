"""GGUF: a weight [N, K] is rows of blocks; a block is `size` consecutive elements of one row.

Decoded to canonical form (blocks of 32 elements; d and m are float16, little endian):

    Q4_0   18 bytes   d, 16 bytes of codes                 (q - 8) * d
    Q4_1   20 bytes   d, m, 16 bytes of codes              q * d + m
    Q5_0   22 bytes   d, 4 bytes of fifth bits, 16 bytes   (q - 16) * d
    Q5_1   24 bytes   d, m, 4 bytes of fifth bits, 16      q * d + m
    Q8_0   34 bytes   d, 32 int8 codes                     q * d
    MXFP4  17 bytes   e8m0 scale, 16 bytes of e2m1 codes   value(q) * 2^(e - 127)

Byte i of the 16 holds the low four bits of element i in its low half, and of element i + 16 in its
high half. Bit i of the fifth bits, a little-endian number, belongs to element i.
d and m are cast to float32. The product is exact in float32, only the sum with m rounds.

Every other type that `gguf.quants` decodes (k-quants, IQ, TQ, NVFP4) becomes a float32
tensor by its code, a slice of rows at a time. F32, F16, BF16 and F64 are read as they are.

The `Scheme` of a weight has the name of its type. For types of several levels it describes the finest
scale; for codebooks and ternary types, the signed integer grid of as many bits as a code needs:
such a scheme tells people what is stored and is nothing to quantize to.

Source: https://github.com/ggml-org/llama.cpp/blob/a458664fc83b6513baea7adafcb0ef0626b006f8/gguf-py/gguf/quants.py
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import gguf
import numpy as np
import torch
from torch import Tensor

from quantload.errors import UnsupportedVariant
from quantload.loader.checkpoint import TensorEntry
from quantload.loader.formats.dense import dense_weight
from quantload.loader.formats.finite import refuse_nonfinite
from quantload.loader.gguf_restore import GgufEntry
from quantload.loader.safetensors_header import NAMES
from quantload.loader.source import Reader, SourceWeight
from quantload.quant.grid import E2M1, Grid, int_grid, uint_grid
from quantload.quant.qtensor import Evaluation, QuantTensor
from quantload.quant.scheme import Scheme, WeightScheme

_SIZE = 32  # elements of a block of the canonical types
_ELEMENTS_AT_ONCE = 1 << 22  # bounds what the decoders of `gguf.quants` hold besides the result


@dataclass(frozen=True)
class _BlockType:
    """What the codes of a GGUF type are.

    Args:
        grid: Number grid of a code.
        group_size: Elements that share the finest scale.
        has_offset: True if a minimum is stored beside the scale.
        has_fifth_bits: True if the fifth bit of each code is stored apart.
        is_canonical: True if it is decoded here, into a `QuantTensor`.
    """

    grid: Grid
    group_size: int
    has_offset: bool = False
    has_fifth_bits: bool = False
    is_canonical: bool = False


_BLOCK_TYPES = {
    "Q4_0": _BlockType(int_grid(4), _SIZE, is_canonical=True),
    "Q4_1": _BlockType(uint_grid(4), _SIZE, has_offset=True, is_canonical=True),
    "Q5_0": _BlockType(int_grid(5), _SIZE, has_fifth_bits=True, is_canonical=True),
    "Q5_1": _BlockType(
        uint_grid(5), _SIZE, has_offset=True, has_fifth_bits=True, is_canonical=True
    ),
    "Q8_0": _BlockType(int_grid(8), _SIZE, is_canonical=True),
    "Q2_K": _BlockType(uint_grid(2), 16, has_offset=True),
    "Q3_K": _BlockType(int_grid(3), 16),
    "Q4_K": _BlockType(uint_grid(4), 32, has_offset=True),
    "Q5_K": _BlockType(uint_grid(5), 32, has_offset=True),
    "Q6_K": _BlockType(int_grid(6), 16),
    "IQ1_S": _BlockType(int_grid(2), 32, has_offset=True),
    "IQ1_M": _BlockType(int_grid(2), 16, has_offset=True),
    "IQ2_XXS": _BlockType(int_grid(3), 32),
    "IQ2_XS": _BlockType(int_grid(3), 16),
    "IQ2_S": _BlockType(int_grid(3), 16),
    "IQ3_XXS": _BlockType(int_grid(4), 32),
    "IQ3_S": _BlockType(int_grid(4), 32),
    "IQ4_NL": _BlockType(int_grid(4), 32),
    "IQ4_XS": _BlockType(int_grid(4), 32),
    "TQ1_0": _BlockType(int_grid(2), 256),
    "TQ2_0": _BlockType(int_grid(2), 256),
    "MXFP4": _BlockType(E2M1, 32),
    "NVFP4": _BlockType(E2M1, 16),
}


class GgufReader(Reader):
    """Reader of GGUF files."""

    widens_floats = True  # norms are F32 in every GGUF file

    def weights(self) -> Mapping[str, SourceWeight]:
        """Describe every weight of one layer, or of the experts of one layer, by module.

        Raises:
            UnsupportedVariant: The blocks of a weight are of a type that is not decoded.
        """
        found = (_weight(entry) for entry in self.checkpoint.tensors.values())
        return {weight.module: weight for weight in found if weight is not None}

    def decode(self, weight: SourceWeight) -> QuantTensor | Tensor:
        """Read a weight [N, K] or [E * N, K], rows in the order of transformers.

        Returns:
            Canonical, or float where its type has no canonical form.

        Raises:
            NonFiniteWeight: A scale holds NaN or infinity.
        """
        name = weight.leaves["weight"]
        entry = self.checkpoint.tensors[name]
        decoded = decode_rows(self.checkpoint.read(name), entry.block_type)
        if entry.block_type:
            self._refuse_nonfinite(decoded, name)
        late_steps = entry.late_steps if isinstance(entry, GgufEntry) else ()
        for step in late_steps:
            values = decoded.dequantize() if isinstance(decoded, QuantTensor) else decoded
            decoded = step(values)
        return decoded

    def _refuse_nonfinite(self, decoded: QuantTensor | Tensor, name: str) -> None:
        if isinstance(decoded, Tensor):
            refuse_nonfinite(decoded, name, self.checkpoint.name)
            return
        for part in (decoded.scale, decoded.offset):
            if part is not None:
                refuse_nonfinite(part, name, self.checkpoint.name)


def _weight(entry: TensorEntry) -> SourceWeight | None:
    experts, is_transposed = 0, False
    if isinstance(entry, GgufEntry):
        experts, is_transposed = entry.experts, entry.is_transposed
    plain = experts == 0 and not is_transposed
    if not entry.block_type and plain:
        return dense_weight(entry)
    rows, columns = entry.shape
    if entry.block_type:
        size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[entry.block_type]]
        columns = columns // num_bytes * size
    return SourceWeight(
        module=entry.name.removesuffix(".weight"),
        shape=(rows // max(1, experts), columns),
        scheme=_scheme(entry) if entry.block_type else None,
        encoding=entry.block_type or NAMES[entry.dtype],
        dtype=torch.float32 if entry.block_type else entry.dtype,
        leaves={"weight": entry.name},
        parameter="" if entry.name.endswith(".weight") else entry.name,
        experts=experts,
        is_transposed=is_transposed,
        obstacle=_obstacle(entry),
    )


def _obstacle(entry: TensorEntry) -> str:
    if entry.block_type and not _BLOCK_TYPES[entry.block_type].is_canonical:
        return "its scales have levels, or its values are those of a codebook"
    if isinstance(entry, GgufEntry) and entry.late_steps:
        return "its decoded values are changed"
    return ""


def decode_rows(stored: Tensor, type_name: str) -> QuantTensor | Tensor:
    """Decode rows of blocks [N, bytes per row] of a GGUF type; "" are floats, as they are."""
    if not type_name:
        return stored
    block_type = _BLOCK_TYPES[type_name]
    if block_type.is_canonical:
        return _decode_blocks(stored, block_type)
    if type_name == "MXFP4":
        return _decode_mxfp4(stored)
    return _dequantize_rows(stored, type_name)


def _decode_mxfp4(stored: Tensor) -> QuantTensor | Tensor:
    """Decode rows of blocks [N, 17 * K / 32]; a float tensor if a scale is no number of e8m0."""
    blocks = stored.reshape(stored.shape[0], -1, 17)
    exponents, packed = blocks[..., 0], blocks[..., 1:]
    if bool((exponents == 255).any()):  # NaN in e8m0, but 2^128 in GGUF
        return _dequantize_rows(stored, "MXFP4")
    codes = torch.cat((packed & 0x0F, packed >> 4), dim=-1).flatten(-2)
    codes[codes == 8] = 0  # GGUF has no negative zero
    return QuantTensor(
        grid=E2M1,
        codes=codes,
        scale=exponents.contiguous().view(torch.float8_e8m0fnu),
        block=(1, _SIZE),
        evaluation=Evaluation(torch.float32),
    )


def _scheme(entry: TensorEntry) -> Scheme:
    if entry.block_type not in _BLOCK_TYPES:
        raise UnsupportedVariant(
            f"tensor `{entry.name}` has GGUF type `{entry.block_type}`, which is not decoded, "
            f"in `{entry.file}`",
            hint="quantize the model again to a common type such as `Q8_0`",
        )
    return block_scheme(entry.block_type)


def block_scheme(type_name: str) -> Scheme:
    """Return the scheme of a GGUF type that is decoded, such as "Q4_K"."""
    block_type = _BLOCK_TYPES[type_name]
    return Scheme(
        name=type_name,
        weight=WeightScheme(
            grid=block_type.grid,
            granularity="group",
            group_size=block_type.group_size,
            symmetric=not block_type.has_offset,
            zero="offset" if block_type.has_offset else "int",
        ),
    )


def _decode_blocks(stored: Tensor, block_type: _BlockType) -> QuantTensor:
    """Decode rows of blocks.

    Args:
        stored: [N, bytes per row] uint8.
        block_type: A canonical type.

    Returns:
        [N, K] with scale (and offset) [N, K / 32] float16.
    """
    grid = block_type.grid
    header_bytes = 2 + 2 * block_type.has_offset
    fifth_bytes = 4 * block_type.has_fifth_bits
    block_bytes = header_bytes + fifth_bytes + _SIZE * (8 if grid.bits == 8 else 4) // 8
    blocks = stored.reshape(stored.shape[0], -1, block_bytes)
    header = blocks[..., :header_bytes].contiguous().view(torch.float16)
    packed = blocks[..., header_bytes + fifth_bytes :]
    codes = packed if grid.bits == 8 else torch.cat((packed & 0x0F, packed >> 4), dim=-1)
    if block_type.has_fifth_bits:
        fifth = blocks[..., header_bytes : header_bytes + fifth_bytes, None]
        bits = fifth >> torch.arange(8, dtype=torch.uint8) & 1
        codes |= bits.flatten(-2) << 4
    codes = codes.reshape(stored.shape[0], -1)
    if not block_type.has_offset:
        codes = codes.view(torch.int8)
        codes = codes if grid.bits == 8 else codes + int(grid.low)
    return QuantTensor(
        grid=grid,
        codes=codes,
        scale=header[..., 0].contiguous(),
        offset=header[..., 1].contiguous() if block_type.has_offset else None,
        block=(1, _SIZE),
        evaluation=Evaluation(torch.float32),
    )


def _dequantize_rows(stored: Tensor, type_name: str) -> Tensor:
    """Return [N, K] float32 of rows of blocks [N, bytes per row], by the code of `gguf.quants`."""
    kind = gguf.GGMLQuantizationType[type_name]
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    shape = (stored.shape[0], stored.shape[1] // num_bytes * size)
    weight = torch.empty(shape, dtype=torch.float32)
    values, raw = weight.numpy(), stored.numpy()
    step = max(1, _ELEMENTS_AT_ONCE // shape[1])
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused
        for start in range(0, shape[0], step):
            values[start : start + step] = gguf.quants.dequantize(raw[start : start + step], kind)
    return weight
