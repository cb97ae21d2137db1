"""GPTQ: the tensors of one module, read and written; AutoRound's GPTQ packing is the same.

N output features, K input features, b bits, g columns of a group, G = ceil(K / g), 1 for g = -1.

    qweight   int32 [ceil(K * b / 32), N]   fields u of b bits, packed along K
    qzeros    int32 [G, ceil(N * b / 32)]   the same along N; may be absent if symmetric
    scales    float [G, N]
    g_idx     int32 [K]                     group of each input feature, in any order; else k // g
    bias      [N]                           not a part of the weight

    w[n, k] = (u - z) * scales[g_idx[k], n],  one subtraction of integers, one rounded product

Fields lie densely, little endian: field i takes bits i * b .. i * b + b - 1 of the bit string of
its column (qweight) or row (qzeros); of 3 bits some lie in two words.

Planar fields (GPTQModel's `gptq_p` of 3 bits, and its 5, 6 and 7 bits always; AutoRound packs these
densely) lie in blocks of 32 fields, b words: first their low bits, densely, then the higher ones.

    b   3      5      6      7          others
        2 + 1  4 + 1  4 + 2  4 + 2 + 1  not split

Zero points by convention: v1 (`gptq`) stores z - 1 modulo 2^b, v2 (`gptq_v2`, `gptq_p`) stores z.
Where GPTQModel writes v1 of 2, 4 or 8 bits, it takes the ones from the word as a whole: a field of
zero borrows from the next field, and only adding to the word as a whole gives z back. Others
lose z = 0: AutoGPTQ sets all later fields of the word, AutoRound stores z = 1.

A symmetric weight has z = 2^(b - 1) by definition. Stored zero points that say so only by the other
convention show that the label of the convention is wrong; others are refused. 3-bit v1 zero
points of GPTQModel before 6.1 had the constants of words 0 and 2 of each three swapped.

Source: GPTQModel 7.7.0, `nn_modules/qlinear/__init__.py`, `utils/planar_packing.py` and
`convert_gptq_v2_to_v1_format_module` in `utils/model.py`; AutoGPTQ 0.7.1, `qlinear_cuda.py`;
AutoRound 0.16.1, `utils/bit_packing.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantload.errors import FormatMismatch, MissingTensor, UnsupportedVariant
from quantload.loader.formats.gptq_groups import read_groups
from quantload.loader.formats.int_fields import (
    check_scales,
    group_count,
    int_scheme,
    signed,
    unsigned,
)
from quantload.loader.formats.module_leaves import ModuleLeaves
from quantload.loader.source import FLOAT_DTYPES, SourceWeight
from quantload.quant.grid import int_grid
from quantload.quant.packing import pack_dense, unpack_dense, words_dense
from quantload.quant.qtensor import Evaluation, QuantTensor

GPTQ_LEAVES = ("qweight", "qzeros", "scales", "g_idx", "weight")
GPTQ_BITS = (2, 3, 4, 5, 6, 7, 8)
# Widths of the bit planes, low bits first; other numbers of bits are one plane.
_PLANES = {3: (2, 1), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}
# Three words of 3-bit zero points of 4, as GPTQModel before 6.1 wrote them.
_SWAPPED_FOURS = (0, 0xB6DB6DB7 - (1 << 32), 0x49249249)


@dataclass(frozen=True, kw_only=True)
class GptqLayout:
    """How the weight of a module is packed.

    Args:
        bits: Bits of a field, 2 to 8.
        group_size: Columns that share a scale; -1 for all.
        symmetric: True if every zero point is 2^(bits - 1), by definition.
        zero_offset: What zero points are stored without: 1 (v1) or 0 (v2).
        is_planar: True if fields are split into bit planes; only 3, 5, 6 and 7 bits can be.
        desc_act: True if columns may be in another order than that of their groups (act-order).
        needs_groups: True if there must be a `g_idx`: the producer always writes one.
        zeros_borrow: True if the offset was taken from whole words, so that fields borrowed.
    """

    bits: int
    group_size: int
    symmetric: bool
    zero_offset: int = 1
    is_planar: bool = False
    desc_act: bool = False
    needs_groups: bool = False
    zeros_borrow: bool = False

    def __str__(self) -> str:
        kind = "symmetric" if self.symmetric else "asymmetric"
        return f"{self.bits} bits, {kind}, in groups of {self.group_size}"


def gptq_weight(
    leaves: ModuleLeaves,
    layout: GptqLayout,
    *,
    decided_by: str,
    dtype: torch.dtype | None = None,
    act_order: bool = False,
) -> SourceWeight:
    """Describe a weight [N, K] from the headers of its tensors.

    Args:
        leaves: Of the module; at least those of `GPTQ_LEAVES` that are there.
        layout: What the config says of it.
        decided_by: The entry of the config that says so.
        dtype: dtype in which the producer evaluates it; None takes that of the scales.
        act_order: True if `g_idx` is known to hold another order than that of the columns.

    Raises:
        MissingTensor: A tensor that the layout needs is not there.
        FormatMismatch: dtypes or shapes are not those of the layout.
        UnsupportedVariant: The codes are not a matrix of 32-bit words.
    """
    because = f"the config says {layout} ({decided_by})"
    needed = ["qweight", "scales"]
    needed += [] if layout.symmetric else ["qzeros"]
    needed += ["g_idx"] if layout.desc_act or layout.needs_groups else []
    leaves.require(needed, because=because)
    if "weight" in leaves:
        raise FormatMismatch(
            f"module `{leaves.module}` has both `weight` and `qweight`, expected one of them, in "
            f"`{leaves.checkpoint_name}`",
            hint="one of the two is left over from another export",
        )
    words = leaves.expect("qweight", dtypes=(torch.int32,), because=because)
    if len(words.shape) != 2:
        raise UnsupportedVariant(
            f"tensor `{words.name}` has {len(words.shape)} dimensions, expected 2, in "
            f"`{leaves.checkpoint_name}`"
        )
    rows = words.shape[1]
    columns = _columns(leaves, layout, because)
    groups = group_count(layout.group_size, columns)
    scales = leaves.expect("scales", dtypes=FLOAT_DTYPES, shapes=((groups, rows),), because=because)
    if "qzeros" in leaves:
        shape = (groups, words_dense(rows, layout.bits))
        leaves.expect("qzeros", dtypes=(torch.int32,), shapes=(shape,), because=because)
    scheme = int_scheme(
        bits=layout.bits,
        group_size=layout.group_size,
        columns=columns,
        symmetric=layout.symmetric,
        act_order=act_order,
    )
    return SourceWeight(
        module=leaves.module,
        shape=(rows, columns),
        scheme=scheme,
        encoding=f"GPTQ {'planar ' if layout.is_planar else ''}{scheme}",
        dtype=dtype or scales.dtype,
        leaves={leaf: name for leaf, name in leaves.names.items() if leaf in GPTQ_LEAVES},
        decided_by=decided_by,
    )


def _columns(leaves: ModuleLeaves, layout: GptqLayout, because: str) -> int:
    """K, which headers show to the column only by `g_idx`; checks the words of a column."""
    words = leaves["qweight"]
    num_words = words.shape[0]
    columns = num_words * 32 // layout.bits
    if "g_idx" in leaves:
        groups = leaves.expect("g_idx", dtypes=(torch.int32, torch.int64), because=because)
        if len(groups.shape) != 1:
            raise FormatMismatch(
                f"tensor `{groups.name}` has shape `{groups.shape}`, expected (K,), in "
                f"`{leaves.checkpoint_name}`"
            )
        columns = groups.shape[0]
    elif layout.group_size > 0 and columns % layout.group_size:
        raise MissingTensor(
            f"tensor `{leaves.module}.g_idx` is missing in `{leaves.checkpoint_name}`: "
            f"`{words.name}` of shape `{words.shape}` does not tell how many columns there are; "
            f"{because}"
        )
    fits = words_dense(columns, layout.bits) == num_words
    if min(columns, words.shape[1]) < 1 or not fits or (layout.is_planar and columns % 32):
        raise FormatMismatch(
            f"tensor `{words.name}` has shape `{words.shape}`, expected "
            f"{words_dense(columns, layout.bits)} rows for {columns} columns of {layout.bits} "
            f"bits, in `{leaves.checkpoint_name}`",
            hint=because,
        )
    return columns


def decode_gptq(
    parts: Mapping[str, Tensor],
    weight: SourceWeight,
    layout: GptqLayout,
    *,
    checkpoint_name: str,
    warn: Callable[[str], None],
) -> QuantTensor:
    """Turn the tensors of a module into its weight.

    Args:
        parts: Tensors by leaf, as stored: those that `weight.leaves` names.
        weight: From `gptq_weight` with the same layout.
        layout: How they are packed.
        checkpoint_name: For messages.
        warn: Told what the user should know, in the same words for every module.

    Returns:
        [N, K] signed codes, scale and zero [N, G], evaluated in `weight.dtype`.

    Raises:
        NonFiniteWeight: A scale is NaN or infinity.
        FormatMismatch: Zero points, groups or idle bits are not those of the layout.
    """
    rows, columns = weight.shape
    words = _transposed(parts["qweight"])
    _check_idle_bits(words, weight, layout, checkpoint_name)
    codes = signed(_unpack(words, layout, columns), layout.bits)
    scale = _transposed(parts["scales"])
    check_scales(scale, codes, weight.leaves["scales"], checkpoint_name)
    zero = None
    if "qzeros" in parts:
        fields = _zero_fields(parts["qzeros"], layout, rows)
        if layout.symmetric:
            where = f"tensor `{weight.leaves['qzeros']}` in `{checkpoint_name}`"
            _check_symmetric(parts["qzeros"], fields, layout, where, warn)
        else:
            _warn_of_wraps(fields, layout, warn)
            zero = _transposed(signed(fields, layout.bits))
    group_of = None
    if "g_idx" in parts:
        name, count = weight.leaves["g_idx"], parts["scales"].shape[0]
        size = layout.group_size
        group_of = read_groups(parts["g_idx"], size, name, checkpoint_name, count=count)
    if group_of is not None and not layout.desc_act:
        warn("columns are in another order than that of their groups although `desc_act` is false")
    return QuantTensor(
        grid=int_grid(layout.bits),
        codes=codes,
        scale=scale,
        zero=zero,
        block=(1, columns if layout.group_size == -1 else layout.group_size),
        group_of=group_of,
        evaluation=Evaluation(weight.dtype),
    )


def _check_idle_bits(
    words: Tensor, weight: SourceWeight, layout: GptqLayout, checkpoint_name: str
) -> None:
    """Refuse codes after the last column: then there are more columns than `g_idx` has groups."""
    columns = weight.shape[1]
    count = words.shape[1] * 32 // layout.bits
    if count > columns and bool(_unpack(words, layout, count)[:, columns:].any()):
        raise FormatMismatch(
            f"tensor `{weight.leaves['qweight']}` has codes for more than {columns} columns, the "
            f"length of `{weight.leaves['g_idx']}`, in `{checkpoint_name}`"
        )


def _zero_fields(words: Tensor, layout: GptqLayout, rows: int) -> Tensor:
    """[G, ceil(N * b / 32)] int32 to the zero points [G, N] uint8."""
    if layout.zero_offset and layout.zeros_borrow:
        ones = sum(1 << shift for shift in range(0, 32, layout.bits))
        wrapped = (words.to(torch.int64) + ones) & 0xFFFFFFFF
        words = torch.where(wrapped >= 1 << 31, wrapped - (1 << 32), wrapped).to(torch.int32)
        return _unpack(words, layout, rows)
    fields = _unpack(words, layout, rows)
    return (fields + layout.zero_offset) & ((1 << layout.bits) - 1)


def _check_symmetric(
    words: Tensor,
    fields: Tensor,
    layout: GptqLayout,
    where: str,
    warn: Callable[[str], None],
) -> None:
    """Accept zero points of a symmetric weight, also by the other convention or as GPTQModel erred.

    Raises:
        FormatMismatch: They are something else.
    """
    middle = 1 << (layout.bits - 1)
    if bool((fields == middle).all()):
        return
    other = replace(layout, zero_offset=1 - layout.zero_offset)
    if bool((_zero_fields(words, other, fields.shape[1]) == middle).all()):
        said, found = ("v1", "v2") if layout.zero_offset else ("v2", "v1")
        warn(
            f"symmetric zero points are stored by convention {found} although the config says "
            f"{said}; they are read as {middle}"
        )
        return
    if layout.bits == 3 and layout.zero_offset and not layout.is_planar:
        count = -(-words.shape[1] // 3)
        fours = torch.tensor(_SWAPPED_FOURS * count, dtype=torch.int32, device=words.device)
        swapped = fours[: words.shape[1]]
        if bool((words == swapped).all()):
            return
    raise FormatMismatch(
        f"zero points are not those of a symmetric weight of {layout.bits} bits: found values from "
        f"{int(fields.min())} to {int(fields.max())}, expected {middle}, {where}",
        hint="the config says `sym: true`; its rules may not be the ones that the files were "
        "written with",
    )


def _warn_of_wraps(fields: Tensor, layout: GptqLayout, warn: Callable[[str], None]) -> None:
    if layout.zero_offset and not layout.zeros_borrow and not bool(fields.all()):
        warn(
            "some zero points are 0, which most tools that write convention v1 damage; compare the "
            "model with its full-precision original"
        )


def _unpack(words: Tensor, layout: GptqLayout, count: int) -> Tensor:
    """[R, W] int32 to [R, count] uint8."""
    if not layout.is_planar or layout.bits not in _PLANES:
        return unpack_dense(words, layout.bits, count)
    blocks = words.reshape(words.shape[0], -1, layout.bits)
    fields = torch.zeros(words.shape[0], count, dtype=torch.uint8, device=words.device)
    start = 0
    for width in _PLANES[layout.bits]:
        plane = blocks[:, :, start : start + width].flatten(1)
        fields |= unpack_dense(plane, width, count) << start
        start += width
    return fields


def encode_gptq(tensor: QuantTensor, layout: GptqLayout) -> dict[str, Tensor]:
    """Turn a weight [N, K] into the tensors of a module; undoes `decode_gptq`.

    Args:
        tensor: On signed integers of `layout.bits`, in its groups; columns in any order.
        layout: Not planar. Where fields do not borrow, a zero point below the offset wraps, which
            tools read in different ways.
    """
    assert not layout.is_planar, "planes are only read"
    columns, bits = tensor.shape[1], layout.bits
    zero = torch.zeros_like(tensor.scale, dtype=torch.int8) if tensor.zero is None else tensor.zero
    fields = _transposed(unsigned(zero, bits))
    if layout.zeros_borrow:
        words = pack_dense(fields, bits).to(torch.int64) & 0xFFFFFFFF
        zeros = (words - sum(1 << shift for shift in range(0, 32, bits))).to(torch.int32)
    else:
        zeros = pack_dense((fields - layout.zero_offset) & ((1 << bits) - 1), bits)
    groups = tensor.group_of
    if groups is None:
        groups = (torch.arange(columns) // tensor.block[1]).to(torch.int32)
    return {
        "qweight": _transposed(pack_dense(tensor.codes, bits, signed=True)),
        "qzeros": zeros,
        "scales": _transposed(tensor.scale),
        "g_idx": groups,
    }


def _transposed(tensor: Tensor) -> Tensor:
    # NOTE: `contiguous` keeps the odd strides of a column of one element; packing views bytes.
    return tensor.T.clone(memory_format=torch.contiguous_format)


__all__ = [
    "GPTQ_BITS",
    "GPTQ_LEAVES",
    "GptqLayout",
    "decode_gptq",
    "encode_gptq",
    "gptq_weight",
]
