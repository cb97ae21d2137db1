"""compressed-tensors: the tensors of one module, their dtypes and shapes, by format and scheme."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from quantload.errors import FormatMismatch, UnsupportedVariant
from quantload.loader.checkpoint import Checkpoint
from quantload.loader.formats.compressed_tensors_arguments import MXFP4, MXFP6, NVFP4, PACKED
from quantload.loader.formats.compressed_tensors_config import Group
from quantload.loader.formats.module_leaves import ModuleLeaves
from quantload.loader.source import FLOAT_DTYPES, SourceWeight
from quantload.quant.packing import words_dense, words_padded
from quantload.quant.scheme import Scheme, WeightScheme

BYTES = (NVFP4, MXFP4, MXFP6)  # formats that pack codes into uint8
_EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)
_ONE = ((), (1,), (1, 1))  # shapes of a single number


def weight_of(scheme: Scheme) -> WeightScheme:
    """Return the weight scheme of a quantized weight."""
    assert scheme.weight is not None, "only quantized weights are described"
    return scheme.weight


def checked_weight(
    leaves: ModuleLeaves, group: Group, read_shape: Callable[[str], tuple[int, int]]
) -> tuple[tuple[int, int], Scheme]:
    """Check the headers of a module against its group.

    Args:
        leaves: Tensors of the module.
        group: Its quantized group.
        read_shape: Reads the two numbers of a `weight_shape` tensor.

    Returns:
        (N, K), and the scheme as it is stored.

    Raises:
        MissingTensor: The format needs a tensor that is not there.
        FormatMismatch: A dtype or a shape does not fit.
        UnsupportedVariant: The weight has not two dimensions.
    """
    bits = weight_of(group.scheme).grid.bits
    because = f"config group `{group.name}` says {bits} bits, {group.scheme}, `{group.format}`"
    _check_leaves(leaves, group, because)
    shape = _checked_codes(leaves, group, read_shape, because)
    scheme = _checked_scale(leaves, group, shape, because)
    _check_zero_point(leaves, group, scheme, shape, because)
    scheme = _checked_groups(leaves, scheme, shape, because)
    _check_input(leaves, scheme, because)
    return shape, scheme


def _check_leaves(leaves: ModuleLeaves, group: Group, because: str) -> None:
    is_packed = group.format == PACKED or group.format in BYTES
    needed = ["weight_packed" if is_packed else "weight", "weight_scale"]
    needed += ["weight_shape"] if group.format == PACKED else []
    needed += ["weight_global_scale"] if group.format == NVFP4 else []
    needed += [] if weight_of(group.scheme).symmetric else ["weight_zero_point"]
    leaves.require(needed, because=because)
    if "weight" in leaves and "weight_packed" in leaves:
        raise FormatMismatch(
            f"module `{leaves.module}` has both `weight` and `weight_packed`, expected only "
            f"`{needed[0]}` in format `{group.format}`, in `{leaves.checkpoint_name}`",
            hint="one of the two is left over from another export",
        )
    if "weight_global_scale" in leaves and group.format != NVFP4:
        raise UnsupportedVariant(
            f"tensor `{leaves['weight_global_scale'].name}` is not read in format "
            f"`{group.format}`, in `{leaves.checkpoint_name}`"
        )


# -- codes -----------------------------------------------------------------------------------------


def _checked_codes(
    leaves: ModuleLeaves,
    group: Group,
    read_shape: Callable[[str], tuple[int, int]],
    because: str,
) -> tuple[int, int]:
    weight = weight_of(group.scheme)
    storage = weight.grid.storage
    if group.format == PACKED or group.format in BYTES:
        storage = torch.int32 if group.format == PACKED else torch.uint8
    leaf = "weight_packed" if "weight_packed" in leaves else "weight"
    codes = leaves.expect(leaf, dtypes=(storage,), because=because)
    if len(codes.shape) != 2:
        raise UnsupportedVariant(
            f"tensor `{codes.name}` has {len(codes.shape)} dimensions, expected 2, in "
            f"`{leaves.checkpoint_name}`"
        )
    shape = codes.shape[0], codes.shape[1]
    if group.format == PACKED:
        shape = _packed_shape(leaves, group, read_shape, because)
    elif group.format in BYTES:
        shape = codes.shape[0], codes.shape[1] * 8 // weight.grid.bits
        size = weight.group_size or 1
        if shape[1] % size or shape[1] * weight.grid.bits != codes.shape[1] * 8:
            raise FormatMismatch(
                f"tensor `{codes.name}` has {codes.shape[1]} bytes a row, expected a multiple of "
                f"the {size * weight.grid.bits // 8} of a group, in `{leaves.checkpoint_name}`",
                hint=because,
            )
    if 0 in shape:
        raise FormatMismatch(f"tensor `{codes.name}` is empty, in `{leaves.checkpoint_name}`")
    return shape


def _packed_shape(
    leaves: ModuleLeaves,
    group: Group,
    read_shape: Callable[[str], tuple[int, int]],
    because: str,
) -> tuple[int, int]:
    entry = leaves.expect(
        "weight_shape", dtypes=(torch.int64, torch.int32), shapes=((2,),), because=because
    )
    rows, columns = read_shape(entry.name)
    packed, bits = leaves["weight_packed"], weight_of(group.scheme).grid.bits
    if (
        min(rows, columns) < 1
        or packed.shape[0] != rows
        or packed.shape[1] not in (words_dense(columns, bits), words_padded(columns, bits))
    ):
        raise FormatMismatch(
            f"tensor `{packed.name}` has shape `{packed.shape}`, expected "
            f"`({rows}, {words_dense(columns, bits)})` for a {bits}-bit weight of "
            f"`({rows}, {columns})`, in `{leaves.checkpoint_name}`",
            hint=because,
        )
    return rows, columns


def is_padded(words: int, columns: int, bits: int, version: tuple[int, ...] | None) -> bool:
    """True if the fields of a row are packed as before compressed-tensors 0.18.

    Args:
        words: Words of a row.
        columns: Fields of a row.
        bits: Bits of a field.
        version: Version of the config, which decides where both layouts take as many words.

    Raises:
        UnsupportedVariant: Both do, they differ, and there is no version.
    """
    dense, padded = words_dense(columns, bits), words_padded(columns, bits)
    if dense != padded or words == 1 or 32 % bits == 0:
        return words != dense
    if version is None:
        raise UnsupportedVariant(
            f"{columns} columns of {bits} bits take {words} words in both layouts, that of "
            "compressed-tensors before 0.18 and the present one",
            hint="add the `version` of compressed-tensors to the quantization config",
        )
    return version < (0, 18)


def refuse_mixed_packing(checkpoint: Checkpoint, weights: Mapping[str, SourceWeight]) -> None:
    """Refuse weights in both layouts of packed fields: one tool writes all in one of them.

    A row in the old layout that lost its last word may look like one in the new.

    Args:
        checkpoint: An open checkpoint.
        weights: What was read of it, by module.

    Raises:
        FormatMismatch: Some are in one layout, some in the other.
    """
    modules: dict[bool, str] = {}
    for module, weight in weights.items():
        if weight.scheme is None or not weight.encoding.startswith(PACKED):
            continue
        bits = weight_of(weight.scheme).grid.bits
        words = checkpoint.tensors[weight.leaves["weight_packed"]].shape[1]
        dense, padded = words_dense(weight.shape[1], bits), words_padded(weight.shape[1], bits)
        if dense != padded:
            modules.setdefault(words == padded, module)
    if len(modules) > 1:
        raise FormatMismatch(
            f"the codes of `{modules[True]}` are packed as before compressed-tensors 0.18, those "
            f"of `{modules[False]}` as since then, in `{checkpoint.name}`",
            hint="a tensor is truncated, or the files are of two exports",
        )


# -- scales ----------------------------------------------------------------------------------------


def scale_shape(weight: WeightScheme, shape: tuple[int, int]) -> tuple[int, int]:
    """(R, G): blocks of rows and groups of columns, partial ones included."""
    block = weight.block_of(*shape)
    return -(-shape[0] // max(1, block[0])), -(-shape[1] // max(1, block[1]))


def _checked_scale(
    leaves: ModuleLeaves, group: Group, shape: tuple[int, int], because: str
) -> Scheme:
    """Return the scheme; one scale a row may stand where the config says one a tensor."""
    scheme, weight = group.scheme, weight_of(group.scheme)
    kinds = {"float": FLOAT_DTYPES, "e8m0": _EXPONENTS, "e4m3": (torch.float8_e4m3fn,)}
    scale = leaves.expect("weight_scale", dtypes=kinds[weight.scale], because=because)
    if group.format == NVFP4:
        floats = (torch.float32,)
        leaves.expect("weight_global_scale", dtypes=floats, shapes=_ONE, because=because)
    expected = scale_shape(weight, shape)
    if scale.shape in _spellings(expected):
        return scheme
    if weight.granularity == "tensor" and scale.shape in _spellings((shape[0], 1)):
        return replace(scheme, weight=replace(weight, granularity="channel"))
    raise FormatMismatch(
        f"tensor `{scale.name}` has shape `{scale.shape}`, expected `{expected}` for a weight of "
        f"`{shape}` in scheme `{scheme}`, in `{leaves.checkpoint_name}`",
        hint=because,
    )


def _spellings(shape: tuple[int, int]) -> set[tuple[int, ...]]:
    """Shapes in which scales [R, G] are stored; axes of one element may be left out."""
    allowed: set[tuple[int, ...]] = {shape}
    if shape[1] == 1:
        allowed.add((shape[0],))
    if shape == (1, 1):
        allowed.add(())
    return allowed


# -- zero points, groups, inputs -------------------------------------------------------------------


def packs_zero_points(weight: WeightScheme) -> bool:
    """True if pack-quantized weights of this scheme have packed zero points."""
    return weight.granularity in ("group", "channel")


def _check_zero_point(
    leaves: ModuleLeaves, group: Group, scheme: Scheme, shape: tuple[int, int], because: str
) -> None:
    if "weight_zero_point" not in leaves:
        return
    weight, entry = weight_of(scheme), leaves["weight_zero_point"]
    blocks, groups = scale_shape(weight, shape)
    shapes = _spellings((blocks, groups))
    dtypes: tuple[torch.dtype, ...] = (torch.int8,)
    if not weight.grid.is_integer:
        dtypes = (weight.grid.storage, torch.int8, torch.float8_e4m3fn)
    elif group.format == PACKED:
        dtypes = (torch.int8, torch.int32)
    if weight.symmetric:  # they must be all zero, which is seen when the weight is read
        dtypes += (torch.uint8, *FLOAT_DTYPES)
    if group.format == PACKED and entry.dtype == torch.int32:
        bits, packed = weight.grid.bits, leaves["weight_packed"].shape[1]
        counts = {words_dense, words_padded} if packed == words_dense(shape[1], bits) else set()
        counts |= {words_padded} if packed == words_padded(shape[1], bits) else set()
        shapes = {(count(blocks, bits), groups) for count in counts}
    leaves.expect("weight_zero_point", dtypes=dtypes, shapes=shapes, because=because)


def _checked_groups(
    leaves: ModuleLeaves, scheme: Scheme, shape: tuple[int, int], because: str
) -> Scheme:
    """Return the scheme with what `weight_g_idx` says."""
    weight = weight_of(scheme)
    if "weight_g_idx" not in leaves:
        if weight.act_order:
            leaves.require(["weight_g_idx"], because=because)
        return scheme
    index = leaves.expect(
        "weight_g_idx",
        dtypes=(torch.int32, torch.int64),
        shapes=((shape[1],),),
        because=because,
    )
    if weight.granularity != "group" or weight.scale != "float":
        raise FormatMismatch(
            f"tensor `{index.name}` orders columns, but `{scheme}` has no groups of them, in "
            f"`{leaves.checkpoint_name}`",
            hint=because,
        )
    return replace(scheme, weight=replace(weight, act_order=True))


def _check_input(leaves: ModuleLeaves, scheme: Scheme, because: str) -> None:
    """Check the fixed scales of an input."""
    input = scheme.input
    if input is not None and not input.dynamic:
        leaves.require(["input_scale"], because=because)
        leaves.require([] if input.symmetric else ["input_zero_point"], because=because)
    if input is not None and input.scale == "e4m3":
        leaves.require(["input_global_scale"], because=because)
    for leaf in ("input_scale", "input_global_scale"):
        if leaf in leaves:
            leaves.expect(leaf, dtypes=FLOAT_DTYPES, shapes=_ONE, because=because)
    if "input_zero_point" in leaves:
        dtypes: tuple[torch.dtype, ...] = (torch.int8, torch.float8_e4m3fn)
        if input is not None and not input.symmetric:  # else they are zeros, and not used
            dtypes = (input.grid.storage,)
        leaves.expect("input_zero_point", dtypes=dtypes, shapes=_ONE, because=because)
