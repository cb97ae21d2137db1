"""AWQ: the tensors of one module, read, and written as gemm; AutoRound and Quark pack the same.

N output features, K input features, b bits, g columns of a group, G = K / g, 1 for g = -1.

gemm (also exllama, ipex: other kernels, the same tensors)
    qweight   int32 [K, N * b / 32]    fields u, packed along N, shuffled
    qzeros    int32 [G, N * b / 32]    the same; may be absent if there is no zero point
    scales    float [G, N]
gemv
    qweight   int32 [N, K / 8]         4 bits, packed along K, in order
    qzeros    int32 [N, Z]             the same along groups; Z >= G / 8, padded
    scales    float [N, 8 * Z]         padded too
gemv_fast, llm-awq
    qweight   int16 [N / 4, K]         4 bits, blocks of 4 rows by 64 columns, shuffled
    qzeros, or scaled_zeros   float [8 * Z, N]   -scale * z, padded groups
    scales    float [8 * Z, N]
all
    bias      [N]                      not a part of the weight

gemm, gemv: w = (u - z) * scale, one subtraction of integers and one product rounded to the dtype of
the scales. Nothing is added to stored zero points. Without zero points z = 2^(b - 1).
gemv_fast: w = u * scale + qzeros, rounded once to float16 (bfloat16, if that is the dtype of the
scales, as llm-awq has them for such a model), as its kernel's fused multiply-add does.

Shuffled gemm fields: bits lie densely along N, and of each 8 columns the one of number j is the
field at 0, 4, 1, 5, 2, 6, 3, 7 (j = 0 .. 7); of 8 bits, of each 4 at 0, 2, 1, 3.

Shuffled gemv_fast: a block is 256 nibbles, low ones first, 64 of each row in turn; of each 32
columns the one of number j is the nibble at 4 * (j % 8) + j // 8.

Source: AutoAWQ 0.2.9, `modules/linear/` and `utils/packing_utils.py`; AutoRound 0.16.1,
`export/export_to_awq` (5 to 7 bits); vLLM `awq_dequantize` (8 bits).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quantload.errors import FormatMismatch
from quantload.loader.formats.finite import refuse_nonfinite
from quantload.loader.formats.int_fields import (
    check_scales,
    group_count,
    int_scheme,
    signed,
    unsigned,
)
from quantload.loader.formats.module_leaves import ModuleLeaves
from quantload.loader.source import FLOAT_DTYPES, SourceWeight
from quantload.quant import compiled
from quantload.quant.grid import int_grid, uint_grid
from quantload.quant.packing import pack_dense, unpack_dense, words_dense
from quantload.quant.qtensor import Evaluation, QuantTensor

AwqKind = Literal["gemm", "gemv", "gemv_fast"]
AWQ_LEAVES = ("qweight", "qzeros", "scaled_zeros", "scales", "weight")
_BITS = {"gemm": (2, 3, 4, 5, 6, 7, 8), "gemv": (4,), "gemv_fast": (4,)}
# Where the columns 0, 1, 2, ... of a run of columns lie in it.
_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_ORDER_OF_BYTES = (0, 2, 1, 3)
_FAST_ROWS, _FAST_COLUMNS = 4, 64


@dataclass(frozen=True, kw_only=True)
class AwqLayout:
    """How the weight of a module is packed.

    Args:
        bits: Bits of a field.
        group_size: Columns that share a scale; -1 for all.
        symmetric: True if there are no zero points: every one is 2^(bits - 1).
        kind: Which arrangement; see the top of this file.
    """

    bits: int
    group_size: int
    symmetric: bool
    kind: AwqKind = "gemm"

    def __str__(self) -> str:
        zero = "no zero points" if self.symmetric else "zero points"
        return f"`{self.kind}`, {self.bits} bits, {zero}, groups of {self.group_size}"


def awq_weight(leaves: ModuleLeaves, layout: AwqLayout, *, decided_by: str) -> SourceWeight:
    """Describe a weight [N, K] from the headers of its tensors.

    Args:
        leaves: Of the module; at least those of `AWQ_LEAVES` that are there.
        layout: What the config says of it.
        decided_by: The entry of the config that says so.

    Raises:
        MissingTensor: A tensor that the layout needs is not there.
        FormatMismatch: dtypes or shapes are not those of the layout.
    """
    because = f"the config says {layout} ({decided_by})"
    leaves.require(("qweight", "scales"), because=because)
    if "weight" in leaves:
        raise FormatMismatch(
            f"module `{leaves.module}` has both `weight` and `qweight`, expected one of them, in "
            f"`{leaves.checkpoint_name}`",
            hint="one of the two is left over from another export",
        )
    if layout.bits not in _BITS[layout.kind]:
        raise FormatMismatch(
            f"module `{leaves.module}` has {layout.bits} bits, expected one of "
            f"{', '.join(map(str, _BITS[layout.kind]))} in `{layout.kind}`, in "
            f"`{leaves.checkpoint_name}`",
            hint=because,
        )
    codes = leaves.expect(
        "qweight",
        dtypes=(torch.int16 if layout.kind == "gemv_fast" else torch.int32,),
        because=because,
    )
    scales = leaves.expect("scales", dtypes=FLOAT_DTYPES, because=because)
    for entry in (codes, scales):
        if len(entry.shape) != 2 or min(entry.shape) < 1:
            raise FormatMismatch(
                f"tensor `{entry.name}` has shape `{entry.shape}`, expected two dimensions, in "
                f"`{leaves.checkpoint_name}`",
                hint=because,
            )
    rows, columns = _shape(codes.shape, scales.shape, layout)
    _check_shapes(leaves, layout, (rows, columns), because)
    scheme = int_scheme(
        bits=layout.bits,
        group_size=layout.group_size,
        columns=columns,
        symmetric=layout.symmetric and layout.kind != "gemv_fast",
        is_signed=layout.kind != "gemv_fast",
    )
    used = ("qweight", "qzeros", "scaled_zeros", "scales")
    return SourceWeight(
        module=leaves.module,
        shape=(rows, columns),
        scheme=scheme,
        encoding=f"AWQ {layout.kind} {scheme}",
        dtype=_fast_dtype(scales.dtype) if layout.kind == "gemv_fast" else scales.dtype,
        leaves={leaf: name for leaf, name in leaves.names.items() if leaf in used},
        decided_by=decided_by,
    )


def _fast_dtype(scales: torch.dtype) -> torch.dtype:
    """The dtype that the kernels of gemv_fast compute in."""
    return scales if scales == torch.bfloat16 else torch.float16


def _shape(codes: tuple[int, ...], scales: tuple[int, ...], layout: AwqLayout) -> tuple[int, int]:
    """(N, K), as the codes say where they say it to the element."""
    if layout.kind == "gemm":
        return scales[1], codes[0]
    if layout.kind == "gemv":
        return codes[0], codes[1] * 8
    return codes[0] * _FAST_ROWS, codes[1]


def _check_shapes(
    leaves: ModuleLeaves, layout: AwqLayout, shape: tuple[int, int], because: str
) -> None:
    rows, columns = shape
    groups = group_count(layout.group_size, columns)
    run = 8 if layout.kind != "gemv_fast" else _FAST_COLUMNS
    if layout.group_size > 0 and columns % layout.group_size:
        raise FormatMismatch(
            f"tensor `{leaves['qweight'].name}` has shape `{leaves['qweight'].shape}`: {columns} "
            f"input features, expected a multiple of the group size {layout.group_size}, in "
            f"`{leaves.checkpoint_name}`",
            hint=because,
        )
    axis, size = ("output", rows) if layout.kind == "gemm" else ("input", columns)
    if size % run:
        raise FormatMismatch(
            f"module `{leaves.module}` has {size} {axis} features, expected a multiple of {run} in "
            f"`{layout.kind}`, in `{leaves.checkpoint_name}`",
            hint=because,
        )
    integers: tuple[torch.dtype, ...] = (torch.int32,)
    floats = FLOAT_DTYPES
    zeros = "scaled_zeros" if "scaled_zeros" in leaves else "qzeros"
    if {"qzeros", "scaled_zeros"} <= leaves.entries.keys() or (
        zeros == "scaled_zeros" and layout.kind != "gemv_fast"
    ):
        raise FormatMismatch(
            f"tensor `{leaves['scaled_zeros'].name}` has no place in `{layout.kind}` with "
            f"`qzeros`, in `{leaves.checkpoint_name}`",
            hint=because,
        )
    if layout.kind == "gemm":
        words = words_dense(rows, layout.bits)
        leaves.expect("qweight", dtypes=integers, shapes=((columns, words),), because=because)
        leaves.expect("scales", dtypes=floats, shapes=((groups, rows),), because=because)
        zero_shapes, zero_dtypes = {(groups, words)}, integers
    elif layout.kind == "gemv":
        widths = _padded_words(groups, layout.group_size)
        scale_shapes = {(rows, 8 * width) for width in widths}
        found = leaves.expect("scales", dtypes=floats, shapes=scale_shapes, because=because)
        zero_shapes, zero_dtypes = {(rows, found.shape[1] // 8)}, integers
    else:
        scale_shapes = {(8 * width, rows) for width in _padded_words(groups, layout.group_size)}
        found = leaves.expect("scales", dtypes=floats, shapes=scale_shapes, because=because)
        zero_shapes, zero_dtypes = {(found.shape[0], rows)}, floats
    if not layout.symmetric or layout.kind == "gemv_fast":
        leaves.require((zeros,), because=because)
    if zeros in leaves:
        leaves.expect(zeros, dtypes=zero_dtypes, shapes=zero_shapes, because=because)


def _padded_words(groups: int, group_size: int) -> tuple[int, int]:
    """Words of 8 groups: as few as hold them, and as many as AutoAWQ's kernels want."""
    least = -(-groups // 8)
    multiple = {64: 2, 32: 4}.get(group_size, 1)
    return least, -(-least // multiple) * multiple


def decode_awq(
    parts: Mapping[str, Tensor],
    weight: SourceWeight,
    layout: AwqLayout,
    *,
    checkpoint_name: str,
    inner: Tensor | None = None,
) -> QuantTensor:
    """Turn the tensors of a module into its weight.

    Args:
        parts: Tensors by leaf, as stored.
        weight: From `awq_weight` with the same layout.
        layout: How they are packed.
        checkpoint_name: For messages.
        inner: [K] divisors of the input features, that are no part of the packing.

    Returns:
        [N, K] codes, scale and zero (gemv_fast: offset) [N, G].

    Raises:
        NonFiniteWeight: A scale is NaN or infinity.
        FormatMismatch: There are zero points where the config says that there are none, or scales
            of groups that are not there.
    """
    columns = weight.shape[1]
    group_size = columns if layout.group_size == -1 else layout.group_size
    groups = columns // group_size
    bits = layout.bits
    fields, scale, zeros = _read_parts(parts, weight, layout, groups)
    check_scales(scale, fields, weight.leaves["scales"], checkpoint_name)
    padding = parts["scales"][groups:] if layout.kind != "gemv" else parts["scales"][:, groups:]
    if bool(padding.any()):
        raise FormatMismatch(
            f"tensor `{weight.leaves['scales']}` has scales of more than {groups} groups, expected "
            f"zeros after those of {columns} columns, in `{checkpoint_name}`"
        )
    if layout.kind == "gemv_fast":
        assert zeros is not None, "gemv_fast has offsets"
        name = weight.leaves.get("scaled_zeros") or weight.leaves["qzeros"]
        refuse_nonfinite(zeros, name, checkpoint_name)
        if not bool(zeros.any()) and bool(scale.any()):
            raise FormatMismatch(
                f"tensor `{name}` is all zero, expected zero points, in `{checkpoint_name}`"
            )
        # Both operands have 16 bits: in float32 only the last rounding, back to them, is one.
        evaluation = Evaluation(torch.float32, inner="/", result=weight.dtype)
        return QuantTensor(
            grid=uint_grid(bits),
            codes=fields,
            scale=scale,
            offset=zeros,
            inner=inner,
            block=(1, group_size),
            evaluation=evaluation,
        )
    if zeros is not None and layout.symmetric:
        middle = 1 << (bits - 1)
        if not bool((zeros == middle).all()):
            raise FormatMismatch(
                f"tensor `{weight.leaves['qzeros']}` has zero points from {int(zeros.min())} to "
                f"{int(zeros.max())}, expected {middle}: the config says that there are none, in "
                f"`{checkpoint_name}`"
            )
        zeros = None
    return QuantTensor(
        grid=int_grid(bits),
        codes=signed(fields, bits),
        scale=scale,
        zero=None if zeros is None else signed(zeros, bits),
        inner=inner,
        block=(1, group_size),
        evaluation=Evaluation(weight.dtype, inner="/"),
    )


def _read_parts(
    parts: Mapping[str, Tensor], weight: SourceWeight, layout: AwqLayout, groups: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Fields [N, K] uint8, scales [N, G], zero points [N, G] uint8 or float offsets."""
    rows, columns = weight.shape
    zeros = parts.get("qzeros")
    if layout.kind == "gemm":
        fields = _transposed(_ordered(unpack_dense(parts["qweight"], layout.bits, rows), layout))
        if zeros is not None:
            zeros = _transposed(_ordered(unpack_dense(zeros, layout.bits, rows), layout))
        return fields, _transposed(parts["scales"]), zeros
    if layout.kind == "gemv":
        fields = unpack_dense(parts["qweight"], 4, columns)
        if zeros is not None:
            zeros = unpack_dense(zeros, 4, 8 * zeros.shape[1])[:, :groups].contiguous()
        return fields, parts["scales"][:, :groups].contiguous(), zeros
    offsets = parts["scaled_zeros"] if zeros is None else zeros
    scales = _transposed(parts["scales"][:groups])
    return _unpack_fast(parts["qweight"], weight.shape), scales, _transposed(offsets[:groups])


def _ordered(fields: Tensor, layout: AwqLayout) -> Tensor:
    """Put the columns of [R, N] fields, as gemm stores them, into their order."""
    order = torch.tensor(_ORDER_OF_BYTES if layout.bits == 8 else _ORDER, device=fields.device)
    return torch.unflatten(fields, 1, (-1, len(order)))[..., order].flatten(1)


def encode_awq(tensor: QuantTensor) -> dict[str, Tensor]:
    """Turn a weight [N, K] into the tensors of a module in gemm; undoes `decode_awq`.

    Args:
        tensor: On signed integers, in groups of columns; N a multiple of 8. Without zero points,
            the middle is written as one, which every reader subtracts.
    """
    zero = torch.zeros_like(tensor.scale, dtype=torch.int8) if tensor.zero is None else tensor.zero
    return {
        "qweight": _shuffled_words(tensor.codes, tensor.grid.bits),
        "qzeros": _shuffled_words(zero, tensor.grid.bits),
        "scales": _transposed(tensor.scale),
    }


def _shuffled_words(codes: Tensor, bits: int) -> Tensor:
    """[N, R] int8 to [R, N * bits / 32] int32: what `_ordered` puts in order."""
    words = compiled.pack_eight_rows(codes) if bits == 4 else None
    if words is not None:
        return words
    places = _ORDER_OF_BYTES if bits == 8 else _ORDER
    fields = torch.unflatten(_transposed(unsigned(codes, bits)), 1, (-1, len(places)))
    return pack_dense(fields[..., torch.tensor(places).argsort()].flatten(1), bits)


def _unpack_fast(words: Tensor, shape: tuple[int, int]) -> Tensor:
    """[N / 4, K] int16 to the fields [N, K] uint8."""
    rows, columns = shape
    as_bytes = words.contiguous().view(torch.uint8)
    nibbles = torch.stack((as_bytes & 0x0F, as_bytes >> 4), dim=-1)
    blocks = nibbles.reshape(rows // _FAST_ROWS, columns // _FAST_COLUMNS, _FAST_ROWS, -1)
    runs = blocks.transpose(1, 2).reshape(rows, columns // 32, 8, 4)
    return runs.transpose(2, 3).reshape(rows, columns)


def _transposed(tensor: Tensor) -> Tensor:
    # NOTE: `contiguous` keeps the odd strides of a column of one element; packing views bytes.
    return tensor.T.clone(memory_format=torch.contiguous_format)


__all__ = ["AWQ_LEAVES", "AwqKind", "AwqLayout", "awq_weight", "decode_awq", "encode_awq"]
